"""One server for a module's tests; each test must leave it without a page in use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import ClientConnection, connect

from chatcache.config import ServerConfig
from tests.gateway.serving import Server


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path: Path = tmp_path_factory.mktemp("db")
    with Server(
        ServerConfig(db=str(path / "chat.db"), sse_keep_alive_interval_s=0, disconnect_grace_period_s=1.5)
    ) as server:
        yield server.wait_ready()


@pytest.fixture
def server(module_server: Server) -> Iterator[Server]:
    yield module_server
    module_server.wait_idle()


@pytest.fixture
def url(server: Server) -> str:
    return f"ws://127.0.0.1:{server.port}/v1/responses"


@pytest.fixture
def socket(url: str) -> Iterator[ClientConnection]:
    with connect(url, max_size=None, max_queue=None) as connection:  # leaves unread frames at once
        yield connection


@pytest.fixture
def page(url: str) -> Iterator[ClientConnection]:
    """As the browser connects."""
    with connect(url, subprotocols=["chatcache.v1"]) as connection:  # type: ignore[list-item]
        assert json.loads(connection.recv())["type"] == "session.created"
        yield connection
