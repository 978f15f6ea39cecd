"""`Runner`: applies a step plan to the page tables, the KV pages and the network.

`chatcache.types.plan` documents the order of operations within a plan.

`SwapExecutor` copies KV pages to host memory and back, concurrently with the steps:

    side   wait for the steps before | read pages swapped out | write pages swapped in |
    main                             | ... wait for what this plan needs | copies and rows of this plan

Only the side stream accesses host pages, so its order protects them.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from chatcache_kernels.types import HostPages, PageStore
from torch import Tensor

from chatcache.errors import ModelFolderError
from chatcache.model.attention import AttentionBackend, Network
from chatcache.model.cuda_graphs import (
    Capture,
    CudaCapture,
    FilledStep,
    StepGraphs,
    capture_sizes,
    no_capture,
    prompt_capture_sizes,
)
from chatcache.model.device_errors import device_lost_error
from chatcache.model.eager import EagerRunner, Finish
from chatcache.model.host_memory import PagePrefaulter
from chatcache.model.page_tables import DeviceSlots, PageTables, StepLayout, TableChanges
from chatcache.model.parallel import RankProcesses
from chatcache.model.sampling.sampler import Sampler, TokenSampler
from chatcache.model.states import StateStore
from chatcache.model.static_steps import StepContext, StepSize, WorkListBuffers
from chatcache.model.streams import Stream, StreamEvent, Streams, make_streams
from chatcache.model.thread_count import ThreadCount
from chatcache.types.plan import I32, I64, KVCapacity, Rows, StepPlan, StepResult
from chatcache.types.stats import ModelInfo

NUM_MEASURED_PAGES = 8
MEASURE_S = 0.02

log = logging.getLogger(__name__)


class SwapExecutor:
    """The host pages and the copies to and from them. Without host pages every swap is an error.

    `is_optional`: have no host pages if the system does not allow locked memory.
    """

    def __init__(
        self,
        kernels: AttentionBackend,
        stores: tuple[PageStore, ...],
        num_host_pages: int,
        streams: Streams | None = None,
        *,
        is_optional: bool = False,
        states: StateStore | None = None,
    ) -> None:
        self._states = states
        self._kernels = kernels
        self._stores = stores
        self._device = stores[0].tensors[0].device
        self._streams = streams or make_streams(self._device)
        self._unlock: Callable[[], object] = _no_unlock
        if self._device.type == "cuda":  # memory must be unlocked before it is freed, even without close()
            self._host, addresses = allocate_locked(stores, num_host_pages, is_optional=is_optional)
            self._unlock = weakref.finalize(self, _unlock, addresses, self._host, self._streams.side)
        else:
            self._host = tuple(HostPages.allocate(store, num_host_pages) for store in stores)
        self._swap_out_event: StreamEvent | None = None  # the next plan may write the swapped-out pages after it

    @property
    def num_pages(self) -> int:
        """Return the number of host pages."""
        return self._host[0].num_pages

    def apply_plan(self, plan: StepPlan, written: I32 | I64 | None) -> None:
        """Swap a plan's pages and states. `written`: as in `apply`. Raises: as `apply`."""
        swap_states = self._state_swaps(plan) if self._states is not None else None
        self.apply(plan.swaps_out, plan.swaps_in, None if swap_states is not None else written, swap_states)

    def apply(
        self,
        swaps_out: I32,
        swaps_in: I32,
        written: I32 | I64 | None = None,
        swap_states: Callable[[], None] | None = None,
    ) -> None:
        """Swap pages out, then in, before work submitted to the main stream from now on needs them.

        Shapes: swaps_out [S, 2] (page, host page), swaps_in [S, 2] (host page, page). `written`: the pages that this
        plan's copies and rows write, None if unknown. If none of them is swapped out, the main stream waits for the
        swap only before the next plan. `swap_states`: enqueues the swaps of states.
        Raises: ValueError for a page that does not exist: copying to it would corrupt other memory.
        """
        if self._swap_out_event is not None:
            self._streams.main.wait_event(self._swap_out_event)
            self._swap_out_event = None
        if not len(swaps_out) and not len(swaps_in) and swap_states is None:
            return
        if len(swaps_out):
            self._check(swaps_out[:, 0], swaps_out[:, 1])
        if len(swaps_in):
            self._check(swaps_in[:, 1], swaps_in[:, 0])
        main, side = self._streams.main, self._streams.side
        # earlier steps have written the pages that leave and do not read those that return
        side.wait_event(main.record_event())
        side.submit(lambda: self._move(swaps_out, swaps_in, swap_states))
        if len(swaps_in) or written is None or np.isin(swaps_out[:, 0], written).any():
            main.wait_event(side.record_event())
        else:
            self._swap_out_event = side.record_event()

    def measure_page_s(self) -> float:
        """Return the seconds to copy one page one way, the best of a few runs; 0 without host pages.

        No page changes its contents.
        """
        count = min(NUM_MEASURED_PAGES, self.num_pages, self._stores[0].num_pages - 1)
        if not count:
            return 0.0
        device_pages, host_pages = np.arange(1, count + 1, dtype=np.int32), np.arange(count, dtype=np.int32)
        out, back = np.stack((device_pages, host_pages), 1), np.stack((host_pages, device_pages), 1)
        return self._measure(lambda: self.apply(out, back)) / (2 * count)

    def measure_state_s(self) -> float:
        """Return the seconds to copy one state one way; 0 without host states. No state changes its contents."""
        states = self._states
        if states is None or not states.num_host_states or states.num_states < 2:
            return 0.0
        there, none = np.array([[1, 0]], np.int32), np.zeros((0, 2), np.int32)
        out, back = (lambda: states.swap(there, none)), (lambda: states.swap(none, there[:, ::-1]))

        def both_ways() -> None:
            self.apply(none, none, None, out)
            self.apply(none, none, None, back)

        return self._measure(both_ways) / 2

    def _measure(self, swap: Callable[[], object]) -> float:
        """Return the seconds that `swap` takes, the best of a few runs."""
        best, deadline = float("inf"), time.perf_counter() + MEASURE_S
        for attempt in range(20):
            self._streams.main.record_event().wait()
            start = time.perf_counter()
            swap()
            self._streams.side.record_event().wait()
            end = time.perf_counter()
            if attempt:  # the first run compiles and writes to fresh memory
                best = min(best, end - start)
            if attempt and end > deadline:
                break
        return best

    def close(self) -> None:
        """Release the host pages."""
        self._streams.side.record_event().wait()
        self._unlock()

    def _state_swaps(self, plan: StepPlan) -> Callable[[], None] | None:
        """Return the function that swaps a plan's states, None if there are none. Raises: ValueError as `apply`."""
        states, out, back = self._states, plan.state_swaps_out, plan.state_swaps_in
        if states is None or not (len(out) or len(back)):
            return None
        states.check_swaps(out, back)
        return lambda: states.swap(out, back)

    def _move(self, swaps_out: I32, swaps_in: I32, swap_states: Callable[[], None] | None) -> None:
        with torch.inference_mode():  # the page numbers stay in host memory, where the kernels read them
            for store, host in zip(self._stores, self._host, strict=True):
                if len(swaps_out):
                    self._kernels.swap_out(store, host, torch.from_numpy(swaps_out))
                if len(swaps_in):
                    self._kernels.swap_in(store, host, torch.from_numpy(swaps_in))
            if swap_states is not None:
                swap_states()

    def _check(self, pages: I32, host_pages: I32) -> None:
        for name, ids, count in (
            ("page", pages, self._stores[0].num_pages),
            ("host page", host_pages, self.num_pages),
        ):
            if ids.min() < 0 or ids.max() >= count:
                raise ValueError(f"a swap names {name} {ids.max() if ids.max() >= count else ids.min()} of {count}")


