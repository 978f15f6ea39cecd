"""Reading of conversations on a Redis server: trees, parts of trees, lists and searches.

A large conversation is read in chunks, because the client library parses an answer on the event loop; messages are
decoded on a thread. A search walks the owner's conversations, newest first, until it has enough hits: it selects
candidates by their words and reads their messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from chatcache.conversations.search import SearchHit, SearchQuery, best_message, make_hit
from chatcache.conversations.store import ItemQuery, SavedPrompt, StaleRevisionError, decode_cursor, unknown_prompt
from chatcache.conversations.tree import Conversation, ConversationTree, Item, Turn, deleted_meanwhile_error
from chatcache.errors import NotFoundError
from chatcache.storage.redis_layout import (
    IDS_PREFIX,
    Head,
    PositionedItem,
    can_match,
    head_key,
    ids_key,
    items_key,
    list_key,
    member_key,
    member_range,
    members_key,
    order_key,
    owner_from_ids_key,
    prompts_key,
    turns_key,
    unpack_head,
    unpack_item,
    unpack_prompt,
    unpack_turn,
    words_key,
)

Reader = Any  # a client or a pipe that watches keys
Names = Sequence[str | bytes]
Result = TypeVar("Result")
_READ_CHUNK = 128
_INLINE_BYTES = 16_384


async def read_head(reader: Reader, owner: str, conversation_id: str, expected_rev: int | None = None) -> Head:
    """Read a conversation's head. Raises: NotFoundError, StaleRevisionError."""
    found = unpack_head(data) if (data := await reader.get(head_key(conversation_id))) is not None else None
    if found is None or found.conversation.owner != owner:
        raise NotFoundError(f"no conversation {conversation_id!r}", param="conversation")
    if expected_rev is not None and expected_rev != found.conversation.rev:
        raise StaleRevisionError(found.conversation, expected_rev)
    return found


async def read_owner(reader: Reader, conversation_id: str) -> str:
    """Return the owner of a conversation. Raises: NotFoundError."""
    data = await reader.get(head_key(conversation_id))
    if data is None:
        raise NotFoundError(f"no conversation {conversation_id!r}", param="conversation")
    return unpack_head(data).conversation.owner


async def read_prompt(reader: Reader, tenant: str, name: str) -> SavedPrompt:
    """Return a saved prompt. Raises: NotFoundError."""
    data = await reader.hget(prompts_key(tenant), name)
    if data is None:
        raise unknown_prompt(name)
    return unpack_prompt(data)


async def require_members(reader: Reader, conversation_id: str, member_ids: Sequence[str]) -> None:
    """Raise ConversationBusyError unless all of these messages and responses are stored in the conversation."""
    holders = await reader.mget([member_key(member_id) for member_id in member_ids]) if member_ids else ()
    if any(holder is None or holder.decode() != conversation_id for holder in holders):
        raise deleted_meanwhile_error()


async def run_computation(num_bytes: int, work: Callable[[], Result]) -> Result:
    """Run `work`, on a thread if it processes more than `_INLINE_BYTES`."""
    return work() if num_bytes <= _INLINE_BYTES else await asyncio.to_thread(work)


async def read_items(reader: Reader, conversation_id: str) -> list[PositionedItem]:
    """Read the messages of a conversation in the order in which they were added."""
    values = await reader.hvals(items_key(conversation_id))
    return await run_computation(sum(map(len, values)), lambda: sort_items(values))


def sort_items(values: Sequence[bytes]) -> list[PositionedItem]:
    return sorted(map(unpack_item, values), key=lambda each: each.position)


async def read_tree(client: Reader, head: Head) -> ConversationTree:
    """Read a whole conversation."""
    items = await read_positions(client, head, ItemQuery(all_branches=True, is_descending=False))
    turns = await client.hvals(turns_key(head.conversation.id))
    by_id = await run_computation(
        sum(map(len, turns)), lambda: sorted(map(unpack_turn, turns), key=lambda turn: turn.id)
    )
    return ConversationTree(head.conversation, items, by_id)


async def read_path(client: Reader, head: Head, end: str | None, limit: int | None) -> ConversationTree:
    """Read the part of a tree that `ConversationStore.load_path` returns."""
    name = head.conversation.id
    end = end if end is not None else head.conversation.active_leaf
    data = await client.hget(turns_key(name), end) if end is not None else None
    if data is None:
        return await partial_tree(client, head, await walk_up(client, name, end, limit=limit))
    turn = unpack_turn(data)
    entries = await client.zrangebylex(members_key(name), *member_range(turn.id))
    own = [placed.item for placed in await fetch_items(client, name, [entry.split(b"\0", 2)[2] for entry in entries])]
    own_ids = {item.id for item in own}
    first = next((item.parent_id for item in own if item.parent_id not in own_ids), turn.parent_id or None)
    return await partial_tree(client, head, [*await walk_up(client, name, first, limit=limit), *own], turn)


