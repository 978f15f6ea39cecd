"""Rows of the ready banner for given model and health data."""

from __future__ import annotations

import asyncio
import io
import threading
from typing import Any

import pytest
from rich.console import Console

from chatcache.auth import new_key
from chatcache.cli import server
from chatcache.cli.server import POLL_S, Banner, show_start
from chatcache.config import EngineConfig, ServerConfig
from chatcache.errors import ModelFolderError
from chatcache.gateway.app import create_app
from chatcache.gateway.auth.keys import ApiKeyCache
from chatcache.storage.sqlite import SqliteStore
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.stats import EngineHealth, ModelInfo
from tests.gateway.serving import tiny_tokenizer

MODEL_INFO = ModelInfo(name="m", digest="00", vocab_size=10, max_model_len=2048, dtype="float32", attention="cpu")
HEALTH = EngineHealth(ready=True, page_size=16, num_pages=127, kv_bytes=128 * 4096, num_host_pages=256)


def shown(engine: EngineConfig, server: ServerConfig, health: EngineHealth = HEALTH, *, has_bus: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=160, highlight=False)
    Banner(engine, server, ("127.0.0.1", 1), console, has_bus=has_bus).show_ready(MODEL_INFO, health)
    return " ".join(out.getvalue().split())


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        (EngineConfig(), "127 pages of 16 tokens, 4 KiB each, 512 KiB in all"),
        (EngineConfig(), "waste up to 15 unused tokens in a branch's last page"),
        # 127 pages of 4 KiB leave 4 KiB of 512 KiB, and 8 KiB of 516 KiB
        (EngineConfig(kv_memory_bytes=2**21), "waste 4 KiB of the memory is in no page (0.8%); up to 15 unused"),
        (EngineConfig(kv_memory_bytes=129 * 4096), "waste 8 KiB of the memory is in no page (1.6%); up to 15 unused"),
        (EngineConfig(), "swap 256 host pages, 1 MiB"),
        (EngineConfig(), "float32 on cpu, cpu attention context"),
        (EngineConfig(deterministic=True), "float32 on cpu, cpu attention, deterministic"),
    ],
)
def test_banner_rows_show_pages_waste_swap_and_compute(engine: EngineConfig, text: str) -> None:
    if text.endswith("context"):
        text = text.removesuffix(" context")
        assert f"{text}, deterministic" not in shown(engine, ServerConfig())
    assert text in shown(engine, ServerConfig())


def test_banner_omits_rows_of_unused_features() -> None:
    text = shown(EngineConfig(), ServerConfig(), EngineHealth(ready=True, page_size=16, num_pages=127, kv_bytes=2**19))
    assert "host pages" not in text and "system prompt" not in text
    assert "2 system prompt(s)" in shown(EngineConfig(), ServerConfig(shared_system_prompts=("a", "b")))


def test_banner_of_a_gateway_without_redis_says_that_its_store_is_not_shared() -> None:
    config, text = ServerConfig(db="chat.db"), "store chat.db, for this gateway only; give --redis to share it"
    assert text in shown(EngineConfig(), config, has_bus=True)
    assert "this gateway only" not in shown(EngineConfig(), config)
    shared = ServerConfig(redis="redis://store:6379/0")
    assert "this gateway only" not in shown(EngineConfig(), shared, has_bus=True)


@pytest.mark.parametrize(
    ("host", "api_keys", "text"),
    [
        ("127.0.0.1", (), "open, from this machine only"),
        ("0.0.0.0", (), "open to every client that can reach this address"),
        ("0.0.0.0", ("sk-one", "sk-two"), "2 API key(s)"),
    ],
)
async def test_banner_access_row_names_keys_or_reachability(host: str, api_keys: tuple[str, ...], text: str) -> None:
    store = SqliteStore(":memory:")
    key_cache = ApiKeyCache(api_keys)
    await key_cache.open(store.keys)
    output = io.StringIO()
    config = ServerConfig(host=host, api_keys=api_keys)
    banner = Banner(EngineConfig(), config, (host, 1), Console(file=output, width=200), key_cache)
    banner.show_ready(MODEL_INFO, HEALTH)
    assert text in output.getvalue()
    if not api_keys:
        await store.keys.create(new_key("acme")[1])
        await key_cache.refresh()
        banner.show_ready(MODEL_INFO, HEALTH)
        assert "1 API key(s)" in output.getvalue(), "stored keys are counted"
    await key_cache.close()
    await store.close()


