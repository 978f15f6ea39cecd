"""Conversations in one Redis server, by MULTI under WATCH: no scripts, and nothing that an administrator must allow.

A change watches the head of its conversation, which every change rewrites, so two of them never mix. Several gateways
may share a server. `redis_rows.py` has the layout.

Reading conversations from Redis: heads, trees, lists. Through a client, or a pipe that watches.

Pieces of a change in Redis: what must hold before it, and what it queues.

Searching conversations in Redis: by their words those that may match, then by what they say.

Finds what the SQLite index finds. It walks the owner's conversations, newest first, until it has enough: a rare word
costs a look at the words of each. What changes while it walks may be seen as it was, or as it is.

Keys on a Redis server: a hash of them, a number that every change makes greater, a hash of tokens to a day.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from chatcache.auth import DAY_S, KEEP_USAGE_DAYS, WRITER, KeyRecord
from chatcache.conversations.search import Hit, SearchQuery, best_of, hit_of
from chatcache.conversations.store import (
    KEEP_CLAIMS_S,
    Claim,
    Handed,
    IdempotencyConflictError,
    Merged,
    StaleRevisionError,
    StoreUnavailableError,
    StoreUnusableError,
    read_cursor,
)
from chatcache.conversations.tree import Conversation, ConversationTree, Item, MessageDeletion, Turn, grown, revised
from chatcache.errors import ChatcacheError, NotFoundError
from chatcache.storage import redis_layout as rows
from chatcache.storage.redis_client import (
    LEASE_S,
    TIMEOUT_S,
    Client,
    GatewayHeartbeats,
    Pipe,
    RedisConnection,
    probe_server,
)
from chatcache.storage.redis_layout import KEYS, KEYS_VERSION, Head, Placed, usage_key

Reader = Any
Result = TypeVar("Result")

_READ_CHUNK = 128
_INLINE_BYTES = 16_384


async def read_head(reader: Reader, owner: str, conversation_id: str, expect: int | None = None) -> Head:
    """Raises: NotFoundError, StaleRevisionError."""
    found = rows.head_of(data) if (data := await reader.get(rows.head_key(conversation_id))) is not None else None
    if found is None or found.conversation.owner != owner:
        raise NotFoundError(f"no conversation {conversation_id!r}", param="conversation")
    if expect is not None and expect != found.conversation.rev:
        raise StaleRevisionError(found.conversation, expect)
    return found


async def read_computed(num_bytes: int, work: Callable[[], Result]) -> Result:
    """Work on so many bytes; much of it leaves the event loop alone."""
    return work() if num_bytes <= _INLINE_BYTES else await asyncio.to_thread(work)


async def find_items(reader: Reader, conversation_id: str) -> list[Placed]:
    """Messages in the order they came."""
    values = await reader.hvals(rows.items_key(conversation_id))
    return await read_computed(sum(map(len, values)), lambda: in_order(values))


def in_order(values: Sequence[bytes]) -> list[Placed]:
    return sorted(map(rows.item_of, values), key=lambda each: each.position)


async def read_tree(client: Reader, owner: str, conversation_id: str) -> ConversationTree:
    """All of it as it was at one moment: every change rewrites the head. Raises: NotFoundError."""
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
        raise NotFoundError(f"no conversation {conversation_id!r}", param="conversation")

    def grown() -> ConversationTree:
        by_id = sorted(map(rows.turn_of, turns), key=lambda turn: turn.id)
        return ConversationTree(found, [each.item for each in in_order(items)], by_id)

    return await read_computed(sum(map(len, (*items, *turns))), grown)


async def find_holder(client: Reader, owner: str, member_id: str) -> str:
    """The conversation of a message or response. Raises: NotFoundError."""
    found = await client.get(rows.at_key(member_id))
    data = await client.get(rows.head_key(found.decode())) if found is not None else None
    if data is None or rows.head_of(data).conversation.owner != owner:
        raise NotFoundError(f"no response or message {member_id!r}")
    name: str = found.decode()
    return name


async def read_ids(client: Reader, owner: str, limit: int, after: str | None) -> Sequence[str]:
    low = f"({after}" if after else "-"
    found = await client.zrangebylex(rows.ids_key(owner), low, "+", start=0, num=limit)
    return tuple(each.decode() for each in found)


async def read_owners(client: Reader) -> Sequence[str]:
    """Whoever has a conversation, in order."""
    found = {key.decode() async for key in client.scan_iter(match=f"{rows.IDS}*", count=1000)}
    return sorted(rows.owner_of_ids(key) for key in found)


async def list_heads(client: Reader, owner: str, limit: int, after: str | None) -> Sequence[Conversation]:
    found: list[Conversation] = []
    async for heads in walk(client, owner, after, limit):
        found += heads
        if len(found) >= limit:
            break
    return tuple(found[:limit])


async def walk(
    client: Reader, owner: str, after: str | None, chunk: int = _READ_CHUNK
) -> AsyncIterator[list[Conversation]]:
    """An owner's conversations by `updated_at`, newest first, behind a place in the list. Raises: NotFoundError.

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
        found = (await read_head(client, owner, after)).conversation
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


