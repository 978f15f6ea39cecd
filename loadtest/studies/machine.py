"""The real engine on this machine: a model with random weights, a KV memory as small as a study needs, real time.

CPUs run the shape of SmolLM2-135M, GPUs that of Qwen3-0.6B.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec
import torch

from chatcache.bench.device import synchronize
from chatcache.bench.drivers import SHAPES, RandomWeights, write_config
from chatcache.bench.report import cpu_name
from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.engine.protocols import StepHandle
from chatcache.errors import EngineError
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import Runner
from chatcache.scheduler.scheduler import Reservation
from chatcache.types.events import Failed, Finished, Started, Tokens
from chatcache.types.plan import KVCapacity, StepPlan, StepResult
from chatcache.types.request import GenerateRequest
from loadtest.studies.results import Context
from loadtest.studies.simulate import Arrival, Finish, Memory, Outcome, VirtualClock

KV_TOKENS = 8192  # slots that each loaded model has; studies use fewer
MAX_LEN = 4096
SAMPLE_EVERY = 4  # steps between two samples of the memory
K = TypeVar("K")
R = TypeVar("R")


class LimitedRunner:
    """A runner of which the engine uses at most `num_slots` KV slots. Satisfies `ModelRunner`."""

    def __init__(self, runner: Runner, num_slots: int) -> None:
        capacity = runner.capacity()
        num_pages = min(num_slots // capacity.page_size + 1, capacity.num_pages)
        self._runner, self._capacity = runner, replace(capacity, num_pages=num_pages)

    def capacity(self) -> KVCapacity:
        return self._capacity

    def check_device(self) -> None:
        self._runner.check_device()

    def execute(self, plan: StepPlan) -> StepResult:
        return self._runner.execute(plan)

    def launch(self, plan: StepPlan) -> StepHandle:
        return self._runner.launch(plan)


@dataclass(frozen=True, slots=True)
class RealModel:
    """A loaded model. Its engines share its pages, so the last one must be idle before the next is built."""

    name: str
    runner: Runner
    config: EngineConfig

    @property
    def label(self) -> str:
        """The model and its device, for titles."""
        return f"{self.name} shape on {'a GPU' if self.runner.model_info.device.startswith('cuda') else 'CPU'}"

    @property
    def vocab_size(self) -> int:
        return self.runner.model_info.vocab_size

    def engine(self, num_slots: int = KV_TOKENS, *, reservation: Reservation | None = None, **settings: Any) -> Engine:
        """Return a new engine with so many KV slots and these settings; by default it reuses no prefixes."""
        given = {"enable_prefix_caching": False, "scheduling_policy": "fcfs", "max_prefill_time_s": 0.0, **settings}
        config = msgspec.structs.replace(self.config, **given)
        runner = LimitedRunner(self.runner, num_slots)
        return Engine(runner, self.runner.model_info, config, reservation=reservation)

    def prompt(self, rng: random.Random, num_tokens: int) -> tuple[int, ...]:
        """Return random tokens."""
        return tuple(rng.randrange(self.vocab_size) for _ in range(num_tokens))


def open_model(context: Context, page_size: int = 16) -> RealModel:
    """Return the model with pages of this size; it stays loaded until the run ends."""
    return context.keep(("model", page_size), lambda: _load(context.shape_name, context.device, page_size))


def chip_name(device: str) -> str:
    """Return the name of the processor or GPU."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name()


@contextmanager
def _load(name: str, device: str, page_size: int) -> Iterator[RealModel]:
    shape = SHAPES[name]
    max_len = min(MAX_LEN, shape.max_position)
    token_bytes = 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    with TemporaryDirectory() as folder:
        write_config(shape, Path(folder))
        config = EngineConfig(
            model=folder, served_model_name=name, device=device, page_size=page_size, max_model_len=max_len,
            kv_memory_bytes=(KV_TOKENS + page_size) * token_bytes, swap_space_bytes=KV_TOKENS // 2 * token_bytes,
            max_num_seqs=64, max_num_batched_tokens=2560,
        )  # fmt: skip
        runner = load_model(config, weights=RandomWeights(shape, device))
        try:
            yield RealModel(name, runner, config)
        finally:
            runner.close()


