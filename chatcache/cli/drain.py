"""How a server leaves: no new work, what runs may finish, what does not is ended with what it has said."""

from __future__ import annotations

import asyncio
import contextlib

from chatcache.gateway.context import Gateway

LAST_S = 0.5  # for what is ended to be stored
_POLL_S = 0.05


async def drain(gateway: Gateway, timeout_s: float) -> None:
    """Wait until nothing is being answered, `timeout_s` at most; then end what still is."""
    gateway.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not gateway.is_quiet:  # noqa: ASYNC110 - what it waits for has no one event
                await asyncio.sleep(_POLL_S)
    await gateway.interrupt(LAST_S)