Member = TypeVar("Member", Item, Turn)
Names = Sequence[str | bytes]


def watched_keys(owner: str, claim: Claim | None) -> Sequence[str]:
    return () if claim is None else (rows.claim_key(owner, claim.key),)


async def require_free(pipe: Pipe, owner: str, claim: Claim | None) -> None:
    """Raises: IdempotencyConflictError."""
    present = await pipe.get(rows.claim_key(owner, claim.key)) if claim is not None else None
    if present is not None:
        raise IdempotencyConflictError(rows.claim_of(present))


def put_claim(pipe: Pipe, owner: str, claim: Claim | None) -> None:
    if claim is not None:
        pipe.set(rows.claim_key(owner, claim.key), rows.pack_claim(claim), ex=KEEP_CLAIMS_S)


async def require_parents(pipe: Pipe, conversation_id: str, items: Sequence[Item]) -> None:
    """Raises: NotFoundError unless each message comes behind its parent, or that is stored already."""
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
            raise NotFoundError(f"conversation {conversation_id!r} has no message {item_id!r}")


def ids_of(items: Sequence[Item], turns: Sequence[Turn]) -> list[str]:
    return [*(item.id for item in items), *(turn.id for turn in turns)]


async def find_missing(pipe: Pipe, conversation_id: str, members: Sequence[Member]) -> list[Member]:
    """Those that the conversation lacks. Raises: NotFoundError for ids of another one."""
    if not members:
        return []
    names = [member.id for member in members]
    holders = await pipe.mget([rows.at_key(name) for name in names])
    for name, holder in zip(names, holders, strict=True):
        if holder is not None and holder.decode() != conversation_id:
            raise NotFoundError(f"conversation {conversation_id!r} has no {name!r}")
    return [member for member, holder in zip(members, holders, strict=True) if holder is None]


def pack_item(items: Sequence[Item], first: int) -> tuple[dict[str, bytes], str]:
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


async def find(client: Any, owner: str, query: SearchQuery, limit: int, after: str | None) -> Sequence[Hit]:
    """The conversations that match, by `updated_at`, newest first."""
    hits: list[Hit] = []
    if not query.phrases:
        return ()
    async for heads in walk(client, owner, after):
        if not heads:
            continue
        words: list[bytes | None] = await client.mget([rows.words_key(head.id) for head in heads])
        for head in await asyncio.to_thread(_candidates, heads, words, query):
            values = await client.hvals(rows.items_key(head.id))
            hit = await asyncio.to_thread(_hit, head, values, query)
            if hit is not None:
                hits.append(hit)
            if len(hits) == limit:
                return tuple(hits)
    return tuple(hits)


def _candidates(heads: Sequence[Conversation], words: Sequence[bytes | None], query: SearchQuery) -> list[Conversation]:
    found = zip(heads, words, strict=True)
    return [head for head, data in found if data is not None and rows.may_match(query, data.decode())]


def _hit(head: Conversation, values: Sequence[bytes], query: SearchQuery) -> Hit | None:
    newest_first = reversed(in_order(values))
    best = best_of(((each.item.id, each.item.role, each.item.text) for each in newest_first), query)
    return hit_of(head, query, best) if best is not None or query.find(head.title) is not None else None


_KEY = msgspec.msgpack.Decoder(KeyRecord)


