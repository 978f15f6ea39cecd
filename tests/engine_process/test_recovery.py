"""Order of trials after a crash, and requests that end while no engine runs them."""

from __future__ import annotations

import pytest

from chatcache.engine_process import recovery
from chatcache.engine_process.protocol import Abort, Answer, CancelCandidate, Events, Submit
from chatcache.engine_process.recovery import RequestJournal
from chatcache.types.events import CandidateDone, Failed, Finished, Started, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, ResumePoint, SamplingParams
from chatcache.types.stats import EngineHealth
from tests.engine_process.recovery_bench import RecoveryBench


def test_suspects_run_alone_in_order_and_then_all_together() -> None:
    bench = RecoveryBench()
    for name in "abc":
        bench.start(name)
    bench.crash()
    bench.recovery.on_started()
    assert bench.in_engine == ["a"]
    late = bench.submit("late")
    bench.emit("a", (0, 1), (0, 1))
    assert Abort("a") not in bench.sent
    bench.emit("a", (0, 1))
    assert bench.sent[-1] == Abort("a") and bench.in_engine == ["a"]
    bench.finish("a", cancelled=True)
    assert bench.in_engine == ["b"]
    bench.finish("b")
    assert bench.in_engine == ["c"]
    bench.emit("c", *[(0, 1)] * 3)
    assert bench.in_engine == ["c", "a", "late"]
    (resumed,) = [c.request.resume_point for c in bench.sent[-2:-1] if isinstance(c, Submit)]
    assert resumed is not None and resumed.candidates[0].tokens == b"\7\0\0\0" + b"\1\0\0\0" * 3
    last = bench.sent[-1]
    assert isinstance(last, Submit) and last.call == late and last.request.resume_point is None
    assert not [event for event in bench.events["a"] if isinstance(event, Finished)]
    assert [event.seq for event in bench.events["a"]] == [1, 2, 3, 4, 5]


def test_a_kill_from_outside_needs_two_deaths_to_blame_a_request() -> None:
    """The kernel and operators send SIGKILL, so one death on trial is not enough."""
    for is_sure, num_trials in ((True, 1), (False, 2)):
        bench = RecoveryBench()
        bench.start("a")
        bench.crash(is_sure=is_sure)
        for number in range(num_trials):
            bench.recovery.on_started()
            assert bench.in_engine == ["a"]
            assert bench.crash(is_sure=is_sure) == (number == num_trials - 1)
        end = bench.events["a"][-1]
        assert isinstance(end, Failed) and end.code == "request_poisoned"


def test_a_request_that_passed_its_trial_is_no_suspect() -> None:
    bench = RecoveryBench()
    bench.start("a")
    for _ in range(3):
        bench.crash(is_sure=False)
        bench.recovery.on_started()
        assert bench.crash(is_sure=False) == 0
        bench.recovery.on_started()
        bench.emit("a", *[(0, 1)] * 3)
    assert not [event for event in bench.events["a"] if isinstance(event, Failed)]


def test_a_poisoned_request_that_was_never_accepted_is_rejected() -> None:
    bench = RecoveryBench()
    call = bench.submit("a")
    bench.crash()
    bench.recovery.on_started()
    assert bench.in_engine == ["a"] and bench.recovery.pending_calls == {call}
    assert bench.crash() == 1
    (answer,) = bench.answers
    assert isinstance(answer, Answer) and answer.call == call
    assert answer.error is not None and answer.error.code == "request_poisoned"
    assert not bench.recovery.pending_calls and not bench.events


def test_held_requests_can_be_aborted_and_cancelled() -> None:
    bench = RecoveryBench()
    for name, n in (("a", 1), ("b", 3), ("c", 2)):
        bench.start(name, n=n)
    bench.crash()
    bench.abort("a")
    end = bench.events["a"][-1]
    assert isinstance(end, Finished) and end.cancelled and end.num_output_tokens == 1
    for index in (1, 1, 7):
        bench.drop("b", index)
    done = bench.events["b"][-1]
    assert isinstance(done, CandidateDone) and (done.index, done.finish_reason) == (1, "cancelled")
    for index in (1, 0):  # the last one: the whole request
        bench.drop("c", index)
    assert isinstance(bench.events["c"][-1], Finished)
    assert [reply.call for reply in bench.answers if isinstance(reply, Answer)][3:] == [4, 5, 6, 7, 8]
    bench.recovery.on_started()
    (resumed,) = [c.request.resume_point for c in bench.sent[-1:] if isinstance(c, Submit)]
    assert resumed is not None and [each.is_done for each in resumed.candidates] == [False, True, False]


def test_suspending_requests_can_be_aborted_and_cancelled() -> None:
    for is_abort in (True, False):
        bench = RecoveryBench()
        for name in "ab":
            bench.start(name, n=2)
        bench.crash()
        bench.recovery.on_started()
        bench.emit("a", *[(0, 1), (1, 1)] * 3)
        assert bench.sent[-1] == Abort("a")
        if is_abort:
            bench.abort("a")
        else:
            call = bench.drop("a", 0)
            assert not [reply for reply in bench.answers if reply.call == call]
        bench.finish("a", cancelled=True)
        if is_abort:
            assert isinstance(bench.events["a"][-1], Finished)
        else:
            assert isinstance(bench.events["a"][-1], CandidateDone) and bench.answers[-1].call == call
        assert bench.in_engine == ["b"]


