"""A gateway in a process of its own, to be killed: `python -m tests.gateway.killable STORE PORT [MODE ...]`.

Modes: forgetful, mute, scripted, unsaved (see `main`).
"""

from __future__ import annotations

import os
import signal
import sys

from chatcache.cli.server import reduce_gc
from chatcache.config import ServerConfig
from chatcache.gateway.api.idempotency import IdempotencyKey
from chatcache.gateway.responses import registry
from chatcache.gateway.responses.run import LiveResponse
from chatcache.storage import redis_client
from tests.gateway.scripted import ScriptedServer, scripted_server
from tests.gateway.serving import Server
from tests.tokenizer.families import tokenizer_of


async def _know_nothing(*_: object) -> None:
    return None


LONG = "".join(f"word {number} of many, " for number in range(200))
CALL = f'<tool_call>\n{{"name": "look", "arguments": {{"at": "{LONG}"}}}}\n</tool_call>'
REPLIES = (f"<think>{LONG[:300]}</think>{LONG[:300]}{CALL}", LONG)


def main(store: str, port: int, *, is_forgetful: bool, is_mute: bool, is_scripted: bool, is_unsaved: bool) -> None:
    """Serve until killed.

    `is_forgetful`: injected bug, the gateway ignores idempotency keys. `is_mute`: it dies after it has stored its first
    turn, before any client receives an answer. `is_scripted`: the first request gets `REPLIES`. `is_unsaved`: injected
    bug, the output of running responses is stored every minute only.
    """
    redis_client.TIMEOUT_S = redis_client.SLOW_TIMEOUT_S  # Redis never goes down, but its answers may take long
    if is_unsaved:
        registry.CHECKPOINT_INTERVAL_S = 60.0
    if is_mute:
        LiveResponse.start = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    if is_forgetful:
        IdempotencyKey.find_target = _know_nothing  # type: ignore[method-assign, assignment]
        IdempotencyKey.claim = lambda *_: None  # type: ignore[method-assign, assignment]
    place = {"redis": store} if "://" in store else {"db": store}
    config = ServerConfig(port=port, **place)  # type: ignore[arg-type]
    with scripted_server(config, tokenizer_of("hermes")) if is_scripted else Server(config) as server:
        if isinstance(server, ScriptedServer):
            server.say(*REPLIES)
        server.runner.delay_s = 0.02
        server.wait_ready()
        reduce_gc()
        print(server.port, flush=True)
        signal.pause()


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]),
        is_forgetful="forgetful" in sys.argv,
        is_mute="mute" in sys.argv,
        is_scripted="scripted" in sys.argv,
        is_unsaved="unsaved" in sys.argv,
    )