@pytest.mark.parametrize("api_keys", [(), ("sk-one",)])
async def test_banner_waits_for_a_store_that_does_not_answer_before_it_shows_ready(
    api_keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SLOW_STORE_S", POLL_S / 2)
    store, key_cache, output = SqliteStore(":memory:"), ApiKeyCache(api_keys), io.StringIO()
    config = ServerConfig(api_keys=api_keys, redis="redis://127.0.0.1:1")
    banner = Banner(EngineConfig(), config, ("127.0.0.1", 1), Console(file=output, width=200), key_cache)
    waiting = asyncio.create_task(banner.wait_for_store())
    done, _ = await asyncio.wait([waiting], timeout=3 * POLL_S)
    assert not done and "Waiting for the Redis server of --redis, which does not answer" in output.getvalue()
    await key_cache.open(store.keys)
    await asyncio.wait_for(waiting, 60)
    output.truncate(0)
    await banner.wait_for_store()
    assert output.getvalue() == "", "the store answered before"
    await key_cache.close()
    await store.close()


async def test_banner_does_not_mention_a_store_that_answers_soon() -> None:
    store, key_cache, output = SqliteStore(":memory:"), ApiKeyCache(()), io.StringIO()
    banner = Banner(EngineConfig(), ServerConfig(), ("127.0.0.1", 1), Console(file=output), key_cache)
    waiting = asyncio.create_task(banner.wait_for_store())
    await asyncio.sleep(POLL_S)
    await key_cache.open(store.keys)
    await asyncio.wait_for(waiting, 60)
    assert output.getvalue() == ""
    await key_cache.close()
    await store.close()


class ReadyEngine:
    """The engine of workers that were ready before the gateway."""

    async def wait_loaded(self) -> ModelInfo:
        return MODEL_INFO

    async def health(self) -> EngineHealth:
        return HEALTH


@pytest.mark.parametrize("error", [None, ModelFolderError("tokenizer.json: missing")])
async def test_ready_banner_waits_for_the_tokenizer_or_is_replaced_by_its_error(
    error: ModelFolderError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "reduce_gc", lambda: None)  # of this process
    engine: Any = ReadyEngine()
    may_load, output, store = threading.Event(), io.StringIO(), SqliteStore(":memory:")

    def load() -> Tokenizer:
        assert may_load.wait(60)
        if error is not None:
            raise error
        return tiny_tokenizer()

    gateway = create_app(ServerConfig(), engine, load, "m").state.gateway
    banner = Banner(EngineConfig(), ServerConfig(), ("127.0.0.1", 1), Console(file=output, width=200))
    showing = asyncio.create_task(show_start(engine, banner, gateway))
    loading = asyncio.create_task(gateway.load(load, store))
    done, _ = await asyncio.wait([showing], timeout=3 * POLL_S)
    assert not done and "chat page" not in output.getvalue()
    may_load.set()
    await asyncio.wait_for(asyncio.gather(showing, loading), 60)
    assert ("(chat page;" in output.getvalue()) == (error is None)
    assert ("chatcache: tokenizer.json: missing" in output.getvalue()) == (error is not None)
    await store.close()


def test_kv_memory_beyond_what_can_be_used_is_named_next_to_the_size_in_use() -> None:
    text = shown(EngineConfig(kv_memory_bytes=900 * 2**30), ServerConfig())
    assert "512 KiB in all (--kv-memory asked for 900 GiB) waste 4 KiB" in text
    assert "asked for" not in shown(EngineConfig(kv_memory_bytes=HEALTH.kv_bytes + 4096), ServerConfig())