def test_aborts_and_cancellations_pending_at_a_crash_are_applied() -> None:
    bench = RecoveryBench()
    bench.start("a")
    bench.start("b", n=2)
    bench.abort("a")
    call = bench.drop("b", 1)
    assert bench.sent[-2:] == [Abort("a"), CancelCandidate(call, "b", 1)]
    bench.crash()
    assert isinstance(bench.events["a"][-1], Finished) and isinstance(bench.events["b"][-1], CandidateDone)
    assert bench.answers[-1] == Answer(call)


def test_a_search_is_resumed_from_its_steps_after_a_trial_of_three() -> None:
    bench = RecoveryBench()
    bench.start_search("a")
    bench.search("a", b"2", b"3")
    bench.start("b")
    bench.crash()
    bench.recovery.on_started()
    assert bench.in_engine == ["a"] and bench.resume_point() == ResumePoint(
        last_seq=1, num_cached_tokens=0, steps=(b"1", b"2", b"3")
    )
    bench.search("a", b"4", b"5")
    assert Abort("a") not in bench.sent
    bench.search("a", b"6")
    assert bench.sent[-1] == Abort("a")
    bench.finish("a", cancelled=True)
    assert bench.in_engine == ["b"]
    bench.emit("b", *[(0, 1)] * 3)
    assert bench.in_engine == ["b", "a"] and bench.resume_point().steps == (b"1", b"2", b"3", b"4", b"5", b"6")


def test_a_search_that_was_not_started_begins_again() -> None:
    """Its first step was received, but its `Started` event was not."""
    bench = RecoveryBench()
    bench.recovery.receive(Answer(bench.submit("a", best_of=3)))
    bench.search("a", b"1")
    bench.crash()
    bench.recovery.on_started()
    assert bench.resume_point() == ResumePoint()
    bench.search("a", b"1 again", started=True)
    bench.crash(is_sure=False)
    bench.recovery.on_started()
    assert bench.resume_point().steps == (b"1 again",)


def test_a_search_with_a_long_record_fails_at_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MAX_RECORD_BYTES", 10)
    bench = RecoveryBench()
    for name, size in (("a", 9), ("b", 10)):
        bench.start_search(name)
        bench.search(name, b"x" * size, b"y" * (size - 9))
    bench.crash()
    end = bench.events["b"][-1]
    assert isinstance(end, Failed) and (end.code, end.status) == ("engine_unavailable", 503)
    bench.recovery.on_started()
    assert bench.in_engine == ["a"] and len(bench.resume_point().steps) == 3


def test_a_search_that_crashes_the_engine_again_is_poisoned() -> None:
    bench = RecoveryBench()
    for name in "ab":
        bench.start_search(name)
    bench.crash()
    bench.recovery.on_started()
    bench.search("a", b"2", b"3")
    assert bench.crash() == 1
    end = bench.events["a"][-1]
    assert isinstance(end, Failed) and end.code == "request_poisoned"
    bench.recovery.on_started()
    assert bench.in_engine == ["b"]


def test_a_held_search_can_be_aborted_but_not_its_candidates() -> None:
    bench = RecoveryBench()
    for name in "ab":
        bench.start_search(name)
    bench.crash()
    call = bench.drop("a", 0)
    answer = bench.answers[-1]
    assert isinstance(answer, Answer) and answer.call == call
    assert answer.error is not None and answer.error.param == "candidate"
    bench.abort("a")
    end = bench.events["a"][-1]
    assert isinstance(end, Finished) and end.cancelled
    bench.recovery.on_started()
    assert bench.in_engine == ["b"]


def test_health_counts_held_requests_as_waiting() -> None:
    bench = RecoveryBench()
    for name in "ab":
        bench.start(name)
    health = EngineHealth(ready=True, num_waiting=1, num_waiting_tokens=5)
    assert bench.recovery.with_held(health) is health
    bench.crash()
    held = bench.recovery.with_held(health)
    assert (held.num_waiting, held.num_waiting_tokens) == (3, 11)
    assert bench.recovery.num_in_engine == 0


def test_events_out_of_order_raise() -> None:
    bench = RecoveryBench()
    bench.start("a")
    for seq in (2, 4):
        try:
            bench.recovery.receive(Events((Tokens("a", seq, 0, (1,)),)))
        except ValueError:
            continue
        raise AssertionError("it was taken")


def test_journal_of_a_resumed_request_contains_what_other_engines_emitted() -> None:
    params = SamplingParams(n=2, max_tokens=100)
    first = RequestJournal(GenerateRequest(request_id="r", prompt=(1, 2, 3), params=params))
    first.record(Started("r", 1, 3, 2))
    first.record(Tokens("r", 2, 0, (7, 8), score=-1.5))
    first.record(Tokens("r", 3, 1, (9,)))
    first.record(CandidateDone("r", 4, 1, "stop"))
    second = RequestJournal(first.resumed_request())
    assert second.resumed_request() == first.resumed_request()
    assert (second.last_seq, second.num_tokens, second.num_unfinished) == (4, 3, 1)
    second.record(Tokens("r", 5, 0, (10,)))
    assert RequestJournal(second.resumed_request()).num_tokens == 4
    search = RequestJournal(
        GenerateRequest(request_id="s", prompt=(1,), params=BeamSearchParams(beam_width=2, max_tokens=9))
    )
    search.record(Started("s", 1, 1, 0))
    search.record_search_step(b"step")
    assert RequestJournal(search.resumed_request()).num_search_steps == 1
