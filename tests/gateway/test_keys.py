"""Stored API keys and browser sessions: authentication, revocation and expiry."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import math
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from chatcache.auth import new_key
from chatcache.cli.server import uvicorn_config
from chatcache.config import ServerConfig
from chatcache.gateway.auth.keys import ApiKeyCache
from chatcache.gateway.auth.principal import SESSION_LIFETIME_S, parse_session, session_cookie_value
from chatcache.gateway.errors import key_revoked_error
from chatcache.gateway.limits.admission import LoopTurns
from chatcache.gateway.responses.event_log import ResponseLog
from chatcache.gateway.responses.http import LogStream
from chatcache.gateway.routes import ROUTES
from chatcache.gateway.routing import ProtectedRoute, build_routes
from tests.gateway.frames import LONG, TERMINAL, receive, send, until_end
from tests.gateway.keyed import Keyed, give, keyed, take_away
from tests.gateway.serving import Server, post_bytes, read_all, slowed, unchunk, wait_until

MODELS = "/v1/models"
CHAT = "/v1/chat/completions"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def all_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with keyed(tmp_path_factory.mktemp("keys")) as keys:
        yield keys


@pytest.fixture
def keys(all_keys: Keyed) -> Iterator[Keyed]:
    yield all_keys
    all_keys.server.wait_idle()


def status_of(server: Server, headers: dict[str, str], path: str = MODELS, method: str = "GET") -> int:
    return server.request(method, path, headers=headers)[0]


def socket_of(server: Server, headers: dict[str, str]) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{server.port}/v1/responses", additional_headers=headers, max_queue=None)


def closed_with(socket: ClientConnection) -> tuple[int, list[dict[str, Any]]]:
    """Return the close code and the frames before it."""
    frames = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            frames.append(json.loads(socket.recv(timeout=PATIENCE_S)))
    assert socket.close_code is not None
    return socket.close_code, frames


def lines_of(answer: bytes) -> list[bytes]:
    """Return the lines of a stream that ended completely."""
    assert answer.endswith(b"0\r\n\r\n")
    return unchunk(answer.partition(b"\r\n\r\n")[2]).split(b"\n")


def chat_events(answer: bytes) -> list[dict[str, Any]]:
    lines = [line for line in lines_of(answer) if line]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert ["error" in event for event in events] == [False] * (len(events) - 1) + [True]
    return events


def response_events(answer: bytes) -> list[dict[str, Any]]:
    """Parse events as the OpenAI client does: each event name equals its `type`."""
    names = [line.removeprefix(b"event: ").decode() for line in lines_of(answer) if line.startswith(b"event: ")]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines_of(answer) if line.startswith(b"data: ")]
    assert [event["type"] for event in events] == names
    return events


def test_only_valid_api_keys_are_accepted(keys: Keyed) -> None:
    server = keys.server
    for held in (keys.ann, keys.bob, keys.other, keys.admin):
        assert status_of(server, held.bearer) == 200
    key = keys.ann.key
    prefix, key_id, secret = key.split("_", 2)
    near = (
        *(key[:-1], key + "x", key.upper(), key.lower(), f"{prefix}_{key_id}_", f"{prefix}__{secret}", secret),
        *(keys.ann.record.id, keys.ann.record.digest.hex(), f"{prefix}_{key_id}_{keys.bob.key.split('_', 2)[2]}"),
        *("", "cck_", "é", "cck_é_é"),
    )
    for wrong in near:
        if wrong != key:
            status, _, answer = server.request("GET", MODELS, headers={"authorization": f"Bearer {wrong}"})
            assert status == 401 and answer["error"]["code"] == "invalid_api_key", wrong


def test_api_key_digests_are_compared_in_constant_time(keys: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every offered key is compared exactly once with each key it could be."""
    seen: list[tuple[bytes, bytes]] = []
    original = hmac.compare_digest

    def compare(one: bytes, two: bytes) -> bool:
        seen.append((one, two))
        return original(one, two)

    ring = keys.server.gateway.key_cache
    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert ring.authenticate_key(keys.ann.key).owner == "acme/ann"
    for wrong in ("nonsense", "cck_none_x", keys.ann.key + "x"):
        seen.clear()
        with pytest.raises(Exception, match="valid API key"):
            ring.authenticate_key(wrong)
        assert [one for one, _ in seen] == [hashlib.sha256(wrong.encode()).digest()], "digests, never the keys"


