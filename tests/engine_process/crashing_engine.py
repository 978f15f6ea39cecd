"""An engine in a child process that crashes on some requests, and the expected events."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.engine.protocols import EngineClient
from chatcache.engine_process.process import EngineProcess, RestartPolicy
from chatcache.errors import OverloadedError
from chatcache.types.events import Beams, CandidateDone, EngineEvent, Failed, Finished, Started, Tokens
from chatcache.types.plan import StepPlan, StepResult
from chatcache.types.request import BeamSearchParams, GenerateRequest, SamplingParams, StructuredOutputs
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

VOCAB = 256
VOCABULARY = tuple(bytes([byte]) for byte in range(VOCAB))
NUM_PROMPT = 20
POISON_SEED = 6660  # + k: the engine dies as the k-th token after the prompt is drawn
HANG_SEED = 7770
QUICK = RestartPolicy(max_deaths=4, first_delay_s=0.01, hung_after_s=60.0)


class CrashingRunner(FakeRunner):
    """The fake runner, except that poisoned requests crash it."""

    def execute(self, plan: StepPlan) -> StepResult:
        for seed, position in zip(plan.draws.seed.tolist(), plan.draws.position.tolist(), strict=True):
            if 0 <= seed - POISON_SEED <= position - NUM_PROMPT < 100:
                os.abort()
            if seed == HANG_SEED:
                time.sleep(3600)
        return super().execute(plan)


def build(config: EngineConfig, progress: object) -> Engine:
    """Build an engine; `model` is the duration of a step in milliseconds."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    capacity = fake_capacity(4096, 16, 256, 4096, has_async_launch=True)
    runner = CrashingRunner(capacity, VOCAB, None, delay_s=float(config.model or 0) / 1000)
    return Engine(runner, fake_model_info(VOCAB, ()), config, VOCABULARY)


class KilledRunner(FakeRunner):
    """The fake runner, except that it kills its process at the output position in the file `kill_at`, once."""

    def __init__(self, kill_at: Path) -> None:
        super().__init__(fake_capacity(4096, 16, 256, 4096), VOCAB, None)
        self._kill_at = kill_at

    def execute(self, plan: StepPlan) -> StepResult:
        if self._kill_at.exists() and (plan.draws.position >= NUM_PROMPT + int(self._kill_at.read_text())).any():
            self._kill_at.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(plan)


def build_killed(config: EngineConfig, progress: object) -> Engine:
    """Build an engine with a `KilledRunner`; `model` is its file."""
    return Engine(KilledRunner(Path(config.model)), fake_model_info(VOCAB, ()), config, VOCABULARY)


def process(step_ms: float = 1, policy: RestartPolicy = QUICK) -> EngineProcess:
    config = EngineConfig(model=str(step_ms))
    return EngineProcess(config, "tests.engine_process.crashing_engine:build", policy=policy, log_level="error")


