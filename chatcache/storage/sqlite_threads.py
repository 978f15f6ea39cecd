"""Threads that run jobs on SQLite connections: one that writes, several that read.

A job is a function of the connection. Jobs of one owner run in order; owners take turns (round robin), so that the jobs
of one owner delay a job of another by at most one job per thread:

    owner a:  a1 a2 a3 a4 a5
    owner b:        b1             ->   a1 a2 b1 a3 c1 a4 a5
    owner c:           c1
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from chatcache.conversations.store import StoreUnavailableError

Result = TypeVar("Result")
Job = Callable[[sqlite3.Connection], Any]
Prepare = Callable[[sqlite3.Connection], None]

NUM_READERS = 3
MAX_READERS_PER_OWNER = 2
_MAX_GROUP = 64
_MAX_GROUP_S = 0.01  # jobs that wait for longer than this are not held back by further jobs of the same commit
_FILE_ERRORS = frozenset(
    {
        *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB),
        *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM),
    }
)


class Entry(NamedTuple):
    """A queued job of an owner, and the future of its result."""

    owner: str
    job: Job
    future: Future[Any]


class SqliteThread(Protocol):
    """Something that runs jobs on a connection."""

    async def run(self, owner: str, job: Callable[[sqlite3.Connection], Result]) -> Result:
        """Queue `job` and wait for its result. An exception of the job is raised here."""
        ...

    def close(self) -> None:
        """Finish queued jobs, then close the connections."""
        ...


class FairQueue:
    """Queued jobs, first in first out per owner; owners take turns. Thread-safe.

    At most `max_running` jobs of one owner are taken and not yet done.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[Entry]] = {}  # by owner; the owner that was served last is the last
        self._num_running: dict[str, int] = {}
        self._is_closed = False

    def put(self, entry: Entry) -> None:
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the store is closed")
            self._waiting.setdefault(entry.owner, deque()).append(entry)
            self._changed.notify()

    def get(self, *, block: bool = True) -> Entry:
        """Take the next job. `done` must be called when it has run.

        Raises: queue.Empty without one, or if the queue is closed and empty.
        """
        with self._changed:
            while (entry := self._take()) is None:
                if not block or (self._is_closed and not self._waiting):
                    raise queue.Empty
                self._changed.wait()
            return entry

    def done(self, entry: Entry) -> None:
        with self._changed:
            self._num_running[entry.owner] -= 1
            if not self._num_running[entry.owner]:
                del self._num_running[entry.owner]
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse further jobs; those that wait are still taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _take(self) -> Entry | None:
        for owner, entries in self._waiting.items():
            num_running = self._num_running.get(owner, 0)
            if num_running < self._max_running:
                del self._waiting[owner]
                self._num_running[owner] = num_running + 1
                entry = entries.popleft()
                if entries:
                    self._waiting[owner] = entries
                return entry
        return None


def _submit(jobs: FairQueue, owner: str, job: Callable[[sqlite3.Connection], Result]) -> asyncio.Future[Result]:
    future: Future[Result] = Future()
    jobs.put(Entry(owner, job, future))
    done = asyncio.wrap_future(future)
    done.add_done_callback(_retrieve_exception)
    return done


class SqliteWriter:
    """Runs jobs on a thread of its own and commits many of them together.

    A job's writes are all-or-nothing. With `synchronous=FULL` a commit waits for the disk; sharing it lets many
    conversations write at once. A job's result is delivered only after the commit that contains it.
    """

    def __init__(self, path: Path | str, prepare: Prepare) -> None:
        """Open `path` and run `prepare` (pragmas, migration) before any job. Raises: the errors of `prepare`."""
        self.num_failures = 0  # commits that the file did not accept
        self._jobs = FairQueue(max_running=_MAX_GROUP)
        self._thread = _start_thread(path, prepare, self._serve)

    async def run(self, owner: str, job: Callable[[sqlite3.Connection], Result]) -> Result:
        """Queue `job` and wait for its commit.

        An exception of the job undoes that job alone and is raised here. The job runs to its end even if the caller is
        cancelled.
        """
        return await asyncio.shield(self.submit(owner, job))

    def submit(self, owner: str, job: Callable[[sqlite3.Connection], Result]) -> asyncio.Future[Result]:
        """Queue `job`; return the future of its commit, which must not be cancelled."""
        return _submit(self._jobs, owner, job)

    def close(self) -> None:
        """Finish queued jobs, then close the file."""
        self._jobs.close()
        self._thread.join()

    def _serve(self, connection: sqlite3.Connection) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if not _commit(connection, self._jobs.get(), self._jobs):
                    self.num_failures += 1


