"""Reading conversations from the SQLite file: heads, trees, lists. On any connection; they change nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from chatcache.chat.sqlite_rows import CONVERSATION, ITEM, TURN, conversation_of, item_of, listing, turn_of
from chatcache.chat.store import StaleRevision, read_cursor
from chatcache.chat.tree import Conversation, ConversationTree
from chatcache.errors import NotFound


def head(db: sqlite3.Connection, owner: str, conversation_id: str, expect: int | None = None) -> Conversation:
    row = db.execute(
        f"SELECT {CONVERSATION} FROM conversations WHERE id = ? AND owner = ?", (conversation_id, owner)
    ).fetchone()
    if row is None:
        raise NotFound(f"no conversation {conversation_id!r}", param="conversation")
    found = conversation_of(row)
    if expect is not None and expect != found.rev:
        raise StaleRevision(found, expect)
    return found


def place(db: sqlite3.Connection, owner: str, after: str | None) -> tuple[float, str] | None:
    """Where in the list `after` is. Raises: NotFound."""
    if after is None:
        return None
    found = read_cursor(after)
    if found is None:
        present = head(db, owner, after)
        return present.updated_at, present.id
    return found


def listed(db: sqlite3.Connection, owner: str, limit: int, after: str | None) -> Sequence[Conversation]:
    where, values = listing(owner, place(db, owner, after))
    query = f"SELECT {CONVERSATION} FROM conversations WHERE {where} ORDER BY updated_at DESC, id DESC LIMIT :limit"
    return tuple(conversation_of(row) for row in db.execute(query, values | {"limit": limit}))


def ids(db: sqlite3.Connection, owner: str, limit: int, after: str | None) -> Sequence[str]:
    query = "SELECT id FROM conversations WHERE owner = ? AND id > ? ORDER BY id LIMIT ?"
    return tuple(found for (found,) in db.execute(query, (owner, after or "", limit)))


def tree(db: sqlite3.Connection, owner: str, conversation_id: str) -> ConversationTree:
    found = head(db, owner, conversation_id)
    items = db.execute(f"SELECT {ITEM} FROM items WHERE conversation_id = ? ORDER BY position", (conversation_id,))
    turns = db.execute(f"SELECT {TURN} FROM turns WHERE conversation_id = ?", (conversation_id,))
    return ConversationTree(found, map(item_of, items), map(turn_of, turns))


def holder(db: sqlite3.Connection, owner: str, member_id: str) -> str:
    row = db.execute(
        "SELECT c.id FROM conversations c JOIN (SELECT conversation_id FROM items WHERE id = :member UNION "
        "SELECT conversation_id FROM turns WHERE id = :member) m ON m.conversation_id = c.id WHERE c.owner = :owner",
        {"member": member_id, "owner": owner},
    ).fetchone()
    if row is None:
        raise NotFound(f"no response or message {member_id!r}")
    found: str = row[0]
    return found


def owners(db: sqlite3.Connection) -> Sequence[str]:
    """Whoever has a conversation, in order."""
    return tuple(owner for (owner,) in db.execute("SELECT DISTINCT owner FROM conversations ORDER BY owner"))
