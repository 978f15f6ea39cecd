"""Redis with replicas and Sentinels: a primary that dies or is cut off loses no acknowledged write."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from chatcache.cluster import bus
from chatcache.conversations.store import StoreUnavailableError, StoreUnusableError
from chatcache.conversations.tree import Conversation, Item
from chatcache.redis_urls import num_waited_replicas, open_client, server_name
from chatcache.storage.redis import RedisStore, check_server
from chatcache.storage.redis_client import RedisConnection
from tests.support.redis_servers import SentinelGroup, answers, create, sentinel_group, until

HEAD = Conversation("conv", "me", 1.0, 1.0)
MIN_REPLICAS = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[SentinelGroup]:
    with sentinel_group(tmp_path) as group:
        yield group


class Writers:
    """Tasks that append messages to a conversation, as fast as these are acknowledged."""

    def __init__(self, store: RedisStore, num_writers: int = 4) -> None:
        self.acknowledged: list[str] = []
        self._store = store
        self._is_stopping = False
        self._tasks = [asyncio.create_task(self._write(writer)) for writer in range(num_writers)]

    async def _write(self, writer: int) -> None:
        number = 0
        while not self._is_stopping:
            number += 1
            item = Item(f"msg_{writer}_{number}", None, "user", "x" * 100)
            try:
                await self._store.append("me", "conv", [item])
                self.acknowledged.append(item.id)
            except StoreUnavailableError:
                await asyncio.sleep(0.01)

    async def go_on(self, num_writes: int = 50) -> None:
        """Wait until so many more messages are acknowledged."""
        num_expected = len(self.acknowledged) + num_writes

        async def are_there() -> bool:
            return len(self.acknowledged) >= num_expected

        await until(are_there, "writes")

    async def lost(self) -> set[str]:
        """Stop, and return the acknowledged messages that the store does not have."""
        self._is_stopping = True
        await asyncio.gather(*self._tasks)
        await until(lambda: answers(self._store), "an answer")
        return set(self.acknowledged) - set((await self._store.load("me", "conv")).items)


async def cut_off_primary(group: SentinelGroup, during: Callable[[], Awaitable[None]]) -> None:
    """Cut the primary off until another one is named and `during` has ended; return when it is a replica in sync.

    A second failure before that could lose what the one replica in sync has acknowledged.
    """
    old = await asyncio.to_thread(group.primary)

    async def is_replaced() -> bool:
        return await asyncio.to_thread(group.primary) is not old

    async def is_replica() -> bool:
        return bool(old.admin.execute_command("ROLE")[0] == b"slave") and await asyncio.to_thread(group.is_in_sync)

    with old.cut_off():
        await until(is_replaced, "a new primary")
        await during()
    await until(is_replica, "the old primary as a replica", timeout_s=180.0)  # Sentinels without a core pause for 30 s


@pytest.mark.slow
async def test_failover_loses_no_acknowledged_write(group: SentinelGroup) -> None:
    check_server(group.url)
    store, client = RedisStore(f"{group.url}?wait_replicas=1"), bus.connect(group.url)
    await create(store, HEAD)
    writers = Writers(store)
    await writers.go_on()
    group.servers[0].kill()
    await until(lambda: answers(store), "a new primary")
    assert not await writers.lost()

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
@pytest.mark.parametrize("num_rounds", [1, pytest.param(20, marks=pytest.mark.long)])
async def test_primary_that_is_cut_off_acknowledges_nothing_that_is_lost(num_rounds: int, tmp_path: Path) -> None:
    """Its clients still reach it, and go to the new primary after a refused write."""
    with sentinel_group(tmp_path, *MIN_REPLICAS) as group:
        store = RedisStore(f"{group.url}?wait_replicas=1")
        await create(store, HEAD)
        writers = Writers(store)
        for _ in range(num_rounds):
            await writers.go_on()
            await cut_off_primary(group, writers.go_on)
        assert not await writers.lost()
        await store.close()


@pytest.mark.slow
async def test_injected_bug_writes_acknowledged_by_one_server_only_are_lost(tmp_path: Path) -> None:
    """Neither WAIT nor `min-replicas-to-write`: the primary that is cut off continues."""
    with sentinel_group(tmp_path) as group:
        store = RedisStore(group.url)
        await create(store, HEAD)
        writers = Writers(store)
        await writers.go_on()
        await cut_off_primary(group, writers.go_on)
        assert len(await writers.lost()) >= 50
        await store.close()


@pytest.mark.slow
async def test_stream_of_the_bus_continues_on_the_new_primary(tmp_path: Path) -> None:
    """Also through connections that were in use when another one found the new primary."""
    with sentinel_group(tmp_path, *MIN_REPLICAS) as group:
        client, key = bus.connect(group.url), bus.inbox("w")
        pending: list[int] = []
        received: set[int] = set()

        def take() -> dict[bytes, bytes]:
            return {bus.COMMANDS: bytes([pending.pop()])} if pending else {}

        async def read() -> None:
            reader = bus.StreamReader(client, key)
            while True:
                received.update(fields[bus.COMMANDS][0] for _, fields in await reader.read())

        writer = bus.StreamWriter(client, key, take)
        tasks = [asyncio.create_task(work()) for work in (writer.run, read)]

        async def send(number: int) -> None:
            async def is_received() -> bool:
                return number in received

            pending.append(number)
            writer.wake()
            await until(is_received, f"entry {number}")

        await send(1)
        await cut_off_primary(group, lambda: send(2))
        await send(3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.aclose()


@pytest.mark.slow
async def test_messages_reach_a_gateway_whose_subscription_is_at_a_primary_that_was_cut_off(tmp_path: Path) -> None:
    with sentinel_group(tmp_path, *MIN_REPLICAS) as group:
        store = RedisStore(group.url)
        received: list[bytes] = []
        listening = asyncio.create_task(store.channel.listen(received.append, lambda: None))

        async def send(number: int) -> None:
            async def is_received() -> bool:
                with contextlib.suppress(StoreUnavailableError):
                    await store.check()  # a refused write: the next one goes to the new primary
                    await store.channel.send(store.channel.name, bytes([number]))
                return bytes([number]) in received

            await until(is_received, f"message {number}")

        await send(1)
        await cut_off_primary(group, lambda: send(2))
        await send(3)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await store.close()


@pytest.mark.slow
async def test_write_that_no_replica_confirms_is_refused(group: SentinelGroup) -> None:
    store = RedisStore(f"{group.url}?wait_replicas=1")
    await create(store, HEAD)
    for server in group.servers[1:]:
        server.kill()
    with pytest.raises(StoreUnavailableError):
        await store.append("me", "conv", [Item("msg", None, "user", "x")])
    await until(lambda: answers(store), "an answer")
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


class _HangingWriter:
    """A TLS connection to a server that was cut off: closing it does not end."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True

    async def wait_closed(self) -> None:
        await asyncio.Event().wait()


