"""The engine child: `python -m chatcache.engine_process.worker FD`, FD being its end of a socket pair.

The first command (`Boot`) names the factory, "module:function", called as factory(config, progress) -> engine. The bus
itself knows no model: `chatcache.factory:build_engine` is what the CLI passes.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import cast

import msgspec

from chatcache import logs
from chatcache.config import EngineConfig
from chatcache.engine_process.loop import Progress, StepEngine, run_engine
from chatcache.engine_process.protocol import (
    Answer,
    Boot,
    Command,
    Ending,
    FrameBuffer,
    Loaded,
    LoadFailed,
    Loading,
    Notice,
    call_of,
    decode_command,
    encode_error,
    encode_notice,
)
from chatcache.errors import DeviceLostError, InvalidRequestError

log = logging.getLogger(__name__)

EXIT_LOAD_FAILED = 3
EXIT_DEVICE_LOST = 4
READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1

Factory = Callable[[EngineConfig, Progress], StepEngine]


class SocketCommandQueue:
    """Commands from a blocking stream socket. A frame that is none is refused to its caller and otherwise ignored."""

    def __init__(self, sock: socket.socket, send: Callable[[Notice], None]) -> None:
        self._sock = sock
        self._send = send
        self._frames = FrameBuffer()

    def read(self, block: bool) -> list[Command]:
        commands: list[Command] = []
        while True:
            wait = block and not commands
            try:
                data = self._sock.recv(READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return commands
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            for body in self._frames.feed(data):
                try:
                    commands.append(decode_command(body))
                except msgspec.MsgspecError as error:
                    self._refuse(body, error)

    def _refuse(self, body: bytes, error: Exception) -> None:
        log.error("a frame of %d bytes is no command: %s", len(body), error)
        call = call_of(body)
        if call is not None:
            self._send(Answer(call, encode_error(InvalidRequestError(f"the engine does not understand this: {error}"))))


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies; elsewhere the closed socket ends it at its next read."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def serve(sock: socket.socket) -> int:
    """Load the engine, then run it until the parent says stop or is gone. Returns the exit status."""

    def send(notice: Notice) -> None:
        for frame in encode_notice(notice):
            sock.sendall(frame)

    inbox = SocketCommandQueue(sock, send)
    boot, *early = inbox.read(block=True)
    if not isinstance(boot, Boot) or early:
        raise ValueError("the first frame must be the boot command, alone")
    logs.configure_logging(boot.log_level, boot.log_format, "engine")
    try:
        engine = find_factory(boot.factory)(boot.config, lambda fraction, detail: send(Loading(fraction, detail)))
    except ConnectionError:
        return 0
    except Exception as error:
        log.debug("the engine could not be built", exc_info=True)
        send(LoadFailed(encode_error(error)))
        return EXIT_LOAD_FAILED
    try:
        send(Loaded(engine.facts, engine.health()))
        run_engine(engine, inbox, send)
    except ConnectionError:
        log.info("the parent is gone")
    except DeviceLostError as error:
        log.critical("the engine process ends: %s", error.message)
        send(Ending(encode_error(error)))
        return EXIT_DEVICE_LOST
    return 0


def find_factory(path: str) -> Factory:
    """Import "module:function"."""
    module, _, name = path.partition(":")
    return cast(Factory, getattr(importlib.import_module(module), name))


def main() -> int:
    parent = int(sys.argv[2])
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above could matter
        return 0
    # Both are the parent's to handle: it drains first. Service managers send SIGTERM to all processes of a service.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    with sock:
        return serve(sock)


if __name__ == "__main__":
    sys.exit(main())
