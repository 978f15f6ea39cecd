"""The proxy does what its faults are called, and only while they last."""

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


class Talk:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def begin(cls, proxy: Proxy) -> Talk:
        return cls(*await asyncio.open_connection("127.0.0.1", proxy.port))

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    async def hear(self, count: int) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readexactly(count)

    async def hears_nothing(self) -> bool:
        try:
            async with asyncio.timeout(0.05):
                await self._reader.readexactly(1)
        except TimeoutError:
            return True
        return False

    def end(self) -> None:
        self._writer.close()


async def test_it_passes_on_and_slowly_if_told(proxy: Proxy) -> None:
    talk = await Talk.begin(proxy)
    talk.say(b"hello")
    assert await talk.hear(5) == b"hello"
    proxy.delay_s = 0.02
    began_s = asyncio.get_running_loop().time()
    talk.say(b"slow")
    assert await talk.hear(4) == b"slow"
    assert asyncio.get_running_loop().time() - began_s >= 0.04
    talk.end()


async def test_what_is_stalled_comes_later(proxy: Proxy) -> None:
    talk = await Talk.begin(proxy)
    proxy.stall()
    talk.say(b"wait")
    assert await talk.hears_nothing()
    await proxy.heal()
    assert await talk.hear(4) == b"wait"
    talk.end()


async def test_it_cuts_after_so_many_bytes(proxy: Proxy) -> None:
    talk = await Talk.begin(proxy)
    talk.say(b"x")
    assert await talk.hear(1) == b"x"
    proxy.cut(3)
    talk.say(b"abcdef")
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await talk.hear(6)
    assert proxy.num_cut == 1
    talk.end()
    talk = await Talk.begin(proxy)
    talk.say(b"again")
    assert await talk.hear(5) == b"again"
    talk.end()


async def test_it_refuses_until_it_is_healed(proxy: Proxy) -> None:
    talk = await Talk.begin(proxy)
    talk.say(b"x")
    assert await talk.hear(1) == b"x"
    await proxy.refuse()
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await talk.hear(1)
    with pytest.raises(ConnectionRefusedError):
        await Talk.begin(proxy)
    talk.end()
    await proxy.heal()
    talk = await Talk.begin(proxy)
    talk.say(b"back")
    assert await talk.hear(4) == b"back"
    talk.end()


async def test_a_half_open_connection_stays_so(proxy: Proxy) -> None:
    talk = await Talk.begin(proxy)
    proxy.lose()
    talk.say(b"gone")
    assert await talk.hears_nothing()
    await proxy.heal()
    talk.say(b"still")
    assert await talk.hears_nothing()
    other = await Talk.begin(proxy)
    other.say(b"new")
    assert await other.hear(3) == b"new"
    for each in (talk, other):
        each.end()
