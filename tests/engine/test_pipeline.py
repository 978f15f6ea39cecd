"""Asynchronous launch: the next step is launched before the last result is read.

Events are the same as without it.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from chatcache.engine.engine import Engine
from chatcache.engine.pipeline import build_candidates
from chatcache.engine.protocols import StepHandle
from chatcache.scheduler.scheduler import Scheduler
from chatcache.scheduler.speed import DecodeSpeed
from chatcache.types.actions import DrawSpec, pack_draws
from chatcache.types.events import EngineEvent, Failed, Finished, Started, Tokens
from chatcache.types.plan import StepPlan, StepResult
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from chatcache.types.stats import ExplainQuery
from tests.engine.driver import VOCAB, drain, engine, output, request
from tests.support.fake_runner import POISON, FakeRunner, fake_capacity

SEED = int(os.environ["CHATCACHE_TEST_SEED"])

LAZY = pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


class RecordingRunner(FakeRunner):
    """Records its calls; fails in the steps of `fails`, after some cells were corrupted."""

    def __init__(
        self, num_pages: int = 512, *, has_async_launch: bool = True, lazy: bool = False, **settings: Any
    ) -> None:
        super().__init__(fake_capacity(num_pages, has_async_launch=has_async_launch, **settings), VOCAB, lazy=lazy)
        self.log: list[str] = []
        self.fails: dict[int, Exception] = {}

    def launch(self, plan: StepPlan) -> StepHandle:
        self.log.append(f"launch {plan.step}")
        launched, log = super().launch(plan), self.log

        class Logged:
            def result(self) -> StepResult:
                log.append(f"result {plan.step}")
                return launched.result()

        return Logged()

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step in self.fails:
            pages = self._tables[plan.rows.slot, plan.rows.start // self._capacity.page_size]
            self.cells[pages, plan.rows.start % self._capacity.page_size] = POISON
            raise self.fails[plan.step]
        return super().execute(plan)


def stream(runner: FakeRunner, requests: list[GenerateRequest], **settings: Any) -> dict[str, list[EngineEvent]]:
    """Run requests concurrently; return their events without the numbers of freed pages."""
    eng = engine(runner, **settings)
    for one in requests:
        eng.add(one)
    events: dict[str, list[EngineEvent]] = {one.request_id: [] for one in requests}
    for event in drain(eng):
        if isinstance(event, Finished):
            event = Finished(*(getattr(event, name) for name in Finished.__struct_fields__[:-1]))
        events[event.request_id].append(event)
    assert not runner.device.num_refused
    return events


def test_pipeline_with_async_launch_keeps_one_step_on_the_device() -> None:
    runner = RecordingRunner()
    eng = engine(runner)
    eng.add(request(params=SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)))
    drain(eng)
    assert runner.log == [
        *("launch 1", "result 1"),  # the prompt
        *("launch 2", "launch 3", "result 2", "launch 4", "result 3", "launch 5", "result 4"),
        *("launch 6", "result 5", "result 6"),  # the fifth token ended it: the result of step 6 is discarded
    ]
    health = eng.health()
    assert (health.num_steps, health.num_steps_ahead) == (6, 4) and health.num_pages_in_use == 0


def test_pipeline_without_async_launch_launches_one_step_at_a_time() -> None:
    runner = RecordingRunner(has_async_launch=False)
    eng = engine(runner)
    eng.add(request())
    drain(eng)
    assert runner.log == [f"{what} {step}" for step in range(1, 6) for what in ("launch", "result")]
    assert eng.health().num_steps_ahead == 0


def mixed_requests() -> list[GenerateRequest]:
    kinds: list[Params] = [
        SamplingParams(max_tokens=30, seed=4, logprobs=2),
        SamplingParams(max_tokens=25, temperature=0.0, ignore_eos=True),
        SamplingParams(n=4, max_tokens=30, seed=5, top_p=0.8),
        SamplingParams(n=2, best_of=4, max_tokens=20, seed=6),
        BeamSearchParams(beam_width=3, max_tokens=10),
        SamplingParams(max_tokens=12, frequency_penalty=0.4, seed=9),
        SamplingParams(n=3, distinct=True, max_tokens=8, seed=2),
    ]
    return [
        request(
            f"r{i}",
            prompt=tuple(range(1 + i % 3, 12 + 5 * i)),
            params=kinds[i % len(kinds)],
            namespace="ab"[i % 2],
            priority=i % 3,
        )
        for i in range(10)
    ]


@LAZY
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("num_pages", [24, 512], ids=["tight", "roomy"])
def test_events_with_async_launch_equal_those_without(
    lazy: bool, policy: str, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecodeSpeed, "linear_fit", lambda self: None)  # else the time decides which branches rest
    settings = {"scheduling_policy": policy, "max_num_batched_tokens": 24}
    page_size = 4 if num_pages > 24 else 16
    expected = stream(
        RecordingRunner(num_pages, page_size=page_size, has_async_launch=False), mixed_requests(), **settings
    )
    runner = RecordingRunner(num_pages, page_size=page_size, lazy=lazy)
    for name, events in stream(runner, mixed_requests(), **settings).items():
        assert [e for e in events if isinstance(e, Tokens)] == [e for e in expected[name] if isinstance(e, Tokens)]
    assert any(one[:6] == other[:6] == "launch" for one, other in pairwise(runner.log))


@LAZY
def test_a_failed_step_fails_the_next_one_and_neither_is_cached(lazy: bool) -> None:
    """Step 13 fills the prompt's page, which is hashed when 14 is planned, before 13 fails."""
    runner = RecordingRunner(lazy=lazy)
    eng = engine(runner, max_num_seqs=2)
    runner.fails = {13: RuntimeError("secret")}
    for name, first in (("a", 1), ("b", 30)):
        eng.add(request(name, prompt=tuple(range(first, first + 4)), params=LONG))
    eng.add(request("late", prompt=tuple(range(9, 29)), params=LONG))
    begun = until_failed(eng)
    assert runner.log[-4:] == ["result 12", "launch 14", "result 13", "result 14"]
    failed = [event for event in begun if isinstance(event, Failed)]
    assert [event.request_id for event in failed] == ["a", "b"] and "secret" not in failed[0].message
    eng.cache.check()
    history = (*range(1, 5), *output(begun, "a"))
    assert len(history) == 16, "a page, all but its last cell seen"
    for length in range(2, 17):
        assert eng.cache.explain(ExplainQuery((*history[:length], 60))).num_cached_tokens == 0
    rest = drain(eng)
    eng.add(request("again", prompt=(*history, 60), params=LONG))
    again = drain(eng)
    clean = engine()
    clean.add(request("again", prompt=(*history, 60), params=LONG))
    clean.add(request("late", prompt=tuple(range(9, 29)), params=LONG))
    expected = drain(clean)
    assert output(again, "again") == output(expected, "again")
    assert output(rest, "late") == output(expected, "late") and not runner.device.num_refused


