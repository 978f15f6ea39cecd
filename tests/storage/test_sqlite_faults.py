"""The SQLite store on full or failing disks and with damaged files: no acknowledged data is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from chatcache.cli.options import EXIT_CONFIG
from chatcache.cli.server import run_server
from chatcache.config import EngineConfig, ServerConfig
from chatcache.conversations.store import Claim, ConversationStore, StoreUnavailableError, StoreUnusableError
from chatcache.conversations.tree import Conversation, Item
from chatcache.storage import sqlite_schema, sqlite_threads
from chatcache.storage.sqlite import RESERVE_BYTES, SqliteStore

HEAD = Conversation("conv", "me", 1.0, 1.0)


@contextlib.contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """Limit the size of every written file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _largest(folder: Path) -> int:
    return max(each.stat().st_size for each in folder.iterdir())


async def fill(store: ConversationStore) -> list[str]:
    """Write until the store refuses; return the acknowledged ids."""
    acknowledged: list[str] = []
    for number in range(200):
        item = Item(f"msg_{number}", None, "user", f"word{number} " * 200)
        try:
            await store.append("me", "conv", [item], claim=Claim(f"key{number}", "d", item.id))
        except StoreUnavailableError:
            return acknowledged
        acknowledged.append(item.id)
    raise AssertionError("more is acknowledged than there is room for")


async def test_full_disk_refuses_writes_and_keeps_acknowledged_data(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    store = SqliteStore(path)
    await store.create(HEAD)
    await store.check()
    with limited(_largest(tmp_path) + 1_000_000):
        acknowledged = await fill(store)
        assert len(acknowledged) > 10
    with limited(4096):  # not even little things go in now
        for work in (store.create(Conversation("conv_2", "me", 1.0, 1.0)), store.delete("me", "conv"), store.check()):
            with pytest.raises(StoreUnavailableError):
                await work
        tree = await store.load("me", "conv")  # reading works
        assert list(tree.items) == acknowledged, "what was acknowledged is there, and nothing else"
        assert tree.conversation.rev == len(acknowledged)
    await store.check()
    head = await store.append("me", "conv", [Item("msg_after", None, "user", "x")])
    assert head.rev == len(acknowledged) + 1
    await store.close()
    store = SqliteStore(path)
    tree = await store.load("me", "conv")
    assert list(tree.items) == [*acknowledged, "msg_after"]
    refused = f"key{len(acknowledged)}"
    assert await store.find_claim("me", refused) is None and await store.find_claim("me", "key0") is not None
    await store.close()
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()


async def test_check_fails_until_a_large_write_fits(tmp_path: Path) -> None:
    """After a refused write, room for a few small rows does not make the store available."""
    store = SqliteStore(tmp_path / "chat.db")
    await store.create(HEAD)

    async def leave_room(num_pages: int) -> None:
        def job(db: sqlite3.Connection) -> None:
            (num_used,) = db.execute("PRAGMA page_count").fetchone()
            db.execute(f"PRAGMA max_page_count = {num_used + num_pages}")

        await store._writer.run("", job)

    await leave_room(20)
    await store.check()  # no write was refused yet
    with pytest.raises(StoreUnavailableError):
        await store.append("me", "conv", [Item("msg_large", None, "user", "x" * 500_000)])
    for number in range(2):
        assert (await store.append("me", "conv", [Item(f"msg_{number}", None, "user", "x")])).rev == number + 1
        with pytest.raises(StoreUnavailableError):
            await store.check()
    await leave_room(2 * RESERVE_BYTES // 4096)
    await store.check()
    await store.append("me", "conv", [Item("msg_large", None, "user", "x" * 500_000)])
    await leave_room(0)
    await store.check()
    await store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "chat.db")) as db:
        assert db.execute("SELECT count(*) FROM claims").fetchone() == (0,), "nothing is left of the check"
        assert db.execute("PRAGMA freelist_count").fetchone()[0] > 100, "but there is room for the next writes"


async def test_injected_bug_early_acknowledgement_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that answers when a job is done instead of when it is committed."""
    original = sqlite_threads.FairQueue.get

    def hasty(jobs: sqlite_threads.FairQueue, *, block: bool = True) -> sqlite_threads.Entry:
        entry = original(jobs, block=block)
        return entry._replace(job=lambda db: entry.future.set_result(entry.job(db)), future=Future())

    monkeypatch.setattr(sqlite_threads.FairQueue, "get", hasty)
    with pytest.raises(AssertionError, match="acknowledged"):
        await test_full_disk_refuses_writes_and_keeps_acknowledged_data(tmp_path)


def _with_damage(path: Path) -> None:
    """Return a file with an intact header and damaged pages."""
    db = sqlite3.connect(path)
    sqlite_schema.prepare(db, path)
    db.executemany(
        "INSERT INTO conversations VALUES (?, 'me', 1, 1, ?, NULL, 0, '{}')", ((f"c{n}", "t" * 500) for n in range(200))
    )
    db.close()
    data = bytearray(path.read_bytes())
    for at in range(5 * 4096, len(data), 4096):
        data[at : at + 64] = b"\xa5" * 64
    path.write_bytes(data)


def _newer(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {len(sqlite_schema.MIGRATIONS) + 1}")


def _no_database(path: Path) -> None:
    path.write_bytes(b"This is a letter to my bank.\n" * 300)


@pytest.mark.parametrize(
    ("spoil", "reason"), [(_with_damage, "damaged"), (_newer, "newer"), (_no_database, "not a database")]
)
def test_damaged_file_is_refused_without_changes(
    spoil: Callable[[Path], None],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "chat.db"
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(StoreUnusableError, match=reason):
        SqliteStore(path)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    assert run_server(EngineConfig(), ServerConfig(port=0, db=str(path))) == EXIT_CONFIG
    output = capsys.readouterr().err
    assert str(path) in output and reason in output and output.count("\n") == 1
    assert path.read_bytes() == before


def test_new_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "c.db")
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    asyncio.run(store.close())
    assert modes == {"c.db": 0o600, "c.db-wal": 0o600, "c.db-shm": 0o600}
