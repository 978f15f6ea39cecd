"""Several clients on one conversation.

Stale writes are refused, subscribers receive every change, and all agree on one history.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from chatcache.conversations.tree import plan_response_deletion
from chatcache.gateway.responses.run import LiveResponse
from chatcache.gateway.websocket import notifications
from tests.gateway.described import Described
from tests.gateway.serving import Server, slowed, wait_until
from tests.gateway.test_rest import converse

LONG = {"ignore_eos": True, "max_output_tokens": 400}


def head(server: Server, conversation: str) -> dict[str, Any]:
    found: dict[str, Any] = server.request("GET", f"/v1/conversations/{conversation}")[2]
    return found


def test_a_stale_tab_is_shown_what_is_new(server: Server) -> None:
    """Every route that changes something: 409, not to be retried, with the present head; nothing changed."""
    response = converse(server, "Hello")
    conversation = response["conversation"]["id"]
    path = f"/v1/conversations/{conversation}"
    old = head(server, conversation)["rev"]
    present = server.post(path, title="New")[2]
    document = Described(server.request("GET", "/openapi.json")[2])
    item = response["output"][0]["id"]
    for method, where, body in (
        ("POST", path, {"title": "x", "rev": old}),
        ("DELETE", f"{path}?rev={old}", None),
        ("POST", f"{path}/items", {"items": [{"role": "user", "content": "x"}], "rev": old}),
        ("DELETE", f"{path}/items/{item}?rev={old}", None),
        ("POST", f"{path}/title", {"rev": old}),
        ("POST", f"{path}/share", {"rev": old}),
        ("DELETE", f"{path}/share?rev={old}", None),
        ("DELETE", f"/v1/responses/{response['id']}?rev={old}", None),
        ("POST", "/v1/responses", {"input": "x", "conversation": conversation, "rev": old}),
        ("POST", "/v1/responses", {"input": "x", "previous_item_id": item, "rev": old, "store": False}),
    ):
        status, headers, answer = server.request(method, where, body)
        document.check(method, where, status, answer)
        assert status == 409 and headers["x-should-retry"] == "false", where
        assert answer["error"]["code"] == "stale_revision" and answer["error"]["param"] == "rev"
        assert answer["error"]["conversation"] == present == head(server, conversation)
    said = server.post("/v1/responses", input="x", conversation=conversation, rev=present["rev"], max_output_tokens=2)
    assert said[0] == 200
    present = head(server, conversation)
    assert server.post("/v1/responses", input="x", rev=1)[2]["error"]["param"] == "rev"
    for rev in ("x", "-1", "1.5", "", "9" * 16):
        for where in (path, f"{path}/share", f"/v1/responses/{said[2]['id']}"):
            assert server.request("DELETE", f"{where}?rev={rev}")[2]["error"]["param"] == "rev"
    status, headers, shared = server.post(f"{path}/share", rev=present["rev"])
    assert status == 200 and "x-chatcache-ignored" not in headers
    present = server.request("DELETE", f"{path}/share?rev={shared['conversation']['rev']}")[2]
    assert "share" not in present["metadata"]
    assert server.request("DELETE", f"/v1/responses/{said[2]['id']}?rev={present['rev']}")[0] == 200
    present = head(server, conversation)
    assert server.request("DELETE", f"{path}/items/{item}?rev={present['rev']}")[2]["rev"] == present["rev"] + 1
    assert server.request("DELETE", f"{path}?rev={present['rev'] + 1}")[0] == 200


def test_deletion_of_a_running_response_with_a_stale_rev_does_not_end_it(server: Server) -> None:
    with slowed(server, 0.02):
        response = server.post("/v1/responses", input="Say much", background=True, **LONG)[2]
        path, rev = f"/v1/responses/{response['id']}", head(server, response["conversation"]["id"])["rev"]
        status, _, answer = server.request("DELETE", f"{path}?rev={rev - 1}")
        assert (status, answer["error"]["code"]) == (409, "stale_revision")
        assert server.request("GET", path)[2]["status"] == "in_progress"
        assert server.request("DELETE", f"{path}?rev={rev}")[0] == 200
    assert server.request("GET", path)[0] == 404


def test_deletions_without_rev_at_the_same_time_all_succeed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client changes the conversation again and again between the plan of a deletion and its transaction."""
    items = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    conversation = server.post("/v1/conversations", items=items)[2]
    path, store = f"/v1/conversations/{conversation['id']}", server.gateway.opened_store()
    num_changes, delete_messages, get = 0, store.delete_messages, store.get

    async def change() -> None:
        nonlocal num_changes
        if num_changes < 8:
            num_changes += 1
            await store.update("", conversation["id"], title=f"title {num_changes}")

    async def slow_deletion(*args: Any, **more: Any) -> Any:
        await change()
        return await delete_messages(*args, **more)

    async def get_then_change(*args: Any, **more: Any) -> Any:
        found = await get(*args, **more)
        await change()
        return found

    monkeypatch.setattr(store, "delete_messages", slow_deletion)
    status, _, changed = server.request("DELETE", f"{path}/items/{conversation['active_leaf']}")
    assert (status, num_changes, changed["title"]) == (200, 8, "title 8"), changed
    num_changes = 0
    monkeypatch.setattr(store, "get", get_then_change)
    status, _, shared = server.post(f"{path}/share")
    assert (status, num_changes, shared["conversation"]["title"]) == (200, 8, "title 8"), shared