def test_failed_step_check_detects_an_early_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.finish
    monkeypatch.setattr(Scheduler, "finish", lambda self, request, discard=False: original(self, request))
    with pytest.raises(AssertionError):
        test_a_failed_step_fails_the_next_one_and_neither_is_cached(True)


def until_failed(eng: Engine) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while not any(isinstance(event, Failed) for event in events):
        events += eng.step()
        eng.cache.check()
    return events


class ChunkRecorder(RecordingRunner):
    """Records the steps that compute a part of a prompt."""

    def __init__(self, num_pages: int = 512, **settings: Any) -> None:
        super().__init__(num_pages, **settings)
        self.chunks: list[int] = []

    def launch(self, plan: StepPlan) -> StepHandle:
        if (plan.rows.num_tokens > 1).any():
            self.chunks.append(plan.step)
        return super().launch(plan)

    def num_followed(self) -> int:
        """Count the steps with a part of a prompt whose next step was launched before their result was read."""
        launched = [step for step in self.chunks if f"launch {step + 1}" in self.log]
        return sum(self.log.index(f"launch {step + 1}") < self.log.index(f"result {step}") for step in launched)


def long_prompts() -> list[GenerateRequest]:
    prompts = {"a": range(1, 5), "b": range(1, 151), "c": range(60, 140)}
    return [request(name, prompt=tuple(i * i % VOCAB for i in prompt), params=LONG) for name, prompt in prompts.items()]


