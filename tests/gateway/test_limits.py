"""Limits of API keys over HTTP and WebSocket: every route counts, rejections state a wait."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from chatcache.conversations.tree import ResponseElsewhereError
from chatcache.gateway.auth.principal import KeyLimits
from chatcache.gateway.limits.rate_limits import RATE_HEADERS, RESERVED_TOKENS, Reservation
from tests.gateway.clocks import Clock
from tests.gateway.frames import receive, send, until_end
from tests.gateway.keyed import give, take_away
from tests.gateway.limited import LimitedServer, keys_with, limited_server
from tests.gateway.serving import hurry, post_bytes, slowed, wait_until

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
DAY_S = 86_400
SHORT = {"max_tokens": 3, "ignore_eos": True}
FREE, PER_MINUTE, TOKENS, AT_ONCE, DAILY, SIDE = "free", "requests", "tokens", "at-once", "daily", "side"
KEYS = {
    FREE: KeyLimits(),
    PER_MINUTE: KeyLimits(requests_per_minute=5),
    TOKENS: KeyLimits(tokens_per_minute=100_000),
    AT_ONCE: KeyLimits(max_concurrent=2),
    DAILY: KeyLimits(tokens_per_day=200),
    SIDE: KeyLimits(requests_per_minute=100, tokens_per_minute=1500),
}

Answer = tuple[int, dict[str, str], Any]


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock(wall_s=20_000 * DAY_S + 1000)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Iterator[LimitedServer]:
    db = str(tmp_path_factory.mktemp("limits") / "chat.db")
    with limited_server(db, clock, keys_with(db, KEYS)) as running:
        yield running


@pytest.fixture(autouse=True)
def later(clock: Clock) -> None:
    """Refill the limits that earlier tests used."""
    clock.pass_s(7200)


def chat(server: LimitedServer, key: str, content: str = "Hi", **fields: Any) -> Answer:
    body = {"messages": [{"role": "user", "content": content}], **SHORT, **fields}
    return server.request("POST", CHAT, body, server.bearer(key))


def socket_of(server: LimitedServer, key: str) -> ClientConnection:
    return connect(
        f"ws://127.0.0.1:{server.port}/v1/responses",
        additional_headers=server.bearer(key),
        subprotocols=[Subprotocol("chatcache.v1")],
        max_queue=None,
    )


def left(server: LimitedServer, key: str, kind: str = "tokens") -> int:
    """Return the remaining tokens or requests from the headers of a GET, which is free."""
    status, headers, _ = server.request("GET", "/v1/models", headers=server.bearer(key))
    assert status == 200
    return int(headers[f"x-ratelimit-remaining-{kind}"])


def num_generated(server: LimitedServer) -> int:
    """Return the tokens that the engine has emitted for the running request."""
    assert server.gateway.model is not None
    return sum(server.engine.num_tokens_sent(name) for name in list(server.gateway.model.service._live))


def settled(server: LimitedServer, key: str) -> None:
    """Wait until nothing of the key is reserved."""
    accounts = server.gateway.limiter._accounts
    found = [account for account in accounts.values() if account.limits == KEYS[key]]
    wait_until(lambda: all(not account._num_reserved for account in found), "settled", 60)


def conversation_of(server: LimitedServer, key: str) -> tuple[str, str]:
    """Return a stored conversation and its reply."""
    body = {"input": "Hi", "max_output_tokens": 3, "ignore_eos": True}
    status, _, answer = server.request("POST", RESPONSES, body, server.bearer(key))
    assert status == 200, answer
    return answer["conversation"]["id"], answer["output"][0]["id"]


def ways_in(server: LimitedServer, conversation_id: str, item_id: str) -> dict[str, Callable[[], Answer]]:
    """List every route that makes the engine work, as a callable."""
    key = server.bearer(PER_MINUTE)

    def stored(**fields: Any) -> Answer:
        return server.request("POST", RESPONSES, {"input": "Hi", "max_output_tokens": 3, **fields}, key)

    def over_socket() -> Answer:
        with socket_of(server, PER_MINUTE) as socket:
            assert receive(socket)["type"] == "session.created"
            send(socket, input="Hi", max_output_tokens=3)
            last = until_end(socket)[-1]
        if last["type"] != "error":
            return 200, {}, last
        return last["status"], {"retry-after": str(last["retry_after"])}, last

    at = f"/v1/conversations/{conversation_id}"
    return {
        "chat": lambda: chat(server, PER_MINUTE),
        "stream": lambda: chat(server, PER_MINUTE, stream=True),
        "completions": lambda: server.request("POST", COMPLETIONS, {"prompt": "Hi", **SHORT}, key),
        "embeddings": lambda: server.request("POST", "/v1/embeddings", {"input": "Hi"}, key),
        "score": lambda: server.request("POST", "/v1/score", {"text_1": "Hi", "text_2": "Ho"}, key),
        "rerank": lambda: server.request("POST", "/v1/rerank", {"query": "Hi", "documents": ["Ho"]}, key),
        "responses": stored,
        "not stored": lambda: stored(store=False),
        "background": lambda: stored(background=True),
        "socket": over_socket,
        "title": lambda: server.request("POST", f"{at}/title", {}, key),
        "token": lambda: server.request("GET", f"{at}/items/{item_id}/tokens/0", headers=key),
    }


def test_every_generating_route_is_limited_and_accepts_after_the_stated_wait(
    server: LimitedServer, clock: Clock
) -> None:
    ways = ways_in(server, *conversation_of(server, PER_MINUTE))
    server.wait_idle()
    for name, ask in ways.items():
        clock.pass_s(60)
        assert left(server, PER_MINUTE, "requests") == 5
        assert ask()[0] == 200, name
        server.wait_idle()
        assert left(server, PER_MINUTE, "requests") == 4, f"{name} counts once"
        assert chat(server, PER_MINUTE, n=4)[0] == 200
        status, headers, answer = ask()
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (
            429,
            "rate_limit_exceeded",
            "rate_limit_error",
        ), name
        assert headers["retry-after"] == "12", "five a minute are one in 12 s"
        assert "x-should-retry" not in headers
        clock.pass_s(12)
        assert ask()[0] == 200, f"{name}: it said so"
        assert ask()[0] == 429


@pytest.mark.parametrize(
    ("path", "fields", "cost"),
    [
        (CHAT, {"n": 3}, 3),
        (CHAT, {"best_of": 4, "n": 2}, 4),
        (CHAT, {"beam_width": 4, "n": 1}, 4),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, 4),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, 2),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, 1),
        (RESPONSES, {"n": 3}, 3),
        (RESPONSES, {"generate": False}, 1),
    ],
)
def test_request_limit_counts_candidates(server: LimitedServer, path: str, fields: dict[str, Any], cost: int) -> None:
    common = {CHAT: {"messages": [{"role": "user", "content": "Hi"}], **SHORT}, COMPLETIONS: {"prompt": "Hi", **SHORT}}
    body = {**common.get(path, {"input": "Hi", "max_output_tokens": 3}), **fields}
    status, headers, answer = server.request("POST", path, body, server.bearer(PER_MINUTE))
    assert status == 200, answer
    assert int(headers["x-ratelimit-remaining-requests"]) == 5 - cost


def test_invalid_request_counts_as_a_request_without_tokens(server: LimitedServer) -> None:
    assert chat(server, TOKENS, "word " * 3000)[0] == 400
    assert left(server, TOKENS) == 100_000
    assert chat(server, PER_MINUTE, n=0)[0] == 400
    assert left(server, PER_MINUTE, "requests") == 5, "nothing was made of it"
    assert chat(server, PER_MINUTE, "word " * 3000)[0] == 400
    assert left(server, PER_MINUTE, "requests") == 4


def usage_of(answer: Answer) -> int:
    usage = answer[2]["usage"]
    return int(usage["total_tokens"]) - int(usage["prompt_tokens_details"]["cached_tokens"])


def test_token_limit_charges_computed_tokens(server: LimitedServer) -> None:
    before = left(server, TOKENS)
    costs = [usage_of(chat(server, TOKENS, "What is charged here?", n=count)) for count in (1, 1, 3)]
    settled(server, TOKENS)
    assert left(server, TOKENS) == before - sum(costs)
    assert costs[1] < costs[0] and costs[2] == costs[1] + 6, "what the cache has is free"


def test_beam_search_charges_all_beams(server: LimitedServer) -> None:
    before = left(server, TOKENS)
    answer = chat(server, TOKENS, "Search for this", beam_width=4, n=1)
    settled(server, TOKENS)
    num_drawn = answer[2]["usage"]["completion_tokens"]
    assert left(server, TOKENS) == before - usage_of(answer) - 3 * num_drawn


def test_disconnected_client_is_charged_for_generated_tokens(server: LimitedServer) -> None:
    before = left(server, TOKENS)
    body = {"messages": [{"role": "user", "content": "Tell me much"}], "stream": True, "ignore_eos": True}
    with slowed(server, 0.05), server.connect() as connection:
        data = json.dumps({**body, "max_tokens": 900}).encode()
        connection.sendall(post_bytes(server.port, CHAT, data, f"authorization: Bearer {server.held[TOKENS].key}\r\n"))
        wait_until(lambda: server.num_pages_in_use() > 0, "it runs", 60)
        assert b"200 OK" in connection.recv(4096)
        assert left(server, TOKENS) <= before - 900, "reserved"
    server.wait_idle()
    settled(server, TOKENS)
    assert before - 900 < left(server, TOKENS) < before


def test_slow_reader_is_charged_for_computed_tokens(server: LimitedServer) -> None:
    """All tokens are computed although the stream is cut off, here by revoking the key."""
    slow = give(server.config, "slow", tokens_per_day=10_000)
    server.call(server.gateway.key_cache.refresh())
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "ignore_eos": True, "max_tokens": 300}
    data = json.dumps({**body, "n": 2, "logprobs": True, "top_logprobs": 20}).encode()  # more than all buffers hold
    server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # handed on to the connection
    with contextlib.closing(socket.socket()) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        raw.sendall(post_bytes(server.port, CHAT, data, f"authorization: Bearer {slow.key}\r\n"))
        wait_until(lambda: num_generated(server) == 600, "all to be computed")
        take_away(server.config, slow)
        server.call(server.gateway.key_cache.refresh())
        wait_until(lambda: server.gateway.limiter.usage.used(slow.record.id) >= 600, "all to be paid for")


def test_disconnected_beam_search_is_charged_its_reservation(server: LimitedServer) -> None:
    before = left(server, TOKENS)
    body = {"messages": [{"role": "user", "content": "Search long"}], "beam_width": 2, "max_tokens": 400}
    with slowed(server, 0.05), server.connect() as connection:
        data = json.dumps({**body, "ignore_eos": True}).encode()
        connection.sendall(post_bytes(server.port, CHAT, data, f"authorization: Bearer {server.held[TOKENS].key}\r\n"))
        wait_until(lambda: server.num_pages_in_use() > 0, "it runs", 60)
    server.wait_idle()
    settled(server, TOKENS)
    assert left(server, TOKENS) <= before - 800


def test_concurrency_limit_covers_every_route(server: LimitedServer) -> None:
    with slowed(server, 0.05), socket_of(server, AT_ONCE) as socket:
        receive(socket)
        for lane in ("one", "two"):
            send(socket, input="Hi", stream_id=lane, max_output_tokens=900, ignore_eos=True, store=False)
        started: dict[str, str] = {}
        while len(started) < 2:
            frame = receive(socket)
            if frame["type"] == "response.created":
                started[frame["stream_id"]] = frame["response"]["id"]
        status, headers, answer = chat(server, AT_ONCE)
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "rate_limit_exceeded", "1")
        send(socket, input="Hi", stream_id="three", max_output_tokens=3)
        frame = receive(socket)
        while frame["type"] != "error":
            frame = receive(socket)
        assert (frame["status"], frame["stream_id"], frame["retry_after"]) == (429, "three", 1)
        status, _, answer = chat(server, AT_ONCE, n=3)
        assert (status, answer["error"]["param"]) == (400, "n")
        send(socket, "response.cancel", response_id=started["one"])
        while frame["type"] != "response.incomplete":
            frame = receive(socket)
        wait_until(lambda: chat(server, AT_ONCE)[0] == 200, "room", 60)
    server.wait_idle()


class Recorder:
    """Takes the records of responses, so that another gateway could continue them."""

    async def record(self, *_: object) -> bool:
        return True

    def discard_record(self, request_id: str) -> None: ...


@pytest.mark.parametrize("has_ended", [False, True], ids=["it runs", "it has ended here, too"])
def test_response_that_another_gateway_continues_is_not_charged_here(
    server: LimitedServer, monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    moved = give(server.config, "moved", tokens_per_day=10_000, max_concurrent=1)
    server.call(server.gateway.key_cache.refresh())
    monkeypatch.setattr(server.gateway, "recorder", Recorder())
    body = {"input": "Hi", "background": True, "max_output_tokens": 900, "ignore_eos": True}
    with slowed(server, 0.02):
        response_id = server.request("POST", RESPONSES, body, moved.bearer)[2]["id"]
        wait_until(lambda: num_generated(server) > 10, "tokens", 60)
        run: Any = server.gateway.responses.running()[0]
        assert run.id == response_id

        async def abandon() -> None:
            run.abandon()

        async def refuse(*_: object) -> None:
            raise ResponseElsewhereError(response_id, "end", "response_id")

        if has_ended:
            monkeypatch.setattr(server.gateway.loaded_model().conversations, "complete", refuse)
            hurry(server)
        else:
            server.call(abandon())
        wait_until(lambda: run.task.done(), "the end", 60)
    account = server.gateway.limiter._accounts[moved.record.id]
    assert (account.num_running, account._num_reserved) == (0, 0)
    assert server.gateway.limiter.usage.used(moved.record.id) == 0
    server.wait_idle()


def test_daily_limit_is_enforced_and_survives_a_restart(server: LimitedServer, clock: Clock, tmp_path: Path) -> None:
    db = str(tmp_path / "chat.db")
    held = keys_with(db, {DAILY: KEYS[DAILY]})
    with limited_server(db, clock, held) as first:
        assert chat(first, DAILY, "First of the day", max_tokens=40)[0] == 200
        settled(first, DAILY)
        assert left(first, DAILY) < 160
    with limited_server(db, clock, held) as second:
        assert chat(second, DAILY, "More", max_tokens=160)[0] == 200
        settled(second, DAILY)
        status, headers, answer = chat(second, DAILY, "And more")
        assert (status, answer["error"]["code"]) == (429, "insufficient_quota")
        assert headers["x-should-retry"] == "false"
        wait_s = int(headers["retry-after"])
        assert wait_s == DAY_S - int(clock.wall_s()) % DAY_S
        assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == ("200", "0")
        clock.pass_s(wait_s - 1)
        assert chat(second, DAILY, "Early")[0] == 429
        clock.pass_s(1)
        assert chat(second, DAILY, "Morning")[0] == 200


def test_responses_of_a_limited_key_have_rate_limit_headers(server: LimitedServer) -> None:
    key = server.bearer(SIDE)
    big = {"content-length": str(2**30)}
    answers = {
        "fine": server.request("GET", "/v1/models", headers=key),
        "no route": server.request("GET", "/nowhere", headers=key),
        "wrong method": server.request("PUT", CHAT, headers=key),
        "bad body": server.request("POST", CHAT, raw=b"{", headers=key),
        "too large": server.request("POST", CHAT, headers={**key, **big}),
        "stream": chat(server, SIDE, stream=True),
    }
    for name, (_, headers, _) in answers.items():
        assert set(RATE_HEADERS) <= set(headers), name
    with socket_of(server, SIDE) as socket:
        assert socket.response is not None and set(RATE_HEADERS) <= {name.lower() for name in socket.response.headers}
    for headers in (
        server.request("GET", "/v1/models", headers=server.bearer(FREE))[1],
        server.request("GET", "/livez")[1],
        server.request("GET", "/v1/models")[1],
    ):
        assert not any(name.startswith("x-ratelimit") for name in headers)


def test_openai_client_raises_rate_limit_error(server: LimitedServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.held[PER_MINUTE].key, max_retries=0)
    with client:
        asked = {"model": "org/tiny-hash", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "n": 5}
        raw = client.chat.completions.with_raw_response.create(**asked)  # type: ignore[call-overload]
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as refusal:
            client.chat.completions.create(**asked)  # type: ignore[call-overload]
    assert refusal.value.code == "rate_limit_exceeded" and refusal.value.response.headers["retry-after"] == "60"


@pytest.mark.slow
def test_prewarm_costs_no_request_and_its_turn_is_cached(server: LimitedServer, clock: Clock) -> None:
    with socket_of(server, SIDE) as socket:
        receive(socket)
        text = "Something that takes its time to type, and is computed while it is typed. " * 4
        send(socket, "prompt.prewarm", input=text)
        warmed = receive(socket)
        assert warmed["status"] == "done" and warmed["warm_tokens"] > 40
        settled(server, SIDE)
        paid = 1500 - left(server, SIDE)
        assert paid >= warmed["warm_tokens"] - warmed["cached_tokens"]
        assert left(server, SIDE, "requests") == 100
        send(socket, input=text, max_output_tokens=2, ignore_eos=True)
        usage = until_end(socket)[-1]["response"]["usage"]
        settled(server, SIDE)
        cached = usage["input_tokens_details"]["cached_tokens"]
        assert cached >= warmed["warm_tokens"] - 8
        assert left(server, SIDE) == 1500 - paid - (usage["input_tokens"] - cached) - 2
        assert left(server, SIDE, "requests") == 99
        assert chat(server, SIDE, "Now into debt", max_tokens=None, n=2)[0] == 200
        settled(server, SIDE)
        assert left(server, SIDE) == 0
        send(socket, "prompt.prewarm", input=text + "more")
        none = receive(socket)
        assert (none["type"], none["status"], none["warm_tokens"]) == ("prompt.prewarmed", "busy", 0)


def test_tokens_beyond_the_reservation_are_charged(server: LimitedServer) -> None:
    before = left(server, TOKENS)
    answer = chat(server, TOKENS, "On and on", max_tokens=None)
    settled(server, TOKENS)
    num_drawn = answer[2]["usage"]["completion_tokens"]
    assert num_drawn > RESERVED_TOKENS
    assert left(server, TOKENS) == before - usage_of(answer)


def test_limit_check_finds_missing_admission(server: LimitedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without admission control no request counts, and the route test fails."""
    monkeypatch.setattr(type(server.gateway.limiter), "admit", lambda self, principal, work: Reservation(None, work))
    with pytest.raises(AssertionError):
        test_every_generating_route_is_limited_and_accepts_after_the_stated_wait(server, Clock())
