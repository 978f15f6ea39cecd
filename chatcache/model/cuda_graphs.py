"""Plain decode steps, captured as CUDA graphs at warm-up and replayed; elsewhere the same steps, called as they are.

A step of R rows runs as the smallest captured size that holds them. A step that is not plain, is larger than the
largest size, changes more of the tables than it has rows, or needs a longer work list than there is room for, is not
for here: it runs as any other step.
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
from chatcache.model.sampling.graph_sampler import is_plain_decode
from chatcache.model.static_steps import (
    Arrays,
    Replay,
    StaticStep,
    StepContext,
    WorkListBuffers,
    fill_padding,
    fill_rows,
    fits_changes,
    input_specs,
)
from chatcache.model.streams import Layout
from chatcache.types.plan import StepPlan, StepResult

Capture = Callable[[Replay], Replay]
"""Turns a step's work into something that repeats it."""
Progress = Callable[[float, str], None]

NUM_HOST_BUFFERS = 2  # steps in flight

log = logging.getLogger(__name__)


def capture_sizes(most: int) -> list[int]:
    """Return the sizes to capture for up to `most` rows, ascending: padding costs little where sizes are close."""
    sizes = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, most + 32, 32)]
    return sorted({min(size, most) for size in sizes})


def no_capture(work: Replay) -> Replay:
    """Repeat the work by calling it: the `Capture` of a machine without graphs."""
    return work


class CudaCapture:
    """Captures work as CUDA graphs that share one memory pool, so the largest should come first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, work: Replay) -> Replay:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()  # kernels compile, libraries take their workspaces; neither may happen in a capture
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may talk to the device meanwhile
        captured = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.stream(current), captured:  # a capture that fails does not put the stream back by itself
            work()
        self._graphs.append(graph)
        return graph.replay


@dataclass(frozen=True, slots=True)
class HostBuffers:
    """Host buffers of one step in flight."""

    inputs: Tensor
    outputs: Tensor


@dataclass(frozen=True, slots=True)
class CaptureKey:
    """What is captured: a size (by its place among them), a number of work lists, a kind of draws."""

    size_index: int
    num_lists: int
    kind: int


@dataclass(frozen=True, slots=True)
class FilledStep:
    """A step whose numbers lie in a lane."""

    key: CaptureKey
    num_rows: int
    buffer_index: int


class DecodeGraphs:
    """The static steps of a runner. At most `NUM_HOST_BUFFERS` may be between `fill` and their `result`."""

    def __init__(
        self, parties: StepContext, tables: PageTables, sizes: Sequence[int], rooms: Sequence[WorkListBuffers | None]
    ) -> None:
        self._parties = parties
        self._tables = tables
        self._slots = parties.slots
        self._sizes = np.array(sizes)
        device, forms = self._slots.tables.device, list(zip(sizes, rooms, strict=True))
        most = max(Layout(input_specs(size, parties.sampler, room)).num_bytes for size, room in forms)
        self._given = torch.zeros(most, dtype=torch.uint8, device=device)
        most = max(Layout(parties.sampler.output_specs(size)).num_bytes for size in sizes)
        self._drawn = torch.zeros(most, dtype=torch.uint8, device=device)
        self._steps = [StaticStep(size, parties, room, self._given, self._drawn) for size, room in forms]
        pinned = device.type == "cuda"
        self._lanes = [
            HostBuffers(_host(self._given, pinned), _host(self._drawn, pinned)) for _ in range(NUM_HOST_BUFFERS)
        ]
        self._given_arrays: list[list[Arrays]] = [
            [step.layout.arrays(lane.inputs.numpy()) for step in self._steps] for lane in self._lanes
        ]
        self._drawn_arrays: list[list[Arrays]] = [
            [step.drawn_layout.arrays(lane.outputs.numpy()) for step in self._steps] for lane in self._lanes
        ]
        self._replays: dict[CaptureKey, Replay] = {}
        self._next_lane = 0

    @property
    def num_captured(self) -> int:
        """Return how many forms of a step there are to replay."""
        return len(self._replays)

    def capture(self, capture: Capture, progress: Progress) -> None:
        """Make every step replayable, the largest first. What cannot be captured runs as other steps do."""
        todo = [
            CaptureKey(place, num_lists, kind)
            for place, step in enumerate(self._steps)
            for num_lists in range(1, step.max_lists + 1)
            for kind in range(self._parties.sampler.num_kinds)
        ]
        started_s, free_bytes = time.perf_counter(), _free_bytes(self._given.device)
        for done, form in enumerate(reversed(todo)):
            place, step = form.size_index, self._steps[form.size_index]
            progress(done / len(todo), f"decode step of {step.size} rows")
            fill_padding(self._given_arrays[0][place], self._parties.sampler, self._slots, step.work_buffers)
            self._given.copy_(self._lanes[0].inputs)

            def work(step: StaticStep = step, form: CaptureKey = form) -> None:
                with torch.inference_mode():
                    step.run(form.num_lists, form.kind)

            try:
                self._replays[form] = capture(work)
            except torch.OutOfMemoryError:
                log.warning("no memory is left to capture a decode step of %d rows; it will be slower", step.size)
            except RuntimeError as error:
                log.warning("decode steps cannot be captured and will be slower: %s", str(error).partition("\n")[0])
                break
        took_s, taken = time.perf_counter() - started_s, (free_bytes - _free_bytes(self._given.device)) / 2**20
        log.info("captured %d decode steps in %.1f s, %.0f MiB", self.num_captured, took_s, taken)

    def fill(self, plan: StepPlan, changes: TableChanges) -> FilledStep | None:
        """Write a step's numbers into the next lane; None if the step is not for here.

        Raises: ValueError for a token whose page was never given.
        """
        kind = self._parties.sampler.kind(plan.draws) if is_plain_decode(plan) else None
        if kind is None:
            return None
        rows = plan.rows
        count = len(rows.slot)
        place = int(np.searchsorted(self._sizes, count))
        if place == len(self._sizes) or not fits_changes(changes, int(self._sizes[place])):
            return None
        step, given = self._steps[place], self._given_arrays[self._next_lane][place]
        cells = self._tables.decode_cells(rows.slot, rows.start)
        num_lists: int | None = 1
        if step.work_buffers is not None:
            work = self._tables.decode_work(rows.slot, rows.start)
            num_lists = step.work_buffers.fill(given, work, count) if work is not None else None
        form = CaptureKey(place, num_lists or 0, kind)
        if form not in self._replays:
            return None
        fill_rows(given, rows, cells, changes, self._slots)
        self._parties.sampler.fill(given, plan.draws, given["slot"])
        lane, self._next_lane = self._next_lane, (self._next_lane + 1) % NUM_HOST_BUFFERS
        return FilledStep(form, count, lane)

    def run(self, ready: FilledStep) -> None:
        """Enqueue the copy down, the step and the copy up."""
        lane, step = self._lanes[ready.buffer_index], self._steps[ready.key.size_index]
        size, drawn_size = step.layout.num_bytes, step.drawn_layout.num_bytes
        self._given[:size].copy_(lane.inputs[:size], non_blocking=True)
        self._replays[ready.key]()
        lane.outputs[:drawn_size].copy_(self._drawn[:drawn_size], non_blocking=True)

    def result(self, ready: FilledStep) -> StepResult:
        """Return what was drawn, once the device is done."""
        return self._parties.sampler.result(
            self._drawn_arrays[ready.buffer_index][ready.key.size_index], ready.num_rows
        )


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def _host(like: Tensor, pinned: bool) -> Tensor:
    return torch.zeros(len(like), dtype=torch.uint8, pin_memory=pinned)