class RedisKeys:
    """`KeyStore` over a link that somebody else closes."""

    def __init__(self, link: RedisConnection) -> None:
        self._link = link

    async def create(self, record: KeyRecord) -> None:
        async def work(client: Client) -> None:
            async with client.pipeline(transaction=True) as pipe:
                _put(pipe, record)
                await pipe.execute()

        await self._link.run(work)

    async def list(self) -> Sequence[KeyRecord]:
        found: Mapping[bytes, bytes] = await self._link.run(lambda client: client.hgetall(KEYS))
        return sorted(map(_KEY.decode, found.values()), key=lambda record: (record.created_at, record.id))

    async def revoke(self, key_id: str, at: float) -> KeyRecord:
        async def work(pipe: Pipe) -> KeyRecord:
            data = await pipe.hget(KEYS, key_id)
            if data is None:
                raise NotFoundError(f"no key {key_id!r}", param="id")
            present = _KEY.decode(data)
            pipe.multi()
            if present.revoked_at is not None:
                return present
            revoked = replace(present, revoked_at=at)
            _put(pipe, revoked)
            return revoked

        return await self._link.transact((KEYS,), work, order=KEYS)

    async def version(self) -> int:
        return int(await self._link.run(lambda client: client.get(KEYS_VERSION)) or 0)

    async def add_usage(self, day: int, tokens: Mapping[str, int], *, writer: str, number: int) -> None:
        key = usage_key(day)

        async def work(pipe: Pipe) -> None:
            last = int(await pipe.hget(key, WRITER + writer) or 0)
            pipe.multi()
            if last < number:
                pipe.hset(key, WRITER + writer, number)
                for key_id, count in tokens.items():
                    pipe.hincrby(key, key_id, count)
                pipe.expire(key, KEEP_USAGE_DAYS * DAY_S)

        await self._link.transact((key,), work, order=key)

    async def usage(self, day: int) -> Mapping[str, int]:
        found: Mapping[bytes, bytes] = await self._link.run(lambda client: client.hgetall(usage_key(day)))
        counts = {name.decode(): int(count) for name, count in found.items()}
        return {key_id: count for key_id, count in counts.items() if not key_id.startswith(WRITER)}


def _put(pipe: Pipe, record: KeyRecord) -> None:
    pipe.hset(KEYS, record.id, msgspec.msgpack.encode(record))
    pipe.incr(KEYS_VERSION)


_CHUNK = 1000


