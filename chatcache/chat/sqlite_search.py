"""The search index beside the tables: folded words in FTS5, written in the transaction that writes the text.

    items.position  = item_words.rowid       triggers remove what goes with its row
    titles.position = title_words.rowid

The words are folded and cut here (`search.folded`), so that FTS5 compares bytes and every storage finds the same. A
SQLite that was built without FTS5 searches by reading everything.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from chatcache.chat.search import NUM_COMPARED, BestItem, Hit, SearchQuery, best_of, folded, hit_of
from chatcache.chat.sqlite_rows import CONVERSATION, Row, conversation_of, listing
from chatcache.chat.store import StoreUnusable

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
    ) m JOIN items i ON i.position = m.position WHERE m.age <= {NUM_COMPARED} ORDER BY i.position DESC
"""


def has_fts5(db: sqlite3.Connection) -> bool:
    """Whether this SQLite can keep the index."""
    return db.execute("SELECT 1 FROM pragma_module_list WHERE name = 'fts5'").fetchone() is not None


def is_indexed(db: sqlite3.Connection) -> bool:
    """Whether the file has the index."""
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'item_words'").fetchone() is not None


def ensure_index(db: sqlite3.Connection, path: Path) -> None:
    """Build the index of what is stored, if it is not there. Raises: StoreUnusable where it cannot be kept."""
    if not has_fts5(db):
        if is_indexed(db):
            raise StoreUnusable(f"{path} has a search index, which needs an SQLite with FTS5")
        return
    if is_indexed(db):
        return
    db.execute("BEGIN IMMEDIATE")
    try:
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


def index_item(db: sqlite3.Connection, position: int, text: str) -> None:
    """Add the words of a new message."""
    if is_indexed(db):
        _put(db, "item_words", position, text)


def index_title(db: sqlite3.Connection, conversation_id: str, title: str) -> None:
    """Replace the words of a title."""
    if is_indexed(db):
        row = db.execute("SELECT position FROM titles WHERE conversation_id = ?", (conversation_id,)).fetchone()
        db.execute("DELETE FROM title_words WHERE rowid = ?", row)
        _put(db, "title_words", row[0], title)


def find(
    db: sqlite3.Connection, owner: str, query: SearchQuery, limit: int, after: tuple[float, str] | None
) -> Sequence[Hit]:
    """The conversations that match, by last change, newest first."""
    if not query.phrases:
        return ()
    if not is_indexed(db):
        return _scan(db, owner, query, limit, after)
    values: dict[str, Any] = {"words": _expression(query)}
    where, more = listing(owner, after)
    rows = db.execute(
        f"SELECT {CONVERSATION} FROM conversations WHERE {where} AND id IN ({_MATCHES}) "
        "ORDER BY updated_at DESC, id DESC LIMIT :limit",
        values | more | {"limit": limit},
    )
    heads = {row[0]: conversation_of(row) for row in rows}
    names = ", ".join(f":id{number}" for number in range(len(heads)))
    items = db.execute(_NEWEST.format(names=names), values | {f"id{number}": each for number, each in enumerate(heads)})
    best = _best_items(items, query)
    return tuple(hit_of(head, query, best.get(head.id)) for head in heads.values())


def _scan(
    db: sqlite3.Connection, owner: str, query: SearchQuery, limit: int, after: tuple[float, str] | None
) -> Sequence[Hit]:
    """The same without an index."""
    where, values = listing(owner, after)
    hits: list[Hit] = []
    for row in db.execute(
        f"SELECT {CONVERSATION} FROM conversations WHERE {where} ORDER BY updated_at DESC, id DESC", values
    ):
        head = conversation_of(row)
        items = db.execute(
            "SELECT conversation_id, id, role, text FROM items WHERE conversation_id = ? ORDER BY position DESC",
            (head.id,),
        )
        best = _best_items(items, query).get(head.id)
        if best is not None or query.find(head.title) is not None:
            hits.append(hit_of(head, query, best))
        if len(hits) == limit:
            break
    return tuple(hits)


def _best_items(rows: Iterable[Row], query: SearchQuery) -> dict[str, BestItem | None]:
    """By conversation the message that matches best of the newest that match; rows come newest first."""
    by_conversation: dict[str, list[tuple[str, str, str]]] = {}
    for conversation_id, *item in rows:
        by_conversation.setdefault(conversation_id, []).append((item[0], item[1], item[2]))
    return {name: best_of(items, query) for name, items in by_conversation.items()}


def _expression(query: SearchQuery) -> str:
    """The query in FTS5's language. Folded words hold nothing that could end a quoted string there."""
    return " AND ".join(f'"{" ".join(phrase)}"' for phrase in query.phrases) + " *"


def _put(db: sqlite3.Connection, table: str, position: int, text: str) -> None:
    db.execute(f"INSERT INTO {table} (rowid, words) VALUES (?, ?)", (position, folded(text)))
