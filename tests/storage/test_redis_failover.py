"""Redis with a replica and Sentinels: the death of the primary loses no acknowledged write."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from chatcache.cluster import bus
from chatcache.conversations.store import StoreUnavailableError, StoreUnusableError
from chatcache.conversations.tree import Conversation, Item
from chatcache.redis_urls import num_waited_replicas, server_name
from chatcache.storage.redis import RedisStore, check_server
from tests.support.redis_servers import SentinelGroup, answers, sentinel_group, until

HEAD = Conversation("conv", "me", 1.0, 1.0)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[SentinelGroup]:
    with sentinel_group(tmp_path) as group:
        yield group


@pytest.mark.slow
async def test_failover_loses_no_acknowledged_write(group: SentinelGroup) -> None:
    check_server(group.url)
    store, client = RedisStore(f"{group.url}?wait_replicas=1"), bus.connect(group.url)
    await store.create(HEAD)
    acknowledged: list[str] = []
    stop = asyncio.Event()

    async def write(writer: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            item = Item(f"msg_{writer}_{number}", None, "user", "x" * 100)
            try:
                await store.append("me", "conv", [item])
                acknowledged.append(item.id)
            except StoreUnavailableError:
                await asyncio.sleep(0.01)

    async def go_on(num_writes: int) -> None:
        async def are_there() -> bool:
            return len(acknowledged) >= num_writes

        await until(are_there, "writes")

    writers = [asyncio.create_task(write(writer)) for writer in range(4)]
    await go_on(50)
    group.servers[0].kill()
    num_before = len(acknowledged)
    await until(lambda: answers(store), "a new primary")
    stop.set()
    await asyncio.gather(*writers)
    assert set((await store.load("me", "conv")).items) >= set(acknowledged)
    assert len(acknowledged) >= num_before

    async def is_written() -> bool:
        with bus.ignore_outages():
            return bool(await client.set("chatcache:bus:test", b"1"))
        return False

    await until(is_written, "a write to the bus")
    for server in group.servers[1:]:
        server.kill()
    with pytest.raises(StoreUnavailableError):
        await store.append("me", "conv", [Item("late", None, "user", "x")])
    await store.close()
    await client.aclose()


@pytest.mark.slow
async def test_write_that_no_replica_confirms_is_refused(group: SentinelGroup) -> None:
    store = RedisStore(f"{group.url}?wait_replicas=1")
    await store.create(HEAD)
    for server in group.servers[1:]:
        server.kill()
    with pytest.raises(StoreUnavailableError):
        await store.append("me", "conv", [Item("msg", None, "user", "x")])
    assert (await store.get("me", "conv")).id == "conv"
    await store.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://host:26379", "names no service"),
        ("redis+sentinel://host:26379,/store", "empty host"),
        ("redis+sentinel://host:x/store", "[Pp]ort"),
        ("unix+sentinel://host/store", "scheme"),
        ("redis://host?wait_replicas=-1", "wait_replicas"),
        ("redis+sentinel://host/store/x", "database"),
    ],
)
def test_invalid_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(StoreUnusableError, match=message):
        RedisStore(url)


def test_url_without_its_login_names_the_servers() -> None:
    assert server_name("redis+sentinel://user:secret@a:1,b:2/store/0") == "a:1,b:2"
    assert server_name("unix:///run/redis.sock") == "/run/redis.sock"
    assert num_waited_replicas("redis://host/0?wait_replicas=2") == 2
    assert urlsplit(server_name("redis://host/0")).path == "host"
