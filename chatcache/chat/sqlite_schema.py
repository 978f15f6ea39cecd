"""The schema of the SQLite file, and how an older file becomes a present one."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from pathlib import Path

from chatcache.chat import sqlite_search
from chatcache.chat.store import StoreUnusable
from chatcache.chat.tree import IN_PROGRESS, INCOMPLETE

MAX_CHECKED_BYTES = 2**30
BUSY_MS = 5000  # how long another program may hold the file
_INSTEAD = "; bring back a backup, or start with another file"

MIGRATIONS = (
    """
    CREATE TABLE conversations (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at REAL NOT NULL, updated_at REAL NOT NULL,
        title TEXT NOT NULL, active_leaf TEXT, rev INTEGER NOT NULL, metadata TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX conversations_by_owner ON conversations (owner, updated_at DESC, id DESC);
    CREATE TABLE items (
        position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
        conversation_id TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        parent_id TEXT REFERENCES items (id), role TEXT NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL,
        response_id TEXT, idx INTEGER NOT NULL, status TEXT NOT NULL, finish_reason TEXT, created_at REAL NOT NULL
    );
    CREATE INDEX items_by_conversation ON items (conversation_id, position);
    CREATE INDEX items_by_parent ON items (parent_id);
    CREATE TABLE turns (
        id TEXT PRIMARY KEY, conversation_id TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        parent_id TEXT NOT NULL, model TEXT NOT NULL, created_at REAL NOT NULL, base_item_id TEXT,
        prompt_ids BLOB NOT NULL, instructions TEXT, previous_response_id TEXT, status TEXT NOT NULL, usage TEXT
    ) WITHOUT ROWID;
    CREATE INDEX turns_by_conversation ON turns (conversation_id);
    """,
    """
    ALTER TABLE items ADD COLUMN parts TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE turns ADD COLUMN echo TEXT NOT NULL DEFAULT '{}';
    """,
    """
    CREATE INDEX conversations_by_id ON conversations (owner, id);
    CREATE TABLE titles (
        position INTEGER PRIMARY KEY,
        conversation_id TEXT NOT NULL UNIQUE REFERENCES conversations (id) ON DELETE CASCADE
    );
    INSERT INTO titles (conversation_id) SELECT id FROM conversations;
    CREATE TRIGGER titles_of_new AFTER INSERT ON conversations BEGIN
        INSERT INTO titles (conversation_id) VALUES (new.id);
    END;
    """,
    """
    CREATE TABLE claims (
        owner TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, target TEXT NOT NULL, expires_at REAL NOT NULL,
        PRIMARY KEY (owner, key)
    ) WITHOUT ROWID;
    CREATE INDEX claims_by_age ON claims (expires_at);
    """,
    """
    CREATE TABLE keys (
        id TEXT PRIMARY KEY, digest BLOB NOT NULL UNIQUE, tenant TEXT NOT NULL, user TEXT NOT NULL, name TEXT NOT NULL,
        is_admin INTEGER NOT NULL, requests_per_minute INTEGER, tokens_per_minute INTEGER, max_concurrent INTEGER,
        tokens_per_day INTEGER, created_at REAL NOT NULL, revoked_at REAL
    ) WITHOUT ROWID;
    CREATE TABLE usage (
        day INTEGER NOT NULL, key_id TEXT NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (day, key_id)
    ) WITHOUT ROWID;
    """,
)


def prepare(db: sqlite3.Connection, path: Path, *, ends_running: bool = True) -> None:
    """Make the file that of a server which starts: up to date, whole, and with nothing under way (`ends_running`).

    Raises: StoreUnusable for a file of a newer version, or a damaged one.
    """
    migrate(db, path, check=True)
    sqlite_search.ensure_index(db, path)
    if ends_running:
        db.execute("UPDATE turns SET status = ? WHERE status = ?", (INCOMPLETE, IN_PROGRESS))


def migrate(db: sqlite3.Connection, path: Path, *, check: bool = False) -> None:
    """Set the pragmas and bring the schema up to date, after a backup of what was there. A server may be running on it.

    `check`: look for damage before. Raises: StoreUnusable for a file of a newer version, or a damaged one.
    """
    db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    version = _version(db)
    if version > len(MIGRATIONS):
        raise StoreUnusable(
            f"{path} was written by a newer chatcache (schema {version}, this one knows {len(MIGRATIONS)})"
        )
    if check:
        _check_whole(db, path)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA foreign_keys = ON")
    if 0 < version < len(MIGRATIONS):
        _back_up(db, path, version)
    for step in range(version, len(MIGRATIONS)):
        _migrate_once(db, step)


def _back_up(db: sqlite3.Connection, path: Path, version: int) -> None:
    """Keep the file as it is before a migration, for whoever runs this alone to read."""
    copy = path.with_name(f"{path.name}.before-schema-{len(MIGRATIONS)}")
    partial = path.with_name(f".{copy.name}.{secrets.token_hex(4)}.partial")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            with contextlib.closing(sqlite3.connect(partial)) as backup:
                db.backup(backup)
                is_before = _version(backup) == version  # or another process did all this meanwhile
            if is_before:
                partial.replace(copy)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StoreUnusable(f"{path} cannot be copied before it is brought up to date: {error.strerror}") from error


def _migrate_once(db: sqlite3.Connection, step: int) -> None:
    try:
        db.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[step]}; PRAGMA user_version = {step + 1}; COMMIT;")
    except sqlite3.Error:
        if db.in_transaction:
            db.rollback()
        if _version(db) <= step:  # else another process did the same at the same time, and was first
            raise


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _check_whole(db: sqlite3.Connection, path: Path) -> None:
    """Look for damage, which goes at about a GiB in seconds; files beyond `MAX_CHECKED_BYTES` are not read through.

    Raises: StoreUnusable.
    """
    if not path.is_file() or path.stat().st_size > MAX_CHECKED_BYTES:
        return
    try:
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.DatabaseError as error:
        found = error
    if found != "ok":
        detail = " ".join(str(found).split())
        raise StoreUnusable(f"{path} is damaged ({detail}){_INSTEAD}")


def unusable(path: Path, error: sqlite3.Error) -> StoreUnusable:
    """What SQLite says of a file that it cannot open, and what of it can be seen from here."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if path.is_dir():
        hint = "; it is a folder"
    elif not path.absolute().parent.is_dir():
        hint = f"; there is no folder {path.parent}"
    elif code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        hint = _INSTEAD
    elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        hint = " by another program"
    else:
        hint = ""
    return StoreUnusable(f"{path}: {error}{hint}")


def prepare_reader(db: sqlite3.Connection) -> None:
    """Set the pragmas of a connection that only reads, beside the one that writes."""
    db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    db.execute("PRAGMA query_only = ON")
