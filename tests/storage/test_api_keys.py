"""API keys and their usage: one contract on every store; no secret is ever stored."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from chatcache.auth import DAY_S, USAGE_RETENTION_DAYS, KeyRecord, KeyStore, key_digest, key_id_of, new_key, utc_day
from chatcache.config import ServerConfig
from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import IN_PROGRESS, Conversation, Item, Turn
from chatcache.errors import InvalidRequestError, NotFoundError
from chatcache.storage.open import open_keys, open_store
from chatcache.storage.redis import RedisStore
from chatcache.storage.redis_client import SLOW_TIMEOUT_S
from chatcache.storage.sqlite import SqliteStore
from chatcache.storage.sqlite_schema import MIGRATIONS


@pytest.fixture(params=["sqlite", "redis"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> ServerConfig:
    if request.param == "redis":
        return ServerConfig(redis=request.getfixturevalue("empty_redis").url)
    return ServerConfig(db=str(tmp_path / "keys.db"))


@pytest.fixture
async def keys(place: ServerConfig) -> AsyncIterator[KeyStore]:
    async with open_keys(place) as keys:
        yield keys


def made(tenant: str = "acme", user: str = "", **more: object) -> KeyRecord:
    return new_key(tenant, user, **more)[1]  # type: ignore[arg-type]


async def test_key_store_returns_records_and_never_the_key(keys: KeyStore) -> None:
    key, record = new_key("acme", "ann", "laptop", is_admin=True, requests_per_minute=1, tokens_per_day=2**53)
    await keys.create(record)
    assert await keys.list() == [record]
    assert record.digest == key_digest(key) and key_id_of(key) == record.id and record.owner == "acme/ann"
    assert key.split("_", 2)[2] not in repr(record) and key not in repr(await keys.list())


async def test_key_store_version_changes_with_every_change_only(keys: KeyStore) -> None:
    seen = [await keys.version()]
    one, two = made(), made(user="bob")
    for record in (one, two):
        await keys.create(record)
        seen.append(await keys.version())
    await keys.revoke(one.id, 5.0)
    seen.append(await keys.version())
    assert len(set(seen)) == 4
    await keys.revoke(one.id, 9.0)
    await keys.add_usage(3, {one.id: 7}, writer="w", number=1)
    await keys.list()
    assert await keys.version() == seen[-1]


async def test_key_store_revocation_is_permanent(keys: KeyStore) -> None:
    one, two = replace(made(), created_at=1.0), replace(made(), created_at=2.0)
    await keys.create(two)
    await keys.create(one)
    assert await keys.revoke(one.id, 5.0) == replace(one, revoked_at=5.0)
    assert await keys.revoke(one.id, 9.0) == replace(one, revoked_at=5.0)
    assert await keys.list() == [replace(one, revoked_at=5.0), two]
    with pytest.raises(NotFoundError):
        await keys.revoke("key_none", 5.0)


async def test_key_store_usage_sums_many_writers(place: ServerConfig, keys: KeyStore) -> None:
    """The oracle is a dictionary."""
    draw = random.Random(7)
    adds = [(draw.randrange(3), {f"key_{draw.randrange(4)}": draw.randrange(1000), "key_x": 1}) for _ in range(40)]
    expected: dict[int, dict[str, int]] = {}
    for day, tokens in adds:
        for key_id, count in tokens.items():
            of_day = expected.setdefault(day, {})
            of_day[key_id] = of_day.get(key_id, 0) + count
    async with open_keys(place) as others:
        ways = ((keys, "one"), (others, "two"))
        await asyncio.gather(
            *(
                ways[at % 2][0].add_usage(*add, writer=ways[at % 2][1], number=number)
                for at, add in enumerate(adds)
                for number in (at + 1, at + 1)  # a writer that does not know the outcome repeats the call
            )
        )
        await keys.add_usage(3, {}, writer="one", number=len(adds) + 1)
        for day in range(4):
            assert await others.usage(day) == expected.get(day, {})


async def test_key_store_deletes_old_days_of_usage(tmp_path: Path) -> None:
    async with open_keys(ServerConfig(db=str(tmp_path / "keys.db"))) as keys:
        await keys.add_usage(100, {"key_x": 1}, writer="w", number=1)
        await keys.add_usage(100 + USAGE_RETENTION_DAYS, {"key_x": 2}, writer="w", number=2)
        assert await keys.usage(100) == {"key_x": 1}
        await keys.add_usage(101 + USAGE_RETENTION_DAYS, {"key_x": 2}, writer="w", number=3)
        assert await keys.usage(100) == {}
    assert utc_day(0.0) == 0 and utc_day(DAY_S - 0.001) == 0 and utc_day(DAY_S) == 1


async def test_open_keys_shares_keys_with_an_open_store(place: ServerConfig) -> None:
    patient = {"timeout_s": SLOW_TIMEOUT_S}
    store: ConversationStore = RedisStore(place.redis, **patient) if place.redis else SqliteStore(place.db)
    try:
        record = made(user="ann")
        async with open_keys(place) as keys:
            await keys.create(record)
        assert await store.keys.list() == [record]
        await store.keys.revoke(record.id, 3.0)
        async with open_keys(place) as keys:
            assert (await keys.list())[0].revoked_at == 3.0
    finally:
        await store.close()


async def test_open_keys_does_not_end_running_responses(tmp_path: Path) -> None:
    config = ServerConfig(db=str(tmp_path / "chat.db"))
    store = open_store(config)
    try:
        item = Item("msg_1", None, "user", "Hi", (), "resp_1")
        turn = Turn("resp_1", "msg_1", "m", 1.0, None, (), status=IN_PROGRESS)
        await store.create(Conversation("conv_1", "me", 1.0, 1.0, "", "msg_1", rev=1), (item,), turn)
        async with open_keys(config) as keys:
            await keys.create(made())
        assert (await store.load("me", "conv_1")).turns["resp_1"].status == IN_PROGRESS
    finally:
        await store.close()


async def test_open_keys_migrates_an_older_file_with_a_backup(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    with sqlite3.connect(path) as db:
        for step in MIGRATIONS[:-1]:
            db.executescript(step)
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) - 1}")
    db.close()
    async with open_keys(ServerConfig(db=str(path))) as keys:
        await keys.create(made())
    assert path.with_name(f"chat.db.before-schema-{len(MIGRATIONS)}").exists()


async def test_open_keys_twice_at_once_on_a_new_file_succeeds(tmp_path: Path) -> None:
    config = ServerConfig(db=str(tmp_path / "new.db"))

    async def add() -> None:
        async with open_keys(config) as keys:
            await keys.create(made())

    await asyncio.gather(*(add() for _ in range(4)))
    async with open_keys(config) as keys:
        assert len(await keys.list()) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tenant": ""}, "tenant"),
        ({"tenant": "a/b"}, "tenant"),
        ({"user": "x y"}, "user"),
        ({"name": "\n"}, "name"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"tokens_per_day": 2**53 + 1}, "tokens_per_day"),
        ({"max_concurrent": -1}, "max_concurrent"),
    ],
)
def test_new_key_with_an_invalid_field_names_it(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        new_key(**{"tenant": "acme", **fields})  # type: ignore[arg-type]
    assert caught.value.param == param


def test_key_id_of_another_format_is_none() -> None:
    assert key_id_of("sk-something") is None and key_id_of("cck_") == "key_" and key_id_of("cck_ab_c_d") == "key_ab"
