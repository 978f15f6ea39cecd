"""Idempotency keys over HTTP and WebSocket, with both stores."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from chatcache.conversations.store import ConversationStore
from chatcache.gateway.api.idempotency import IdempotencyKey
from chatcache.gateway.responses.run import LiveResponse
from chatcache.storage import redis_client
from tests.gateway.kept import server_on
from tests.gateway.serving import Server, slowed
from tests.support.redis_servers import RedisServer, redis_server

PATH = "/v1/responses"
BODY = {"input": "Hello", "max_output_tokens": 8}


@pytest.fixture(scope="module")
def real_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that never goes down: on a busy machine its answers may take long."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_client, "TIMEOUT_S", redis_client.SLOW_TIMEOUT_S)
        yield server


@pytest.fixture(params=["sqlite", "redis"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> RedisServer | str:
    """What keeps the conversations; it outlives gateways."""
    if request.param == "sqlite":
        return str(tmp_path / "chat.db")
    server: RedisServer = request.getfixturevalue("real_redis")
    server.admin.flushall()
    return server


def send(server: Server, key: str, body: object = BODY, path: str = PATH, **headers: str) -> Any:
    return server.request("POST", path, body, {"idempotency-key": key, **headers})


def num_conversations(server: Server) -> int:
    return len(server.request("GET", "/v1/conversations")[2]["data"])


def test_repeated_request_returns_the_first_result(kept: RedisServer | str) -> None:
    with server_on(kept) as server:
        server.wait_ready()
        status, headers, first = send(server, "key-1")
        assert status == 200 and "idempotent-replayed" not in headers
        status, headers, second = send(server, "key-1")
        assert (status, second, headers["idempotent-replayed"]) == (200, first, "true")
        for body in ({**BODY, "input": "Other"}, {**BODY, "n": 2}):
            status, headers, refused = send(server, "key-1", body)
            assert (status, refused["error"]["code"]) == (409, "idempotency_key_reuse")
            assert headers["x-should-retry"] == "false"
        status, _, refused = send(server, "key-1", {}, "/v1/conversations")
        assert status == 409
        assert num_conversations(server) == 1
        server.wait_idle()
    with server_on(kept) as server:  # a gateway that knows it from the store alone
        server.wait_ready()
        status, headers, third = send(server, "key-1")
        assert (third["id"], third["status"], headers["idempotent-replayed"]) == (first["id"], first["status"], "true")
        assert third["output"][0]["content"][0]["text"] == first["output"][0]["content"][0]["text"]
        status, _, gone = send(server, "key-1", {**BODY, "stream": True})
        assert (status, gone["error"]["code"]) == (400, "stream_expired")
        assert send(server, "key-2")[2]["id"] != first["id"]
        assert server.request("DELETE", f"{PATH}/{first['id']}")[0] == 200
        assert send(server, "key-1")[0] == 404


def test_repeated_stream_starts_from_the_first_event(kept: RedisServer | str) -> None:
    with server_on(kept) as server:
        server.wait_ready()
        bodies = [send(server, "key", {**BODY, "stream": True})[2] for _ in range(2)]
        assert (bodies[0] == bodies[1] and "response.completed" in bodies[0]) or "response.incomplete" in bodies[0]


def test_repeated_conversation_create_makes_one_conversation(kept: RedisServer | str) -> None:
    with server_on(kept) as server:
        server.wait_ready()
        body = {"title": "Once", "metadata": {"a": "b"}}
        first, again = (send(server, "key", body, "/v1/conversations") for _ in range(2))
        assert first[2] == again[2] and again[1]["idempotent-replayed"] == "true"
        assert send(server, "key", {"title": "Twice"}, "/v1/conversations")[0] == 409
        assert num_conversations(server) == 1


def test_concurrent_repeats_through_two_gateways_run_once(real_redis: RedisServer) -> None:
    real_redis.admin.flushall()
    with server_on(real_redis) as one, server_on(real_redis) as two, ThreadPoolExecutor(20) as pool:
        for server in (one, two):
            server.wait_ready()
        with slowed(one, 0.01), slowed(two, 0.01):
            for key in ("a", "b", "c"):
                keys_sent = list(pool.map(lambda server, key=key: send(server, key), [one, two] * 10))
                assert {status for status, _, _ in keys_sent} == {200}
                assert len({body["id"] for _, _, body in keys_sent}) == 1
                assert sum("idempotent-replayed" not in headers for _, headers, _ in keys_sent) == 1
        assert num_conversations(one) == 3
        for server in (one, two):
            server.wait_idle()


def test_repeat_through_another_gateway_while_a_response_is_stored_and_not_yet_started(
    real_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_redis.admin.flushall()
    is_stored, save_record = threading.Event(), LiveResponse.save_record

    async def slow(self: LiveResponse) -> None:
        is_stored.set()
        await asyncio.sleep(1.0)
        await save_record(self)

    monkeypatch.setattr(LiveResponse, "save_record", slow)
    with server_on(real_redis) as one, server_on(real_redis) as two, ThreadPoolExecutor(1) as pool:
        for server in (one, two):
            server.wait_ready()
        with slowed(one, 0.05):
            sent = pool.submit(send, one, "a")
            assert is_stored.wait(60)
            repeated = send(two, "a")
        assert repeated[0] == 200 and repeated[2]["id"] == sent.result()[2]["id"]
        assert "idempotent-replayed" in repeated[1] and repeated[2]["status"] == sent.result()[2]["status"]


def test_repeat_through_another_gateway_that_changes_the_revision_meanwhile_returns_the_first_result(
    real_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second gateway stores its turn after the first one has looked the key up."""
    real_redis.admin.flushall()
    find_target, answers = IdempotencyKey.find_target, []

    with server_on(real_redis) as one, server_on(real_redis) as two:
        for server in (one, two):
            server.wait_ready()
        conversation_id = send(one, "first")[2]["conversation"]["id"]
        rev = one.request("GET", f"/v1/conversations/{conversation_id}")[2]["rev"]
        body = {**BODY, "conversation": conversation_id, "rev": rev}

        async def find_late(self: IdempotencyKey, store: ConversationStore, owner: str) -> str | None:
            found = await find_target(self, store, owner)
            monkeypatch.setattr(IdempotencyKey, "find_target", find_target)
            answers.append(await asyncio.to_thread(send, two, "key", body))
            return found

        monkeypatch.setattr(IdempotencyKey, "find_target", find_late)
        status, headers, repeated = send(one, "key", body)
        assert (status, headers.get("idempotent-replayed")) == (200, "true"), repeated
        assert answers[0][0] == 200 and repeated["id"] == answers[0][2]["id"]
        status, _, refused = send(one, "other", body)
        assert (status, refused["error"]["code"]) == (409, "stale_revision"), "a new key is a new request"


