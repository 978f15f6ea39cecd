"""A Redis server for the tests of a module, empty at the start of each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chatcache.cluster import bus
from tests.support.redis_servers import RedisServer, redis_server


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("bus")) as server:
        yield server


@pytest.fixture
def server(module_server: RedisServer) -> RedisServer:
    module_server.admin.flushall()
    return module_server


@pytest.fixture
def patient_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server and processes that never end by themselves: on a busy machine they may answer late."""
    monkeypatch.setattr(bus, "TIMEOUT_S", 30.0)
    monkeypatch.setattr(bus, "LEASE_S", 60.0)
    monkeypatch.setattr(bus, "SILENT_S", 60.0)
