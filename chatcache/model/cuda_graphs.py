"""Decode steps captured as CUDA graphs at warm-up and replayed, up to the logits.

A step of R rows runs as the smallest captured size that holds them. `fill` returns None for a step that computes more
than one token of a row, scores or pools prompts, is larger than the largest captured size, or needs a longer work list
than fits; `eager` runs such a step. On a device without graphs `no_capture` makes the same steps ordinary calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chatcache.model.page_tables import PageTables, TableChanges
from chatcache.model.static_steps import (
    Arrays,
    AttentionLaunches,
    Replay,
    StaticStep,
    StepContext,
    WorkListBuffers,
    fill_padding,
    fill_rows,
    input_specs,
    no_changes,
)
from chatcache.model.streams import Layout
from chatcache.types.plan import StepPlan

Capture = Callable[[Replay], Replay]
"""Captures a step's work and returns the function that replays it."""
Progress = Callable[[float, str], None]

NUM_HOST_BUFFERS = 2  # one set for each step in flight

log = logging.getLogger(__name__)


def capture_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes to capture for up to `max_rows` rows (sequences), ascending.

    Sizes are close together, because a step is padded to the next size.
    """
    sizes = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, max_rows + 32, 32)]
    return sorted({min(size, max_rows) for size in sizes})


def no_capture(work: Replay) -> Replay:
    """Return the work itself: the `Capture` of a device without graphs."""
    return work


class CudaCapture:
    """Captures work as CUDA graphs that share one memory pool.

    Capture the largest step first: its memory is then reused by the smaller ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, work: Replay) -> Replay:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()  # compiles kernels and allocates library workspaces, which is not allowed during a capture
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may call the device during the capture
        captured = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.stream(current), captured:  # a failing capture does not restore the current stream
            work()
        self._graphs.append(graph)
        return graph.replay


@dataclass(frozen=True, slots=True)
class CaptureKey:
    """Identifies a captured step: the index of its batch size, and what its attention launches."""

    size_index: int
    attention: AttentionLaunches


@dataclass(frozen=True, slots=True)
class FilledStep:
    """A step whose inputs have been written to the host buffer `buffer_index`.

    `changes`: page-table changes that do not fit the buffer, to be applied before the step.
    """

    key: CaptureKey
    num_rows: int
    buffer_index: int
    changes: TableChanges | None


class DecodeGraphs:
    """Captured decode steps of a runner, one per `CaptureKey`.

    At most `NUM_HOST_BUFFERS` steps may be between `fill` and their end on the device.
    """

    def __init__(
        self,
        context: StepContext,
        tables: PageTables,
        sizes: Sequence[int],
        work_buffers: Sequence[tuple[WorkListBuffers, ...]],
    ) -> None:
        self._context = context
        self._tables = tables
        self._slots = context.slots
        self._sizes = np.array(sizes)
        device, variants = self._slots.tables.device, list(zip(sizes, work_buffers, strict=True))
        num_bytes = max(Layout(input_specs(size, work_buffers)).num_bytes for size, work_buffers in variants)
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        geometry = context.network.geometry
        self._logits = torch.zeros(max(sizes), geometry.vocab_size, dtype=geometry.dtype, device=device)
        self._steps = [
            StaticStep(size, context, work_buffers, self._inputs, self._logits) for size, work_buffers in variants
        ]
        pinned = device.type == "cuda"
        self._buffers = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(NUM_HOST_BUFFERS)]
        self._input_arrays: list[list[Arrays]] = [
            [step.layout.arrays(buffer.numpy()) for step in self._steps] for buffer in self._buffers
        ]
        self._replays: dict[CaptureKey, Replay] = {}
        self._next_buffer = 0

    @property
    def num_captured(self) -> int:
        """Return how many steps have been captured."""
        return len(self._replays)

    @property
    def num_capturable(self) -> int:
        """Return how many steps `capture` tries to capture."""
        return sum(len(step.launches) for step in self._steps)

    def capture(self, capture: Capture, progress: Progress) -> None:
        """Capture every step, the largest first.

        A step that cannot be captured is logged, and steps of that size then run eagerly.
        """
        keys = [CaptureKey(index, launches) for index, step in enumerate(self._steps) for launches in step.launches]
        started_s, free_bytes = time.perf_counter(), _free_bytes(self._inputs.device)
        for done, key in enumerate(reversed(keys)):
            index, step = key.size_index, self._steps[key.size_index]
            progress(done / len(keys), f"decode step of {step.size} rows")
            fill_padding(self._input_arrays[0][index], self._slots, step.work_buffers)
            self._inputs.copy_(self._buffers[0])

            def work(step: StaticStep = step, key: CaptureKey = key) -> None:
                with torch.inference_mode():
                    step.run(key.attention)

            try:
                self._replays[key] = capture(work)
            except torch.OutOfMemoryError:
                log.warning("no memory is left to capture a decode step of %d rows; it will be slower", step.size)
            except RuntimeError as error:
                log.warning("decode steps cannot be captured and will be slower: %s", str(error).partition("\n")[0])
                break
        elapsed_s, used_mib = time.perf_counter() - started_s, (free_bytes - _free_bytes(self._inputs.device)) / 2**20
        log.info("captured %d decode steps in %.1f s, %.0f MiB", self.num_captured, elapsed_s, used_mib)

    def fill(self, plan: StepPlan, changes: TableChanges) -> FilledStep | None:
        """Write a step's inputs into the next host buffer; return None if no captured step fits.

        Raises: ValueError for a token at a position that has no page.
        """
        rows = plan.rows
        count = len(rows.slot)
        if not count or plan.scores is not None or plan.pools is not None or (rows.num_tokens != 1).any():
            return None
        index = int(np.searchsorted(self._sizes, count))
        if index == len(self._sizes):
            return None
        step, inputs = self._steps[index], self._input_arrays[self._next_buffer][index]
        cells = self._tables.decode_cells(rows.slot, rows.start)
        launches: AttentionLaunches | None = AttentionLaunches(1, has_merges=True)
        if step.work_buffers:
            works = self._tables.decode_works(rows.slot, rows.start)
            filled = [
                buffers.fill(inputs, work, count) if work is not None else None
                for buffers, work in zip(step.work_buffers, works, strict=True)
            ]
            launches = step.choose_launches(filled)
        if launches is None:
            return None
        key = CaptureKey(index, launches)
        if key not in self._replays:
            return None
        fits = len(changes.at) <= step.size
        fill_rows(inputs, rows, cells, changes if fits else no_changes(), self._slots)
        buffer, self._next_buffer = self._next_buffer, (self._next_buffer + 1) % NUM_HOST_BUFFERS
        return FilledStep(key, count, buffer, None if fits else changes)

    def run(self, filled: FilledStep) -> Tensor:
        """Enqueue the copy of the inputs to the device, and the step.

        Return its logits [R, V], valid until the next step runs.
        """
        size = self._steps[filled.key.size_index].layout.num_bytes
        if filled.changes is not None:
            self._slots.apply(filled.changes)
        self._inputs[:size].copy_(self._buffers[filled.buffer_index][:size], non_blocking=True)
        self._replays[filled.key]()
        return self._logits[: filled.num_rows]


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
