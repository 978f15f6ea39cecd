"""Engines for process tests, built in the child by import path."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.engine_process.process import EngineProcess, RestartPolicy
from chatcache.engine_process.protocol import MAX_FRAME_BYTES
from chatcache.errors import ContextLengthError, DeviceLostError, ModelFolderError, UnsupportedParameterError
from chatcache.types.events import CandidateDone, EngineEvent, Finished, SearchStep, Started, Tokens
from chatcache.types.plan import StepPlan, StepResult
from chatcache.types.request import GenerateRequest, SamplingParams
from chatcache.types.stats import (
    EngineHealth,
    ExplainQuery,
    Explanation,
    ModelInfo,
    PackedPrompt,
    PageAccounts,
    PageHit,
    PageMap,
)
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

LOST = "the device is lost: an illegal memory access"
FAST = RestartPolicy(max_deaths=3, first_delay_s=0.01)


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def expected_tokens(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Oracle: the tokens that `CountingEngine` generates for a prompt."""
    return [(sum(prompt) * 31 + position) % 1000 for position in range(num_tokens)]


class CountingEngine:
    """Emits one predictable token per request and step; `step_s` is the duration of a step."""

    search_steps: Sequence[SearchStep] = ()
    invalid_grammars: Sequence[str] = ()

    def __init__(self, step_s: float = 0.0) -> None:
        self.model_info = ModelInfo(name="counting", digest="00", vocab_size=1000, max_model_len=100_000)
        self._step_s = step_s
        self._running: dict[str, tuple[GenerateRequest, int, int]] = {}
        self._ended: list[EngineEvent] = []
        self._num_steps = 0

    def add(self, request: GenerateRequest) -> None:
        if len(request.prompt) > 1000:
            raise ContextLengthError(f"{len(request.prompt)} tokens do not fit", param="prompt")
        resumed = request.resume_point
        produced = len(resumed.candidates[0].tokens) // 4 if resumed is not None and resumed.candidates else 0
        self._running[request.request_id] = (request, produced, resumed.last_seq if resumed is not None else 0)

    def abort(self, request_id: str) -> None:
        if request_id in self._running:
            request, produced, seq = self._running.pop(request_id)
            self._ended.append(Finished(request_id, seq + 1, len(request.prompt), 0, produced, cancelled=True))

    def cancel_candidate(self, request_id: str, index: int) -> None:
        """Cancel the only candidate."""
        if index:
            raise UnsupportedParameterError(f"no {index}", param="candidate")
        self.abort(request_id)

    def is_compiling_grammar(self, request_id: str) -> bool:
        return False

    def has_work(self) -> bool:
        return bool(self._running or self._ended)

    def check_device(self) -> None:
        """Do nothing."""

    def pop_events(self) -> list[EngineEvent]:
        events, self._ended = self._ended, []
        return events

    def step(self) -> list[EngineEvent]:
        time.sleep(self._step_s)
        self._num_steps += 1
        events = self.pop_events()
        for name, (request, produced, seq) in list(self._running.items()):
            if not produced:
                events.append(Started(name, seq := seq + 1, len(request.prompt), 0))
            limit = request.params.max_tokens or 16
            token = expected_tokens(request.prompt, produced + 1)[-1]
            events.append(Tokens(name, seq := seq + 1, 0, (token,)))
            self._running[name] = (request, produced + 1, seq)
            if produced + 1 == limit:
                events.append(CandidateDone(name, seq := seq + 1, 0, "length"))
                events.append(Finished(name, seq + 1, len(request.prompt), 0, limit))
                del self._running[name]
        return events

    def health(self) -> EngineHealth:
        return EngineHealth(
            ready=True,
            load_fraction=1.0,
            model="counting",
            num_running=len(self._running),
            num_steps=self._num_steps,
        )

    @property
    def cache(self) -> Self:
        return self

    def explain(self, query: ExplainQuery) -> Explanation:
        """Fail in namespace "bug"; in "big", return more than a frame holds."""
        if query.namespace == "bug":
            raise KeyError("planted")
        detail = "x" * MAX_FRAME_BYTES if query.namespace == "big" else repr(query)
        pages = (PageHit(0, 16, "idle", public=True, map_index=7), PageHit(1, 3, "missing"))
        return Explanation(num_tokens=len(query.prompt), num_cached_tokens=16, page_size=16, pages=pages, detail=detail)

    def count_cached_tokens(self, prompts: Sequence[PackedPrompt], namespace: str = "") -> list[int]:
        return [len(each.tokens) + each.num_public_tokens + len(namespace) for each in prompts]

    def page_map(self, namespace: str = "", *, operator: bool = False) -> PageMap:
        cells = "s" if operator else namespace
        return PageMap(page_size=16, num_pages=1, num_pages_per_cell=1, cells=cells)

    def page_accounts(self) -> PageAccounts:
        held = dict.fromkeys(self._running, 0.5)
        return PageAccounts(
            num_pages_in_use=1, page_bytes=4096, requests=held, conversations={}, namespaces={}, states={}
        )

    def stats(self) -> dict[str, int]:
        return {"num_steps": self._num_steps}

    def reset_prefix_cache(self) -> bool:
        return not self._running


