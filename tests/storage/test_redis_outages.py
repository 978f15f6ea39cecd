"""Redis servers that die, hang, fill up or start late: acknowledged data stays, the rest is refused in time."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chatcache.conversations.store import StoreUnavailableError
from chatcache.conversations.tree import INCOMPLETE, Conversation, Item, Turn
from chatcache.storage import redis_client, redis_layout
from chatcache.storage.redis import RedisStore
from tests.support.event_loop_delay import measure_loop_delay
from tests.support.redis_servers import RedisServer, answers, create, redis_server, until

HEAD = Conversation("conv", "me", 1.0, 1.0)


@pytest.fixture
def mortal_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """Start a server for one test, with every acknowledged write on the disk."""
    with redis_server(tmp_path / "redis", appendfsync="always") as server:
        yield server


async def test_acknowledged_writes_survive_kills_of_the_server(mortal_redis: RedisServer) -> None:
    """Writers continue through three SIGKILLs: refused soon while it is down, and nothing is lost."""
    store = RedisStore(mortal_redis.url)
    await create(store, HEAD)
    acknowledged: list[str] = []
    slowest_s = 0.0
    stop = asyncio.Event()

    async def write(writer: int) -> None:
        nonlocal slowest_s
        number = 0
        while not stop.is_set():
            number += 1
            item = Item(f"msg_{writer}_{number}", None, "user", "x" * 100, tuple(range(50)))
            began_s = time.monotonic()
            try:
                await store.append("me", "conv", [item])
                acknowledged.append(item.id)
            except StoreUnavailableError:
                slowest_s = max(slowest_s, time.monotonic() - began_s)
                await asyncio.sleep(0.01)

    async def go_on(num_writes: int) -> None:
        async def are_there() -> bool:
            return len(acknowledged) >= num_writes

        await until(are_there, "writes")

    async with measure_loop_delay() as delay:
        writers = [asyncio.create_task(write(writer)) for writer in range(4)]
        for _ in range(3):
            await go_on(len(acknowledged) + 20)
            await asyncio.to_thread(mortal_redis.kill)
            await asyncio.to_thread(mortal_redis.start)
        await go_on(len(acknowledged) + 20)
        stop.set()
        await asyncio.gather(*writers)
    await until(lambda: answers(store), "an answer")
    tree = await store.load("me", "conv")
    await store.close()
    assert set(acknowledged) <= set(tree.items)
    assert tree.conversation.rev == len(tree.items)  # each came whole, and once
    assert delay.subtract_from(slowest_s) < 5.0, "a timeout for each of the writers that wait for a slow disk"


async def test_first_calls_wait_for_a_slow_connection(mortal_redis: RedisServer) -> None:
    """Calls with one order wait for each other; those that wait do not take a connection in progress for an outage."""

    async def check_layout(_: object) -> None:
        await asyncio.sleep(3 * redis_client._PROBE_S)

    async def ping(client: redis_client.Client) -> bool:
        return bool(await client.ping())

    connection = redis_client.RedisConnection(mortal_redis.url, check_layout)
    try:
        assert await asyncio.gather(*(connection.run(ping, order="same") for _ in range(3))) == [True] * 3
    finally:
        await connection.close()


async def test_close_ends_a_reconnection_that_takes_its_cancellation_for_an_error(
    mortal_redis: RedisServer,
) -> None:
    is_checking, was_cancelled = asyncio.Event(), asyncio.Event()

    async def check_layout(_: object) -> None:
        is_checking.set()
        try:
            await asyncio.sleep(0.01 if connection._reconnect_task is None else 3600)
        except asyncio.CancelledError:
            if was_cancelled.is_set():
                raise
            was_cancelled.set()
        raise ConnectionError

    connection = redis_client.RedisConnection(mortal_redis.url, check_layout)
    with pytest.raises(StoreUnavailableError):
        await connection.run(lambda client: client.ping())
    is_checking.clear()
    await is_checking.wait()
    async with asyncio.timeout(20):
        await connection.close()
    assert was_cancelled.is_set()


async def test_hanging_server_is_refused_within_a_second_and_recovers(mortal_redis: RedisServer) -> None:
    store = RedisStore(mortal_redis.url, lease_s=1.5)
    await create(store, HEAD)
    mortal_redis.signal(signal.SIGSTOP)
    turn = Turn("resp_1", "", "m", 1.0)
    async with measure_loop_delay() as delay:
        began_s = time.monotonic()
        given = await asyncio.gather(
            store.append("me", "conv", [], turn),
            *(store.get("me", "conv") for _ in range(100)),  # more than there are connections
            return_exceptions=True,
        )
        assert delay.subtract_from(time.monotonic() - began_s) < 1.0
        assert all(isinstance(each, StoreUnavailableError) for each in given)
        began_s = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            await store.get("me", "conv")
        elapsed_s = time.monotonic() - began_s
        assert delay.subtract_from(elapsed_s) < redis_client.TIMEOUT_S  # by then the outage is known to all callers
    mortal_redis.signal(signal.SIGCONT)
    await until(lambda: answers(store), "an answer")

    async def is_settled() -> bool:
        """Check the refused turn: it may have been stored, but no gateway runs it."""
        present = (await store.load("me", "conv")).turns.get("resp_1")
        return present is None or present.status == INCOMPLETE

    await until(is_settled, "the refused turn to be incomplete")
    await store.close()


async def refused_before(redis: RedisServer, patient: str, impatient: str) -> bool:
    """Hang Redis during a deletion with a long timeout; check that work waiting for it is refused earlier."""
    store = RedisStore(redis.url, lease_s=600.0)
    for name in {patient, impatient}:
        await create(store, replace(HEAD, id=name))
    link = store._connection

    async def is_sent() -> bool:
        return bool(link._slow_client.connection_pool._in_use_connections)

    async def is_idle() -> bool:
        return not link._tasks

    await until(is_idle, "the first sign of life to be stored")
    redis.signal(signal.SIGSTOP)
    deleting = asyncio.create_task(store.delete("me", patient))
    await until(is_sent, "the deletion to be sent")
    turn = asyncio.create_task(store.append("me", impatient, [], Turn("resp_1", "", "m", 1.0)))
    try:
        done, _ = await asyncio.wait([deleting, turn], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(StoreUnavailableError):
            await turn
        return done == {turn}
    finally:
        redis.signal(signal.SIGCONT)
        await asyncio.gather(deleting, return_exceptions=True)
        await store.close()


@pytest.mark.parametrize("other", ["conv", "conv_2"], ids=["of one conversation", "of connections"])
async def test_waiting_work_is_refused_while_slow_work_hangs(
    mortal_redis: RedisServer, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "_NUM_CONNECTIONS", 1)
    assert await refused_before(mortal_redis, "conv", other)


async def test_injected_bug_waiting_without_pings_is_detected(
    mortal_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting work then waits as long as the work before it."""

    async def wait(self: redis_client.RedisConnection, gate: asyncio.Lock | asyncio.Semaphore) -> None:
        await gate.acquire()

    monkeypatch.setattr(redis_client.RedisConnection, "_acquire", wait)
    monkeypatch.setattr(redis_client, "SLOW_TIMEOUT_S", 2.0)
    assert not await refused_before(mortal_redis, "conv", "conv")