def repeat(context: Context, cases: Mapping[K, Callable[[], R]], num_rounds: int, share: float) -> dict[K, list[R]]:
    """Run each case once per round, so that changes of the machine's speed affect all alike.

    `share`: of the study's work.
    """
    found: dict[K, list[R]] = {name: [] for name in cases}
    for _ in range(num_rounds):
        for name, run in cases.items():
            found[name].append(run())
            context.advance(share / (num_rounds * len(cases)))
    return found


@dataclass(slots=True)
class _Live:
    """A request that was submitted, and the times of its tokens."""

    arrival: Arrival
    submitted_s: float
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    tokens: list[int] = field(default_factory=list)


class RequestLoop:
    """Submits requests to an engine and steps it, in real time.

    `num_users`: requests in the engine at once; the next is submitted when one ends. 0: all at the start.
    `clock`: is set to the time of each step before it begins.
    """

    def __init__(self, engine: Engine, num_users: int = 0, clock: VirtualClock | None = None) -> None:
        self._engine = engine
        self._num_users = num_users
        self._clock = clock or VirtualClock()
        self._live: dict[str, _Live] = {}
        self._num_added = 0
        self.outcome = Outcome()
        self.last_tokens: list[int] = []  # output of the request that ended last

    def run(self, arrivals: Sequence[Arrival], output_tokens: dict[str, int] | None = None) -> Outcome:
        """Run all requests to their ends. `output_tokens` receives the length of each output, by request id.

        Raises: EngineError if a request failed.
        """
        engine, outcome, waiting, running_area = self._engine, self.outcome, deque(arrivals), 0.0
        start_s = now_s = time.perf_counter()
        while waiting or self._live:
            while waiting and (not self._num_users or len(self._live) < self._num_users):
                self._submit(waiting.popleft(), output_tokens)
            before_s = self._clock.now_s = now_s
            events = engine.step()
            now_s = time.perf_counter()
            running_area += (now_s - before_s) * len(engine.scheduler.running)
            outcome.num_steps += 1
            if outcome.num_steps % SAMPLE_EVERY == 0:
                self._sample_memory()
            for event in events:
                self._handle(event, now_s)
        synchronize(self._engine.model_info.device)
        outcome.seconds = time.perf_counter() - start_s
        outcome.mean_running = running_area / outcome.seconds
        outcome.num_preemptions = engine.scheduler.num_preemptions
        return outcome

    def _submit(self, arrival: Arrival, output_tokens: dict[str, int] | None) -> None:
        name, self._num_added = str(self._num_added), self._num_added + 1
        if output_tokens is not None:
            output_tokens[name] = arrival.output
        self._live[name] = _Live(arrival, time.perf_counter())
        self._engine.add(GenerateRequest(request_id=name, prompt=arrival.prompt, params=arrival.params()))

    def _handle(self, event: object, now_s: float) -> None:
        if isinstance(event, Failed):
            raise EngineError(event.message, code=event.code)
        if isinstance(event, Started):
            self._live[event.request_id].first_token_s = now_s
            self.outcome.num_prompt_tokens += event.num_prompt_tokens
            self.outcome.num_cached_tokens += event.num_cached_tokens
        elif isinstance(event, Tokens):
            live = self._live[event.request_id]
            live.tokens += event.token_ids
            if live.last_token_s:
                self.outcome.gaps.append((now_s - live.last_token_s, 1))
            live.last_token_s = now_s
        elif isinstance(event, Finished):
            live = self._live.pop(event.request_id)
            self.last_tokens = live.tokens
            self.outcome.finishes.append(Finish(live.submitted_s, live.first_token_s, now_s, len(live.tokens)))

    def _sample_memory(self) -> None:
        scheduler, page_size = self._engine.scheduler, self._engine.scheduler.kv.page_size
        tables, pool = scheduler.tables(), scheduler.kv.pool
        if not tables:
            return
        total, num_held = pool.num_usable * page_size, pool.num_in_use * page_size
        num_tokens = sum(table.num_tokens for table in tables)
        self.outcome.memory.append(
            Memory(num_tokens / total, 0.0, (num_held - num_tokens) / total, 1 - num_held / total)
        )
