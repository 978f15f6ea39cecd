"""The Redis store, on MULTI under WATCH: no scripts and no administrative commands.

Every change watches and rewrites the head of its conversation, so that two changes never mix, and several gateways may
share a server. `redis_layout` has the keys, `redis_reads` the reading functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from chatcache.auth import DAY_S, USAGE_RETENTION_DAYS, WRITER_PREFIX, KeyRecord
from chatcache.conversations.checkpoints import ReplyCheckpoint, end_interrupted, restore
from chatcache.conversations.search import SearchHit, SearchQuery
from chatcache.conversations.store import (
    CLAIM_TTL_S,
    MAX_SAVED_PROMPTS,
    Claim,
    ConversationFullError,
    IdempotencyConflictError,
    ItemQuery,
    MergeResult,
    OwnerAssignment,
    PromptExistsError,
    PromptLibraryFullError,
    SavedPrompt,
    StoreUnavailableError,
    StoreUnusableError,
)
from chatcache.conversations.tree import (
    IN_PROGRESS,
    Conversation,
    ConversationTree,
    Item,
    MessageDeletion,
    Turn,
    head_after_append,
    head_after_deletion,
    head_after_update,
)
from chatcache.errors import ChatcacheError, NotFoundError
from chatcache.storage.redis_client import (
    LEASE_S,
    Client,
    GatewayChannel,
    GatewayHeartbeats,
    Pipe,
    RedisConnection,
    RunningEntry,
    probe_server,
)
from chatcache.storage.redis_layout import (
    API_KEYS_KEY,
    API_KEYS_VERSION_KEY,
    RUNNING_KEY,
    SCHEMA_KEY,
    VERSION,
    Head,
    PositionedItem,
    checkpoint_key,
    claim_key,
    conversation_of_head,
    head_key,
    ids_key,
    index_words,
    items_key,
    list_key,
    member_entry,
    member_key,
    members_key,
    order_key,
    pack_claim,
    pack_head,
    pack_item,
    pack_prompt,
    pack_turn,
    prompts_key,
    turns_key,
    unpack_claim,
    unpack_head,
    unpack_prompt,
    unpack_turn,
    usage_key,
    words_key,
)
from chatcache.storage.redis_reads import (
    Names,
    Reader,
    find_conversation_of,
    list_heads,
    read_head,
    read_ids,
    read_items,
    read_owner,
    read_owners,
    read_page,
    read_path,
    read_prompt,
    read_tree,
    require_members,
    run_computation,
    search,
)

Result = TypeVar("Result")
Member = TypeVar("Member", Item, Turn)
_KEY = msgspec.msgpack.Decoder(KeyRecord)
_CHUNK = 1000


class RedisStore:
    """`ConversationStore` on a Redis server.

    Responses whose gateway died become incomplete within 4/3 of `lease_s`, with the output of their checkpoints. A
    server that does not answer yet is waited for. Raises: StoreUnusableError for one that rejects the login or contains
    the data of a newer version.
    """

    def __init__(self, url: str, *, lease_s: float = LEASE_S, timeout_s: float | None = None) -> None:
        """Configure the store.

        `timeout_s`: how long the server may be silent before it counts as down; by default `redis_client.TIMEOUT_S`.
        """
        self._connection = RedisConnection(url, check_layout, timeout_s=timeout_s)
        self.keys = RedisKeys(self._connection)
        self.saved_prompts = RedisSavedPrompts(self._connection)
        self._heartbeats = GatewayHeartbeats(self._connection, self._end_response, lease_s)
        self.channel = GatewayChannel(url, self._connection, self._heartbeats)
        with contextlib.suppress(StoreUnavailableError):
            check_server(url)

    async def check(self) -> None:
        await self._heartbeats.check()

    async def create(
        self,
        conversation: Conversation,
        items: Sequence[Item] = (),
        turn: Turn | None = None,
        *,
        claim: Claim | None = None,
    ) -> None:
        async def work(pipe: Pipe) -> None:
            if await pipe.exists(head_key(conversation.id)):
                raise RuntimeError(f"the conversation {conversation.id!r} exists already")
            await require_free(pipe, conversation.owner, claim)
            await require_parents(pipe, conversation.id, items)
            pipe.multi()
            put_claim(pipe, conversation.owner, claim)
            await self._add(pipe, Head(conversation, 0), items, () if turn is None else (turn,))
            put_index(pipe, conversation)

        await self._change(conversation.id, work, turn, watched_keys(conversation.owner, claim))

    async def find_claim(self, owner: str, key: str) -> Claim | None:
        data = await self._read(lambda client: client.get(claim_key(owner, key)))
        return unpack_claim(data) if data is not None else None

    async def get(self, owner: str, conversation_id: str) -> Conversation:
        key = head_key(conversation_id)
        return (await self._read(lambda client: read_head(client, owner, conversation_id), key)).conversation

    async def find_owner(self, conversation_id: str) -> str:
        key = head_key(conversation_id)
        return await self._read(lambda client: read_owner(client, conversation_id), key)

    async def list(self, owner: str, limit: int, after: str | None = None) -> Sequence[Conversation]:
        return await self._read(lambda client: list_heads(client, owner, limit, after))

    async def search(self, owner: str, query: SearchQuery, limit: int, after: str | None = None) -> Sequence[SearchHit]:
        return await self._read(lambda client: search(client, owner, query, limit, after))

    async def list_ids(self, owner: str, limit: int, after: str | None = None) -> Sequence[str]:
        return await self._read(lambda client: read_ids(client, owner, limit, after))

    async def list_owners(self) -> Sequence[str]:
        """Return every owner of a conversation, in order. Scans all keys of the server."""
        return await self._read(read_owners)

    async def key_records(self) -> Sequence[KeyRecord]:
        return await self.keys.list()

    async def load(self, owner: str, conversation_id: str) -> ConversationTree:
        return await self._read_part(owner, conversation_id, read_tree)

    async def load_path(
        self, owner: str, conversation_id: str, end: str | None = None, *, limit: int | None = None
    ) -> ConversationTree:
        return await self._read_part(owner, conversation_id, partial(read_path, end=end, limit=limit))

    async def list_items(self, owner: str, conversation_id: str, query: ItemQuery) -> ConversationTree:
        return await self._read_part(owner, conversation_id, partial(read_page, query=query))

    async def locate(self, owner: str, member_id: str) -> str:
        return await self._read(lambda client: find_conversation_of(client, owner, member_id))

    async def append(
        self,
        owner: str,
        conversation_id: str,
        items: Sequence[Item],
        turn: Turn | None = None,
        *,
        active_leaf: str | None = None,
        title: str | None = None,
        expected_rev: int | None = None,
        claim: Claim | None = None,
        max_items: int | None = None,
        depends_on: Sequence[str] = (),
    ) -> Conversation:
        async def work(pipe: Pipe) -> Conversation:
            present = await read_head(pipe, owner, conversation_id, expected_rev)
            num_items = await pipe.hlen(items_key(conversation_id)) if max_items is not None and items else 0
            if max_items is not None and num_items + len(items) > max_items:
                raise ConversationFullError(num_items, len(items), max_items)
            await require_free(pipe, owner, claim)
            await self._heartbeats.require_own(pipe, conversation_id, turn)
            await require_members(pipe, conversation_id, depends_on)
            await require_parents(pipe, conversation_id, items)
            if active_leaf is not None and active_leaf not in {item.id for item in items}:
                await require_items(pipe, conversation_id, [active_leaf], "active_leaf")
            head = present.conversation
            changed = head_after_append(head, active_leaf, title)
            pipe.multi()
            put_claim(pipe, owner, claim)
            await self._add(pipe, Head(changed, present.num_positions), items, () if turn is None else (turn,))
            put_title(pipe, head, changed)
            return changed

        return await self._change(conversation_id, work, turn, watched_keys(owner, claim))

    async def checkpoint(self, checkpoints: Sequence[ReplyCheckpoint]) -> None:
        async def work(client: Client) -> None:
            async with client.pipeline(transaction=False) as pipe:
                for each in checkpoints:
                    pipe.rpushx(checkpoint_key(each.conversation_id, each.response_id), each.data)
                await pipe.execute()

        await self._connection.run(work)

    async def update(
        self,
        owner: str,
        conversation_id: str,
        *,
        title: str | None = None,
        active_leaf: str | None = None,
        metadata: Mapping[str, str] | None = None,
        expected_rev: int | None = None,
    ) -> Conversation:
        async def work(pipe: Pipe) -> Conversation:
            present = await read_head(pipe, owner, conversation_id, expected_rev)
            if active_leaf is not None:
                await require_items(pipe, conversation_id, [active_leaf], "active_leaf")
            head = present.conversation
            changed = head_after_update(head, title=title, active_leaf=active_leaf, metadata=metadata)
            pipe.multi()
            await self._add(pipe, Head(changed, present.num_positions), (), ())
            put_title(pipe, head, changed)
            return changed

        return await self._change(conversation_id, work)

    async def delete_messages(
        self, owner: str, conversation_id: str, deletion: MessageDeletion, *, expected_rev: int | None = None
    ) -> Conversation:
        async def work(pipe: Pipe) -> Conversation:
            present = await read_head(pipe, owner, conversation_id, expected_rev)
            kept = {each.item.id: each for each in await read_items(pipe, conversation_id)}
            gone = [name for name in deletion.removed_items if kept.pop(name, None) is not None]
            changed = head_after_deletion(present.conversation, deletion)
            moved = {item.id: item for item in deletion.items}
            pipe.multi()
            remove_members(pipe, items_key(conversation_id), gone)
            remove_members(pipe, turns_key(conversation_id), deletion.removed_turns)
            for position, item in (kept[name] for name in moved if name in kept):
                now = replace(item, parent_id=moved[item.id].parent_id, token_ids=moved[item.id].token_ids)
                pipe.hset(items_key(conversation_id), item.id, pack_item(PositionedItem(position, now)))
            await self._add(pipe, Head(changed, present.num_positions), (), deletion.turns)
            texts = (changed.title, *(each.item.text for each in kept.values()))
            words = await run_computation(sum(map(len, texts)), lambda: index_words(texts))
            pipe.set(words_key(conversation_id), words)
            return changed

        return await self._change(conversation_id, work, is_slow=True)

    async def merge(self, conversation: Conversation, items: Sequence[Item], turns: Sequence[Turn]) -> MergeResult:
        async def work(pipe: Pipe) -> MergeResult:
            stored = await pipe.get(head_key(conversation.id))
            present = None if stored is None else await read_head(pipe, conversation.owner, conversation.id)
            new_items = await find_missing(pipe, conversation.id, items)
            new_turns = await find_missing(pipe, conversation.id, turns)
            await require_parents(pipe, conversation.id, new_items)
            head = conversation if present is None else present.conversation
            if present is not None and (new_items or new_turns):
                head = head_after_append(head, conversation.active_leaf)
            pipe.multi()
            if present is None or head is not present.conversation:
                await self._add(pipe, Head(head, present.num_positions if present else 0), new_items, new_turns)
            if present is None:
                put_index(pipe, head)
            return MergeResult(head, present is None, len(new_items), len(new_turns))

        watched = [member_key(each) for each in member_ids(items, turns)]
        return await self._change(conversation.id, work, watched=watched, is_slow=True)

    async def delete(self, owner: str, conversation_id: str, *, expected_rev: int | None = None) -> None:
        async def work(pipe: Pipe) -> None:
            await read_head(pipe, owner, conversation_id, expected_rev)
            items: list[bytes] = await pipe.hkeys(items_key(conversation_id))
            turns: list[bytes] = await pipe.hkeys(turns_key(conversation_id))
            pipe.multi()
            remove_members(pipe, items_key(conversation_id), items)
            remove_members(pipe, turns_key(conversation_id), turns)
            pipe.delete(*(key(conversation_id) for key in (head_key, order_key, members_key, words_key)))
            pipe.zrem(list_key(owner), conversation_id)
            pipe.zrem(ids_key(owner), conversation_id)
            if turns:
                pipe.hdel(RUNNING_KEY, *turns)
                pipe.delete(*(checkpoint_key(conversation_id, turn.decode()) for turn in turns))

        await self._change(conversation_id, work, is_slow=True)

    async def assign_owner(self, owner: str, to: str) -> OwnerAssignment:
        """Move conversations one by one: those moved before an interruption stay moved."""
        total, after = OwnerAssignment(), None
        while names := await self.list_ids(owner, _CHUNK, after):
            after = names[-1]
            for name in names:
                done = await self._change(name, partial(assign_owner, conversation_id=name, owner=owner, to=to))
                total = OwnerAssignment(
                    total.num_conversations + done.num_conversations, total.num_busy + done.num_busy
                )
        return total

    async def close(self) -> None:
        await self._heartbeats.close()
        await self._connection.close()

    async def _read(self, work: Callable[[Client], Awaitable[Result]], order: str = "") -> Result:
        self._heartbeats.start()
        return await self._connection.run(work, order=order)

    async def _read_part(
        self, owner: str, conversation_id: str, read: Callable[[Reader, Head], Awaitable[ConversationTree]]
    ) -> ConversationTree:
        """Read a part of a tree as it was at one moment. Raises: NotFoundError."""

        async def work(client: Client) -> ConversationTree:
            # Every change rewrites the head. Without MULTI, which a full server rejects even for reading.
            while True:
                head = await read_head(client, owner, conversation_id)
                part = await read(client, head)
                if await read_head(client, owner, conversation_id) == head:
                    return part

        return await self._read(work, head_key(conversation_id))

    async def _change(
        self,
        conversation_id: str,
        work: Callable[[Pipe], Awaitable[Result]],
        turn: Turn | None = None,
        watched: Sequence[str] = (),
        *,
        is_slow: bool = False,
    ) -> Result:
        """Change one conversation, all or nothing. `turn`: a response that the change stores."""
        self._heartbeats.start()
        self._heartbeats.register(turn)
        key = head_key(conversation_id)
        try:
            result = await self._connection.transact((key, *watched), work, order=key, is_slow=is_slow)
        except (ChatcacheError, RuntimeError):
            self._heartbeats.confirm(turn, stored=False)
            raise
        self._heartbeats.confirm(turn, stored=True)
        return result

    async def _end_response(self, conversation_id: str, response_id: str, entry: bytes) -> None:
        """End a response whose process died, with the messages that its checkpoints hold."""

        async def work(pipe: Pipe) -> None:
            data = await pipe.get(head_key(conversation_id))
            stored = await pipe.hget(turns_key(conversation_id), response_id)
            present = await pipe.hget(RUNNING_KEY, response_id)
            checkpoints = await pipe.lrange(checkpoint_key(conversation_id, response_id), 0, -1)
            turn = unpack_turn(stored) if stored is not None else None
            pipe.multi()
            if present != entry:
                return
            pipe.hdel(RUNNING_KEY, response_id)
            if data is not None and turn is not None and turn.status == IN_PROGRESS:
                head, items = unpack_head(data), restore(filter(None, checkpoints))
                changed, ended = end_interrupted(head.conversation, turn, items)
                await self._add(pipe, Head(changed, head.num_positions), items, (ended,))

        key = head_key(conversation_id)
        await self._connection.transact((key,), work, order=key)

    async def _add(self, pipe: Pipe, head: Head, items: Sequence[Item], turns: Sequence[Turn]) -> None:
        """Queue writes of the new head, of `items` as the last messages, and of responses."""
        name, first = head.conversation.id, head.num_positions
        pipe.set(head_key(name), pack_head(Head(head.conversation, first + len(items))))
        pipe.zadd(list_key(head.conversation.owner), {name: head.conversation.updated_at})
        if items:
            placed, words = await run_computation(sum(len(i.text) for i in items), lambda: pack_items(items, first))
            pipe.hset(items_key(name), mapping=placed)
            put_order(pipe, name, [PositionedItem(first + at, item) for at, item in enumerate(items)])
            pipe.append(words_key(name), words)
        for turn in turns:
            pipe.hset(turns_key(name), turn.id, pack_turn(turn))
            self._heartbeats.record(pipe, name, turn)
        if items or turns:
            pipe.mset({member_key(each): name for each in member_ids(items, turns)})


class RedisKeys:
    """`KeyStore` on a connection that the caller closes."""

    def __init__(self, link: RedisConnection) -> None:
        self._connection = link

    async def create(self, record: KeyRecord) -> None:
        async def work(client: Client) -> None:
            async with client.pipeline(transaction=True) as pipe:
                _put(pipe, record)
                await pipe.execute()

        await self._connection.run(work)

    async def list(self) -> Sequence[KeyRecord]:
        found: Mapping[bytes, bytes] = await self._connection.run(lambda client: client.hgetall(API_KEYS_KEY))
        return sorted(map(_KEY.decode, found.values()), key=lambda record: (record.created_at, record.id))

    async def revoke(self, key_id: str, at: float) -> KeyRecord:
        async def work(pipe: Pipe) -> KeyRecord:
            data = await pipe.hget(API_KEYS_KEY, key_id)
            if data is None:
                raise NotFoundError(f"no key {key_id!r}", param="id")
            present = _KEY.decode(data)
            pipe.multi()
            if present.revoked_at is not None:
                return present
            revoked = replace(present, revoked_at=at)
            _put(pipe, revoked)
            return revoked

        return await self._connection.transact((API_KEYS_KEY,), work, order=API_KEYS_KEY)

    async def version(self) -> int:
        return int(await self._connection.run(lambda client: client.get(API_KEYS_VERSION_KEY)) or 0)

    async def add_usage(self, day: int, tokens: Mapping[str, int], *, writer: str, number: int) -> None:
        key = usage_key(day)

        async def work(pipe: Pipe) -> None:
            last = int(await pipe.hget(key, WRITER_PREFIX + writer) or 0)
            pipe.multi()
            if last < number:
                pipe.hset(key, WRITER_PREFIX + writer, number)
                for key_id, count in tokens.items():
                    pipe.hincrby(key, key_id, count)
                pipe.expire(key, USAGE_RETENTION_DAYS * DAY_S)

        await self._connection.transact((key,), work, order=key)

    async def usage(self, day: int) -> Mapping[str, int]:
        found: Mapping[bytes, bytes] = await self._connection.run(lambda client: client.hgetall(usage_key(day)))
        counts = {name.decode(): int(count) for name, count in found.items()}
        return {key_id: count for key_id, count in counts.items() if not key_id.startswith(WRITER_PREFIX)}


class RedisSavedPrompts:
    """`SavedPromptStore` on a connection that the caller closes."""

    def __init__(self, link: RedisConnection) -> None:
        self._connection = link

    async def list(self, tenant: str) -> Sequence[SavedPrompt]:
        found: list[bytes] = await self._connection.run(lambda client: client.hvals(prompts_key(tenant)))
        return await run_computation(
            sum(map(len, found)), lambda: tuple(sorted(map(unpack_prompt, found), key=lambda prompt: prompt.name))
        )

    async def get(self, tenant: str, name: str) -> SavedPrompt:
        return await self._connection.run(lambda client: read_prompt(client, tenant, name))

    async def create(self, tenant: str, prompt: SavedPrompt) -> None:
        async def work(pipe: Pipe) -> None:
            await _require_unused(pipe, tenant, prompt.name)
            count = await pipe.hlen(prompts_key(tenant))
            if count >= MAX_SAVED_PROMPTS:
                raise PromptLibraryFullError(count)
            pipe.multi()
            pipe.hset(prompts_key(tenant), prompt.name, pack_prompt(prompt))

        await self._change(tenant, work)

    async def update(
        self,
        tenant: str,
        name: str,
        *,
        new_name: str | None = None,
        text: str | None = None,
        description: str | None = None,
    ) -> SavedPrompt:
        async def work(pipe: Pipe) -> SavedPrompt:
            changed = (await read_prompt(pipe, tenant, name)).changed(new_name, text, description)
            if changed.name != name:
                await _require_unused(pipe, tenant, changed.name)
            pipe.multi()
            if changed.name != name:
                pipe.hdel(prompts_key(tenant), name)
            pipe.hset(prompts_key(tenant), changed.name, pack_prompt(changed))
            return changed

        return await self._change(tenant, work)

    async def delete(self, tenant: str, name: str) -> None:
        async def work(pipe: Pipe) -> None:
            await read_prompt(pipe, tenant, name)
            pipe.multi()
            pipe.hdel(prompts_key(tenant), name)

        await self._change(tenant, work)

    async def _change(self, tenant: str, work: Callable[[Pipe], Awaitable[Result]]) -> Result:
        key = prompts_key(tenant)
        return await self._connection.transact((key,), work, order=key)


async def _require_unused(pipe: Pipe, tenant: str, name: str) -> None:
    if await pipe.hexists(prompts_key(tenant), name):
        raise PromptExistsError(name)


def check_server(url: str) -> None:
    """Check that the URL names a usable Redis server.

    Raises: StoreUnusableError, StoreUnavailableError, with the reason.
    """
    found = probe_server(url, SCHEMA_KEY)
    if found is not None:
        _check_version(found)


async def check_layout(client: Client) -> None:
    """Write the version of the layout, or check the version found and migrate. Raises: StoreUnusableError."""
    await client.set(SCHEMA_KEY, VERSION, nx=True)
    found = await client.get(SCHEMA_KEY)
    _check_version(found)
    if int(found) < VERSION:
        async for key in client.scan_iter(match=head_key("*"), count=_CHUNK):
            await _build_order(client, conversation_of_head(key.decode()))
        await client.set(SCHEMA_KEY, VERSION)


async def _build_order(client: Client, conversation_id: str) -> None:
    """Build the order of the messages of a conversation, which layout 1 did not have. Deleted ones have no id."""
    async with client.pipeline(transaction=True) as pipe:
        await pipe.watch(head_key(conversation_id))
        head = unpack_head(data) if (data := await pipe.get(head_key(conversation_id))) is not None else None
        placed = await read_items(pipe, conversation_id)
        pipe.multi()
        pipe.delete(order_key(conversation_id), members_key(conversation_id))
        by_position = {each.position: each for each in placed}
        hole = Item("", None, "user", "")
        order = [by_position.get(at, PositionedItem(at, hole)) for at in range(head.num_positions if head else 0)]
        if order:
            put_order(pipe, conversation_id, order)
        await pipe.execute()


def _check_version(found: bytes) -> None:
    if not found.isdigit() or int(found) > VERSION:
        version = found[:20].decode("ascii", "replace")
        raise StoreUnusableError(
            f"the Redis server was written by a newer chatcache (layout {version}, this one supports {VERSION})"
        )


def watched_keys(owner: str, claim: Claim | None) -> Sequence[str]:
    return () if claim is None else (claim_key(owner, claim.key),)


async def require_free(pipe: Pipe, owner: str, claim: Claim | None) -> None:
    """Raise IdempotencyConflictError if the claim's key was used before."""
    present = await pipe.get(claim_key(owner, claim.key)) if claim is not None else None
    if present is not None:
        raise IdempotencyConflictError(unpack_claim(present))


