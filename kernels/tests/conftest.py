"""Fixtures of the kernel tests. Tests run on one torch thread unless they set more.

Triton tests run compiled on a GPU and interpreted elsewhere; the root `conftest.py` chooses.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread, so that tests stay fast on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Draw the same numbers whichever tests have run before; `fresh_random` draws others in every run."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Return the device that Triton kernels run on here: `cuda`, or `cpu` under the interpreter."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture
def needs_fp8(triton_device: str) -> None:
    """Skip on GPUs without FP8 numbers."""
    if triton_device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialised torch memory with NaN or the largest integer, to expose missing writes."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: object, **options: object) -> torch.Tensor:
        memory = allocate(*args, **options)
        return memory.fill_(float("nan") if memory.is_floating_point() else torch.iinfo(memory.dtype).max)

    return poisoned


@pytest.fixture
def fresh_random() -> int:
    """Seed all generators from CHATCACHE_TEST_SEED and return the seed.

    A failing run prints the seed, and setting the variable replays it.
    """
    seed = int(os.environ["CHATCACHE_TEST_SEED"])
    torch.manual_seed(seed)
    random.seed(seed)
    return seed