def _no_unlock() -> None:
    """Do nothing: host pages of a CPU are not locked."""


def _unlock(addresses: list[int], host: tuple[HostPages, ...], side: Stream) -> None:
    """Unlock the memory of `host` after the stream that accesses it has finished."""
    with suppress(RuntimeError):  # a lost device accesses no memory
        side.record_event().wait()
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def allocate_locked(
    stores: tuple[PageStore, ...], num_pages: int, *, is_optional: bool
) -> tuple[tuple[HostPages, ...], list[int]]:
    """Allocate page-locked host pages, which devices can access; return them with the addresses to unlock.

    torch's own pinned allocations are rounded up to powers of two; this locks exactly the pages.
    Raises: ModelFolderError if the system does not allow that much locked memory and the pages are not optional.
    """
    host, addresses = tuple(HostPages.allocate(store, num_pages) for store in stores), list[int]()
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for memory in (tensor for pages in host for tensor in pages.tensors):
        size = memory.numel() * memory.element_size()
        status = int(cudart.cudaHostRegister(memory.data_ptr(), size, 0)) if size else 0
        if status:
            for address in addresses:
                cudart.cudaHostUnregister(address)
            problem = f"the system does not lock {size} bytes of memory (CUDA error {status})"
            if not is_optional:
                raise ModelFolderError(f"swap_space_bytes: {problem}; lower it")
            log.warning("%s: preempted requests are computed again instead of swapped", problem)
            return tuple(HostPages.allocate(store, 0) for store in stores), []
        addresses += [memory.data_ptr()] if size else []
    log.info("swap space: %d pages, locked in memory", num_pages)
    return host, addresses


