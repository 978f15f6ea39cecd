"""SQLite beyond the storage contract: durability, migration, refused files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from chatcache.config import ServerConfig
from chatcache.conversations.store import StoreUnusableError
from chatcache.conversations.tree import INCOMPLETE
from chatcache.storage import sqlite_schema
from chatcache.storage.open import lock_store
from chatcache.storage.sqlite import SqliteStore
from tests.storage.stored_conversation import create

_WRITER = """
import asyncio, os, sys
from chatcache.storage.sqlite import SqliteStore
from chatcache.conversations.tree import Conversation, Item, Turn

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


async def test_acknowledged_turns_survive_a_kill(tmp_path: Path) -> None:
    """SIGKILL between turns: all acknowledged turns are complete, and running responses are marked incomplete."""
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


def test_connection_has_durable_pragmas(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    db = sqlite3.connect(path)
    sqlite_schema.prepare(db, path)
    pragmas = {
        name: db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "foreign_keys")
    }
    db.close()
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


async def test_open_of_a_newer_file_is_refused_without_changes(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    await SqliteStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreUnusableError, match="newer"):
        SqliteStore(path)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (99,)
    db.close()


async def test_migration_makes_a_backup_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.db"
    store = SqliteStore(path)
    await create(store)
    await store.close()
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", (*sqlite_schema.MIGRATIONS, "CREATE TABLE extra (x)"))
    store = SqliteStore(path)
    assert (await store.get("me", "conv_1")).id == "conv_1"
    await store.close()
    backup = sqlite3.connect(f"{path}.before-schema-{len(sqlite_schema.MIGRATIONS)}")
    tables = {name for (name,) in backup.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert backup.execute("SELECT id FROM conversations").fetchall() == [("conv_1",)] and "extra" not in tables
    backup.close()


def test_migration_backup_is_readable_by_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, elsewhere = tmp_path / "chat.db", tmp_path / "elsewhere"
    asyncio.run(SqliteStore(path).close())
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", (*sqlite_schema.MIGRATIONS, "CREATE TABLE extra (x)"))
    backup = Path(f"{path}.before-schema-{len(sqlite_schema.MIGRATIONS)}")
    elsewhere.write_bytes(b"kept")
    backup.symlink_to(elsewhere)
    umask = os.umask(0)
    try:
        asyncio.run(SqliteStore(path).close())
    finally:
        os.umask(umask)
    assert elsewhere.read_bytes() == b"kept" and not backup.is_symlink()
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["chat.db", backup.name, "elsewhere"]


def test_migration_backup_is_dropped_if_another_process_migrated(tmp_path: Path) -> None:
    path, newest = tmp_path / "chat.db", len(sqlite_schema.MIGRATIONS)
    asyncio.run(SqliteStore(path).close())
    with contextlib.closing(sqlite3.connect(path)) as db:
        sqlite_schema._back_up(db, path, newest - 1)  # it was of that version a moment ago
    assert not path.with_name(f"chat.db.before-schema-{newest}").exists()


async def test_failing_migration_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.db"
    await SqliteStore(path).close()
    broken = (*sqlite_schema.MIGRATIONS, "CREATE TABLE extra (x); CREATE TABLE conversations (x)")
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", broken)
    with pytest.raises(StoreUnusableError, match="already exists"):
        SqliteStore(path)
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (len(broken) - 1,)
    assert not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'extra'").fetchall()
    db.close()


def test_index_that_another_process_builds_at_the_same_time_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, is_indexed = tmp_path / "chat.db", sqlite_schema.is_indexed
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        sqlite_schema.migrate(db, path)

        def build_after_first_look(db: sqlite3.Connection) -> bool:
            monkeypatch.setattr(sqlite_schema, "is_indexed", is_indexed)
            found = is_indexed(db)
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
                sqlite_schema.ensure_index(other, path)
            return found

        monkeypatch.setattr(sqlite_schema, "is_indexed", build_after_first_look)
        sqlite_schema.ensure_index(db, path)
        assert is_indexed(db) and not db.in_transaction


def test_file_of_a_running_server_is_refused_to_a_second_one_until_the_first_ends(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    (tmp_path / "link.db").symlink_to(path)
    with lock_store(ServerConfig(db=str(path))):
        for name in ("chat.db", "link.db"):
            with pytest.raises(StoreUnusableError, match=f"{name}: another chatcache server uses this file"):
                lock_store(ServerConfig(db=str(tmp_path / name)))
        for other in (ServerConfig(db=str(tmp_path / "other.db")), ServerConfig(redis="redis://h", db=str(path))):
            with lock_store(other):
                pass
    command = [sys.executable, "-m", "chatcache", "serve", "--port", "0", "--db", str(path)]
    with lock_store(ServerConfig(db=str(path))):
        second = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert second.returncode == 78 and "another chatcache server uses this file" in second.stderr
    assert not path.exists()


async def test_open_of_an_unusable_path_is_refused_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnusableError, match="unable to open database file; it is a folder"):
        SqliteStore(tmp_path)
    with pytest.raises(StoreUnusableError, match=f"; there is no folder {tmp_path / 'nowhere'}"):
        SqliteStore(tmp_path / "nowhere" / "chat.db")
    path = tmp_path / "chat.db"
    await SqliteStore(path).close()
    monkeypatch.setattr(sqlite_schema, "BUSY_MS", 1)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnusableError, match="is locked by another program"):
            SqliteStore(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreUnusableError, match="restore a backup"):
        SqliteStore(path)


async def test_open_of_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    path.write_bytes(os.urandom(4096))
    with pytest.raises(StoreUnusableError, match=r"chat\.db"):
        SqliteStore(path)
    with pytest.raises(StoreUnusableError, match="nowhere"):
        SqliteStore(tmp_path / "nowhere" / "chat.db")
