"""The cache seen from outside: the map of its pages, and how warm conversations are."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from websockets.sync.client import ClientConnection

from chatcache.conversations.turns import ConversationPrompts
from chatcache.types.stats import PackedPrompt
from tests.gateway.frames import LONG, receive, send, until_end
from tests.gateway.serving import PAGE_SIZE, Server, post_bytes, slowed, tiny_tokenizer, wait_until
from tests.gateway.test_rest import converse
from tests.gateway.test_tenants import DECLARED, ONE, TWO, shared

__all__ = ["shared"]

CHAT = "/v1/chat/completions"
MAP = "/v1/cache/map"
WARMTH = "/v1/cache/warmth"


def test_page_map_shows_the_pages_of_a_running_response(server: Server, socket: ClientConnection) -> None:
    def letters() -> Counter[str]:
        status, _, pages = server.request("GET", MAP)
        assert (status, pages["object"], pages["page_size"]) == (200, "cache.map", PAGE_SIZE)
        assert len(pages["cells"]) == pages["num_pages"] == server.num_pages - 1 and pages["pages_per_cell"] == 1
        return Counter(pages["cells"])

    def is_forked() -> bool:
        """Whether each candidate has a page of its own: the last page of the prompt is shared until they write."""
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
        mine, theirs = look(ONE), look(TWO)
        assert theirs["a"] == theirs["s"] == 0
        assert theirs["o"] >= mine["a"] and theirs["i"] == idle > 0
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
    told = warmth(server, *ids)
    assert list(told) == [ids[0], ids[2]], "those that are there, in the order of the question"
    for response in (first, other):
        tokens, cached = told[response["conversation"]["id"]]
        usage = response["usage"]
        # The last token of a reply is never computed.
        assert (tokens, cached) == (usage["total_tokens"], usage["total_tokens"] - 1)
    assert warmth(server, *ids) == told == warmth(server, *ids, ids[0])
    body = {"previous_response_id": first["id"], "instructions": "Be exact.", "input": "Is it?"}
    explained = server.request("POST", "/v1/cache/explain", body)[2]
    assert explained["cached_tokens"] >= told[ids[0]][1]
    assert server.call(server.engine.reset_prefix_cache())
    cold = warmth(server, *ids)
    assert cold == {name: (tokens, 0) for name, (tokens, _) in told.items()}
    usage = converse(server, "Is it?", previous_response_id=first["id"], instructions="Be exact.")["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 0
    assert warmth(server, ids[0])[ids[0]][1] >= usage["input_tokens"]


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
    status, _, mine = shared.request("POST", "/v1/responses", {"input": "Mine", "max_output_tokens": 3}, ONE)
    assert status == 200, mine
    name = mine["conversation"]["id"]
    assert warmth(shared, name, key=TWO) == {}
    assert warmth(shared, name, key=ONE)[name][1] > 0
    same = {"input": "Mine", "max_output_tokens": 3, "generate": False}
    theirs = shared.request("POST", "/v1/responses", {**same, "instructions": "Nobody said this."}, TWO)[2]
    assert warmth(shared, theirs["conversation"]["id"], name, key=TWO).keys() == {theirs["conversation"]["id"]}
    assert shared.request("POST", WARMTH, {"conversations": [name]})[0] == 401


def test_conversation_prompts_are_cached_until_a_change_and_up_to_a_size(server: Server) -> None:
    model = server.gateway.model
    assert model is not None and server.gateway.store is not None
    store, histories = server.gateway.store, ConversationPrompts(model.conversations, max_kept_bytes=700)
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