def _frames(socket: ClientConnection) -> list[dict[str, Any]]:
    found = [json.loads(socket.recv())]
    while found[-1]["type"] not in ("response.completed", "response.incomplete", "response.failed", "error"):
        found.append(json.loads(socket.recv()))
    return found


def test_websocket_frames_with_a_repeated_key_run_once(kept: RedisServer | str) -> None:
    frame = json.dumps({"type": "response.create", "idempotency_key": "key", "stream_id": "a", **BODY})
    with server_on(kept) as server:
        server.wait_ready()
        with connect(f"ws://127.0.0.1:{server.port}{PATH}") as socket:
            socket.send(frame)
            first = _frames(socket)
            socket.send(frame)
            assert _frames(socket) == first
            socket.send(json.dumps({"type": "response.create", "idempotency_key": "key", "input": "Other"}))
            assert _frames(socket)[0]["error"]["code"] == "idempotency_key_reuse"
            socket.send(json.dumps({"type": "response.create", "idempotency_key": "a b", "input": "Other"}))
            assert _frames(socket)[0]["error"]["param"] == "idempotency_key"
        assert send(server, "key")[2]["id"] == first[-1]["response"]["id"]  # the same over HTTP
        assert num_conversations(server) == 1


def test_invalid_key_or_unstored_response_is_refused(tmp_path: Path) -> None:
    with server_on(str(tmp_path / "chat.db")) as server:
        server.wait_ready()
        status, _, body = send(server, "key", {**BODY, "store": False})
        assert (status, body["error"]["param"]) == (400, "store")
        for key in ("", "a b", "x" * 256, "\xe9"):
            status, _, body = send(server, key)
            assert (status, body["error"]["param"]) == (400, "idempotency_key"), key
        assert send(server, "x" * 255)[0] == 200


def test_refused_request_does_not_use_its_key(tmp_path: Path) -> None:
    with server_on(str(tmp_path / "chat.db")) as server:
        server.wait_ready()
        assert send(server, "key", {**BODY, "conversation": "conv_none"})[0] == 404
        assert send(server, "key", {**BODY, "max_output_tokens": 0})[0] == 400
        assert send(server, "key")[0] == 200


def test_idempotency_keys_belong_to_their_owner(kept: RedisServer | str) -> None:
    with server_on(kept, api_keys=("key-of-me", "key-of-you")) as server:
        server.wait_ready()
        own, yours = (send(server, "key", authorization=f"Bearer key-of-{user}")[2] for user in ("me", "you"))
        assert own["id"] != yours["id"]