def test_metrics_require_an_administrator_key(keys: Keyed) -> None:
    assert status_of(keys.server, keys.admin.bearer, "/metrics") == 200
    status, _, answer = keys.server.request("GET", "/metrics", headers=keys.ann.bearer)
    assert status == 403 and answer["error"]["code"] == "admin_only"


def test_users_of_a_tenant_share_pages(keys: Keyed) -> None:
    body = {"messages": [{"role": "user", "content": "What we all ask here, again and again, word for word."}]}
    figures = []
    for held in (keys.ann, keys.bob, keys.other):
        answer = keys.server.request("POST", CHAT, {**body, "max_tokens": 2}, held.bearer)[2]
        figures.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert figures[0] == figures[2] == 0 < figures[1]


def test_explain_does_not_reveal_text_of_another_user(keys: Keyed) -> None:
    known = "A beginning that both of them know, long enough for pages: "
    said = {"messages": [{"role": "user", "content": known + "my secret is 42"}], "max_tokens": 2}
    assert keys.server.request("POST", CHAT, said, keys.ann.bearer)[0] == 200
    asked = {"messages": [{"role": "user", "content": known + "what is yours?"}]}
    status, _, answer = keys.server.request("POST", "/v1/cache/explain", asked, keys.bob.bearer)
    assert status == 200 and answer["cached_tokens"] > 0 and answer["miss"]["reason"] == "diverged"
    assert answer["miss"]["cached_text"] is None and "secret" not in json.dumps(answer)


def test_page_accounts_name_own_requests_only(keys: Keyed) -> None:
    server = keys.server
    with slowed(server, 0.02), socket_of(server, keys.ann.bearer) as socket:
        send(socket, **LONG)
        response_id = receive(socket)["response"]["id"]
        reported = {
            name: json.dumps(server.request("GET", "/v1/cache/accounts", headers=held.bearer)[2])
            for name, held in (("ann", keys.ann), ("bob", keys.bob))
        }
        send(socket, "response.cancel", response_id=response_id)
        until_end(socket)
    assert response_id in reported["ann"] and response_id not in reported["bob"]


def test_first_api_key_closes_an_open_server_and_its_connections(tmp_path: Path) -> None:
    config = ServerConfig(db=str(tmp_path / "c.db"))
    with Server(config) as server:
        server.wait_ready()
        assert status_of(server, {}) == 200 and status_of(server, {}, "/metrics") == 200
        with socket_of(server, {}) as socket:
            send(socket, "response.ack", response_id="resp_none", sequence_number=1)
            held = give(config, "acme")
            assert closed_with(socket)[0] == 4401  # the poll alone finds out
        assert status_of(server, {}) == 401 and status_of(server, held.bearer) == 200
        take_away(config, held)
        wait_until(lambda: status_of(server, held.bearer) == 401, "the key to be refused", PATIENCE_S)
        assert status_of(server, {}) == 401, "a server whose only key is revoked stays closed"
    with Server(config) as server:
        assert status_of(server, {}) == 401


