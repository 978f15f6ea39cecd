"""If the power goes: what was acknowledged had been told to reach the disk first. Read from the order of system calls.

Killing a process does not show this, because what it has written is the kernel's by then.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatcache.chat.store_redis import RedisStore
from chatcache.chat.tree import Conversation, Item
from tests.chat.redis_servers import redis_server

pytestmark = pytest.mark.traced

NUM_TURNS = 40
_CALL = re.compile(r"(write|pwrite64|fdatasync|fsync)\((\d+)<([^>]*(?:->[^>]*)?)>(.*)")
_WRITER = """
import asyncio, os, sys
from chatcache.chat import store_sqlite
from chatcache.chat.tree import Conversation, Item

def prepare_normal(db, path, prepare=store_sqlite.prepare):
    prepare(db, path)
    db.execute("PRAGMA synchronous = NORMAL")

async def main(path, num_turns):
    if "NORMAL" in sys.argv:
        store_sqlite.prepare = prepare_normal
    store = store_sqlite.SqliteStore(path)
    await store.create(Conversation("conv", "", 1.0, 1.0))
    for number in range(num_turns):
        await store.append("", "conv", [Item(f"msg_{number}", None, "user", "x")])
        os.write(1, b"ack")
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
    """Between a write to a file whose name has `kept` and an answer there is a sync. `answer`: a pattern."""
    is_dirty, num_writes, num_answers = False, 0, 0
    for call, _, name, rest in _CALL.findall(trace):
        if kept in name:
            is_dirty = "sync" not in call
            num_writes += is_dirty
        elif re.match(answer, f"{name} {rest}"):
            num_answers += 1
            assert not is_dirty, f"answer {num_answers} came before the sync"
    assert num_writes >= NUM_TURNS and num_answers >= NUM_TURNS


def trace_sqlite(strace: list[str], folder: Path, *more: str) -> str:
    trace = folder / "trace"
    command = [*strace, "-o", str(trace), sys.executable, "-c", _WRITER, str(folder / "chat.db"), str(NUM_TURNS), *more]
    paths = [path for path in sys.path if path]
    done = subprocess.run(command, env={"PYTHONPATH": ":".join(paths)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return trace.read_text(errors="replace")


def test_the_file_is_synced_before_anything_is_acknowledged(strace: list[str], tmp_path: Path) -> None:
    check_order(trace_sqlite(strace, tmp_path), "chat.db-wal", '.*, "ack", 3')


def test_a_file_that_is_not_synced_would_be_seen(strace: list[str], tmp_path: Path) -> None:
    """The planted bug: SQLite's NORMAL, which a kill does not tell from FULL."""
    with pytest.raises(AssertionError, match="before the sync"):
        check_order(trace_sqlite(strace, tmp_path, "NORMAL"), "chat.db-wal", '.*, "ack", 3')


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


@pytest.mark.parametrize(("policy", "is_durable"), [("always", True), ("everysec", False)])
async def test_redis_syncs_before_it_answers_if_it_is_told_to(
    strace: list[str], policy: str, is_durable: bool, tmp_path: Path
) -> None:
    """Also what the docs say of `everysec`: acknowledged is not yet on the disk."""
    trace = tmp_path / "trace"
    with redis_server(tmp_path / "redis", appendfsync=policy) as server:
        store = RedisStore(server.url)
        await store.create(Conversation("conv", "", 1.0, 1.0))
        with attached(strace, server.pid, trace):
            for number in range(NUM_TURNS):
                await store.append("", "conv", [Item(f"msg_{number}", None, "user", "x")])
        await store.close()
    with contextlib.nullcontext() if is_durable else pytest.raises(AssertionError, match="before the sync"):
        check_order(trace.read_text(errors="replace"), ".aof", "(TCP|socket)")
