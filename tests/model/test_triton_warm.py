"""Warm-up launches every variant of every Triton kernel that steps need."""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np
import pytest
import torch
from chatcache_kernels import triton
from triton.runtime.interpreter import InterpretedFunction

from chatcache.model import static_steps
from chatcache.model.cuda_graphs import capture_sizes
from chatcache.model.runner import AsyncLaunch
from tests.model.lazy_streams import lazy_streams
from tests.model.lives import NUM_SLOTS, Life, live, make_runner

pytestmark = pytest.mark.slow

SEED = int(os.environ["CHATCACHE_TEST_SEED"])


def form(kernel: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[str, ...]:
    """Return the properties of a launch that make Triton compile a new variant."""
    signature = inspect.signature(kernel.fn)
    options = {name: value for name, value in given.items() if name not in signature.parameters}
    bound = signature.bind(*args, **{name: value for name, value in given.items() if name not in options})
    facts = []
    for name, value in bound.arguments.items():
        if signature.parameters[name].annotation != inspect.Parameter.empty:
            facts.append(value)
        elif name in (kernel.kwargs.get("do_not_specialize") or ()):
            facts.append(str(getattr(value, "dtype", type(value))))
        elif isinstance(value, torch.Tensor):
            free = name in (kernel.kwargs.get("do_not_specialize_on_alignment") or ())
            facts.append((value.dtype, free or value.data_ptr() % 16 == 0))
        elif isinstance(value, int):
            facts.append((value == 1, value % 16 == 0, abs(value) < 2**31))
        else:
            facts.append(type(value))
    return kernel.fn.__name__, *map(str, facts), str(sorted(options.items()))


@pytest.mark.interpreter  # its launches are read
def test_no_kernel_compiles_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatcache_kernels.work_list.SPLIT_TOKENS", 16)
    monkeypatch.setattr(static_steps, "SPLIT_TOKENS", 16)
    launched: set[tuple[str, ...]] = set()
    launch = InterpretedFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
        launched.add(form(kernel, args, given))
        return launch(kernel, *args, grid=grid, warmup=warmup, **given)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    runner = make_runner(AsyncLaunch(capture_sizes(NUM_SLOTS)), lazy_streams(False, False), triton)
    runner.warm_up()
    warm = set(launched)
    live(make_runner(), runner, Life(np.random.default_rng(SEED), decode_only=0.6), 20)
    assert {"paged_attention_kernel", "merge_states_kernel", "copy_words_kernel", "write_pages_kernel"} <= {
        str(one[0]) for one in launched
    }
    assert not launched - warm, f"seed {SEED}: " + "\n".join(map(str, sorted(launched - warm, key=str)))
