"""Copies of one branch of a conversation."""

from __future__ import annotations

from websockets.sync.client import ClientConnection

from tests.gateway.frames import ask, items_of
from tests.gateway.serving import PAGE_SIZE, Server


def test_branch_copies_the_path_with_its_tokens(server: Server, socket: ClientConnection) -> None:
    first = ask(socket, input="One", instructions="Be brief.")
    ask(socket, input="Two", previous_response_id=first["id"], instructions="Be brief.")
    source, leaf = first["conversation"]["id"], first["output"][0]["id"]
    status, _, copy = server.post(f"/v1/conversations/{source}/branch", leaf=leaf, title="Other")
    assert status == 200 and copy["id"] != source and copy["title"] == "Other"
    before = list(items_of(server, first).values())[:2]
    path = f"/v1/conversations/{copy['id']}/items?branches=all"
    after = server.request("GET", path)[2]["data"]
    assert [item["content"] for item in after] == [item["content"] for item in before]
    assert after[-1]["num_tokens"] == before[-1]["num_tokens"] and copy["active_leaf"] == after[-1]["id"]
    assert {item["id"] for item in after}.isdisjoint(item["id"] for item in before)
    follow = ask(socket, input="Two", conversation=copy["id"], instructions="Be brief.")
    history = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    assert follow["usage"]["input_tokens_details"]["cached_tokens"] >= history - PAGE_SIZE
    fork = ask(socket, previous_item_id=after[-1]["id"], fork_at=2)
    assert fork["conversation"]["id"] == copy["id"]
    # the copy is independent of the original
    assert server.request("DELETE", f"/v1/conversations/{source}")[0] == 200
    assert len(server.request("GET", path)[2]["data"]) == 5


def test_branch_without_a_leaf_copies_the_active_one(server: Server, socket: ClientConnection) -> None:
    first = ask(socket, input="One", n=2)
    path = f"/v1/conversations/{first['conversation']['id']}"
    copies = [server.post(f"{path}/branch")[2] for _ in range(2)]
    assert copies[0]["id"] != copies[1]["id"]
    assert [copy["title"] for copy in copies] == ["One", "One"]
    listed = server.request("GET", f"/v1/conversations/{copies[0]['id']}/items?branches=all")[2]["data"]
    assert len(listed) == 2, "the other candidate stays behind"
    empty = server.post("/v1/conversations")[2]
    for bad in (server.post(f"{path}/branch", leaf="msg_x"), server.post(f"/v1/conversations/{empty['id']}/branch")):
        assert (bad[0], bad[2]["error"]["param"]) == (404, "leaf")
    assert server.post("/v1/conversations/conv_x/branch")[0] == 404
