"""TCP proxy that injects network faults. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

READ_BYTES = 1 << 16


class Proxy:
    """Listens on `port` of the loopback interface and forwards to `target` unless a fault is set.

    `delay_s` delays each piece in both directions. `stall` holds all data until `heal`; `cut` resets all connections
    after a number of bytes; `refuse` resets them and stops listening; `lose` drops all data from the target for good:
    these connections stay half-open, and the client must detect that.
    """

    def __init__(self, target: int) -> None:
        self.delay_s = 0.0
        self.num_bytes = 0
        self.num_cut = 0
        self.port = 0
        self._target = target
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._bytes_left: int | None = None
        self._is_losing = False
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def stall(self) -> None:
        self._flowing.clear()

    def cut(self, after_bytes: int) -> None:
        self._bytes_left = after_bytes

    def lose(self) -> None:
        self._is_losing = True

    async def refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._reset()

    async def heal(self) -> None:
        """Remove all faults."""
        self.delay_s, self._bytes_left, self._is_losing = 0.0, None, False
        self._flowing.set()
        if self._server is None:
            await self.start()

    async def close(self) -> None:
        self._flowing.set()
        if self._server is not None:
            self._server.close()
            self._server = None
        links = list(self._links)
        self._reset()
        await asyncio.gather(*(link.task for link in links), return_exceptions=True)

    def _reset(self) -> None:
        for link in list(self._links):
            link.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(self, reader, writer)
        self._links.add(link)
        try:
            await link.task
        finally:
            self._links.discard(link)

    async def pass_on(self, link: _Link, data: bytes, *, from_target: bool) -> bytes:
        """Return the data to forward, possibly later, or nothing."""
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        await self._flowing.wait()
        link.is_dead = link.is_dead or (from_target and self._is_losing)
        if link.is_dead and from_target:
            return b""
        self.num_bytes += len(data)
        if self._bytes_left is not None:
            data, self._bytes_left = data[: self._bytes_left], self._bytes_left - len(data)
            if self._bytes_left <= 0:
                self._bytes_left = None
                self.num_cut += 1
                asyncio.get_running_loop().call_soon(self._reset)
        return data


class _Link:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.is_dead = False
        self._proxy = proxy
        self._reader, self._writers = reader, [writer]
        self.task = asyncio.create_task(self._run())

    def reset(self) -> None:
        """Close both connections with a RST."""
        for writer in self._writers:
            reset(writer)
        self.task.cancel()

    async def _run(self) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                there, writer = await asyncio.open_connection("127.0.0.1", self._proxy._target)
                self._writers.append(writer)
                up = self._pump(self._reader, writer, from_target=False)
                down = self._pump(there, self._writers[0], from_target=True)
                await asyncio.gather(up, down)
            finally:
                for each in self._writers:
                    each.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_target: bool) -> None:
        while data := await reader.read(READ_BYTES):
            if passed := await self._proxy.pass_on(self, data, from_target=from_target):
                writer.write(passed)
                await writer.drain()
        if not self.is_dead and writer.can_write_eof():
            writer.write_eof()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a RST instead of a FIN."""
    sock: socket.socket | None = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.asynccontextmanager
async def proxied(target: int) -> AsyncIterator[Proxy]:
    proxy = await Proxy(target).start()
    try:
        yield proxy
    finally:
        await proxy.close()
