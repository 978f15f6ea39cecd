"""Cache routes: explanations come true, and no tenant learns about another one."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgspec
import pytest
from websockets.sync.client import ClientConnection

from chatcache.conversations.turns import ConversationPrompts
from chatcache.gateway.api.cache import _accounts
from chatcache.types.stats import PackedPrompt, PageAccounts, SlotUsage
from tests.gateway.frames import LONG, ask, receive, send, until_end
from tests.gateway.serving import PAGE_SIZE, Server, post_bytes, slowed, tiny_tokenizer, wait_until
from tests.gateway.test_rest import converse
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
        reported = explain(server, messages=messages)
        assert explain(server, messages=messages) == reported, "asking changes nothing"
        usage = server.post(CHAT, messages=messages, max_tokens=1, ignore_eos=True)[2]["usage"]
        assert reported["prompt_tokens"] == usage["prompt_tokens"]
        assert reported["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert reported["miss"] is None and {page["state"] for page in reported["pages"]} <= {"idle", "partial"}
    assert sum(page["tokens"] for page in reported["pages"]) >= reported["cached_tokens"]
    assert reported["page_size"] == PAGE_SIZE


def test_explanation_splits_cached_tokens_by_message(server: Server) -> None:
    messages = [{"role": "system", "content": "Shares. " * 5}, {"role": "user", "content": "One?"}]
    server.post(CHAT, messages=messages, max_tokens=1)
    changed = [messages[0], {"role": "user", "content": "Another question altogether"}]
    reported = explain(server, messages=changed)
    first, second = reported["messages"]
    assert first["tokens"] == first["cached_tokens"] and second["cached_tokens"] < second["tokens"]
    assert first["role"] == "system" and first["tokens"] + second["tokens"] <= reported["prompt_tokens"]
    assert first["cached_tokens"] + second["cached_tokens"] == reported["cached_tokens"]
    assert reported["miss"]["reason"] == "diverged" and reported["miss"]["cached_text"].startswith("One")
    assert reported["miss"]["text"].startswith("An")


def test_explanation_of_text_equals_that_of_its_token_ids(server: Server) -> None:
    ids = tiny_tokenizer().encode("How much wood would a woodchuck", add_special_tokens=True)
    server.post("/v1/completions", prompt=ids, max_tokens=1)
    by_text, by_ids = explain(server, prompt="How much wood would a woodchuck"), explain(server, prompt=ids)
    assert by_text == by_ids and by_ids["messages"] is None
    assert by_ids["cached_tokens"] == len(ids) - 1


def test_explanation_of_a_stored_conversation_predicts_its_next_turn(server: Server, socket: ClientConnection) -> None:
    first = ask(socket, input="Remember the red door", instructions="Be exact.")
    reported = explain(server, previous_response_id=first["id"], input="Which door?", instructions="Be exact.")
    assert [message["role"] for message in reported["messages"]] == ["system", "user", "assistant", "user"]
    then = ask(socket, previous_response_id=first["id"], input="Which door?", instructions="Be exact.")
    assert reported["prompt_tokens"] == then["usage"]["input_tokens"]
    assert reported["cached_tokens"] == then["usage"]["input_tokens_details"]["cached_tokens"]
    items = server.request("GET", f"/v1/conversations/{first['conversation']['id']}/items")[2]["data"]
    assert len(items) == 4, "asking stored nothing"


def test_page_texts_are_the_text_of_the_cached_part_of_the_prompt(server: Server) -> None:
    ids = tiny_tokenizer().encode("Texts of pages: " + "the quick brown fox jumps. " * 4, add_special_tokens=True)
    server.post("/v1/completions", prompt=ids, max_tokens=1)
    asked = [*ids, *ids[1:40]]
    pages = explain(server, prompt=asked, page_texts=True)["pages"]
    cells = server.request("GET", MAP)[2]["cells"]
    cached = [page for page in pages if page["state"] != "missing"]
    assert len(cached) == -(-len(ids) // PAGE_SIZE) < len(pages)
    assert len({page["map_index"] for page in cached}) == len(cached)
    assert {cells[page["map_index"]] for page in cached} == {"i"}
    for page in cached:
        start = page["index"] * PAGE_SIZE
        part = asked[start : start + page["tokens"]]
        assert page["text"] == tiny_tokenizer().decode(part, skip_special_tokens=False)
    assert [page for page in pages if page["state"] == "missing" and ("text" in page or page["map_index"])] == []
    assert not any("text" in page for page in explain(server, prompt=asked)["pages"]), "only on request"


def test_page_texts_never_come_from_the_pages_of_another_tenant(shared: Server) -> None:
    body = {"messages": [{"role": "system", "content": OWN}, {"role": "user", "content": "The password is swordfish"}]}
    assert shared.request("POST", CHAT, {**body, "max_tokens": 1}, ONE)[0] == 200
    own = explain(shared, ONE, **body, page_texts=True)
    assert "swordfish" in "".join(page.get("text", "") for page in own["pages"])
    guess = {"messages": [body["messages"][0], {"role": "user", "content": "The password is"}]}
    theirs = explain(shared, TWO, **guess, page_texts=True)
    shown = shared.request("GET", MAP, None, TWO)[2]["cells"]
    assert "swordfish" not in json.dumps(theirs)
    places = {page["map_index"] for page in own["pages"]} - {None}
    assert places and places.isdisjoint(page["map_index"] for page in theirs["pages"])
    assert {shown[place] for place in places} == {"o"}


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
    own, theirs = explain(shared, ONE, **body), explain(shared, TWO, **body)
    assert own["miss"] is None
    assert theirs["miss"]["reason"] in ("never_computed", "diverged")
    assert "one" not in theirs["miss"]["detail"] and "merger" not in str(theirs["miss"]["cached_text"])
    assert theirs["cached_tokens"] <= 8 and not any(page["public"] for page in theirs["pages"])
    declared = {"messages": [{"role": "system", "content": DECLARED}, {"role": "user", "content": "x"}]}
    assert shared.request("POST", CHAT, {**declared, "max_tokens": 1}, ONE)[0] == 200
    reported = explain(shared, TWO, **declared)
    num_public = reported["public_tokens"] // PAGE_SIZE
    assert [page["public"] for page in reported["pages"]] == [True] * num_public + [False] * (
        len(reported["pages"]) - num_public
    )
    assert reported["cached_tokens"] >= num_public * PAGE_SIZE


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
        slots = held["pool"]["slots"]
        assert sum(slots.values()) == pytest.approx(1, abs=1e-5) and set(slots) == set(SlotUsage().shares())
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
        own = shared.request("GET", ACCOUNTS, None, ONE)[2]
        theirs = shared.request("GET", ACCOUNTS, None, TWO)[2]
    assert own["scope"] == theirs["scope"] == "tenant"
    assert "pool" not in own and "pool" not in theirs
    assert len(own["requests"]) == 1 and own["requests"][0]["pages"] == own["pages_in_use"] > 0
    assert (theirs["requests"], theirs["pages_in_use"]) == ([], 0)
    status, _, answer = shared.request("GET", ACCOUNTS)
    assert status == 401 and answer["error"]["code"] == "invalid_api_key"


def progress(page: ClientConnection, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a response; return it and the progress frame of its first token."""
    send(page, **{"max_output_tokens": 8, "ignore_eos": True, **fields})
    frames = until_end(page)
    reported = next(f for f in frames if f["type"] == "response.progress" and f["phase"] == "decode")
    queued = next(f for f in frames if f["type"] == "response.progress")
    assert queued["phase"] == "queued" and "miss" not in queued
    return frames[-1]["response"], reported


