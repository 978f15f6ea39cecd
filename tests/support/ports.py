"""TCP ports for servers that are restarted on the same port."""

from __future__ import annotations

import random
import socket

# Below the kernel's ephemeral ports: no outgoing connection takes the port while the server is down.
_FIRST, _LAST = 10_000, 32_000


def free_port() -> int:
    """Return a port on which no process listens."""
    random_source = random.SystemRandom()
    while True:
        port = random_source.randrange(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