async def test_full_server_refuses_writes_and_serves_reads(empty_redis: RedisServer) -> None:
    store = RedisStore(empty_redis.url)
    await store.create(HEAD, [Item("msg_1", None, "user", "Hello")])
    empty_redis.admin.config_set("maxmemory", 1024)
    try:
        for work in (store.append("me", "conv", [Item("msg_2", None, "user", "x")]), store.check()):
            with pytest.raises(StoreUnavailableError, match="rejects writes"):
                await work
        assert list((await store.load("me", "conv")).items) == ["msg_1"]
    finally:
        empty_redis.admin.config_set("maxmemory", 0)
    assert (await store.append("me", "conv", [Item("msg_2", None, "user", "x")])).rev == 1
    await store.close()


async def test_server_that_starts_later_is_found(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        server.kill()
        store = RedisStore(server.url)
        with pytest.raises(StoreUnavailableError):
            await store.create(HEAD)
        server.start()
        await create(store, HEAD)
        await store.close()


async def test_server_that_returns_with_a_newer_layout_is_refused(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", appendfsync="always") as server:
        store = RedisStore(server.url)
        await create(store, HEAD)
        server.admin.set(redis_layout.SCHEMA_KEY, 99)
        server.kill()
        with pytest.raises(StoreUnavailableError):
            await store.get("me", "conv")
        server.start()
        await asyncio.sleep(3 * redis_client._PROBE_S)
        with pytest.raises(StoreUnavailableError):
            await store.get("me", "conv")
        await store.close()
