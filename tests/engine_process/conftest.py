"""Clients under test: the same engine in a thread and in a process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chatcache.engine_process.process import EngineProcess
from chatcache.engine_process.threaded import ThreadedEngine
from tests.engine_process.engines import CountingEngine, process


@pytest.fixture(params=["thread", "process"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[ThreadedEngine | EngineProcess]:
    async with process() if request.param == "process" else ThreadedEngine(CountingEngine) as engine:
        await engine.wait_loaded()
        yield engine