def test_deletions_of_one_response_at_the_same_time_never_fail(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client deletes the response, or its conversation, after this deletion has read it."""
    store = server.gateway.opened_store()
    load = store.load
    for is_logged in (True, False):
        for what in ("response", "conversation"):
            response = converse(server, "Hello")
            path, conversation = f"/v1/responses/{response['id']}", response["conversation"]["id"]
            if what == "response":  # the conversation stays
                asked, again = response["input_item_ids"][0], {"role": "user", "content": "x"}
                server.post(f"/v1/conversations/{conversation}/items", items=[again], parent_id=asked)
            if not is_logged:
                server.gateway.responses.remove(response["id"])

            async def delete_and_load(owner: str, name: str, response: Any = response, what: str = what) -> Any:
                monkeypatch.setattr(store, "load", load)
                if what == "conversation":
                    await store.delete(owner, name)
                else:
                    edit = plan_response_deletion(await load(owner, name), response["id"])
                    await store.delete_messages(owner, name, edit)
                return await load(owner, name)

            monkeypatch.setattr(store, "load", delete_and_load)
            status, _, answer = server.request("DELETE", path)
            if is_logged:
                assert (status, answer["deleted"]) == (200, True), answer
            else:
                assert (status, answer["error"]["message"]) == (404, f"no response '{response['id']}'")
            assert server.request("GET", path)[0] == server.request("DELETE", path)[0] == 404


def test_tabs_over_http_agree_on_one_history(server: Server) -> None:
    """Eight clients add, remove and rename with the `rev` they read: each revision has one author."""
    conversation = server.post("/v1/conversations")[2]["id"]
    path = f"/v1/conversations/{conversation}"
    done: dict[int, tuple[str, str]] = {}
    num_conflicts = 0

    def work(name: str) -> None:
        nonlocal num_conflicts
        generator = random.Random(name)
        for step in range(8):
            items = server.request("GET", f"{path}/items?branches=all")[2]["data"]
            rev = head(server, conversation)["rev"]
            kind = generator.choice(["add", "add", "rename", "remove"])
            if kind == "add":
                text = f"{name}.{step}"
                items = [{"role": "user", "content": text}]
                status, _, answer = server.post(f"{path}/items", items=items, rev=rev)
                note = ("add", text)
            elif kind == "remove" and items:
                gone = generator.choice(items)
                status, _, answer = server.request("DELETE", f"{path}/items/{gone['id']}?rev={rev}")
                note = ("remove", gone["content"][0]["text"])
            else:
                status, _, answer = server.post(path, title=f"{name} {step}", rev=rev)
                note = ("rename", f"{name} {step}")
            assert status in (200, 404, 409), answer
            if status == 200:
                done[rev + 1] = note
            num_conflicts += status == 409

    threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts: set[str] = set()
    title = ""
    for rev in sorted(done):
        kind, what = done[rev]
        if kind == "rename":
            title = what
        elif kind == "add":
            texts.add(what)
            title = title or what
        else:
            texts.remove(what)
    present = head(server, conversation)
    assert sorted(done) == list(range(1, present["rev"] + 1)) and present["title"] == title
    stored = server.request("GET", f"{path}/items?branches=all")[2]["data"]
    assert {item["content"][0]["text"] for item in stored} == texts and len(stored) == len(texts)
    assert num_conflicts > 0


def test_deleting_a_conversation_ends_what_is_said_in_it(server: Server) -> None:
    """The response gets its one terminal frame, its pages go back, and nothing of it is stored."""
    with slowed(server, 0.02), connect(f"ws://127.0.0.1:{server.port}/v1/responses") as socket:
        socket.send(json.dumps({"type": "response.create", "input": "Say much", **LONG}))
        conversation = json.loads(socket.recv())["response"]["conversation"]["id"]
        while json.loads(socket.recv())["type"] != "response.output_text.delta":
            pass
        status, _, answer = server.request("DELETE", f"/v1/conversations/{conversation}")
        assert status == 200 and answer["deleted"]
        assert server.num_pages_in_use() == 0  # when the deletion is acknowledged, it is over
        terminal = [json.loads(socket.recv())]
        while terminal[-1]["type"] not in ("response.completed", "response.incomplete", "response.failed"):
            terminal.append(json.loads(socket.recv()))
        assert terminal[-1]["type"] == "response.failed"
        with pytest.raises(TimeoutError):
            socket.recv(timeout=0.2)
    assert server.request("GET", f"/v1/conversations/{conversation}")[0] == 404
    assert server.request("DELETE", f"/v1/conversations/{conversation}")[0] == 404
    assert server.request("GET", f"/v1/responses/{terminal[-1]['response']['id']}")[0] == 404


def test_response_of_a_deleted_conversation_is_not_found(server: Server) -> None:
    response, other = converse(server, "A secret"), converse(server, "Another one")
    path = f"/v1/responses/{response['id']}"
    assert server.request("GET", path)[2]["output"] == response["output"]
    assert server.request("DELETE", f"/v1/conversations/{response['conversation']['id']}")[0] == 200
    for refused in (
        server.request("GET", path),
        server.request("GET", f"{path}?stream=true"),
        server.request("POST", f"{path}/cancel"),
        server.request("DELETE", path),
        server.post("/v1/responses", input="x", previous_response_id=response["id"]),
    ):
        assert refused[0] == 404, refused
    with connect(f"ws://127.0.0.1:{server.port}/v1/responses", subprotocols=[Subprotocol("chatcache.v1")]) as socket:
        assert json.loads(socket.recv())["type"] == "session.created"
        socket.send(json.dumps({"type": "response.resume", "response_id": response["id"]}))
        assert json.loads(socket.recv())["error"]["code"] == "not_found"
    assert server.request("GET", f"/v1/responses/{other['id']}")[2]["output"] == other["output"]


@pytest.mark.parametrize("which", ["question", "answer"])
def test_response_without_a_deleted_message_has_no_events_with_its_text(server: Server, which: str) -> None:
    response = converse(server, "Hello")
    path, conversation = f"/v1/responses/{response['id']}", response["conversation"]["id"]
    items = server.request("GET", f"/v1/conversations/{conversation}/items")[2]["data"]
    role = "user" if which == "question" else "assistant"
    (item,) = [each for each in items if each["role"] == role]
    assert server.request("GET", path)[2]["output"] == response["output"]
    assert server.request("DELETE", f"/v1/conversations/{conversation}/items/{item['id']}")[0] == 200
    status, _, left = server.request("GET", path)
    assert status == 200 and left["output"] == ([] if which == "answer" else response["output"])
    if which == "answer":
        assert server.request("GET", f"{path}?stream=true")[0] == 400


def test_response_is_not_found_when_its_conversation_is_deleted_with_another_response(server: Server) -> None:
    first = converse(server, "Hello")
    second = converse(server, "A secret", previous_response_id=first["id"])
    path = f"/v1/conversations/{first['conversation']['id']}"
    for item in server.request("GET", f"{path}/items?branches=all")[2]["data"]:
        assert server.request("DELETE", f"{path}/items/{item['id']}")[0] == 200
    assert server.request("DELETE", f"/v1/responses/{first['id']}")[0] == 200
    assert server.request("GET", path)[0] == 404
    assert server.request("GET", f"/v1/responses/{second['id']}")[0] == 404


def test_response_that_starts_in_a_deleted_conversation_is_not_found_after_its_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversation is deleted after the input was stored, and before the response counts as running."""

    async def delete_conversation(run: LiveResponse) -> bool:
        await server.gateway.opened_store().delete("", run.log.conversation_id or "")
        return True

    monkeypatch.setattr(LiveResponse, "save_record", delete_conversation)
    response = server.post("/v1/responses", input="A secret", max_output_tokens=4)[2]
    assert response["status"] == "failed"
    assert server.request("GET", f"/v1/responses/{response['id']}")[0] == 404


def test_subscriber_after_last_response_receives_empty_running_list(server: Server) -> None:
    """The last update of a conversation is sent while its response finishes.

    The response does not count as running then.
    """
    with connect(f"ws://127.0.0.1:{server.port}/v1/responses", subprotocols=[Subprotocol("chatcache.v1")]) as socket:
        socket.send(json.dumps({"type": "conversation.subscribe"}))
        for _ in range(5):
            response = converse(server, "Hello")
            leaf = response["output"][0]["id"]
            heads: list[dict[str, Any]] = []
            while not heads or heads[-1]["conversation"]["active_leaf"] != leaf:
                heads += [frame for frame in _received(socket) if frame["type"] == "conversation.updated"]
            assert heads[-1]["running"] == []


def test_subscriber_that_has_missed_changes_is_sent_what_runs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "MAX_PENDING_CHANGES", 0)
    with connect(f"ws://127.0.0.1:{server.port}/v1/responses", subprotocols=[Subprotocol("chatcache.v1")]) as socket:
        socket.send(json.dumps({"type": "conversation.subscribe"}))
        _received(socket)
        with slowed(server, 0.02):
            response = server.post("/v1/responses", input="Say much", background=True, **LONG)[2]
            missed = [frame for frame in _received(socket) if frame["type"] == "conversation.missed"]
            running = {"response_id": response["id"], "conversation_id": response["conversation"]["id"]}
            assert running in missed[-1]["running"]
            assert server.request("DELETE", f"/v1/responses/{response['id']}")[0] == 200


