"""Reading request bodies, and noticing that the client is gone while a reply is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from chatcache.gateway.errors import UnsupportedMediaType
from chatcache.gateway.jsonio import decode_object

Result = TypeVar("Result")

# Checking this much JSON, however it is made, takes milliseconds; longer bodies leave the event loop alone.
_INLINE_BYTES = 16_384


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a strict JSON object.

    Raises: UnsupportedMediaType, BodyTooLarge, InvalidRequest, ClientDisconnect.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType("send JSON with content-type: application/json")
    refuse_encoding(request)
    return await parse_json(await request.body())


def refuse_encoding(request: Request) -> None:
    """Raises: UnsupportedMediaType for a compressed body: what a few bytes would become is nobody's to find out."""
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType("send the body as it is, without content-encoding")


async def read_json_or_nothing(request: Request) -> dict[str, Any]:
    """The body as a strict JSON object, {} where there is none. Raises: as `read_json`."""
    return await read_json(request) if await request.body() else {}


async def parse_json(data: bytes | str) -> dict[str, Any]:
    """`decode_object` without holding up everybody else. Raises: InvalidRequest."""
    if len(data) <= _INLINE_BYTES:
        return decode_object(data)
    return await asyncio.to_thread(decode_object, data)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, cancelling it when the client leaves: the server itself never would.

    Raises: ClientDisconnect.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