def outputs(events: list[EngineEvent]) -> dict[str, list[int]]:
    return {name: output(events, name) for name in ("a", "b", "c")}


def outputs_of_long_prompts() -> dict[str, list[int]]:
    clean = engine()
    for one in long_prompts():
        clean.add(one)
    return outputs(drain(clean))


@LAZY
def test_steps_with_parts_of_prompts_are_followed_with_the_same_events(lazy: bool) -> None:
    runner = ChunkRecorder(lazy=lazy)
    settings = {"max_num_batched_tokens": 24}
    expected = stream(ChunkRecorder(has_async_launch=False), long_prompts(), **settings)
    assert stream(runner, long_prompts(), **settings) == expected
    assert runner.num_followed() >= 5


@pytest.mark.slow
@LAZY
@pytest.mark.parametrize("when", range(1, 13))
def test_a_failed_step_between_parts_of_prompts_leaves_nothing_wrong_in_the_cache(lazy: bool, when: int) -> None:
    runner = ChunkRecorder(lazy=lazy)
    eng = engine(runner, max_num_batched_tokens=24)
    runner.fails = {when: RuntimeError("secret")}
    for one in long_prompts():
        eng.add(one)
    begun = until_failed(eng)
    events = begun + drain(eng)
    failed = {event.request_id for event in events if isinstance(event, Failed)}
    expected = outputs_of_long_prompts()
    for name in expected.keys() - failed:
        assert output(events, name) == expected[name]
    for one in long_prompts():
        eng.add(one)
    assert outputs(drain(eng)) == expected and not runner.device.num_refused
    eng.cache.check()


@pytest.mark.slow
@LAZY
@pytest.mark.parametrize("when", range(1, 13))
def test_abort_between_parts_of_a_prompt_frees_its_pages_at_once(lazy: bool, when: int) -> None:
    runner = ChunkRecorder(lazy=lazy)
    eng = engine(runner, max_num_batched_tokens=24)
    for one in long_prompts():
        eng.add(one)
    events = [event for _ in range(when) for event in eng.step()]
    eng.abort("b")
    assert eng.cache.num_pages_held("b") == 0
    pool = eng._kv.pool
    runner.cells[[page for page in range(1, 512) if not pool.refs[page] and not pool.is_published(page)]] = POISON
    eng.cache.check()
    eng.add(long_prompts()[1])
    rest, expected = drain(eng), outputs_of_long_prompts()
    assert output(rest, "b") == expected["b"] and not runner.device.num_refused
    assert output(events + rest, "a") == expected["a"] and output(events + rest, "c") == expected["c"]


@LAZY
def test_a_failed_launch_fails_its_step_and_not_the_one_before(lazy: bool) -> None:
    class Refusing(RecordingRunner):
        def launch(self, plan: StepPlan) -> StepHandle:
            if plan.step == 6:
                raise MemoryError("no room")
            return super().launch(plan)

    runner = Refusing(lazy=lazy)
    eng = engine(runner)
    eng.add(request("a", params=LONG))
    events = until_failed(eng)
    assert len(output(events)) == 5 and isinstance(events[-1], Failed)
    eng.add(request("a", params=LONG))
    clean = engine()
    clean.add(request("a", params=LONG))
    assert output(drain(eng)) == output(drain(clean)) and not runner.device.num_refused


