"""Children that are killed, hang or crash: other requests lose and repeat nothing."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from chatcache.config import EngineConfig
from chatcache.engine_process import process as children
from chatcache.engine_process.process import ChildProcess, EngineProcess, RestartPolicy
from chatcache.engine_process.protocol import Notice
from chatcache.engine_process.recovery import RequestJournal, RequestRecovery
from chatcache.types.events import Embedding, Failed, Finished
from chatcache.types.request import GenerateRequest, PoolingParams, ResumePoint
from tests.engine_process.crashing_engine import (
    QUICK,
    SAMPLED,
    SEARCHES,
    VOCAB,
    RequestGroup,
    check_same,
    expected_events,
    make_request,
    make_search,
    poison,
    process,
    until,
    wait_for_search_steps,
)
from tests.engine_process.test_process import is_alive
from tests.support.fake_runner import fake_states, history_of

pytestmark = pytest.mark.slow

ZOMBIES = RestartPolicy(max_deaths=4, first_delay_s=0.01, hung_after_s=2.0)


async def kill_under_streams(num_kills: int, num_streams: int = 20, tokens_per_kill: int = 30) -> None:
    num_killed = 0
    async with process(step_ms=5) as engine:
        await engine.wait_loaded()
        while num_killed < num_kills:  # once, but where the machine has more time for the child than for this process
            first, num_tokens = num_killed * num_streams, tokens_per_kill * (num_kills - num_killed)
            requests = [make_request(first + number, num_tokens) for number in range(num_streams)]
            expected = expected_events(requests)
            crowd = RequestGroup(engine, requests)
            await crowd.begin()
            while num_killed < num_kills:
                await crowd.wait_for_progress()
                if not crowd.open_ones:
                    break
                os.kill(engine.pid or 0, signal.SIGKILL)
                num_killed += 1
                await until(lambda count=num_killed: engine.num_restarts == count)  # type: ignore[misc]
            await crowd.end()
            for name, events in crowd.events.items():
                check_same(events, expected[name])
    print(f"killed {num_killed} times, {engine.num_restarts} restarts")


async def test_kills_under_streams_repeat_or_lose_no_token() -> None:
    await kill_under_streams(6)


@pytest.mark.long
async def test_fifty_kills_under_streams_repeat_or_lose_no_token() -> None:
    await kill_under_streams(50)


def _without_tokens(journal: RequestJournal) -> GenerateRequest:
    resumed = ResumePoint(last_seq=journal.last_seq, num_cached_tokens=0)
    return GenerateRequest(
        request_id=journal.request.request_id,
        prompt=journal.request.prompt,
        params=journal.request.params,
        resume_point=resumed,
    )


async def test_kill_check_detects_a_journal_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected bug: all tokens are emitted twice."""
    monkeypatch.setattr(RequestJournal, "resumed_request", _without_tokens)
    with pytest.raises(AssertionError, match="not what an undisturbed run says"):
        await kill_under_streams(1, num_streams=3, tokens_per_kill=200)  # the child is killed long before the end


