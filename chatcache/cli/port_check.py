"""Who answers where this server was to listen."""

from __future__ import annotations

import contextlib
import errno
import logging
from typing import NamedTuple

import httpx

ASK_TIMEOUT_S = 2.0
_STATES = ("ready", "loading", "unavailable")
_LAST_PORT = 65_535


def neighbour(host: str, port: int) -> str | None:
    """The model of the chatcache that serves there ("" for one that does not say); None for anybody else."""
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/readyz"
    logging.getLogger("httpx").setLevel(logging.WARNING)  # what it asks is not our log's
    with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, ValueError):
        told = httpx.get(url, timeout=ASK_TIMEOUT_S, trust_env=False).json()
        if isinstance(told, dict) and told.get("status") in _STATES and "model" in told:
            return str(told["model"] or "")
    return None


class PortInUse(NamedTuple):
    """Why nothing can listen there, and what to do about it ("": another port would not help)."""

    why: str
    remedy: str
    is_ours: bool = False


def explain_bind_error(host: str, port: int, error: OSError) -> PortInUse:
    """What is to be said of a port that did not let us listen."""
    reason = error.strerror or str(error)
    if error.errno != errno.EADDRINUSE:
        return PortInUse(reason, "")
    other = f"--port {port + 1 if port < _LAST_PORT else 0}"
    model = neighbour(host, port)
    if model is None:
        return PortInUse(reason, f"{other} for another, or end the program that has it")
    why = f"a chatcache serves {model or 'a model'} there already"
    return PortInUse(why, f"{other} for another, with a --db of its own", is_ours=True)