Progress = Callable[[float, str], None]

WARMUP_CONTEXT_TOKENS = 1040  # context of a row: long enough to be split, and to be read as a shared prefix
WARMUP_PROMPT_TOKENS = tuple(2**i for i in range(9))  # prompt lengths: one for every tile height of a work list
WARMUP_LONG_TOKENS = 80  # length of a prompt that the CPU's decode kernel does not take
LAUNCH_BOUND_SHARE, LAUNCH_BOUND_S = 1.15, 0.2e-3  # how long after the launches a step ends that waits for the host
MAX_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class AsyncLaunch:
    """Configuration of a runner whose `launch` returns before the step is done.

    `sizes`: batch sizes of the decode steps to capture, () for a network that cannot be captured. `prompt_sizes`:
    numbers of tokens of the steps with prompts to capture; with `limits_prompts`, only those for which the device waits
    for the host.
    """

    sizes: Sequence[int]
    capture: Capture = no_capture
    prompt_sizes: Sequence[int] = ()
    limits_prompts: bool = False

    @property
    def num_graphs(self) -> int:
        """Return the maximum number of captured steps: decode steps have up to three forms of attention."""
        return 3 * len(self.sizes) + len(self.prompt_sizes)


class LaunchedStep:
    """A step that has been launched. Satisfies `engine.Launched`."""

    def __init__(self, wait: Callable[[], StepResult]) -> None:
        self._wait: Callable[[], StepResult] | None = wait
        self._outcome: StepResult | Exception | None = None

    def wait(self) -> None:
        """Wait until the step has ended, and keep its outcome for `result`."""
        if self._wait is None:
            return
        wait, self._wait = self._wait, None
        try:
            self._outcome = wait()
        except Exception as error:
            self._outcome = error

    def result(self) -> StepResult:
        """Wait for the step and return its result. Raises: as `Runner.execute`."""
        self.wait()
        if isinstance(self._outcome, StepResult):
            return self._outcome
        raise self._outcome or RuntimeError("another call is already waiting for this step")


