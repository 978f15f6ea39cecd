"""Responses over HTTP: failures, restarts, invalid requests and tenant isolation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from chatcache.config import ServerConfig
from chatcache.types.events import EngineEvent, Failed, Started
from tests.gateway.frames import send, until_end
from tests.gateway.responding import LONG, PATH, begin, so_far
from tests.gateway.serving import MAX_MODEL_LEN, Server, read_all, slowed, wait_until
from tests.gateway.test_tenants import ONE, TWO, shared

__all__ = ["shared"]


def test_response_engine_failure_returns_200_and_is_stored(server: Server) -> None:
    greedy = {"input": "Say", "temperature": 0, "ignore_eos": True, "max_output_tokens": 12}
    whole = server.post(PATH, **greedy)[2]
    server.runner._faulty_token = reply_tokens(server, whole["id"])[6]
    try:
        status, _, failed = server.post(PATH, **greedy)
        data = server.stream(PATH, **greedy)[1]
    finally:
        server.runner._faulty_token = None
    assert status == 200 and failed["status"] == "failed" and failed["error"]["code"] == "engine_error"
    last = json.loads(data.strip().rpartition(b"data: ")[2])
    assert last["type"] == "response.failed" and last["response"]["error"] == failed["error"]
    assert data.count(b"event: response.failed") == 1

    async def forget() -> None:
        server.gateway.responses.remove(failed["id"])

    server.call(forget())
    later = server.request("GET", f"{PATH}/{failed['id']}")[2]
    assert (later["status"], later["error"]) == ("failed", failed["error"])
    assert server.post(PATH, **greedy)[2]["output"][0]["content"] == whole["output"][0]["content"]


def test_response_and_message_of_different_conversations_are_a_400(server: Server) -> None:
    first, second = (server.post(PATH, input="Say", max_output_tokens=2)[2] for _ in range(2))
    item = second["output"][0]["id"]
    place = {"input": "x", "previous_item_id": item, "max_output_tokens": 2}
    for path in (PATH, f"{PATH}/input_tokens", "/v1/cache/explain"):
        body = place if path != "/v1/cache/explain" else {"input": "x", "previous_item_id": item}
        status, _, answer = server.post(path, **body, previous_response_id=first["id"])
        assert (status, answer["error"]["param"]) == (400, "previous_item_id"), answer
        assert first["id"] in answer["error"]["message"] and item in answer["error"]["message"]
        status, _, answer = server.post(path, **body, previous_response_id="resp_x")
        assert (status, answer["error"]["code"]) == (404, "previous_response_not_found"), answer
    status, _, answer = server.post(PATH, **place, previous_response_id=second["id"])
    assert status == 200 and answer["conversation"] == second["conversation"]


def test_beam_search_when_engine_process_dies_returns_retryable_503(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is 503 if nothing was sent yet; streams and sockets report the same error code."""
    events = server.engine.events

    async def dying(request_id: str, after: int = 0) -> AsyncIterator[EngineEvent]:
        async for event in events(request_id, after):
            yield event
            if isinstance(event, Started):
                yield Failed(request_id, event.seq + 1, "it died", "engine_unavailable", status=503)
                return

    monkeypatch.setattr(server.engine, "events", dying)
    search: dict[str, Any] = {"beam_width": 3, "max_output_tokens": 9}
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "n": 3, "use_beam_search": True}
    status, headers, refused = server.post("/v1/chat/completions", **asked)
    assert (status, headers["retry-after"], refused["error"]["code"]) == (503, "1", "engine_unavailable")
    assert refused["error"]["type"] == "server_error" and "x-should-retry" not in headers
    data = server.stream("/v1/chat/completions", **asked)[1]
    assert json.loads(data.strip().rpartition(b"data: ")[2])["error"]["code"] == "engine_unavailable"
    failed = [server.post(PATH, input="Hi", **search)[2]]
    with connect(url) as socket:
        send(socket, input="Hi", **search)
        failed.append(until_end(socket)[-1]["response"])
    assert [each["error"]["code"] for each in failed] == ["engine_unavailable"] * 2


def reply_tokens(server: Server, response_id: str) -> tuple[int, ...]:
    store = server.gateway.store
    assert store is not None

    async def read() -> tuple[int, ...]:
        tree = await store.load("", await store.locate("", response_id))
        return tree.outputs(response_id)[0].token_ids

    return server.call(read())


def test_responses_are_found_after_a_restart(tmp_path: Path) -> None:
    config = ServerConfig(db=str(tmp_path / "c.db"))
    with Server(config) as server:
        server.wait_ready()
        done = server.post(PATH, input="Hi", n=2, metadata={"a": "b"}, max_output_tokens=9, temperature=0.5)[2]
        searches: tuple[dict[str, int], ...] = ({"beam_width": 4, "n": 3}, {"best_of": 4, "n": 2})
        ranked = [server.post(PATH, input="Hi", max_output_tokens=9, **fields)[2] for fields in searches]
        with slowed(server, 0.01):
            cut = begin(server, {**LONG, "background": True})
            cut_id = json.loads(read_all(cut).partition(b"\r\n\r\n")[2])["id"]
            cut.close()
            wait_until(lambda: bool(so_far(server, cut_id)), "something said")
            server.stop()
    with Server(config) as server:
        server.wait_ready()
        for response in (done, *ranked):
            assert server.request("GET", f"{PATH}/{response['id']}")[2] == response
        assert all("score" in item for response in ranked for item in response["output"])
        ended = server.request("GET", f"{PATH}/{cut_id}")[2]
        assert ended["status"] == "incomplete" and ended["incomplete_details"] == {"reason": "interrupted"}
        assert ended["output"][0]["content"][0]["text"]
        status, _, answer = server.request("GET", f"{PATH}/{done['id']}?stream=true")
        assert status == 400 and answer["error"]["code"] == "stream_expired"
        assert server.post(f"{PATH}/{done['id']}/cancel")[2] == done
        items = server.request("GET", f"{PATH}/{done['id']}/input_items")[2]["data"]
        assert [item["id"] for item in items] == done["input_item_ids"]
        after = server.post(PATH, input="x", previous_response_id=done["id"], max_output_tokens=1)
        assert after[0] == 200


