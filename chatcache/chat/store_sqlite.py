"""Conversations in one SQLite file: WAL, synchronous=FULL, one writer thread, versioned schema."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from chatcache.chat.removal import TreeEdit
from chatcache.chat.sqlite_writer import SqliteWriter
from chatcache.chat.store import StaleRevision, StoreUnusable
from chatcache.chat.tree import IN_PROGRESS, INCOMPLETE, Conversation, ConversationTree, Item, ReplyParts, Turn, Usage
from chatcache.errors import NotFound

Row = Any  # a tuple as sqlite3 returns it

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
)

_CONVERSATION = "id, owner, created_at, updated_at, title, active_leaf, rev, metadata"
_ITEM = "id, parent_id, role, text, token_ids, response_id, idx, status, finish_reason, created_at, parts"
_TURN = (
    "id, parent_id, model, created_at, base_item_id, prompt_ids, instructions, previous_response_id, status, "
    "usage, echo"
)


class SqliteStore:
    """`ConversationStore` on a file. Responses a crash left in progress become incomplete when it is opened.

    Raises: StoreUnusable naming the file and the reason.
    """

    def __init__(self, path: Path | str) -> None:
        try:
            self._writer = SqliteWriter(path, lambda connection: _prepare(connection, Path(path)))
        except sqlite3.Error as error:
            raise StoreUnusable(f"{path}: {error}") from error

    async def create(self, conversation: Conversation, items: Sequence[Item] = (), turn: Turn | None = None) -> None:
        def job(db: sqlite3.Connection) -> None:
            _create(db, conversation)
            _add(db, conversation.id, items, turn)

        await self._writer.run(job)

    async def get(self, owner: str, conversation_id: str) -> Conversation:
        return await self._writer.run(lambda db: _head(db, owner, conversation_id))

    async def list(self, owner: str, limit: int, after: str | None = None) -> Sequence[Conversation]:
        return await self._writer.run(lambda db: _list(db, owner, limit, after))

    async def load(self, owner: str, conversation_id: str) -> ConversationTree:
        return await self._writer.run(lambda db: _load(db, owner, conversation_id))

    async def locate(self, owner: str, member_id: str) -> str:
        return await self._writer.run(lambda db: _locate(db, owner, member_id))

    async def append(
        self,
        owner: str,
        conversation_id: str,
        items: Sequence[Item],
        turn: Turn | None = None,
        *,
        active_leaf: str | None = None,
        title: str | None = None,
        expect: int | None = None,
    ) -> Conversation:
        def job(db: sqlite3.Connection) -> Conversation:
            head = _head(db, owner, conversation_id, expect)
            _add(db, conversation_id, items, turn)
            return _touch(db, head, title=head.title or title, active_leaf=active_leaf)

        return await self._writer.run(job)

    async def update(
        self,
        owner: str,
        conversation_id: str,
        *,
        title: str | None = None,
        active_leaf: str | None = None,
        metadata: Mapping[str, str] | None = None,
        expect: int | None = None,
    ) -> Conversation:
        def job(db: sqlite3.Connection) -> Conversation:
            head = _head(db, owner, conversation_id, expect)
            if active_leaf is not None:
                _require_item(db, conversation_id, active_leaf)
            return _touch(db, head, title=title, active_leaf=active_leaf, metadata=metadata)

        return await self._writer.run(job)

    async def edit(
        self, owner: str, conversation_id: str, edit: TreeEdit, *, expect: int | None = None
    ) -> Conversation:
        def job(db: sqlite3.Connection) -> Conversation:
            head = _head(db, owner, conversation_id, expect)
            _edit(db, conversation_id, edit)
            return _touch(db, replace(head, active_leaf=edit.active_leaf), title=None, active_leaf=None)

        return await self._writer.run(job)

    async def delete(self, owner: str, conversation_id: str) -> None:
        def job(db: sqlite3.Connection) -> None:
            _head(db, owner, conversation_id)
            # Items point at each other; their order of removal is settled by checking at commit.
            db.execute("PRAGMA defer_foreign_keys = ON")
            db.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

        await self._writer.run(job)

    async def close(self) -> None:
        await asyncio.to_thread(self._writer.close)


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Set the pragmas and bring the schema up to date, after a backup of what was there."""
    db.execute("PRAGMA busy_timeout = 5000")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA foreign_keys = ON")
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise StoreUnusable(
            f"{path} was written by a newer chatcache (schema {version}, this one knows {len(MIGRATIONS)})"
        )
    if 0 < version < len(MIGRATIONS):
        with sqlite3.connect(path.with_name(f"{path.name}.before-schema-{len(MIGRATIONS)}")) as backup:
            db.backup(backup)
        backup.close()
    for step in range(version, len(MIGRATIONS)):
        db.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[step]}; PRAGMA user_version = {step + 1}; COMMIT;")
    db.execute("UPDATE turns SET status = ? WHERE status = ?", (INCOMPLETE, IN_PROGRESS))


