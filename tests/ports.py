"""Ports for servers that must be told theirs, and come back on it."""

from __future__ import annotations

import random
import socket

# Below those that the kernel hands out by itself: nobody's outgoing connection takes it while the server is down.
_FIRST, _LAST = 10_000, 32_000


def free_port() -> int:
    """One that nobody listens on."""
    draws = random.SystemRandom()
    while True:
        port = draws.randrange(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
