"""The SQLite schema.

Tables and migrations, rows and the data they stand for, and the search index.

The search index holds folded words in FTS5 and is written in the transaction that writes the text:

    items.position  = item_words.rowid       triggers remove index rows together with their row
    titles.position = title_words.rowid

Words are folded and truncated by `search.fold_words`, so that FTS5 compares bytes and every store finds the same. A
SQLite without FTS5 searches by reading everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sqlite3
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from chatcache.conversations.checkpoints import end_interrupted, restore
from chatcache.conversations.search import (
    MAX_COMPARED_MESSAGES,
    MessageMatch,
    SearchHit,
    SearchQuery,
    best_message,
    fold_words,
    make_hit,
)
from chatcache.conversations.store import OwnerAssignment, StoreUnusableError
from chatcache.conversations.tree import IN_PROGRESS, Conversation, Item, ReplyParts, Turn, Usage
from chatcache.errors import NotFoundError

Row = Any  # a tuple as sqlite3 returns it
CONVERSATION_COLUMNS = "id, owner, created_at, updated_at, title, active_leaf, rev, metadata"
ITEM_COLUMNS = "id, parent_id, role, text, token_ids, response_id, idx, status, finish_reason, created_at, parts"
TURN_COLUMNS = (
    "id, parent_id, model, created_at, base_item_id, prompt_ids, instructions, previous_response_id, status, "
    "usage, echo"
)
_INDEX = """
    CREATE VIRTUAL TABLE item_words USING fts5 (words, tokenize = 'ascii', prefix = '1 2');
    CREATE VIRTUAL TABLE title_words USING fts5 (words, tokenize = 'ascii', prefix = '1 2');
    CREATE TRIGGER item_words_go AFTER DELETE ON items BEGIN DELETE FROM item_words WHERE rowid = old.position; END;
    CREATE TRIGGER title_words_go AFTER DELETE ON titles BEGIN DELETE FROM title_words WHERE rowid = old.position; END;
"""
_MATCHES = """
    SELECT i.conversation_id FROM item_words w JOIN items i ON i.position = w.rowid WHERE item_words MATCH :words
    UNION
    SELECT t.conversation_id FROM title_words w JOIN titles t ON t.position = w.rowid WHERE title_words MATCH :words
"""
_NEWEST = f"""
    SELECT i.conversation_id, i.id, i.role, i.text FROM (
        SELECT i.position, row_number() OVER (PARTITION BY i.conversation_id ORDER BY i.position DESC) AS age
        FROM item_words w JOIN items i ON i.position = w.rowid
        WHERE item_words MATCH :words AND i.conversation_id IN ({{names}})
    ) m JOIN items i ON i.position = m.position WHERE m.age <= {MAX_COMPARED_MESSAGES} ORDER BY i.position DESC
