"""The child process crashes, hangs or fails to load, or its parent ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from chatcache.engine_process.process import EngineProcess, RestartPolicy
from chatcache.engine_process.protocol import MAX_FRAME_BYTES
from chatcache.errors import ContextLengthError, EngineError, InvalidRequestError, ModelFolderError, OverloadedError
from chatcache.types.events import Failed, Finished, Started, Tokens
from chatcache.types.stats import ExplainQuery
from tests.engine_process.engines import FAST, expected_tokens, process, request, until


def process_state(pid: int) -> str:
    """Return the state: R runnable, S asleep, Z zombie, X ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return "X"


def is_alive(pid: int) -> bool:
    return process_state(pid) not in "ZX"


async def ready_again(engine: EngineProcess, restarts: int) -> None:
    async def condition() -> bool:
        return engine.num_restarts >= restarts and (await engine.health()).ready

    await until(condition)


@pytest.mark.slow
async def test_kill_9_under_a_stream_pauses_it_until_the_next_child() -> None:
    async with process("slow") as engine:
        await engine.wait_loaded()
        names = [f"r{number}" for number in range(5)]
        streams = {}
        for number, name in enumerate(names):
            await engine.submit(request(name, 200, prompt=(number, 7)))
            streams[name] = engine.events(name)
            assert isinstance(await anext(streams[name]), Started)
        first = engine.pid
        os.kill(first or 0, signal.SIGKILL)
        for number, name in enumerate(names):
            events = [event async for event in streams[name]]
            assert [event.seq for event in events] == list(range(2, len(events) + 2))
            assert isinstance(events[-1], Finished)
            tokens = [event.token_ids[0] for event in events if isinstance(event, Tokens)]
            assert tokens == expected_tokens((number, 7), 200)
        assert engine.num_restarts == 1 and engine.pid != first and not is_alive(first or 0)


async def test_sigterm_to_the_child_is_ignored_while_the_parent_drains() -> None:
    """Service managers signal all processes of a service; the parent drains its requests first."""
    async with process("slow") as engine:
        await engine.wait_loaded()
        await engine.submit(request("r", 50, prompt=(3, 7)))
        stream, first = engine.events("r"), engine.pid
        assert isinstance(await anext(stream), Started)
        os.kill(first or 0, signal.SIGTERM)
        events = [event async for event in stream]
        assert isinstance(events[-1], Finished) and engine.pid == first and engine.num_restarts == 0
    assert not is_alive(first or 0)


async def test_without_a_child_new_requests_are_rejected_and_held_ones_can_be_ended() -> None:
    async with process("slow", RestartPolicy(first_delay_s=600)) as engine:
        await engine.wait_loaded()
        for name in ("held", "aborted"):
            await engine.submit(request(name, 1_000_000))
            assert isinstance(await anext(engine.events(name)), Started)
        os.kill(engine.pid or 0, signal.SIGSTOP)
        late_stats = asyncio.create_task(engine.stats())
        await asyncio.sleep(0)
        os.kill(engine.pid or 0, signal.SIGKILL)

        async def detail() -> bool:
            return "starting a new one" in (await engine.health()).detail

        await until(detail)
        health = await engine.health()
        assert not health.ready and "signal 9" in health.detail
        with pytest.raises(OverloadedError, match="signal 9"):
            await late_stats
        with pytest.raises(OverloadedError, match="signal 9"):
            await engine.submit(request("late"))
        await engine.abort("aborted")
        end = [event async for event in engine.events("aborted")][-1]
        assert isinstance(end, Finished) and end.cancelled and end.num_prompt_tokens == 3
        reader = engine.events("held")
        await engine.close()
        end = [event async for event in reader][-1]
        assert isinstance(end, Failed) and end.message == "the engine was closed"


