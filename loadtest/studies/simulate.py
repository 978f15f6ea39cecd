"""The real engine on a virtual clock, with a runner that computes nothing: each step takes the seconds of a cost model.

Requests arrive at given times of the virtual clock. Everything but the model is real: admission, queue, scheduler,
decoding strategies, page pool, prefix cache.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.errors import ContextLengthError
from chatcache.scheduler.scheduler import Reservation
from chatcache.types.events import Failed, Finished, Started
from chatcache.types.plan import F32, I32, KVCapacity, StepPlan, StepResult
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from chatcache.types.stats import ModelInfo
from loadtest.lengths import LengthDistribution
from loadtest.studies.cost import OPT_13B, StepCost
from loadtest.studies.reservations import MAX_MODEL_LEN, ContiguousReservation, StaticBatch

VOCAB_SIZE = 50_272  # of OPT
OUTPUT_TOKEN = 7
SAMPLE_EVERY = 20  # steps between two samples of the memory
BEAM_GAP = 1.5  # nats, mean gap between the log-probabilities of successive beam candidates; an assumption
FIRST_GAP = 0.03  # mean -log-probability of the best candidate over that gap; chosen so that Figure 15b agrees


class SimulationError(Exception):
    """The simulated engine cannot continue, or its figures contradict each other."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace. `output`: the tokens of each sequence. `num_sequences`: candidates, or beams."""

    time_s: float
    prompt: tuple[int, ...]
    output: int
    num_sequences: int = 1
    is_beam_search: bool = False
    key: str = ""  # for `on_finish`

    def params(self) -> Params:
        if self.is_beam_search:
            return BeamSearchParams(
                beam_width=self.num_sequences, max_tokens=self.output, ignore_eos=True, early_stopping="never"
            )
        return SamplingParams(n=self.num_sequences, max_tokens=self.output, ignore_eos=True, seed=0)


def poisson_trace(
    lengths: LengthDistribution, rate: float, seconds: float, seed: int, num_sequences: int = 1, *, beam: bool = False
) -> list[Arrival]:
    """Return requests with exponential times between arrivals, `rate` per second."""
    rng, now = random.Random(seed), 0.0
    found: list[Arrival] = []
    while True:
        now += rng.expovariate(rate)
        if now > seconds:
            return found
        prompt, output = lengths.sample(rng)
        found.append(Arrival(now, (0,) * prompt, output, num_sequences, beam))


class Memory(NamedTuple):
    """Shares of all KV slots: with token states, reserved for later tokens, internal waste, the rest."""

    tokens: float
    reserved: float
    internal: float
    other: float


class Finish(NamedTuple):
    """A request that ended: its times and its number of output tokens."""

    arrived_s: float
    first_token_s: float
    finished_s: float
    num_tokens: int

    @property
    def normalized_s(self) -> float:
        """End-to-end latency per output token, the paper's metric."""
        return (self.finished_s - self.arrived_s) / self.num_tokens


@dataclass(slots=True)
class Outcome:
    """What a simulation measured.

    `memory` and `sharing` are samples within the measured time: (logical pages, physical pages). `mean_running` and
    `mean_present` are averages over time of requests in the batch and in the system. `gaps`: (seconds of a step, number
    of branches that decoded in it).
    """

    finishes: list[Finish] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    sharing: list[tuple[int, int]] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    mean_running: float = 0.0
    present_area: float = 0.0
    seconds: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    num_page_copies: int = 0
    num_refused: int = 0
    num_unfinished: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def normalized_s(self) -> float:
        """Mean normalized latency."""
        return statistics.fmean(finish.normalized_s for finish in self.finishes)

    def memory_mean(self) -> Memory:
        """Return the mean shares of memory."""
        return Memory(*(statistics.fmean(column) for column in zip(*self.memory, strict=True)))

    def sharing_saved(self) -> float:
        """Return the share of pages that sharing saves: 1 - physical / logical pages, at the mean of their ratio."""
        return 1 - 1 / statistics.fmean(logical / physical for logical, physical in self.sharing)


