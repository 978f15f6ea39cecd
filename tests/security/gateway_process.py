"""A gateway in its own process, to measure its memory: `python -m tests.security.gateway_process DB [leaky]`."""

from __future__ import annotations

import signal
import sys
from typing import Any

from chatcache.config import ServerConfig
from chatcache.gateway import json_codec as jsonio
from chatcache.gateway import middleware as body
from tests.gateway.serving import Server

LEAK_BYTES = 1 << 17


def leak_bodies() -> None:
    """Inject a memory leak: every decoded body leaves an object behind in memory."""
    kept: list[bytes] = []
    original = jsonio.decode_object

    def decode(data: bytes | str) -> dict[str, Any]:
        kept.append(b"x" * LEAK_BYTES)
        return original(data)

    body.decode_object = decode  # type: ignore[attr-defined]


def main() -> None:
    if "leaky" in sys.argv:
        leak_bodies()
    with Server(ServerConfig(db=sys.argv[1])) as server:
        server.wait_ready()
        print(server.port, flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