@pytest.mark.slow
async def test_a_submit_pending_at_a_crash_is_answered_by_the_next_child() -> None:
    async with process("slow") as engine:
        await engine.wait_loaded()
        os.kill(engine.pid or 0, signal.SIGSTOP)
        submit = asyncio.create_task(engine.submit(request("r", 3)))
        await asyncio.sleep(0)
        os.kill(engine.pid or 0, signal.SIGKILL)
        await submit
        tokens = [event.token_ids[0] async for event in engine.events("r") if isinstance(event, Tokens)]
        assert tokens == expected_tokens((1, 2, 3), 3) and engine.num_restarts == 1


@pytest.mark.slow
async def test_repeated_crashes_give_up_and_report_it() -> None:
    async with process("dies") as engine:
        error = await asyncio.wait_for(engine.wait_failed(), 180)
        assert "exit status 9" in error.message
        assert engine.num_restarts == FAST.max_deaths - 1
        with pytest.raises(EngineError):
            await engine.wait_loaded()


@pytest.mark.slow
async def test_repeated_crashes_while_loading_give_up() -> None:
    policy = RestartPolicy(max_deaths=3, first_delay_s=0.01, healthy_after_s=0.0)
    async with process("dies", policy) as engine, asyncio.timeout(180):
        assert "exit status 9" in (await engine.wait_failed()).message
        assert engine.num_restarts == 2


@pytest.mark.slow
async def test_a_load_that_hangs_gives_up() -> None:
    policy = RestartPolicy(max_deaths=2, first_delay_s=0.01, hung_after_s=0.2, lost_after_s=0.4, healthy_after_s=0.0)
    async with process("loading", policy) as engine, asyncio.timeout(180):
        assert "is loading but does not respond" in (await engine.wait_failed()).message
        assert engine.num_restarts == 1


@pytest.mark.slow
async def test_finished_requests_reset_the_count_of_crashes() -> None:
    async with process() as engine:
        await engine.wait_loaded()
        for deaths in range(1, FAST.max_deaths + 2):
            await engine.submit(request("r", 2))
            assert isinstance([event async for event in engine.events("r")][-1], Finished)
            os.kill(engine.pid or 0, signal.SIGKILL)
            await ready_again(engine, restarts=deaths)


