"""A thread that owns one SQLite connection and commits waiting jobs together.

A job is a function that reads and writes on the connection.
"""

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
    """Runs jobs in order on a thread of its own and commits many of them together.

    A job is a function of the connection, and its writes are all-or-nothing. With `synchronous=FULL` a commit waits for
    the disk; sharing it lets many conversations write at once. A job's result is delivered only after the commit that
    contains it.
    """

    def __init__(
        self, path: Path | str, prepare: Callable[[sqlite3.Connection], None], *, begin: str = "BEGIN IMMEDIATE"
    ) -> None:
        """Open `path` and run `prepare` (pragmas, migration) before any job.

        `begin` starts a group of jobs; plain "BEGIN" is for a second thread whose jobs only read.
        Raises: the errors of `prepare`.
        """
        self._begin = begin
        self.is_failing = False  # whether the last jobs that wrote anything could not be committed
        self._jobs: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(path, prepare), name="chatcache-sqlite", daemon=True)
        self._thread.start()
        self._opened.result()

    async def run(self, job: Callable[[sqlite3.Connection], Result]) -> Result:
        """Queue `job` and wait for its commit.

        An exception of the job undoes that job alone and is raised here.
        """
        future: Future[Result] = Future()
        self._jobs.put((job, future))
        # Shielded: the job runs to its end even if the caller is cancelled.
        done = asyncio.wrap_future(future)
        done.add_done_callback(_retrieve_exception)
        return await asyncio.shield(done)

    def close(self) -> None:
        """Finish queued jobs, then close the file."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self, path: Path | str, prepare: Callable[[sqlite3.Connection], None]) -> None:
        try:
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
        except BaseException as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        open_for_jobs = True
        while open_for_jobs:
            group, open_for_jobs = self._next_group()
            if group:
                num_changes = connection.total_changes
                is_committed = _commit(connection, group, self._begin)
                if not is_committed or connection.total_changes > num_changes:  # a group of reads does not test writing
                    self.is_failing = not is_committed
        connection.close()

    def _next_group(self) -> tuple[list[Entry], bool]:
        """Wait for one job and collect the others that are queued.

        Return the jobs, and False if the writer was asked to close.
        """
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


def _retrieve_exception(done: asyncio.Future[Any]) -> None:
    """Mark a future's exception as retrieved, so that asyncio does not log it.

    The caller, which would have received it, may have been cancelled.
    """
    if not done.cancelled():
        done.exception()


def _commit(connection: sqlite3.Connection, group: list[Entry], begin: str) -> bool:
    """Run a group of jobs in one transaction and deliver the results.

    Return whether the file accepted it.
    """
    outcomes: list[tuple[Future[Any], Any, BaseException | None]] = []
    failing: sqlite3.Error | None = None
    try:
        connection.execute(begin)
        for job, future in group:
            connection.execute("SAVEPOINT job")
            try:
                outcomes.append((future, job(connection), None))
            except Exception as error:
                if _is_file_error(error):
                    raise
                connection.execute("ROLLBACK TO job")
                outcomes.append((future, None, error))
            connection.execute("RELEASE job")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        # The disk is full or failing: report to every caller that nothing was stored.
        failing = error
        with contextlib.suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        unavailable = StoreUnavailableError(f"nothing can be stored now: {error}")
        unavailable.__cause__ = error
        outcomes = [(future, None, unavailable) for _, future in group]
    for future, result, failure in outcomes:
        if failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(result)
    return failing is None


def _is_file_error(error: Exception) -> bool:
    """Check whether an error is of the file or its disk rather than of the job."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _FILE_ERRORS
