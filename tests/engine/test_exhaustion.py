"""Random load on 64 pages: no request stalls or starves, and rejections give numbers."""

from __future__ import annotations

import os
import random
import re
from typing import Any

import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.errors import ContextLengthError
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.pool import InvariantError
from chatcache.scheduler.queue import WaitingQueue
from chatcache.scheduler.request import LiveRequest
from chatcache.scheduler.scheduler import Scheduler
from chatcache.types.events import Failed, Finished
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from tests.engine.workloads import step_and_watch
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

SEED = int(os.environ.get("CHATCACHE_TEST_SEED", 17))
NUM_PAGES = 64
VOCAB = 32
MAX_IDLE_STEPS = 1000  # without an end


class Trace:
    """One engine and its random requests; pages are small, so the pool is often exhausted."""

    def __init__(self, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        self._page_size = draw.choice((1, 1, 1, 2))
        host = draw.choice((0, 0, 24, 64))
        capacity = fake_capacity(
            NUM_PAGES, self._page_size, 16, 96, num_host_pages=host, has_async_launch=draw.random() < 0.3
        )
        config = EngineConfig(
            strict=True,
            max_num_batched_tokens=draw.choice((7, 16, 64)),
            max_num_seqs=16,
            scheduling_policy=draw.choice(("fcfs", "fcfs", "priority", "fair")),
        )
        runner = FakeRunner(capacity, VOCAB)
        self.engine = Engine(runner, fake_model_info(VOCAB), config, clock=runner.clock)
        self.num_refused = self.num_finished = self.num_preemptions = 0

    def play(self) -> None:
        """Run the trace to its end.

        Raises: AssertionError for a stall, a sixth preemption, or a preemption of the oldest request.
        """
        left, idle = self._draw.randint(3, 5), 0
        open_ids: set[str] = set()
        while left or self.engine.has_work():
            while left and self._draw.random() < 0.5:
                left -= 1
                self._ask(f"r{left}", open_ids)
            ended = [e for e in step_and_watch(self.engine) if isinstance(e, Finished | Failed)]
            assert all(isinstance(each, Finished) for each in ended), ended
            open_ids -= {each.request_id for each in ended}
            self.num_finished += len(ended)
            idle = 0 if ended or not open_ids else idle + 1
            assert idle < MAX_IDLE_STEPS, "the engine stalls"
        assert not open_ids
        self.num_preemptions = self.engine.health().num_preemptions
        self.engine.cache.check()

    def _ask(self, name: str, open_ids: set[str]) -> None:
        draw = self._draw
        prompt = tuple(draw.randrange(1, VOCAB) for _ in range(draw.choice((1, 3, 9, 20, 26))))
        max_tokens = draw.choice((1, 5, 12, 24, None))  # None: as many as the context or the pool allows
        shared: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": max_tokens is not None}
        params: Params = SamplingParams(n=draw.choice((1, 1, 1, 2, 3)), seed=draw.randrange(99), **shared)
        if draw.random() < 0.2:
            params = BeamSearchParams(beam_width=draw.choice((2, 3)), **shared)
        request = GenerateRequest(
            request_id=name,
            prompt=prompt,
            params=params,
            priority=draw.choice((0, 0, 3)),
            namespace=draw.choice(("", "a", "b")),
        )
        try:
            self.engine.add(request)
        except ContextLengthError as refusal:
            self._check_refusal(refusal.message, len(prompt), max_tokens or 1)
        else:
            open_ids.add(name)

    def _check_refusal(self, message: str, num_prompt: int, max_tokens: int) -> None:
        numbers = {int(number) for number in re.findall(r"\d+", message)}
        assert {num_prompt, max_tokens, NUM_PAGES - 1} <= numbers, message
        self.num_refused += 1


def check(num_traces: int, seed: int = SEED) -> Trace:
    """Run that many traces; return their sums."""
    total = Trace(seed)
    for number in range(num_traces):
        trace = Trace(seed * 1_000_003 + number)
        try:
            trace.play()
        except BaseException:
            print(f"trace {number} of CHATCACHE_TEST_SEED={seed}")
            raise
        total.num_refused += trace.num_refused
        total.num_finished += trace.num_finished
        total.num_preemptions += trace.num_preemptions
    return total


def test_thirty_random_traces_on_64_pages_finish() -> None:
    total = check(30)
    assert total.num_finished > 50


@pytest.mark.slow
def test_300_random_traces_on_64_pages_finish() -> None:
    total = check(300)
    assert total.num_finished > 600 and total.num_preemptions > 30 and total.num_refused > 9


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_random_traces_on_64_pages_finish(part: int) -> None:
    check(1000, SEED + part + 1)


def oldest_is_preempted_first(patch: pytest.MonkeyPatch) -> None:
    """The oldest request is preempted for the others."""
    original = Scheduler._preempt
    patch.setattr(Scheduler, "_preempt", lambda self, request: original(self, self.running[0]))


def preempted_again_and_again(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._preempt

    def preempt(self: Scheduler, request: LiveRequest) -> None:
        original(self, request)
        request.num_preemptions += 5

    patch.setattr(Scheduler, "_preempt", preempt)


def nothing_is_admitted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "find_start", lambda self, *args, **kwargs: None)


def pages_leak(patch: pytest.MonkeyPatch) -> None:
    """Pages of finished requests are never freed."""
    patch.setattr(KVCache, "close", lambda self, *args, **kwargs: None)


def no_numbers(patch: pytest.MonkeyPatch) -> None:
    """A request that never fits is rejected without the numbers."""
    original = ContextLengthError.__init__
    patch.setattr(ContextLengthError, "__init__", lambda self, *_, **__: original(self, "this does not fit"))


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (oldest_is_preempted_first, "the first in turn was preempted"),
        (preempted_again_and_again, r"preempted \d+ times"),
        (nothing_is_admitted, "the engine stalls"),
        (pages_leak, r"page \d+ counts \d+ holders and has 0"),
        (no_numbers, "this does not fit"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_random_traces_detect_an_injected_bug(bug: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, InvariantError), match=words):
        check(40, seed=17)
