"""Entry point of the engine process.

`python -m chatcache.engine_process.worker FD PARENT_PID`.

FD is the child's end of a socket pair. The first command (`Boot`) names a factory, "module:function", which is called
as factory(config, progress) -> engine, for instance `chatcache.factory:build_engine`.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import select
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
    EngineFailed,
    FrameBuffer,
    Loaded,
    LoadFailed,
    Loading,
    Notice,
    call_id_of,
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
    """Commands from a blocking stream socket.

    An invalid frame is answered with an error and ignored.
    """

    def __init__(self, sock: socket.socket, send: Callable[[Notice], None]) -> None:
        self._sock = sock
        self._send = send
        self._frames = FrameBuffer()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def read(self, wait_s: float | None) -> list[Command]:
        commands: list[Command] = []
        while True:
            try:
                data = self._sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if commands or wait_s == 0 or not self._poll.poll(None if wait_s is None else wait_s * 1000):
                    return commands
                continue
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            for body in self._frames.feed(data):
                try:
                    commands.append(decode_command(body))
                except msgspec.MsgspecError as error:
                    self._reject(body, error)

    def _reject(self, body: bytes, error: Exception) -> None:
        log.error("a frame of %d bytes is not a command: %s", len(body), error)
        call = call_id_of(body)
        if call is not None:
            reply = InvalidRequestError(f"the engine cannot decode this command: {error}")
            self._send(Answer(call, encode_error(reply)))


def die_with_parent() -> None:
    """Make Linux kill this process when its parent ends.

    On other systems it ends at its next read of the closed socket.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def serve(sock: socket.socket) -> int:
    """Build the engine and run it until `Stop` or the end of the parent; return the exit status."""

    def send(notice: Notice) -> None:
        for frame in encode_notice(notice):
            sock.sendall(frame)

    command_queue = SocketCommandQueue(sock, send)
    boot, *early = command_queue.read(wait_s=None)
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
        send(Loaded(engine.model_info, engine.health()))
        run_engine(engine, command_queue, send)
    except ConnectionError:
        log.info("the parent process has ended")
    except DeviceLostError as error:
        log.critical("the engine process ends: %s", error.message)
        send(EngineFailed(encode_error(error)))
        return EXIT_DEVICE_LOST
    return 0


def find_factory(path: str) -> Factory:
    """Import and return the function "module:function"."""
    module, _, name = path.partition(":")
    return cast(Factory, getattr(importlib.import_module(module), name))


def main() -> int:
    """Run the worker with the arguments of the command line; return the exit status."""
    parent = int(sys.argv[2])
    die_with_parent()
    if os.getppid() != parent:  # it ended before the call above
        return 0
    # The parent handles both signals and drains first. Service managers send SIGTERM to all processes of a service.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    with sock:
        return serve(sock)


if __name__ == "__main__":
    sys.exit(main())
