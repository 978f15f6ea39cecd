"""Durability at power loss: acknowledged data was synced first, as read from the order of system calls.

Killing a process does not show this, because written data is then in the kernel. Copies of the files are cut to the
length that was synced at each acknowledgement: a store must find every acknowledged turn in them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatcache.conversations.tree import Conversation, Item
from chatcache.storage.redis import RedisStore
from chatcache.storage.redis_client import SLOW_TIMEOUT_S
from chatcache.storage.redis_layout import items_key
from tests.support.redis_servers import redis_server

pytestmark = pytest.mark.traced

NUM_TURNS = 40
MANY_TURNS = 1000
_EXTENT = re.compile(r", (\d+)(?:, (\d+))?(?:\)| <unfinished)")  # how much, and (pwrite64) where
_CALL = re.compile(r"(write|pwrite64|fdatasync|fsync)\((\d+)<([^>]*(?:->[^>]*)?)>(.*)")
_WRITER = """
import asyncio, os, shutil, sys
from chatcache.storage import sqlite
from chatcache.conversations.tree import Conversation, Item

def prepare_normal(db, path, prepare=sqlite.prepare, **more):
    prepare(db, path, **more)
    db.execute("PRAGMA synchronous = NORMAL")

async def main(path, num_turns):
    if "NORMAL" in sys.argv:
        sqlite.prepare = prepare_normal
    store = sqlite.SqliteStore(path)
    await store.create(Conversation("conv", "", 1.0, 1.0))
    for number in range(num_turns):
        await store.append("", "conv", [Item(f"msg_{number}", None, "user", "x")])
        os.write(1, b"ack")
    for name in ("", "-wal"):
        shutil.copy(path + name, path + ".copy" + name)
    await store.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture
def strace() -> list[str]:
    path = shutil.which("strace")
    if path is None:
        pytest.skip("needs strace: apt-get install strace")
    return [path, "-f", "-y", "-e", "trace=write,pwrite64,fdatasync,fsync"]


def check_order(trace: str, kept: str, answer: str) -> None:
    """Check for a sync between each write to a file named like `kept` and the next answer (a pattern)."""
    is_dirty, num_writes, num_answers = False, 0, 0
    for call, _, name, rest in _CALL.findall(trace):
        if kept in name:
            is_dirty = "sync" not in call
            num_writes += is_dirty
        elif re.match(answer, f"{name} {rest}"):
            num_answers += 1
            assert not is_dirty, f"answer {num_answers} came before the sync"
    assert num_writes >= NUM_TURNS and num_answers >= NUM_TURNS


def synced_at_answers(trace: str, kept: str, answer: str, num_bytes: int = 0) -> list[int]:
    """Return the synced length of a file, `num_bytes` long at first, at each answer."""
    num_synced, sizes = num_bytes, []
    for call, _, name, rest in _CALL.findall(trace):
        if kept in name and "sync" in call:
            num_synced = num_bytes
        elif kept in name:
            extent = _EXTENT.findall(rest)[-1]
            num_bytes = max(num_bytes, int(extent[0]) + int(extent[1])) if extent[1] else num_bytes + int(extent[0])
        elif re.match(answer, f"{name} {rest}"):
            sizes.append(num_synced)
    return sizes


def check_copies(folder: Path, trace: str) -> None:
    """Check that the file cut to its synced length has all turns acknowledged until then."""
    for number, num_bytes in enumerate(synced_at_answers(trace, "chat.db-wal", '.*, "ack", 3')):
        cut = folder / f"cut-{number}.db"
        shutil.copy(folder / "chat.db.copy", cut)
        Path(f"{cut}-wal").write_bytes((folder / "chat.db.copy-wal").read_bytes()[:num_bytes])
        with contextlib.closing(sqlite3.connect(cut)) as db:
            assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            has_table = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'items'").fetchone()[0]
            found = {row[0] for row in db.execute("SELECT id FROM items")} if has_table else set()
        assert {f"msg_{each}" for each in range(number + 1)} <= found, f"turn {number} is lost if the power goes then"