def _create(db: sqlite3.Connection, c: Conversation) -> None:
    db.execute(
        f"INSERT INTO conversations ({_CONVERSATION}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (c.id, c.owner, c.created_at, c.updated_at, c.title, c.active_leaf, c.rev, json.dumps(dict(c.metadata))),
    )


def _head(db: sqlite3.Connection, owner: str, conversation_id: str, expect: int | None = None) -> Conversation:
    row = db.execute(
        f"SELECT {_CONVERSATION} FROM conversations WHERE id = ? AND owner = ?", (conversation_id, owner)
    ).fetchone()
    if row is None:
        raise NotFound(f"no conversation {conversation_id!r}", param="conversation")
    if expect is not None and expect != row[6]:
        raise StaleRevision(f"conversation {conversation_id!r} is at rev {row[6]}, not {expect}", param="rev")
    return _conversation(row)


def _list(db: sqlite3.Connection, owner: str, limit: int, after: str | None) -> Sequence[Conversation]:
    where, values = "owner = ?", [owner]
    if after is not None:
        _head(db, owner, after)
        where += " AND (updated_at, id) < (SELECT updated_at, id FROM conversations WHERE id = ?)"
        values.append(after)
    query = f"SELECT {_CONVERSATION} FROM conversations WHERE {where} ORDER BY updated_at DESC, id DESC LIMIT ?"
    return tuple(_conversation(row) for row in db.execute(query, (*values, limit)))


def _load(db: sqlite3.Connection, owner: str, conversation_id: str) -> ConversationTree:
    head = _head(db, owner, conversation_id)
    items = db.execute(f"SELECT {_ITEM} FROM items WHERE conversation_id = ? ORDER BY position", (conversation_id,))
    turns = db.execute(f"SELECT {_TURN} FROM turns WHERE conversation_id = ?", (conversation_id,))
    return ConversationTree(head, map(_item, items), map(_turn, turns))


def _locate(db: sqlite3.Connection, owner: str, member_id: str) -> str:
    row = db.execute(
        "SELECT c.id FROM conversations c JOIN (SELECT conversation_id FROM items WHERE id = ?1 UNION "
        "SELECT conversation_id FROM turns WHERE id = ?1) m ON m.conversation_id = c.id WHERE c.owner = ?2",
        (member_id, owner),
    ).fetchone()
    if row is None:
        raise NotFound(f"no response or message {member_id!r}")
    found: str = row[0]
    return found


def _add(db: sqlite3.Connection, conversation_id: str, items: Sequence[Item], turn: Turn | None) -> None:
    for item in items:
        _insert_item(db, conversation_id, item)
    if turn is not None:
        _put_turn(db, conversation_id, turn)


