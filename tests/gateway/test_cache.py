"""Asking about the cache: what is told beforehand is what then happens, and nobody is told of others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from websockets.sync.client import ClientConnection

from tests.gateway.frames import LONG, ask, receive, send, until_end
from tests.gateway.serving import PAGE_SIZE, Server, post_bytes, slowed, tiny_tokenizer, wait_until
from tests.gateway.test_tenants import DECLARED, ONE, OWN, TWO, shared

__all__ = ["shared"]

CHAT = "/v1/chat/completions"
EXPLAIN = "/v1/cache/explain"
ACCOUNTS = "/v1/cache/accounts"


def explain(server: Server, headers: dict[str, str] | None = None, **body: object) -> dict[str, Any]:
    status, _, answer = server.request("POST", EXPLAIN, body, headers)
    assert status == 200, answer
    explanation: dict[str, Any] = answer
    return explanation


def test_explanation_predicts_the_cached_tokens(server: Server) -> None:
    messages = [{"role": "system", "content": "Explain yourself. " * 5}, {"role": "user", "content": "Why is it so?"}]
    cold = explain(server, messages=messages)
    assert cold["miss"]["reason"] == "never_computed" and cold["miss"]["at_token"] == cold["cached_tokens"]
    for _ in range(2):
        told = explain(server, messages=messages)
        assert explain(server, messages=messages) == told, "asking changes nothing"
        usage = server.post(CHAT, messages=messages, max_tokens=1, ignore_eos=True)[2]["usage"]
        assert told["prompt_tokens"] == usage["prompt_tokens"]
        assert told["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert told["miss"] is None and {page["state"] for page in told["pages"]} <= {"idle", "partial"}
    assert sum(page["tokens"] for page in told["pages"]) >= told["cached_tokens"]
    assert told["page_size"] == PAGE_SIZE


def test_explanation_splits_cached_tokens_by_message(server: Server) -> None:
    messages = [{"role": "system", "content": "Shares. " * 5}, {"role": "user", "content": "One?"}]
    server.post(CHAT, messages=messages, max_tokens=1)
    changed = [messages[0], {"role": "user", "content": "Another question altogether"}]
    told = explain(server, messages=changed)
    first, second = told["messages"]
    assert first["tokens"] == first["cached_tokens"] and second["cached_tokens"] < second["tokens"]
    assert first["role"] == "system" and first["tokens"] + second["tokens"] <= told["prompt_tokens"]
    assert first["cached_tokens"] + second["cached_tokens"] == told["cached_tokens"]
    assert told["miss"]["reason"] == "diverged" and told["miss"]["cached_text"].startswith("One")
    assert told["miss"]["text"].startswith("An")


def test_explanation_of_text_equals_that_of_its_token_ids(server: Server) -> None:
    ids = tiny_tokenizer().encode("How much wood would a woodchuck", add_special_tokens=True)
    server.post("/v1/completions", prompt=ids, max_tokens=1)
    by_text, by_ids = explain(server, prompt="How much wood would a woodchuck"), explain(server, prompt=ids)
    assert by_text == by_ids and by_ids["messages"] is None
    assert by_ids["cached_tokens"] == len(ids) - 1


def test_explanation_of_a_stored_conversation_predicts_its_next_turn(server: Server, socket: ClientConnection) -> None:
    first = ask(socket, input="Remember the red door", instructions="Be exact.")
    told = explain(server, previous_response_id=first["id"], input="Which door?", instructions="Be exact.")
    assert [message["role"] for message in told["messages"]] == ["system", "user", "assistant", "user"]
    then = ask(socket, previous_response_id=first["id"], input="Which door?", instructions="Be exact.")
    assert told["prompt_tokens"] == then["usage"]["input_tokens"]
    assert told["cached_tokens"] == then["usage"]["input_tokens_details"]["cached_tokens"]
    items = server.request("GET", f"/v1/conversations/{first['conversation']['id']}/items")[2]["data"]
    assert len(items) == 4, "asking stored nothing"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "messages"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "messages"),
        ({"prompt": [10**6]}, 400, "prompt"),
        ({"prompt": "x", "instructions": "y"}, 400, "instructions"),
        ({"input": "x", "previous_item_id": "msg_x", "fork_at": 1}, 400, "fork_at"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [1] * 5000}, 400, "prompt"),
        ({"prompt": 5}, 400, "prompt"),
        ({"messages": []}, 400, "messages"),
        ({"input": "x", "previous_response_id": "resp_nobody"}, 404, "previous_response_id"),
        ({"prompt": "x", "model": "other"}, 404, "model"),
    ],
)
def test_invalid_explain_requests_are_refused(server: Server, body: dict[str, object], status: int, param: str) -> None:
    got, _, answer = server.request("POST", EXPLAIN, body)
    assert (got, answer["error"]["param"]) == (status, param), answer


def test_explanation_hides_pages_of_other_tenants(shared: Server) -> None:
    system = {"role": "system", "content": OWN}
    body = {"messages": [system, {"role": "user", "content": "The merger is on friday"}]}
    assert shared.request("POST", CHAT, {**body, "max_tokens": 1}, ONE)[0] == 200
    mine, theirs = explain(shared, ONE, **body), explain(shared, TWO, **body)
    assert mine["miss"] is None
    assert theirs["miss"]["reason"] in ("never_computed", "diverged")
    assert "one" not in theirs["miss"]["detail"] and "merger" not in str(theirs["miss"]["cached_text"])
    assert theirs["cached_tokens"] <= 8 and not any(page["public"] for page in theirs["pages"])
    declared = {"messages": [{"role": "system", "content": DECLARED}, {"role": "user", "content": "x"}]}
    assert shared.request("POST", CHAT, {**declared, "max_tokens": 1}, ONE)[0] == 200
    told = explain(shared, TWO, **declared)
    num_public = told["public_tokens"] // PAGE_SIZE
    assert [page["public"] for page in told["pages"]] == [True] * num_public + [False] * (
        len(told["pages"]) - num_public
    )
    assert told["cached_tokens"] >= num_public * PAGE_SIZE


def test_page_accounts_of_an_open_server_add_up(server: Server, socket: ClientConnection) -> None:
    with slowed(server, 0.01):
        send(socket, **LONG, n=3)
        response = receive(socket)["response"]
        while receive(socket)["type"] != "response.output_text.delta":
            pass
        held = server.request("GET", ACCOUNTS)[2]
        assert held["scope"] == "server" and held["page_bytes"] > 0
        assert [charge["id"] for charge in held["requests"]] == [response["id"]]
        assert [charge["id"] for charge in held["conversations"]] == [response["conversation"]["id"]]
        assert held["requests"][0]["pages"] == held["pages_in_use"] > 0
        assert sum(held["pool"][state] for state in ("active", "shared", "cached", "free")) == server.num_pages - 1
        assert held["pool"]["active"] + held["pool"]["shared"] > 0 and held["pool"]["page_size"] == PAGE_SIZE
        send(socket, "response.cancel", response_id=response["id"])
        until_end(socket)
    wait_until(lambda: server.request("GET", ACCOUNTS)[2]["pages_in_use"] == 0, "no page in use")


def test_page_accounts_of_a_tenant_show_its_own_pages(shared: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900, "ignore_eos": True, "stream": True}
    with slowed(shared, 0.01), shared.connect() as connection:
        data = json.dumps(body).encode()
        connection.sendall(post_bytes(shared.port, CHAT, data, f"authorization: {ONE['authorization']}\r\n"))
        connection.recv(4096)
        mine = shared.request("GET", ACCOUNTS, None, ONE)[2]
        theirs = shared.request("GET", ACCOUNTS, None, TWO)[2]
    assert mine["scope"] == theirs["scope"] == "tenant"
    assert "pool" not in mine and "pool" not in theirs
    assert len(mine["requests"]) == 1 and mine["requests"][0]["pages"] == mine["pages_in_use"] > 0
    assert (theirs["requests"], theirs["pages_in_use"]) == ([], 0)
    status, _, answer = shared.request("GET", ACCOUNTS)
    assert status == 401 and answer["error"]["code"] == "invalid_api_key"


def progress(page: ClientConnection, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A response, and what its page was told at the first token."""
    send(page, **{"max_output_tokens": 8, "ignore_eos": True, **fields})
    frames = until_end(page)
    told = next(f for f in frames if f["type"] == "response.progress" and f["phase"] == "decode")
    queued = next(f for f in frames if f["type"] == "response.progress")
    assert queued["phase"] == "queued" and "miss" not in queued
    return frames[-1]["response"], told


