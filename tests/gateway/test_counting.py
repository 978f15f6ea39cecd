"""Work on long texts is throttled, and text above any limit is not tokenised."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from chatcache.conversations.prompt import ALWAYS_TOKENISED_CHARS, MAX_PROMPT_CHARS, PromptLimits
from chatcache.errors import ContextLengthError, RateLimitError
from chatcache.gateway import middleware
from chatcache.gateway.limits.admission import (
    MAX_CONCURRENT_TEXTS,
    MAX_QUEUED_BYTES,
    UNTHROTTLED_BYTES,
    TextThrottle,
)
from chatcache.tokenizer.tokenizer import Tokenizer
from tests.gateway.serving import Server

LONG = UNTHROTTLED_BYTES + 1


class Turns:
    """Records the owners that hold a slot, each until `release_pages`."""

    def __init__(self) -> None:
        self.counting = TextThrottle()
        self.owners: list[str] = []
        self._gates: dict[str, asyncio.Event] = {}

    async def take(self, owner: str) -> None:
        async with self.counting.acquire(owner, LONG):
            self.owners.append(owner)
            await self._gates.setdefault(owner, asyncio.Event()).wait()
            self.owners.remove(owner)

    def let_go(self, owner: str) -> None:
        self._gates[owner].set()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_text_throttle_runs_one_per_owner_and_few_in_total() -> None:
    turns = Turns()
    jobs = [asyncio.create_task(turns.take(owner)) for owner in "aaabbbcc"]
    await settled()
    assert turns.owners == ["a", "b"] and MAX_CONCURRENT_TEXTS == 2
    turns.let_go("a")
    await settled()
    assert turns.owners == ["b", "c"]
    for owner in "bc":
        turns.let_go(owner)
        await settled()
    await asyncio.gather(*jobs)


async def test_text_throttle_does_not_delay_short_texts() -> None:
    counting = TextThrottle()
    async with asyncio.timeout(60), AsyncExitStack() as stack:  # a short text that waited would wait forever
        for owner in ("a", "b"):
            await stack.enter_async_context(counting.acquire(owner, LONG))
        for _ in range(3):
            await stack.enter_async_context(counting.acquire("a", UNTHROTTLED_BYTES))


async def test_text_throttle_limits_queued_bytes_per_owner() -> None:
    """The largest text alone always passes; finished or cancelled texts do not count."""
    counting = TextThrottle()
    async with counting.acquire("a", 2 * MAX_QUEUED_BYTES):
        with pytest.raises(RateLimitError):
            async with counting.acquire("a", LONG):
                pass
        async with counting.acquire("b", LONG):
            waiting = asyncio.create_task(enter(counting, "b"))
            await settled()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
    async with counting.acquire("a", MAX_QUEUED_BYTES), counting.acquire("b", MAX_QUEUED_BYTES):
        pass


async def enter(counting: TextThrottle, owner: str) -> None:
    async with counting.acquire(owner, LONG):
        pass


ROUTES: dict[str, dict[str, object]] = {
    "/tokenize": {"prompt": "a " * LONG},
    "/detokenize": {"tokens": [1] * LONG},
    "/v1/cache/explain": {"prompt": "a " * LONG},
    "/v1/responses/input_tokens": {"input": "a " * LONG},
}


@pytest.mark.parametrize("path", ROUTES)
def test_token_counting_routes_use_the_throttle(server: Server, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    taken: list[int] = []

    @asynccontextmanager
    async def turn(self: TextThrottle, owner: str, num_bytes: int) -> AsyncIterator[None]:
        if self is server.gateway.tokenize_throttle:
            taken.append(num_bytes)
        yield

    monkeypatch.setattr(TextThrottle, "acquire", turn)
    assert server.post(path, **ROUTES[path])[0] in (200, 400)
    assert len(taken) == 1 and taken[0] > UNTHROTTLED_BYTES


@pytest.mark.parametrize(
    ("max_model_len", "max_token_chars", "most"),
    [
        (0, 8, MAX_PROMPT_CHARS),
        (1024, 0, MAX_PROMPT_CHARS),
        (16, 8, ALWAYS_TOKENISED_CHARS),
        (100_000, 16, 6_400_000),
        (1 << 20, 128, MAX_PROMPT_CHARS),
    ],
)
def test_prompt_limit_follows_model_length_and_longest_token(
    max_model_len: int, max_token_chars: int, most: int
) -> None:
    bound = PromptLimits(max_model_len, max_token_chars)
    bound.check(most)
    with pytest.raises(ContextLengthError):
        bound.check(most + 1)


def test_prompt_above_the_limit_is_rejected_before_tokenising(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a stored conversation, which may be longer than any request."""
    encoded: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, add_special_tokens)

    server.wait_ready()
    monkeypatch.setattr(Tokenizer, "encode", noted)
    long = "1" * ALWAYS_TOKENISED_CHARS
    items = [{"type": "message", "role": "user", "content": long[: ALWAYS_TOKENISED_CHARS // 4]} for _ in range(5)]
    conversation = server.post("/v1/conversations", items=items)[2]["id"]
    user = [{"role": "user", "content": long}]
    refused: tuple[tuple[str, dict[str, object]], ...] = (
        ("/v1/responses", {"conversation": conversation, "input": "Hi"}),
        ("/v1/responses", {"input": long}),
        ("/v1/responses/input_tokens", {"conversation": conversation, "input": "Hi"}),
        ("/v1/cache/explain", {"conversation": conversation, "input": "Hi"}),
        ("/v1/chat/completions", {"messages": user}),
        ("/v1/completions", {"prompt": long + "1"}),
    )
    for path, body in refused:
        status, _, answer = server.post(path, **body)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded", path
    assert max(encoded, default=0) < ALWAYS_TOKENISED_CHARS
    assert server.request("DELETE", f"/v1/conversations/{conversation}")[0] == 200


async def test_large_bodies_are_decoded_one_at_a_time_and_owners_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that posts many large bodies delays the body of another owner by one decoding at most."""
    order: list[str] = []
    num_decoding = 0
    lock = threading.Lock()

    def decode(data: bytes | str) -> dict[str, Any]:
        nonlocal num_decoding
        with lock:
            num_decoding += 1
            assert num_decoding == 1
        time.sleep(0.01)
        order.append(str(data[0]))
        with lock:
            num_decoding -= 1
        return {}

    monkeypatch.setattr(middleware, "decode_object", decode)
    throttle = TextThrottle(1, "decoded")
    await asyncio.gather(*(middleware.parse_json(owner * LONG, throttle, owner) for owner in "aaaabb"))
    assert order == list("ababaa")


def test_large_body_waits_for_the_decoding_throttle_of_its_owner(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    acquire = TextThrottle.acquire

    def recorded(self: TextThrottle, owner: str, num_bytes: int) -> AbstractAsyncContextManager[None]:
        if self is server.gateway.decode_throttle:
            taken.append(num_bytes)
        return acquire(self, owner, num_bytes)

    monkeypatch.setattr(TextThrottle, "acquire", recorded)
    messages = [{"role": "user", "content": "x"}]
    for unknown in ("a", "a" * LONG):
        assert server.post("/v1/chat/completions", messages=messages, max_tokens=1, unknown=unknown)[0] == 200
    assert len(taken) == 1 and taken[0] > LONG
