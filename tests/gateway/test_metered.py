"""Metrics of the gateway: store calls and outages, refusals by reason, open streams."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from chatcache.config import ServerConfig
from chatcache.conversations.store import StoreUnavailableError
from chatcache.conversations.tree import Conversation
from chatcache.errors import ChatcacheError, NotFoundError
from chatcache.gateway.metrics import MAX_REASONS, Metrics, instrument_store
from chatcache.storage.sqlite import SqliteStore
from chatcache.types.stats import EngineHealth
from tests.gateway.serving import Server, post_bytes, wait_until


class Failing(SqliteStore):
    """A store with injected outages."""

    is_away = False

    async def get(self, owner: str, conversation_id: str) -> Conversation:
        if self.is_away:
            raise StoreUnavailableError("gone")
        return await super().get(owner, conversation_id)


def value(text: str, sample: str) -> float:
    match = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
    return float(match[1]) if match else 0.0


async def test_instrumented_store_times_calls_and_counts_outages(tmp_path: Path) -> None:
    inner, metrics = Failing(tmp_path / "a.db"), Metrics()
    store = instrument_store(inner, metrics)

    def reported(sample: str) -> float:
        return value(metrics.render(EngineHealth(ready=True)).decode(), f"chatcache_store_{sample}")

    await store.create(Conversation("conv_1", "me", 1.0, 1.0))
    assert (await store.get("me", "conv_1")).id == "conv_1"
    with pytest.raises(NotFoundError):
        await store.get("you", "conv_1")
    assert reported('seconds_count{operation="create"}') == 1 and reported('seconds_count{operation="get"}') == 2
    assert (reported("up"), reported("failures_total"), reported("outages_total")) == (1, 0, 0)
    for _ in range(2):
        inner.is_away = True
        for _ in range(3):
            with pytest.raises(StoreUnavailableError):
                await store.get("me", "conv_1")
        assert reported("up") == 0
        inner.is_away = False
        await store.get("me", "conv_1")
    assert (reported("up"), reported("failures_total"), reported("outages_total")) == (1, 6, 2)
    assert (await store.keys.list(), store.keys) == ([], inner.keys)  # the rest is its own
    await store.close()


def test_refusal_reasons_are_bounded() -> None:
    metrics = Metrics()
    for number in range(3 * MAX_REASONS):
        metrics.record_refusal(ChatcacheError("no", code=f"code_{number}"))
    text = metrics.render(EngineHealth(ready=True)).decode()
    assert len(re.findall(r"^chatcache_refusals_total\{", text, re.MULTILINE)) == MAX_REASONS + 1
    assert value(text, 'chatcache_refusals_total{reason="other"}') == 2 * MAX_REASONS


def test_refusals_and_open_streams_are_counted_on_every_route() -> None:
    with Server(ServerConfig(db=":memory:", api_keys=("sk-12345678",))) as server:
        server.wait_ready()
        key = {"authorization": "Bearer sk-12345678"}

        def reported(sample: str) -> float:
            return value(server.request("GET", "/metrics", headers=key)[2], f"chatcache_{sample}")

        server.request("GET", "/v1/models")
        server.request("GET", "/nowhere", headers=key)
        server.request("POST", "/v1/completions", {"prompt": 1.5}, headers=key)
        for reason in ("invalid_api_key", "not_found", "invalid_value"):
            assert reported(f'refusals_total{{reason="{reason}"}}') == 1, reason
        server.runner.delay_s = 0.05
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 500, "ignore_eos": True, "stream": True}
        data = post_bytes(server.port, "/v1/chat/completions", json.dumps(body).encode())
        with server.connect() as connection:
            connection.sendall(data.replace(b"\r\n", b"\r\nauthorization: Bearer sk-12345678\r\n", 1))
            assert b"200" in connection.recv(64)
            assert reported("sse_streams") == 1
        wait_until(lambda: reported("sse_streams") == 0, "the stream to be over")