def test_revoked_key_ends_sockets_streams_and_waiting_requests(keys: Keyed) -> None:
    """The server learns of the revocation by polling alone."""
    server, held, bob = keys.server, keys.give("acme", "cleo"), keys.bob
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900, "ignore_eos": True}
    authorization = f"authorization: Bearer {held.key}\r\n"
    with (
        slowed(server, 0.2),
        socket_of(server, held.bearer) as idle,
        socket_of(server, held.bearer) as busy,
        socket_of(server, bob.bearer) as bystander,
        server.connect() as chat,
        server.connect() as stored,
        server.connect() as waiting,
    ):
        send(busy, **LONG)
        assert receive(busy)["type"] == "response.created"
        chat.sendall(post_bytes(server.port, CHAT, json.dumps({**body, "stream": True}).encode(), authorization))
        request = json.dumps({**LONG, "stream": True}).encode()
        stored.sendall(post_bytes(server.port, "/v1/responses", request, authorization))
        waiting.sendall(post_bytes(server.port, CHAT, json.dumps(body).encode(), authorization))
        begun = [stream.recv(65536) for stream in (chat, stored)]
        assert all(b"200 OK" in first for first in begun)
        wait_until(lambda: server.call(server.engine.health()).num_running == 4, "all to run", PATIENCE_S)
        keys.take_away(held)
        assert closed_with(idle)[0] == 4401
        assert closed_with(busy)[0] == 4401
        assert chat_events(b"".join((begun[0], read_all(chat))))[-1]["error"]["code"] == "api_key_revoked"
        reported = response_events(b"".join((begun[1], read_all(stored))))
        assert [event["sequence_number"] for event in reported] == list(range(len(reported)))
        assert [event["type"] for event in reported if event["type"] in TERMINAL] == ["error"]
        assert reported[-1]["code"] == "api_key_revoked" and reported[-1]["message"] == "this API key was revoked"
        waiting.settimeout(PATIENCE_S)
        answered = b"".join(iter(lambda: waiting.recv(65536), b""))
        assert answered.startswith(b"HTTP/1.1 401") and b"this API key was revoked" in answered
        send(bystander, input="Hi", max_output_tokens=1)
        assert until_end(bystander)[-1]["type"] in ("response.completed", "response.incomplete")


def test_revoked_key_ends_its_background_responses(keys: Keyed) -> None:
    """Unless another authenticated client reads it. Its text stays with its user."""
    server, held, other = keys.server, keys.give("acme", "dora"), keys.give("acme", "dora")
    with slowed(server, 0.2), server.connect() as reading:
        unread, read = (
            server.request("POST", "/v1/responses", {**LONG, "background": True}, held.bearer)[2]["id"] for _ in "ab"
        )
        authorization = f"authorization: Bearer {other.key}\r\nhost: 127.0.0.1:{server.port}\r\n\r\n"
        reading.sendall(f"GET /v1/responses/{read}?stream=true HTTP/1.1\r\n{authorization}".encode())
        assert b"200 OK" in reading.recv(65536)
        keys.take_away(held)

        def status(response_id: str) -> str:
            return str(server.request("GET", f"/v1/responses/{response_id}", headers=other.bearer)[2]["status"])

        wait_until(lambda: status(unread) == "cancelled", "the one to end", PATIENCE_S)
        assert status(read) == "in_progress"
    wait_until(lambda: server.call(server.engine.health()).num_running == 0, "the other to end", PATIENCE_S)


async def test_event_stream_sends_no_error_after_its_terminal_event() -> None:
    """The stream may stay open longer: steering results follow the terminal event."""
    log, metrics = ResponseLog("resp_a"), SimpleNamespace(disconnects=SimpleNamespace(inc=lambda: None))
    config = ServerConfig(sse_keep_alive_interval_s=0)
    gateway: Any = SimpleNamespace(config=config, metrics=metrics, loop_turns=LoopTurns())
    stream, sent, never = LogStream(gateway, "me", log.reader(), {}), asyncio.Queue[bytes](), asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.put_nowait(message.get("body", b""))

    async def receive() -> MutableMapping[str, Any]:
        await never.wait()
        return {"type": "http.disconnect"}

    error = key_revoked_error()
    log.append("response.created")
    answering = asyncio.create_task(stream({"type": "http", "method": "POST"}, receive, send))
    for kind in ("response.created", "response.completed", "response.steer.failed"):
        if kind != "response.created":
            log.append(kind)
        async with asyncio.timeout(PATIENCE_S):
            while kind.encode() not in await sent.get():
                pass
        await asyncio.sleep(0)
        reported = b'event: error\ndata: {"type":"error","sequence_number":1,' if kind == "response.created" else b""
        assert stream.closing_frame(error)[: len(reported) or None] == reported
    never.set()
    await answering