"""
MAX_CHECKED_BYTES = 2**30
BUSY_MS = 5000  # how long another program may lock the file
_INSTEAD = "; restore a backup, or start with another file"
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
    """
    CREATE TABLE checkpoints (
        position INTEGER PRIMARY KEY, turn_id TEXT NOT NULL REFERENCES turns (id) ON DELETE CASCADE, data BLOB NOT NULL
    );
    CREATE INDEX checkpoints_by_turn ON checkpoints (turn_id, position);
    """,
    """
    CREATE TABLE prompts (
        tenant TEXT NOT NULL, name TEXT NOT NULL, text TEXT NOT NULL, description TEXT NOT NULL,
        created_at REAL NOT NULL, updated_at REAL NOT NULL, PRIMARY KEY (tenant, name)
    );
    """,
)


def prepare(db: sqlite3.Connection, path: Path, *, end_running: bool = True) -> None:
    """Check the file, migrate it and build its search index.

    `end_running`: end responses that a crash left in progress. Raises: StoreUnusableError for a file of
    a newer version or a damaged one.
    """
    migrate(db, path, check=True)
    ensure_index(db, path)
    if end_running:
        _end_running(db)


def migrate(db: sqlite3.Connection, path: Path, *, check: bool = False) -> None:
    """Set the pragmas and migrate the schema after a backup.

    A server may be running on the file. `check`: look for damage first. Raises: StoreUnusableError for a file of a
    newer version or a damaged one.
    """
    db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    version = _version(db)
    if version > len(MIGRATIONS):
        raise StoreUnusableError(
            f"{path} was written by a newer chatcache (schema {version}, this one supports {len(MIGRATIONS)})"
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


def _end_running(db: sqlite3.Connection) -> None:
    """Make responses in progress incomplete, and store the messages that their checkpoints hold."""
    db.execute("BEGIN IMMEDIATE")
    try:
        rows = db.execute(f"SELECT conversation_id, {TURN_COLUMNS} FROM turns WHERE status = ?", (IN_PROGRESS,))
        for conversation_id, *row in rows.fetchall():
            turn = row_to_turn(row)
            held = db.execute("SELECT data FROM checkpoints WHERE turn_id = ? ORDER BY position", (turn.id,))
            items = restore(data for (data,) in held)
            found = db.execute(f"SELECT {CONVERSATION_COLUMNS} FROM conversations WHERE id = ?", (conversation_id,))
            head, ended = end_interrupted(row_to_conversation(found.fetchone()), turn, items)
            insert_items(db, conversation_id, [ItemRow.of(item) for item in items])
            put_turn(db, conversation_id, ended)
            update_conversation(db, head)
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def list_condition(owner: str, after: tuple[float, str] | None) -> tuple[str, dict[str, Any]]:
    """Return an SQL condition, and its values, for the conversations of an owner.

    `after`: select only those that follow this position of the list.
    """
    if after is None:
        return "owner = :owner", {"owner": owner}
    values = {"owner": owner, "after_s": after[0], "after_id": after[1]}
    return "owner = :owner AND (updated_at, id) < (:after_s, :after_id)", values


def insert_conversation(db: sqlite3.Connection, c: Conversation) -> None:
    db.execute(
        f"INSERT INTO conversations ({CONVERSATION_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (c.id, c.owner, c.created_at, c.updated_at, c.title, c.active_leaf, c.rev, json.dumps(dict(c.metadata))),
    )


def update_conversation(db: sqlite3.Connection, c: Conversation) -> None:
    db.execute(
        "UPDATE conversations SET updated_at = ?, title = ?, active_leaf = ?, rev = ?, metadata = ? WHERE id = ?",
        (c.updated_at, c.title, c.active_leaf, c.rev, json.dumps(dict(c.metadata)), c.id),
    )


class ItemRow(NamedTuple):
    """A message as it is written: the columns of its row, and its words for the index."""

    values: tuple[Any, ...]
    words: str

    @classmethod
    def of(cls, item: Item) -> ItemRow:
        parts = msgspec.json.encode(item.parts).decode()
        row = (item.id, item.parent_id, item.role, item.text, _pack(item.token_ids), item.response_id)
        row_end = (item.index, item.status, item.finish_reason, item.created_at, parts)
        return cls((*row, *row_end), fold_words(item.text))


def insert_items(db: sqlite3.Connection, conversation_id: str, rows: Sequence[ItemRow]) -> None:
    """Insert messages and index their words."""
    last: int = db.execute("SELECT coalesce(max(position), 0) FROM items").fetchone()[0]
    db.executemany(
        f"INSERT INTO items (position, conversation_id, {ITEM_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        ((position, conversation_id, *row.values) for position, row in enumerate(rows, last + 1)),
    )
    if is_indexed(db):
        words = ((position, row.words) for position, row in enumerate(rows, last + 1))
        db.executemany("INSERT INTO item_words (rowid, words) VALUES (?, ?)", words)


def move_item(db: sqlite3.Connection, conversation_id: str, item: Item) -> None:
    """Update the parent and the tokens of a message."""
    db.execute(
        "UPDATE items SET parent_id = ?, token_ids = ? WHERE id = ? AND conversation_id = ?",
        (item.parent_id, _pack(item.token_ids), item.id, conversation_id),
    )


def put_turn(db: sqlite3.Connection, conversation_id: str, turn: Turn) -> None:
    """Insert or replace a response. Its checkpoints are deleted."""
    db.execute("DELETE FROM checkpoints WHERE turn_id = ?", (turn.id,))
    usage = msgspec.json.encode(turn.usage).decode() if turn.usage is not None else None
    echo = msgspec.json.encode(turn.echo).decode()
    row = (turn.id, turn.parent_id, turn.model, turn.created_at, turn.base_item_id, _pack(turn.prompt_ids))
    row_end = (turn.instructions, turn.previous_response_id, turn.status, usage, echo)
    db.execute(
        f"INSERT OR REPLACE INTO turns (conversation_id, {TURN_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (conversation_id, *row, *row_end),
    )


def read_owner(db: sqlite3.Connection, conversation_id: str) -> str:
    """Return the owner of a conversation. Raises: NotFoundError."""
    row = db.execute("SELECT owner FROM conversations WHERE id = ?", (conversation_id,)).fetchone()
    if row is None:
        raise NotFoundError(f"no conversation {conversation_id!r}", param="conversation")
    found: str = row[0]
    return found


def assign_owner(db: sqlite3.Connection, owner: str, to: str) -> OwnerAssignment:
    """Move the conversations of `owner` to `to`, except those with a response in progress."""
    is_busy = "EXISTS (SELECT 1 FROM turns WHERE conversation_id = conversations.id AND status = :running)"
    values = {"owner": owner, "to": to, "running": IN_PROGRESS}
    where = "WHERE owner = :owner AND"
    num_busy: int = db.execute(f"SELECT count(*) FROM conversations {where} {is_busy}", values).fetchone()[0]
    moved = db.execute(f"UPDATE conversations SET owner = :to {where} NOT {is_busy}", values)
    return OwnerAssignment(moved.rowcount, num_busy)


def row_to_conversation(row: Row) -> Conversation:
    values = (*row[:7], json.loads(row[7]))
    return Conversation(*values)


def row_to_item(row: Row) -> Item:
    parts = msgspec.json.decode(row[10], type=ReplyParts)
    values = (*row[:4], _unpack(row[4]), *row[5:10], parts)
    return Item(*values)


def row_to_turn(row: Row) -> Turn:
    usage = msgspec.json.decode(row[9], type=Usage) if row[9] is not None else None
    values = (*row[:5], _unpack(row[5]), *row[6:9], usage, msgspec.json.decode(row[10]))
    return Turn(*values)


def _pack(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as little-endian 32-bit integers on any machine."""
    return b"".join(token.to_bytes(4, "little") for token in token_ids) if token_ids else b""