def _connect(pool: Any, host: str) -> tuple[Any, _HangingWriter]:
    """Add a connection to those in use of a pool."""
    connection, writer = pool.make_connection(), _HangingWriter()
    connection.host, connection.port = host, 1
    connection._reader, connection._writer = asyncio.StreamReader(), writer
    pool._in_use_connections.add(connection)
    return connection, writer


async def _accept_layout(client: Any) -> None:
    pass


async def test_connection_to_a_former_primary_is_released_although_it_does_not_end() -> None:
    client = open_client("redis+sentinel://host/store", socket_connect_timeout=0.01)
    pool = client.connection_pool
    pool.master_address = ("new", 1)
    (old, closed), (new, kept) = _connect(pool, "old"), _connect(pool, "new")
    for connection in (old, new):
        await pool.release(connection)
    assert (closed.is_closed, kept.is_closed) == (True, False)
    assert list(pool._available_connections) == [old, new] and not pool._in_use_connections
    await new.disconnect(nowait=True)


async def test_refused_write_is_reported_although_idle_connections_do_not_end() -> None:
    """Those of both kinds of work are closed: the server may not be the primary any more."""
    store = RedisConnection("redis://host", _accept_layout, timeout_s=0.01)
    pools = [client.connection_pool for client in (store._client, store._slow_client)]
    connections = [_connect(pool, "host") for pool in pools]
    for pool, (connection, _) in zip(pools, connections, strict=True):
        await pool.release(connection)
    store._connect_task, store._down_reason = asyncio.create_task(asyncio.sleep(0)), None

    async def write(client: Any) -> None:
        raise redis.ResponseError("NOREPLICAS Not enough good replicas to write.")

    with pytest.raises(StoreUnavailableError, match="rejects writes"):
        await store.run(write, is_slow=True)
    assert [writer.is_closed for _, writer in connections] == [True, True]
    await store.close()