class NotFinite(RecordingRunner):
    """Returns logits that are not finite for one slot in step `when`."""

    when, slot = 13, 0

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if plan.step != self.when:
            return result
        draw = plan.rows.slot[plan.draws.row].tolist().index(self.slot)
        result.tokens[draw] = -1
        return StepResult(
            *(result.tokens, result.logprobs, result.top_tokens, result.top_logprobs),
            faults=((draw, "the logits are not finite"),),
        )


@LAZY
def test_an_invalid_row_fails_its_request_only_while_its_next_row_runs(lazy: bool) -> None:
    runner = NotFinite(lazy=lazy)
    eng = engine(runner)
    for name, first in (("a", 1), ("b", 30)):
        eng.add(request(name, prompt=tuple(range(first, first + 4)), params=LONG))
    events = until_failed(eng)
    assert [e for e in events if isinstance(e, Failed)] == [Failed("a", events[-1].seq, "the logits are not finite")]
    assert runner.log[-2:] == ["launch 14", "result 13"], "its page was full and named"
    history = (*range(1, 5), *output(events, "a"))
    assert eng.cache.explain(ExplainQuery((*history, 60))).num_cached_tokens == 0
    events += drain(eng)
    clean = engine()
    clean.add(request("b", prompt=tuple(range(30, 34)), params=LONG))
    assert output(events, "b") == output(drain(clean), "b") and not runner.device.num_refused


@LAZY
def test_abort_while_a_row_is_on_the_device_frees_pages_at_once(lazy: bool) -> None:
    runner = RecordingRunner(num_pages=12, lazy=lazy)
    eng = engine(runner)
    eng.add(request("a", params=LONG))
    eng.add(request("b", prompt=tuple(range(30, 50)), params=LONG))
    events = [event for _ in range(8) for event in eng.step()]
    assert eng._pipeline and eng.health().num_pages_in_use == 4
    seen = len(output(events, "b"))
    eng.abort("b")
    assert eng.health().num_pages_in_use == 2 and eng.cache.num_pages_held("b") == 0
    free = [page for page in range(1, 12) if not eng._kv.pool.refs[page] and not eng._kv.pool.is_published(page)]
    runner.cells[free] = POISON
    eng.cache.check()
    num_cached = eng.cache.explain(ExplainQuery((*range(30, 50), *output(events, "b"), 60))).num_cached_tokens
    assert num_cached == 20 + seen - 1, "the last token's cell is being computed; its result was not read"
    eng.add(request("c", prompt=(*range(30, 50), *output(events, "b"), 60), params=LONG))
    events += drain(eng)
    (end,) = [event for event in events if event.request_id == "b" and isinstance(event, Finished)]
    assert end.cancelled and end.num_computed_tokens == num_cached and events.index(end) < len(events) - 1
    clean = engine()
    clean.add(request("a", params=LONG))
    clean.add(request("c", prompt=(*range(30, 50), *output(events, "b"), 60), params=LONG))
    expected = drain(clean)
    assert (output(events, "a"), output(events, "c")) == (output(expected, "a"), output(expected, "c"))


@LAZY
def test_queries_between_two_steps_change_nothing(lazy: bool) -> None:
    runner = RecordingRunner(lazy=lazy)
    eng = engine(runner)
    eng.add(request("a", params=SamplingParams(n=3, max_tokens=50, seed=3, ignore_eos=True)))
    events: list[EngineEvent] = []
    num_on_the_way = 0
    while eng.has_work():
        events += eng.step()
        num_on_the_way += len(eng._pipeline)
        eng.cache.check()
        eng.cache.stats()
        assert eng.cache.reset_prefix_cache() == (not eng._requests)
        assert eng.cache.page_accounts().num_pages_in_use == eng.health().num_pages_in_use
        if eng._requests:
            assert eng.cache.page_accounts().requests["a"] == pytest.approx(eng.health().num_pages_in_use)
        num_cached = eng.cache.explain(ExplainQuery((*request().prompt, *output(events, index=1), 1))).num_cached_tokens
        assert num_cached <= 20 + len(output(events, index=1))
    assert num_on_the_way > 40 and not eng._pipeline
    clean = engine()
    clean.add(request("a", params=SamplingParams(n=3, max_tokens=50, seed=3, ignore_eos=True)))
    expected = drain(clean)
    for index in range(3):
        assert output(events, index=index) == output(expected, index=index)