def _unpack(data: bytes) -> tuple[int, ...]:
    ids = array("I", data)
    if array("I", [1]).tobytes() != b"\x01\x00\x00\x00":
        ids.byteswap()
    return tuple(ids)


def has_fts5(db: sqlite3.Connection) -> bool:
    """Check whether this SQLite build has FTS5."""
    return db.execute("SELECT 1 FROM pragma_module_list WHERE name = 'fts5'").fetchone() is not None


def is_indexed(db: sqlite3.Connection) -> bool:
    """Check whether the file has the search index."""
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'item_words'").fetchone() is not None


def ensure_index(db: sqlite3.Connection, path: Path) -> None:
    """Build the search index if it is missing.

    Raises: StoreUnusableError if FTS5 is needed and missing.
    """
    if not has_fts5(db):
        if is_indexed(db):
            raise StoreUnusableError(f"{path} has a search index, which needs an SQLite with FTS5")
        return
    if is_indexed(db):
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        if is_indexed(db):  # another process has built it meanwhile
            db.execute("ROLLBACK")
            return
        for statement in _INDEX.strip().splitlines():
            db.execute(statement)
        for position, text in db.execute("SELECT position, text FROM items"):
            _put(db, "item_words", position, text)
        for position, title in db.execute(
            "SELECT t.position, c.title FROM titles t JOIN conversations c ON c.id = t.conversation_id"
        ):
            _put(db, "title_words", position, title)
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def index_title(db: sqlite3.Connection, conversation_id: str, title: str) -> None:
    """Replace the words of a title in the index."""
    if is_indexed(db):
        row = db.execute("SELECT position FROM titles WHERE conversation_id = ?", (conversation_id,)).fetchone()
        db.execute("DELETE FROM title_words WHERE rowid = ?", row)
        _put(db, "title_words", row[0], title)


def search_conversations(
    db: sqlite3.Connection, owner: str, query: SearchQuery, limit: int, after: tuple[float, str] | None
) -> Sequence[SearchHit]:
    """Return the conversations that match, by last change, newest first."""
    if not query.phrases:
        return ()
    if not is_indexed(db):
        return _search_without_index(db, owner, query, limit, after)
    values: dict[str, Any] = {"words": _expression(query)}
    where, more = list_condition(owner, after)
    rows = db.execute(
        f"SELECT {CONVERSATION_COLUMNS} FROM conversations WHERE {where} AND id IN ({_MATCHES}) "
        "ORDER BY updated_at DESC, id DESC LIMIT :limit",
        values | more | {"limit": limit},
    )
    heads = {row[0]: row_to_conversation(row) for row in rows}
    names = ", ".join(f":id{number}" for number in range(len(heads)))
    items = db.execute(_NEWEST.format(names=names), values | {f"id{number}": each for number, each in enumerate(heads)})
    best = _best_items(items, query)
    return tuple(make_hit(head, query, best.get(head.id)) for head in heads.values())


