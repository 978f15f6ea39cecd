"""Idempotency claims in every store: written together with their object, visible to their owner only."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest

from chatcache.conversations.store import (
    CLAIM_TTL_S,
    Claim,
    ConversationStore,
    IdempotencyConflictError,
    StaleRevisionError,
)
from chatcache.conversations.tree import Conversation, Item, Turn
from chatcache.errors import NotFoundError
from chatcache.storage.redis import RedisStore
from chatcache.storage.sqlite import SqliteStore
from tests.support.redis_servers import RedisServer

USER = Item("msg_u", None, "user", "Hello")
TURN = Turn("resp_1", "msg_u", "m", 1.0)
CLAIM = Claim("key", "digest", "resp_1")


def conversation(name: str = "conv_1", owner: str = "me") -> Conversation:
    return Conversation(name, owner, 1.0, 1.0)


async def test_claim_is_found_by_its_owner_with_its_target(store: ConversationStore) -> None:
    assert await store.find_claim("me", "key") is None
    await store.create(conversation(), [USER], TURN, claim=CLAIM)
    assert await store.find_claim("me", "key") == CLAIM
    assert await store.find_claim("you", "key") is None and await store.find_claim("me", "key2") is None
    await store.append("me", "conv_1", [Item("msg_2", "msg_u", "user", "More")], claim=Claim("key2", "d", "resp_2"))
    assert await store.find_claim("me", "key2") == Claim("key2", "d", "resp_2")


async def test_claim_used_twice_is_refused_and_changes_nothing(store: ConversationStore) -> None:
    await store.create(conversation(), [USER], TURN, claim=CLAIM)
    before = await store.load("me", "conv_1")
    other = Claim("key", "other", "resp_9")
    with pytest.raises(IdempotencyConflictError) as taken:
        await store.create(conversation("conv_2"), [Item("msg_2", None, "user", "x")], claim=other)
    assert taken.value.claim == CLAIM
    with pytest.raises(IdempotencyConflictError):
        await store.append("me", "conv_1", [Item("msg_3", "msg_u", "user", "x")], claim=other)
    after = await store.load("me", "conv_1")
    assert (after.conversation, after.items, after.turns) == (before.conversation, before.items, before.turns)
    with pytest.raises(NotFoundError):
        await store.get("me", "conv_2")
    await store.create(conversation("conv_3", "you"), claim=other)  # their keys are their own
    assert await store.find_claim("you", "key") == other


async def test_refused_write_stores_no_claim(store: ConversationStore) -> None:
    await store.create(conversation(), [USER])
    orphan = Item("msg_o", "nowhere", "user", "x")
    with pytest.raises(StaleRevisionError):
        await store.append("me", "conv_1", [], TURN, expected_rev=7, claim=CLAIM)
    with pytest.raises(NotFoundError):
        await store.append("me", "conv_1", [orphan], claim=CLAIM)
    assert await store.find_claim("me", "key") is None


async def test_claim_used_concurrently_succeeds_once(store: ConversationStore) -> None:
    async def try_one(number: int) -> bool:
        claim = Claim("key", "digest", f"conv_{number}")
        try:
            await store.create(conversation(f"conv_{number}"), claim=claim)
        except IdempotencyConflictError:
            return False
        return True

    assert sum(await asyncio.gather(*(try_one(number) for number in range(20)))) == 1
    kept = await store.list_ids("me", 30)
    claim = await store.find_claim("me", "key")
    assert claim is not None and list(kept) == [claim.target]


async def test_sqlite_deletes_expired_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(tmp_path / "chat.db")
    await store.create(conversation(), claim=CLAIM)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + CLAIM_TTL_S + 1)
    assert await store.find_claim("me", "key") is None
    await store.create(conversation("conv_2"), claim=Claim("key", "new", "conv_2"))
    await store.close()
    db = sqlite3.connect(tmp_path / "chat.db")
    assert db.execute("SELECT digest FROM claims").fetchall() == [("new",)]
    db.close()


async def test_redis_only_claims_and_leases_expire(empty_redis: RedisServer) -> None:
    store = RedisStore(empty_redis.url)
    await store.create(conversation(), [USER], TURN, claim=CLAIM)
    await store.update("me", "conv_1", title="Words")
    await store.close()
    ttls = {key.decode(): empty_redis.admin.ttl(key) for key in empty_redis.admin.keys("*")}
    expiring = {key: ttl for key, ttl in ttls.items() if ttl >= 0}
    assert list(expiring) == ["chatcache:claim:{o=me}:key"]
    assert CLAIM_TTL_S - 60 < expiring["chatcache:claim:{o=me}:key"] <= CLAIM_TTL_S
    assert all(key.startswith("chatcache:") for key in ttls)
