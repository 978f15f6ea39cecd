"""Steps captured as CUDA graphs at warm-up and replayed, up to the logits.

A decode step of R rows, or a step with prompts of T tokens, runs as the smallest captured size that holds it. `eager`
runs a step that scores or pools prompts, is larger than the largest captured size, or needs a longer work list than
fits. On a device without graphs `no_capture` makes the same steps ordinary calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from chatcache_kernels.types import AttentionWork
from torch import Tensor

from chatcache.model.page_tables import PageTables, StepLayout, TableChanges
from chatcache.model.static_steps import (
    Arrays,
    AttentionLaunches,
    Replay,
    StaticStep,
    StepContext,
    StepSize,
    WorkListBuffers,
    fill_padding,
    fill_prompt_rows,
    fill_rows,
    fill_states,
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


def prompt_capture_sizes(max_tokens: int) -> list[int]:
    """Return the numbers of tokens of the steps with prompts to capture, up to `max_tokens`, ascending.

    A step is padded by an eighth of its tokens at most from 128 on, and by 15 tokens below.
    """
    sizes = [*range(16, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1152, 2049, 128)]
    return [size for size in sizes if size <= max_tokens]


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
    """Identifies a captured step: the index of its size, and what its attention launches."""

    size_index: int
    attention: AttentionLaunches


@dataclass(frozen=True, slots=True)
class FilledStep:
    """A step whose inputs have been written to the host buffer `buffer_index`.

    `changes`: page-table changes that do not fit the buffer, to be applied before the step.
    """

    key: CaptureKey
    size: StepSize
    num_rows: int
    buffer_index: int
    changes: TableChanges | None


class StepGraphs:
    """Captured steps of a runner, one per `CaptureKey`.

    `sizes`: of decode steps, then of steps with prompts, each ascending. At most `NUM_HOST_BUFFERS` steps may be
    between `fill_decode` or `fill_prompts` and their end on the device.
    """

    def __init__(
        self,
        context: StepContext,
        tables: PageTables,
        sizes: Sequence[StepSize],
        work_buffers: Sequence[tuple[WorkListBuffers, ...]],
    ) -> None:
        self._context = context
        self._tables = tables
        self._slots = context.slots
        self._decode_sizes = np.array([size.num_rows for size in sizes if size.is_decode])
        self._prompt_sizes = np.array([size.num_tokens for size in sizes if not size.is_decode])
        device, variants = self._slots.tables.device, list(zip(sizes, work_buffers, strict=True))
        num_bytes = max(Layout(input_specs(size, work_buffers)).num_bytes for size, work_buffers in variants)
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        geometry = context.network.geometry
        num_rows = max(size.num_rows for size in sizes)
        self._logits = torch.zeros(num_rows, geometry.vocab_size, dtype=geometry.dtype, device=device)
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

    def capture(self, capture: Capture, progress: Progress, max_prompt_tokens: int | None = None) -> None:
        """Capture every step, the largest first; of those with prompts, the ones of at most `max_prompt_tokens`.

        A step that cannot be captured is logged, and steps of that size then run eagerly. If it is not for lack of
        memory, smaller ones of its kind are not tried.
        """
        if max_prompt_tokens is not None:
            self._prompt_sizes = self._prompt_sizes[self._prompt_sizes <= max_prompt_tokens]
            self._steps = self._steps[: len(self._decode_sizes) + len(self._prompt_sizes)]
        keys = [CaptureKey(index, launches) for index, step in enumerate(self._steps) for launches in step.launches]
        keys.sort(key=lambda key: (self._steps[key.size_index].size.num_tokens, key.size_index))
        started_s, free_bytes = time.perf_counter(), _free_bytes(self._inputs.device)
        failed: set[bool] = set()  # kinds of steps, as `is_decode`
        for done, key in enumerate(reversed(keys)):
            index, step = key.size_index, self._steps[key.size_index]
            if step.size.is_decode in failed:
                continue
            progress(done / len(keys), str(step.size))
            fill_padding(self._input_arrays[0][index], self._slots, step)
            self._inputs.copy_(self._buffers[0])

            def work(step: StaticStep = step, key: CaptureKey = key) -> None:
                with torch.inference_mode():
                    step.run(key.attention)

            try:
                self._replays[key] = capture(work)
            except torch.OutOfMemoryError:
                log.warning("no memory is left to capture a %s; it will be slower", step.size)
            except RuntimeError as error:
                kind = "decode steps" if step.size.is_decode else "steps with prompts"
                log.warning("%s cannot be captured and will be slower: %s", kind, str(error).partition("\n")[0])
                failed.add(step.size.is_decode)
        elapsed_s, used_mib = time.perf_counter() - started_s, (free_bytes - _free_bytes(self._inputs.device)) / 2**20
        log.info("captured %d steps in %.1f s, %.0f MiB", self.num_captured, elapsed_s, used_mib)

    def fill_decode(self, plan: StepPlan, changes: TableChanges) -> FilledStep | None:
        """Write the inputs of a decode step into the next host buffer; return None if no captured step fits.

        Raises: ValueError for a token at a position that has no page.
        """
        rows = plan.rows
        count = len(rows.slot)
        if not count or plan.scores is not None or plan.pools is not None or (rows.num_tokens != 1).any():
            return None
        index = int(np.searchsorted(self._decode_sizes, count))
        if index == len(self._decode_sizes):
            return None
        cells = self._tables.decode_cells(rows.slot, rows.start)
        works: Sequence[AttentionWork | None] = ()
        if self._steps[index].work_buffers:
            works = self._tables.decode_works(rows.slot, rows.start)
        key = self._fill_works(index, works, count)
        if key is None:
            return None
        step, inputs = self._steps[index], self._input_arrays[self._next_buffer][index]
        fits = len(changes.at) <= step.size.num_tokens
        fill_rows(inputs, rows, cells, changes if fits else no_changes(), self._slots)
        if step.states is not None:
            fill_states(inputs, rows.state, step.states.scratch)
        return self._filled(key, count, None if fits else changes)

    def fill_prompts(self, plan: StepPlan, layout: StepLayout, changes: TableChanges) -> FilledStep | None:
        """Write the inputs of a step with prompts into the next host buffer; return None if no captured step fits."""
        rows = plan.rows
        if plan.scores is not None or plan.pools is not None or (rows.num_tokens == 1).all():
            return None
        place = int(np.searchsorted(self._prompt_sizes, len(rows.tokens)))
        if place == len(self._prompt_sizes):
            return None
        index = len(self._decode_sizes) + place
        step, inputs = self._steps[index], self._input_arrays[self._next_buffer][index]
        if len(rows.slot) > step.size.num_rows:
            return None
        works = [form.work for form in layout.forms] if step.work_buffers else []
        key = self._fill_works(index, works, len(rows.tokens))
        if key is None:
            return None
        fits = len(changes.at) <= step.size.num_tokens
        fill_prompt_rows(inputs, rows, layout, changes if fits else no_changes(), self._slots)
        return self._filled(key, len(rows.slot), None if fits else changes)

    def _fill_works(self, index: int, works: Sequence[AttentionWork | None], count: int) -> CaptureKey | None:
        """Write the work lists of `count` tokens; return None if they do not fit or the step was not captured."""
        step, inputs = self._steps[index], self._input_arrays[self._next_buffer][index]
        launches: AttentionLaunches | None = step.launches[-1]
        if step.work_buffers:
            filled = [
                buffers.fill(inputs, work, count) if work is not None else None
                for buffers, work in zip(step.work_buffers, works, strict=True)
            ]
            launches = step.choose_launches(filled)
        if launches is None:
            return None
        key = CaptureKey(index, launches)
        return key if key in self._replays else None

    def _filled(self, key: CaptureKey, num_rows: int, changes: TableChanges | None) -> FilledStep:
        buffer, self._next_buffer = self._next_buffer, (self._next_buffer + 1) % NUM_HOST_BUFFERS
        return FilledStep(key, self._steps[key.size_index].size, num_rows, buffer, changes)

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