async def read_page(client: Reader, head: Head, query: ItemQuery) -> ConversationTree:
    """Read the page of messages that `ConversationStore.list_items` returns. Raises: NotFoundError."""
    name = head.conversation.id
    for param, item_id in (("leaf", query.leaf), ("after", query.start)):
        if item_id is not None and not await client.hexists(items_key(name), item_id):
            raise NotFoundError(f"conversation {name!r} has no message {item_id[:128]!r}", param=param)
    leaf = query.leaf if query.leaf is not None else head.conversation.active_leaf
    if query.all_branches:
        items = await read_positions(client, head, query)
        return await partial_tree(client, head, items, num_stored_items=await client.hlen(items_key(name)))
    if query.is_descending:
        end = query.start if query.start is not None else leaf
        items = (await walk_up(client, name, end, limit=query.limit))[::-1]
    else:
        items = (await walk_up(client, name, leaf, stop=query.start))[: query.limit]
        if query.start is not None and (not items or items[0].id != query.start):
            raise NotFoundError(f"after: this path has no {query.start[:128]!r}", param="after")
    return await partial_tree(client, head, items)


async def walk_up(
    client: Reader, conversation_id: str, end: str | None, *, limit: int | None = None, stop: str | None = None
) -> list[Item]:
    """Return the messages of the path to `end`, root first; the last `limit` of them, or those from `stop` on.

    A parent is usually one of the messages that were added just before, so these are read together.
    """
    path: list[Item] = []
    near: dict[str, Item] = {}
    while end is not None and (limit is None or len(path) < limit):
        if end not in near:
            left = _READ_CHUNK if limit is None else min(limit - len(path), _READ_CHUNK)
            near = await read_before(client, conversation_id, end, left)
        if end not in near:
            break
        path.append(near[end])
        if end == stop:
            break
        end = near[end].parent_id
    return path[::-1]


async def read_before(client: Reader, conversation_id: str, item_id: str, num_items: int) -> dict[str, Item]:
    """Return a message and those added just before it, `num_items` in all, by id. Empty if it does not exist."""
    found = await fetch_items(client, conversation_id, [item_id])
    if found and found[0].position:
        last = found[0].position - 1
        names = await client.lrange(order_key(conversation_id), max(0, last + 2 - num_items), last)
        found += await fetch_items(client, conversation_id, names)
    return {placed.item.id: placed.item for placed in found}


async def read_positions(client: Reader, head: Head, query: ItemQuery) -> list[Item]:
    """Return a page of all messages by age, in chunks, so that no answer of the server is large."""
    name = head.conversation.id
    low, high = 0, head.num_positions
    if query.start is not None:
        start = (await fetch_items(client, name, [query.start]))[0].position
        low, high = (low, start + 1) if query.is_descending else (start, high)
    items: list[Item] = []
    while low < high and (query.limit is None or len(items) < query.limit):
        count = min(high - low, _READ_CHUNK if query.limit is None else min(query.limit, _READ_CHUNK))
        first = high - count if query.is_descending else low
        names = await client.lrange(order_key(name), first, first + count - 1)
        part = [placed.item for placed in await fetch_items(client, name, names)]
        items += reversed(part) if query.is_descending else part
        low, high = (low, first) if query.is_descending else (first + count, high)
    return items[: query.limit]


async def fetch_items(client: Reader, conversation_id: str, names: Names) -> list[PositionedItem]:
    """Return the messages with these ids, in this order, without deleted ones."""
    values = await client.hmget(items_key(conversation_id), names) if names else []
    found = [data for data in values if data is not None]
    return await run_computation(sum(map(len, found)), lambda: [unpack_item(data) for data in found])


async def partial_tree(
    client: Reader, head: Head, items: Sequence[Item], turn: Turn | None = None, num_stored_items: int | None = None
) -> ConversationTree:
    """Return a tree of these messages and the responses that they belong to, and `turn`."""
    names = list(dict.fromkeys(item.response_id for item in items if item.response_id is not None))
    values = await client.hmget(turns_key(head.conversation.id), names) if names else []
    turns = [unpack_turn(data) for data in values if data is not None]
    turns += [turn] if turn is not None else []
    return ConversationTree(head.conversation, items, turns, num_stored_items)