def _insert_item(db: sqlite3.Connection, conversation_id: str, item: Item) -> None:
    if item.parent_id is not None:
        _require_item(db, conversation_id, item.parent_id)
    row = (item.id, item.parent_id, item.role, item.text, _pack(item.token_ids), item.response_id)
    parts = msgspec.json.encode(item.parts).decode()
    row_end = (item.index, item.status, item.finish_reason, item.created_at, parts)
    db.execute(
        f"INSERT INTO items (conversation_id, {_ITEM}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (conversation_id, *row, *row_end),
    )


def _edit(db: sqlite3.Connection, conversation_id: str, edit: TreeEdit) -> None:
    db.execute("PRAGMA defer_foreign_keys = ON")  # parents may go before those who leave them
    inside = "WHERE id = ? AND conversation_id = ?"
    for table, ids in (("items", edit.removed_items), ("turns", edit.removed_turns)):
        db.executemany(f"DELETE FROM {table} {inside}", ((each, conversation_id) for each in ids))
    db.executemany(
        f"UPDATE items SET parent_id = ?, token_ids = ? {inside}",
        ((item.parent_id, _pack(item.token_ids), item.id, conversation_id) for item in edit.items),
    )
    for turn in edit.turns:
        _put_turn(db, conversation_id, turn)


def _put_turn(db: sqlite3.Connection, conversation_id: str, turn: Turn) -> None:
    usage = msgspec.json.encode(turn.usage).decode() if turn.usage is not None else None
    row = (turn.id, turn.parent_id, turn.model, turn.created_at, turn.base_item_id, _pack(turn.prompt_ids))
    row_end = (
        turn.instructions,
        turn.previous_response_id,
        turn.status,
        usage,
        msgspec.json.encode(turn.echo).decode(),
    )
    db.execute(
        f"INSERT OR REPLACE INTO turns (conversation_id, {_TURN}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (conversation_id, *row, *row_end),
    )


def _require_item(db: sqlite3.Connection, conversation_id: str, item_id: str) -> None:
    row = db.execute("SELECT 1 FROM items WHERE id = ? AND conversation_id = ?", (item_id, conversation_id)).fetchone()
    if row is None:
        raise NotFound(f"conversation {conversation_id!r} has no message {item_id!r}")


def _touch(
    db: sqlite3.Connection,
    head: Conversation,
    *,
    title: str | None,
    active_leaf: str | None,
    metadata: Mapping[str, str] | None = None,
) -> Conversation:
    changed = Conversation(
        id=head.id,
        owner=head.owner,
        created_at=head.created_at,
        updated_at=max(time.time(), head.updated_at),
        title=title if title is not None else head.title,
        active_leaf=active_leaf if active_leaf is not None else head.active_leaf,
        rev=head.rev + 1,
        metadata=metadata if metadata is not None else head.metadata,
    )
    metadata_json = json.dumps(dict(changed.metadata))
    db.execute(
        "UPDATE conversations SET updated_at = ?, title = ?, active_leaf = ?, rev = ?, metadata = ? WHERE id = ?",
        (changed.updated_at, changed.title, changed.active_leaf, changed.rev, metadata_json, head.id),
    )
    return changed


def _conversation(row: Row) -> Conversation:
    values = (*row[:7], json.loads(row[7]))
    return Conversation(*values)


def _item(row: Row) -> Item:
    parts = msgspec.json.decode(row[10], type=ReplyParts)
    values = (*row[:4], _unpack(row[4]), *row[5:10], parts)
    return Item(*values)


def _turn(row: Row) -> Turn:
    usage = msgspec.json.decode(row[9], type=Usage) if row[9] is not None else None
    values = (*row[:5], _unpack(row[5]), *row[6:9], usage, msgspec.json.decode(row[10]))
    return Turn(*values)


def _pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit integers, whatever the machine."""
    return b"".join(token.to_bytes(4, "little") for token in token_ids)


def _unpack(data: bytes) -> tuple[int, ...]:
    ids = array("I", data)
    if array("I", [1]).tobytes() != b"\x01\x00\x00\x00":
        ids.byteswap()
    return tuple(ids)