def test_responses_of_another_tenant_return_404(shared: Server) -> None:
    mine = shared.request("POST", PATH, {"input": "Hi", "max_output_tokens": 2}, ONE)[2]
    with slowed(shared, 0.05):
        live = shared.request("POST", PATH, {**LONG, "background": True}, ONE)[2]
        for response in (mine, live):
            one = f"{PATH}/{response['id']}"
            for method, url in (
                ("GET", one),
                ("GET", f"{one}?stream=true"),
                ("GET", f"{one}?stream=true&starting_after=1"),
                ("POST", f"{one}/cancel"),
                ("GET", f"{one}/input_items"),
                ("DELETE", one),
            ):
                status, _, answer = shared.request(method, url, headers=TWO)
                assert status == 404 and answer["error"]["code"] == "not_found", url
                assert shared.request(method, url)[0] == 401
                unknown = shared.request(method, url.replace(response["id"], "resp_x"), headers=TWO)[2]
                assert unknown["error"]["message"].replace("resp_x", response["id"]) == answer["error"]["message"]
            status, _, answer = shared.request(
                "POST", PATH, {"input": "x", "previous_response_id": response["id"]}, TWO
            )
            assert status == 404
            body = {"input": "x", "previous_response_id": response["id"]}
            assert shared.request("POST", f"{PATH}/input_tokens", body, TWO)[0] == 404
        assert shared.request("POST", f"{PATH}/{live['id']}/cancel", headers=ONE)[2]["status"] == "cancelled"
    assert shared.request("GET", f"{PATH}/{mine['id']}", headers=ONE)[2] == mine


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=1", "stream"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&starting_after=99999999999999999999", "starting_after"),
        ("stream=true&starting_after=500", "starting_after"),
        ("stream=true&starting_after=%C2%B2", "starting_after"),
    ],
)
def test_what_cannot_be_followed(server: Server, query: str, param: str) -> None:
    answer = server.post(PATH, input="Hi", max_output_tokens=2)[2]
    status, _, refused = server.request("GET", f"{PATH}/{answer['id']}?{query}")
    assert status == 400 and refused["error"]["param"] == param


@pytest.mark.parametrize("name", ["resp_x", "x" * 5000, "%00", "..%2f..", "conv_1", "%F0%9F%8E%89"])
def test_ids_that_name_nothing(server: Server, name: str) -> None:
    one = f"{PATH}/{name}"
    for method, url in (
        ("GET", one),
        ("GET", f"{one}?stream=true"),
        ("POST", f"{one}/cancel"),
        ("GET", f"{one}/input_items"),
        ("DELETE", one),
    ):
        status, _, answer = server.request(method, url)
        assert status == 404 and answer["error"]["code"] == "not_found" and len(answer["error"]["message"]) < 6000


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", PATH, "POST"),
        ("DELETE", PATH, "POST"),
        ("POST", f"{PATH}/resp_x", "GET"),
        ("PUT", f"{PATH}/resp_x", "GET"),
        ("GET", f"{PATH}/resp_x/cancel", "POST"),
        ("POST", f"{PATH}/resp_x/input_items", "GET"),
        ("GET", f"{PATH}/input_tokens", "POST"),
    ],
)
def test_wrong_methods(server: Server, method: str, path: str, allowed: str) -> None:
    status, headers, answer = server.request(method, path, {} if method == "POST" else None)
    assert status == 405 and answer["error"]["code"] == "method_not_allowed" and allowed in headers["allow"]


def test_unknown_fields_are_named_on_every_form(server: Server) -> None:
    for more in ({}, {"stream": True}, {"background": True}):
        status, headers, _ = server.post(PATH, input="Hi", max_output_tokens=2, never_heard_of=1, **more)
        assert status == 200 and headers["x-chatcache-ignored"] == "never_heard_of"
    assert server.post(f"{PATH}/input_tokens", input="Hi", never_heard_of=1)[1]["x-chatcache-ignored"]


def test_too_long_is_refused_with_the_numbers(server: Server) -> None:
    wait_until(lambda: not server.gateway.responses.running(), "what others left in the background to be stored")
    before = server.request("GET", "/v1/conversations?limit=1")[2]["data"]
    status, _, answer = server.post(PATH, input="word " * 2000)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["param"] == "input"
    assert str(MAX_MODEL_LEN) in answer["error"]["message"]
    assert server.request("GET", "/v1/conversations?limit=1")[2]["data"] == before, "nothing is stored of it"
