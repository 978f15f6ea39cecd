"""Hybrid models: turns, forks and preempted requests start on snapshots of their recurrent state."""

from __future__ import annotations

from collections import Counter

import pytest

from chatcache.engine.engine import Engine
from chatcache.errors import InvalidRequestError
from chatcache.types.events import Failed, Finished, Started
from chatcache.types.plan import StepPlan, StepResult
from chatcache.types.request import BeamSearchParams, ForkPoint, SamplingParams
from chatcache.types.stats import ExplainQuery
from tests.engine.driver import VOCAB, drain, engine, output, request
from tests.engine.workloads import Crashing, check_snapshots
from tests.support.fake_runner import POISON, FakeRunner, fake_capacity, history_of

PAGE = 4
END_OF_MESSAGE = 0
SYSTEM = tuple(range(1, 11))
GREEDY = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)


def hybrid(
    num_states: int = 33, num_pages: int = 512, interval: int = 1024, **settings: object
) -> tuple[Engine, FakeRunner]:
    has_async_launch = bool(settings.pop("has_async_launch", False))
    capacity = fake_capacity(num_pages, PAGE, has_async_launch=has_async_launch, num_states=num_states)
    runner = FakeRunner(capacity, VOCAB, eos=None)
    eng = engine(runner, **settings)
    assert eng.scheduler.kv.states is not None
    eng.scheduler.kv.states.interval = interval
    return eng, runner


def reply_of(prompt: tuple[int, ...], num_tokens: int = 7) -> list[int]:
    """Return the greedy reply, computed from plain lists."""
    runner = FakeRunner(fake_capacity(2), VOCAB, eos=None)
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(runner.logits(history_of(tokens, hybrid=True)).argmax()))
    return tokens[len(prompt) :]


def messages(num_tokens: int, *ends: int) -> tuple[int, ...]:
    """Return a prompt in which messages end after these numbers of tokens."""
    return tuple(END_OF_MESSAGE if i + 1 in ends else i % 60 + 1 for i in range(num_tokens))


def ask(eng: Engine, name: str, prompt: tuple[int, ...]) -> int:
    """Run one greedy request alone, check its reply, and return how many prompt tokens were cached."""
    eng.add(request(name, prompt=prompt, params=GREEDY))
    events = drain(eng)
    assert output(events, name) == reply_of(prompt)
    return next(event.num_cached_tokens for event in events if isinstance(event, Started))


@pytest.mark.parametrize(("is_async", "num_computed"), [(False, 6), (True, 7)])
def test_second_turn_starts_at_the_last_computed_token_of_the_first(is_async: bool, num_computed: int) -> None:
    """The last token of a reply is only computed if the step after it was launched before its end was known."""
    eng, runner = hybrid(has_async_launch=is_async)
    first = (*SYSTEM, 20, 21, 22)
    ask(eng, "a", first)
    turn = (*first, *reply_of(first), 30, 31)
    assert ask(eng, "b", turn) == len(first) + num_computed
    assert (
        eng.scheduler.kv.states is not None and eng.scheduler.kv.states.num_usable == runner.capacity().num_states - 1
    )


def test_second_sighting_of_a_turn_starts_at_its_exact_end() -> None:
    eng, _ = hybrid(has_async_launch=True)
    history = messages(90, 10, 50, 90)
    assert ask(eng, "a", (*history, 5, 6, 7)) == 0
    assert ask(eng, "b", (*history, 8, 9, 7)) == 90
    assert ask(eng, "c", (*history[:50], 9, 9, 7)) == 50
    assert ask(eng, "d", (*history[:10], 50, 51)) == 10


@pytest.mark.parametrize("ends", [(), (46,)])
def test_prompts_start_where_an_earlier_one_diverged_at_least_a_page_after_a_message(ends: tuple[int, ...]) -> None:
    """The second prompt to share tokens keeps a state at their end, also in the middle of a page."""
    eng, _ = hybrid()
    common = messages(50, *ends)
    assert ask(eng, "a", (*common, *range(1, 30))) == 0
    assert ask(eng, "b", (*common, *range(2, 30))) == max(ends, default=0)
    assert ask(eng, "c", (*common, *range(3, 30))) == len(common)
    assert ask(eng, "d", (*common, 61, *range(4, 30))) == len(common)


def test_prompts_that_diverge_less_than_a_page_after_a_message_start_at_its_end() -> None:
    eng, _ = hybrid()
    history = messages(50, 30)
    assert ask(eng, "a", history) == 0
    for number, name in enumerate("bc", 55):
        assert ask(eng, name, (*history[:33], number, 9, 9, 9)) == 30


