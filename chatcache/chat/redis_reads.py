"""Reading conversations from Redis: heads, trees, lists. Through a client, or a pipe that watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from chatcache.chat import redis_rows as rows
from chatcache.chat.redis_rows import Head, Placed
from chatcache.chat.store import StaleRevision, read_cursor
from chatcache.chat.tree import Conversation, ConversationTree
from chatcache.errors import NotFound

Reader = Any
Result = TypeVar("Result")

_CHUNK = 128
_INLINE_BYTES = 16_384


async def head(reader: Reader, owner: str, conversation_id: str, expect: int | None = None) -> Head:
    """Raises: NotFound, StaleRevision."""
    found = rows.head_of(data) if (data := await reader.get(rows.head_key(conversation_id))) is not None else None
    if found is None or found.conversation.owner != owner:
        raise NotFound(f"no conversation {conversation_id!r}", param="conversation")
    if expect is not None and expect != found.conversation.rev:
        raise StaleRevision(found.conversation, expect)
    return found


async def computed(num_bytes: int, work: Callable[[], Result]) -> Result:
    """Work on so many bytes; much of it leaves the event loop alone."""
    return work() if num_bytes <= _INLINE_BYTES else await asyncio.to_thread(work)


async def placed(reader: Reader, conversation_id: str) -> list[Placed]:
    """Messages in the order they came."""
    values = await reader.hvals(rows.items_key(conversation_id))
    return await computed(sum(map(len, values)), lambda: in_order(values))


def in_order(values: Sequence[bytes]) -> list[Placed]:
    return sorted(map(rows.item_of, values), key=lambda each: each.position)


async def tree(client: Reader, owner: str, conversation_id: str) -> ConversationTree:
    """All of it as it was at one moment: every change rewrites the head. Raises: NotFound."""
    while True:  # no MULTI, which a server that is full refuses even for reading
        async with client.pipeline(transaction=False) as pipe:
            pipe.get(rows.head_key(conversation_id))
            pipe.hvals(rows.items_key(conversation_id))
            pipe.hvals(rows.turns_key(conversation_id))
            pipe.get(rows.head_key(conversation_id))
            data, items, turns, data_after = await pipe.execute()
        if data == data_after:
            break
    found = rows.head_of(data).conversation if data is not None else None
    if found is None or found.owner != owner:
        raise NotFound(f"no conversation {conversation_id!r}", param="conversation")

    def grown() -> ConversationTree:
        by_id = sorted(map(rows.turn_of, turns), key=lambda turn: turn.id)
        return ConversationTree(found, [each.item for each in in_order(items)], by_id)

    return await computed(sum(map(len, (*items, *turns))), grown)


async def holder(client: Reader, owner: str, member_id: str) -> str:
    """The conversation of a message or response. Raises: NotFound."""
    found = await client.get(rows.at_key(member_id))
    data = await client.get(rows.head_key(found.decode())) if found is not None else None
    if data is None or rows.head_of(data).conversation.owner != owner:
        raise NotFound(f"no response or message {member_id!r}")
    name: str = found.decode()
    return name


async def ids(client: Reader, owner: str, limit: int, after: str | None) -> Sequence[str]:
    low = f"({after}" if after else "-"
    found = await client.zrangebylex(rows.ids_key(owner), low, "+", start=0, num=limit)
    return tuple(each.decode() for each in found)


async def owners(client: Reader) -> Sequence[str]:
    """Whoever has a conversation, in order."""
    found = {key.decode() async for key in client.scan_iter(match=f"{rows.IDS}*", count=1000)}
    return sorted(rows.owner_of_ids(key) for key in found)


async def listed(client: Reader, owner: str, limit: int, after: str | None) -> Sequence[Conversation]:
    found: list[Conversation] = []
    async for heads in walk(client, owner, after, limit):
        found += heads
        if len(found) >= limit:
            break
    return tuple(found[:limit])


async def walk(client: Reader, owner: str, after: str | None, chunk: int = _CHUNK) -> AsyncIterator[list[Conversation]]:
    """An owner's conversations by `updated_at`, newest first, behind a place in the list. Raises: NotFound.

    Each as old as the list says, whatever became of it since: so its cursor leads on from this place.
    """
    place = await _place(client, owner, after)
    while True:
        entries = await _entries(client, owner, place, chunk)
        if not entries:
            return
        place = entries[-1]
        heads = await client.mget([rows.head_key(name) for _, name in entries])
        found = zip(entries, heads, strict=True)
        yield [replace(rows.head_of(data).conversation, updated_at=at) for (at, _), data in found if data is not None]


async def _place(client: Reader, owner: str, after: str | None) -> tuple[float, str] | None:
    if after is None:
        return None
    place = read_cursor(after)
    if place is None:
        found = (await head(client, owner, after)).conversation
        return found.updated_at, found.id
    return place


async def _entries(client: Reader, owner: str, place: tuple[float, str] | None, limit: int) -> list[tuple[float, str]]:
    """The next of the list: when it changed, and its id. Those of one moment are there by id, the last first."""
    found: list[tuple[float, str]] = []
    highest, skip = ("+inf" if place is None else repr(place[0])), 0
    while len(found) < limit:
        part = await client.zrevrangebyscore(
            rows.list_key(owner), highest, "-inf", start=skip, num=limit + 1, withscores=True
        )
        entries = [(score, name.decode()) for name, score in part]
        found += [entry for entry in entries if place is None or entry < place]
        if len(part) <= limit:
            break
        skip += len(part)
    return found[:limit]
