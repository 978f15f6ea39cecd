"""Items of conversations over HTTP: pages, branches, appending and deleting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection

from chatcache.config import ServerConfig
from chatcache.conversations.tree import plan_message_deletion
from chatcache.gateway.schemas.requests import MAX_NEW_ITEMS
from tests.gateway.frames import LONG, ask, items_of, receive, send, text_of, until_end
from tests.gateway.serving import PAGE_SIZE, Server, slowed

Json = dict[str, Any]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def texts(page: Json) -> list[str]:
    return [item["content"][0]["text"] for item in page["data"]]


@pytest.fixture
def talk(server: Server) -> Json:
    """A conversation of seven messages."""
    created = server.post("/v1/conversations", items=[user(f"m{number}") for number in range(7)])[2]
    assert isinstance(created, dict)
    return created


def get(server: Server, path: str) -> Json:
    status, _, answer = server.request("GET", path)
    assert status == 200, answer
    return answer  # type: ignore[no-any-return]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_pages_of_items_join_to_the_path(server: Server, talk: Json, order: str, limit: int) -> None:
    path, found = f"/v1/conversations/{talk['id']}/items?order={order}&limit={limit}", []
    page = get(server, path)
    for _ in range(8):
        found += texts(page)
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        if not page["has_more"]:
            break
        assert len(page["data"]) == limit
        page = get(server, f"{path}&after={page['last_id']}")
    want = [f"m{number}" for number in range(7)]
    assert found == (want if order == "asc" else want[::-1])
    newest_first = get(server, f"/v1/conversations/{talk['id']}/items")
    assert texts(newest_first) == want[::-1] and not newest_first["has_more"]


def test_items_of_all_branches_and_of_another_leaf_are_listed(server: Server, socket: ClientConnection) -> None:
    first = ask(socket, input="One", n=2)
    second = ask(socket, input="Two", previous_item_id=first["output"][1]["id"])
    path = f"/v1/conversations/{first['conversation']['id']}/items"
    everything = get(server, f"{path}?branches=all")["data"]
    assert [item["id"] for item in everything] == list(items_of(server, first))
    assert len(everything) == 5
    spoken = ["One", text_of(first, 1), "Two", text_of(second)]
    assert texts(get(server, f"{path}?order=asc")) == spoken
    other = get(server, f"{path}?order=asc&leaf={first['output'][0]['id']}")
    assert texts(other) == ["One", text_of(first)]
    for query in ("branches=some", "leaf=msg_x", "limit=0", "limit=101", "limit=x", "order=up", "after=msg_x"):
        status, _, answer = server.request("GET", f"{path}?{query}")
        assert status in (400, 404) and answer["error"]["param"] == query.split("=")[0], answer


def test_response_after_appended_messages_continues_them_from_the_cache(
    server: Server, socket: ClientConnection
) -> None:
    conversation = server.post("/v1/conversations", items=[user("Hello there")], metadata={"k": "v"})[2]
    assert conversation["title"] == "Hello there" and conversation["metadata"] == {"k": "v"}
    first = ask(socket, conversation=conversation["id"], max_output_tokens=20)
    status, _, added = server.post(
        f"/v1/conversations/{conversation['id']}/items",
        items=[{"role": "system", "content": "Be brief."}, user("And?")],
    )
    assert status == 200 and [item["role"] for item in added["data"]] == ["system", "user"]
    assert added["data"][0]["parent_id"] == first["output"][0]["id"]
    second = ask(socket, conversation=conversation["id"])
    history = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    assert history - PAGE_SIZE <= second["usage"]["input_tokens_details"]["cached_tokens"] <= history
    head = server.request("GET", f"/v1/conversations/{conversation['id']}")[2]
    assert head["active_leaf"] == second["output"][0]["id"]


def test_items_appended_to_an_inner_message_make_a_branch(server: Server, talk: Json) -> None:
    path = f"/v1/conversations/{talk['id']}/items"
    oldest = get(server, f"{path}?order=asc&limit=2")["data"]
    assert server.post(path, items=[user("beside")], parent_id=oldest[0]["id"])[0] == 200
    assert texts(get(server, f"{path}?order=asc")) == ["m0", "beside"]
    assert server.post(path, items=[user("afresh")], parent_id="root")[0] == 200
    assert texts(get(server, path)) == ["afresh"]
    assert len(get(server, f"{path}?branches=all")["data"]) == 9
    assert server.post(path, items=[user("x")], parent_id="msg_x")[0] == 404
    assert server.post(path, items=[user("x")], rev=0)[0] == 409
    refused: tuple[Json, ...] = ({}, {"items": []}, {"items": "x"}, {"items": [{"role": "nobody", "content": "x"}]})
    for bad in refused:
        assert server.post(path, **bad)[0] == 400
    assert len(get(server, f"{path}?branches=all")["data"]) == 9


def test_messages_after_a_deleted_message_follow_its_parent(server: Server, socket: ClientConnection) -> None:
    first = ask(socket, input="My secret is 4711", max_output_tokens=20)
    second = ask(socket, input="What did I say?", previous_response_id=first["id"], max_output_tokens=20)
    path = f"/v1/conversations/{first['conversation']['id']}"
    secret = first["input_item_ids"][0]
    head = server.request("DELETE", f"{path}/items/{secret}")[2]
    assert head["id"] == first["conversation"]["id"] and head["active_leaf"] == second["output"][0]["id"]
    assert texts(get(server, f"{path}/items?order=asc")) == [text_of(first), "What did I say?", text_of(second)]
    assert server.request("GET", f"{path}/items/{secret}")[0] == 404
    assert server.request("DELETE", f"{path}/items/{secret}")[0] == 404
    # The next prompt equals that of a client that never sent the deleted message.
    reported = server.post("/v1/cache/explain", previous_response_id=second["id"], input="So?")[2]
    alone = server.post(
        "/v1/cache/explain",
        messages=[
            {"role": "assistant", "content": text_of(first)},
            user("What did I say?"),
            {"role": "assistant", "content": text_of(second)},
            user("So?"),
        ],
    )[2]
    assert reported["prompt_tokens"] == alone["prompt_tokens"]
    third = ask(socket, previous_response_id=second["id"], input="So?")
    assert third["usage"]["input_tokens"] == reported["prompt_tokens"]
    send(socket, previous_item_id=second["output"][0]["id"], fork_at=2, input="x")
    refused = receive(socket)
    assert refused["status"] == 400 and refused["error"]["param"] == "fork_at"


def test_deleting_the_last_message_moves_the_active_leaf_to_its_parent(server: Server, talk: Json) -> None:
    path = f"/v1/conversations/{talk['id']}"
    for left in range(6, -1, -1):
        newest = get(server, f"{path}/items?limit=1")["data"][0]
        head = server.request("DELETE", f"{path}/items/{newest['id']}")[2]
        assert len(get(server, f"{path}/items")["data"]) == left
        assert head["active_leaf"] == newest["parent_id"]
    page = get(server, f"{path}/items")
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_deleting_a_message_under_a_running_response_is_a_409(server: Server, socket: ClientConnection) -> None:
    with slowed(server, 0.01):
        send(socket, input="Hi", ignore_eos=True)
        response = receive(socket)["response"]
        path = f"/v1/conversations/{response['conversation']['id']}/items/{response['input_item_ids'][0]}"
        status, headers, answer = server.request("DELETE", path)
        assert status == 409 and answer["error"]["code"] == "conversation_busy"
        assert headers["x-should-retry"] == "false"
        send(socket, "response.cancel", response_id=response["id"])
        while receive(socket)["type"] != "response.incomplete":
            pass
    assert server.request("DELETE", path)[0] == 200


def test_response_whose_prompt_has_lost_a_message_is_a_409_and_not_stored(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = server.post("/v1/responses", input="My name is Ada.", max_output_tokens=4)[2]
    second = server.post("/v1/responses", input="And?", previous_response_id=first["id"], max_output_tokens=4)[2]
    conversation, reply = first["conversation"]["id"], first["output"][0]["id"]
    asked = second["input_item_ids"][0]
    store = server.gateway.opened_store()
    append = store.append

    async def delete_and_append(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(store, "append", append)
        tree = await store.load("", conversation)
        await store.delete_messages("", conversation, plan_message_deletion(tree, reply))
        return await append(*args, **more)

    monkeypatch.setattr(store, "append", delete_and_append)
    before = get(server, f"/v1/conversations/{conversation}/items?branches=all")["data"]
    status, headers, answer = server.post("/v1/responses", previous_item_id=asked)
    assert (status, answer["error"]["code"]) == (409, "conversation_busy"), answer
    assert headers["x-should-retry"] == "false"
    left = get(server, f"/v1/conversations/{conversation}/items?branches=all")["data"]
    assert [item["id"] for item in left] == [item["id"] for item in before if item["id"] != reply]
    again = server.post("/v1/responses", previous_item_id=asked, max_output_tokens=4)[2]
    assert again["usage"]["input_tokens"] < second["usage"]["input_tokens"], "the prompt is without the message"
    exported = get(server, f"/v1/conversations/{conversation}/export")
    assert {turn["base_item_id"] for turn in exported["turns"]} <= {None, *(item["id"] for item in exported["items"])}
    server.request("DELETE", f"/v1/conversations/{conversation}")
    assert server.request("POST", "/v1/conversations/import", exported)[2]["data"][0]["status"] == "created"


def test_message_id_as_response_id_is_a_404(socket: ClientConnection) -> None:
    first = ask(socket, input="Hi")
    send(socket, input="x", previous_response_id=first["output"][0]["id"])
    refused = receive(socket)
    assert refused["status"] == 404 and refused["error"]["code"] == "previous_response_not_found"


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Server]:
    with Server(ServerConfig(db=str(tmp_path / "c.db"), api_keys=("one", "two"))) as server:
        yield server.wait_ready()


def test_items_of_another_tenant_are_a_404(locked: Server) -> None:
    own, theirs = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    head = locked.request("POST", "/v1/conversations", {"items": [user("Hi")]}, own)[2]
    path = f"/v1/conversations/{head['id']}/items"
    item = f"{path}/{head['active_leaf']}"
    for method, url, body in (
        ("GET", path, None),
        ("POST", path, {"items": [user("x")]}),
        ("GET", item, None),
        ("DELETE", item, None),
    ):
        status, _, answer = locked.request(method, url, body, theirs)
        assert status == 404 and answer["error"]["code"] == "not_found"
        assert locked.request(method, url, body)[0] == 401
    assert locked.request("GET", item, headers=own)[2]["content"] == [{"type": "input_text", "text": "Hi"}]
    for method, url in (("PUT", path), ("DELETE", path), ("POST", item), ("DELETE", "/v1/conversations")):
        status, headers, answer = locked.request(method, url, {}, own)
        assert status == 405 and answer["error"]["code"] == "method_not_allowed" and headers["allow"]


def test_pages_split_items_of_one_message(server: Server) -> None:
    """Reasoning and calls are items of their own; a page may end and begin between items of one message."""
    items: list[Json] = [user("ask")]
    for number in range(3):
        call = {"type": "function_call", "call_id": f"call_{number}", "name": "look", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": f"call_{number}", "output": f"found {number}"}
        items += [call, {**call, "call_id": f"other_{number}"}, result, {**result, "call_id": f"other_{number}"}]
        items.append(user(f"more {number}"))
    made = server.post("/v1/conversations", items=items)[2]
    path = f"/v1/conversations/{made['id']}/items"
    everything = get(server, f"{path}?limit=100&order=asc")["data"]
    assert len(everything) == len(items) and not get(server, f"{path}?limit={len(items)}")["has_more"]
    for order in ("asc", "desc"):
        for limit in (1, 2, 3):
            found: list[Json] = []
            after, has_more = "", True
            while has_more:
                page = get(server, f"{path}?order={order}&limit={limit}{after}")
                found += page["data"]
                after, has_more = f"&after={page['last_id']}", page["has_more"]
                assert len(page["data"]) == limit or not has_more
            assert found == (everything if order == "asc" else everything[::-1])
    for item in everything:
        assert get(server, f"{path}/{item['id']}") == item


def test_messages_of_all_branches_have_their_calls_and_outputs(server: Server) -> None:
    call = {"type": "function_call", "call_id": "call_a", "name": "look", "arguments": '{"at": 1}'}
    result = {"type": "function_call_output", "call_id": "call_a", "output": "found"}
    made = server.post("/v1/conversations", items=[user("ask"), call, {**call, "call_id": "call_b"}, result])[2]
    asked, answer, output = get(server, f"/v1/conversations/{made['id']}/items?branches=all")["data"]
    assert "calls" not in asked and "call_id" not in asked
    assert (answer["role"], "call_id" in answer) == ("assistant", False)
    calls = [(each["call_id"], each["name"], each["arguments"]) for each in answer["calls"]]
    assert calls == [("call_a", "look", '{"at": 1}'), ("call_b", "look", '{"at": 1}')]
    assert (output["role"], output["call_id"], output["content"][0]["text"]) == ("tool", "call_a", "found")
    assert output["parent_id"] == answer["id"] and "calls" not in output


def test_conversation_beyond_the_limit_of_messages_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatcache.conversations.turns.MAX_ITEMS", 8)
    talk = server.post("/v1/conversations", items=[user(f"m{number}") for number in range(7)])[2]
    path = f"/v1/conversations/{talk['id']}"
    status, _, answer = server.post(f"{path}/items", items=[user("a"), user("b")])
    assert status == 400 and answer["error"]["code"] == "conversation_full"
    assert "at most 8 messages" in answer["error"]["message"]
    asked = {"conversation": talk["id"], "max_output_tokens": 2}
    status, _, response = server.post("/v1/responses", input="the last", **asked)
    assert status == 200, "the reply of an accepted request is stored beyond the limit"
    status, _, answer = server.post("/v1/responses", input="one more", **asked)
    assert status == 400 and answer["error"]["code"] == "conversation_full"
    assert len(get(server, f"{path}/items?branches=all")["data"]) == 9
    assert get(server, f"/v1/responses/{response['id']}")["status"] in ("completed", "incomplete")
    server.wait_idle()


def test_number_of_messages_that_one_request_adds_is_limited(server: Server) -> None:
    status, _, talk = server.post("/v1/conversations", items=[])
    path, most = f"/v1/conversations/{talk['id']}/items", [user("m")] * MAX_NEW_ITEMS
    assert status == 200
    for route in ("/v1/conversations", path):
        status, _, answer = server.post(route, items=[*most, user("one more")])
        assert status == 400 and answer["error"]["param"] == "items" and "1024" in answer["error"]["message"]
    status, _, added = server.post(path, items=most)
    assert status == 200 and len({item["id"] for item in added["data"]}) == MAX_NEW_ITEMS
    assert get(server, f"{path}?order=asc&limit=100")["data"] == added["data"][:100]


def test_stored_answer_keeps_the_figures_of_its_response(server: Server, page: ClientConnection) -> None:
    send(page, input="Hello", max_output_tokens=8, ignore_eos=True, explain=True, n=2)
    frames = until_end(page)
    progress = next(each for each in frames if each["type"] == "response.progress" and each["phase"] == "decode")
    items = list(items_of(server, frames[-1]["response"]).values())
    assert "statistics" not in items[0] and "incomplete_details" not in items[1]
    for item in items[1:]:
        figures = item["statistics"]
        assert figures == frames[-1]["statistics"]
        assert figures["first_token_ms"] > 0 and figures["decode_ms"] > 0
        assert (figures["miss"], figures["copied_pages"]) == (progress["miss"], progress["copied_pages"])
        assert (figures["fork_at"], figures["receipt"]) == (None, None)
    fork = ask(page, previous_item_id=items[1]["id"], fork_at=3, fork_with=40)
    assert items_of(server, fork)[fork["output"][0]["id"]]["statistics"]["fork_at"] == 3


def test_stored_answer_keeps_the_receipt_of_its_cancel(server: Server, page: ClientConnection) -> None:
    with slowed(server, 0.05):
        send(page, **LONG)
        frame = receive(page)
        response = frame["response"]["id"]
        while frame["type"] != "response.output_text.delta":
            frame = receive(page)
        send(page, "response.cancel", response_id=response)
        end = until_end(page)[-1]
    answer = list(items_of(server, end["response"]).values())[-1]
    assert answer["finish_reason"] == "cancelled" and "incomplete_details" not in answer
    assert answer["statistics"]["receipt"] == end["receipt"]


def test_malformed_figures_of_an_imported_answer_are_left_out(server: Server, socket: ClientConnection) -> None:
    response = ask(socket, input="Hello")
    path = f"/v1/conversations/{response['conversation']['id']}"
    exported = get(server, f"{path}/export")
    exported["turns"][0]["echo"]["statistics"] = {"first_token_ms": "soon"}
    assert server.request("DELETE", path)[0] == 200
    imported = server.post("/v1/conversations/import", **exported)[2]
    items = get(server, f"/v1/conversations/{imported['data'][0]['id']}/items?order=asc")["data"]
    assert len(items) == 2 and "statistics" not in items[1]
