"""Kernel tests run on one thread, so that they stay quick on a busy machine; the ones about threads ask for more.

Triton tests run compiled where there is a GPU and interpreted elsewhere; the root `conftest.py` chooses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Return the device that Triton kernels run on here: `cuda`, or `cpu` under the interpreter."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