class Runner:
    """Executes plans on one device. Satisfies `engine.ModelRunner`.

    Not thread-safe: one thread calls all methods.
    """

    def __init__(
        self,
        network: Network,
        kernels: AttentionBackend,
        stores: tuple[PageStore, ...],
        capacity: KVCapacity,
        model_info: ModelInfo,
        async_launch: AsyncLaunch | None = None,
        streams: Streams | None = None,
        sampler: TokenSampler | None = None,
        prefaulter: PagePrefaulter | None = None,
        threads: ThreadCount | None = None,
        *,
        is_swap_optional: bool = False,
        states: StateStore | None = None,
        ranks: RankProcesses | None = None,
    ) -> None:
        self.model_info = model_info
        self._ranks = ranks
        self._states = states
        self._threads = threads or ThreadCount((1,))
        self._prefaulter = prefaulter
        self._network = network
        self._kernels = kernels
        self._device = device = network.geometry.device
        self._name = _name_of(device)  # read now: a lost device may not return it
        self._page_size = capacity.page_size
        one = np.zeros((1, 1), np.int32)
        self._plans_work = kernels.prepare(one, one[0], one[0] + 1, self._page_size, 1) is not None
        max_pages = -(-capacity.max_model_len // capacity.page_size)
        forms = network.geometry.forms
        self._tables = PageTables(capacity.num_slots, max_pages, capacity.page_size, kernels.prepare, forms)
        slots = DeviceSlots(self._tables, device) if async_launch is not None else None
        self._sampler = sampler or Sampler(network.geometry.vocab_size, device)
        self._streams = streams or make_streams(device)
        self._swaps = SwapExecutor(
            kernels, stores, capacity.num_host_pages, self._streams, is_optional=is_swap_optional, states=states
        )
        self._capacity = replace(
            capacity,
            has_async_launch=async_launch is not None,
            num_host_pages=self._swaps.num_pages,
            num_host_states=states.num_host_states if states is not None else 0,
        )
        self._eager = EagerRunner(network, kernels, stores, self._tables, slots, self._sampler, states)
        self._capture: Capture = no_capture
        self._max_measured_tokens = 0  # of the prompts that warm_up times, to limit the steps that it captures
        self._static: StepGraphs | None = None
        if async_launch is not None and slots is not None and async_launch.sizes and not network.geometry.has_chunks:
            context = StepContext(network, kernels, stores, slots, states)
            self._static = self._static_steps(context, async_launch)
            self._capture = async_launch.capture
            if async_launch.limits_prompts:
                self._max_measured_tokens = max(async_launch.prompt_sizes, default=0)
        self._in_flight: deque[LaunchedStep] = deque()

    def capacity(self) -> KVCapacity:
        """Return the limits that the scheduler plans with."""
        return self._capacity

    @property
    def captured_steps(self) -> tuple[int, int]:
        """Return how many steps were captured by `warm_up`, and how many it tried to capture."""
        return (0, 0) if self._static is None else (self._static.num_captured, self._static.num_capturable)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for it.

        Raises: DeviceLostError if the device no longer works in this process; ValueError for an inconsistent plan; any
        error of torch. After an error, none of the step's results count, and its rows must be computed again.
        """
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin one step; with `has_async_launch` the device may still run it on return.

        Raises: as `execute`.
        """
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._in_flight.popleft().wait()  # frees its host buffers
        size = len(plan.rows.tokens), len(plan.rows.slot)
        if self._prefaulter is not None:
            self._prefaulter.pause()
        try:
            with self._threads.step(size), self._ranks.step(plan) if self._ranks is not None else nullcontext():
                return self._launch(plan)
        finally:
            if self._prefaulter is not None:
                self._prefaulter.resume()

    def check_device(self) -> None:
        """Raise DeviceLostError if one of the other ranks has ended."""
        if self._ranks is not None:
            self._ranks.check()

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        with self._on_device(plan.step):
            changes = self._tables.apply(plan.forks, plan.updates)
            if self._prefaulter is not None and len(changes.pages):
                self._prefaulter.ensure(int(changes.pages.max()))
            static, layout = self._static, None
            filled = static.fill_decode(plan, changes) if static is not None else None
            if filled is None and len(plan.rows.slot):
                layout = self._tables.step_layout(plan.rows)
                filled = static.fill_prompts(plan, layout, changes) if static is not None else None
            self._swaps.apply_plan(plan, self._written(plan))
            finish = self._submit(plan, changes, filled, layout)
            mark = self._streams.main.record_event()
        launched = LaunchedStep(lambda: self._wait(plan.step, mark, finish))
        if self._capacity.has_async_launch:
            self._in_flight.append(launched)
        else:
            launched.wait()
        return launched

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile kernels, capture steps, and measure the time to swap a page.

        Prompts, a decode step and a step whose rows share pages are run, all on page 1.
        """
        size, length = self._capacity.page_size, self._capacity.max_model_len
        slots, pages = (
            min(2, self._capacity.num_slots),
            min(-(-WARMUP_CONTEXT_TOKENS // size), self._tables.rows.shape[1]),
        )
        saved_rows = self._tables.rows[:slots, :pages].copy()
        end = min(pages * size, length)
        counts = WARMUP_PROMPT_TOKENS if self._plans_work else (min(size, end), WARMUP_LONG_TOKENS)
        prompts = [count for count in counts if count <= end]
        max_prompt_tokens = None
        with self._on_device(0), torch.inference_mode():
            for content, steps in (
                (
                    np.ones_like(saved_rows),
                    (*((1, 0, count) for count in prompts), (1, end - 1, 1), (slots, end - 1, 1)),
                ),
                (saved_rows, ()),
            ):
                cells = [(*cell, page) for cell, page in np.ndenumerate(content)]
                self._eager.apply_changes(self._tables.apply(np.zeros((0, 3), np.int32), np.array(cells, np.int32)))
                for count, start, new in steps:
                    first, news = np.full(count, start, np.int32), np.full(count, new, np.int32)
                    tokens, states = np.zeros(count * new, np.int32), self._scratch_states(count)
                    rows = Rows(np.arange(count, dtype=np.int32), first, news, tokens, states)
                    self._eager.forward(rows, np.zeros(1, np.intp))
                if steps and self._max_measured_tokens:
                    max_prompt_tokens = self._find_launch_bound_tokens(min(end, self._max_measured_tokens))
            self._eager.copy_pages(np.array([[1, 0]], np.int32))  # the null page is never read
            self._sampler.warm_up(self._network.geometry.dtype)
            if self._static is not None:
                self._static.capture(self._capture, progress or (lambda fraction, what: None), max_prompt_tokens)
            if self._states is not None:
                self._states.clear_scratch()
            self._capacity = replace(
                self._capacity,
                swap_page_s=self._swaps.measure_page_s(),
                swap_state_s=self._swaps.measure_state_s(),
            )
        if self._prefaulter is not None:
            self._prefaulter.ensure(0)

    def _find_launch_bound_tokens(self, most: int) -> int | None:
        """Return the most tokens of a prompt for which the device waits for the host's launches, of at most `most`.

        None if it does for all. Capturing larger steps would only pad them.
        """
        fitting = None
        for count in (2**i for i in range(4, 12)):
            if count > most:
                return None
            row, none = np.zeros(1, np.int32), self._scratch_states(1)
            rows = Rows(row, row, np.full(1, count, np.int32), np.zeros(count, np.int32), none)
            for _ in range(2):  # the first run may compile
                self._streams.main.record_event().wait()
                start = time.perf_counter()
                self._eager.forward(rows, np.zeros(1, np.intp))
                launched_s = time.perf_counter() - start
                self._streams.main.record_event().wait()
                total_s = time.perf_counter() - start
            if total_s > launched_s * LAUNCH_BOUND_SHARE + LAUNCH_BOUND_S:
                return fitting or 0
            fitting = count
        return None

    def close(self) -> None:
        """Release weights and pages."""
        self._swaps.close()
        if self._ranks is not None:
            self._ranks.close()
        if self._prefaulter is not None:
            self._prefaulter.close()
        self._in_flight.clear()
        self._states = None
        del self._network, self._eager, self._static, self._capture, self._sampler, self._swaps, self._prefaulter

    def _static_steps(self, context: StepContext, async_launch: AsyncLaunch) -> StepGraphs:
        sizes = [StepSize.decode(size) for size in async_launch.sizes]
        sizes += [StepSize.prompts(size, self._capacity.num_slots) for size in async_launch.prompt_sizes]
        work_buffers: list[tuple[WorkListBuffers, ...]] = [()] * len(sizes)
        if self._plans_work:
            length, num_tokens = self._capacity.max_model_len, self._capacity.num_pages * self._page_size
            forms = list(enumerate(context.network.geometry.forms))
            work_buffers = [
                tuple(
                    WorkListBuffers.sized_for(size, form.group, length, num_tokens, f"form_{place}_")
                    for place, form in forms
                )
                for size in sizes
            ]
        return StepGraphs(context, self._tables, sizes, work_buffers)

    def _submit(
        self, plan: StepPlan, changes: TableChanges, filled: FilledStep | None, layout: StepLayout | None
    ) -> Finish:
        """Enqueue a step; return the function that reads its result."""
        finishes: list[Finish] = []
        static, eager = self._static, self._eager

        def run() -> None:
            with torch.inference_mode():
                if filled is None or static is None:
                    finishes.append(eager.run(plan, changes, layout))
                else:
                    finishes.append(eager.draw(plan, self._run_static(static, filled, plan)))

        self._streams.main.submit(run)
        return lambda: finishes[0]()

    def _run_static(self, static: StepGraphs, filled: FilledStep, plan: StepPlan) -> Tensor:
        """Enqueue a captured step with its copies; return its logits."""
        self._eager.copy_pages(plan.copies)
        if self._states is None:
            return static.run(filled)
        self._states.copy(plan.state_copies)
        logits = static.run(filled)
        self._states.copy(plan.state_saves)
        return logits

    def _wait(self, step: int, mark: StreamEvent, finish: Finish) -> StepResult:
        with self._on_device(step):
            mark.wait()
            return finish()

    def _scratch_states(self, count: int) -> I32:
        """Return the states of `count` rows of the warm-up: none, or the scratch state for all."""
        return np.full(count if self._states is not None else 0, self._states.scratch if self._states else 0, np.int32)

    def _written(self, plan: StepPlan) -> I32 | I64 | None:
        """Return the pages that a plan's copies and rows write; None if no page is swapped out."""
        if not len(plan.swaps_out):
            return None
        rows = plan.rows
        last = rows.start + rows.num_tokens - 1
        spans = [
            self._tables.rows[slot, first // self._page_size : end // self._page_size + 1]
            for slot, first, end in zip(rows.slot.tolist(), rows.start.tolist(), last.tolist(), strict=True)
        ]
        return np.concatenate((plan.copies[:, 1], *spans))

    @contextmanager
    def _on_device(self, step: int) -> Iterator[None]:
        """Make the device current; raise DeviceLostError if an error means that it is lost."""
        try:
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                yield
        except RuntimeError as error:
            lost = device_lost_error(error, self._name, step, self._probe)
            if lost is not None:
                raise lost from error
            raise

    def _probe(self) -> None:
        """Make a device call that fails if the device is lost."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _name_of(device: torch.device) -> str:
    return f"{torch.cuda.get_device_name(device)} ({device})" if device.type == "cuda" else str(device)


def default_async_launch(
    device: torch.device, max_num_seqs: int, max_prompt_tokens: int, *, capturable: bool
) -> AsyncLaunch | None:
    """Return the launch settings for `device`; None on CPUs, which run synchronously.

    `max_prompt_tokens`: of a step with prompts to capture, 0 for none.
    """
    if device.type != "cuda":
        return None
    if not capturable:
        return AsyncLaunch((), CudaCapture(device))
    prompt_sizes = prompt_capture_sizes(max_prompt_tokens)
    return AsyncLaunch(capture_sizes(max_num_seqs), CudaCapture(device), prompt_sizes, limits_prompts=True)
