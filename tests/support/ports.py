"""TCP ports for servers that are restarted on the same port."""

from __future__ import annotations

import random
import socket

# Below the kernel's ephemeral ports: no outgoing connection takes the port while the server is down.
_FIRST, _LAST = 10_000, 32_000
_used: set[int] = set()  # by servers of this process, which may not have started yet


def free_port() -> int:
    """Return a port on which no process listens, another one at each call."""
    random_source = random.SystemRandom()
    while True:
        port = random_source.randrange(_FIRST, _LAST)
        if port in _used:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            _used.add(port)
            return port