def _received(socket: ClientConnection) -> list[dict[str, Any]]:
    """Frames received until none arrives for 0.3 s."""
    frames: list[dict[str, Any]] = []
    try:
        while True:
            frames.append(json.loads(socket.recv(timeout=0.3)))
    except TimeoutError:
        return frames


def test_subscriber_receives_every_change_of_another_client(server: Server) -> None:
    """The newest head of every conversation that a route changed, once it is stored; None for what is gone."""
    exported: Any = None
    received: dict[str, Any] = {}

    async def listen(until: asyncio.Event) -> None:
        subscription = server.gateway.hub.subscribe("")
        try:
            while not until.is_set():
                received.update(await subscription.next())
        finally:
            server.gateway.hub.unsubscribe("", subscription)

    async def start() -> tuple[asyncio.Task[None], asyncio.Event]:
        until = asyncio.Event()
        task = asyncio.create_task(listen(until))
        await asyncio.sleep(0)
        return task, until

    task, _ = server.call(start())
    made = server.post("/v1/conversations", items=[{"role": "user", "content": "Hello"}])[2]
    path = f"/v1/conversations/{made['id']}"
    wait_until(lambda: received[made["id"]].rev == made["rev"] if made["id"] in received else False, "created")
    message = {"items": [{"role": "assistant", "content": "Hi"}]}
    first = f"{path}/items/{made['active_leaf']}"
    changes = (("POST", path, {"title": "Renamed"}), ("POST", f"{path}/items", message), ("DELETE", first, None))
    for method, where, body in changes:
        assert server.request(method, where, body)[0] == 200
        present = head(server, made["id"])
        wait_until(lambda rev=present["rev"]: received[made["id"]].rev == rev, "a change")  # type: ignore[misc]
    exported = server.request("GET", f"{path}/export")[2]
    exported["conversation"]["id"] = "conv_imported"
    copy = server.post("/v1/conversations/import", **exported)[2]["data"][0]["id"]
    wait_until(lambda: copy in received, "an import")
    assert server.post("/v1/conversations/import", **exported)[2]["unchanged"] == 1
    assert server.request("DELETE", path)[0] == 200
    wait_until(lambda: received[made["id"]] is None, "a deletion")
    server.loop.call_soon_threadsafe(task.cancel)