def trace_sqlite(strace: list[str], folder: Path, *more: str, num_turns: int = NUM_TURNS) -> str:
    trace = folder / "trace"
    command = [*strace, "-o", str(trace), sys.executable, "-c", _WRITER, str(folder / "chat.db"), str(num_turns), *more]
    paths = [path for path in sys.path if path]
    done = subprocess.run(command, env={"PYTHONPATH": ":".join(paths)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return trace.read_text(errors="replace")


def test_sqlite_syncs_before_it_acknowledges(strace: list[str], tmp_path: Path) -> None:
    trace = trace_sqlite(strace, tmp_path)
    check_order(trace, "chat.db-wal", '.*, "ack", 3')
    check_copies(tmp_path, trace)


@pytest.mark.long
def test_sqlite_syncs_a_thousand_turns(strace: list[str], tmp_path: Path) -> None:
    """The order only: a long log is checkpointed into the file and started again."""
    check_order(trace_sqlite(strace, tmp_path, num_turns=MANY_TURNS), "chat.db-wal", '.*, "ack", 3')


def test_injected_bug_missing_sync_is_detected(strace: list[str], tmp_path: Path) -> None:
    """SQLite's synchronous=NORMAL, which a kill does not distinguish from FULL."""
    trace = trace_sqlite(strace, tmp_path, "NORMAL")
    with pytest.raises(AssertionError, match="before the sync"):
        check_order(trace, "chat.db-wal", '.*, "ack", 3')
    with pytest.raises(AssertionError, match="if the power goes"):
        check_copies(tmp_path, trace)


@contextlib.contextmanager
def attached(strace: list[str], pid: int, trace: Path) -> Iterator[None]:
    command = [*strace, "-o", str(trace), "-p", str(pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None and "attached" in tracer.stderr.readline()
        try:
            yield
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.stderr.read()


async def trace_redis(strace: list[str], folder: Path, policy: str, num_turns: int) -> tuple[str, int]:
    """Return a trace of storing turns, and the number of turns in the file cut to its synced length."""
    trace = folder / "trace"
    with redis_server(folder / "redis", appendfsync=policy) as server:
        store = RedisStore(server.url, timeout_s=SLOW_TIMEOUT_S)  # traced, it answers slowly
        await store.create(Conversation("conv", "", 1.0, 1.0))
        (aof,) = (folder / "redis" / "appendonlydir").glob("*.incr.aof")
        num_bytes = aof.stat().st_size
        with attached(strace, server.pid, trace):
            for number in range(num_turns):
                await store.append("", "conv", [Item(f"msg_{number}", None, "user", "x")])
            await store.check()  # strace has written down the answer to the last append when this one is answered
        shutil.copytree(folder / "redis", folder / "cut")
        await store.close()
    text = trace.read_text(errors="replace")
    num_synced = synced_at_answers(text, ".aof", "(TCP|socket)", num_bytes)[-1]
    os.truncate(folder / "cut" / "appendonlydir" / aof.name, num_synced)
    with redis_server(folder / "cut") as server:
        num_kept = server.admin.hlen(items_key("conv"))
    return text, num_kept


@pytest.mark.parametrize(("policy", "is_durable"), [("always", True), ("everysec", False)])
async def test_redis_with_appendfsync_always_syncs_before_it_answers(
    strace: list[str], policy: str, is_durable: bool, tmp_path: Path
) -> None:
    """Also the documented limit of `everysec`: acknowledged data may not be on the disk yet."""
    trace, num_kept = await trace_redis(strace, tmp_path, policy, NUM_TURNS)
    for number in range(4):
        if not is_durable and num_kept == NUM_TURNS:  # by chance, the second has ended with the last turn
            trace, num_kept = await trace_redis(strace, tmp_path / str(number), policy, NUM_TURNS)
    assert (num_kept == NUM_TURNS) is is_durable
    with contextlib.nullcontext() if is_durable else pytest.raises(AssertionError, match="before the sync"):
        check_order(trace, ".aof", "(TCP|socket)")


@pytest.mark.long
async def test_redis_syncs_a_thousand_turns(strace: list[str], tmp_path: Path) -> None:
    trace, num_kept = await trace_redis(strace, tmp_path, "always", MANY_TURNS)
    assert num_kept == MANY_TURNS
    check_order(trace, ".aof", "(TCP|socket)")