def test_progress_frame_reports_cached_tokens_and_copied_pages(server: Server, page: ClientConnection) -> None:
    _, cold = progress(page, input="An entirely new question", instructions="Take your time.", explain=True)
    assert cold["cached_tokens"] < 3 * PAGE_SIZE and cold["copied_pages"] == (cold["cached_tokens"] % PAGE_SIZE > 0)
    assert cold["miss"]["reason"] in ("never_computed", "diverged")
    assert set(cold["miss"]) == {"reason", "at_token", "detail"}
    first, silent = progress(page, input="An entirely new question", instructions="Take your time.", n=2)
    assert "miss" not in silent and "copied_pages" not in silent
    location = {"previous_response_id": first["id"], "instructions": "Take your time."}
    expected = explain(server, input="And then?", **location)["miss"]
    _, reported = progress(page, input="And then?", **location, explain=True)
    assert reported["miss"] == {name: expected[name] for name in ("reason", "at_token", "detail")}
    assert reported["miss"]["at_token"] == reported["cached_tokens"] < reported["input_tokens"] - 1


def test_fork_at_a_token_copies_one_page_and_computes_nothing(server: Server, page: ClientConnection) -> None:
    origin, _ = progress(page, input="Fork me", max_output_tokens=20)
    for fork_at in range(3, 9):
        location = {"previous_item_id": origin["output"][0]["id"], "fork_at": fork_at, "fork_with": 80}
        _, reported = progress(page, **location, n=3, explain=True)
        assert reported["miss"] is None and reported["cached_tokens"] == reported["input_tokens"] - 1, (
            "but for the token itself"
        )
        assert reported["copied_pages"] == (reported["cached_tokens"] % PAGE_SIZE > 0)


