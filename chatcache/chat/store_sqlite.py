"""Conversations in one SQLite file: WAL, synchronous=FULL, one writer thread, versioned schema."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from chatcache.chat import sqlite_reads as reads
from chatcache.chat.keys_sqlite import SqliteKeys
from chatcache.chat.removal import TreeEdit
from chatcache.chat.search import Hit, SearchQuery
from chatcache.chat.sqlite_claims import find_claim, put_claim, try_writing
from chatcache.chat.sqlite_rows import (
    hand_over,
    insert_conversation,
    insert_item,
    move_item,
    put_turn,
    update_conversation,
)
from chatcache.chat.sqlite_schema import prepare, prepare_reader, unusable
from chatcache.chat.sqlite_search import find, index_item, index_title
from chatcache.chat.sqlite_writer import SqliteWriter
from chatcache.chat.store import Claim, Handed, Merged
from chatcache.chat.tree import Conversation, ConversationTree, Item, Turn, grown, revised
from chatcache.errors import NotFound


class SqliteStore:
    """`ConversationStore` on a file. Responses a crash left in progress become incomplete when a server opens it.

    Raises: StoreUnusable naming the file and the reason.
    """

    def __init__(self, path: Path | str, *, beside_server: bool = False) -> None:
        """`beside_server`: a server may have the file open, and responses under way in it."""
        try:
            self._writer = SqliteWriter(
                path, lambda connection: prepare(connection, Path(path), ends_running=not beside_server)
            )
            # Searching may read much: beside the writer, of which it sees all that is acknowledged.
            self._reader = SqliteWriter(path, prepare_reader, begin="BEGIN")
        except sqlite3.Error as error:
            raise unusable(Path(path), error) from error
        self.keys = SqliteKeys(self._writer)

    async def check(self) -> None:
        if self._writer.is_failing:
            await self._writer.run(try_writing)

    async def create(
        self,
        conversation: Conversation,
        items: Sequence[Item] = (),
        turn: Turn | None = None,
        *,
        claim: Claim | None = None,
    ) -> None:
        def job(db: sqlite3.Connection) -> None:
            put_claim(db, conversation.owner, claim)
            _create(db, conversation)
            _add(db, conversation.id, items, () if turn is None else (turn,))

        await self._writer.run(job)

    async def claimed(self, owner: str, key: str) -> Claim | None:
        return await self._writer.run(lambda db: find_claim(db, owner, key))

    async def get(self, owner: str, conversation_id: str) -> Conversation:
        return await self._writer.run(lambda db: reads.head(db, owner, conversation_id))

    async def list(self, owner: str, limit: int, after: str | None = None) -> Sequence[Conversation]:
        return await self._writer.run(lambda db: reads.listed(db, owner, limit, after))

    async def search(self, owner: str, query: SearchQuery, limit: int, after: str | None = None) -> Sequence[Hit]:
        return await self._reader.run(lambda db: find(db, owner, query, limit, reads.place(db, owner, after)))

    async def ids(self, owner: str, limit: int, after: str | None = None) -> Sequence[str]:
        return await self._reader.run(lambda db: reads.ids(db, owner, limit, after))

    async def load(self, owner: str, conversation_id: str) -> ConversationTree:
        return await self._writer.run(lambda db: reads.tree(db, owner, conversation_id))

    async def locate(self, owner: str, member_id: str) -> str:
        return await self._writer.run(lambda db: reads.holder(db, owner, member_id))

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
        claim: Claim | None = None,
    ) -> Conversation:
        def job(db: sqlite3.Connection) -> Conversation:
            head = reads.head(db, owner, conversation_id, expect)
            put_claim(db, owner, claim)
            _add(db, conversation_id, items, () if turn is None else (turn,))
            if active_leaf is not None:
                _require_item(db, conversation_id, active_leaf)
            return _store_change(db, head, grown(head, active_leaf, title))

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
            head = reads.head(db, owner, conversation_id, expect)
            if active_leaf is not None:
                _require_item(db, conversation_id, active_leaf)
            changed = revised(head, title=title, active_leaf=active_leaf, metadata=metadata)
            return _store_change(db, head, changed)

        return await self._writer.run(job)

    async def edit(
        self, owner: str, conversation_id: str, edit: TreeEdit, *, expect: int | None = None
    ) -> Conversation:
        def job(db: sqlite3.Connection) -> Conversation:
            head = reads.head(db, owner, conversation_id, expect)
            _edit(db, conversation_id, edit)
            return _store_change(db, head, replace(revised(head), active_leaf=edit.active_leaf))

        return await self._writer.run(job)

    async def merge(self, conversation: Conversation, items: Sequence[Item], turns: Sequence[Turn]) -> Merged:
        return await self._writer.run(lambda db: _merge(db, conversation, items, turns))

    async def delete(self, owner: str, conversation_id: str, *, expect: int | None = None) -> None:
        def job(db: sqlite3.Connection) -> None:
            reads.head(db, owner, conversation_id, expect)
            # Items point at each other; their order of removal is settled by checking at commit.
            db.execute("PRAGMA defer_foreign_keys = ON")
            db.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

        await self._writer.run(job)

    async def hand_over(self, owner: str, to: str) -> Handed:
        return await self._writer.run(lambda db: hand_over(db, owner, to))

    async def close(self) -> None:
        await asyncio.to_thread(self._reader.close)
        await asyncio.to_thread(self._writer.close)


def _create(db: sqlite3.Connection, conversation: Conversation) -> None:
    insert_conversation(db, conversation)
    index_title(db, conversation.id, conversation.title)


def _add(db: sqlite3.Connection, conversation_id: str, items: Sequence[Item], turns: Sequence[Turn]) -> None:
    for item in items:
        if item.parent_id is not None:
            _require_item(db, conversation_id, item.parent_id)
        index_item(db, insert_item(db, conversation_id, item), item.text)
    for turn in turns:
        put_turn(db, conversation_id, turn)


def _edit(db: sqlite3.Connection, conversation_id: str, edit: TreeEdit) -> None:
    db.execute("PRAGMA defer_foreign_keys = ON")  # parents may go before those who leave them
    inside = "WHERE id = ? AND conversation_id = ?"
    for table, ids in (("items", edit.removed_items), ("turns", edit.removed_turns)):
        db.executemany(f"DELETE FROM {table} {inside}", ((each, conversation_id) for each in ids))
    for item in edit.items:
        move_item(db, conversation_id, item)
    for turn in edit.turns:
        put_turn(db, conversation_id, turn)


def _merge(db: sqlite3.Connection, conversation: Conversation, items: Sequence[Item], turns: Sequence[Turn]) -> Merged:
    holder = db.execute("SELECT owner FROM conversations WHERE id = ?", (conversation.id,)).fetchone()
    if holder is None:
        _create(db, conversation)
        head = conversation
    else:
        head = reads.head(db, conversation.owner, conversation.id)
    new_items = [item for item in items if not _is_held(db, "items", head.id, item.id)]
    new_turns = [turn for turn in turns if not _is_held(db, "turns", head.id, turn.id)]
    _add(db, head.id, new_items, new_turns)
    if holder is not None and (new_items or new_turns):
        head = _store_change(db, head, grown(head, conversation.active_leaf))
    return Merged(head, holder is None, len(new_items), len(new_turns))


def _is_held(db: sqlite3.Connection, table: str, conversation_id: str, member_id: str) -> bool:
    """Whether the conversation has that row. Raises: NotFound if another one has it."""
    row = db.execute(f"SELECT conversation_id FROM {table} WHERE id = ?", (member_id,)).fetchone()
    if row is not None and row[0] != conversation_id:
        raise NotFound(f"conversation {conversation_id!r} has no {member_id!r}")
    return row is not None


def _require_item(db: sqlite3.Connection, conversation_id: str, item_id: str) -> None:
    row = db.execute("SELECT 1 FROM items WHERE id = ? AND conversation_id = ?", (item_id, conversation_id)).fetchone()
    if row is None:
        raise NotFound(f"conversation {conversation_id!r} has no message {item_id!r}")


def _store_change(db: sqlite3.Connection, head: Conversation, changed: Conversation) -> Conversation:
    """Store what became of `head`."""
    update_conversation(db, changed)
    if changed.title != head.title:
        index_title(db, head.id, changed.title)
    return changed
