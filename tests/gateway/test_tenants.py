"""Two tenants on one server share declared system prompts and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from chatcache.config import ServerConfig
from tests.gateway.frames import LONG, ask, receive, send, until_end
from tests.gateway.serving import PAGE_SIZE, Server, slowed, tiny_tokenizer

CHAT = "/v1/chat/completions"
PROTOCOL = Subprotocol("chatcache.v1")
DECLARED = "You are a kind helper of everybody. Answer in short words, and only in words."
OWN = "You are the private helper of one company. Answer in long words, and only there."
ONE, TWO = ({"authorization": f"Bearer sk-tenant-{name}"} for name in ("one", "two"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path: Path = tmp_path_factory.mktemp("tenants")
    keys = ("sk-tenant-one", "sk-tenant-two")
    config = ServerConfig(db=str(path / "chat.db"), api_keys=keys, shared_system_prompts=(DECLARED + "\n",))
    with Server(config) as server:
        yield server.wait_ready()


def cached(server: Server, key: dict[str, str], system: str, user: str, **more: Any) -> int:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"messages": messages, "max_tokens": 2, "ignore_eos": True, **more}
    status, _, answer = server.request("POST", CHAT, body, key)
    assert status == 200, answer
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def num_system_tokens(system: str) -> int:
    return len(tiny_tokenizer().render_ids([{"role": "system", "content": system}], add_generation_prompt=False))


def test_shared_system_prompt_is_cached_across_tenants_but_not_its_continuation(shared: Server) -> None:
    num_shared = num_system_tokens(DECLARED) // PAGE_SIZE * PAGE_SIZE
    assert num_shared > 4 * PAGE_SIZE
    assert cached(shared, ONE, DECLARED, "my secret is 42") == 0
    assert cached(shared, TWO, DECLARED, "my secret is 42") == num_shared
    assert cached(shared, TWO, DECLARED, "my secret is 42") > num_shared, "one's own are found to the last token"


def test_undeclared_system_prompt_is_not_shared(shared: Server) -> None:
    assert cached(shared, ONE, OWN, "Hi") == 0
    assert cached(shared, TWO, OWN, "Hi") == 0
    assert cached(shared, ONE, OWN, "Hi") > 0


def test_request_fields_cannot_make_tokens_public(shared: Server) -> None:
    private = "Another private prompt, which its owner calls public without being asked."
    claims = {"num_public_tokens": 30, "namespace": "", "public": True}
    before = len("<|im_start|>system\n") // 2  # what any chat of one's own begins with
    assert cached(shared, ONE, private, "Hi", **claims) <= before
    assert cached(shared, TWO, private, "Hi", **claims) <= before
    assert cached(shared, ONE, private, "Hi", **claims) > 4 * before


def test_stored_conversations_use_the_shared_system_prompt(shared: Server) -> None:
    url = f"ws://127.0.0.1:{shared.port}/v1/responses"
    figures = []
    for key in (ONE, TWO, TWO):
        with connect(url, additional_headers=key) as socket:
            usage = ask(socket, input="Hello from a socket", instructions=DECLARED)["usage"]
            figures.append(usage["input_tokens_details"]["cached_tokens"])
    num_shared = num_system_tokens(DECLARED) // PAGE_SIZE * PAGE_SIZE
    assert num_shared <= figures[1] < figures[2]


def test_tenant_cannot_read_stop_or_steer_foreign_responses(shared: Server) -> None:
    url = f"ws://127.0.0.1:{shared.port}/v1/responses"
    with (
        connect(url, additional_headers=ONE, subprotocols=[PROTOCOL], max_queue=None) as one,
        connect(url, additional_headers=TWO, subprotocols=[PROTOCOL], max_queue=None) as two,
        slowed(shared, 0.02),
    ):
        assert receive(one)["type"] == receive(two)["type"] == "session.created"
        send(two, "conversation.subscribe")
        assert receive(two) == {"type": "conversation.subscribed", "running": []}
        send(one, **LONG)
        response_id = receive(one)["response"]["id"]
        for kind in ("response.resume", "response.cancel"):
            send(two, kind, response_id=response_id)
            assert receive(two)["status"] == 404
        send(two, "response.steer", previous_response_id=response_id, input="x")
        assert receive(two)["error"]["code"] == "response_not_found"
        send(two, "prompt.prewarm", previous_response_id=response_id, input="x")
        assert receive(two)["error"]["code"] == "previous_response_not_found"
        send(two, input="x", previous_response_id=response_id)
        assert receive(two)["error"]["code"] == "previous_response_not_found"
        send(one, "response.cancel", response_id=response_id)
        until_end(one)
        send(two, "response.resume", response_id=response_id)
        assert receive(two)["status"] == 404
        with pytest.raises(TimeoutError):
            two.recv(timeout=0.1)