def test_explain_field_without_the_extended_protocol_is_refused(server: Server, socket: ClientConnection) -> None:
    send(socket, input="x", explain=True)
    assert receive(socket)["error"]["param"] == "explain"
    for path in ("/v1/responses", "/v1/chat/completions"):
        body = {"input": "x"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "x"}]}
        assert server.post(path, **body, explain=True)[2]["error"]["param"] == "explain"
        assert server.post(path, **body, explain=False, max_tokens=1)[0] == 200


# The page map, and the cached part of conversations


MAP = "/v1/cache/map"
WARMTH = "/v1/cache/warmth"


def test_page_map_shows_the_pages_of_a_running_response(server: Server, socket: ClientConnection) -> None:
    def letters() -> Counter[str]:
        status, _, pages = server.request("GET", MAP)
        assert (status, pages["object"], pages["page_size"]) == (200, "cache.map", PAGE_SIZE)
        assert len(pages["cells"]) == pages["num_pages"] == server.num_pages - 1 and pages["pages_per_cell"] == 1
        return Counter(pages["cells"])

    def is_forked() -> bool:
        """Whether each candidate has its own page: the last prompt page is shared until a write."""
        shown = letters()
        assert shown["o"] == shown["p"] == 0
        return shown["s"] > 0 and shown["a"] >= 3

    with slowed(server, 0.05):  # 900 steps take 45 s or longer, unless cancelled
        send(socket, **LONG, n=3)
        response = receive(socket)["response"]
        wait_until(is_forked, "shared pages and one page for each candidate", timeout_s=30.0)
        send(socket, "response.cancel", response_id=response["id"])
        until_end(socket)
    wait_until(lambda: letters()["a"] + letters()["s"] == 0, "no page in use")
    assert letters()["i"] > 0


def test_page_map_hides_the_use_of_other_tenants_pages(shared: Server) -> None:
    def look(key: dict[str, str]) -> Counter[str]:
        return Counter(shared.request("GET", MAP, None, key)[2]["cells"])

    body = {"messages": [{"role": "system", "content": DECLARED}, {"role": "user", "content": "Whose is this?"}]}
    assert shared.request("POST", CHAT, {**body, "max_tokens": 1}, TWO)[0] == 200
    idle = look(TWO)["i"]
    more = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900, "ignore_eos": True, "stream": True}
    with slowed(shared, 0.01), shared.connect() as connection:
        data = json.dumps(more).encode()
        connection.sendall(post_bytes(shared.port, CHAT, data, f"authorization: {ONE['authorization']}\r\n"))
        wait_until(lambda: look(ONE)["a"] > 0, "pages in use")
        own, theirs = look(ONE), look(TWO)
        assert theirs["a"] == theirs["s"] == 0
        assert theirs["o"] >= own["a"] and theirs["i"] == idle > 0
    status, _, answer = shared.request("GET", MAP)
    assert status == 401 and answer["error"]["code"] == "invalid_api_key"


