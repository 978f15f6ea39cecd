"""Every served route and every WebSocket message is called with every kind of credentials."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from chatcache.gateway.auth.keys import ApiKeyCache
from chatcache.gateway.auth.principal import Principal
from chatcache.gateway.responses.registry import LoggedResponse, ResponseRegistry
from chatcache.gateway.routes import SOCKETS
from chatcache.gateway.routing import ProtectedRoute
from chatcache.gateway.websocket.connection import Connection
from chatcache.storage import sqlite
from tests.gateway.frames import receive, send, until_end
from tests.gateway.keyed import Headers, Keyed, keyed
from tests.gateway.matrix import (
    CALLS,
    REFUSED,
    SECRET,
    STRANGERS,
    RouteKey,
    credentials,
    scene,
    served_routes,
    violations,
)
from tests.gateway.serving import slowed

PATIENCE_S = 60.0
Frame = dict[str, Any]

# The fields of each message about ann's running response, and the type that another client gets ("": none).
MESSAGES: dict[str, tuple[Frame, str]] = {
    "response.create": ({"input": "x", "previous_response_id": "<response>", "max_output_tokens": 1}, "error"),
    "response.cancel": ({"response_id": "<response>"}, "error"),
    "response.steer": ({"previous_response_id": "<response>", "input": "x"}, "response.steer.failed"),
    "response.resume": ({"response_id": "<response>"}, "error"),
    "response.drop": ({"response_id": "<response>", "candidate": 0}, "error"),
    "response.ack": ({"response_id": "<response>", "sequence_number": 1}, ""),
    "conversation.subscribe": ({}, "conversation.subscribed"),
    "prompt.prewarm": ({"previous_response_id": "<response>", "input": "x"}, "error"),
}
RUNNING: Frame = {"input": f"{SECRET}, again", "max_output_tokens": 900, "ignore_eos": True, "n": 2}


@pytest.fixture(scope="module")
def all_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with keyed(tmp_path_factory.mktemp("matrix"), disconnect_grace_period_s=0.0) as keys:
        yield keys


@pytest.fixture
def keys(all_keys: Keyed) -> Iterator[Keyed]:
    yield all_keys
    all_keys.server.wait_idle()


def socket_of(keys: Keyed, headers: Headers) -> ClientConnection:
    url = f"ws://127.0.0.1:{keys.server.port}/v1/responses"
    return connect(url, additional_headers=headers, subprotocols=["chatcache.v1"], max_queue=None)  # type: ignore[list-item]


def test_every_served_route_is_in_the_matrix(keys: Keyed) -> None:
    served = served_routes(keys.server.app.routes)
    assert not served - set(CALLS), "add a Call to tests/gateway/matrix.py: which clients may make it?"
    assert not set(CALLS) - served


def test_route_missing_from_the_matrix_is_detected(keys: Keyed) -> None:
    async def anything(request: Request) -> Response:
        return Response("x")

    grown = [*keys.server.app.routes, ProtectedRoute(Route("/v1/new", anything, methods=["POST"]), "key")]
    assert served_routes(grown) - set(CALLS) == {("POST", "/v1/new")}


def test_every_websocket_message_is_in_the_matrix(keys: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages are those of a real connection."""
    seen: list[Connection] = []
    original = Connection._check_key

    async def noted(connection: Connection, body: dict[str, Any]) -> bool:
        seen.append(connection)
        return await original(connection, body)

    monkeypatch.setattr(Connection, "_check_key", noted)
    with socket_of(keys, keys.ann.bearer) as socket:
        send(socket, "no.such.type")
        while receive(socket)["type"] != "error":
            pass
    assert set(seen[0]._handlers) == set(MESSAGES), "add a message: what does another client get for it?"
    assert set(MESSAGES) == {kind for each in SOCKETS for kind in each.messages}


def test_no_client_exceeds_its_permissions(keys: Keyed) -> None:
    assert violations(keys) == []


def some(*wanted: RouteKey) -> dict[RouteKey, Any]:
    return {key: CALLS[key] for key in wanted}


