"""The storage contract, and what SQLite adds to it: durability, migration, one writer."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from chatcache.chat import store_sqlite
from chatcache.chat.store import ConversationStore, StaleRevision, StoreUnusable
from chatcache.chat.store_sqlite import SqliteStore
from chatcache.chat.tree import COMPLETED, INCOMPLETE, Conversation, Item, Turn, Usage
from chatcache.errors import NotFound

USER = Item("msg_u", None, "user", "Hé\x00llo 🎉", created_at=1.5)
REPLY = Item("msg_a", "msg_u", "assistant", "Hi", (1, 70_000, 2**31 - 1), "resp_1", 3, INCOMPLETE, "length", 2.5)
TURN = Turn("resp_1", "msg_u", "model", 1.0, None, (5, 6), "Be kind", None)


@pytest.fixture(params=["sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ConversationStore]:
    """Every implementation the contract holds for."""
    store = SqliteStore(tmp_path / "chat.db")
    yield store
    await store.close()


async def create(store: ConversationStore, name: str = "conv_1", owner: str = "me") -> Conversation:
    conversation = Conversation(name, owner, created_at=1.0, updated_at=1.0, metadata={"a": "ü"})
    await store.create(conversation)
    return conversation


async def test_what_goes_in_comes_out(store: ConversationStore) -> None:
    conversation = await create(store)
    assert await store.get("me", "conv_1") == conversation
    first = await store.append("me", "conv_1", [USER], TURN, active_leaf="msg_u", title="Hello")
    settled = replace(TURN, status=COMPLETED, usage=Usage(2, 1, 3))
    second = await store.append("me", "conv_1", [REPLY], settled, active_leaf="msg_a", title="Another")
    tree = await store.load("me", "conv_1")
    assert tree.conversation == second
    assert (second.rev, second.title, second.active_leaf) == (2, "Hello", "msg_a")
    assert second.updated_at >= first.updated_at > conversation.updated_at
    assert list(tree.items.values()) == [USER, REPLY]
    assert list(tree.turns.values()) == [settled]
    for member in ("msg_u", "msg_a", "resp_1"):
        assert await store.locate("me", member) == "conv_1"


async def test_owners_see_only_their_own(store: ConversationStore) -> None:
    await create(store)
    await store.append("me", "conv_1", [USER], TURN)
    for work in (
        store.get("you", "conv_1"),
        store.load("you", "conv_1"),
        store.locate("you", "msg_u"),
        store.locate("you", "resp_1"),
        store.append("you", "conv_1", [REPLY]),
        store.update("you", "conv_1", title="x"),
        store.delete("you", "conv_1"),
        store.get("me", "conv_2"),
        store.locate("me", "msg_x"),
        store.list("you", 10, after="conv_1"),
    ):
        with pytest.raises(NotFound):
            await work
    assert await store.list("you", 10) == ()


async def test_stale_writers_are_told_and_change_nothing(store: ConversationStore) -> None:
    await create(store)
    await store.append("me", "conv_1", [USER], expect=0)
    for work in (
        store.append("me", "conv_1", [REPLY], TURN, expect=0),
        store.update("me", "conv_1", title="x", expect=0),
        store.update("me", "conv_1", title="x", expect=2),
    ):
        with pytest.raises(StaleRevision):
            await work
    tree = await store.load("me", "conv_1")
    assert (tree.conversation.rev, list(tree.items), list(tree.turns)) == (1, ["msg_u"], [])
    assert (await store.update("me", "conv_1", title="x", expect=1)).rev == 2


async def test_an_append_is_all_or_nothing(store: ConversationStore) -> None:
    await create(store)
    orphan = replace(REPLY, id="msg_o", parent_id="msg_nowhere")
    with pytest.raises(NotFound):
        await store.append("me", "conv_1", [USER, orphan], TURN)
    tree = await store.load("me", "conv_1")
    assert (tree.conversation.rev, list(tree.items), list(tree.turns)) == (0, [], [])
    with pytest.raises(NotFound):
        await store.update("me", "conv_1", active_leaf="msg_u")


async def test_a_parent_in_another_conversation_is_no_parent(store: ConversationStore) -> None:
    await create(store)
    await create(store, "conv_2")
    await store.append("me", "conv_1", [USER])
    with pytest.raises(NotFound):
        await store.append("me", "conv_2", [REPLY])


async def test_listing_pages_by_last_change(store: ConversationStore) -> None:
    for number in range(5):
        await create(store, f"conv_{number}")
    await create(store, "conv_theirs", owner="you")
    for number in (3, 1, 4, 0, 2):
        await store.update("me", f"conv_{number}", title=str(number))
    newest = [f"conv_{number}" for number in (2, 0, 4, 1, 3)]
    assert [c.id for c in await store.list("me", 10)] == newest
    assert [c.id for c in await store.list("me", 2)] == newest[:2]
    assert [c.id for c in await store.list("me", 2, after=newest[1])] == newest[2:4]


async def test_deleting_takes_the_whole_tree(store: ConversationStore) -> None:
    await create(store)
    await create(store, "conv_2")
    await store.append("me", "conv_1", [USER, REPLY], TURN)
    await store.append("me", "conv_2", [replace(USER, id="msg_2")])
    await store.delete("me", "conv_1")
    for member in ("msg_u", "msg_a", "resp_1"):
        with pytest.raises(NotFound):
            await store.locate("me", member)
    assert list((await store.load("me", "conv_2")).items) == ["msg_2"]


async def test_many_writers_lose_nothing(store: ConversationStore) -> None:
    await create(store)
    await store.append("me", "conv_1", [USER])
    items = [replace(REPLY, id=f"msg_{number}") for number in range(200)]
    results = await asyncio.gather(*(store.append("me", "conv_1", [item]) for item in items))
    assert sorted(result.rev for result in results) == list(range(2, 202))
    assert len((await store.load("me", "conv_1")).items) == 201


async def test_a_caller_that_leaves_does_not_undo_its_write(store: ConversationStore) -> None:
    await create(store)
    task = asyncio.create_task(store.append("me", "conv_1", [USER]))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert list((await store.load("me", "conv_1")).items) == ["msg_u"]


_WRITER = """
import asyncio, os, sys
from chatcache.chat.store_sqlite import SqliteStore
from chatcache.chat.tree import Conversation, Item, Turn