def warmth(server: Server, *ids: str, key: dict[str, str] | None = None) -> dict[str, tuple[int, int]]:
    status, _, answer = server.request("POST", WARMTH, {"conversations": ids}, key)
    assert (status, answer["object"]) == (200, "list"), answer
    return {entry["conversation_id"]: (entry["tokens"], entry["cached_tokens"]) for entry in answer["data"]}


def test_warmth_equals_the_cached_tokens_of_the_next_turn(server: Server) -> None:
    first = converse(server, "The red door is shut", instructions="Be exact.", max_output_tokens=9, ignore_eos=True)
    other = converse(server, "Nothing to do with doors", max_output_tokens=3, ignore_eos=True)
    ids = first["conversation"]["id"], "conv_nobody", other["conversation"]["id"]
    reported = warmth(server, *ids)
    assert list(reported) == [ids[0], ids[2]], "those that are there, in the order of the question"
    for response in (first, other):
        tokens, cached = reported[response["conversation"]["id"]]
        usage = response["usage"]
        # The last token of a reply is never computed.
        assert (tokens, cached) == (usage["total_tokens"], usage["total_tokens"] - 1)
    assert warmth(server, *ids) == reported == warmth(server, *ids, ids[0])
    body = {"previous_response_id": first["id"], "instructions": "Be exact.", "input": "Is it?"}
    explained = server.request("POST", "/v1/cache/explain", body)[2]
    assert explained["cached_tokens"] >= reported[ids[0]][1]
    assert server.call(server.engine.reset_prefix_cache())
    cold = warmth(server, *ids)
    assert cold == {name: (tokens, 0) for name, (tokens, _) in reported.items()}
    place = {"previous_response_id": first["id"], "instructions": "Be exact."}
    usage = converse(server, "Is it?", max_output_tokens=PAGE_SIZE, ignore_eos=True, **place)["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 0
    assert warmth(server, ids[0])[ids[0]][1] >= usage["input_tokens"]


def test_warmth_after_an_empty_answer_is_that_of_its_prompt(server: Server) -> None:
    ended = {str(server.tokenizer.eos_token_ids[0]): 100}
    response = converse(server, "Say nothing", instructions="Be silent.", logit_bias=ended, temperature=0)
    usage, name = response["usage"], response["conversation"]["id"]
    assert usage["output_tokens"] == 1 and response["output"][0]["content"][0]["text"] == ""
    tokens, cached = warmth(server, name)[name]
    assert tokens == usage["input_tokens"] and tokens - PAGE_SIZE <= cached <= tokens


def test_warmth_of_a_branch_counts_its_path(server: Server) -> None:
    first = converse(server, "One beginning", max_output_tokens=5, ignore_eos=True)
    left = converse(server, "to the left", previous_response_id=first["id"], max_output_tokens=5, ignore_eos=True)
    name, leaf = first["conversation"]["id"], first["output"][0]["id"]
    assert warmth(server, name)[name][0] == left["usage"]["total_tokens"]
    assert server.request("POST", f"/v1/conversations/{name}", {"active_leaf": leaf})[0] == 200
    assert warmth(server, name)[name][0] == first["usage"]["total_tokens"]
    right = converse(server, "and to the right", previous_item_id=leaf, max_output_tokens=5, ignore_eos=True)
    assert warmth(server, name)[name][0] == right["usage"]["total_tokens"]


def test_warmth_of_an_unanswered_conversation_counts_its_prompt(server: Server) -> None:
    made = server.post("/v1/conversations")[2]["id"]
    assert warmth(server, made) == {made: (0, 0)}
    messages = [{"role": "user", "content": "Who has heard this before?"}]
    assert server.post(f"/v1/conversations/{made}/items", items=messages)[0] == 200
    ids = tiny_tokenizer().render_ids(messages, add_generation_prompt=True)
    cold = warmth(server, made)[made]
    assert cold[0] == len(ids) and cold[1] < len(ids) - 1
    assert server.post(CHAT, messages=messages, max_tokens=1)[0] == 200
    assert warmth(server, made) == {made: (len(ids), len(ids) - 1)}
    replied = [*messages, {"role": "assistant", "content": "Nobody."}]
    assert server.post(f"/v1/conversations/{made}/items", items=replied[1:])[0] == 200
    tokens, cached = warmth(server, made)[made]
    assert tokens > len(ids) and cached >= len(ids) - 1


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "conversations"),
        ({"conversations": "conv_x"}, 400, "conversations"),
        ({"conversations": [5]}, 400, "conversations[0]"),
        ({"conversations": [""]}, 400, "conversations[0]"),
        ({"conversations": ["x"] * 101}, 400, "conversations"),
        ({"conversations": ["x" * 129]}, 400, "conversations[0]"),
    ],
)
def test_invalid_warmth_requests_are_refused(server: Server, body: dict[str, object], status: int, param: str) -> None:
    got, _, answer = server.request("POST", WARMTH, body)
    assert (got, answer["error"]["param"]) == (status, param), answer
    assert server.request("POST", WARMTH, {"conversations": []})[2] == {"object": "list", "data": []}


