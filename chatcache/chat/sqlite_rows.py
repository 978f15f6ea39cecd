"""Rows of the SQLite file and the data they stand for."""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from chatcache.chat.store import Handed
from chatcache.chat.tree import IN_PROGRESS, Conversation, Item, ReplyParts, Turn, Usage

Row = Any  # a tuple as sqlite3 returns it

CONVERSATION = "id, owner, created_at, updated_at, title, active_leaf, rev, metadata"
ITEM = "id, parent_id, role, text, token_ids, response_id, idx, status, finish_reason, created_at, parts"
TURN = (
    "id, parent_id, model, created_at, base_item_id, prompt_ids, instructions, previous_response_id, status, "
    "usage, echo"
)


def listing(owner: str, after: tuple[float, str] | None) -> tuple[str, dict[str, Any]]:
    """The condition, and its values, of an owner's conversations that come later in a list than a place in it."""
    if after is None:
        return "owner = :owner", {"owner": owner}
    values = {"owner": owner, "after_s": after[0], "after_id": after[1]}
    return "owner = :owner AND (updated_at, id) < (:after_s, :after_id)", values


def insert_conversation(db: sqlite3.Connection, c: Conversation) -> None:
    db.execute(
        f"INSERT INTO conversations ({CONVERSATION}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (c.id, c.owner, c.created_at, c.updated_at, c.title, c.active_leaf, c.rev, json.dumps(dict(c.metadata))),
    )


def update_conversation(db: sqlite3.Connection, c: Conversation) -> None:
    db.execute(
        "UPDATE conversations SET updated_at = ?, title = ?, active_leaf = ?, rev = ?, metadata = ? WHERE id = ?",
        (c.updated_at, c.title, c.active_leaf, c.rev, json.dumps(dict(c.metadata)), c.id),
    )


def insert_item(db: sqlite3.Connection, conversation_id: str, item: Item) -> int:
    """Add a message; return its position."""
    parts = msgspec.json.encode(item.parts).decode()
    row = (item.id, item.parent_id, item.role, item.text, _pack(item.token_ids), item.response_id)
    row_end = (item.index, item.status, item.finish_reason, item.created_at, parts)
    position: int = db.execute(
        f"INSERT INTO items (conversation_id, {ITEM}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING position",
        (conversation_id, *row, *row_end),
    ).fetchone()[0]
    return position


def move_item(db: sqlite3.Connection, conversation_id: str, item: Item) -> None:
    """Store where a message hangs now, and which tokens it has."""
    db.execute(
        "UPDATE items SET parent_id = ?, token_ids = ? WHERE id = ? AND conversation_id = ?",
        (item.parent_id, _pack(item.token_ids), item.id, conversation_id),
    )


def put_turn(db: sqlite3.Connection, conversation_id: str, turn: Turn) -> None:
    """Add a response, or replace it."""
    usage = msgspec.json.encode(turn.usage).decode() if turn.usage is not None else None
    echo = msgspec.json.encode(turn.echo).decode()
    row = (turn.id, turn.parent_id, turn.model, turn.created_at, turn.base_item_id, _pack(turn.prompt_ids))
    row_end = (turn.instructions, turn.previous_response_id, turn.status, usage, echo)
    db.execute(
        f"INSERT OR REPLACE INTO turns (conversation_id, {TURN}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (conversation_id, *row, *row_end),
    )


def hand_over(db: sqlite3.Connection, owner: str, to: str) -> Handed:
    """Give an owner's conversations another one, but for those with a response under way."""
    is_busy = "EXISTS (SELECT 1 FROM turns WHERE conversation_id = conversations.id AND status = :running)"
    values = {"owner": owner, "to": to, "running": IN_PROGRESS}
    where = "WHERE owner = :owner AND"
    num_busy: int = db.execute(f"SELECT count(*) FROM conversations {where} {is_busy}", values).fetchone()[0]
    moved = db.execute(f"UPDATE conversations SET owner = :to {where} NOT {is_busy}", values)
    return Handed(moved.rowcount, num_busy)


def conversation_of(row: Row) -> Conversation:
    values = (*row[:7], json.loads(row[7]))
    return Conversation(*values)


def item_of(row: Row) -> Item:
    parts = msgspec.json.decode(row[10], type=ReplyParts)
    values = (*row[:4], _unpack(row[4]), *row[5:10], parts)
    return Item(*values)


def turn_of(row: Row) -> Turn:
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