def build(config: EngineConfig, progress: Callable[[float, str], None]) -> CountingEngine:
    """Build by `model`: "", "slow" (10 ms steps), "broken", "bug", "loading" or "dies"."""
    progress(0.5, "half way")
    if config.model == "broken":
        raise ModelFolderError("config.json: missing")
    if config.model == "bug":
        raise RuntimeError("planted")
    if config.model == "dies":
        os._exit(9)
    if config.model == "loading":
        time.sleep(600)
    return CountingEngine(step_s=0.01 if config.model == "slow" else 0.0)


def build_fake(config: EngineConfig, progress: Callable[[float, str], None]) -> Engine:
    """Build the real engine over the fake runner."""
    return Engine(FakeRunner(delay_s=0.001), fake_model_info(), config)


def build_small(config: EngineConfig, progress: Callable[[float, str], None]) -> Engine:
    """Build the real engine over the fake runner with few pages."""
    return Engine(FakeRunner(fake_capacity(64, 4)), fake_model_info(), config)


class WaitingEngine(Engine):
    """Pauses at its fortieth step until one branch is left, or 20 s have passed."""

    _num_waits = 0

    def step(self) -> list[EngineEvent]:
        num_branches = sum(len(each.branches) for each in self.scheduler.running)
        if self.health().num_steps < 40 or num_branches <= 1 or self._num_waits == 20_000:
            return super().step()
        self._num_waits += 1
        time.sleep(0.001)
        return self.pop_events()


def build_waiting(config: EngineConfig, progress: object) -> Engine:
    """Build an engine that waits for seven of eight candidates to be cancelled."""
    return WaitingEngine(FakeRunner(delay_s=0.001), fake_model_info(), config)


class LosingRunner(FakeRunner):
    """Loses its device in its tenth step."""

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step >= 10:
            raise DeviceLostError(LOST)
        return super().execute(plan)


def build_losing(config: EngineConfig, progress: object) -> Engine:
    """Build an engine that will lose its device; `model` "ahead" launches asynchronously."""
    capacity = fake_capacity(has_async_launch=config.model == "ahead")
    return Engine(LosingRunner(capacity, eos=None, delay_s=0.03), fake_model_info(eos=()), config)


class IdleLosingRunner(FakeRunner):
    """Loses its device while it is idle, after the first step."""

    _num_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self._num_steps += 1
        return super().execute(plan)

    def check_device(self) -> None:
        if self._num_steps:
            raise DeviceLostError(LOST)


def build_idle_losing(config: EngineConfig, progress: object) -> Engine:
    """Build an engine that will lose its device after its first request."""
    return Engine(IdleLosingRunner(), fake_model_info(), config)


def request(name: str, max_tokens: int = 16, prompt: tuple[int, ...] = (1, 2, 3)) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt=prompt, params=SamplingParams(max_tokens=max_tokens))


def process(model: str = "", policy: RestartPolicy = FAST) -> EngineProcess:
    """Create a client of a child that runs `build`."""
    return EngineProcess(
        EngineConfig(model=model), "tests.engine_process.engines:build", policy=policy, log_level="error"
    )


def build_spelling(config: EngineConfig, progress: object) -> Engine:
    """Build the real engine over the fake runner with one byte per token."""
    runner = FakeRunner(vocab_size=256, eos=None)
    return Engine(runner, fake_model_info(256, ()), config, tuple(bytes([byte]) for byte in range(256)))
