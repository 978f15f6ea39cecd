"""A program's jobs run in order, and no thread starts one before all have ended the last."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from chatcache_kernels.cpu import launch, megakernel
from chatcache_kernels.cpu.megakernel import KernelCalls, KernelQueue

NUM_STEPS, NUM_ROWS, NUM_WORDS = 40, 3, 20_000  # rows long enough for a thread to run ahead of one that copies


def chain(buffers: torch.Tensor, orders: torch.Tensor) -> tuple[KernelQueue, KernelCalls]:
    """Return a program whose step i + 1 reads, in a shuffled order, what step i wrote."""
    copies = KernelCalls(
        megakernel.gather_kernel(), megakernel.GATHER_JOB, NUM_STEPS, source=[each.data_ptr() for each in buffers[:-1]],
        out=[each.data_ptr() for each in buffers[1:]], rows=[each.data_ptr() for each in orders],
        num_rows=NUM_ROWS, words=NUM_WORDS,
    )  # fmt: skip
    return KernelQueue([(copies, index) for index in range(NUM_STEPS)]), copies


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_wait_for_each_other(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    orders = torch.stack([torch.randperm(NUM_ROWS) for _ in range(NUM_STEPS)])
    buffers = torch.zeros(NUM_STEPS + 1, NUM_ROWS, NUM_WORDS, dtype=torch.int64)
    copies, jobs = chain(buffers, orders)
    expected = torch.arange(NUM_ROWS * NUM_WORDS).view(NUM_ROWS, NUM_WORDS)
    for order in orders:
        expected = expected[order]
    for _ in range(5):
        buffers.fill_(-1)
        buffers[0] = torch.arange(NUM_ROWS * NUM_WORDS).view(NUM_ROWS, NUM_WORDS)
        copies.run(num_threads)
        assert torch.equal(buffers[-1], expected)
    assert (jobs.records["next_thread"] == 0).all()  # a copying thread needs no number


def test_a_team_smaller_than_asked_for_is_enough() -> None:
    script = """
import torch
from chatcache_kernels.cpu import megakernel
from chatcache_kernels.cpu.megakernel import KernelCalls, KernelQueue
a, b = torch.arange(64), torch.zeros(64, dtype=torch.int64)
order = torch.arange(8).flip(0)
jobs = KernelCalls(megakernel.gather_kernel(), megakernel.GATHER_JOB, 1, source=a.data_ptr(), out=b.data_ptr(),
                   rows=order.data_ptr(), num_rows=8,
                   words=8)
KernelQueue([(jobs, 0)]).run(4)
assert torch.equal(b.view(8, 8), a.view(8, 8).flip(0))
"""
    path = os.pathsep.join(p for p in sys.path if p)
    limited = {**os.environ, "PYTHONPATH": path, "OMP_THREAD_LIMIT": "2", "OMP_DYNAMIC": "true"}
    done = subprocess.run([sys.executable, "-c", script], env=limited, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_without_an_openmp_runtime_one_thread_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (launch._parallel_entry, launch.omp_function, megakernel._queue_kernel, megakernel.gather_kernel):
        cached.cache_clear()
    monkeypatch.setattr(launch, "omp_function", lambda name: 0)
    monkeypatch.setattr(megakernel, "omp_function", lambda name: 0)
    try:
        buffers = torch.zeros(NUM_STEPS + 1, NUM_ROWS, NUM_WORDS, dtype=torch.int64)
        buffers[0] = torch.arange(NUM_ROWS * NUM_WORDS).view(NUM_ROWS, NUM_WORDS)
        orders = torch.arange(NUM_ROWS).repeat(NUM_STEPS, 1)
        copies, _ = chain(buffers, orders)
        copies.run(4)
        assert torch.equal(buffers[-1], buffers[0])
    finally:
        for again in (launch._parallel_entry, megakernel._queue_kernel, megakernel.gather_kernel):
            again.cache_clear()