class VirtualClock:
    """Seconds of the simulation."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Done(NamedTuple):
    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


class VirtualRunner:
    """Advances the clock by the cost of each step and returns fixed tokens. Satisfies `ModelRunner`.

    Beam candidates have random log-probabilities. `min_rows`: the rows that a step computes at least.
    """

    def __init__(
        self, capacity: KVCapacity, cost: StepCost, clock: VirtualClock, min_rows: Callable[[], int] = lambda: 0
    ) -> None:
        self._capacity = capacity
        self._cost = cost
        self._clock = clock
        self._min_rows = min_rows
        self._random = np.random.default_rng(0)
        self.num_decoding = 0

    def capacity(self) -> KVCapacity:
        return self._capacity

    def check_device(self) -> None:
        """Do nothing."""

    def launch(self, plan: StepPlan) -> _Done:
        return _Done(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        num_tokens, num_rows = len(plan.rows.tokens), len(plan.rows.slot)
        self.num_decoding = int((plan.rows.num_tokens == 1).sum())
        num_swapped = (len(plan.swaps_out) + len(plan.swaps_in)) * self._capacity.page_size
        self._clock.now_s += self._cost.swap_s * num_swapped + self._cost.seconds(
            max(num_rows, self._min_rows()), int(plan.rows.start.sum()) + num_tokens, num_tokens - num_rows
        )
        num_draws, width = len(plan.draws.row), int(plan.draws.width.max(initial=1))
        tokens: I32 = np.full((num_draws, width), OUTPUT_TOKEN, np.int32)
        logprobs: F32 = np.zeros((num_draws, width), np.float32)
        if width > 1:
            tokens += np.arange(width, dtype=np.int32)
            gaps = self._random.exponential(BEAM_GAP, (num_draws, width))
            gaps[:, 0] *= FIRST_GAP
            logprobs -= np.cumsum(gaps, axis=1, dtype=np.float32)
        return StepResult(tokens, logprobs, tokens[:, :0], logprobs[:, :0])


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system under study: its memory management and its scheduling.

    `memory`: pages | max | pow2 | oracle. `static_batch`: size of static batches, 0 for iteration-level scheduling.
    `seconds`: of the trace; statistics are sampled from `warm_up_s` on. `drain`: continue to the last request.
    `gives_up_above_s`: end as soon as requests have waited for this time, because the system is saturated.
    """

    memory: str = "pages"
    static_batch: int = 0
    cost: StepCost = OPT_13B
    page_size: int = 16
    max_num_batched_tokens: int = 2560
    max_prefill_time_s: float = 0.0
    max_num_seqs: int = 2048
    prefix_caching: bool = False
    preemption_mode: str = "recompute"
    warm_up_s: float = 0.0
    seconds: float = 900.0
    drain: bool = True
    num_slots: int | None = None
    gives_up_above_s: float = float("inf")


OnFinish = Callable[[Arrival, float], Arrival | None]


def simulate(arrivals: Iterable[Arrival], system: System, on_finish: OnFinish | None = None) -> Outcome:
    """Run the requests through an engine and return what was measured.

    `on_finish` receives a request that ended and the time, and may return a further request.
    Raises: SimulationError if requests wait and no step can be planned, or if a sum of shares exceeds 1.
    """
    return _Simulation(system, on_finish).run(arrivals)


