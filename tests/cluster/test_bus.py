"""Cancellation of the tasks that read and write a bus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from chatcache.cluster import bus
from tests.engine_process.engines import until
from tests.support.ports import free_port
from tests.support.redis_servers import RedisServer, redis_server


class CancellationLost:
    """A client that ends a cancelled command with an answer or an error, as redis-py sometimes does."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.has_command = asyncio.Event()

    async def execute(self, *_: object, **__: object) -> object:
        self.has_command.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if isinstance(self.answer, Exception):
                raise self.answer from None
        return self.answer

    xadd = xread = execute


async def write(client: Any) -> None:
    writer = bus.StreamWriter(client, "key", lambda: {b"field": b"value"})
    writer.wake()
    await writer.run()


async def read(client: Any) -> None:
    reader = bus.StreamReader(client, "key")
    while True:
        await reader.read()


@pytest.mark.parametrize("answer", [None, redis.ConnectionError("closed")], ids=["answer", "error"])
@pytest.mark.parametrize("work", [write, read])
async def test_cancellation_that_redis_loses_ends_the_task(work: Callable[[Any], Awaitable[None]], answer: Any) -> None:
    client = CancellationLost(answer)
    task = asyncio.ensure_future(work(client))
    await client.has_command.wait()
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=60)
    task.cancel()
    assert done and task.cancelled()


class CutOffPrimary:
    """A server that answers and refuses writes. Its `connection_pool` counts how often its connections are closed."""

    def __init__(self) -> None:
        self.num_closed = 0
        self.connection_pool = self

    async def set(self, *_: object, **__: object) -> None:
        raise redis.ResponseError("NOREPLICAS Not enough good replicas to write.")

    async def disconnect(self, *, inuse_connections: bool) -> None:
        self.num_closed += not inuse_connections


async def test_lease_that_a_primary_refuses_is_renewed_on_a_new_connection() -> None:
    client = CutOffPrimary()
    assert await bus.Lease(client, "key").renew(b"1")
    assert client.num_closed == 1


async def test_lease_logs_the_first_failure_of_each_outage(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = bus.connect(server.url.replace("secret", "wrong"))
    lease = bus.Lease(client, bus.gateway_key("logged"))
    try:
        for _ in range(3):
            assert await lease.renew(b"1") and not lease.is_acquired
        server.admin.acl_setuser("chatcache", enabled=True, passwords=["+wrong"])
        assert await lease.renew(b"1") and lease.is_acquired
    finally:
        server.admin.acl_setuser("chatcache", enabled=True, passwords=["-wrong"])
    await client.aclose()
    first, second = [record.message for record in caplog.records if "--bus" in record.message]
    assert first.startswith("the bus (--bus) refuses this process: invalid username-password pair")
    assert second == "the bus (--bus) answers again"


async def test_lease_logs_that_nothing_answers(caplog: pytest.LogCaptureFixture) -> None:
    client = bus.connect(f"redis://127.0.0.1:{free_port()}")
    assert await bus.Lease(client, "key").renew(b"1")
    await client.aclose()
    assert "the bus (--bus) does not answer: " in caplog.text


@pytest.mark.usefixtures("patient_bus")
async def test_lease_that_is_not_renewed_expires(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus, "LEASE_S", 0.1)
    client, key = bus.connect(server.url), bus.worker_key("w")
    lease = bus.Lease(client, key)
    assert await lease.renew(b"1")

    async def is_gone() -> bool:
        return not server.admin.exists(key)

    await until(is_gone)
    assert not await lease.renew(b"1") and not server.admin.exists(key)
    await client.aclose()


def test_lease_that_is_not_renewed_is_silent_after_a_while() -> None:
    now_s = 100.0
    leases = bus.SilentLeases(0.5, lambda: now_s)
    assert not leases.update({"w": b"1", "gone": None})
    while (now_s := now_s + 0.25) < 100.0 + bus.SILENT_S:
        assert not leases.update({"w": b"1", "gone": None})
    assert leases.update({"w": b"1", "gone": None}) == ["w"]
    assert not leases.update({"w": b"2"})


def test_lease_of_a_worker_that_is_busy_for_a_second_is_not_silent() -> None:
    now_s = 100.0
    leases = bus.SilentLeases(0.5, lambda: now_s)
    for number in range(3):
        renewed_s = now_s
        while now_s <= renewed_s + bus.RENEW_S + 1.0 + bus.RETRY_S:
            assert not leases.update({"w": b"%d" % number})
            now_s += 0.05


def test_outage_is_no_silence() -> None:
    now_s = 100.0
    leases = bus.SilentLeases(0.5, lambda: now_s)
    leases.update({"w": b"1"})
    now_s += 60.0
    assert not leases.update({"w": b"1"})


async def test_closed_client_has_no_connections(tmp_path: Path) -> None:
    with redis_server(tmp_path / "bus") as server:
        client = bus.connect(server.url)
        await client.set("chatcache:bus:test", b"1")
        (connection,) = client.connection_pool._available_connections
        assert connection.is_connected
        await client.aclose()
        assert not connection.is_connected
