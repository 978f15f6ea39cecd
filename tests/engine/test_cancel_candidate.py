"""Cancelling one of several candidates frees its pages and does not change the others.

Random workloads cancel candidates, too (`generated_workloads.drops`); here are single situations and injected bugs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chatcache.decoding.sampling import SamplingStrategy
from chatcache.engine.engine import Engine
from chatcache.errors import UnsupportedParameterError
from chatcache.kv_cache.pool import InvariantError
from chatcache.scheduler.branches import BranchManager
from chatcache.scheduler.decode_batch import DecodeBatch
from chatcache.scheduler.request import LiveRequest
from chatcache.scheduler.scheduler import Scheduler
from chatcache.types.actions import DroppedCandidate
from chatcache.types.events import FINISH_CANCELLED, CandidateDone, EngineEvent, Finished, Started, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from chatcache.types.stats import ExplainQuery
from tests.engine.driver import VOCAB, drain, engine, output, request
from tests.support.fake_runner import FakeRunner, fake_capacity

EIGHT = SamplingParams(n=8, max_tokens=30, seed=3, ignore_eos=True)
Patch = pytest.MonkeyPatch


def runner(num_pages: int = 512, page_size: int = 4, num_host_pages: int = 0, *, ahead: bool = False) -> FakeRunner:
    capacity = fake_capacity(num_pages, page_size, 32, 1024, num_host_pages, has_async_launch=ahead)
    return FakeRunner(capacity, VOCAB, lazy=ahead)


def undisturbed(one: GenerateRequest) -> list[EngineEvent]:
    eng = engine(runner())
    eng.add(one)
    return drain(eng)


def steps(eng: Engine, count: int) -> list[EngineEvent]:
    return [event for _ in range(count) for event in eng.step()]


def done(events: list[EngineEvent], index: int, name: str = "a") -> CandidateDone:
    ends = [e for e in events if isinstance(e, CandidateDone) and (e.request_id, e.index) == (name, index)]
    assert len(ends) == 1, f"candidate {index} ended {len(ends)} times"
    return ends[0]


def check_others(events: list[EngineEvent], one: GenerateRequest, dropped: set[int]) -> None:
    """Compare with a run without cancellations: others are equal, cancelled ones a prefix."""
    expected = undisturbed(one)
    assert isinstance(one.params, SamplingParams)
    for index in range(one.params.n):
        whole, said = output(expected, index=index), output(events, index=index)
        if index in dropped:
            assert done(events, index).finish_reason == FINISH_CANCELLED
            assert said == whole[: len(said)] != whole
        else:
            assert said == whole
            assert done(events, index).score == done(expected, index).score
            assert done(events, index).finish_reason == done(expected, index).finish_reason
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert isinstance(events[-1], Finished) and not events[-1].cancelled


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("kept", [0, 3, 7])
def test_cancelling_seven_of_eight_candidates_frees_their_pages_and_changes_no_other(kept: int, ahead: bool) -> None:
    eng, one = engine(runner(ahead=ahead)), request(num_tokens=22, params=EIGHT)
    eng.add(one)
    events = steps(eng, 9)
    pool = eng.scheduler.kv.pool
    for index in set(range(8)) - {kept}:
        before, held = pool.num_in_use, eng.cache.num_pages_held("a")
        eng.cancel_candidate("a", index)
        freed = before - pool.num_in_use
        assert freed >= 2 and eng.cache.num_pages_held("a") == held - freed
        eng.cache.check()
        last = eng.step()
        events += last
        assert done(last, index).num_pages_freed == freed
        assert not [e for e in last if isinstance(e, Tokens) and e.index == index]
    branch = eng.scheduler.running[0].branches[kept]
    assert branch.table is not None and pool.num_in_use == branch.table.num_pages, "what one candidate needs"
    events += drain(eng)
    check_others(events, one, set(range(8)) - {kept})


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_cancelling_before_the_first_step_computes_only_the_others(lane: int) -> None:
    one = request(params=SamplingParams(n=3, max_tokens=6, seed=1, ignore_eos=True))
    for count in (0, 1):  # while it waits; while its prompt is computed
        eng = engine(runner(), max_num_batched_tokens=12)
        eng.add(one)
        events = steps(eng, count)
        eng.cancel_candidate("a", lane)
        eng.cache.check()
        events += drain(eng)
        assert done(events, lane).num_pages_freed == 0
        assert [isinstance(event, Started) for event in events[:2]] == [False, True]
        assert output(events, index=lane) == []
        check_others(events, one, {lane})


def test_cancelling_an_ended_or_unknown_candidate_does_nothing() -> None:
    params = SamplingParams(n=3, max_tokens=40, seed=5)  # candidates end when they like
    eng, one = engine(FakeRunner(fake_capacity(page_size=4), VOCAB, eos_every=3)), request(params=params)
    eng.add(one)
    events: list[EngineEvent] = []
    while not any(isinstance(event, CandidateDone) for event in events):
        events += eng.step()
    (ended,) = [event.index for event in events if isinstance(event, CandidateDone)]
    before, num_in_use = len(events), eng.scheduler.kv.pool.num_in_use
    for name, index in (("a", ended), ("a", 3), ("a", 99), ("a", -1), ("unknown", 0)):
        eng.cancel_candidate(name, index)
    assert eng.scheduler.kv.pool.num_in_use == num_in_use and not eng._event_queue
    alive = min({0, 1, 2} - {ended})
    eng.cancel_candidate("a", alive)
    eng.cancel_candidate("a", alive)
    assert len(eng._event_queue) == 1
    events += drain(eng)
    assert len(events) > before and done(events, alive).finish_reason == FINISH_CANCELLED
    eng.cancel_candidate("a", 0)
    assert not eng.has_work()


@pytest.mark.parametrize("count", [0, 1, 8])
def test_cancelling_the_last_candidate_aborts_the_request(count: int) -> None:
    eng = engine(runner())
    eng.add(request(params=EIGHT))
    events = steps(eng, count)
    for index in (3, 1, 0, 2, 7, 6, 5, 4):
        eng.cancel_candidate("a", index)
    events += drain(eng)
    last = events[-1]
    assert isinstance(last, Finished) and last.cancelled and (last.num_pages_freed > 0) == (count > 0)
    ends = [event.index for event in events if isinstance(event, CandidateDone)]
    assert ends == [3, 1, 0, 2, 7, 6, 5], "what ends with the request has no end of its own"
    assert eng.health().num_pages_in_use == 0


@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(beam_width=3, max_tokens=9),
        SamplingParams(n=3, distinct=True, max_tokens=9),
        SamplingParams(n=2, best_of=3, max_tokens=9),
    ],
    ids=["beams", "distinct", "best_of"],
)
def test_cancelling_a_candidate_of_a_search_raises(params: Params) -> None:
    eng, other = engine(runner()), engine(runner())
    events, expected = [], []
    for each in (eng, other):
        each.add(request(params=params))
    for _ in range(4):
        with pytest.raises(UnsupportedParameterError, match="one by one") as caught:
            eng.cancel_candidate("a", 1)
        assert caught.value.param == "candidate"
        events += eng.step()
        expected += other.step()
    assert events + drain(eng) == expected + drain(other)


def preempting_requests(eng: Engine, num_others: int = 4) -> list[EngineEvent]:
    """Make older requests preempt the given one."""
    events: list[EngineEvent] = []
    for number in range(num_others):
        params = SamplingParams(max_tokens=40, seed=number, ignore_eos=True)
        eng.add(request(f"old{number}", num_tokens=9 + number, params=params))
    eng.add(request(params=SamplingParams(n=4, max_tokens=24, seed=9, ignore_eos=True)))
    while not any(each.request_id == "a" and each.num_preemptions for each in eng.scheduler.waiting):
        assert eng.has_work()
        events += eng.step()
    return events


@pytest.mark.parametrize("num_host_pages", [0, 100], ids=["recompute", "swap"])
@pytest.mark.parametrize("dropped", [{0}, {1, 2}, {0, 3}, {0, 1, 2}])
def test_cancelling_while_preempted_changes_no_other_candidate(num_host_pages: int, dropped: set[int]) -> None:
    preemption = "swap" if num_host_pages else "recompute"
    eng = engine(runner(44, num_host_pages=num_host_pages), preemption_mode=preemption)
    events = preempting_requests(eng) + eng.step()  # it has been looked at while it waits
    num_in_use = eng.scheduler.kv.pool.num_in_use
    for index in dropped:
        eng.cancel_candidate("a", index)
        eng.cache.check()
    assert eng.scheduler.kv.pool.num_in_use == num_in_use
    events = [event for event in events + drain(eng) if event.request_id == "a"]
    assert all(done(events, index).num_pages_freed == 0 for index in dropped)
    check_others(events, request(params=SamplingParams(n=4, max_tokens=24, seed=9, ignore_eos=True)), dropped)
    assert eng.health().num_host_pages_in_use == 0


@pytest.mark.parametrize("num_host_pages", [0, 100], ids=["recompute", "swap"])
@pytest.mark.parametrize("dropped", [0, 1, 3])
def test_cancelling_while_pages_are_restored_changes_no_other_candidate(num_host_pages: int, dropped: int) -> None:
    """Some branches have their pages again, others wait for theirs."""
    preemption = "swap" if num_host_pages else "recompute"
    eng = engine(runner(44, num_host_pages=num_host_pages), preemption_mode=preemption, max_num_batched_tokens=16)
    events = preempting_requests(eng)
    while not (back := [each for each in eng.scheduler.running if each.request_id == "a"]):
        events += eng.step()
    (live,) = back
    assert live.num_waiting_branches == (0 if num_host_pages else 3)
    eng.cancel_candidate("a", dropped)
    assert live.num_waiting_branches == sum(branch.table is None for branch in live.branches.values())
    sources = [branch.fork_source for branch in live.branches.values() if branch.fork_source is not None]
    assert all(source.id in live.branches for source in sources), "a branch waits for one that has ended"
    eng.cache.check()
    events = [event for event in events + drain(eng) if event.request_id == "a"]
    check_others(events, request(params=SamplingParams(n=4, max_tokens=24, seed=9, ignore_eos=True)), {dropped})


def test_cancelling_a_row_on_the_device_continues_launching_ahead() -> None:
    """The launched step is read without the cancelled row; later steps are planned ahead."""
    eng, one = engine(runner(ahead=True)), request(params=SamplingParams(n=2, max_tokens=60, seed=2, ignore_eos=True))
    eng.add(one)
    events = steps(eng, 9)
    num_ahead = eng.health().num_steps_ahead
    assert num_ahead > 2 and len(eng._pipeline) == 1, "a step is on the device"
    eng.cancel_candidate("a", 0)
    events += steps(eng, 20)
    assert eng.health().num_steps_ahead >= num_ahead + 15
    assert not eng.scheduler._decode_batch.unbatched_requests
    events += drain(eng)
    check_others(events, one, {0})


def test_pages_of_a_cancelled_candidate_are_cached() -> None:
    eng = engine(runner())
    eng.add(request(num_tokens=18, params=SamplingParams(n=2, max_tokens=60, seed=2, ignore_eos=True)))
    events = steps(eng, 25)
    eng.cancel_candidate("a", 1)
    line = (*request(num_tokens=18).prompt, *output(events, index=1))
    assert eng.cache.explain(ExplainQuery((*line, 1))).num_cached_tokens == len(line) - 1
    drain(eng)


def test_slots_of_a_cancelled_candidate_are_free_for_others() -> None:
    """Gang admission counts only the remaining candidates."""
    eng = engine(FakeRunner(fake_capacity(num_slots=8), VOCAB))
    eng.add(request(params=EIGHT))
    eng.add(request("b", params=SamplingParams(n=7, max_tokens=5, ignore_eos=True)))
    events = steps(eng, 5)
    assert not any(event.request_id == "b" for event in events)
    for index in range(7):
        eng.cancel_candidate("a", index)
    assert any(event.request_id == "b" for event in steps(eng, 3))
    drain(eng)


# -- bugs ---------------------------------------------------------------------------------------------------------


def pages_kept(patch: Patch) -> None:
    original = BranchManager.close

    def drop(self: BranchManager, request: LiveRequest, branch_id: int) -> None:
        branch = request.branches.pop(branch_id)
        self._decode_batch.remove(branch)
        self._rows.release(branch.slot)

    assert original is not None
    patch.setattr(BranchManager, "drop", drop)


def decode_row_kept(patch: Patch) -> None:
    original = BranchManager.drop

    def drop(self: BranchManager, request: LiveRequest, branch_id: int) -> None:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(DecodeBatch, "remove", lambda *_, **__: None)
            original(self, request, branch_id)

    patch.setattr(BranchManager, "drop", drop)


def partners_not_paired_anew(patch: Patch) -> None:
    original = BranchManager.drop

    def drop(self: BranchManager, request: LiveRequest, branch_id: int) -> None:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(LiveRequest, "choose_fork_sources", lambda self: None)
            original(self, request, branch_id)

    patch.setattr(BranchManager, "drop", drop)


def chain_of_the_old_leader(patch: Patch) -> None:
    original = BranchManager.drop

    def drop(self: BranchManager, request: LiveRequest, branch_id: int) -> None:
        chain = request.hash_chain
        original(self, request, branch_id)
        request.hash_chain = chain

    patch.setattr(BranchManager, "drop", drop)


def waiting_branches_miscounted(patch: Patch) -> None:
    original = BranchManager.drop

    def drop(self: BranchManager, request: LiveRequest, branch_id: int) -> None:
        num_waiting = request.num_waiting_branches
        original(self, request, branch_id)
        request.num_waiting_branches = num_waiting

    patch.setattr(BranchManager, "drop", drop)


def counts_kept(patch: Patch) -> None:
    original = Scheduler.drop_branch

    def drop(self: Scheduler, request: LiveRequest, branch_id: int | None) -> int:
        num_reserved = self._rows.num_reserved
        num_pages = original(self, request, branch_id)
        self._rows.num_reserved = num_reserved
        return num_pages

    patch.setattr(Scheduler, "drop_branch", drop)


def lane_created_anyway(patch: Patch) -> None:
    original = SamplingStrategy.drop

    def drop(self: SamplingStrategy, index: int) -> DroppedCandidate | None:
        wanted = set(self._wanted)
        dropped = original(self, index)
        if not self._started:
            self._wanted = wanted
        return dropped

    patch.setattr(SamplingStrategy, "drop", drop)


def lanes_move_up(patch: Patch) -> None:
    """A lane after one that was cancelled early samples with the noise of that lane."""
    original = SamplingStrategy._start

    def split(self: SamplingStrategy, candidates: Any, actions: Any, outputs: Any) -> None:
        given = sorted(self._wanted)
        moved = list(candidates)
        for place, index in enumerate(given):
            moved[index] = candidates[place]
        original(self, tuple(moved), actions, outputs)

    patch.setattr(SamplingStrategy, "_start", split)


BUGS: list[Callable[[Patch], None]] = [
    pages_kept,
    decode_row_kept,
    partners_not_paired_anew,
    chain_of_the_old_leader,
    waiting_branches_miscounted,
    counts_kept,
    lane_created_anyway,
    lanes_move_up,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.slow
def test_random_cancellations_detect_an_injected_bug(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, AttributeError, InvariantError, IndexError, KeyError)):
        every_moment()


def every_moment() -> None:
    for lane in range(2):
        test_cancelling_before_the_first_step_computes_only_the_others(lane)
        test_cancelling_seven_of_eight_candidates_frees_their_pages_and_changes_no_other(3 * lane, ahead=bool(lane))
    for num_host_pages in (0, 100):
        for dropped in (0, 1, 3):
            test_cancelling_while_preempted_changes_no_other_candidate(num_host_pages, {dropped})
            test_cancelling_while_pages_are_restored_changes_no_other_candidate(num_host_pages, dropped)


@pytest.mark.slow
def test_random_cancellations_without_a_bug_pass() -> None:
    every_moment()
