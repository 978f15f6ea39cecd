"""More requests than the pages hold: unknown answer lengths cost no more steps than known ones.

Steps are counted, not seconds: a step gives every running branch one token, so the number of steps per output token
shows how long a request waited, and how much of it was computed again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pytest

from chatcache.config import EngineConfig
from chatcache.engine import admission
from chatcache.engine.engine import Engine
from chatcache.errors import ContextLengthError
from chatcache.scheduler import queue
from chatcache.scheduler.queue import MAX_PREEMPTIONS, Start, WaitingQueue
from chatcache.scheduler.request import LiveRequest
from chatcache.types.events import Failed, Finished, Tokens
from chatcache.types.plan import StepPlan, StepResult
from chatcache.types.request import BeamSearchParams, GenerateRequest, SamplingParams, num_branches
from tests.engine.workloads import step_and_watch
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

PAGE = 4
NUM_PAGES = 240
CONTEXT = NUM_PAGES * PAGE  # as large as the pool: without max_tokens, one request may need all of it


class HiddenLengths(FakeRunner):
    """Ends each answer at the position that its seed names, which the scheduler cannot know."""

    def execute(self, plan: StepPlan) -> StepResult:
        draws = plan.draws
        ends = draws.position >= draws.seed.astype(np.int64)
        tokens = np.where(ends, 0, 5).astype(np.int32)[:, None]
        nothing = np.zeros((len(tokens), 0))
        return StepResult(tokens, np.full(tokens.shape, -1, np.float32), nothing.astype(np.int32), nothing.astype("f4"))


class Load(NamedTuple):
    """A pool, and prompts and answers with gamma-distributed lengths that are more than it holds."""

    num_pages: int
    page_size: int
    context: int
    mean_lengths: tuple[int, int]  # of prompts and answers
    max_length: int
    strict: bool = True


SMALL = Load(NUM_PAGES, PAGE, CONTEXT, (40, 84), 370)
# The pool of OPT-13B on one A100 in the PagedAttention paper, with the context of a current model and the lengths of
# ShareGPT.
FULL_SIZE = Load(981, 16, 40_960, (161, 338), 1500, strict=False)
NUM_FIRST_STEPS = 1500  # until the pages of FULL_SIZE are in use


class Usage(NamedTuple):
    """What a load cost. `pages_in_use`: mean share of the pages once the pool had filled, while requests arrived."""

    steps_per_token: float
    most_preemptions: int
    pages_in_use: float


def usage(max_tokens: int | None, *, seed: int, num_requests: int, steps_between: float, load: Load = SMALL) -> Usage:
    """Run a load to its end. `max_tokens=0`: each request names its true length."""
    draw = random.Random(seed)
    capacity = fake_capacity(load.num_pages + 1, load.page_size, 64 if load is SMALL else 256, load.context)
    config = EngineConfig(
        page_size=load.page_size, enable_prefix_caching=False, preemption_mode="recompute", strict=load.strict
    )
    engine = Engine(HiddenLengths(capacity, 64), fake_model_info(64, max_model_len=load.context), config)
    born: dict[str, tuple[int, int]] = {}
    num_steps = num_waited = num_tokens = most = 0
    shares: list[float] = []
    while len(born) < num_requests or engine.has_work():
        if len(born) < num_requests and num_steps >= len(born) * steps_between:
            prompt, answer = (
                min(max(round(draw.gammavariate(1, mean)), 1), load.max_length) for mean in load.mean_lengths
            )
            params = SamplingParams(
                max_tokens=answer if max_tokens == 0 else max_tokens, seed=prompt + answer - 1, temperature=0.0
            )
            name = str(len(born))
            born[name] = num_steps, answer
            engine.add(GenerateRequest(request_id=name, prompt=(1,) * prompt, params=params))
        events = engine.step()
        num_steps += 1
        if num_steps > NUM_FIRST_STEPS and len(born) < num_requests:
            shares.append(engine.scheduler.kv.pool.num_in_use / load.num_pages)
        most = max((most, *(request.num_preemptions for request in engine.scheduler.requests())))
        for event in events:
            if isinstance(event, Finished):
                start, length = born[event.request_id]
                num_waited, num_tokens = num_waited + num_steps - start, num_tokens + length
    return Usage(num_waited / num_tokens, most, fmean(shares or [0.0]))


def test_unknown_lengths_cost_no_more_steps_than_known_ones() -> None:
    known, none = (
        usage(max_tokens, seed=0, num_requests=60, steps_between=10).steps_per_token for max_tokens in (0, None)
    )
    assert none <= known * 1.05


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "most"), [(0, 3.0), (1, 1.8), (2, 2.6)])
def test_unknown_lengths_under_long_pressure_cost_no_more_steps(seed: int, most: float) -> None:
    known, unknown = (usage(m, seed=seed, num_requests=150, steps_between=11) for m in (0, None))
    assert unknown.steps_per_token <= known.steps_per_token * 1.05 and unknown.steps_per_token < most
    assert unknown.most_preemptions <= MAX_PREEMPTIONS


def check_full_size(seed: int) -> None:
    unknown = usage(None, seed=seed, num_requests=600, steps_between=12, load=FULL_SIZE)
    assert unknown.steps_per_token < 1.5, f"{unknown}"
    assert unknown.pages_in_use > 0.8, f"{unknown}"
    assert unknown.most_preemptions <= MAX_PREEMPTIONS


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_unknown_lengths_on_981_pages_cost_few_steps_and_leave_few_pages_idle(seed: int) -> None:
    check_full_size(seed)


@pytest.mark.slow
def test_full_size_load_detects_a_stop_of_admission_after_three_preemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The injected bug: once a request was preempted three times, none starts that may need the whole pool."""
    original = WaitingQueue.find_start

    def find_start(
        self: WaitingQueue, running: Sequence[LiveRequest], num_slots: int, max_tokens: int | None = None
    ) -> Start | None:
        is_stopped = any(request.num_preemptions >= 3 for request in (*running, *self))
        return None if running and is_stopped else original(self, running, num_slots, max_tokens)

    monkeypatch.setattr(WaitingQueue, "find_start", find_start)
    with pytest.raises(AssertionError, match="steps_per_token"):
        check_full_size(0)