def put_claim(pipe: Pipe, owner: str, claim: Claim | None) -> None:
    if claim is not None:
        pipe.set(claim_key(owner, claim.key), pack_claim(claim), ex=CLAIM_TTL_S)


async def require_parents(pipe: Pipe, conversation_id: str, items: Sequence[Item]) -> None:
    """Raise NotFoundError unless the parent of each message is stored or precedes it in `items`."""
    before: set[str] = set()
    outside: list[str] = []
    for item in items:
        if item.parent_id is not None and item.parent_id not in before:
            outside.append(item.parent_id)
        before.add(item.id)
    await require_items(pipe, conversation_id, outside, "parent_id")


async def require_items(pipe: Pipe, conversation_id: str, item_ids: Sequence[str], param: str) -> None:
    found = await pipe.hmget(items_key(conversation_id), list(dict.fromkeys(item_ids))) if item_ids else ()
    for item_id, data in zip(dict.fromkeys(item_ids), found, strict=True):
        if data is None:
            raise NotFoundError(f"conversation {conversation_id!r} has no message {item_id[:128]!r}", param=param)


def member_ids(items: Sequence[Item], turns: Sequence[Turn]) -> list[str]:
    return [*(item.id for item in items), *(turn.id for turn in turns)]


async def find_missing(pipe: Pipe, conversation_id: str, members: Sequence[Member]) -> list[Member]:
    """Return those messages and responses that are not stored in the conversation yet.

    Raises: NotFoundError for an id that is stored in another conversation.
    """
    if not members:
        return []
    names = [member.id for member in members]
    holders = await pipe.mget([member_key(name) for name in names])
    for name, holder in zip(names, holders, strict=True):
        if holder is not None and holder.decode() != conversation_id:
            raise NotFoundError(f"conversation {conversation_id!r} has no {name!r}")
    return [member for member, holder in zip(members, holders, strict=True) if holder is None]