async def main():
    store = SqliteStore(sys.argv[1])
    await store.create(Conversation("conv", "", 1.0, 1.0))
    parent = None
    for number in range(100000):
        item = Item(f"msg_{number}", parent, "user", "x" * 100, tuple(range(50)))
        await store.append("", "conv", [item], Turn(f"resp_{number}", item.id, "m", 1.0), active_leaf=item.id)
        parent = item.id
        print(number, flush=True)

asyncio.run(main())
"""


async def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    """SIGKILL between turns: everything acknowledged is there, whole, and running responses are marked incomplete."""
    path = tmp_path / "chat.db"
    command = [sys.executable, "-c", _WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:  # noqa: ASYNC220 - nothing else runs
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(25)][-1]
        writer.kill()
        writer.stdout.read()
    store = SqliteStore(path)
    tree = await store.load("", "conv")
    await store.close()
    assert len(tree.items) > acknowledged
    assert [item.id for item in tree.path(tree.conversation.active_leaf)] == list(tree.items)
    assert tree.conversation.rev == len(tree.items)
    assert all(item.token_ids == tuple(range(50)) for item in tree.items.values())
    assert {turn.status for turn in tree.turns.values()} == {INCOMPLETE}


def test_durability_settings(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    db = sqlite3.connect(path)
    store_sqlite._prepare(db, path)
    pragmas = {
        name: db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "foreign_keys")
    }
    db.close()
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


async def test_a_newer_file_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    await SqliteStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreUnusable, match="newer"):
        SqliteStore(path)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (99,)
    db.close()


async def test_migration_backs_up_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.db"
    store = SqliteStore(path)
    await create(store)
    await store.close()
    monkeypatch.setattr(store_sqlite, "MIGRATIONS", (*store_sqlite.MIGRATIONS, "CREATE TABLE extra (x)"))
    store = SqliteStore(path)
    assert (await store.get("me", "conv_1")).id == "conv_1"
    await store.close()
    backup = sqlite3.connect(f"{path}.before-schema-{len(store_sqlite.MIGRATIONS)}")
    tables = {name for (name,) in backup.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert backup.execute("SELECT id FROM conversations").fetchall() == [("conv_1",)] and "extra" not in tables
    backup.close()


async def test_a_failing_migration_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.db"
    await SqliteStore(path).close()
    broken = (*store_sqlite.MIGRATIONS, "CREATE TABLE extra (x); CREATE TABLE conversations (x)")
    monkeypatch.setattr(store_sqlite, "MIGRATIONS", broken)
    with pytest.raises(StoreUnusable, match="already exists"):
        SqliteStore(path)
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (len(broken) - 1,)
    assert not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'extra'").fetchall()
    db.close()


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    path.write_bytes(os.urandom(4096))
    with pytest.raises(StoreUnusable, match=r"chat\.db"):
        SqliteStore(path)
    with pytest.raises(StoreUnusable, match="nowhere"):
        SqliteStore(tmp_path / "nowhere" / "chat.db")
