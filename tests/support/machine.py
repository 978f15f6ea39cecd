"""Requirements of tests on the machine: hardware and system features, one pytest marker each.

A test whose requirement this machine does not meet is deselected, not skipped: under CI a skip is a failure, because
the gate installs every program that tests need, but it cannot install a GPU or a CPU feature.
"""

from __future__ import annotations

import functools
import mmap
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class MarkedTest(Protocol):
    """The part of `pytest.Item` that is read here."""

    def get_closest_marker(self, name: str) -> object | None:
        """Return the marker of this name, if any."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """What is missing where a marked test cannot run, and the check; checked only if a collected test asks for it."""

    missing: str
    is_met: Callable[[], bool]


@functools.cache
def has_gpu() -> bool:
    """Return whether torch can use a CUDA device. Looks for device files first: importing torch takes seconds."""
    devices = Path("/dev")
    if not any(devices.glob("nvidia[0-9]*")) and not (devices / "dxg").exists():
        return False
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _has_amx() -> bool:
    from chatcache_kernels.cpu.bf16 import has_amx

    return has_amx()


def _has_avx512_bf16() -> bool:
    from chatcache_kernels.cpu.bf16 import has_avx512_bf16

    return has_avx512_bf16()


def _has_bf16_products() -> bool:
    import torch

    from chatcache.model.linear import packed_linear

    return packed_linear(torch.zeros(64, 64, dtype=torch.bfloat16), None) is not None


def _has_byte_tables() -> bool:
    from chatcache_kernels.cpu.int8 import has_avx512_vbmi

    return has_avx512_vbmi()


def _has_int16_products() -> bool:
    from chatcache_kernels.cpu.int16 import has_int16_products

    return has_int16_products()


def _has_interpreter() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _can_trace() -> bool:
    """Return False only where strace is installed and forbidden; without strace, the tests skip with a message."""
    strace = shutil.which("strace")
    return strace is None or not subprocess.run([strace, "-qqf", "true"], capture_output=True).returncode


def _is_linux() -> bool:
    return sys.platform == "linux" and Path("/proc/self/statm").exists()


def _can_populate() -> bool:
    """Return whether the system has MADV_POPULATE_WRITE (Linux 5.14) and the page map that shows its effect."""
    if not Path("/proc/self/pagemap").exists():
        return False
    try:
        mmap.mmap(-1, mmap.PAGESIZE).madvise(23)
    except OSError:
        return False
    return True


REQUIREMENTS: Mapping[str, Requirement] = {
    "gpu": Requirement("no CUDA device", has_gpu),
    "interpreter": Requirement("Triton kernels are compiled here; tests/gpu runs these cases", _has_interpreter),
    "requires_amx": Requirement("the CPU has no AMX", _has_amx),
    "requires_avx512_bf16": Requirement("the CPU has no AVX512-BF16", _has_avx512_bf16),
    "requires_bf16_products": Requirement("oneDNN has no bfloat16 products on the CPU", _has_bf16_products),
    "requires_vbmi": Requirement("the CPU has no AVX512-VBMI", _has_byte_tables),
    "requires_int16": Requirement("the CPU has neither AVX512-VNNI nor AVX2", _has_int16_products),
    "traced": Requirement("the system forbids strace", _can_trace),
    "requires_populate": Requirement("the system has no MADV_POPULATE_WRITE", _can_populate),
    "linux": Requirement("the system is not Linux", _is_linux),
}


def unmet_requirements(
    items: Iterable[MarkedTest], requirements: Mapping[str, Requirement] = REQUIREMENTS
) -> tuple[set[int], Counter[str]]:
    """Return the `id` of each item that cannot run here, and how many each marker excludes."""
    excluded: set[int] = set()
    counts: Counter[str] = Counter()
    met: dict[str, bool] = {}
    for item in items:
        for marker, requirement in requirements.items():
            if item.get_closest_marker(marker) is None:
                continue
            if marker not in met:
                met[marker] = requirement.is_met()
            if not met[marker]:
                excluded.add(id(item))
                counts[marker] += 1
                break  # counted once, under the first reason
    return excluded, counts


def describe_unmet(counts: Mapping[str, int]) -> list[str]:
    """Return one line for each marker: how many tests did not run, and why."""
    return [f"{counts[marker]} {marker}: {REQUIREMENTS[marker].missing}" for marker in REQUIREMENTS if marker in counts]
