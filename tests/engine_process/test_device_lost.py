"""A lost device: the child reports it and exits, and clients get the reason."""

from __future__ import annotations

import asyncio
import logging

import pytest

from chatcache.config import EngineConfig
from chatcache.engine_process.process import EngineProcess, RestartPolicy
from chatcache.engine_process.threaded import ThreadedEngine
from chatcache.engine_process.worker import EXIT_DEVICE_LOST
from chatcache.errors import DeviceLostError, OverloadedError
from chatcache.types.events import EngineEvent, Failed, Finished, Tokens
from tests.engine_process.engines import FAST, LOST, build_idle_losing, build_losing, request, until

AHEAD = pytest.mark.parametrize("model", ["", "ahead"])
PATIENT = RestartPolicy(max_deaths=3, first_delay_s=600.0)


def failures(events: list[EngineEvent]) -> list[tuple[str, str]]:
    return [(event.code, event.message) for event in events if isinstance(event, Failed)]


@AHEAD
async def test_device_loss_ends_the_child_and_health_reports_it_while_requests_wait(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    factory = "tests.engine_process.engines:build_losing"
    async with EngineProcess(EngineConfig(model=model), factory, policy=PATIENT, log_level="critical") as engine:
        await engine.wait_loaded()
        # Together: the device is lost 0.3 s after the first one.
        await asyncio.gather(*(engine.submit(request(name, 1000, prompt=tuple(range(1, 20)))) for name in ("a", "b")))
        child = engine._child
        assert child is not None and child.process is not None
        await child.ended.wait()

        async def detail() -> bool:
            return "starting a new one" in (await engine.health()).detail

        await until(detail)
        health = await engine.health()
        assert not health.ready and LOST in health.detail
        assert child.process.returncode == EXIT_DEVICE_LOST
        assert LOST in caplog.text
        with pytest.raises(OverloadedError, match="device is lost") as caught:
            await engine.submit(request("late"))
        assert caught.value.code == "engine_unavailable"
        streams = [engine.events(name) for name in ("a", "b")]
        await engine.close()
        for stream in streams:
            events = [event async for event in stream]
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            assert any(isinstance(event, Tokens) for event in events)
            assert failures(events) == [("engine_error", "the engine was closed")]


@pytest.mark.slow
@AHEAD
async def test_a_request_is_resumed_after_each_device_loss(model: str) -> None:
    factory = "tests.engine_process.engines:build_losing"
    async with EngineProcess(EngineConfig(model=model), factory, policy=FAST, log_level="critical") as engine:
        await engine.wait_loaded()
        await engine.submit(request("a", 21))
        events = [event async for event in engine.events("a")]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert isinstance(events[-1], Finished) and events[-1].num_output_tokens == 21
        assert engine.num_restarts >= 2


async def test_repeated_device_loss_gives_up_and_reports_it() -> None:
    factory, policy = "tests.engine_process.engines:build_losing", RestartPolicy(max_deaths=1, first_delay_s=0.01)
    async with EngineProcess(EngineConfig(), factory, policy=policy, log_level="critical") as engine:
        await engine.wait_loaded()
        await engine.submit(request("a", 1000))
        assert failures([event async for event in engine.events("a")]) == [("device_lost", LOST)]
        error = await engine.wait_failed()
        assert isinstance(error, DeviceLostError) and error.message == LOST


async def test_device_loss_while_idle_replaces_the_child_without_a_request(caplog: pytest.LogCaptureFixture) -> None:
    factory = "tests.engine_process.engines:build_idle_losing"
    async with EngineProcess(EngineConfig(), factory, policy=FAST, log_level="critical") as engine:
        await engine.wait_loaded()
        await engine.submit(request("a"))
        assert isinstance([event async for event in engine.events("a")][-1], Finished)

        async def is_replaced() -> bool:
            return engine.num_restarts == 1 and (await engine.health()).ready

        await until(is_replaced)
        assert LOST in caplog.text


async def test_device_loss_while_idle_in_a_thread_raises_in_the_next_call() -> None:
    async with ThreadedEngine(lambda: build_idle_losing(EngineConfig(), None)) as engine:
        await engine.submit(request("a"))
        assert isinstance([event async for event in engine.events("a")][-1], Finished)
        assert engine._thread is not None
        await asyncio.to_thread(engine._thread.join, 60)
        with pytest.raises(DeviceLostError, match=LOST):
            await engine.submit(request("late"))


@AHEAD
async def test_device_loss_in_a_thread_raises_in_the_next_call(model: str) -> None:
    async with ThreadedEngine(lambda: build_losing(EngineConfig(model=model), None)) as engine:
        await engine.submit(request("a", 1000))
        assert failures([event async for event in engine.events("a")]) == [("device_lost", LOST)]
        assert engine._thread is not None
        engine._thread.join(60)
        with pytest.raises((DeviceLostError, OverloadedError), match="device is lost"):
            await engine.submit(request("late"))
        with pytest.raises(DeviceLostError):
            await engine.submit(request("later"))
        health = await engine.health()
        assert (health.ready, health.detail) == (False, LOST)