def test_progress_frame_reports_cached_tokens_and_copied_pages(server: Server, page: ClientConnection) -> None:
    _, cold = progress(page, input="An entirely new question", instructions="Take your time.", explain=True)
    assert cold["cached_tokens"] < 3 * PAGE_SIZE and cold["copied_pages"] == (cold["cached_tokens"] % PAGE_SIZE > 0)
    assert cold["miss"]["reason"] in ("never_computed", "diverged")
    assert set(cold["miss"]) == {"reason", "at_token", "detail"}
    first, silent = progress(page, input="An entirely new question", instructions="Take your time.", n=2)
    assert "miss" not in silent and "copied_pages" not in silent
    place = {"previous_response_id": first["id"], "instructions": "Take your time."}
    expected = explain(server, input="And then?", **place)["miss"]
    _, told = progress(page, input="And then?", **place, explain=True)
    assert told["miss"] == {name: expected[name] for name in ("reason", "at_token", "detail")}
    assert told["miss"]["at_token"] == told["cached_tokens"] < told["input_tokens"] - 1


def test_fork_at_a_token_copies_one_page_and_computes_nothing(server: Server, page: ClientConnection) -> None:
    origin, _ = progress(page, input="Fork me", max_output_tokens=20)
    for fork_at in range(3, 9):
        place = {"previous_item_id": origin["output"][0]["id"], "fork_at": fork_at, "fork_with": 80}
        _, told = progress(page, **place, n=3, explain=True)
        assert told["miss"] is None and told["cached_tokens"] == told["input_tokens"] - 1, "but for the token itself"
        assert told["copied_pages"] == (told["cached_tokens"] % PAGE_SIZE > 0)


def test_explain_field_without_the_extended_protocol_is_refused(server: Server, socket: ClientConnection) -> None:
    send(socket, input="x", explain=True)
    assert receive(socket)["error"]["param"] == "explain"
    for path in ("/v1/responses", "/v1/chat/completions"):
        body = {"input": "x"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "x"}]}
        assert server.post(path, **body, explain=True)[2]["error"]["param"] == "explain"
        assert server.post(path, **body, explain=False, max_tokens=1)[0] == 200