KINDS: Sequence[dict[str, object]] = (
    {"temperature": 0.0},
    {},
    {"n": 3, "logprobs": 1},
    {"seed": 11, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    {"n": 2, "frequency_penalty": 0.3, "stop": ("\x01\x02\x03",)},
)


SEARCHES: dict[str, BeamSearchParams | SamplingParams] = {
    "beams": BeamSearchParams(beam_width=4, max_tokens=12, logprobs=1, stream_beams=True, stop_token_ids=(1, 2, 3)),
    "diverse beams": BeamSearchParams(beam_width=6, num_beam_groups=3, diversity_penalty=0.5, max_tokens=12),
    "best_of": SamplingParams(n=2, best_of=4, max_tokens=12, seed=1, presence_penalty=0.5),
    "distinct": SamplingParams(n=4, distinct=True, max_tokens=12, seed=1),
}

SAMPLED: dict[str, SamplingParams] = {
    "sampling": SamplingParams(max_tokens=12, seed=1, min_p=0.01),
    "candidates": SamplingParams(n=3, max_tokens=12, seed=1, logprobs=2),
    "penalties": SamplingParams(
        max_tokens=12, seed=1, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
    ),
    "grammar": SamplingParams(max_tokens=12, seed=1, structured_outputs=StructuredOutputs(regex="([a-c][0-9]){20}")),
}


def make_search(kind: str, name: str, max_tokens: int = 12) -> GenerateRequest:
    """Create a request of one of the SEARCHES, or of SAMPLED."""
    params = replace((SEARCHES | SAMPLED)[kind], max_tokens=max_tokens)
    return GenerateRequest(request_id=name, prompt=tuple(range(3, 3 + NUM_PROMPT)), params=params)


def make_request(number: int, max_tokens: int, **params: object) -> GenerateRequest:
    prompt = tuple((number * 7 + i) % VOCAB for i in range(NUM_PROMPT))
    more = {"max_tokens": max_tokens, **(params or KINDS[number % len(KINDS)])}
    return GenerateRequest(request_id=f"r{number}", prompt=prompt, params=SamplingParams(**more))  # type: ignore[arg-type]


def poison(number: int, at: int = 0, max_tokens: int = 40) -> GenerateRequest:
    return make_request(number, max_tokens, seed=POISON_SEED + at)


def expected_events(requests: Sequence[GenerateRequest]) -> dict[str, list[EngineEvent]]:
    engine = build(EngineConfig(model="0"), None)
    for request in requests:
        engine.add(request)
    events: dict[str, list[EngineEvent]] = {request.request_id: [] for request in requests}
    while engine.has_work():
        for event in engine.step():
            events[event.request_id].append(event)
    return events


class RequestGroup:
    """Requests and their readers.

    `retries`: submit a request again that was refused with "try again", as when all engines start anew at once.
    """

    def __init__(self, engine: EngineClient, requests: Sequence[GenerateRequest], *, retries: bool = False) -> None:
        self._retries = retries
        self.events: dict[str, list[EngineEvent]] = {request.request_id: [] for request in requests}
        self._engine = engine
        self._requests = requests
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Submit all requests; a submit may take longer than the life of a child."""
        self._tasks = [asyncio.create_task(self._one(request)) for request in self._requests]

    async def _one(self, request: GenerateRequest) -> None:
        while True:
            try:
                await self._engine.submit(request)
                break
            except OverloadedError:
                if not self._retries:
                    raise
                await asyncio.sleep(0.01)
        async for event in self._engine.events(request.request_id):
            self.events[request.request_id].append(event)

    @property
    def open_ones(self) -> list[str]:
        return [name for name, events in self.events.items() if not events or not is_end(events[-1])]

    def num_tokens(self, name: str) -> int:
        return sum(isinstance(event, Tokens) for event in self.events[name])

    async def wait_for_progress(self) -> None:
        """Wait until every unfinished request has received more tokens."""
        before = {name: self.num_tokens(name) for name in self.events}
        await until(lambda: all(self.num_tokens(name) > before[name] for name in self.open_ones))

    async def end(self, timeout_s: float = 120.0) -> None:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*self._tasks)


def is_end(event: EngineEvent) -> bool:
    return isinstance(event, Finished | Failed)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came to that"
        await asyncio.sleep(0.005)


async def wait_for_search_steps(engine: EngineProcess, num_searches: int, num_steps: int) -> None:
    """Wait until the searches are submitted, and each has done that many steps more."""
    await until(lambda: len(engine._recovery._by_id) == num_searches)
    journals = [each.journal for each in engine._recovery._by_id.values()]
    goals = [journal.num_search_steps + num_steps for journal in journals]
    await until(lambda: all(each.num_search_steps >= goal for each, goal in zip(journals, goals, strict=True)))


def check_same(found: list[EngineEvent], expected: list[EngineEvent]) -> None:
    """Check for gaps, repetitions and one end, and for bit-equality with an undisturbed run."""
    assert [event.seq for event in found] == list(range(1, len(found) + 1)), "a gap, or something twice"
    assert [is_end(event) for event in found].count(True) == 1, "more than one end, or none"
    assert isinstance(found[-1], Finished), f"ended in {found[-1]}"
    assert visible_output(found) == visible_output(expected), "not what an undisturbed run says"


def visible_output(events: list[EngineEvent]) -> list[object]:
    streams: dict[int, list[object]] = {}
    for event in events:
        if isinstance(event, Tokens):
            streams.setdefault(event.index, []).append((event.token_ids, event.logprobs, event.score))
        elif isinstance(event, CandidateDone):
            streams.setdefault(event.index, []).append((event.finish_reason, event.stop_reason, event.score))
        elif isinstance(event, Beams):
            streams.setdefault(-1, []).append(event.beams)
    last = events[-1]
    figures = (last.num_prompt_tokens, last.num_output_tokens) if isinstance(last, Finished) else ()
    return [sorted(streams.items()), sum(isinstance(event, Started) for event in events), figures]