def test_warmth_omits_conversations_of_other_tenants(shared: Server) -> None:
    status, _, own = shared.request("POST", "/v1/responses", {"input": "Mine", "max_output_tokens": 3}, ONE)
    assert status == 200, own
    name = own["conversation"]["id"]
    assert warmth(shared, name, key=TWO) == {}
    assert warmth(shared, name, key=ONE)[name][1] > 0
    same = {"input": "Mine", "max_output_tokens": 3, "generate": False}
    theirs = shared.request("POST", "/v1/responses", {**same, "instructions": "Nobody said this."}, TWO)[2]
    assert warmth(shared, theirs["conversation"]["id"], name, key=TWO).keys() == {theirs["conversation"]["id"]}
    assert shared.request("POST", WARMTH, {"conversations": [name]})[0] == 401


def test_conversation_prompts_are_cached_until_a_change_and_up_to_a_size(server: Server) -> None:
    model = server.gateway.model
    assert model is not None and server.gateway.store is not None
    store, histories = server.gateway.store, ConversationPrompts(model.conversations, max_cached_bytes=700)
    names = [
        converse(server, f"History {n}", max_output_tokens=9, ignore_eos=True)["conversation"]["id"] for n in range(9)
    ]

    async def ask(name: str) -> PackedPrompt:
        return await histories.get(store, "", name)

    first = server.call(ask(names[0]))
    assert server.call(ask(names[0])) is first, "not worked out again"
    assert server.request("POST", f"/v1/conversations/{names[0]}", {"title": "Changed"})[0] == 200
    again = server.call(ask(names[0]))
    assert again is not first and again == first
    for name in names:
        server.call(ask(name))
    kept = sum(len(prompt.tokens) for _, prompt in histories._cached.values())
    assert (
        kept == histories._cached_bytes <= 700 and names[-1] in histories._cached and names[0] not in histories._cached
    )


@pytest.mark.parametrize("tenant", [None, ("", {"one": "conv_1"})])
def test_accounts_of_a_hybrid_model_show_the_states_of_each_request(tenant: tuple[str, dict[str, str]] | None) -> None:
    held = PageAccounts(
        num_pages_in_use=3,
        page_bytes=64,
        requests={"one": 2.0, "other": 1.0},
        conversations={"conv_1": 2.0},
        namespaces={"": 3.0},
        states={"one": 1.5, "other": 0.5},
    )
    found = msgspec.to_builtins(_accounts(held, tenant))
    entries = [{"id": "one", "pages": 2.0, "states": 1.5}, {"id": "other", "pages": 1.0, "states": 0.5}]
    assert found["requests"] == (entries if tenant is None else entries[:1])
    assert found["conversations"] == [{"id": "conv_1", "pages": 2.0}]