def test_restart_delay_doubles_up_to_the_maximum() -> None:
    policy = RestartPolicy(first_delay_s=0.5, max_delay_s=3.0)
    assert [policy.delay_s(deaths) for deaths in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("model", "kind", "text"), [("broken", ModelFolderError, "config.json"), ("bug", EngineError, "planted")]
)
async def test_a_load_failure_is_final_and_raised(
    model: str, kind: type[Exception], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is raised in `wait_loaded` and not logged before."""
    async with process(model) as engine:
        with pytest.raises(kind, match=text):
            await engine.wait_loaded()
        assert text in (await engine.wait_failed()).message
        assert text in (await engine.health()).detail
        assert engine.num_restarts == 0
    records = [record for record in caplog.records if record.name.startswith("chatcache")]
    assert not [record for record in records if record.levelno >= logging.INFO]


async def test_while_loading_requests_are_rejected_and_health_reports_progress() -> None:
    async with process("loading") as engine:

        async def half_way() -> bool:
            health = await engine.health()
            return not health.ready and (health.load_fraction, health.detail) == (0.5, "half way")

        await until(half_way)
        with pytest.raises(OverloadedError) as caught:
            await engine.submit(request("r"))
        assert (caught.value.code, caught.value.status) == ("model_loading", 503)
        assert str(caught.value) == "the model is still loading (half way)"
        child = engine.pid or 0
    assert not is_alive(child)


async def test_a_prompt_longer_than_the_context_is_not_sent() -> None:
    async with process() as engine:
        model_info = await engine.wait_loaded()
        with pytest.raises(ContextLengthError, match=f"{model_info.max_model_len}"):
            await engine.submit(request("r", prompt=(2**31 - 1,) * 5_000_000))
        await engine.submit(request("r", 1))


@pytest.mark.slow
async def test_invalid_and_too_large_commands_raise_and_the_engine_continues() -> None:
    async with process() as engine:
        await engine.wait_loaded()
        child = engine.pid
        await engine.submit(request("running", 2_000))
        sends: list[bytes] = [b"\xc1", msgspec.msgpack.encode({"type": "exec", "call": 10**6}), b"\x80"]
        assert engine._child is not None and engine._child._transport is not None
        for body in sends:
            engine._child._transport.write(struct.pack(">I", len(body)) + body)
        with pytest.raises(EngineError, match="too large"):
            await engine.explain(ExplainQuery((1,), "big"))
        with pytest.raises(InvalidRequestError):
            await engine.explain(ExplainQuery((1,), "\ud800"))
        with pytest.raises(InvalidRequestError):
            await engine.explain(ExplainQuery((2**70,)))
        with pytest.raises(InvalidRequestError, match="frame limit"):
            await engine.explain(ExplainQuery((1,), "x" * MAX_FRAME_BYTES))
        with pytest.raises(InvalidRequestError, match="cannot decode"):
            await engine.explain(ExplainQuery(("1",)))  # type: ignore[arg-type]
        with pytest.raises(ContextLengthError):
            await engine.explain(ExplainQuery((1,) * 5_000_000))
        assert (await engine.explain(ExplainQuery((1,)))).num_tokens == 1
        assert isinstance([event async for event in engine.events("running")][-1], Finished)
        assert engine.pid == child and engine.num_restarts == 0


async def test_health_of_a_silent_child_with_work_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatcache.engine_process.process.MAX_SILENCE_S", 0.05)
    async with process("slow") as engine:
        await engine.wait_loaded()
        await asyncio.sleep(0.1)
        assert (await engine.health()).ready, "an idle engine owes no sign of life"
        monkeypatch.setattr("chatcache.engine_process.process.MAX_SILENCE_S", 60.0)
        os.kill(engine.pid or 0, signal.SIGSTOP)
        submit = asyncio.create_task(engine.submit(request("r", 1_000_000)))
        await asyncio.sleep(0)
        assert (await engine.health()).ready, "from here it owes one"
        monkeypatch.setattr("chatcache.engine_process.process.MAX_SILENCE_S", 0.05)

        async def detail() -> bool:
            health = await engine.health()
            return not health.ready and "no step for" in health.detail

        await until(detail)
        os.kill(engine.pid or 0, signal.SIGCONT)
        await submit


@pytest.mark.slow
async def test_close_leaves_no_process_and_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        async with process() as engine:
            await engine.wait_loaded()
            child = engine.pid or 0
            assert is_alive(child)
        assert not is_alive(child)

    async def closed() -> bool:
        return len(os.listdir("/proc/self/fd")) <= before + 1

    await until(closed)


async def test_the_child_inherits_no_listening_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.set_inheritable(server.fileno(), True)
        inode = os.stat(server.fileno()).st_ino
        async with process() as engine:
            await engine.wait_loaded()
            links = [os.readlink(link.path) for link in os.scandir(f"/proc/{engine.pid}/fd")]
    assert f"socket:[{inode}]" not in links and any(link.startswith("socket:") for link in links)


async def test_an_idle_child_uses_no_cpu() -> None:
    async with process() as engine:
        await engine.wait_loaded()
        await engine.submit(request("r", 1))
        assert [event async for event in engine.events("r")]
        states: list[str] = []

        async def sleeps() -> bool:
            states.append(process_state(engine.pid or 0))
            return states[-20:] == ["S"] * 20  # a busy loop would be running, or waiting to run

        await until(sleeps)


PARENT = """
import asyncio
from tests.engine_process.engines import process
async def main():
    async with process({model!r}) as engine:
        while (await engine.health()).load_fraction < {loaded}:
            await asyncio.sleep(0.01)
        print(engine.pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.linux  # parent-death signals are Linux's
@pytest.mark.parametrize(("model", "loaded"), [("", 1.0), ("loading", 0.5)])
def test_the_end_of_the_parent_ends_the_child(model: str, loaded: float) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PARENT.format(model=model, loaded=loaded)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as parent:
        child = int(parent.stdout.readline())  # type: ignore[union-attr]
        assert is_alive(child)
        parent.kill()
    deadline = time.monotonic() + 60
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)