class _Simulation:
    def __init__(self, system: System, on_finish: OnFinish | None) -> None:
        self._system = system
        self._on_finish = on_finish
        self._clock = VirtualClock()
        self._num_slots = system.num_slots or system.cost.num_slots
        self._output_tokens: dict[str, int] = {}
        self._contiguous: ContiguousReservation | None = None
        if system.memory != "pages":
            self._contiguous = ContiguousReservation(self._num_slots, system.memory, self._output_tokens)
        self._static: StaticBatch | None = None
        if system.static_batch:
            self._static = StaticBatch(system.static_batch, self._clock, self._contiguous)
        self._engine = self._build_engine(self._static or self._contiguous)
        self._arrived: dict[str, Arrival] = {}
        self._first_token_s: dict[str, float] = {}
        self._parked: list[str] = []  # requests that ended before their static batch
        self._queue: list[tuple[float, int, Arrival]] = []
        self._num_added = 0
        self._running_area = 0.0
        self._measured_s = 0.0
        self.outcome = Outcome()

    def _build_engine(self, reservation: Reservation | None) -> Engine:
        system, num_pages = self._system, self._num_slots // self._system.page_size
        if self._contiguous is not None:
            num_pages *= 16  # only the reservation limits the memory
        capacity = KVCapacity(
            num_pages + 1,
            system.page_size,
            system.max_num_seqs,
            MAX_MODEL_LEN,
            num_host_pages=num_pages if system.preemption_mode == "swap" else 0,
            swap_page_s=system.cost.swap_s * system.page_size,
        )
        static = self._static
        self._runner = VirtualRunner(
            capacity, system.cost, self._clock, (lambda: static.num_requests) if static is not None else lambda: 0
        )
        config = EngineConfig(
            max_num_seqs=system.max_num_seqs,
            max_num_batched_tokens=system.max_num_batched_tokens,
            max_prefill_time_s=system.max_prefill_time_s,
            enable_prefix_caching=system.prefix_caching,
            scheduling_policy="fcfs",
            preemption_mode=system.preemption_mode,
            max_queued_requests=2**30,
            max_queued_tokens=2**40,
        )
        model = ModelInfo(
            name="simulated", digest="00" * 32, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(), device="simulated",
        )  # fmt: skip
        return Engine(self._runner, model, config, clock=self._clock, reservation=reservation)

    def run(self, arrivals: Iterable[Arrival]) -> Outcome:
        system, clock, engine = self._system, self._clock, self._engine
        for arrival in arrivals:
            self._push(arrival)
        while self._queue or self._arrived:
            if not system.drain and clock.now_s > system.seconds:
                break
            self._submit()
            if not self._arrived:
                clock.now_s = max(clock.now_s, self._queue[0][0])
                continue
            before_s, num_present, num_running = clock.now_s, len(self._arrived), len(engine.scheduler.running)
            events = engine.step()
            if clock.now_s == before_s and not events:
                raise SimulationError(f"{num_present} requests wait and no step can be planned")
            self._account(clock.now_s - before_s, num_present, max(num_running, len(engine.scheduler.running)))
            for event in events:
                if isinstance(event, Started):
                    self._first_token_s[event.request_id] = clock.now_s
                    self.outcome.num_prompt_tokens += event.num_prompt_tokens
                    self.outcome.num_cached_tokens += event.num_cached_tokens
                elif isinstance(event, Finished):
                    self._parked.append(event.request_id)
                elif isinstance(event, Failed):
                    raise SimulationError(event.message)
            if self._static is None or self._static.is_done:
                self._finish_parked()
            if self._waits_too_long():
                break
        return self._summary()

    def _push(self, arrival: Arrival) -> None:
        heapq.heappush(self._queue, (arrival.time_s, self._num_added, arrival))
        self._num_added += 1

    def _submit(self) -> None:
        while self._queue and self._queue[0][0] <= self._clock.now_s:
            _, number, arrival = heapq.heappop(self._queue)
            name = str(number)
            self._output_tokens[name] = arrival.output
            try:
                self._engine.add(GenerateRequest(request_id=name, prompt=arrival.prompt, params=arrival.params()))
            except ContextLengthError:
                self.outcome.num_refused += 1
                continue
            self._arrived[name] = arrival
            self.outcome.present_area += self._clock.now_s - arrival.time_s  # it arrived during the last step

    def _account(self, seconds: float, num_present: int, num_running: int) -> None:
        system, outcome, now_s = self._system, self.outcome, self._clock.now_s
        outcome.num_steps += 1
        outcome.present_area += seconds * num_present
        if self._runner.num_decoding:
            outcome.gaps.append((seconds, self._runner.num_decoding))
        if system.warm_up_s <= now_s <= system.seconds:
            self._running_area += seconds * num_running
            self._measured_s += seconds
            if outcome.num_steps % SAMPLE_EVERY == 0:
                self._sample_memory()

    def _sample_memory(self) -> None:
        scheduler, total = self._engine.scheduler, self._num_slots
        tables = scheduler.tables()
        num_tokens = sum(table.num_tokens for table in tables)
        if self._contiguous is None:
            pool = scheduler.kv.pool
            if tables:
                self.outcome.sharing.append((sum(table.num_pages for table in tables), pool.num_in_use))
            num_held = pool.num_in_use * self._system.page_size
            if num_held <= total and num_tokens <= num_held:  # without shared pages
                self._record(Memory(num_tokens / total, 0.0, (num_held - num_tokens) / total, 1 - num_held / total))
            elif num_held > total:
                raise SimulationError(f"{num_held} of {total} slots are in use")
            return
        reserved = internal = 0
        for request in scheduler.running:
            needed = request.num_prompt_tokens + self._output_tokens[request.request_id]
            reserved += sum(needed - table.num_tokens for table in request.tables())
            internal += len(request.tables()) * (self._contiguous.num_slots(request) - needed)
        other = total - num_tokens - reserved - internal
        self._record(Memory(num_tokens / total, reserved / total, internal / total, other / total))

    def _record(self, memory: Memory) -> None:
        if min(memory) < 0 or max(memory) > 1:
            raise SimulationError(f"impossible shares of memory: {memory}")
        self.outcome.memory.append(memory)

    def _finish_parked(self) -> None:
        for name in self._parked:
            arrival, now_s = self._arrived.pop(name), self._clock.now_s
            self.outcome.finishes.append(Finish(arrival.time_s, self._first_token_s.pop(name), now_s, arrival.output))
            further = self._on_finish(arrival, now_s) if self._on_finish is not None else None
            if further is not None:
                self._push(further)
        self._parked.clear()

    def _waits_too_long(self) -> bool:
        oldest = next(iter(self._arrived.values()), None)
        return oldest is not None and self._clock.now_s - oldest.time_s > self._system.gives_up_above_s

    def _summary(self) -> Outcome:
        outcome, scheduler = self.outcome, self._engine.scheduler
        outcome.seconds = self._clock.now_s
        outcome.mean_running = self._running_area / self._measured_s if self._measured_s else 0.0
        outcome.num_unfinished = len(self._arrived)
        outcome.num_preemptions = scheduler.num_preemptions
        outcome.num_page_copies = scheduler.num_page_copies
        if not outcome.num_unfinished:
            check_littles_law(outcome)
        return outcome