def test_store_without_owner_check_is_detected(keys: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected bug: the query without `AND owner = ?`."""

    def head(db: Any, owner: str, conversation_id: str, expect: int | None = None) -> Any:
        row = db.execute("SELECT owner FROM conversations WHERE id = ?", (conversation_id,)).fetchone()
        return original(db, row[0] if row else owner, conversation_id, expect)

    original = sqlite.read_head
    monkeypatch.setattr(sqlite, "read_head", head)
    found = violations(keys, some(("GET", "/v1/conversations/{id}"), ("POST", "/v1/conversations/{id}")))
    assert any("bob" in each for each in found) and any("another client has changed it" in each for each in found)


def test_registry_without_owner_check_is_detected(keys: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected bug: an id without its owner is enough."""
    monkeypatch.setattr(ResponseRegistry, "find", any_response)
    found = violations(keys, some(("GET", "/v1/responses/{id}"), ("DELETE", "/v1/responses/{id}")))
    assert any("other: " in each for each in found) and any("bob: " in each for each in found)
    assert foreign_access(keys, "response.cancel") + foreign_access(keys, "response.resume")


def any_response(registry: ResponseRegistry, owner: str, response_id: str) -> LoggedResponse | None:
    return registry._live.get(response_id) or registry._ended.get(response_id)


def test_route_with_too_weak_permission_is_detected(keys: Keyed) -> None:
    """Injected bug: two routes require too little."""
    wrong = ("/v1/models", "/metrics")
    gates = [each for each in keys.server.app.routes if isinstance(each, ProtectedRoute) and each.path in wrong]
    permissions = [gate.permission for gate in gates]
    for gate in gates:
        gate.permission = "open"
    found = violations(keys, some(("GET", "/v1/models"), ("GET", "/metrics")))
    for gate, permission in zip(gates, permissions, strict=True):
        gate.permission = permission
    assert {each.split()[1] for each in found} == set(wrong) and any("no key: got 200" in each for each in found)


# The socket


def test_websocket_without_a_valid_key_is_refused(keys: Keyed) -> None:
    headers_of = credentials(keys)
    for client in REFUSED:
        with pytest.raises(InvalidStatus) as caught, socket_of(keys, headers_of[client]):
            pass
        assert caught.value.response.status_code == 401, client
    for client in ("ann", "ann's session", *STRANGERS):
        with socket_of(keys, headers_of[client]) as socket:
            assert receive(socket)["type"] == "session.created"


def filled(frame: Frame, response_id: str) -> Frame:
    filled: Frame = json.loads(json.dumps(frame).replace("<response>", response_id))
    return filled


def foreign_access(keys: Keyed, kind: str) -> list[str]:
    """List the wrong frames that other clients get for a message about ann's running response."""
    fields, expected = MESSAGES[kind]
    found, headers_of = [], credentials(keys)
    with slowed(keys.server, 0.05), socket_of(keys, keys.ann.bearer) as ann:
        assert receive(ann)["type"] == "session.created"
        send(ann, **RUNNING)
        first = receive(ann)
        response = first["response"]
        for client in STRANGERS:
            with socket_of(keys, headers_of[client]) as socket:
                assert receive(socket)["type"] == "session.created"
                send(socket, kind, **filled(fields, response["id"]))
                send(socket, "no.such.type")  # its error comes after the frames of the message before
                received: list[Frame] = []
                is_over = False
                while not is_over or len(received) < bool(expected):
                    frame = receive(socket)
                    if frame.get("error", {}).get("param") == "type":
                        is_over = True
                    else:
                        received.append(frame)
                if [each["type"] for each in received] != ([expected] if expected else []):
                    found.append(f"{client} got {received}")
                if SECRET in json.dumps(received) or response["conversation"]["id"] in json.dumps(received):
                    found.append(f"{client} received {received}")
        send(ann, "response.cancel", response_id=response["id"])
        frames = until_end(ann)
        if frames[-1].get("receipt") is None:
            found.append(f"another client ended it: {frames[-1]}")
    return found


@pytest.mark.parametrize("kind", MESSAGES)
def test_message_about_a_foreign_response_has_no_effect(keys: Keyed, kind: str) -> None:
    assert foreign_access(keys, kind) == []


@pytest.mark.parametrize("kind", MESSAGES)
def test_message_of_the_owner_is_accepted(keys: Keyed, kind: str) -> None:
    fields, _ = MESSAGES[kind]
    current = scene(keys)
    with socket_of(keys, keys.ann.bearer) as ann, slowed(keys.server, 0.01):
        assert receive(ann)["type"] == "session.created"
        if kind in ("response.cancel", "response.steer", "response.drop"):
            send(ann, **RUNNING)
            response_id = receive(ann)["response"]["id"]
        else:
            response_id = current.response
        send(ann, kind, **filled(fields, response_id))
        send(ann, "no.such.type")
        frames = [receive(ann)]
        while frames[-1].get("error", {}).get("param") != "type":
            frames.append(receive(ann))
    assert [each for each in frames if "error" in each][:-1] == []


def frames_after_revocation(keys: Keyed, kind: str) -> list[Frame]:
    """Send a message right after the key was revoked; return the frames up to close code 4401."""
    held = keys.give("acme", "ann")
    current = scene(keys)
    with socket_of(keys, held.bearer) as socket:
        assert receive(socket)["type"] == "session.created"
        keys.take_away(held)
        frames: list[Frame] = []
        with pytest.raises(ConnectionClosed):  # noqa: PT012
            send(socket, kind, **filled(MESSAGES[kind][0], current.response))
            while True:
                frames.append(json.loads(socket.recv(timeout=PATIENCE_S)))
        assert socket.close_code == 4401
    return frames


@pytest.mark.parametrize("kind", MESSAGES)
def test_revoked_key_is_refused_at_the_next_message(keys: Keyed, kind: str) -> None:
    """There is no frame if the server has closed the socket already."""
    frames = frames_after_revocation(keys, kind)
    assert [(each["type"], each["status"], each["error"]["code"]) for each in frames] in (
        [],
        [("error", 401, "api_key_revoked")],
    )


def test_check_at_the_handshake_only_is_detected(keys: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected bug: the key is checked at the handshake only."""

    async def never(ring: ApiKeyCache, principal: Principal) -> None:
        pass

    monkeypatch.setattr(ApiKeyCache, "recheck", never)
    for _ in range(20):  # the poll may be faster a few times
        held = keys.give("acme", "ann")
        with socket_of(keys, held.bearer) as socket, contextlib.suppress(ConnectionClosed):
            assert receive(socket)["type"] == "session.created"
            keys.take_away(held)
            send(socket, "conversation.subscribe")
            if receive(socket)["type"] == "conversation.subscribed":
                return
    pytest.fail("the injected bug had no effect")