class RedisStore:
    """`ConversationStore` on a server. Responses whose gateway has died become incomplete within `lease_s` and a third.

    A server that is not there yet is waited for. Raises: StoreUnusableError for one that does not let us in, or holds
    what
    a newer version wrote.
    """

    def __init__(self, url: str, *, lease_s: float = LEASE_S, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: how long the server may be silent before it counts as down, for everybody."""
        self._link = RedisConnection(url, check_layout, timeout_s=timeout_s)
        self.keys = RedisKeys(self._link)
        self._leases = GatewayHeartbeats(self._link, lease_s)
        with contextlib.suppress(StoreUnavailableError):
            check_server(url)

    async def check(self) -> None:
        await self._leases.check()

    async def create(
        self,
        conversation: Conversation,
        items: Sequence[Item] = (),
        turn: Turn | None = None,
        *,
        claim: Claim | None = None,
    ) -> None:
        async def work(pipe: Pipe) -> None:
            if await pipe.exists(rows.head_key(conversation.id)):
                raise RuntimeError(f"there is a conversation {conversation.id!r} already")
            await require_free(pipe, conversation.owner, claim)
            await require_parents(pipe, conversation.id, items)
            pipe.multi()
            put_claim(pipe, conversation.owner, claim)
            await self._add(pipe, Head(conversation, 0), items, () if turn is None else (turn,))
            put_new(pipe, conversation)

        await self._change(conversation.id, work, turn, watched_keys(conversation.owner, claim))

    async def claimed(self, owner: str, key: str) -> Claim | None:
        data = await self._read(lambda client: client.get(rows.claim_key(owner, key)))
        return rows.claim_of(data) if data is not None else None

    async def get(self, owner: str, conversation_id: str) -> Conversation:
        key = rows.head_key(conversation_id)
        return (await self._read(lambda client: read_head(client, owner, conversation_id), key)).conversation

    async def list(self, owner: str, limit: int, after: str | None = None) -> Sequence[Conversation]:
        return await self._read(lambda client: list_heads(client, owner, limit, after))

    async def search(self, owner: str, query: SearchQuery, limit: int, after: str | None = None) -> Sequence[Hit]:
        return await self._read(lambda client: find(client, owner, query, limit, after))

    async def ids(self, owner: str, limit: int, after: str | None = None) -> Sequence[str]:
        return await self._read(lambda client: read_ids(client, owner, limit, after))

    async def owners(self) -> Sequence[str]:
        """Whoever has a conversation, in order. Reads the names of all keys of the server."""
        return await self._read(read_owners)

    async def key_records(self) -> Sequence[KeyRecord]:
        return await self.keys.list()

    async def load(self, owner: str, conversation_id: str) -> ConversationTree:
        key = rows.head_key(conversation_id)
        return await self._read(lambda client: read_tree(client, owner, conversation_id), key)

    async def locate(self, owner: str, member_id: str) -> str:
        return await self._read(lambda client: find_holder(client, owner, member_id))

    async def append(
        self,
        owner: str,
        conversation_id: str,
        items: Sequence[Item],
        turn: Turn | None = None,
        *,
        active_leaf: str | None = None,
        title: str | None = None,
        expect: int | None = None,
        claim: Claim | None = None,
    ) -> Conversation:
        async def work(pipe: Pipe) -> Conversation:
            present = await read_head(pipe, owner, conversation_id, expect)
            await require_free(pipe, owner, claim)
            await require_parents(pipe, conversation_id, items)
            if active_leaf is not None and active_leaf not in {item.id for item in items}:
                await require_items(pipe, conversation_id, [active_leaf])
            head = present.conversation
            changed = grown(head, active_leaf, title)
            pipe.multi()
            put_claim(pipe, owner, claim)
            await self._add(pipe, Head(changed, present.num_positions), items, () if turn is None else (turn,))
            put_title(pipe, head, changed)
            return changed

        return await self._change(conversation_id, work, turn, watched_keys(owner, claim))

    async def update(
        self,
        owner: str,
        conversation_id: str,
        *,
        title: str | None = None,
        active_leaf: str | None = None,
        metadata: Mapping[str, str] | None = None,
        expect: int | None = None,
    ) -> Conversation:
        async def work(pipe: Pipe) -> Conversation:
            present = await read_head(pipe, owner, conversation_id, expect)
            if active_leaf is not None:
                await require_items(pipe, conversation_id, [active_leaf])
            head = present.conversation
            changed = revised(head, title=title, active_leaf=active_leaf, metadata=metadata)
            pipe.multi()
            await self._add(pipe, Head(changed, present.num_positions), (), ())
            put_title(pipe, head, changed)
            return changed

        return await self._change(conversation_id, work)

    async def edit(
        self, owner: str, conversation_id: str, edit: MessageDeletion, *, expect: int | None = None
    ) -> Conversation:
        async def work(pipe: Pipe) -> Conversation:
            present = await read_head(pipe, owner, conversation_id, expect)
            placed = await find_items(pipe, conversation_id)
            changed = replace(revised(present.conversation), active_leaf=edit.active_leaf)
            moved = {item.id: item for item in edit.items}
            removed = set(edit.removed_items)
            kept = {each.item.id: each for each in placed if each.item.id not in removed}
            gone = [each.item.id for each in placed if each.item.id in removed]
            pipe.multi()
            take_out(pipe, rows.items_key(conversation_id), gone)
            take_out(pipe, rows.turns_key(conversation_id), edit.removed_turns)
            for position, item in (kept[name] for name in moved if name in kept):
                now = replace(item, parent_id=moved[item.id].parent_id, token_ids=moved[item.id].token_ids)
                pipe.hset(rows.items_key(conversation_id), item.id, rows.pack_item(Placed(position, now)))
            await self._add(pipe, Head(changed, present.num_positions), (), edit.turns)
            texts = (changed.title, *(each.item.text for each in kept.values()))
            words = await read_computed(sum(map(len, texts)), lambda: rows.words_of(texts))
            pipe.set(rows.words_key(conversation_id), words)
            return changed

        return await self._change(conversation_id, work, is_patient=True)

    async def merge(self, conversation: Conversation, items: Sequence[Item], turns: Sequence[Turn]) -> Merged:
        async def work(pipe: Pipe) -> Merged:
            stored = await pipe.get(rows.head_key(conversation.id))
            present = None if stored is None else await read_head(pipe, conversation.owner, conversation.id)
            new_items = await find_missing(pipe, conversation.id, items)
            new_turns = await find_missing(pipe, conversation.id, turns)
            await require_parents(pipe, conversation.id, new_items)
            head = conversation if present is None else present.conversation
            if present is not None and (new_items or new_turns):
                head = grown(head, conversation.active_leaf)
            pipe.multi()
            if present is None or head is not present.conversation:
                await self._add(pipe, Head(head, present.num_positions if present else 0), new_items, new_turns)
            if present is None:
                put_new(pipe, head)
            return Merged(head, present is None, len(new_items), len(new_turns))

        watched = [rows.at_key(each) for each in ids_of(items, turns)]
        return await self._change(conversation.id, work, watched=watched, is_patient=True)

    async def delete(self, owner: str, conversation_id: str, *, expect: int | None = None) -> None:
        async def work(pipe: Pipe) -> None:
            await read_head(pipe, owner, conversation_id, expect)
            items: list[bytes] = await pipe.hkeys(rows.items_key(conversation_id))
            turns: list[bytes] = await pipe.hkeys(rows.turns_key(conversation_id))
            pipe.multi()
            take_out(pipe, rows.items_key(conversation_id), items)
            take_out(pipe, rows.turns_key(conversation_id), turns)
            pipe.delete(rows.head_key(conversation_id), rows.words_key(conversation_id))
            pipe.zrem(rows.list_key(owner), conversation_id)
            pipe.zrem(rows.ids_key(owner), conversation_id)
            if turns:
                pipe.hdel(rows.RUNNING, *turns)

        await self._change(conversation_id, work, is_patient=True)

    async def hand_over(self, owner: str, to: str) -> Handed:
        """One conversation after the other: what is done when this is cut short stays done."""
        handed, after = Handed(), None
        while names := await self.ids(owner, _CHUNK, after):
            after = names[-1]
            for name in names:
                done = await self._change(name, partial(hand_over, conversation_id=name, owner=owner, to=to))
                handed = Handed(handed.num_conversations + done.num_conversations, handed.num_busy + done.num_busy)
        return handed

    async def close(self) -> None:
        await self._leases.close()
        await self._link.close()

    async def _read(self, work: Callable[[Client], Awaitable[Result]], order: str = "") -> Result:
        self._leases.begin()
        return await self._link.run(work, order=order)

    async def _change(
        self,
        conversation_id: str,
        work: Callable[[Pipe], Awaitable[Result]],
        turn: Turn | None = None,
        watched: Sequence[str] = (),
        *,
        is_patient: bool = False,
    ) -> Result:
        """Change one conversation, all or nothing. `turn`: a response that this stores."""
        self._leases.begin()
        self._leases.expect(turn)
        key = rows.head_key(conversation_id)
        try:
            result = await self._link.transact((key, *watched), work, order=key, is_patient=is_patient)
        except (ChatcacheError, RuntimeError):
            self._leases.settled(turn, stored=False)
            raise
        self._leases.settled(turn, stored=True)
        return result

    async def _add(self, pipe: Pipe, head: Head, items: Sequence[Item], turns: Sequence[Turn]) -> None:
        """Store the head, behind what it had these messages, and these responses."""
        name, first = head.conversation.id, head.num_positions
        pipe.set(rows.head_key(name), rows.pack_head(Head(head.conversation, first + len(items))))
        pipe.zadd(rows.list_key(head.conversation.owner), {name: head.conversation.updated_at})
        if items:
            placed, words = await read_computed(sum(len(i.text) for i in items), lambda: pack_item(items, first))
            pipe.hset(rows.items_key(name), mapping=placed)
            pipe.append(rows.words_key(name), words)
        for turn in turns:
            pipe.hset(rows.turns_key(name), turn.id, rows.pack_turn(turn))
            self._leases.put(pipe, name, turn)
        if items or turns:
            pipe.mset({rows.at_key(each): name for each in ids_of(items, turns)})


def check_server(url: str) -> None:
    """Whether there is a server to keep conversations.

    Raises: StoreUnusableError, StoreUnavailableError; each says why.
    """
    found = probe_server(url, rows.SCHEMA)
    if found is not None:
        _check_version(found)


async def check_layout(client: Client) -> None:
    """Leave the version of the layout, or find one. Raises: StoreUnusableError."""
    await client.set(rows.SCHEMA, rows.VERSION, nx=True)
    _check_version(await client.get(rows.SCHEMA))


def _check_version(found: bytes) -> None:
    if not found.isdigit() or int(found) > rows.VERSION:
        said = found[:20].decode("ascii", "replace")
        raise StoreUnusableError(
            f"the Redis server was written by a newer chatcache (layout {said}, this one knows {rows.VERSION})"
        )
