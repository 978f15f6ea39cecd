"""One thread that owns one SQLite connection; jobs that wait together are committed together."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from chatcache.conversations.store import StoreUnavailableError

Result = TypeVar("Result")
Job = Callable[[sqlite3.Connection], Any]
Entry = tuple[Job, Future[Any]]

_MAX_GROUP = 64
_FILE_ERRORS = frozenset(
    {
        *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB),
        *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM),
    }
)


class SqliteWriter:
    """Runs jobs in order on its own thread, each all-or-nothing, many to a commit.

    With `synchronous=FULL` a commit waits for the disk; sharing it is what lets many conversations write at once. A
    job's result is delivered only after the commit that contains it.
    """

    def __init__(
        self, path: Path | str, prepare: Callable[[sqlite3.Connection], None], *, begin: str = "BEGIN IMMEDIATE"
    ) -> None:
        """Open `path` and run `prepare` (pragmas, migration) before any job. Raises: whatever `prepare` raises.

        `begin` starts a group of jobs; plain "BEGIN" is for a second thread whose jobs only read.
        """
        self._begin = begin
        self.is_failing = False  # whether the last jobs that wrote anything could not be committed
        self._jobs: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(path, prepare), name="chatcache-sqlite", daemon=True)
        self._thread.start()
        self._opened.result()

    async def run(self, job: Callable[[sqlite3.Connection], Result]) -> Result:
        """Queue `job`; its exception, if any, undoes that job alone and is raised here."""
        future: Future[Result] = Future()
        self._jobs.put((job, future))
        # Shielded: a caller that goes away must not leave a half-told story; the job runs either way.
        done = asyncio.wrap_future(future)
        done.add_done_callback(_hear)
        return await asyncio.shield(done)

    def close(self) -> None:
        """Finish queued jobs, then close the file."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self, path: Path | str, prepare: Callable[[sqlite3.Connection], None]) -> None:
        try:
            if str(path) != ":memory:":
                with contextlib.suppress(OSError):  # it is there, or SQLite says what is wrong
                    Path(path).touch(mode=0o600, exist_ok=False)  # what people said is nobody else's to read
            connection = sqlite3.connect(path, isolation_level=None)
            try:
                prepare(connection)
            except BaseException:
                connection.close()
                raise
        except BaseException as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        open_for_jobs = True
        while open_for_jobs:
            group, open_for_jobs = self._next_group()
            if group:
                num_changes = connection.total_changes
                took_it = _commit(connection, group, self._begin)
                if not took_it or connection.total_changes > num_changes:  # reading alone says nothing
                    self.is_failing = not took_it
        connection.close()

    def _next_group(self) -> tuple[list[Entry], bool]:
        """Wait for one job, take what else is there already. False: the writer was asked to close."""
        group: list[Entry] = []
        block = True
        while len(group) < _MAX_GROUP:
            try:
                entry = self._jobs.get(block)
            except queue.Empty:
                break
            if entry is None:
                return group, False
            group.append(entry)
            block = False
        return group, True


def _hear(done: asyncio.Future[Any]) -> None:
    """Take note of a failure, so that none is logged as unheard when the caller has gone away."""
    if not done.cancelled():
        done.exception()


def _commit(connection: sqlite3.Connection, group: list[Entry], begin: str) -> bool:
    """Run a group and tell its callers. Whether the file took it."""
    outcomes: list[tuple[Future[Any], Any, BaseException | None]] = []
    failing: sqlite3.Error | None = None
    try:
        connection.execute(begin)
        for job, future in group:
            connection.execute("SAVEPOINT job")
            try:
                outcomes.append((future, job(connection), None))
            except Exception as error:
                if _is_of_the_file(error):
                    raise
                connection.execute("ROLLBACK TO job")
                outcomes.append((future, None, error))
            connection.execute("RELEASE job")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        # The disk is full, or failing: nobody may believe that anything was stored.
        failing = error
        with contextlib.suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        told = StoreUnavailableError(f"nothing can be stored now: {error}")
        told.__cause__ = error
        outcomes = [(future, None, told) for _, future in group]
    for future, result, failure in outcomes:
        if failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(result)
    return failing is None


def _is_of_the_file(error: Exception) -> bool:
    """Whether the file or its disk is at fault, and not what was to be stored."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _FILE_ERRORS