@pytest.mark.parametrize("end", [12, 10])
def test_tokens_after_a_snapshot_are_computed_into_pages_of_their_own(end: int) -> None:
    """The pages that other requests may read are neither written again nor read after the snapshot."""
    eng, runner = hybrid()
    history = messages(40, end)
    ask(eng, "a", (*history, 5, 6))
    kv = eng.scheduler.kv
    pages = kv._match_pages(kv.hash_pages((*history[:30], 9, 9))).pages
    assert len(pages) == 8
    runner.cells[pages[-(-end // PAGE) :]] = POISON
    runner.cells[pages[end // PAGE], end % PAGE :] = POISON
    before = runner.cells[pages].copy()
    assert ask(eng, "b", (*history[:30], 9, 9)) == end
    assert (runner.cells[pages] == before).all()


def test_explain_reports_cached_pages_without_a_state() -> None:
    eng, _ = hybrid(interval=64)
    prompt = tuple(range(1, 41))
    ask(eng, "a", prompt)
    found = eng.cache.explain(ExplainQuery((*prompt[:30], 60, 61)))
    assert (found.reason, found.at_token, found.num_cached_tokens) == ("no_state", 0, 0)
    assert "first 30 tokens" in found.detail and [page.state for page in found.pages][:7] == ["idle"] * 7
    assert eng.cache.explain(ExplainQuery(prompt)).num_cached_tokens == 36


def test_health_counts_the_states_by_use() -> None:
    eng, _ = hybrid()
    params = SamplingParams(n=4, max_tokens=6, temperature=1.0, ignore_eos=True)
    eng.add(request("a", prompt=SYSTEM, params=params))
    eng.step()
    health = eng.health()
    assert (health.num_states, health.num_states_in_use, health.num_states_shared) == (32, 1, 1)
    assert eng.cache.page_accounts().states == {"a": 1.0}
    drain(eng)
    health = eng.health()
    assert health.num_states_in_use == 0 and health.num_states_idle >= 1 and health.state_bytes > 0
    assert eng.cache.page_accounts().states == {}


def test_state_that_requests_share_counts_in_fractions() -> None:
    eng, _ = hybrid()
    for name in "ab":
        eng.add(request(name, prompt=SYSTEM, params=SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)))
    for _ in range(4):
        eng.step()
    one, other = eng.scheduler.tables()
    assert eng.cache.page_accounts().states == {"a": 1.0, "b": 1.0}
    eng.scheduler.kv.states.assign(other, one.state, other.num_state_tokens)  # type: ignore[union-attr]
    assert eng.cache.page_accounts().states == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize(("interval", "num_cached"), [(32, [0, 16, 16]), (34, [0, 0, 18])])
def test_same_prompt_again_starts_at_its_last_page_boundary(interval: int, num_cached: list[int]) -> None:
    """A boundary that is less than half an interval after other snapshots gets none until the prompt comes again."""
    eng, _ = hybrid(interval=interval)
    prompt = tuple(range(1, 20))
    assert [ask(eng, name, prompt) for name in "abc"] == num_cached


def test_long_reply_can_be_forked_near_any_token() -> None:
    eng, _ = hybrid(interval=16)
    prompt = tuple(range(1, 6))
    eng.add(request("a", prompt=prompt, params=SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)))
    reply = output(drain(eng), "a")
    assert reply == reply_of(prompt, 40)
    assert ask(eng, "b", (*prompt, *reply[:32], 9)) == 32


def test_streaming_reply_can_be_forked_near_any_token() -> None:
    """A fork before the live state starts on the last rolling snapshot before; the reply continues."""
    eng, _ = hybrid(interval=16)
    states, prompt = eng.scheduler.kv.states, tuple(range(1, 6))
    assert states is not None
    eng.add(request("root", prompt=prompt, params=SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)))
    while not eng.scheduler.running or eng.scheduler.tables()[0].num_tokens < 45:
        eng.step()
    line, num_copies, num_pages = (*prompt, *reply_of(prompt, 34)), states.num_copies, eng.health().num_page_copies
    eng.add(request("fork", prompt=(*line, 50), params=GREEDY, fork_of=ForkPoint("root", 0)))
    events = drain(eng)
    assert output(events, "fork") == reply_of((*line, 50))
    assert [event.num_cached_tokens for event in events if isinstance(event, Started)] == [32]
    assert (states.num_copies - num_copies, eng.health().num_page_copies) == (1, num_pages)
    assert output(events, "root")[-5:] == reply_of(prompt, 60)[-5:]


def test_eight_forks_of_one_branch_copy_eight_states_and_no_attention_page() -> None:
    eng, _ = hybrid()
    states, prompt = eng.scheduler.kv.states, tuple(range(1, 33))
    assert states is not None
    eng.add(request("root", prompt=prompt, params=SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)))
    while not eng.scheduler.running or eng.scheduler.tables()[0].num_tokens < 40:
        eng.step()
    line = (*prompt, *reply_of(prompt, 8))
    num_copies, num_pages = states.num_copies, eng.health().num_page_copies
    for number in range(8):
        point = ForkPoint("root", 0)
        eng.add(request(f"fork {number}", prompt=(*line, 50 + number), params=GREEDY, fork_of=point))
    events = drain(eng)
    for number in range(8):
        assert output(events, f"fork {number}") == reply_of((*line, 50 + number))
    cached = [event.num_cached_tokens for event in events if isinstance(event, Started) and event.request_id != "root"]
    assert cached == [40] * 8
    assert states.num_copies - num_copies <= 8 and eng.health().num_page_copies == num_pages


def test_candidates_after_a_prompt_copy_one_state_less_than_there_are_candidates() -> None:
    eng, _ = hybrid()
    states = eng.scheduler.kv.states
    assert states is not None
    eng.add(request("a", prompt=SYSTEM, params=SamplingParams(n=5, max_tokens=6, temperature=1.0, ignore_eos=True)))
    drain(eng)
    assert states.num_copies == 1 + 4


def test_beams_need_no_more_states_than_there_are_beams() -> None:
    eng, _ = hybrid(num_states=5 + 1, num_pages=64)
    states = eng.scheduler.kv.states
    assert states is not None and eng.scheduler.num_slots == 4
    params = BeamSearchParams(beam_width=4, max_tokens=20)
    eng.add(request("a", prompt=SYSTEM, params=params))
    events = drain(eng)
    assert isinstance(events[-1], Finished)
    with pytest.raises(InvalidRequestError, match="beam_width"):
        eng.add(request("b", prompt=SYSTEM, params=BeamSearchParams(beam_width=5, max_tokens=20)))


def test_more_requests_than_states_wait_for_each_other() -> None:
    eng, _ = hybrid(num_states=4)
    prompts = {str(i): (i, *SYSTEM) for i in range(1, 12)}
    for name, prompt in prompts.items():
        eng.add(request(name, prompt=prompt, params=GREEDY))
    events = drain(eng)
    assert all(output(events, name) == reply_of(prompt) for name, prompt in prompts.items())
    assert eng.health().num_preemptions == 0


def test_swapped_request_continues_on_its_states_without_computing_a_token_again() -> None:
    capacity = fake_capacity(26, PAGE, num_host_pages=200, num_states=5, num_host_states=8)
    swaps = Counter[str]()

    class Counting(FakeRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            swaps.update({"out": len(plan.state_swaps_out), "in": len(plan.state_swaps_in)})
            return super().execute(plan)

    runner = Counting(capacity, VOCAB, eos=None)
    eng = engine(runner, preemption_mode="swap", enable_prefix_caching=False)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = {name: (i, *SYSTEM) for i, name in enumerate("abc", 20)}
    for name, prompt in prompts.items():
        eng.add(request(name, prompt=prompt, params=params))
    events = drain(eng)
    assert eng.health().num_swap_preemptions and swaps["in"] == swaps["out"] > 0
    assert all(output(events, name) == reply_of(prompt, 40) for name, prompt in prompts.items())
    ends = [event for event in events if isinstance(event, Finished)]
    assert [end.num_computed_tokens for end in ends] == [len(SYSTEM) + 1 + 39] * 3
    assert eng.scheduler.kv.states is not None and not eng.scheduler.kv.states.host.num_in_use


def test_preempted_request_starts_again_on_its_own_snapshot() -> None:
    eng, _ = hybrid(num_pages=26)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = {name: (i, *SYSTEM) for i, name in enumerate("abc", 20)}
    for name, prompt in prompts.items():
        eng.add(request(name, prompt=prompt, params=params))
    events = drain(eng)
    assert eng.health().num_preemptions
    assert all(output(events, name) == reply_of(prompt, 40) for name, prompt in prompts.items())


def test_failed_step_leaves_no_snapshot_of_a_request_that_was_cancelled_meanwhile() -> None:
    """Its state has the token of the failed step. The step after that one is launched before the failure is known."""
    runner = Crashing(fake_capacity(64, PAGE, has_async_launch=True, num_states=33), VOCAB, eos=None, lazy=True)
    eng = engine(runner)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    eng.add(request("a", prompt=SYSTEM, params=params))
    eng.add(request("b", prompt=(*SYSTEM, 11), params=params))
    events = [event for _ in range(6) for event in eng.step()]
    (in_flight,) = eng._pipeline._steps
    runner.crashes = frozenset({in_flight.plan.step})
    eng.abort("a")
    events += drain(eng)
    assert [event.request_id for event in events if isinstance(event, Failed)] == ["b"]
    check_snapshots(eng, runner, {""})
    tokens = output(events, "a")
    assert tokens
    ask(eng, "c", (*SYSTEM, *tokens, 5))
