"""Bind the listening socket of a server, and explain why a port cannot be bound."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from typing import NamedTuple

BACKLOG = 2048
PROBE_TIMEOUT_S = 2.0
_READY_STATES = ("ready", "loading", "unavailable")
_MAX_PORT = 65_535


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen on the first address that `host` resolves to.

    Raises: OSError.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError:  # a label of the name is empty or too long
        raise OSError("this is not a host name") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


class BindFailure(NamedTuple):
    """The reason why a port cannot be bound, and a remedy ("" if another port would not help).

    `is_chatcache`: another chatcache server uses the port.
    """

    reason: str
    remedy: str
    is_chatcache: bool = False


def explain_bind_error(host: str, port: int, error: OSError) -> BindFailure:
    """Explain why `listen` failed, and find out whether another chatcache server uses the port."""
    reason = error.strerror or str(error)
    if error.errno != errno.EADDRINUSE:
        return BindFailure(reason, "")
    other = f"--port {port + 1 if port < _MAX_PORT else 0}"
    model = find_server(host, port)
    if model is None:
        return BindFailure(reason, f"choose another port, for example {other}, or stop the program that uses this one")
    reason = f"a chatcache server already serves {model or 'a model'} on this port"
    return BindFailure(reason, f"choose another port and another file, for example {other} --db other.db", True)


def find_server(host: str, port: int) -> str | None:
    """Return the model of the chatcache server on a port ("" if unnamed), or None without one."""
    import httpx  # only needed after a failure, so not imported into every server

    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/readyz"
    logging.getLogger("httpx").setLevel(logging.WARNING)  # the probe must not appear in the server's log
    with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, ValueError):
        body = httpx.get(url, timeout=PROBE_TIMEOUT_S, trust_env=False).json()
        if isinstance(body, dict) and body.get("status") in _READY_STATES and "model" in body:
            return str(body["model"] or "")
    return None
