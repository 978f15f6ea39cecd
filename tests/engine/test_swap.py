"""Preemption by swap: nothing is computed twice, all pages are freed, and cost decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.types.events import EngineEvent, Failed, Finished, Tokens
from chatcache.types.plan import StepPlan, StepResult
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from chatcache.types.stats import ExplainQuery
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

VOCAB, PAGE = 64, 4


class RecordingRunner(FakeRunner):
    """Records the plans; raises in step `crash_at` after corrupting what the plan writes."""

    def __init__(self, num_pages: int, num_host_pages: int, swap_page_s: float = 1e-6) -> None:
        super().__init__(fake_capacity(num_pages, PAGE, 32, 1024, num_host_pages, swap_page_s), VOCAB)
        self.plans: list[StepPlan] = []
        self.crash_at: int | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if plan.step == self.crash_at:
            self.host_cells[plan.swaps_out[:, 1]] = 1
            self.cells[plan.swaps_in[:, 1]] = 1
            raise RuntimeError("crash")
        return super().execute(plan)


def engine(
    num_pages: int = 20, num_host_pages: int = 100, runner: RecordingRunner | None = None, **settings: Any
) -> Engine:
    clock = settings.pop("clock", None)
    extra = {"clock": clock} if clock else {}
    chosen: dict[str, Any] = {"preemption_mode": "swap", "strict": True} | settings
    return Engine(
        runner or RecordingRunner(num_pages, num_host_pages), fake_model_info(VOCAB), EngineConfig(**chosen), **extra
    )


def long_one(name: str, first: int, params: Params | None = None) -> GenerateRequest:
    """Create a request of 40 tokens after 10: 13 pages of 4 at the end."""
    params = params or SamplingParams(max_tokens=40, seed=first, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt=tuple(range(first, first + 10)), params=params)


def step_until(eng: Engine, done: Any) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    for _ in range(1000):
        if done():
            return events
        events += eng.step()
        eng.cache.check()
    raise AssertionError("it never came to that")


def swapped(eng: Engine) -> bool:
    return eng.health().num_swap_preemptions > 0


def outputs(events: list[EngineEvent], name: str) -> dict[int, list[int]]:
    lines: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, Tokens) and event.request_id == name:
            lines.setdefault(event.index, []).extend(event.token_ids)
    return lines


def num_computed(events: list[EngineEvent], name: str) -> int:
    return next(e.num_computed_tokens for e in events if isinstance(e, Finished) and e.request_id == name)


def run_alone(request: GenerateRequest) -> list[EngineEvent]:
    eng = engine(num_pages=400)
    eng.add(request)
    return step_until(eng, lambda: not eng.has_work())


def alone(request: GenerateRequest) -> dict[int, list[int]]:
    return outputs(run_alone(request), request.request_id)


KINDS: dict[str, Params] = {
    "one": SamplingParams(max_tokens=40, seed=3, ignore_eos=True),
    "three": SamplingParams(n=3, max_tokens=16, seed=3, ignore_eos=True),
    "beams": BeamSearchParams(beam_width=3, max_tokens=16, ignore_eos=True),
}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_swapped_request_computes_nothing_twice(kind: str, caching: bool) -> None:
    eng = engine(num_pages=18, enable_prefix_caching=caching)
    requests = long_one("old", 1), long_one("new", 30, KINDS[kind]), long_one("newer", 50, KINDS[kind])
    for request in requests:
        eng.add(request)
    events = step_until(eng, lambda: not eng.has_work())
    health = eng.health()
    assert health.num_swap_preemptions == health.num_preemptions >= 1
    assert health.num_pages_swapped_in > 0 and health.num_host_pages == 100
    assert (health.num_pages_in_use, health.num_host_pages_in_use) == (0, 0)
    for request in requests:
        undisturbed = run_alone(request)
        assert outputs(events, request.request_id) == outputs(undisturbed, request.request_id)
        assert num_computed(events, request.request_id) == num_computed(undisturbed, request.request_id)


def test_recompute_mode_computes_again_and_copies_nothing() -> None:
    eng = engine(preemption_mode="recompute", enable_prefix_caching=False)
    for request in (long_one("old", 1), long_one("new", 30)):
        eng.add(request)
    events = step_until(eng, lambda: not eng.has_work())
    health = eng.health()
    assert health.num_preemptions and not health.num_swap_preemptions and not health.num_host_pages
    assert num_computed(events, "new") > 10 + 39
    assert outputs(events, "new") == alone(long_one("new", 30))


def ticking(num_tokens_per_s: float, runner: RecordingRunner) -> Iterator[float]:
    """Yield the clock times before and after each step of a runner of that speed."""
    now = 0.0
    while True:
        yield now
        now += len(runner.plans[-1].rows.tokens) / num_tokens_per_s
        yield now


@pytest.mark.parametrize(
    ("num_tokens_per_s", "swap_page_s", "swaps"), [(1e3, 1e-4, True), (1e6, 1e-3, False), (1e6, 1e-9, True)]
)
def test_auto_mode_chooses_the_cheaper_preemption(num_tokens_per_s: float, swap_page_s: float, swaps: bool) -> None:
    runner = RecordingRunner(20, 100, swap_page_s)
    clock = ticking(num_tokens_per_s, runner)
    eng = engine(runner=runner, preemption_mode="auto", clock=lambda: next(clock))
    for request in (long_one("old", 1), long_one("new", 30)):
        eng.add(request)
    events = step_until(eng, lambda: not eng.has_work())
    assert eng.health().num_preemptions and swapped(eng) is swaps
    assert outputs(events, "new") == alone(long_one("new", 30))


def test_swap_without_enough_host_memory_recomputes() -> None:
    eng = engine(num_host_pages=2)
    for request in (long_one("old", 1), long_one("new", 30)):
        eng.add(request)
    events = step_until(eng, lambda: not eng.has_work())
    assert eng.health().num_preemptions and not swapped(eng)
    assert outputs(events, "new") == alone(long_one("new", 30))


def test_abort_while_swapped_out_frees_host_pages() -> None:
    eng = engine()
    eng.add(long_one("old", 1))
    eng.add(long_one("new", 30))
    step_until(eng, lambda: swapped(eng))
    assert eng.health().num_host_pages_in_use > 0
    eng.abort("new")
    eng.cache.check()
    assert eng.health().num_host_pages_in_use == 0
    (end,) = (event for event in eng.step() if isinstance(event, Finished))
    assert end.cancelled and end.request_id == "new" and end.num_pages_freed == 0
    events = step_until(eng, lambda: not eng.has_work())
    assert isinstance(events[-1], Finished)


def test_request_that_runs_again_holds_no_host_pages() -> None:
    eng = engine()
    requests = [long_one("a", 1), long_one("b", 20)]
    for request in requests:
        eng.add(request)
    step_until(eng, lambda: swapped(eng))
    (victim,) = [each for each in eng.scheduler.requests() if each.host_pages]
    step_until(eng, lambda: victim in eng.scheduler.running)
    assert not victim.host_pages and victim.request_id in eng._requests


def test_abort_after_swap_in_frees_all_pages() -> None:
    runner = RecordingRunner(20, 100)
    eng = engine(runner=runner, max_num_batched_tokens=4)
    eng.add(long_one("old", 1))
    eng.add(long_one("new", 30, KINDS["three"]))
    step_until(eng, lambda: bool(runner.plans) and len(runner.plans[-1].swaps_in) > 0)
    eng.abort("new")
    eng.cache.check()
    assert eng.health().num_host_pages_in_use == 0
    step_until(eng, lambda: not eng.has_work())


@pytest.mark.parametrize("direction", ["swaps_out", "swaps_in"])
@pytest.mark.parametrize("caching", [True, False])
def test_a_failed_step_with_swaps_fails_its_requests_only(direction: str, caching: bool) -> None:
    """Requests being copied continue, and recompute what may not have arrived."""
    crash_at = None
    for _ in range(2):  # once to learn which step it is
        runner = RecordingRunner(20, 100)
        runner.crash_at = crash_at
        eng = engine(runner=runner, enable_prefix_caching=caching)
        eng.add(long_one("old", 1))
        eng.add(long_one("new", 30))
        events = step_until(eng, lambda eng=eng: not eng.has_work())
        crash_at = next(plan.step for plan in runner.plans if len(getattr(plan, direction)))
    ends = {event.request_id: event for event in events if isinstance(event, Finished | Failed)}
    victim, swapped_request = ("old", "new") if direction == "swaps_out" else ("new", "old")
    assert isinstance(ends[victim], Failed) and isinstance(ends[swapped_request], Finished)
    assert outputs(events, swapped_request) == alone(long_one(swapped_request, {"old": 1, "new": 30}[swapped_request]))
    health = eng.health()
    assert (health.num_pages_in_use, health.num_host_pages_in_use) == (0, 0)
    eng.add(long_one("again", 30))
    events = step_until(eng, lambda: not eng.has_work())
    assert outputs(events, "again") == alone(long_one("again", 30))


def test_a_failed_request_leaves_nothing_on_the_host() -> None:
    class CorruptingRunner(RecordingRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            if any(len(plan.swaps_in) for plan in self.plans):
                result.tokens[:] = VOCAB  # after its pages have come back
            return result

    runner = CorruptingRunner(20, 100)
    eng = engine(runner=runner)
    eng.add(long_one("old", 1))
    eng.add(long_one("new", 30))
    events = step_until(eng, lambda: not eng.has_work())
    assert [e.request_id for e in events if isinstance(e, Failed)] == ["new"]
    runner.plans.clear()
    prompt = (*long_one("new", 30).prompt, *outputs(events, "new")[0])
    assert eng.cache.explain(ExplainQuery(prompt)).num_cached_tokens == 0


def test_reset_prefix_cache_clears_the_host_pages() -> None:
    eng = engine()
    eng.add(long_one("old", 1))
    eng.add(long_one("new", 30))
    step_until(eng, lambda: not eng.has_work())
    assert eng.cache.reset_prefix_cache()
    assert eng.cache.explain(ExplainQuery(long_one("new", 30).prompt)).num_cached_tokens == 0
