"""The SQLite threads: the order of jobs of several owners, commits, reading while writing."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import pytest

from chatcache.storage.sqlite_threads import NUM_READERS, Entry, FairQueue, SqliteReaders, SqliteWriter

NO_DATABASE = cast(sqlite3.Connection, None)


def entry(owner: str, number: int) -> Entry:
    return Entry(owner, lambda db: number, Future())


def names(jobs: FairQueue, *, is_done: bool = True) -> list[str]:
    """Take all jobs that may be taken now; return "owner number" of each."""
    taken: list[str] = []
    while True:
        try:
            job = jobs.get(block=False)
        except queue.Empty:
            return taken
        taken.append(f"{job.owner}{job.job(NO_DATABASE)}")
        if is_done:
            jobs.done(job)


def test_owners_take_turns_and_jobs_of_one_owner_stay_in_order() -> None:
    jobs = FairQueue(max_running=1)
    for number in range(4):
        jobs.put(entry("a", number))
    for owner, number in (("b", 0), ("c", 0), ("b", 1)):
        jobs.put(entry(owner, number))
    assert names(jobs) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_job_of_another_owner_waits_for_one_job_at_most() -> None:
    jobs = FairQueue(max_running=1)
    for number in range(100):
        jobs.put(entry("a", number))
    jobs.done(jobs.get())
    jobs.put(entry("b", 0))
    assert names(jobs).index("b0") <= 1


def test_owner_has_no_more_than_its_number_of_running_jobs() -> None:
    jobs = FairQueue(max_running=2)
    for number in range(3):
        jobs.put(entry("a", number))
    first = jobs.get(block=False)
    assert names(jobs, is_done=False) == ["a1"]
    jobs.put(entry("b", 0))
    assert names(jobs) == ["b0"]
    jobs.done(first)
    assert names(jobs) == ["a2"]


async def test_readers_of_one_owner_leave_a_thread_to_others(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    sqlite3.connect(path).close()
    readers, gate = SqliteReaders(path, lambda db: None), threading.Event()
    held = [asyncio.create_task(readers.run("a", lambda db: gate.wait())) for _ in range(2 * NUM_READERS)]
    await asyncio.sleep(0)
    try:
        assert await asyncio.wait_for(readers.run("b", lambda db: "read"), 30) == "read"
        assert not any(task.done() for task in held)
    finally:
        gate.set()
        await asyncio.gather(*held)
        readers.close()


async def test_reader_sees_one_state_with_everything_committed(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    count = "SELECT count(*) FROM rows"

    def prepare(db: sqlite3.Connection) -> None:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE rows (x)")

    writer, first_read, written = SqliteWriter(path, prepare), threading.Event(), threading.Event()
    readers = SqliteReaders(path, lambda db: None)

    def read_twice(db: sqlite3.Connection) -> list[int]:
        before = db.execute(count).fetchone()[0]
        first_read.set()
        written.wait()
        return [before, db.execute(count).fetchone()[0]]

    reading = asyncio.create_task(readers.run("a", read_twice))
    await asyncio.to_thread(first_read.wait)
    await writer.run("a", lambda db: db.execute("INSERT INTO rows VALUES (1)").rowcount)
    assert await readers.run("a", lambda db: db.execute(count).fetchone()[0]) == 1
    written.set()
    assert await reading == [0, 0]
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        await readers.run("a", lambda db: db.execute("SELECT * FROM absent"))
    readers.close()
    writer.close()


async def test_long_job_does_not_hold_back_the_result_of_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit stops to take jobs after a time: jobs that an owner has queued are not all committed together."""
    monkeypatch.setattr("chatcache.storage.sqlite_threads._MAX_GROUP_S", -1.0)
    writer = SqliteWriter(tmp_path / "chat.db", lambda db: None)
    started, gate = threading.Event(), threading.Event()

    def hold(db: sqlite3.Connection) -> None:
        started.set()
        gate.wait()

    held = asyncio.create_task(writer.run("a", hold))
    await asyncio.to_thread(started.wait)
    order: list[str] = []
    tasks = [
        asyncio.create_task(writer.run(owner, lambda db, name=f"{owner}{number}": order.append(name)))  # type: ignore[misc]
        for owner, number in (("a", 1), ("a", 2), ("a", 3), ("b", 1))
    ]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(held, *tasks)
    assert order == ["a1", "b1", "a2", "a3"]
    writer.close()
