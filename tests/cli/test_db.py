"""`chatcache db`: consistent backups during writes, export, import, and errors."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from chatcache.cli.main import app
from chatcache.conversations.store import StoreUnusableError
from chatcache.conversations.tree import Conversation, Item
from chatcache.errors import ChatcacheError
from chatcache.storage.sqlite import SqliteStore, back_up
from tests.support.generated_stores import everything, fill
from tests.support.redis_servers import redis_server


def call(*args: str | Path) -> Result:
    """Run `chatcache db` in a thread without an event loop."""
    with ThreadPoolExecutor(1) as threads:
        arguments = ["db", *map(str, args)]
        result = threads.submit(CliRunner().invoke, app, arguments, env={"COLUMNS": "200"}).result()
    assert result.exception is None or isinstance(result.exception, SystemExit | ChatcacheError), result.exception
    return result


def error_message(result: Result) -> str:
    assert isinstance(result.exception, ChatcacheError)
    return result.exception.message


def names(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


async def read(path: Path) -> list[str]:
    store = SqliteStore(path, server_may_run=True)
    found = [line async for line in everything(store)]
    await store.close()
    return found


@pytest.fixture
async def db(tmp_path: Path) -> Path:
    store = SqliteStore(tmp_path / "chat.db")
    await fill(store, 200)
    await store.close()
    return tmp_path / "chat.db"


async def test_backup_during_writes_is_consistent_and_complete(tmp_path: Path) -> None:
    """The copy is a prefix of the conversations written meanwhile, each one complete."""
    store = SqliteStore(tmp_path / "chat.db")
    stop = threading.Event()
    copied = asyncio.Event()

    async def write() -> int:
        number = 0
        while not copied.is_set():
            items = [Item(f"msg_{number}_{at}", None, "user", "x" * 2000) for at in range(3)]
            await store.create(Conversation(f"conv_{number:05}", "me", 1.0, float(number)), items)
            number += 1
            if number == 20:
                stop.set()
        return number

    writing = asyncio.create_task(write())
    await asyncio.to_thread(stop.wait, 60)
    result = await asyncio.to_thread(call, "backup", tmp_path / "copy.db", "--db", tmp_path / "chat.db")
    copied.set()
    num_written = await writing
    assert result.exit_code == 0 and "checked" in result.output
    assert names(tmp_path, "*copy*") == ["copy.db"]  # no -wal, no -shm, no partial file
    assert (tmp_path / "copy.db").stat().st_mode & 0o777 == 0o600
    await store.close()
    copy = SqliteStore(tmp_path / "copy.db")
    ids = await copy.list_ids("me", 100_000)
    assert 20 <= len(ids) <= num_written
    assert list(ids) == [f"conv_{number:05}" for number in range(len(ids))]
    for name in ids:
        assert len((await copy.load("me", name)).items) == 3
    await copy.close()


async def test_backup_includes_the_journal_of_a_killed_server(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "chat.db")
    await fill(store, 40)
    for end in ("", "-wal"):  # as after a kill: the journal is not in the file yet
        shutil.copy(tmp_path / f"chat.db{end}", tmp_path / f"left.db{end}")
    await store.close()
    assert call("backup", tmp_path / "copy.db", "--db", tmp_path / "left.db").exit_code == 0
    assert await read(tmp_path / "copy.db") == await read(tmp_path / "chat.db") != []


async def test_backup_and_export_replace_a_file_with_force_only(db: Path, tmp_path: Path) -> None:
    for kind in ("backup", "export"):
        file = tmp_path / kind
        file.write_text("precious")
        assert "--force" in error_message(call(kind, file, "--db", db))
        assert file.read_text() == "precious"
        assert call(kind, file, "--db", db, "--force").exit_code == 0
        assert file.read_bytes()[:8] in (b"SQLite f", b'{"object')
    assert not names(tmp_path, ".*partial")


async def test_backup_and_export_never_replace_the_store_itself(db: Path, tmp_path: Path) -> None:
    """A running server would go on to write into the file that was replaced, and lose what it stores."""
    before = await read(db)
    (tmp_path / "link.db").symlink_to(db)
    (tmp_path / "same.db").hardlink_to(db)
    for kind in ("backup", "export"):
        for name in ("chat.db", "link.db", "same.db", "chat.db-wal", "chat.db-shm"):
            assert "belongs to the store" in error_message(call(kind, tmp_path / name, "--db", db, "--force"))
    assert await read(db) == before
    assert not names(tmp_path, ".*partial")


def test_backup_to_stdout_is_refused(db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "db export -" in error_message(call("backup", "-", "--db", db))
    assert names(tmp_path, "*") == ["chat.db"]


def test_import_from_a_pipe_is_refused(db: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in ("-", tmp_path / "pipe", "/dev/null"):
        assert "cannot come from a pipe" in error_message(call("import", file, "--db", db))


async def test_backup_and_export_through_a_symbolic_link_replace_its_file(db: Path, tmp_path: Path) -> None:
    for kind in ("backup", "export"):
        file, link = tmp_path / kind, tmp_path / f"{kind}.latest"
        file.write_text("old")
        link.symlink_to(file)
        assert call(kind, link, "--db", db, "--force").exit_code == 0
        assert link.is_symlink() and file.read_bytes()[:8] in (b"SQLite f", b'{"object')


async def test_export_to_a_pipe_a_device_and_stdout_writes_into_it(
    db: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    call("export", tmp_path / "file", "--db", db)
    expected = (tmp_path / "file").read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for force in ((), ("--force",)):
        received: list[bytes] = []
        reader = threading.Thread(target=lambda out=received: out.append(pipe.read_bytes()), daemon=True)
        reader.start()
        result = call("export", pipe, "--db", db, *force)
        assert result.exit_code == 0
        reader.join()
        assert received == [expected] and pipe.is_fifo()
        assert result.stdout == "" and "5 conversations, 200 messages" in result.stderr
    assert call("export", "/dev/null", "--db", db).exit_code == 0
    capfdbinary.readouterr()
    assert "5 conversations" in call("export", "-", "--db", db).stderr
    assert capfdbinary.readouterr().out == expected


def test_backup_to_a_pipe_is_refused(db: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for force in ((), ("--force",)):
        assert "pipe is not a regular file" in error_message(call("backup", pipe, "--db", db, *force))
    assert pipe.is_fifo()


def test_backup_and_export_of_a_file_that_may_not_be_read_name_it(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        error = sqlite3.OperationalError("unable to open database file")
        error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
        raise error

    monkeypatch.setattr(sqlite3, "connect", refuse)
    for kind in ("backup", "export"):
        assert "may not be read" in error_message(call(kind, tmp_path / "copy", "--db", db))


def test_backup_ignores_the_partial_file_of_a_killed_one(db: Path, tmp_path: Path) -> None:
    left = tmp_path / f".copy.{os.getpid()}.partial"  # containers reuse process ids
    left.write_text("half")
    for kind in ("backup", "export"):
        assert call(kind, tmp_path / "copy", "--db", db, "--force").exit_code == 0
    assert left.read_text() == "half"


def test_backup_and_export_of_an_unusable_file_leave_no_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database" * 100)
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (x)").connection.close()
    for name in ("missing", "text", "other.db"):
        for kind in ("backup", "export"):
            assert name in error_message(call(kind, tmp_path / "copy", "--db", tmp_path / name))
    assert "no_folder" in error_message(call("backup", tmp_path / "no_folder" / "copy", "--db", tmp_path / "text"))
    assert "Redis" in call("backup", tmp_path / "copy", "--redis", "redis://x").output
    assert "nowhere" in error_message(call("import", tmp_path / "nowhere", "--db", tmp_path / "new.db"))
    assert not list(tmp_path.glob("*copy*")) and not (tmp_path / "new.db").exists()


def test_backup_refuses_redis_of_flag_and_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = call("backup", "--help").output
    assert "--redis" not in shown and "append-only" in shown and "--redis" in call("export", "--help").output
    monkeypatch.setenv("CHATCACHE_REDIS", "redis://127.0.0.1:1/0")
    result = call("backup", tmp_path / "copy")
    assert result.exit_code == 2 and "append-only files" in result.output and not (tmp_path / "copy").exists()


def test_backup_of_a_damaged_file_is_refused(db: Path, tmp_path: Path) -> None:
    """Injected bug: overwritten pages, which a plain copy of the file would contain."""
    data = bytearray(db.read_bytes())
    for at in range(5 * 4096, len(data) - 4096, 3 * 4096):
        data[at : at + 64] = b"\xff" * 64
    db.write_bytes(data)
    with pytest.raises(StoreUnusableError):
        back_up(db, tmp_path / "copy.db")
    assert isinstance(call("backup", tmp_path / "b.db", "--db", db).exception, StoreUnusableError)
    assert not (tmp_path / "b.db").exists()


async def test_backup_restored_as_in_the_help_has_the_old_content(db: Path, tmp_path: Path) -> None:
    before = await read(db)
    assert call("backup", tmp_path / "copy.db", "--db", db).exit_code == 0
    store = SqliteStore(db)
    await store.create(Conversation("conv_later", "ada", 1.0, 1.0))
    await store.close()
    for end in ("-wal", "-shm"):
        db.with_name(f"{db.name}{end}").unlink(missing_ok=True)
    (tmp_path / "copy.db").replace(db)
    assert await read(db) == before


async def test_export_from_sqlite_to_redis_and_back_keeps_everything(db: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as redis:
        assert "5 conversations, 200 messages" in call("export", tmp_path / "a", "--db", db).output
        assert "5 conversations added" in call("import", tmp_path / "a", "--redis", redis.url).output
        assert "5 unchanged" in call("import", tmp_path / "a", "--redis", redis.url).output
        assert call("export", tmp_path / "b", "--redis", redis.url).exit_code == 0
        assert "5 conversations added" in call("import", tmp_path / "b", "--db", tmp_path / "new.db").output
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        assert await read(tmp_path / "new.db") == await read(db)
        wrong = redis.url.replace("secret", "wrong")
        assert "rejects the login" in error_message(call("export", tmp_path / "c", "--redis", wrong))
    assert isinstance(call("import", tmp_path / "a", "--redis", redis.url).exception, ChatcacheError)


async def test_import_reports_a_conflict_by_line_and_exits_with_1(db: Path, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "new.db")
    call("export", tmp_path / "a", "--db", db)
    first = json.loads((tmp_path / "a").read_bytes().splitlines()[0])["conversation"]["id"]
    await store.create(Conversation(first, "other", 1.0, 1.0))
    await store.close()
    result = call("import", tmp_path / "a", "--db", tmp_path / "new.db")
    assert result.exit_code == 1 and "4 conversations added" in result.output and "1 refused" in result.output
    assert f"{tmp_path / 'a'}: line 1: no conversation '{first}'" in result.output


def test_settings_file_applies_to_commands_of_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chatcache.toml").write_text('db = "from-the-settings.db"\n')
    assert "from-the-settings.db" in error_message(call("export", tmp_path / "a"))
