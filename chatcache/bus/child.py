"""One engine child: its process, and the parent's end of the socket it speaks on."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from chatcache.bus.codec import FrameBuffer, decode_notice, encode
from chatcache.bus.messages import Boot, Command, Notice

KILL_GRACE_S = 5.0

log = logging.getLogger(__name__)


class Child(asyncio.Protocol):
    """Spawned once, reaped once. `receive` gets each notice; `ended` is set when the socket closes.

    A frame that is no notice closes the socket: a child that garbles is a dead child. So is one that was `cut_off`:
    should it ever wake, nobody hears it.
    """

    def __init__(self, receive: Callable[[Notice], None]) -> None:
        self._receive = receive
        self._frames = FrameBuffer()
        self._transport: asyncio.WriteTransport | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._is_cut_off = False
        self.ended = asyncio.Event()
        self.born_at = time.monotonic()

    async def spawn(self, boot: Boot) -> None:
        """Start the process and send it its boot command.

        Raises: OSError when the system has no room for a process.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = _start(theirs)
        except OSError:
            ours.close()
            raise
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        self.send(boot)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            if not self._is_cut_off:
                self._receive(decode_notice(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def send(self, command: Command) -> None:
        """Queue a command; one for a child that is gone is dropped."""
        frame = encode(command)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def cut_off(self) -> None:
        """Hear nothing from it any more, and end it."""
        self._is_cut_off = True
        if self._transport is not None:
            self._transport.abort()
        self.kill()

    async def reap(self, grace_s: float) -> int | None:
        """Close the socket, wait for the process, kill it after `grace_s`. Returns its exit status, -N for signal N.

        None: not even that ended it; it is left to itself.
        """
        self._is_cut_off = True
        if self._transport is not None:
            self._transport.close()
        if self.process is None:
            return 0
        with suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self.process.wait, grace_s)
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self.process.wait, KILL_GRACE_S)
        log.error("engine process %d does not die; it is left to itself", self.process.pid)
        return None

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


def _start(sock: socket.socket) -> subprocess.Popen[bytes]:
    """Start a worker that inherits `sock` and stderr and nothing else, and sees the modules this process sees."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "chatcache.bus.worker", str(sock.fileno()), str(os.getpid())],
        pass_fds=[sock.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,  # a terminal's Ctrl-C reaches the parent only
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
