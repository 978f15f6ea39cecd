"""Log-probabilities of the output: their number is limited, and responses report those that are gone."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import pytest
from websockets.sync.client import connect

from chatcache.gateway.json_codec import encode
from chatcache.gateway.limits import admission
from chatcache.gateway.limits.admission import LoopTurns
from chatcache.gateway.responses import event_log, http, log_frames
from chatcache.gateway.responses.log_frames import LogFrame, LogprobStore
from chatcache.types.events import TokenLogprob
from chatcache.types.request import MAX_OUTPUT_LOGPROBS
from tests.gateway.frames import Frame
from tests.gateway.serving import Server, tiny_tokenizer

INCLUDE = "message.output_text.logprobs"
CHAT: Frame = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 20}
RESPONSE: Frame = {"input": "Hi", "include": [INCLUDE], "top_logprobs": 20}
# Path, fields, name of the limit, log-probabilities per token of one candidate.
ROUTES = [
    ("/v1/chat/completions", CHAT, "max_tokens", 21),
    ("/v1/chat/completions", CHAT, "max_completion_tokens", 21),
    ("/v1/responses", RESPONSE, "max_output_tokens", 21),
    ("/v1/completions", {"prompt": ["Hi", "there"], "logprobs": 20}, "max_tokens", 2 * 21),
]


@pytest.mark.parametrize(("path", "fields", "name", "num_per_token"), ROUTES)
def test_number_of_output_logprobs_is_limited(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, fields: Frame, name: str, num_per_token: int
) -> None:
    monkeypatch.setattr("chatcache.gateway.api.params.MAX_OUTPUT_LOGPROBS", 4 * num_per_token * 10)
    status, _, refused = server.post(path, **fields, **{name: 11}, n=4)
    assert status == 400 and refused["error"]["param"] == name
    assert f"must be at most {4 * num_per_token * 10}" in refused["error"]["message"]
    status, _, body = server.post(path, **fields, **{name: 10}, n=4, ignore_eos=True)
    assert status == 200 and body["usage"]["total_tokens"]


def test_missing_limit_is_what_one_answer_carries_and_is_reported(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatcache.gateway.api.params.MAX_OUTPUT_LOGPROBS", 2 * 21 * 10)
    status, headers, body = server.post("/v1/chat/completions", **CHAT, n=2, ignore_eos=True)
    assert status == 200 and headers["x-chatcache-max-tokens"] == "10"
    assert [len(choice["logprobs"]["content"]) for choice in body["choices"]] == [10, 10]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    status, _, response = server.post("/v1/responses", **RESPONSE, n=2, ignore_eos=True)
    assert status == 200 and response["max_output_tokens"] == 10 and response["usage"]["output_tokens"] == 20
    status, headers, _ = server.post("/v1/chat/completions", **{**CHAT, "max_tokens": 10}, n=2)
    assert status == 200 and "x-chatcache-max-tokens" not in headers


def num_entries(response: dict[str, Any]) -> int:
    return sum(len(item["content"][0]["logprobs"]) for item in response["output"])


def test_response_names_logprobs_as_omitted_once_its_log_is_gone(server: Server) -> None:
    limits = {"n": 4, "max_output_tokens": 30, "ignore_eos": True}
    _, _, created = server.post("/v1/responses", **RESPONSE, **limits)
    _, _, other = server.post("/v1/responses", input="Hi", **limits)
    path = f"/v1/responses/{created['id']}"
    found = server.request("GET", path)[2]
    assert num_entries(found) == num_entries(created) == 120 and "omitted" not in found

    async def forget() -> None:
        for response_id in (created["id"], other["id"]):
            server.gateway.responses.remove(response_id)

    server.call(forget())
    stored = server.request("GET", path)[2]
    assert num_entries(stored) == 0 and stored["omitted"] == [INCLUDE] and "has_logprobs" not in stored
    assert "omitted" not in server.request("GET", f"/v1/responses/{other['id']}")[2]


def test_logprobs_of_the_review_attack_are_within_the_limit() -> None:
    """64 candidates of 200 tokens with 20 alternatives were lost without a sign."""
    assert 64 * 200 * 21 <= MAX_OUTPUT_LOGPROBS < 64 * 2000 * 21


def test_large_answer_is_sent_in_pieces(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, created = server.post("/v1/responses", **RESPONSE, n=4, max_output_tokens=30, ignore_eos=True)
    path = f"/v1/responses/{created['id']}"
    _, piece_headers, found = server.request("GET", path)
    monkeypatch.setattr(http, "MAX_RESOLVED_BYTES", 1_000_000)
    _, headers, whole = server.request("GET", path)
    assert found == whole and num_entries(found) == 4 * 30
    assert "content-length" in headers and "content-length" not in piece_headers
    assert piece_headers["content-type"] == headers["content-type"]


@pytest.mark.parametrize("transport", ["SSE", "WebSocket"])
def test_events_with_many_logprobs_are_sent_whole_in_pieces(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    for module in (event_log, log_frames):
        monkeypatch.setattr(module, "MAX_RESOLVED_BYTES", 10_000)
    monkeypatch.setattr(log_frames, "MIN_PIECE_BYTES", 1000)
    fields = {**RESPONSE, "n": 3, "max_output_tokens": 20, "ignore_eos": True}
    events: list[Frame] = []
    if transport == "SSE":
        _, data = server.stream("/v1/responses", **fields)
        assert data.count(b"event: ") == data.count(b"\n\n")
        events = [json.loads(event) for event in re.findall(rb"^data: (.*)$", data, re.MULTILINE)]
    else:
        with connect(url) as connection:
            connection.send(json.dumps({"type": "response.create", **fields}))
            while not events or events[-1]["type"] not in event_log.TERMINAL:
                events.append(json.loads(connection.recv(timeout=60)))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert num_entries(response) == 3 * 20
    assert response["output"] == server.request("GET", f"/v1/responses/{response['id']}")[2]["output"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert sum(len(event["logprobs"]) for event in deltas) == 3 * 20


def large_answer() -> tuple[LogprobStore, bytes]:
    """Log-probabilities of more than a MB of JSON, and a text that refers to them."""
    tokenizer, draws = tiny_tokenizer(), random.Random(1)
    store = LogprobStore(tokenizer.token_bytes)
    ids = [draws.randrange(tokenizer.vocab_size) for _ in range(1000)]
    top = tuple((token, -draws.random()) for token in range(20))
    frames = [store.add(at % 2, [(ids[at], TokenLogprob(-1.5, top))]) for at in range(1000)]
    return store, encode({"all": [store.all_of(0), store.all_of(1)], "some": frames[:3]})


async def test_pieces_of_a_large_answer_joined_are_the_answer() -> None:
    store, data = large_answer()
    whole = b"".join(store.pieces(data))
    assert store.resolve(LogFrame("", None, data)).data == data, "too large for one turn"
    assert store.num_resolved_bytes(data) == pytest.approx(len(whole), rel=0.3) and len(whole) > 1_000_000
    assert [len(entries) for entries in json.loads(whole)["all"]] == [500, 500]
    pieces = [piece async for piece in log_frames.in_turns(store.pieces(data), LoopTurns(), "ann")]
    assert b"".join(pieces) == whole
    assert max(map(len, pieces)) <= 2 * log_frames.MIN_PIECE_BYTES


async def test_answers_of_one_owner_have_one_piece_for_each_turn_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many connections read, and while a connection that has left waits no longer."""
    monkeypatch.setattr(admission, "TURN_S", 0.0)
    monkeypatch.setattr(admission, "PAUSE_FACTOR", 0.0)
    (store, data), turns, order = large_answer(), LoopTurns(), list[str]()

    async def read(owner: str) -> None:
        async for _ in log_frames.in_turns(store.pieces(data), turns, owner):
            order.append(owner)

    reading = [asyncio.create_task(read("ann")) for _ in range(8)]
    gone = asyncio.create_task(read("ann"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(*reading, read("bob"), gone, return_exceptions=True)
    num_pieces = order.count("bob")
    assert num_pieces > 20 and order.count("ann") == 8 * num_pieces
    last = len(order) - order[::-1].index("bob")
    assert order[:last].count("ann") <= num_pieces + 2


async def test_error_in_a_turn_is_raised_to_the_caller_and_ends_no_other_turn() -> None:
    turns = LoopTurns()
    results = await asyncio.gather(turns.run("ann", lambda: [][0]), turns.run("ann", lambda: 1), return_exceptions=True)
    assert isinstance(results[0], IndexError) and results[1] == 1
