"""Pieces of a change in Redis: what must hold before it, and what it queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from chatcache.chat import redis_rows as rows
from chatcache.chat.redis_link import Pipe
from chatcache.chat.redis_rows import Head, Placed
from chatcache.chat.store import KEEP_CLAIMS_S, Claim, Handed, KeyTaken
from chatcache.chat.tree import Conversation, Item, Turn
from chatcache.errors import NotFound

Member = TypeVar("Member", Item, Turn)
Names = Sequence[str | bytes]


def watched(owner: str, claim: Claim | None) -> Sequence[str]:
    return () if claim is None else (rows.claim_key(owner, claim.key),)


async def require_free(pipe: Pipe, owner: str, claim: Claim | None) -> None:
    """Raises: KeyTaken."""
    present = await pipe.get(rows.claim_key(owner, claim.key)) if claim is not None else None
    if present is not None:
        raise KeyTaken(rows.claim_of(present))


def put_claim(pipe: Pipe, owner: str, claim: Claim | None) -> None:
    if claim is not None:
        pipe.set(rows.claim_key(owner, claim.key), rows.pack_claim(claim), ex=KEEP_CLAIMS_S)


async def require_parents(pipe: Pipe, conversation_id: str, items: Sequence[Item]) -> None:
    """Raises: NotFound unless each message comes behind its parent, or that is stored already."""
    before: set[str] = set()
    outside: list[str] = []
    for item in items:
        if item.parent_id is not None and item.parent_id not in before:
            outside.append(item.parent_id)
        before.add(item.id)
    await require_items(pipe, conversation_id, outside)


async def require_items(pipe: Pipe, conversation_id: str, item_ids: Sequence[str]) -> None:
    found = await pipe.hmget(rows.items_key(conversation_id), list(dict.fromkeys(item_ids))) if item_ids else ()
    for item_id, data in zip(dict.fromkeys(item_ids), found, strict=True):
        if data is None:
            raise NotFound(f"conversation {conversation_id!r} has no message {item_id!r}")


def ids_of(items: Sequence[Item], turns: Sequence[Turn]) -> list[str]:
    return [*(item.id for item in items), *(turn.id for turn in turns)]


async def missing(pipe: Pipe, conversation_id: str, members: Sequence[Member]) -> list[Member]:
    """Those that the conversation lacks. Raises: NotFound for ids of another one."""
    if not members:
        return []
    names = [member.id for member in members]
    holders = await pipe.mget([rows.at_key(name) for name in names])
    for name, holder in zip(names, holders, strict=True):
        if holder is not None and holder.decode() != conversation_id:
            raise NotFound(f"conversation {conversation_id!r} has no {name!r}")
    return [member for member, holder in zip(members, holders, strict=True) if holder is None]


def packed(items: Sequence[Item], first: int) -> tuple[dict[str, bytes], str]:
    """Messages by id as they are stored, from that position on, and their words."""
    placed = {item.id: rows.pack_item(Placed(first + at, item)) for at, item in enumerate(items)}
    return placed, rows.words_of(item.text for item in items)


def put_new(pipe: Pipe, conversation: Conversation) -> None:
    pipe.zadd(rows.ids_key(conversation.owner), {conversation.id: 0})
    pipe.append(rows.words_key(conversation.id), rows.words_of([conversation.title]))


async def hand_over(pipe: Pipe, *, conversation_id: str, owner: str, to: str) -> Handed:
    """Give a conversation another owner, if it is that one's and no response is under way in it."""
    data = await pipe.get(rows.head_key(conversation_id))
    head = rows.head_of(data) if data is not None else None
    running = {entry.decode().partition(" ")[2] for entry in await pipe.hvals(rows.RUNNING)}
    pipe.multi()
    if head is None or head.conversation.owner != owner:
        return Handed()
    if conversation_id in running:
        return Handed(num_busy=1)
    given = replace(head.conversation, owner=to)
    pipe.set(rows.head_key(conversation_id), rows.pack_head(Head(given, head.num_positions)))
    for key_of, score in ((rows.list_key, given.updated_at), (rows.ids_key, 0)):
        pipe.zrem(key_of(owner), conversation_id)
        pipe.zadd(key_of(to), {conversation_id: score})
    return Handed(num_conversations=1)


def put_title(pipe: Pipe, head: Conversation, changed: Conversation) -> None:
    if changed.title != head.title:
        pipe.append(rows.words_key(head.id), rows.words_of([changed.title]))


def take_out(pipe: Pipe, key: str, members: Names) -> None:
    if members:
        names = [each.decode() if isinstance(each, bytes) else each for each in members]
        pipe.hdel(key, *names)
        pipe.delete(*(rows.at_key(name) for name in names))