def test_engine_is_idle_only_after_the_last_step_is_collected() -> None:
    runner = RecordingRunner()
    eng = engine(runner)
    eng.add(request())
    events: list[EngineEvent] = []
    while not events or not isinstance(events[-1], Finished):
        events += eng.step()
    assert eng.has_work() and eng._pipeline and eng._invariant_checker.num_checks == 0
    assert eng.step() == [] and not eng.has_work() and eng._invariant_checker.num_checks == 1
    assert runner.log.count("result 6") == 1


def test_close_with_a_step_on_the_device_waits_for_it() -> None:
    runner = RecordingRunner(lazy=True)
    eng = engine(runner)
    eng.add(request(params=LONG))
    for _ in range(5):
        eng.step()
    assert eng._pipeline
    eng.close()
    assert not eng._pipeline and runner.log[-1] == "result 6"
    eng.close()


def test_a_new_request_starts_after_the_step_on_the_device() -> None:
    runner = RecordingRunner()
    eng = engine(runner)
    eng.add(request("a", params=LONG))
    for _ in range(5):
        eng.step()
    eng.add(request("b", prompt=tuple(range(30, 50)), params=LONG))
    first = [event for event in eng.step() + eng.step() if isinstance(event, Started)]
    assert [event.request_id for event in first] == ["b"]
    assert runner.log[-3:] == ["result 6", "launch 7", "result 7"]


def test_rows_launched_ahead_stay_within_the_context() -> None:
    """The row after a branch's last token is at the context's last position."""

    class Bounded(RecordingRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            assert (plan.rows.start + plan.rows.num_tokens).max() <= self._capacity.max_model_len
            return super().execute(plan)

    for num_tokens in range(1, 20):
        runner = Bounded(num_pages=3, max_model_len=32)
        eng = engine(runner)
        params = SamplingParams(max_tokens=32 - num_tokens, temperature=0.0, ignore_eos=True)
        eng.add(request(num_tokens=num_tokens, params=params))
        events = drain(eng)
        assert isinstance(events[-1], Finished) and len(output(events)) == 32 - num_tokens
        assert eng.health().num_steps_ahead >= 32 - num_tokens - 4


def test_a_full_pool_stops_launching_ahead_and_preempts_nothing() -> None:
    runner = RecordingRunner(num_pages=5, page_size=4)
    eng = engine(runner)
    eng.add(request(num_tokens=4, params=SamplingParams(max_tokens=13, temperature=0.0, ignore_eos=True)))
    events = drain(eng)
    health = eng.health()
    assert isinstance(events[-1], Finished) and health.num_preemptions == 0
    eng.add(request("b", num_tokens=3, params=SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)))
    assert isinstance(drain(eng)[-1], Finished)


def test_a_failed_plan_with_a_step_on_the_device_fails_all_running(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = RecordingRunner(lazy=True)
    eng = engine(runner)
    eng.add(request("a", params=LONG))
    for _ in range(4):
        eng.step()

    def plan_ahead(self: Scheduler) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "plan_ahead", plan_ahead)
        (failed,) = eng.step()
    assert isinstance(failed, Failed) and "plan" in failed.message and not eng._pipeline
    assert not eng.has_work() and eng.health().num_pages_in_use == 0
    eng.add(request("a", params=LONG))
    assert isinstance(drain(eng)[-1], Finished) and not runner.device.num_refused


