"""Pytest plugin: interpret Triton kernels in the form that a GPU launches, and record these forms.

    TRITON_INTERPRET=1 GPU_FORMS=90:FILE python -m pytest -p bench.record_launches kernels/tests -k triton

GPU_FORMS: a compute capability (90 for 9.0), whose tile configurations are used instead of the interpreter's, and the
file that gets a JSON line for each form (none without a file). Sampling kernels handle one draw per program, as on a
GPU. `aot --tests` compiles the recorded forms.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from chatcache_kernels.triton import attention, sampling
from chatcache_kernels.triton.configs import Chip
from chatcache_kernels.triton.variants import Variant, specialize
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_recorded: dict[str, None] = {}  # JSON lines, each once


def pytest_configure() -> None:
    """Use the configurations of a GPU, and record launches.

    Raises: pytest.UsageError without a compute capability in GPU_FORMS.
    """
    arch = os.environ.get("GPU_FORMS", "").partition(":")[0]
    if not arch.isdigit():
        raise pytest.UsageError("GPU_FORMS must be a compute capability and a file, such as 90:forms.jsonl")
    chip = Chip(int(arch) // 10, 3)
    vars(attention)["get_chip"] = lambda device: chip
    (launches,) = (field.default for field in fields(sampling.DrawBatch) if field.name == "launches")
    if not isinstance(launches, sampling.LaunchConfig):
        raise TypeError("draws have no default launch configuration")
    object.__setattr__(launches, "rows", 1)
    sampling.LaunchConfig.__init__.__defaults__ = tuple(getattr(launches, each.name) for each in fields(launches))
    launch = InterpretedFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
        variant = specialize(JITFunction(kernel.fn, **kernel.kwargs), args, given)
        values = variant.signature, variant.constexprs, variant.options, variant.aligned
        _recorded[json.dumps([kernel.fn.__module__, kernel.fn.__name__, *values])] = None
        return launch(kernel, *args, grid=grid, warmup=warmup, **given)

    InterpretedFunction.run = run


def pytest_unconfigure() -> None:
    """Write the recorded forms."""
    file = os.environ.get("GPU_FORMS", "").partition(":")[2]
    if file:
        Path(file).write_text("".join(f"{line}\n" for line in _recorded))


def read_recorded(file: Path) -> Iterator[Variant]:
    """Yield the variants recorded in `file`."""
    for line in file.read_text().splitlines():
        module, name, signature, constexprs, options, aligned = json.loads(line)
        yield Variant(getattr(importlib.import_module(module), name), signature, constexprs, options, tuple(aligned))