def test_key_cache_with_unreadable_redis_authenticates_no_request(tmp_path: Path) -> None:
    config = ServerConfig(redis="redis://127.0.0.1:1/0")
    with Server(config) as server:
        status, headers, answer = server.request("GET", MODELS)
        assert status == 503 and answer["error"]["code"] == "store_unavailable" and headers["retry-after"]
        assert server.request("GET", MODELS, headers={"authorization": "Bearer cck_a_b"})[0] == 503
        assert status_of(server, {}, "/livez") == 200


def test_command_line_key_is_valid_without_a_store() -> None:
    config = ServerConfig(redis="redis://127.0.0.1:1/0", api_keys=("sk-given-key",))
    with Server(config) as server:
        assert status_of(server, {"authorization": "Bearer sk-given-key"}, "/v1/session") == 200


async def test_store_that_loses_keys_does_not_open_the_server() -> None:
    class Forgetful:
        records: list[Any] = []  # noqa: RUF012
        number = 1

        async def version(self) -> int:
            return self.number

        async def list(self) -> list[Any]:
            return self.records

    store, ring = Forgetful(), ApiKeyCache()
    key, record = new_key("acme")
    store.records = [record]
    await ring.open(store)  # type: ignore[arg-type]
    assert not ring.is_open and ring.authenticate_key(key).tenant == "acme"
    store.records, store.number = [], 0
    await ring.refresh()
    assert not ring.is_open
    with pytest.raises(Exception, match="revoked"):
        ring.authenticate_key(key)
    store.records, store.number = [record], 2
    await ring.refresh()
    assert ring.authenticate_key(key).tenant == "acme", "it was only lost"
    await ring.close()


async def test_revocation_that_the_store_lost_stays_effective() -> None:
    key, record = new_key("acme")

    class Failover:
        records: list[Any] = [record]  # noqa: RUF012
        number = 1

        async def version(self) -> int:
            return self.number

        async def list(self) -> list[Any]:
            return self.records

    store, ring = Failover(), ApiKeyCache()
    await ring.open(store)  # type: ignore[arg-type]
    cookie = parse_session(ring.create_session(ring.authenticate_key(key))[0])
    assert cookie is not None and ring.authenticate_session(cookie).tenant == "acme"
    for number, revoked_at in ((2, 5.0), (1, None)):
        store.records, store.number = [replace(record, revoked_at=revoked_at)], number
        await ring.refresh()
        with pytest.raises(Exception, match="revoked"):
            ring.authenticate_key(key)
        with pytest.raises(Exception, match="revoked"):
            ring.authenticate_session(cookie)
    await ring.close()


# The browser's session


def test_session_cookie_has_the_permissions_of_its_key(keys: Keyed) -> None:
    status, headers, answer = keys.server.request("POST", "/v1/session", headers=keys.ann.bearer)
    assert status == 200 and (answer["tenant"], answer["user"]) == ("acme", "ann")
    pair, *attributes = headers["set-cookie"].split("; ")
    assert set(attributes) == {f"Max-Age={SESSION_LIFETIME_S}", "Path=/", "HttpOnly", "SameSite=Strict"}
    assert keys.ann.key not in headers["set-cookie"] and keys.ann.record.digest.hex() not in headers["set-cookie"]
    cookie = {"cookie": f"theme=dark; {pair}"}
    status, _, reported = keys.server.request("GET", "/v1/session", headers=cookie)
    assert status == 200 and reported == answer
    assert status_of(keys.server, cookie, "/metrics") == 403
    status, headers, _ = keys.server.request("DELETE", "/v1/session", headers={**cookie, "origin": keys.server.url})
    assert status == 200 and headers["set-cookie"].startswith("chatcache_session=; Max-Age=0")