def check_littles_law(outcome: Outcome) -> None:
    """Verify that mean number present x time = sum of the times in the system.

    Raises: SimulationError. Source: Little, "A Proof for the Queuing Formula: L = lambda W", 1961.
    """
    total_s = sum(finish.finished_s - finish.arrived_s for finish in outcome.finishes)
    if abs(total_s - outcome.present_area) > 1e-6 * max(total_s, 1.0):
        raise SimulationError(f"Little's law is violated: {outcome.present_area:.3f} is not {total_s:.3f}")


def sustained_rate(points: Sequence[tuple[float, float]], limit_s: float = 0.5) -> float | None:
    """Return the highest rate with a normalized latency of at most `limit_s`; points are (rate, latency), by rate.

    Interpolated between the last point within the limit and the first above it; None if the first is above it, the
    last rate if none is.
    """
    if not points or points[0][1] > limit_s:
        return None
    for (rate, latency), (next_rate, next_latency) in pairwise(points):
        if next_latency > limit_s:
            if next_latency == float("inf"):
                return rate
            share = np.log(limit_s / latency) / np.log(next_latency / latency)
            return float(rate + share * (next_rate - rate))
    return points[-1][0]


def system_named(name: str, base: System) -> System:
    """Return `base` with the memory management and scheduling of a name such as "pages", "oracle" or "static 7"."""
    if name.startswith("static"):
        return replace(base, memory="max", static_batch=int(name.split()[1]), max_num_batched_tokens=2**15)
    return replace(base, memory=name)