class SqliteReaders:
    """Runs jobs that only read, on several threads. One owner never occupies all of them."""

    def __init__(self, path: Path | str, prepare: Prepare, num_threads: int = NUM_READERS) -> None:
        """Open `path` on every thread. Raises: the errors of `prepare`."""
        self._jobs = FairQueue(max_running=min(MAX_READERS_PER_OWNER, num_threads))
        self._threads: list[threading.Thread] = []
        try:
            for _ in range(num_threads):
                self._threads.append(_start_thread(path, prepare, self._serve))
        except BaseException:
            self.close()
            raise

    async def run(self, owner: str, job: Callable[[sqlite3.Connection], Result]) -> Result:
        """Queue `job`, which sees one state of the file with everything committed before, and wait for its result."""
        return await asyncio.shield(_submit(self._jobs, owner, job))

    def close(self) -> None:
        """Finish queued jobs, then close the connections."""
        self._jobs.close()
        for thread in self._threads:
            thread.join()

    def _serve(self, connection: sqlite3.Connection) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                entry = self._jobs.get()
                try:
                    connection.execute("BEGIN")
                    try:
                        result = entry.job(connection)
                    finally:
                        connection.execute("COMMIT")
                except BaseException as error:
                    entry.future.set_exception(_unavailable(error) if _is_file_error(error) else error)
                else:
                    entry.future.set_result(result)
                    del result
                finally:
                    self._jobs.done(entry)
                    del entry  # its result, perhaps a large tree, would live until the next job


def _start_thread(path: Path | str, prepare: Prepare, serve: Callable[[sqlite3.Connection], None]) -> threading.Thread:
    """Start a thread that opens `path`, prepares the connection and serves jobs. Raises: the errors of `prepare`."""
    opened: Future[None] = Future()

    def run() -> None:
        try:
            connection = _open(path, prepare)
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(None)
        with contextlib.closing(connection):
            serve(connection)

    thread = threading.Thread(target=run, name="chatcache-sqlite", daemon=True)
    thread.start()
    opened.result()
    return thread


def _open(path: Path | str, prepare: Prepare) -> sqlite3.Connection:
    if str(path) != ":memory:":
        with contextlib.suppress(OSError):  # it exists, or SQLite reports the error below
            # Readable by this user only: conversations are private.
            Path(path).touch(mode=0o600, exist_ok=False)
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _retrieve_exception(done: asyncio.Future[Any]) -> None:
    """Mark a future's exception as retrieved, so that asyncio does not log it.

    The caller, which would have received it, may have been cancelled.
    """
    if not done.cancelled():
        done.exception()


def _commit(connection: sqlite3.Connection, first: Entry, jobs: FairQueue) -> bool:
    """Run `first` and further queued jobs in one transaction, and deliver the results.

    Jobs are added until a number of them or an amount of time is reached. Return whether the file accepted the commit.
    """
    group = [first]
    outcomes: list[tuple[Any, BaseException | None]] = []
    failing: sqlite3.Error | None = None
    try:
        connection.execute("BEGIN IMMEDIATE")
        deadline_s = time.monotonic() + _MAX_GROUP_S
        while True:
            outcomes.append(_run_in_savepoint(connection, group[-1].job))
            if len(group) == _MAX_GROUP or time.monotonic() > deadline_s:
                break
            try:
                group.append(jobs.get(block=False))
            except queue.Empty:
                break
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        # The disk is full or failing: report to every caller that nothing was stored.
        failing = error
        with contextlib.suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        outcomes = [(None, _unavailable(error)) for _ in group]
    for entry, (result, failure) in zip(group, outcomes, strict=True):
        jobs.done(entry)
        if failure is not None:
            entry.future.set_exception(failure)
        else:
            entry.future.set_result(result)
    return failing is None


def _run_in_savepoint(connection: sqlite3.Connection, job: Job) -> tuple[Any, BaseException | None]:
    """Return the job's result or its exception, which undoes its writes. Raises: errors of the file."""
    connection.execute("SAVEPOINT job")
    outcome: tuple[Any, BaseException | None]
    try:
        outcome = job(connection), None
    except Exception as error:
        if _is_file_error(error):
            raise
        connection.execute("ROLLBACK TO job")
        outcome = None, error
    connection.execute("RELEASE job")
    return outcome


def _unavailable(error: BaseException) -> StoreUnavailableError:
    unavailable = StoreUnavailableError(f"nothing can be stored now: {error}")
    unavailable.__cause__ = error
    return unavailable


def _is_file_error(error: BaseException) -> bool:
    """Check whether an error is of the file or its disk rather than of the job."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _FILE_ERRORS