def _search_without_index(
    db: sqlite3.Connection, owner: str, query: SearchQuery, limit: int, after: tuple[float, str] | None
) -> Sequence[SearchHit]:
    """Search by reading every message of the owner."""
    where, values = list_condition(owner, after)
    hits: list[SearchHit] = []
    for row in db.execute(
        f"SELECT {CONVERSATION_COLUMNS} FROM conversations WHERE {where} ORDER BY updated_at DESC, id DESC", values
    ):
        head = row_to_conversation(row)
        items = db.execute(
            "SELECT conversation_id, id, role, text FROM items WHERE conversation_id = ? ORDER BY position DESC",
            (head.id,),
        )
        best = _best_items(items, query).get(head.id)
        if best is not None or query.find(head.title) is not None:
            hits.append(make_hit(head, query, best))
        if len(hits) == limit:
            break
    return tuple(hits)


def _best_items(rows: Iterable[Row], query: SearchQuery) -> dict[str, MessageMatch | None]:
    """Return the best matching message per conversation; rows are given newest first."""
    by_conversation: dict[str, list[tuple[str, str, str]]] = {}
    for conversation_id, *item in rows:
        by_conversation.setdefault(conversation_id, []).append((item[0], item[1], item[2]))
    return {name: best_message(items, query) for name, items in by_conversation.items()}


def _expression(query: SearchQuery) -> str:
    """Return the query in the syntax of FTS5.

    Words are quoted; folded words contain no quotation mark.
    """
    return " AND ".join(f'"{" ".join(phrase)}"' for phrase in query.phrases) + " *"


def _put(db: sqlite3.Connection, table: str, position: int, text: str) -> None:
    db.execute(f"INSERT INTO {table} (rowid, words) VALUES (?, ?)", (position, fold_words(text)))


def _back_up(db: sqlite3.Connection, path: Path, version: int) -> None:
    """Keep a copy of the file before a migration, readable by its owner only."""
    copy = path.with_name(f"{path.name}.before-schema-{len(MIGRATIONS)}")
    partial = path.with_name(f".{copy.name}.{secrets.token_hex(4)}.partial")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            with contextlib.closing(sqlite3.connect(partial)) as backup:
                db.backup(backup)
                is_before = _version(backup) == version  # else another process has migrated meanwhile
            if is_before:
                partial.replace(copy)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StoreUnusableError(
            f"{path} cannot be copied before it is brought up to date: {error.strerror}"
        ) from error


def _migrate_once(db: sqlite3.Connection, step: int) -> None:
    try:
        db.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[step]}; PRAGMA user_version = {step + 1}; COMMIT;")
    except sqlite3.Error:
        if db.in_transaction:
            db.rollback()
        if _version(db) <= step:  # else another process has made the same migration first
            raise


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _check_whole(db: sqlite3.Connection, path: Path) -> None:
    """Look for damage, at a speed of about a GiB per few seconds.

    Files over `MAX_CHECKED_BYTES` are not checked.
    Raises: StoreUnusableError.
    """
    if not path.is_file() or path.stat().st_size > MAX_CHECKED_BYTES:
        return
    try:
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.DatabaseError as error:
        found = error
    if found != "ok":
        detail = " ".join(str(found).split())
        raise StoreUnusableError(f"{path} is damaged ({detail}){_INSTEAD}")


def open_error(path: Path, error: sqlite3.Error) -> StoreUnusableError:
    """Return the error for a file that SQLite cannot open, with a hint at the likely reason."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if os.path.isdir(path):  # unlike Path.is_dir, also for a path that may not be read or is too long
        hint = "; it is a folder"
    elif not os.path.isdir(path.absolute().parent):
        hint = f"; there is no folder {path.parent}"
    elif code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        hint = _INSTEAD
    elif code == sqlite3.SQLITE_CANTOPEN and os.path.exists(path):
        hint = "; it may not be read and written by this user"
    elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        hint = " by another program"
    else:
        hint = ""
    return StoreUnusableError(f"{path}: {error}{hint}")


def prepare_reader(db: sqlite3.Connection) -> None:
    """Set the pragmas of a connection that only reads while another one writes."""
    db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    db.execute("PRAGMA query_only = ON")
