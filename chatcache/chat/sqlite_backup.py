"""The SQLite file read while a server may write it: a copy of all of it, and what it holds at one moment."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from chatcache.chat import keys_sqlite
from chatcache.chat import sqlite_reads as reads
from chatcache.chat.keys import KeyRecord
from chatcache.chat.sqlite_schema import MIGRATIONS
from chatcache.chat.store import StoreUnusable
from chatcache.chat.tree import ConversationTree

_BUSY_S = 30.0


def back_up(path: Path, copy: Path) -> int:
    """Copy the file as it is at one moment into `copy`, a new file, and read that through. Returns its bytes.

    Writers go on meanwhile. Raises: StoreUnusable saying which of the two is wrong, and how.
    """
    source = open_to_read(path)
    try:
        target = sqlite3.connect(copy)
        try:
            source.backup(target)  # one step, in one read transaction: a writer's commits do not start it anew
            target.execute("PRAGMA journal_mode = DELETE")  # one file, which needs no other beside it
            _check(target, copy)
        finally:
            target.close()
    except sqlite3.Error as error:
        raise StoreUnusable(f"{path} cannot be backed up: {error}") from error
    finally:
        source.close()
    return copy.stat().st_size


def open_to_read(path: Path) -> sqlite3.Connection:
    """A connection that changes nothing. Raises: StoreUnusable for what is no file of ours, or a newer version's."""
    if not path.is_file():
        raise StoreUnusable(f"{path}: there is no such file")
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_S, isolation_level=None)
    try:
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
        has_conversations = db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'conversations'").fetchone()
    except sqlite3.Error as error:
        db.close()
        raise StoreUnusable(f"{path}: {error}") from error
    if version > len(MIGRATIONS) or not has_conversations:
        db.close()
        reason = f"was written by a newer chatcache (schema {version})" if has_conversations else "has no conversations"
        raise StoreUnusable(f"{path} {reason}")
    return db


class SqliteSnapshot:
    """`archive.ConversationSource`: the file as it is when this opens, whatever a server writes from then on.

    Raises: StoreUnusable, also for the file of an older version.
    """

    def __init__(self, path: Path) -> None:
        self._db = open_to_read(path)
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version != len(MIGRATIONS):
            self._db.close()
            raise StoreUnusable(f"{path} is of an older chatcache (schema {version}): `chatcache serve` brings it up")
        self._db.execute("BEGIN")
        self._db.execute("SELECT 1 FROM conversations").fetchone()  # from here on it stands still

    async def key_records(self) -> Sequence[KeyRecord]:
        return keys_sqlite.listed(self._db)

    async def owners(self) -> Sequence[str]:
        return reads.owners(self._db)

    async def ids(self, owner: str, limit: int, after: str | None = None) -> Sequence[str]:
        return reads.ids(self._db, owner, limit, after)

    async def load(self, owner: str, conversation_id: str) -> ConversationTree:
        return reads.tree(self._db, owner, conversation_id)

    async def close(self) -> None:
        self._db.close()


def _check(db: sqlite3.Connection, copy: Path) -> None:
    found = [row[0] for row in db.execute("PRAGMA integrity_check(3)")]
    astray = db.execute("PRAGMA foreign_key_check").fetchone()
    if found != ["ok"] or astray is not None:
        detail = " ".join(" ".join(found).split()) if found != ["ok"] else f"a row of {astray[0]} refers to none"
        raise StoreUnusable(f"the copy is damaged, and so is what it was made of ({detail})")
