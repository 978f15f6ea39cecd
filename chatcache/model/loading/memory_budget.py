"""Memory budget: bytes for KV pages next to weights, steps and captured graphs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from chatcache.model.attention import AttentionBackend, Network, allocate_stores
from chatcache.model.eager import EagerRunner
from chatcache.model.page_tables import PageTables
from chatcache.model.sampling.sampler import TokenSampler
from chatcache.model.states import make_states
from chatcache.model.static_steps import StepSize, WorkListBuffers
from chatcache.types.plan import I32, Draws, LogitEdit, Rows, StepPlan, edit_table

CPU_KV_SHARE = 0.25
_CONTROL_GROUP = Path("/sys/fs/cgroup")
CPU_KV_MAX_BYTES = 4 * 1024**3
SLACK_SHARE = 0.04  # of free memory: fragmentation, kernels, other processes
GRAPH_BYTES = 4 << 20  # driver memory per captured step

log = logging.getLogger(__name__)


class MemoryGauge(Protocol):
    """Measures the memory of a device."""

    def free_bytes(self) -> int:
        """Return the free memory of the device."""
        ...

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Run `work` and return the peak of additionally reserved memory."""
        ...


class CudaMemoryGauge:
    """Measures with the CUDA driver and torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_bytes(self, work: Callable[[], None]) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


@dataclass(frozen=True, slots=True)
class Budget:
    """Use of a device's free memory after the weights are loaded, in bytes."""

    free_bytes: int
    step_bytes: int
    graph_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Return the bytes left for KV pages, at least 0."""
        return max(0, int(self.free_bytes * (1 - SLACK_SHARE)) - self.step_bytes - self.graph_bytes)

    def __str__(self) -> str:
        free, step, graphs = (
            f"{num_bytes / 2**30:.2f} GiB" for num_bytes in (self.free_bytes, self.step_bytes, self.graph_bytes)
        )
        return f"{free} are free once the weights are loaded, the largest step takes {step}, captured steps {graphs}"


def measure_budget(
    gauge: MemoryGauge,
    network: Network,
    kernels: AttentionBackend,
    sampler: TokenSampler,
    *,
    page_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_graphs: int,
    max_captured_tokens: int = 0,
) -> Budget:
    """Run the largest step that a scheduler may plan, and measure its memory.

    Captured steps share one memory pool, which holds what the largest of them needs: no more than the measured step,
    plus the partial results of attention. Their logits are in one more buffer. `max_captured_tokens`: of a captured
    step with prompts.
    """
    free_bytes = gauge.free_bytes()
    step = _LargestStep(network, kernels, sampler, page_size, max_model_len, max_num_seqs, max_num_batched_tokens)
    step_bytes = gauge.peak_bytes(step.run)
    graph_bytes = 0
    if num_graphs:
        geometry = network.geometry
        num_tokens = free_bytes // geometry.page_bytes(page_size) * page_size
        sizes = [StepSize.decode(max_num_seqs)]
        if max_captured_tokens:
            sizes.append(StepSize.prompts(max_captured_tokens, max_num_seqs))
        work_buffers = [
            WorkListBuffers.sized_for(size, form.group, max_model_len, num_tokens)
            for size in sizes
            for form in geometry.forms
        ]
        states = 4 * max(buffers.num_states for buffers in work_buffers) * geometry.query_elements
        logits = max_num_seqs * geometry.vocab_size * geometry.dtype.itemsize
        graph_bytes = step_bytes + states + logits + num_graphs * GRAPH_BYTES
    return Budget(free_bytes, step_bytes, graph_bytes)


class _LargestStep:
    """One long prompt, and one new token for every other branch, all drawn with top_p.

    All rows use the same few pages; the results are meaningless.
    """

    def __init__(
        self,
        network: Network,
        kernels: AttentionBackend,
        sampler: TokenSampler,
        page_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._network = network
        self._kernels = kernels
        self._sampler = sampler
        self._page_size = page_size
        self._num_tokens = np.ones(min(max_num_seqs, max_num_batched_tokens), np.int32)
        remaining = max_num_batched_tokens - len(self._num_tokens)
        for row in range(len(self._num_tokens)):
            more = min(remaining, max_model_len - 1)
            self._num_tokens[row] += more
            remaining -= more

    def run(self) -> None:
        """Allocate pages, run the step, and release everything."""
        geometry, count = self._network.geometry, len(self._num_tokens)
        num_pages = -(-int(self._num_tokens[0]) // self._page_size)
        tables = PageTables(count, num_pages, self._page_size, self._kernels.prepare, geometry.forms)
        tables.rows[:] = np.arange(1, num_pages + 1, dtype=np.int32)
        with torch.inference_mode():
            stores = allocate_stores(self._kernels, geometry, num_pages + 1, self._page_size)
            states = make_states(geometry.state_shapes, 2, 0, geometry.device)  # one for all rows
            eager = EagerRunner(self._network, self._kernels, stores, tables, None, self._sampler, states)
            plan = self._plan(count)
            eager.run(plan, tables.apply(plan.forks, plan.updates), tables.step_layout(plan.rows))()

    def _plan(self, count: int) -> StepPlan:
        slot: I32 = np.arange(count, dtype=np.int32)
        zero, none = np.zeros(count, np.int32), np.zeros((0, 3), np.int32)
        tokens = np.zeros(int(self._num_tokens.sum()), np.int32)
        rows = Rows(slot, zero, self._num_tokens, tokens, zero + 1)
        ones = np.ones(count, np.float32)
        edit = LogitEdit(0, edit_table([0], 1.0, 1.0))
        draws = Draws(
            row=slot,
            width=zero + 1,
            seed=zero.astype(np.uint64),
            lane=zero,
            position=zero,
            temperature=ones,
            top_k=zero,
            top_p=ones * np.float32(0.9),
            min_p=ones * 0,
            num_top=zero,
            edits=(edit,),
        )
        return StepPlan(0, none, none, none[:, :2], rows, draws)


def host_kv_bytes() -> int:
    """Return the default bytes of KV pages on a CPU."""
    return min(int(free_host_bytes() * CPU_KV_SHARE), CPU_KV_MAX_BYTES)


def total_memory_bytes(device: torch.device) -> int:
    """Return the memory of a GPU or of the machine, limited by the process's control group."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int((_CONTROL_GROUP / "memory.max").read_text()))
    except (OSError, ValueError):  # no control groups, or "max"
        return total


def free_host_bytes() -> int:
    """Return the memory that the machine and this process's control group have left.

    Memory that holds cached files counts as free.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min(free, _container_free_bytes())


def _container_free_bytes() -> int:
    """Return the memory that the control group has left; a huge number without a limit."""
    try:
        limit, used = ((_CONTROL_GROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        return int(limit) - int(used)
    except (OSError, ValueError):  # no control groups, or "max"
        return 1 << 62
