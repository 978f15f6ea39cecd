"""A gateway in a process of its own, to be killed: `python -m tests.gateway.killable STORE PORT [forgetful] [mute]`."""

from __future__ import annotations

import os
import signal
import sys

from chatcache.cli.server import reduce_gc
from chatcache.config import ServerConfig
from chatcache.gateway.api.idempotency import IdempotencyKey
from chatcache.gateway.responses.run import LiveResponse
from tests.gateway.serving import Server


async def _know_nothing(*_: object) -> None:
    return None


def main(store: str, port: int, *, is_forgetful: bool, is_mute: bool) -> None:
    """Serve until killed.

    `is_forgetful`: injected bug, the gateway ignores idempotency keys. `is_mute`: it dies after it has stored its first
    turn, before any client receives an answer.
    """
    if is_mute:
        LiveResponse.start = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    if is_forgetful:
        IdempotencyKey.find_target = _know_nothing  # type: ignore[method-assign, assignment]
        IdempotencyKey.claim = lambda *_: None  # type: ignore[method-assign, assignment]
    place = {"redis": store} if "://" in store else {"db": store}
    with Server(ServerConfig(port=port, **place)) as server:  # type: ignore[arg-type]
        server.runner.delay_s = 0.02
        server.wait_ready()
        reduce_gc()
        print(server.port, flush=True)
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), is_forgetful="forgetful" in sys.argv, is_mute="mute" in sys.argv)
