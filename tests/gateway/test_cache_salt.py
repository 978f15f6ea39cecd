"""`cache_salt` divides the cache of one tenant, and never reaches the cache of another one."""

from __future__ import annotations

from typing import Any

import pytest
from websockets.sync.client import connect

from tests.gateway.frames import ask
from tests.gateway.serving import PAGE_SIZE, Server
from tests.gateway.test_cache import explain
from tests.gateway.test_tenants import CHAT, DECLARED, ONE, PROTOCOL, TWO, cached, num_system_tokens, shared

__all__ = ["shared"]

TEXT = "A text of the length of several pages, so that its pages can be found again. " * 2


def prompt_of(path: str, name: str) -> dict[str, Any]:
    text = f"{name}: {TEXT}"
    match path:
        case "/v1/completions":
            return {"prompt": text, "max_tokens": 2, "ignore_eos": True}
        case "/v1/responses":
            return {"input": text, "store": False, "max_output_tokens": 16, "ignore_eos": True}
        case _:
            return {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "ignore_eos": True}


def num_cached(server: Server, path: str, body: dict[str, Any], key: dict[str, str] | None = None) -> tuple[int, int]:
    """Send the request; return its numbers of cached tokens and of prompt tokens."""
    status, _, answer = server.request("POST", path, body, key)
    assert status == 200, answer
    usage = answer["usage"]
    if path == "/v1/responses":
        return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_salt_separates_the_cache_within_a_tenant(server: Server, path: str) -> None:
    body = prompt_of(path, path)
    num_cached(server, path, body)
    found, num_tokens = num_cached(server, path, body)
    assert found == num_tokens - 1 > 3 * PAGE_SIZE
    for salt in (f"alice {path}", f"bob {path}"):
        assert num_cached(server, path, body | {"cache_salt": salt})[0] == 0, (
            "not the pages of another salt, or of none"
        )
        assert num_cached(server, path, body | {"cache_salt": salt})[0] == num_tokens - 1
    assert num_cached(server, path, body | {"cache_salt": None})[0] == num_tokens - 1


def test_salt_cannot_reach_the_pages_of_another_tenant(shared: Server) -> None:
    body = prompt_of(CHAT, "secret")
    num_cached(shared, CHAT, body, ONE)
    num_cached(shared, CHAT, body | {"cache_salt": "same"}, ONE)
    guesses = ["same", "one", "two", "sk-tenant-one", "\x00", "=same"]
    for salt in guesses:
        assert num_cached(shared, CHAT, body | {"cache_salt": salt}, TWO)[0] == 0, salt
    assert num_cached(shared, CHAT, body | {"cache_salt": "same"}, ONE)[0] > 3 * PAGE_SIZE


def test_salted_requests_share_declared_system_prompts(shared: Server) -> None:
    num_shared = num_system_tokens(DECLARED) // PAGE_SIZE * PAGE_SIZE
    cached(shared, ONE, DECLARED, "What is a salt?")
    assert cached(shared, TWO, DECLARED, "What is a salt?", cache_salt="x") == num_shared
    assert cached(shared, TWO, DECLARED, "What is a salt?", cache_salt="x") > num_shared


def test_explanation_with_a_salt_predicts_the_cached_tokens(server: Server) -> None:
    body = prompt_of(CHAT, "explained")
    messages = body["messages"]
    num_cached(server, CHAT, body | {"cache_salt": "pepper"})
    assert explain(server, messages=messages)["cached_tokens"] < PAGE_SIZE, "of other chats"
    assert explain(server, messages=messages, cache_salt="other")["miss"]["reason"] == "never_computed"
    salted = explain(server, messages=messages, cache_salt="pepper")
    assert salted["miss"] is None and salted["cached_tokens"] == salted["prompt_tokens"] - 1


def test_prewarmed_prompt_is_found_with_its_salt_only(server: Server) -> None:
    url = f"ws://127.0.0.1:{server.port}/v1/responses"
    with connect(url, subprotocols=[PROTOCOL], max_queue=None) as socket:
        text = f"prewarmed: {TEXT}"
        socket.recv()
        for salt in ("warm", "cold"):
            usage = ask(socket, input=text, cache_salt=salt, max_output_tokens=16)["usage"]
            assert usage["input_tokens_details"]["cached_tokens"] == 0
        usage = ask(socket, input=text, cache_salt="warm", max_output_tokens=16)["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1


@pytest.mark.parametrize("salt", ["", "x" * 257, 7, ["x"]])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/cache/explain"])
def test_invalid_salt_is_refused(server: Server, path: str, salt: object) -> None:
    body = prompt_of(CHAT if path == "/v1/cache/explain" else path, "invalid")
    if path == "/v1/cache/explain":
        body = {"messages": body["messages"]}
    status, _, answer = server.post(path, **body, cache_salt=salt)
    assert (status, answer["error"]["param"]) == (400, "cache_salt")