def test_session_cookie_is_secure_and_scoped_behind_a_proxy(tmp_path: Path) -> None:
    config = ServerConfig(db=str(tmp_path / "c.db"), api_keys=("sk-given-key",), root_path="/chat")
    with Server(config) as server:
        known = {"authorization": "Bearer sk-given-key", "x-forwarded-proto": "https"}
        cookie = server.request("POST", "/v1/session", headers=known)[1]["set-cookie"]
    assert "; Path=/chat;" in cookie and cookie.endswith("; Secure")


def test_session_cookie_is_secure_behind_a_proxy_on_another_machine(tmp_path: Path) -> None:
    config = ServerConfig(db=str(tmp_path / "c.db"), api_keys=("sk-given-key",))
    headers = {"authorization": "Bearer sk-given-key", "x-forwarded-proto": "https"}
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    with Server(config, settings=uvicorn_config) as server, httpx.Client(transport=transport, timeout=60) as proxy:
        server.wait_ready()
        answer = proxy.post(f"{server.url}/v1/session", headers=headers)
    assert answer.headers["set-cookie"].endswith("; Secure")


def test_session_does_not_extend_itself(keys: Keyed) -> None:
    session = keys.session_of(keys.ann)
    assert status_of(keys.server, session, "/v1/session", "POST") == 401
    assert status_of(keys.server, {}, "/v1/session", "POST") == 401