def pack_items(items: Sequence[Item], first: int) -> tuple[dict[str, bytes], str]:
    """Encode messages for the items hash, and return also their words for the search.

    `first`: position of the first message in the conversation.
    """
    placed = {item.id: pack_item(PositionedItem(first + at, item)) for at, item in enumerate(items)}
    return placed, index_words(item.text for item in items)


def put_order(pipe: Pipe, conversation_id: str, placed: Sequence[PositionedItem]) -> None:
    """Queue entries of messages at the end of the order, and of the responses they belong to."""
    pipe.rpush(order_key(conversation_id), *(each.item.id for each in placed))
    members = {member_entry(each): 0 for each in placed if each.item.response_id is not None}
    if members:
        pipe.zadd(members_key(conversation_id), members)


def put_index(pipe: Pipe, conversation: Conversation) -> None:
    pipe.zadd(ids_key(conversation.owner), {conversation.id: 0})
    pipe.append(words_key(conversation.id), index_words([conversation.title]))


async def assign_owner(pipe: Pipe, *, conversation_id: str, owner: str, to: str) -> OwnerAssignment:
    """Queue a change of a conversation's owner, and report whether it was skipped.

    It is not queued if the conversation has another owner than `owner` or a response in progress.
    """
    data = await pipe.get(head_key(conversation_id))
    head = unpack_head(data) if data is not None else None
    running = {RunningEntry.decode(entry).conversation_id for entry in await pipe.hvals(RUNNING_KEY)}
    pipe.multi()
    if head is None or head.conversation.owner != owner:
        return OwnerAssignment()
    if conversation_id in running:
        return OwnerAssignment(num_busy=1)
    given = replace(head.conversation, owner=to)
    pipe.set(head_key(conversation_id), pack_head(Head(given, head.num_positions)))
    for key_of, score in ((list_key, given.updated_at), (ids_key, 0)):
        pipe.zrem(key_of(owner), conversation_id)
        pipe.zadd(key_of(to), {conversation_id: score})
    return OwnerAssignment(num_conversations=1)


def put_title(pipe: Pipe, head: Conversation, changed: Conversation) -> None:
    if changed.title != head.title:
        pipe.append(words_key(head.id), index_words([changed.title]))


def remove_members(pipe: Pipe, key: str, members: Names) -> None:
    if members:
        names = [each.decode() if isinstance(each, bytes) else each for each in members]
        pipe.hdel(key, *names)
        pipe.delete(*(member_key(name) for name in names))


def _put(pipe: Pipe, record: KeyRecord) -> None:
    pipe.hset(API_KEYS_KEY, record.id, msgspec.msgpack.encode(record))
    pipe.incr(API_KEYS_VERSION_KEY)
