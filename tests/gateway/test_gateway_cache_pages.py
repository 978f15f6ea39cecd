"""The cache seen from outside: the map of its pages."""

from __future__ import annotations

import json
from collections import Counter

from websockets.sync.client import ClientConnection

from tests.gateway.frames import LONG, receive, send, until_end
from tests.gateway.serving import PAGE_SIZE, Server, post_bytes, slowed, wait_until
from tests.gateway.test_gateway_tenants import DECLARED, ONE, TWO, shared

__all__ = ["shared"]

CHAT = "/v1/chat/completions"
MAP = "/v1/cache/map"


def test_the_map_shows_a_response_come_and_go(server: Server, socket: ClientConnection) -> None:
    def letters() -> Counter[str]:
        status, _, pages = server.request("GET", MAP)
        assert (status, pages["object"], pages["page_size"]) == (200, "cache.map", PAGE_SIZE)
        assert len(pages["cells"]) == pages["num_pages"] == server.num_pages - 1 and pages["pages_per_cell"] == 1
        return Counter(pages["cells"])

    with slowed(server, 0.01):
        send(socket, **LONG, n=3)
        response = receive(socket)["response"]
        while receive(socket)["type"] != "response.output_text.delta":
            pass
        shown = letters()
        assert shown["s"] > 0 and shown["a"] >= 3 and shown["o"] == shown["p"] == 0
        send(socket, "response.cancel", response_id=response["id"])
        until_end(socket)
    wait_until(lambda: letters()["a"] + letters()["s"] == 0, "no page in use")
    assert letters()["i"] > 0


def test_a_tenant_sees_of_others_only_that_they_are(shared: Server) -> None:
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