def test_session_requires_the_origin_of_the_server(keys: Keyed) -> None:
    """Unsafe methods and WebSockets require the own origin."""
    server, session = keys.server, keys.session_of(keys.ann)
    cookie, body = {"cookie": session["cookie"]}, {"prompt": "Hi"}
    for more, status in (
        ({"origin": server.url}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost"}, 403),
        ({"origin": f"http://127.0.0.1:{server.port}.evil.example"}, 403),
    ):
        assert server.request("POST", "/tokenize", body, cookie | more)[0] == status, more
    for more in ({}, {"origin": f"http://127.0.0.1:{server.port + 1}"}):
        with pytest.raises(InvalidStatus) as caught, socket_of(server, cookie | more):
            pass
        assert caught.value.response.status_code == 403
    with socket_of(server, session) as socket:
        send(socket, input="Hi", max_output_tokens=1)
        assert until_end(socket)[-1]["type"] in ("response.completed", "response.incomplete")


def test_session_rejects_a_listed_cors_origin(tmp_path: Path) -> None:
    with keyed(tmp_path, cors_origins=("https://app.example",)) as keys:
        session = keys.session_of(keys.ann) | {"origin": "https://app.example"}
        assert keys.server.request("POST", "/tokenize", {"prompt": "Hi"}, session)[0] == 403
        bearer = keys.ann.bearer | {"origin": "https://app.example"}
        assert keys.server.request("POST", "/tokenize", {"prompt": "Hi"}, bearer)[0] == 200


def test_forged_session_cookie_is_rejected(keys: Keyed) -> None:
    value = keys.session_of(keys.ann)["cookie"].partition("=")[2]
    name, until, mac = value.split(".")
    record, now = keys.ann.record, int(time.time())
    forged = [
        f"{name}.{int(until) + 1}.{mac}",
        f"{keys.bob.record.id}.{until}.{mac}",
        f"{name}.{until}.{'0' * 64}",
        f"{name}.{until}.{mac.upper()}",
        f"{name}.{until}.{mac}x",
        f"{name}.{until}",
        f"..{mac}",
        "",
        session_cookie_value(record.id, now - 1, record.digest),  # expired
        session_cookie_value(record.id, now + 60, keys.bob.record.digest),
        session_cookie_value("key_none", now + 60, bytes(32)),
    ]
    for wrong in forged:
        assert status_of(keys.server, {"cookie": f"chatcache_session={wrong}"}) == 401, wrong
    assert (
        status_of(
            keys.server, {"cookie": f"chatcache_session={session_cookie_value(record.id, now + 600, record.digest)}"}
        )
        == 200
    )
    session = keys.session_of(keys.ann) | {"authorization": "Bearer wrong"}
    assert status_of(keys.server, session) == 401, "a wrong key is wrong, whatever else comes along"


def test_session_ends_with_its_revoked_key(keys: Keyed) -> None:
    held = keys.give("acme", "dora")
    session = keys.session_of(held)
    assert status_of(keys.server, session) == 200
    with socket_of(keys.server, session) as socket:
        keys.take_away(held)
        assert closed_with(socket)[0] == 4401
    assert status_of(keys.server, session) == 401


def test_websocket_closes_when_its_session_expires(keys: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A WebSocket that was opened with the key itself stays open."""
    ring = keys.server.gateway.key_cache
    with socket_of(keys.server, keys.ann.bearer) as by_key:
        monkeypatch.setattr(ring, "expires_in_s", lambda who: 0.1 if who.expires_at is not None else math.inf)
        with socket_of(keys.server, keys.session_of(keys.ann)) as by_session, socket_of(keys.server, keys.ann.bearer):
            assert closed_with(by_session) == (4401, [])
            assert by_session.close_reason == "the session has expired"
        monkeypatch.undo()
        send(by_key, input="Hi", max_output_tokens=1)
        assert until_end(by_key)[-1]["type"] in ("response.completed", "response.incomplete")


def test_expired_session_is_rejected_with_its_own_code(keys: Keyed) -> None:
    """At the handshake and at the next message of an open WebSocket."""
    ring, record, past = keys.server.gateway.key_cache, keys.ann.record, int(time.time()) - 1
    cookie = {"cookie": f"chatcache_session={session_cookie_value(record.id, past, record.digest)}"}
    status, _, answer = keys.server.request("GET", MODELS, headers=cookie)
    assert status == 401 and answer["error"]["code"] == "session_expired"
    for expires_at, is_in in ((past, False), (past + 3600, True), (None, True)):
        principal = replace(ring.authenticate_key(keys.ann.key), expires_at=expires_at)
        with contextlib.nullcontext() if is_in else pytest.raises(Exception, match="expired"):
            ring.check(principal)


def test_open_server_needs_no_session(tmp_path: Path) -> None:
    with Server(ServerConfig(db=str(tmp_path / "c.db"))) as server:
        for method in ("GET", "POST"):
            status, headers, answer = server.request(method, "/v1/session")
            assert status == 200 and answer["key_id"] is None and "set-cookie" not in headers


def test_session_cookie_is_parsed_strictly() -> None:
    assert parse_session(f"key_a.12.{'0' * 64}") is not None
    for wrong in (f"key_a.12.{'0' * 63}", f"key a.12.{'0' * 64}", f"key_a.-1.{'0' * 64}", f"key_a.12.{'0' * 64}\n"):
        assert parse_session(wrong) is None


# Default deny


def test_app_routes_require_the_permissions_of_the_route_table(keys: Keyed) -> None:
    routes = keys.server.app.router.routes
    assert all(isinstance(route, ProtectedRoute) for route in routes)
    served = {(route.path, route.permission) for route in routes if isinstance(route, ProtectedRoute)}
    assert served == {(entry.path, entry.permission) for entry in ROUTES}


def test_route_missing_from_the_table_is_not_served(keys: Keyed) -> None:
    missing = [entry for entry in ROUTES if entry.path != MODELS]
    assert MODELS not in {route.path for route in build_routes(missing)}
    assert MODELS in {route.path for route in build_routes(ROUTES)}


def test_unauthenticated_requests_do_not_learn_which_routes_exist(keys: Keyed) -> None:
    for method, path in (("GET", "/nope"), ("PUT", "/v1/models"), ("POST", "/nope"), ("DELETE", CHAT)):
        assert status_of(keys.server, {}, path, method) == 401
        assert status_of(keys.server, keys.ann.bearer, path, method) in (404, 405)
