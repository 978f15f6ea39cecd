"""Token spans and alternatives of messages, and forks at a token.

The model is a hash of its history: its distribution is computed here without an engine, as the oracle.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.gateway.described import Described
from tests.gateway.frames import Frame, ask, items_of, receive, send, text_of
from tests.gateway.scripted import scripted
from tests.gateway.serving import PAGE_SIZE, Server, slowed, tiny_tokenizer
from tests.gateway.test_forks import GREEDY, SYSTEM, begin, cached
from tests.gateway.test_tenants import DECLARED, ONE, TWO, shared
from tests.support.fake_runner import history_of
from tests.support.fake_sampling import log_softmax

__all__ = ["shared"]


def tokens_path(response: Frame, output: int = 0) -> str:
    return f"/v1/conversations/{response['conversation']['id']}/items/{response['output'][output]['id']}/tokens"


def get(server: Server, path: str, headers: dict[str, str] | None = None) -> Any:
    status, _, answer = server.request("GET", path, headers=headers)
    assert status == 200, answer
    return answer


def stored_ids(server: Server, response: Frame, output: int = 0) -> tuple[list[int], list[int]]:
    """The exact prompt and reply, from the export."""
    exported = get(server, f"/v1/conversations/{response['conversation']['id']}/export")
    items = {item["id"]: item for item in exported["items"]}
    turns = {turn["id"]: turn for turn in exported["turns"]}
    item = items[response["output"][output]["id"]]
    reply: list[int] = list(item["token_ids"])
    prompt: list[int] = []
    while item is not None:
        turn = turns[item["response_id"]]
        prompt = [*turn["prompt_ids"], *prompt]
        item = items[turn["base_item_id"]] if turn.get("base_item_id") else None
        prompt = [*(item["token_ids"] if item is not None else ()), *prompt]
    return prompt, reply


@pytest.mark.parametrize("fields", [{"skip_special_tokens": False}, {"skip_special_tokens": True}, {"seed": 8}])
def test_token_spans_cover_the_text(server: Server, socket: ClientConnection, fields: Frame) -> None:
    response = ask(socket, input="Hello", **fields, max_output_tokens=60)
    item_id, text = response["output"][0]["id"], text_of(response)
    listed = get(server, tokens_path(response))
    assert (listed["object"], listed["item_id"]) == ("list", item_id)
    data = listed["data"]
    assert [each["index"] for each in data] == list(range(items_of(server, response)[item_id]["num_tokens"]))
    _, reply = stored_ids(server, response)
    at = 0
    for token, each in zip(reply, data, strict=True):
        if each["start"] is None:
            assert each["end"] is None and token in tiny_tokenizer().special_ids
            continue
        assert each["start"] == at
        shown, at = text[at : each["end"]], each["end"]
        if shown.isascii():
            assert shown == tiny_tokenizer().token_bytes[token].decode("utf-8", "ignore")
    assert at == len(text), "together they are the text"


@pytest.mark.parametrize("top_k", [-1, 6])
def test_alternatives_equal_the_models_distribution(server: Server, socket: ClientConnection, top_k: int) -> None:
    first = ask(socket, input="Hello", instructions=SYSTEM)
    location = {"instructions": SYSTEM, "previous_response_id": first["id"]}
    response = ask(socket, input="And?", **location, top_k=top_k, seed=2, max_output_tokens=12)
    prompt, reply = stored_ids(server, response)
    assert len(prompt) == response["usage"]["input_tokens"]
    before = get(server, f"/v1/conversations/{response['conversation']['id']}/items?branches=all")
    for index in (0, 1, 5, 11):
        look = get(server, f"{tokens_path(response)}/{index}?top=20")
        expected = log_softmax(server.runner.logits(history_of([*prompt, *reply[:index]])))
        order = (-expected).argsort(kind="stable").tolist()
        assert [each["id"] for each in look["alternatives"]] == order[:20]
        rank = order.index(reply[index]) + 1
        token = look["token"]
        assert (token["id"], token["rank"]) == (reply[index], rank if rank <= 20 else None)
        assert top_k < 0 or rank <= top_k
        for each in (token, *look["alternatives"]):
            assert each["logprob"] == pytest.approx(float(expected[each["id"]]), abs=1e-6)
            assert each["probability"] == pytest.approx(math.exp(each["logprob"]))
            assert each["text"] == tiny_tokenizer().token_bytes[each["id"]].decode("utf-8", "replace")
            assert each["ends"] == (each["id"] in tiny_tokenizer().eos_token_ids)
        num_input = len(prompt) + index
        assert (usage := look["usage"])["input_tokens"] == num_input
        assert usage["cached_tokens"] == num_input - 1, "one token was computed"
        assert get(server, f"{tokens_path(response)}/{index}?top=3")["alternatives"] == look["alternatives"][:3]
    assert len(get(server, f"{tokens_path(response)}/0")["alternatives"]) == 8
    assert get(server, f"/v1/conversations/{response['conversation']['id']}/items?branches=all") == before


def test_alternatives_copy_only_the_page_they_end_in(server: Server, socket: ClientConnection) -> None:
    response = ask(socket, input="Where are the pages?", max_output_tokens=20)
    num_input = response["usage"]["input_tokens"]
    for index in (2, 6, 11, 17):  # no two in one page
        copied = get(server, f"{tokens_path(response)}/{index}")["usage"]["copied_pages"]
        assert copied == ((num_input + index - 1) % PAGE_SIZE > 0), index


def test_alternatives_take_one_engine_step(server: Server, socket: ClientConnection) -> None:
    response = ask(socket, input="Count the steps", max_output_tokens=20)
    server.wait_idle()
    num_steps = server.call(server.engine.health()).num_steps
    get(server, f"{tokens_path(response)}/15")
    server.wait_idle()
    assert server.call(server.engine.health()).num_steps == num_steps + 1


@pytest.mark.parametrize("num_tokens", [1, 2, 24])
def test_scores_of_a_reply_equal_the_models_distribution(
    server: Server, socket: ClientConnection, num_tokens: int
) -> None:
    first = ask(socket, input="Hello", instructions=SYSTEM)
    location = {"instructions": SYSTEM, "previous_response_id": first["id"]}
    response = ask(socket, input="And?", **location, seed=2, max_output_tokens=num_tokens, ignore_eos=True)
    prompt, reply = stored_ids(server, response)
    plain, listed = get(server, tokens_path(response)), get(server, f"{tokens_path(response)}?top=3")
    assert len(listed["data"]) == len(reply) == num_tokens
    for index, (span, each) in enumerate(zip(plain["data"], listed["data"], strict=True)):
        assert {name: each[name] for name in span} == span
        assert "token" not in span
        expected = log_softmax(server.runner.logits(history_of([*prompt, *reply[:index]])))
        order = (-expected).argsort(kind="stable").tolist()
        rank = order.index(reply[index]) + 1
        token = each["token"]
        assert (token["id"], token["rank"]) == (reply[index], rank if rank <= 3 else None)
        assert token["logprob"] == pytest.approx(float(expected[reply[index]]), abs=1e-6)
        assert [other["id"] for other in each["alternatives"]] == order[:3]
    assert listed["usage"]["cached_tokens"] == len(prompt) - 1, "only the reply was computed again"
    assert listed["usage"]["input_tokens"] == len(prompt) + num_tokens - 1
    alone = get(server, f"{tokens_path(response)}?top=0")
    assert [each["token"]["logprob"] for each in alone["data"]] == [each["token"]["logprob"] for each in listed["data"]]
    assert all(each["alternatives"] == [] for each in alone["data"])
    status, _, answer = server.request("GET", f"{tokens_path(response)}?top=21")
    assert (status, answer["error"]["param"]) == (400, "top")


def test_alternatives_use_the_cached_shared_prompt(shared: Server) -> None:
    body = {"input": "Hi", "instructions": DECLARED, "max_output_tokens": 6, "ignore_eos": True}
    response = shared.request("POST", "/v1/responses", body, ONE)[2]
    look = get(shared, f"{tokens_path(response)}/4", ONE)
    assert look["usage"]["cached_tokens"] == look["usage"]["input_tokens"] - 1
    for path in ("", "/4"):
        status, _, answer = shared.request("GET", f"{tokens_path(response)}{path}", headers=TWO)
        assert status == 404, answer


@pytest.mark.parametrize("fork_at", [0, 1, 6, 15, 16])
def test_fork_with_another_token_continues_the_reply(server: Server, socket: ClientConnection, fork_at: int) -> None:
    response = ask(socket, input="Hello", **GREEDY, instructions=SYSTEM, max_output_tokens=16)
    prompt, reply = stored_ids(server, response)
    look = get(server, f"{tokens_path(response)}/{min(fork_at, 15)}")
    chosen = next(each["id"] for each in look["alternatives"][1:] if not each["ends"])
    location = {"previous_item_id": response["output"][0]["id"], "fork_at": fork_at, "fork_with": chosen}
    fork = ask(socket, **location, **{**GREEDY, "temperature": 1}, n=2, seed=5, max_output_tokens=9)
    begun = [*reply[:fork_at], chosen]
    assert fork["usage"]["input_tokens"] == len(prompt) + len(begun)
    assert cached(fork) == len(prompt) + min(fork_at, 15), "the last token of a reply is never computed"
    for index in (0, 1):
        _, ids = stored_ids(server, fork, index)
        assert ids[: len(begun)] == begun and len(ids) == len(begun) + 9
        assert (
            text_of(fork, index)
            == tiny_tokenizer().decode([*prompt, *ids], skip_special_tokens=False)[
                len(tiny_tokenizer().decode(prompt, skip_special_tokens=False)) :
            ]
        )
    stored = items_of(server, fork)
    assert len({stored[each["output"][0]["id"]]["parent_id"] for each in (response, fork)}) == 1
    # The continuation equals that of a client that sends this text as history.
    greedy = ask(socket, **location, **GREEDY, max_output_tokens=5)
    _, ids = stored_ids(server, greedy)
    shown_text: list[int] = []
    for _ in range(5):
        shown_text.append(int(server.runner.logits(history_of([*prompt, *begun, *shown_text])).argmax()))
    assert ids[len(begun) :] == shown_text
    # And it is a reply like any other: forked again, and looked at.
    again = ask(socket, previous_item_id=greedy["output"][0]["id"], fork_at=len(begun) + 2, **GREEDY)
    assert text_of(again).startswith(text_of(greedy).rstrip("\ufffd")[: fork_at + 1])
    assert get(server, f"{tokens_path(greedy)}/{fork_at}")["token"]["id"] == chosen


def test_fork_inside_a_character_completes_it(tmp_path: Path) -> None:
    with scripted(tmp_path, "hermes") as server:
        (script,) = server.say("a𐐷b")
        assert len(script) > 4, "the character is several tokens"
        response = server.post("/v1/responses", input="Hi")[2]
        assert text_of(response) == "a𐐷b"
        for fork_at in range(1, len(script) - 1):
            server.runner.say([[*script[fork_at + 1 :], server.tokenizer.eos_token_ids[0]]])  # type: ignore[attr-defined]
            location = {
                "previous_item_id": response["output"][0]["id"],
                "fork_at": fork_at,
                "fork_with": script[fork_at],
            }
            fork = server.post("/v1/responses", **location, stop=["never"] if fork_at % 2 else None)[2]
            assert text_of(fork) == "a𐐷b"
            assert stored_ids(server, fork)[1] == script
        data = get(server, tokens_path(response))["data"]
        spans = [(each["start"], each["end"]) for each in data]
        assert spans == [(0, 1), *[(1, 1)] * (len(script) - 3), (1, 2), (2, 3)]
        server.wait_idle()


def test_fork_inside_reasoning_continues_the_reasoning(tmp_path: Path) -> None:
    with scripted(tmp_path, "qwen3") as server:
        (script,) = server.say("<think>one two three</think>Yes.")
        response = server.post("/v1/responses", input="Hi")[2]
        item_id = response["output"][1]["id"]
        data = get(server, tokens_path(response, 1))["data"]
        num_thought = sum(each["start"] is None for each in data)
        assert data[num_thought]["start"] == 0 and data[-1]["end"] == len("Yes.")
        (other,) = server.tokenizer.encode("w")
        server.say("ell</think>No.")
        fork = server.post("/v1/responses", previous_item_id=item_id, fork_at=2, fork_with=other)[2]
        thought, message = fork["output"]
        assert message["content"][0]["text"] == "No."
        assert thought["content"][0]["text"] == server.tokenizer.decode([*script[1:2], other]).strip() + "ell"
        server.wait_idle()


def test_fork_of_a_running_reply_continues_with_another_token(server: Server, url: str) -> None:
    with slowed(server, 0.05), connect(url) as growing, connect(url) as forking:
        origin, items = begin(growing, 12, max_output_tokens=200)
        for fork_at, location in ((3, {"previous_response_id": origin["id"]}), (0, {"previous_item_id": items[0]})):
            fork = ask(forking, **location, fork_at=fork_at, fork_with=70, **GREEDY, max_output_tokens=4)
            _, ids = stored_ids(server, fork)
            assert ids[fork_at] == 70 and len(ids) == fork_at + 5
        send(growing, "response.cancel", response_id=origin["id"])
        while (end := receive(growing))["type"] != "response.incomplete":
            pass
        prompt, reply = stored_ids(server, end["response"])
        assert cached(fork) == len(prompt) and len(reply) > 12


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"fork_with": 5}, "fork_with"),
        ({"fork_at": 1, "fork_with": 5, "input": "x"}, "fork_with"),
        ({"fork_at": 1, "fork_with": 5, "input": ""}, "fork_with"),
        ({"fork_at": 1, "fork_with": 10**6}, "fork_with"),
        ({"fork_at": 1, "fork_with": -1}, "fork_with"),
        ({"fork_at": 1, "fork_with": "a"}, "fork_with"),
        ({"fork_at": 1, "fork_with": tiny_tokenizer().eos_token_ids[0]}, "fork_with"),
        ({"fork_at": 9, "fork_with": 5}, "fork_at"),
        ({"fork_at": 0}, "fork_at"),
    ],
)
def test_fork_with_invalid_tokens_is_refused(
    server: Server, socket: ClientConnection, fields: Frame, param: str
) -> None:
    response = ask(socket, input="Hello", **GREEDY)
    send(socket, previous_item_id=response["output"][0]["id"], **fields)
    error = receive(socket)["error"]
    assert error["param"] == param and param in error["message"]
    send(socket, fork_at=1, fork_with=5)
    assert receive(socket)["error"]["param"] == "fork_at"
    assert server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], fork_with=5)[0] == 400


def test_invalid_token_requests_are_refused(server: Server, socket: ClientConnection) -> None:
    response = ask(socket, input="Hello", **GREEDY)
    described = Described(server.request("GET", "/openapi.json")[2])
    path = tokens_path(response)
    user = path.replace(response["output"][0]["id"], response["input_item_ids"][0])
    for where, status, param in (
        (f"{path}/8", 400, "index"),
        (f"{path}/-1", 400, "index"),
        (f"{path}/x", 400, "index"),
        (f"{path}/{'9' * 5000}", 400, "index"),
        (f"{path}/1?top=0", 400, "top"),
        (f"{path}/1?top=21", 400, "top"),
        (f"{path}/1?top=", 400, "top"),
        (user, 400, "item_id"),
        (f"{user}/0", 400, "item_id"),
        (path.replace("msg_", "msg_0"), 404, "item_id"),
        (path.replace("conv_", "conv_0"), 404, "conversation"),
    ):
        got, _, answer = server.request("GET", where)
        assert (got, answer["error"]["param"]) == (status, param), (where, answer)
        described.check("GET", where, got, answer)
    for where in (path, f"{path}/1"):
        described.check("GET", where, 200, get(server, where))


def test_tokens_of_a_reply_with_deleted_history_are_refused(server: Server, socket: ClientConnection) -> None:
    """The reply's history was deleted, so its tokens now follow another one."""
    first = ask(socket, input="Hello")
    response = ask(socket, input="And?", previous_response_id=first["id"])
    conversation = f"/v1/conversations/{response['conversation']['id']}"
    assert server.request("DELETE", f"{conversation}/items/{first['output'][0]['id']}")[0] == 200
    for path in ("", "/0"):
        status, _, answer = server.request("GET", f"{tokens_path(response)}{path}")
        assert (status, answer["error"]["param"]) == (400, "item_id")
