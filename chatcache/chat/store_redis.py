"""Conversations in one Redis server, by MULTI under WATCH: no scripts, and nothing that an administrator must allow.

A change watches the head of its conversation, which every change rewrites, so two of them never mix. Several gateways
may share a server. `redis_rows.py` has the layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from chatcache.chat import redis_reads as reads
from chatcache.chat import redis_rows as rows
from chatcache.chat import redis_writes as writes
from chatcache.chat.keys import KeyRecord
from chatcache.chat.keys_redis import RedisKeys
from chatcache.chat.redis_leases import LEASE_S, Leases
from chatcache.chat.redis_link import TIMEOUT_S, Client, Pipe, RedisLink, Result, first_look
from chatcache.chat.redis_rows import Head, Placed
from chatcache.chat.redis_search import find
from chatcache.chat.removal import TreeEdit
from chatcache.chat.search import Hit, SearchQuery
from chatcache.chat.store import Claim, Handed, Merged, StoreUnavailable, StoreUnusable
from chatcache.chat.tree import Conversation, ConversationTree, Item, Turn, grown, revised
from chatcache.errors import ChatcacheError

_CHUNK = 1000


class RedisStore:
    """`ConversationStore` on a server. Responses whose gateway has died become incomplete within `lease_s` and a third.

    A server that is not there yet is waited for. Raises: StoreUnusable for one that does not let us in, or holds what
    a newer version wrote.
    """

    def __init__(self, url: str, *, lease_s: float = LEASE_S, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: how long the server may be silent before it counts as down, for everybody."""
        self._link = RedisLink(url, greet, timeout_s=timeout_s)
        self.keys = RedisKeys(self._link)
        self._leases = Leases(self._link, lease_s)
        with contextlib.suppress(StoreUnavailable):
            look_at(url)

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
            await writes.require_free(pipe, conversation.owner, claim)
            await writes.require_parents(pipe, conversation.id, items)
            pipe.multi()
            writes.put_claim(pipe, conversation.owner, claim)
            await self._add(pipe, Head(conversation, 0), items, () if turn is None else (turn,))
            writes.put_new(pipe, conversation)

        await self._change(conversation.id, work, turn, writes.watched(conversation.owner, claim))

    async def claimed(self, owner: str, key: str) -> Claim | None:
        data = await self._read(lambda client: client.get(rows.claim_key(owner, key)))
        return rows.claim_of(data) if data is not None else None

    async def get(self, owner: str, conversation_id: str) -> Conversation:
        key = rows.head_key(conversation_id)
        return (await self._read(lambda client: reads.head(client, owner, conversation_id), key)).conversation

    async def list(self, owner: str, limit: int, after: str | None = None) -> Sequence[Conversation]:
        return await self._read(lambda client: reads.listed(client, owner, limit, after))

    async def search(self, owner: str, query: SearchQuery, limit: int, after: str | None = None) -> Sequence[Hit]:
        return await self._read(lambda client: find(client, owner, query, limit, after))

    async def ids(self, owner: str, limit: int, after: str | None = None) -> Sequence[str]:
        return await self._read(lambda client: reads.ids(client, owner, limit, after))

    async def owners(self) -> Sequence[str]:
        """Whoever has a conversation, in order. Reads the names of all keys of the server."""
        return await self._read(reads.owners)

    async def key_records(self) -> Sequence[KeyRecord]:
        return await self.keys.list()

    async def load(self, owner: str, conversation_id: str) -> ConversationTree:
        key = rows.head_key(conversation_id)
        return await self._read(lambda client: reads.tree(client, owner, conversation_id), key)

    async def locate(self, owner: str, member_id: str) -> str:
        return await self._read(lambda client: reads.holder(client, owner, member_id))

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
            present = await reads.head(pipe, owner, conversation_id, expect)
            await writes.require_free(pipe, owner, claim)
            await writes.require_parents(pipe, conversation_id, items)
            if active_leaf is not None and active_leaf not in {item.id for item in items}:
                await writes.require_items(pipe, conversation_id, [active_leaf])
            head = present.conversation
            changed = grown(head, active_leaf, title)
            pipe.multi()
            writes.put_claim(pipe, owner, claim)
            await self._add(pipe, Head(changed, present.num_positions), items, () if turn is None else (turn,))
            writes.put_title(pipe, head, changed)
            return changed

        return await self._change(conversation_id, work, turn, writes.watched(owner, claim))

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
            present = await reads.head(pipe, owner, conversation_id, expect)
            if active_leaf is not None:
                await writes.require_items(pipe, conversation_id, [active_leaf])
            head = present.conversation
            changed = revised(head, title=title, active_leaf=active_leaf, metadata=metadata)
            pipe.multi()
            await self._add(pipe, Head(changed, present.num_positions), (), ())
            writes.put_title(pipe, head, changed)
            return changed

        return await self._change(conversation_id, work)

    async def edit(
        self, owner: str, conversation_id: str, edit: TreeEdit, *, expect: int | None = None
    ) -> Conversation:
        async def work(pipe: Pipe) -> Conversation:
            present = await reads.head(pipe, owner, conversation_id, expect)
            placed = await reads.placed(pipe, conversation_id)
            changed = replace(revised(present.conversation), active_leaf=edit.active_leaf)
            moved = {item.id: item for item in edit.items}
            removed = set(edit.removed_items)
            kept = {each.item.id: each for each in placed if each.item.id not in removed}
            gone = [each.item.id for each in placed if each.item.id in removed]
            pipe.multi()
            writes.take_out(pipe, rows.items_key(conversation_id), gone)
            writes.take_out(pipe, rows.turns_key(conversation_id), edit.removed_turns)
            for position, item in (kept[name] for name in moved if name in kept):
                now = replace(item, parent_id=moved[item.id].parent_id, token_ids=moved[item.id].token_ids)
                pipe.hset(rows.items_key(conversation_id), item.id, rows.pack_item(Placed(position, now)))
            await self._add(pipe, Head(changed, present.num_positions), (), edit.turns)
            texts = (changed.title, *(each.item.text for each in kept.values()))
            words = await reads.computed(sum(map(len, texts)), lambda: rows.words_of(texts))
            pipe.set(rows.words_key(conversation_id), words)
            return changed

        return await self._change(conversation_id, work, is_patient=True)

    async def merge(self, conversation: Conversation, items: Sequence[Item], turns: Sequence[Turn]) -> Merged:
        async def work(pipe: Pipe) -> Merged:
            stored = await pipe.get(rows.head_key(conversation.id))
            present = None if stored is None else await reads.head(pipe, conversation.owner, conversation.id)
            new_items = await writes.missing(pipe, conversation.id, items)
            new_turns = await writes.missing(pipe, conversation.id, turns)
            await writes.require_parents(pipe, conversation.id, new_items)
            head = conversation if present is None else present.conversation
            if present is not None and (new_items or new_turns):
                head = grown(head, conversation.active_leaf)
            pipe.multi()
            if present is None or head is not present.conversation:
                await self._add(pipe, Head(head, present.num_positions if present else 0), new_items, new_turns)
            if present is None:
                writes.put_new(pipe, head)
            return Merged(head, present is None, len(new_items), len(new_turns))

        watched = [rows.at_key(each) for each in writes.ids_of(items, turns)]
        return await self._change(conversation.id, work, watched=watched, is_patient=True)

    async def delete(self, owner: str, conversation_id: str, *, expect: int | None = None) -> None:
        async def work(pipe: Pipe) -> None:
            await reads.head(pipe, owner, conversation_id, expect)
            items: list[bytes] = await pipe.hkeys(rows.items_key(conversation_id))
            turns: list[bytes] = await pipe.hkeys(rows.turns_key(conversation_id))
            pipe.multi()
            writes.take_out(pipe, rows.items_key(conversation_id), items)
            writes.take_out(pipe, rows.turns_key(conversation_id), turns)
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
                done = await self._change(name, partial(writes.hand_over, conversation_id=name, owner=owner, to=to))
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
            placed, words = await reads.computed(sum(len(i.text) for i in items), lambda: writes.packed(items, first))
            pipe.hset(rows.items_key(name), mapping=placed)
            pipe.append(rows.words_key(name), words)
        for turn in turns:
            pipe.hset(rows.turns_key(name), turn.id, rows.pack_turn(turn))
            self._leases.put(pipe, name, turn)
        if items or turns:
            pipe.mset({rows.at_key(each): name for each in writes.ids_of(items, turns)})


def look_at(url: str) -> None:
    """Whether there is a server to keep conversations. Raises: StoreUnusable, StoreUnavailable; each says why."""
    found = first_look(url, rows.SCHEMA)
    if found is not None:
        _check_version(found)


async def greet(client: Client) -> None:
    """Leave the version of the layout, or find one. Raises: StoreUnusable."""
    await client.set(rows.SCHEMA, rows.VERSION, nx=True)
    _check_version(await client.get(rows.SCHEMA))


def _check_version(found: bytes) -> None:
    if not found.isdigit() or int(found) > rows.VERSION:
        said = found[:20].decode("ascii", "replace")
        raise StoreUnusable(
            f"the Redis server was written by a newer chatcache (layout {said}, this one knows {rows.VERSION})"
        )