@pytest.mark.parametrize(("code", "is_waited_for"), [(errno.EMFILE, True), (errno.ENOENT, False)])
async def test_a_restart_waits_for_system_resources(
    code: int, is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refusals = children._start, iter([OSError(code, os.strerror(code))] * 6)

    def refused_at_first(sock: socket.socket) -> subprocess.Popen[bytes]:
        for refusal in refusals:
            raise refusal
        return start(sock)

    async with process(step_ms=5) as engine:
        await engine.wait_loaded()
        requests = [make_request(0, 200)]
        expected = expected_events(requests)
        crowd = RequestGroup(engine, requests)
        await crowd.begin()
        await crowd.wait_for_progress()
        monkeypatch.setattr(children, "_start", refused_at_first)
        os.kill(engine.pid or 0, signal.SIGKILL)
        await crowd.end()
        for name, events in crowd.events.items():
            if is_waited_for:
                check_same(events, expected[name])
            else:
                assert "could not be started" in (await engine.wait_failed()).message
                assert isinstance(events[-1], Failed)
        assert engine.num_restarts == 1


async def poisoned(num_poison: int, num_good: int) -> EngineProcess:
    requests = [make_request(number, 30) for number in range(num_good)]
    expected = expected_events(requests)
    every = num_good // num_poison
    for number in range(num_poison):  # some kill at once, some when they have said something
        requests.insert(number * (every + 1) + 2, poison(1000 + number, at=(number % 3) * 5))
    async with process() as engine:
        await engine.wait_loaded()
        crowd = RequestGroup(engine, requests)
        await crowd.begin()
        await crowd.end()
        assert engine.num_restarts <= 2 * num_poison, f"{num_poison} poison killed {engine.num_restarts} engines"
    for name, events in crowd.events.items():
        if name in expected:
            check_same(events, expected[name])
        else:
            end = events[-1]
            assert isinstance(end, Failed) and end.code == "request_poisoned"
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
    return engine


async def test_poisoned_requests_fail_alone() -> None:
    await poisoned(2, 20)


@pytest.mark.long
async def test_ten_poisoned_requests_among_two_hundred_fail_alone() -> None:
    await poisoned(10, 200)


async def test_without_trials_poisoned_requests_fail_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected bug: requests that were running are not suspects."""
    monkeypatch.setattr(RequestRecovery, "_suspects", lambda self: iter(()))
    with pytest.raises(AssertionError, match=r"1 poison killed ([3-9]|[1-9][0-9]+) engines"):
        await poisoned(1, 5)


async def test_a_poisoned_request_that_hangs_fails() -> None:
    requests = [make_request(1, 200), make_request(2, 5, seed=7770)]
    expected = expected_events(requests[:1])
    async with process(policy=ZOMBIES) as engine:
        await engine.wait_loaded()
        crowd = RequestGroup(engine, requests)
        await crowd.begin()
        await crowd.end()
        check_same(crowd.events["r1"], expected["r1"])
        end = crowd.events["r2"][-1]
        assert isinstance(end, Failed) and end.code == "request_poisoned" and engine.num_restarts <= 2


@pytest.fixture
def notices_of_old_children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Notice]]:
    """Collect notices that were received from a child that is not the current one."""
    received: list[Notice] = []
    children: list[ChildProcess] = []
    spawn, receive = ChildProcess.spawn, EngineProcess._receive

    async def spawned(self: ChildProcess, boot: object) -> None:
        children.append(self)
        through = self._receive

        def from_it(notice: Notice) -> None:
            if children[-1] is not self:
                received.append(notice)
            else:
                through(notice)

        self._receive = from_it
        await spawn(self, boot)  # type: ignore[arg-type]

    monkeypatch.setattr(ChildProcess, "spawn", spawned)
    assert receive is EngineProcess._receive
    monkeypatch.setattr("chatcache.engine_process.process.KILL_GRACE_S", 0.01)
    monkeypatch.setattr(ChildProcess, "kill", lambda self: None)  # it is stopped, and nothing reaches it
    return iter([received])


async def wake_zombies(num_zombies: int, received: list[Notice]) -> None:
    requests = [make_request(number, 250 + 150 * num_zombies) for number in range(4)]
    expected = expected_events(requests)
    async with process(step_ms=5, policy=ZOMBIES) as engine:
        await engine.wait_loaded()
        crowd = RequestGroup(engine, requests)
        await crowd.begin()
        for number in range(num_zombies):
            await crowd.wait_for_progress()
            child = engine._child
            assert child is not None and child.process is not None
            os.kill(child.process.pid, signal.SIGSTOP)
            await until(lambda number=number: engine.num_restarts > number)  # type: ignore[misc]
            await crowd.wait_for_progress()
            os.kill(child.process.pid, signal.SIGCONT)
            try:
                await until(lambda child=child: bool(received) or not is_alive(child.process.pid))  # type: ignore[misc]
                assert not received, "a zombie was heard"
            finally:
                os.kill(child.process.pid, signal.SIGKILL)
                child.process.wait()
        await crowd.end()
        pid = engine.pid or 0
        await _stop(engine)
        assert not is_alive(pid)
    for name, events in crowd.events.items():
        check_same(events, expected[name])


async def _stop(engine: EngineProcess) -> None:
    await until(lambda: engine._ready)
    await engine.close()


async def test_output_of_a_hung_child_that_wakes_is_ignored(notices_of_old_children: Iterator[list[Notice]]) -> None:
    await wake_zombies(1, next(notices_of_old_children))


@pytest.mark.long
async def test_output_of_twenty_hung_children_that_wake_is_ignored(
    notices_of_old_children: Iterator[list[Notice]],
) -> None:
    await wake_zombies(20, next(notices_of_old_children))


async def test_zombie_check_detects_a_child_that_keeps_its_socket(
    notices_of_old_children: Iterator[list[Notice]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Injected bug: a hung child is replaced but not disconnected."""
    reap = ChildProcess.reap

    async def left(self: ChildProcess, grace_s: float) -> int | None:
        return None if grace_s == 0.0 else await reap(self, grace_s)

    monkeypatch.setattr(ChildProcess, "disconnect", lambda self: None)
    monkeypatch.setattr(ChildProcess, "reap", left)
    with pytest.raises(AssertionError, match="a zombie was heard"):
        await wake_zombies(1, next(notices_of_old_children))


@pytest.mark.parametrize("kind", [*SEARCHES, *SAMPLED])
async def test_a_request_killed_at_any_step_continues_identically(kind: str, tmp_path: Path) -> None:
    kill_at, factory = tmp_path / "kill_at", "tests.engine_process.crashing_engine:build_killed"
    (expected,) = expected_events([make_search(kind, "whole")]).values()
    async with EngineProcess(EngineConfig(model=str(kill_at)), factory, policy=QUICK, log_level="error") as engine:
        await engine.wait_loaded()
        for position in range(12):
            kill_at.write_text(str(position))
            search = RequestGroup(engine, [make_search(kind, f"s{position}")])
            await search.begin()
            await search.end()
            check_same(search.events[f"s{position}"], expected)
            assert engine.num_restarts == position + 1


async def test_searches_together_continue_after_several_kills() -> None:
    searches = [make_search(kind, kind, 150) for kind in SEARCHES]
    expected = expected_events(searches)
    async with process(step_ms=5) as engine:
        await engine.wait_loaded()
        crowd = RequestGroup(engine, searches)
        await crowd.begin()
        for number in range(1, 4):
            await wait_for_search_steps(engine, len(searches), 5)
            os.kill(engine.pid or 0, signal.SIGKILL)
            await until(lambda number=number: engine.num_restarts == number)  # type: ignore[misc]
        await crowd.end()
        for name, events in crowd.events.items():
            check_same(events, expected[name])


async def test_kill_check_detects_a_journal_without_search_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Injected bug: a step is missing in the record."""
    original = RequestJournal.record_search_step

    def record(journal: RequestJournal, step: bytes) -> None:
        original(journal, step)
        if len(journal._steps) == 3:
            del journal._steps[-1]

    monkeypatch.setattr(RequestJournal, "record_search_step", record)
    with pytest.raises(AssertionError):
        await test_a_request_killed_at_any_step_continues_identically("distinct", tmp_path)


@pytest.mark.parametrize("num_kills", [1, 2])
async def test_embeddings_of_a_killed_engine_are_computed_again(num_kills: int) -> None:
    prompts = [tuple((7 * number + index) % VOCAB for index in range(600)) for number in range(24)]
    async with process(step_ms=40) as engine:
        await engine.wait_loaded()
        for number, prompt in enumerate(prompts):
            await engine.submit(GenerateRequest(request_id=f"e{number}", prompt=prompt, pooling=PoolingParams()))
        for killed in range(1, num_kills + 1):
            os.kill(engine.pid or 0, signal.SIGKILL)
            await until(lambda count=killed: engine.num_restarts == count)  # type: ignore[misc]
        for number, prompt in enumerate(prompts):
            *embeddings, end = [event async for event in engine.events(f"e{number}")]
            assert isinstance(end, Finished) and not end.cancelled
            last = embeddings[-1]
            assert isinstance(last, Embedding)
            state = fake_states(np.array([history_of(prompt)], np.uint64))[0]
            want = state / np.float32(np.linalg.norm(state))
            np.testing.assert_allclose(np.frombuffer(last.values, "<f4"), want, atol=1e-6)
