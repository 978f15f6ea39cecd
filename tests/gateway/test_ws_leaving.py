"""WebSocket clients that send a frame and close at once: the frame takes effect, and nothing of them remains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection

from chatcache.config import ServerConfig
from tests.gateway.frames import LONG, Frame, receive, send
from tests.gateway.responding import num_running
from tests.gateway.serving import Server, slowed, wait_until


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on which responses continue without a reader, so that only a cancel ends them early."""
    path: Path = tmp_path_factory.mktemp("db")
    with Server(ServerConfig(db=str(path / "chat.db"), disconnect_grace_period_s=3600)) as server:
        yield server.wait_ready()


def send_and_close(page: ClientConnection, kind: str, **fields: Any) -> None:
    """Send a frame and the close frame in one segment, so that the server receives both at once."""
    with page.protocol_mutex:
        page.protocol.send_text(json.dumps({"type": kind, **fields}).encode())
        page.protocol.send_close(1000)
        page.socket.sendall(b"".join(page.protocol.data_to_send()))


def start_response(page: ClientConnection, **fields: Any) -> str:
    """Start a response and return its id after its first text."""
    send(page, **{**LONG, **fields})
    response_id = ""
    while (frame := receive(page))["type"] != "response.output_text.delta":
        response_id = frame["response"]["id"] if frame["type"] == "response.created" else response_id
    return response_id


def ended_response(server: Server, response_id: str) -> Frame:
    wait_until(lambda: num_running(server) == 0, "the response to end")
    response: Frame = server.request("GET", f"/v1/responses/{response_id}")[2]
    return response


def test_cancel_before_the_close_ends_the_response(server: Server, page: ClientConnection) -> None:
    with slowed(server, 0.005):
        response_id = start_response(page)
        send_and_close(page, "response.cancel", response_id=response_id)
        assert ended_response(server, response_id)["status"] == "cancelled"


def test_drop_before_the_close_ends_the_candidate(server: Server, page: ClientConnection) -> None:
    with slowed(server, 0.005):
        response_id = start_response(page, n=2, max_output_tokens=200)
        send_and_close(page, "response.drop", response_id=response_id, candidate=0)
        outputs = ended_response(server, response_id)["output"]
    assert [output["finish_reason"] for output in outputs] == ["cancelled", "length"]


def test_subscription_before_the_close_is_removed(server: Server, page: ClientConnection) -> None:
    def num_subscriptions() -> int:
        return sum(map(len, server.gateway.hub._by_owner.values()))

    send_and_close(page, "conversation.subscribe")
    wait_until(lambda: server.gateway.socket_limiter.num_sockets("") == 0, "the connection to end")
    assert num_subscriptions() == 0