class Trace:
    """Requests of unknown length and any priority, which preempt each other often."""

    def __init__(self, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        capacity = fake_capacity(64, 1, 16, 96, num_host_pages=draw.choice((0, 0, 40)))
        config = EngineConfig(
            strict=True,
            max_num_batched_tokens=draw.choice((7, 64)),
            scheduling_policy=draw.choice(("fcfs", "priority", "priority", "priority", "fair")),
        )
        runner = FakeRunner(capacity, 32, eos_every=60)
        self._engine = Engine(runner, fake_model_info(32), config, clock=runner.clock)

    def most_preemptions(self, num_requests: int) -> int:
        """Run the trace to its end; return the most preemptions of one request."""
        draw, engine, most, num_steps = self._draw, self._engine, 0, 0
        while num_requests or engine.has_work():
            if num_requests and draw.random() < 0.12:
                num_requests -= 1
                self._ask(f"r{num_requests}")
            step_and_watch(engine)
            most = max((most, *(request.num_preemptions for request in engine.scheduler.requests())))
            num_steps += 1
            assert num_steps < 5000, "the engine stalls"
        engine.cache.check()
        return most

    def _ask(self, name: str) -> None:
        draw = self._draw
        is_patient = draw.random() < 0.2
        prompt = tuple(draw.randrange(1, 32) for _ in range(draw.choice((1, 3, 9))))
        request = GenerateRequest(
            request_id=name,
            prompt=prompt,
            params=SamplingParams(max_tokens=None if is_patient else draw.choice((None, 25)), seed=draw.randrange(99)),
            priority=9 if is_patient else draw.choice((0, 1, 2)),
            namespace=draw.choice(("a", "b")),
        )
        self._engine.add(request)


@pytest.mark.slow
def test_no_request_of_unknown_length_is_preempted_more_than_five_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def most_preemptions() -> int:
        return max(Trace(seed).most_preemptions(40) for seed in range(20))

    assert most_preemptions() == MAX_PREEMPTIONS
    monkeypatch.setattr(queue, "PREEMPTIONS_BEFORE_PROTECTION", 10**6)
    monkeypatch.setattr(queue, "MAX_PREEMPTIONS", 10**6)
    with pytest.raises(AssertionError, match=r"preempted 6 times"):
        most_preemptions()


def answers(
    num_pages: int, *requests: GenerateRequest, budget: int = 2048
) -> tuple[dict[tuple[str, int], list[int]], int]:
    """Return the tokens of each candidate, and the number of steps."""
    config = EngineConfig(strict=True, max_num_batched_tokens=budget, enable_prefix_caching=False)
    engine = Engine(
        FakeRunner(fake_capacity(num_pages, 16, 64, 300), 64), fake_model_info(64, max_model_len=300), config
    )
    for request in requests:
        engine.add(request)
    tokens: dict[tuple[str, int], list[int]] = {}
    num_steps = 0
    while engine.has_work():
        for event in step_and_watch(engine):
            if isinstance(event, Tokens):
                tokens.setdefault((event.request_id, event.index), []).extend(event.token_ids)
        num_steps += 1
        assert num_steps < 5000, "the engine stalls"
        if num_steps % 16 == 0:
            engine.cache.check()
    return tokens, num_steps


def n_best(name: str, n: int, max_tokens: int | None) -> GenerateRequest:
    params = SamplingParams(n=n, max_tokens=max_tokens, seed=5, ignore_eos=True)
    prompt = tuple(1 + i % 60 for i in range(20 + len(name)))
    return GenerateRequest(request_id=name, prompt=prompt, params=params)


def test_candidates_that_do_not_all_fit_run_in_parts() -> None:
    """24 candidates of 70 tokens need 121 pages; 50 hold less than half of them."""
    tokens, num_steps = answers(51, n_best("many", 24, 70))
    assert tokens == answers(1600, n_best("many", 24, 70))[0]
    assert len(tokens) == 24 and num_steps < 5 * 70


@pytest.mark.slow
def test_64_candidates_of_100_tokens_on_203_pages_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need 450 pages: their prompt, and seven of their own each."""
    request = n_best("many", 64, 100)
    tokens, num_steps = answers(203, request)
    assert [len(each) for each in tokens.values()] == [100] * 64 and 150 < num_steps < 500
    assert tokens == answers(1600, request)[0]
    monkeypatch.setattr(admission, "num_gang_branches", num_branches)  # the injected bug: all at once, or none
    with pytest.raises(ContextLengthError, match="in 64 branches may need"):
        answers(203, request)


def test_candidates_without_max_tokens_are_not_cut_by_their_number() -> None:
    tokens, _ = answers(24, n_best("open", 4, None))
    assert [len(each) for each in tokens.values()] == [300 - 24] * 4
    assert tokens == answers(1600, n_best("open", 4, None))[0]


def test_candidates_in_parts_leave_pages_to_other_requests() -> None:
    requests = n_best("before", 1, 90), n_best("many", 16, 60), n_best("later", 2, 40)
    tokens, _ = answers(40, *requests)
    assert tokens == answers(1600, *requests)[0] and len(tokens) == 19


def test_beams_that_do_not_all_fit_are_refused_with_numbers() -> None:
    request = GenerateRequest(
        request_id="beams", prompt=(1,) * 20, params=BeamSearchParams(beam_width=16, max_tokens=250)
    )
    with pytest.raises(ContextLengthError, match="in 16 branches may need 257 pages"):
        answers(64, request)


def test_planned_copies_of_preempted_beams_leave_their_pages_to_the_first_request() -> None:
    """It decodes in lockstep and fills the pool; without the pages that the dead copies read, it does not fit."""
    for seed in range(12):
        draw = random.Random(seed)
        capacity = fake_capacity(num_pages=29, page_size=8)
        engine = Engine(FakeRunner(capacity, 64), fake_model_info(64), EngineConfig(strict=True))
        filling = SamplingParams(n=7, distinct=True, temperature=5.0, max_tokens=28, ignore_eos=True, seed=seed)
        engine.add(GenerateRequest(request_id="first", prompt=(1, 2, 3, 4, 5), params=filling))
        events = [event for _ in range(draw.randint(3, 12)) for event in engine.step()]
        beams = BeamSearchParams(beam_width=2, max_tokens=20, ignore_eos=True)
        engine.add(GenerateRequest(request_id="beams", prompt=tuple(draw.choices(range(1, 60), k=3)), params=beams))
        while engine.has_work():
            events += engine.step()
            engine.cache.check()
        ended = [event for event in events if isinstance(event, Finished)]
        assert {event.request_id for event in ended} == {"first", "beams"} and not any(
            isinstance(each, Failed) for each in events
        ), seed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_candidates_on_64_pages_equal_those_on_many(seed: int) -> None:
    draw = random.Random(seed)
    requests = [n_best("x" * k, draw.choice((1, 3, 8, 20)), draw.choice((None, 20, 60))) for k in range(1, 7)]
    budget = draw.choice((24, 64, 2048))
    assert answers(64, *requests, budget=budget)[0] == answers(1600, *requests)[0]
