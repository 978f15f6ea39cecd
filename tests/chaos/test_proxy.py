"""Test the faults of the TCP proxy and that they end with `heal`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.chaos.proxy import Proxy, proxied

PATIENCE_S = 30.0


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, proxied(server.sockets[0].getsockname()[1]) as proxy:
        yield proxy


class Connection:
    """A client connection through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def begin(cls, proxy: Proxy) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", proxy.port))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def receive(self, count: int) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readexactly(count)

    async def receives_nothing(self) -> bool:
        try:
            async with asyncio.timeout(0.05):
                await self._reader.readexactly(1)
        except TimeoutError:
            return True
        return False

    def end(self) -> None:
        self._writer.close()


async def _exchange(proxy: Proxy, data: bytes) -> Connection:
    """Return a new connection on which `data` has been echoed."""
    connection = await Connection.begin(proxy)
    connection.send(data)
    assert await connection.receive(len(data)) == data
    return connection


async def test_proxy_forwards_data_with_the_set_delay(proxy: Proxy) -> None:
    connection = await Connection.begin(proxy)
    connection.send(b"hello")
    assert await connection.receive(5) == b"hello"
    proxy.delay_s = 0.02
    began_s = asyncio.get_running_loop().time()
    connection.send(b"slow")
    assert await connection.receive(4) == b"slow"
    assert asyncio.get_running_loop().time() - began_s >= 0.04
    connection.end()


async def test_stalled_data_arrives_after_heal(proxy: Proxy) -> None:
    connection = await Connection.begin(proxy)
    proxy.stall()
    connection.send(b"wait")
    assert await connection.receives_nothing()
    await proxy.heal()
    assert await connection.receive(4) == b"wait"
    connection.end()


async def test_cut_resets_the_connection_after_the_set_bytes(proxy: Proxy) -> None:
    connection = await _exchange(proxy, b"x")
    proxy.cut(3)
    connection.send(b"abcdef")
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await connection.receive(6)
    assert proxy.num_cut == 1
    connection.end()
    (await _exchange(proxy, b"again")).end()


async def test_refuse_rejects_connections_until_heal(proxy: Proxy) -> None:
    connection = await _exchange(proxy, b"x")
    await proxy.refuse()
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await connection.receive(1)
    with pytest.raises(ConnectionRefusedError):
        await Connection.begin(proxy)
    connection.end()
    await proxy.heal()
    (await _exchange(proxy, b"back")).end()


async def test_half_open_connection_stays_half_open_after_heal(proxy: Proxy) -> None:
    connection = await Connection.begin(proxy)
    proxy.lose()
    connection.send(b"gone")
    assert await connection.receives_nothing()
    await proxy.heal()
    connection.send(b"still")
    assert await connection.receives_nothing()
    other = await Connection.begin(proxy)
    other.send(b"new")
    assert await other.receive(3) == b"new"
    for each in (connection, other):
        each.end()