async def find_conversation_of(client: Reader, owner: str, member_id: str) -> str:
    """Return the conversation of a message or response. Raises: NotFoundError."""
    found = await client.get(member_key(member_id))
    data = await client.get(head_key(found.decode())) if found is not None else None
    if data is None or unpack_head(data).conversation.owner != owner:
        raise NotFoundError(f"no response or message {member_id!r}")
    name: str = found.decode()
    return name


async def read_ids(client: Reader, owner: str, limit: int, after: str | None) -> Sequence[str]:
    low = f"({after}" if after else "-"
    found = await client.zrangebylex(ids_key(owner), low, "+", start=0, num=limit)
    return tuple(each.decode() for each in found)


async def read_owners(client: Reader) -> Sequence[str]:
    """Return every owner of a conversation, in order."""
    found = {key.decode() async for key in client.scan_iter(match=f"{IDS_PREFIX}*", count=1000)}
    return sorted(owner_from_ids_key(key) for key in found)


async def list_heads(client: Reader, owner: str, limit: int, after: str | None) -> Sequence[Conversation]:
    found: list[Conversation] = []
    async for heads in iter_conversations(client, owner, after, limit):
        found += heads
        if len(found) >= limit:
            break
    return tuple(found[:limit])


async def iter_conversations(
    client: Reader, owner: str, after: str | None, chunk: int = _READ_CHUNK
) -> AsyncIterator[list[Conversation]]:
    """Yield an owner's conversations by `updated_at`, newest first, after a position.

    Raises: NotFoundError.

    Each has the `updated_at` of the list entry, even if it changed since, so that its cursor continues from there.
    """
    position = await _position(client, owner, after)
    while True:
        entries = await _entries(client, owner, position, chunk)
        if not entries:
            return
        position = entries[-1]
        heads = await client.mget([head_key(name) for _, name in entries])
        found = zip(entries, heads, strict=True)
        yield [replace(unpack_head(data).conversation, updated_at=at) for (at, _), data in found if data is not None]


async def _position(client: Reader, owner: str, after: str | None) -> tuple[float, str] | None:
    if after is None:
        return None
    position = decode_cursor(after)
    if position is None:
        found = (await read_head(client, owner, after)).conversation
        return found.updated_at, found.id
    return position


async def _entries(
    client: Reader, owner: str, position: tuple[float, str] | None, limit: int
) -> list[tuple[float, str]]:
    """Return the next entries of an owner's conversation list, newest first.

    An entry is `updated_at` and id. Entries of equal time are sorted by id, the last first.
    """
    found: list[tuple[float, str]] = []
    highest, skip = ("+inf" if position is None else repr(position[0])), 0
    while len(found) < limit:
        part = await client.zrevrangebyscore(
            list_key(owner), highest, "-inf", start=skip, num=limit + 1, withscores=True
        )
        entries = [(score, name.decode()) for name, score in part]
        found += [entry for entry in entries if position is None or entry < position]
        if len(part) <= limit:
            break
        skip += len(part)
    return found[:limit]


async def search(client: Any, owner: str, query: SearchQuery, limit: int, after: str | None) -> Sequence[SearchHit]:
    """Return the conversations that match, by `updated_at`, newest first."""
    hits: list[SearchHit] = []
    if not query.phrases:
        return ()
    async for heads in iter_conversations(client, owner, after):
        if not heads:
            continue
        words: list[bytes | None] = await client.mget([words_key(head.id) for head in heads])
        for head in await asyncio.to_thread(_candidates, heads, words, query):
            values = await client.hvals(items_key(head.id))
            hit = await asyncio.to_thread(_hit, head, values, query)
            if hit is not None:
                hits.append(hit)
            if len(hits) == limit:
                return tuple(hits)
    return tuple(hits)


def _candidates(heads: Sequence[Conversation], words: Sequence[bytes | None], query: SearchQuery) -> list[Conversation]:
    found = zip(heads, words, strict=True)
    return [head for head, data in found if data is not None and can_match(query, data.decode())]


def _hit(head: Conversation, values: Sequence[bytes], query: SearchQuery) -> SearchHit | None:
    newest_first = reversed(sort_items(values))
    best = best_message(((each.item.id, each.item.role, each.item.text) for each in newest_first), query)
    return make_hit(head, query, best) if best is not None or query.find(head.title) is not None else None