@pytest.mark.slow
def test_results_of_random_arrivals_and_aborts_equal_the_oracle() -> None:
    """Requests arrive and are aborted at random; the others equal the oracle."""
    rng = np.random.default_rng(SEED)
    runner = RecordingRunner(num_pages=2048, lazy=True)
    eng = engine(runner)
    requests = {
        f"r{i}": request(
            f"r{i}",
            prompt=(i + 1, *range(1, 4)),
            params=SamplingParams(max_tokens=int(rng.integers(2, 60)), seed=i, ignore_eos=True, logprobs=1),
        )
        for i in range(40)
    }
    for one in requests.values():
        eng.add(one)
    aborted = set(rng.choice(40, 12, replace=False).tolist())
    events: list[EngineEvent] = []
    while eng.has_work():
        events += eng.step()
        if aborted and rng.random() < 0.4:
            eng.abort(f"r{aborted.pop()}")
    clean = engine(FakeRunner(fake_capacity(2048), VOCAB))
    for one in requests.values():
        clean.add(one)
    expected = drain(clean)
    for name in requests:
        tokens = output(events, name)
        assert tokens == output(expected, name)[: len(tokens)]
        (end,) = [event for event in events if event.request_id == name and isinstance(event, Finished)]
        assert end.cancelled or len(tokens) == len(output(expected, name))
    assert eng.health().num_steps_ahead > 20 and not runner.device.num_refused


class Interrupted(RecordingRunner):
    """Raises KeyboardInterrupt while the result of step `when` is awaited."""

    when = 7

    def launch(self, plan: StepPlan) -> StepHandle:
        launched, runner = super().launch(plan), self

        class Interruptible:
            def result(self) -> StepResult:
                if plan.step == runner.when:
                    runner.when = 0
                    raise KeyboardInterrupt
                return launched.result()

        return Interruptible()


@pytest.mark.parametrize("when", [1, 7], ids=["a prompt", "two steps"])
@pytest.mark.parametrize("num_aborted", [0, 1, 2])
def test_an_interrupted_wait_leaves_the_engine_working(when: int, num_aborted: int) -> None:
    runner = Interrupted()
    runner.when = when
    eng = engine(runner)
    for name, first in (("a", 1), ("b", 30)):
        eng.add(request(name, prompt=tuple(range(first, first + 20)), params=LONG))
    for _ in range(when - 1):
        eng.step()
    with pytest.raises(KeyboardInterrupt):
        eng.step()
    for name in "ab"[:num_aborted]:
        eng.abort(name)
    ends = [type(event) for event in drain(eng) if isinstance(event, Failed | Finished)]
    assert ends == [Finished] * num_aborted + [Failed] * (2 - num_aborted)
    assert eng.health().num_pages_in_use == 0 and not runner.device.num_refused
    eng.add(request("a", params=LONG))
    clean = engine()
    clean.add(request("a", params=LONG))
    assert output(drain(eng)) == output(drain(clean))


def test_build_candidates_keeps_raw_logprobs_of_draws_without_noise() -> None:
    ids, values = np.array([[3, 5], [7, 2]], np.int32), np.array([[-1.0, -2.0], [-0.5, -4.0]], np.float32)
    none = np.zeros((2, 0), np.int32)
    raw = np.array([[-1.5, -2.5], [-np.inf, -np.inf]], np.float32)
    draws = pack_draws([DrawSpec(width=2, temperature=0.0)] * 2, [0, 1], [4, 4])
    result = StepResult(ids, values, none, none.astype(np.float32), (), none.astype(np.float32), raw)
    first, second = build_candidates(draws, result)
    assert (first.tokens, first.logprobs, first.raw_logprobs) == ((3, 5), (-1.0, -2.0), (-1.5, -2.5))
    assert (second.tokens, second.logprobs, second.raw_logprobs) == ((7, 2), (-0.5, -4.0), ())
