"""The SQLite store: WAL, synchronous=FULL, one writer thread, several reader threads, versioned schema.

`SqliteStore` implements the contract, with the tables of `sqlite_tenants`; `SqliteSnapshot` and `back_up` copy a file
while a server writes it. The module-level functions read and write on a given connection.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from chatcache.auth import KeyRecord
from chatcache.conversations.checkpoints import ReplyCheckpoint
from chatcache.conversations.search import SearchHit, SearchQuery
from chatcache.conversations.store import (
    CLAIM_TTL_S,
    Claim,
    ConversationFullError,
    IdempotencyConflictError,
    ItemQuery,
    MergeResult,
    OwnerAssignment,
    StaleRevisionError,
    StoreUnusableError,
    decode_cursor,
)
from chatcache.conversations.tree import (
    IN_PROGRESS,
    Conversation,
    ConversationTree,
    Item,
    MessageDeletion,
    Turn,
    deleted_meanwhile_error,
    head_after_append,
    head_after_deletion,
    head_after_update,
)
from chatcache.errors import NotFoundError
from chatcache.storage.sqlite_schema import (
    CONVERSATION_COLUMNS,
    ITEM_COLUMNS,
    MIGRATIONS,
    TURN_COLUMNS,
    ItemRow,
    assign_owner,
    index_title,
    insert_conversation,
    insert_items,
    list_condition,
    move_item,
    open_error,
    prepare,
    prepare_reader,
    put_turn,
    read_owner,
    row_to_conversation,
    row_to_item,
    row_to_turn,
    search_conversations,
    update_conversation,
)
from chatcache.storage.sqlite_tenants import SERVER, SqliteKeys, SqliteSavedPrompts, list_keys
from chatcache.storage.sqlite_threads import SqliteReaders, SqliteThread, SqliteWriter

Result = TypeVar("Result")
_BACKUP_BUSY_S = 30.0
_INLINE_CHARS = 16_384  # encoding this much text takes about a millisecond
_CHARS_PER_ITEM = 100  # the cost of an empty message, in characters
RESERVE_BYTES = 2**20  # what must fit on the disk before the store is available again


class SqliteStore:
    """`ConversationStore` on one file.

    Responses that a crash left in progress become incomplete at the next start, with the output of their checkpoints.
    Raises: StoreUnusableError naming the file and the reason.
    """

    def __init__(self, path: Path | str, *, server_may_run: bool = False) -> None:
        """Open the file.

        `server_may_run`: do not end responses in progress, a server may be running them.
        """
        try:
            self._writer = SqliteWriter(
                path, lambda connection: prepare(connection, Path(path), end_running=not server_may_run)
            )
            # Readers see all committed data. A database in memory belongs to one connection.
            self._readers: SqliteThread = (
                SqliteReaders(path, prepare_reader) if str(path) != ":memory:" else self._writer
            )
        except sqlite3.Error as error:
            raise open_error(Path(path), error) from error
        self._num_checked_failures = 0
        self._changes: dict[str, asyncio.Future[Any]] = {}  # by conversation: the last change that is not stored yet
        self.keys = SqliteKeys(self._writer)
        self.saved_prompts = SqliteSavedPrompts(self._writer, self._readers)

    async def check(self) -> None:
        num_failures = self._writer.num_failures
        if num_failures != self._num_checked_failures:
            for job in (fill_reserve, free_reserve):  # two commits, because SQLite writes no page that is free again
                await self._writer.run(SERVER, job)
            self._num_checked_failures = num_failures

    async def create(
        self,
        conversation: Conversation,
        items: Sequence[Item] = (),
        turn: Turn | None = None,
        *,
        claim: Claim | None = None,
    ) -> None:
        encoded = await _encoded(items)

        def job(db: sqlite3.Connection) -> None:
            put_claim(db, conversation.owner, claim)
            _create(db, conversation)
            _add(db, conversation.id, encoded, () if turn is None else (turn,))

        await self._change(conversation.owner, conversation.id, job)

    async def find_claim(self, owner: str, key: str) -> Claim | None:
        return await self._readers.run(owner, lambda db: find_claim(db, owner, key))

    async def get(self, owner: str, conversation_id: str) -> Conversation:
        return await self._read(owner, conversation_id, lambda db: read_head(db, owner, conversation_id))

    async def find_owner(self, conversation_id: str) -> str:
        return await self._readers.run("", lambda db: read_owner(db, conversation_id))

    async def list(self, owner: str, limit: int, after: str | None = None) -> Sequence[Conversation]:
        return await self._readers.run(owner, lambda db: list_heads(db, owner, limit, after))

    async def search(self, owner: str, query: SearchQuery, limit: int, after: str | None = None) -> Sequence[SearchHit]:
        return await self._readers.run(
            owner, lambda db: search_conversations(db, owner, query, limit, resolve_cursor(db, owner, after))
        )

    async def list_ids(self, owner: str, limit: int, after: str | None = None) -> Sequence[str]:
        return await self._readers.run(owner, lambda db: read_ids(db, owner, limit, after))

    async def load(self, owner: str, conversation_id: str) -> ConversationTree:
        return await self._read(owner, conversation_id, lambda db: read_tree(db, owner, conversation_id))

    async def load_path(
        self, owner: str, conversation_id: str, end: str | None = None, *, limit: int | None = None
    ) -> ConversationTree:
        return await self._read(owner, conversation_id, lambda db: read_path(db, owner, conversation_id, end, limit))

    async def list_items(self, owner: str, conversation_id: str, query: ItemQuery) -> ConversationTree:
        return await self._read(owner, conversation_id, lambda db: read_items(db, owner, conversation_id, query))

    async def locate(self, owner: str, member_id: str) -> str:
        return await self._readers.run(owner, lambda db: find_conversation_of(db, owner, member_id))

    async def append(
        self,
        owner: str,
        conversation_id: str,
        items: Sequence[Item],
        turn: Turn | None = None,
        *,
        active_leaf: str | None = None,
        title: str | None = None,
        expected_rev: int | None = None,
        claim: Claim | None = None,
        max_items: int | None = None,
        depends_on: Sequence[str] = (),
    ) -> Conversation:
        encoded = await _encoded(items)

        def job(db: sqlite3.Connection) -> Conversation:
            head = read_head(db, owner, conversation_id, expected_rev)
            if max_items is not None and items:
                _require_room(db, conversation_id, len(items), max_items)
            put_claim(db, owner, claim)
            _require_members(db, conversation_id, depends_on)
            _add(db, conversation_id, encoded, () if turn is None else (turn,))
            if active_leaf is not None:
                _require_item(db, conversation_id, active_leaf, "active_leaf")
            return _store_change(db, head, head_after_append(head, active_leaf, title))

        return await self._change(owner, conversation_id, job)

    async def checkpoint(self, checkpoints: Sequence[ReplyCheckpoint]) -> None:
        rows = [(each.response_id, each.data, each.response_id, IN_PROGRESS) for each in checkpoints]
        query = (
            "INSERT INTO checkpoints (turn_id, data) "
            "SELECT ?, ? WHERE EXISTS (SELECT 1 FROM turns WHERE id = ? AND status = ?)"
        )
        await self._writer.run(SERVER, lambda db: db.executemany(query, rows).rowcount)

    async def update(
        self,
        owner: str,
        conversation_id: str,
        *,
        title: str | None = None,
        active_leaf: str | None = None,
        metadata: Mapping[str, str] | None = None,
        expected_rev: int | None = None,
    ) -> Conversation:
        def job(db: sqlite3.Connection) -> Conversation:
            head = read_head(db, owner, conversation_id, expected_rev)
            if active_leaf is not None:
                _require_item(db, conversation_id, active_leaf, "active_leaf")
            changed = head_after_update(head, title=title, active_leaf=active_leaf, metadata=metadata)
            return _store_change(db, head, changed)

        return await self._change(owner, conversation_id, job)

    async def delete_messages(
        self, owner: str, conversation_id: str, deletion: MessageDeletion, *, expected_rev: int | None = None
    ) -> Conversation:
        def job(db: sqlite3.Connection) -> Conversation:
            head = read_head(db, owner, conversation_id, expected_rev)
            _delete_messages(db, conversation_id, deletion)
            return _store_change(db, head, head_after_deletion(head, deletion))

        return await self._change(owner, conversation_id, job)

    async def merge(self, conversation: Conversation, items: Sequence[Item], turns: Sequence[Turn]) -> MergeResult:
        return await self._change(
            conversation.owner, conversation.id, lambda db: _merge(db, conversation, items, turns)
        )

    async def delete(self, owner: str, conversation_id: str, *, expected_rev: int | None = None) -> None:
        def job(db: sqlite3.Connection) -> None:
            read_head(db, owner, conversation_id, expected_rev)
            # Items refer to each other; deferring the check to the commit makes the order of deletion irrelevant.
            db.execute("PRAGMA defer_foreign_keys = ON")
            db.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

        await self._change(owner, conversation_id, job)

    async def assign_owner(self, owner: str, to: str) -> OwnerAssignment:
        return await self._writer.run(owner, lambda db: assign_owner(db, owner, to))

    async def _change(self, owner: str, conversation_id: str, job: Callable[[sqlite3.Connection], Result]) -> Result:
        """Change one conversation, all or nothing, even if the caller is cancelled."""
        done = self._changes[conversation_id] = self._writer.submit(owner, job)

        def forget(_: object) -> None:
            if self._changes.get(conversation_id) is done:
                del self._changes[conversation_id]

        done.add_done_callback(forget)
        return await asyncio.shield(done)

    async def _read(self, owner: str, conversation_id: str, job: Callable[[sqlite3.Connection], Result]) -> Result:
        """Read one conversation, after the changes of it that were begun before."""
        change = self._changes.get(conversation_id)
        if change is not None:
            await asyncio.wait([change])
        return await self._readers.run(owner, job)

    async def close(self) -> None:
        await asyncio.to_thread(self._readers.close)
        await asyncio.to_thread(self._writer.close)


class SqliteSnapshot:
    """The content of a store file at the time of opening, as a `ConversationSource`.

    A server may write the file meanwhile. Raises: StoreUnusableError, also for the file of an older version.
    """

    def __init__(self, path: Path) -> None:
        self._db = open_to_read(path)
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version != len(MIGRATIONS):
            self._db.close()
            raise StoreUnusableError(
                f"{path} is of an older chatcache (schema {version}): `chatcache serve` migrates it"
            )
        self._db.execute("BEGIN")
        self._db.execute("SELECT 1 FROM conversations").fetchone()  # the first read fixes the snapshot

    async def key_records(self) -> Sequence[KeyRecord]:
        return list_keys(self._db)

    async def list_owners(self) -> Sequence[str]:
        return read_owners(self._db)

    async def list_ids(self, owner: str, limit: int, after: str | None = None) -> Sequence[str]:
        return read_ids(self._db, owner, limit, after)

    async def load(self, owner: str, conversation_id: str) -> ConversationTree:
        return read_tree(self._db, owner, conversation_id)

    async def close(self) -> None:
        self._db.close()


def back_up(path: Path, copy: Path) -> int:
    """Copy the file to the new file `copy`, check the copy, and return its size in bytes.

    The copy holds the state of one moment; writers continue meanwhile. Raises: StoreUnusableError naming the file at
    fault and the reason.
    """
    source = open_to_read(path)
    try:
        target = sqlite3.connect(copy)
        try:
            source.backup(target)  # one read transaction: a writer's commits do not restart it
            target.execute("PRAGMA journal_mode = DELETE")  # one file without -wal and -shm
            _check_copy(target, copy)
        finally:
            target.close()
    except sqlite3.Error as error:
        raise StoreUnusableError(f"{path} cannot be backed up: {error}") from error
    finally:
        source.close()
    return copy.stat().st_size


def read_head(
    db: sqlite3.Connection, owner: str, conversation_id: str, expected_rev: int | None = None
) -> Conversation:
    row = db.execute(
        f"SELECT {CONVERSATION_COLUMNS} FROM conversations WHERE id = ? AND owner = ?", (conversation_id, owner)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"no conversation {conversation_id!r}", param="conversation")
    found = row_to_conversation(row)
    if expected_rev is not None and expected_rev != found.rev:
        raise StaleRevisionError(found, expected_rev)
    return found


def resolve_cursor(db: sqlite3.Connection, owner: str, after: str | None) -> tuple[float, str] | None:
    """Return the list position of `after`. Raises: NotFoundError."""
    if after is None:
        return None
    found = decode_cursor(after)
    if found is None:
        present = read_head(db, owner, after)
        return present.updated_at, present.id
    return found


def list_heads(db: sqlite3.Connection, owner: str, limit: int, after: str | None) -> Sequence[Conversation]:
    where, values = list_condition(owner, resolve_cursor(db, owner, after))
    query = (
        f"SELECT {CONVERSATION_COLUMNS} FROM conversations WHERE {where} ORDER BY updated_at DESC, id DESC LIMIT :limit"
    )
    return tuple(row_to_conversation(row) for row in db.execute(query, values | {"limit": limit}))


def read_ids(db: sqlite3.Connection, owner: str, limit: int, after: str | None) -> Sequence[str]:
    query = "SELECT id FROM conversations WHERE owner = ? AND id > ? ORDER BY id LIMIT ?"
    return tuple(found for (found,) in db.execute(query, (owner, after or "", limit)))


def read_tree(db: sqlite3.Connection, owner: str, conversation_id: str) -> ConversationTree:
    found = read_head(db, owner, conversation_id)
    items = db.execute(
        f"SELECT {ITEM_COLUMNS} FROM items WHERE conversation_id = ? ORDER BY position", (conversation_id,)
    )
    turns = db.execute(f"SELECT {TURN_COLUMNS} FROM turns WHERE conversation_id = ?", (conversation_id,))
    return ConversationTree(found, map(row_to_item, items), map(row_to_turn, turns))


def read_path(
    db: sqlite3.Connection, owner: str, conversation_id: str, end: str | None, limit: int | None
) -> ConversationTree:
    """Read the part of a tree that `ConversationStore.load_path` returns. Raises: NotFoundError."""
    head = read_head(db, owner, conversation_id)
    end = end if end is not None else head.active_leaf
    turn = db.execute("SELECT parent_id FROM turns WHERE id = ? AND conversation_id = ?", (end, conversation_id))
    found = turn.fetchone()
    if found is None:
        return _partial_tree(db, head, _path_items(db, head.id, end, limit))
    condition = "WHERE conversation_id = ? AND response_id = ? ORDER BY position"
    own = [row_to_item(row) for row in db.execute(f"SELECT {ITEM_COLUMNS} FROM items {condition}", (head.id, end))]
    own_ids = {item.id for item in own}
    first = next((item.parent_id for item in own if item.parent_id not in own_ids), found[0] or None)
    return _partial_tree(db, head, (*_path_items(db, head.id, first, limit), *own), end)


def read_items(db: sqlite3.Connection, owner: str, conversation_id: str, query: ItemQuery) -> ConversationTree:
    """Read the page of messages that `ConversationStore.list_items` returns. Raises: NotFoundError."""
    head = read_head(db, owner, conversation_id)
    for name, item_id in (("leaf", query.leaf), ("after", query.start)):
        if item_id is not None:
            _require_item(db, conversation_id, item_id, name)
    limit = query.limit if query.limit is not None else -1
    if query.all_branches:
        sign, order = ("<=", "DESC") if query.is_descending else (">=", "ASC")
        after = f"AND position {sign} (SELECT position FROM items WHERE id = :start)" if query.start is not None else ""
        rows = db.execute(
            f"SELECT {ITEM_COLUMNS} FROM items WHERE conversation_id = :conversation {after} "
            f"ORDER BY position {order} LIMIT :limit",
            {"conversation": head.id, "start": query.start, "limit": limit},
        )
        return _partial_tree(db, head, map(row_to_item, rows), num_stored_items=_num_items(db, head.id))
    leaf = query.leaf if query.leaf is not None else head.active_leaf
    if query.is_descending:
        end = query.start if query.start is not None else leaf
        return _partial_tree(db, head, reversed(_path_items(db, head.id, end, query.limit)))
    values = {"conversation": head.id, "end": leaf, "start": query.start, "limit": limit}
    items = [row_to_item(row) for row in db.execute(_ASCENDING_PATH, values)]
    if query.start is not None and (not items or items[0].id != query.start):
        raise NotFoundError(f"after: this path has no {query.start[:128]!r}", param="after")
    return _partial_tree(db, head, items)


_COLUMNS_OF_PATH = ", ".join(f"i.{column}" for column in ITEM_COLUMNS.split(", "))
_PATH = f"""
    WITH RECURSIVE path (position, parent_id, depth) AS (
        SELECT position, parent_id, 1 FROM items WHERE id = :end AND conversation_id = :conversation
        UNION ALL
        SELECT i.position, i.parent_id, depth + 1 FROM path JOIN items i ON i.id = path.parent_id WHERE depth < :limit
    )
    SELECT {_COLUMNS_OF_PATH} FROM path JOIN items i ON i.position = path.position ORDER BY depth DESC
"""
# The walk up stops at `start`; then the first rows from there on are read.
_ASCENDING_PATH = f"""
    WITH RECURSIVE path (position, id, parent_id, depth) AS (
        SELECT position, id, parent_id, 1 FROM items WHERE id = :end AND conversation_id = :conversation
        UNION ALL
        SELECT i.position, i.id, i.parent_id, depth + 1 FROM path JOIN items i ON i.id = path.parent_id
        WHERE path.id IS NOT :start
    )
    SELECT {_COLUMNS_OF_PATH} FROM (SELECT position, depth FROM path ORDER BY depth DESC LIMIT :limit) page
    JOIN items i ON i.position = page.position ORDER BY page.depth DESC
"""
_UNLIMITED = 2**62


def _path_items(db: sqlite3.Connection, conversation_id: str, end: str | None, limit: int | None) -> tuple[Item, ...]:
    """Return the last `limit` messages of the path to `end`, root first."""
    if end is None or limit == 0:
        return ()
    values = {"conversation": conversation_id, "end": end, "limit": limit if limit is not None else _UNLIMITED}
    return tuple(row_to_item(row) for row in db.execute(_PATH, values))


def _partial_tree(
    db: sqlite3.Connection,
    head: Conversation,
    items: Iterable[Item],
    response_id: str | None = None,
    num_stored_items: int | None = None,
) -> ConversationTree:
    """Return a tree of the given messages, with their responses and the one of the given id."""
    items = tuple(items)
    names = dict.fromkeys(item.response_id for item in items if item.response_id is not None)
    if response_id is not None:
        names[response_id] = None
    query = f"SELECT {TURN_COLUMNS} FROM turns WHERE id = ? AND conversation_id = ?"
    rows = (db.execute(query, (name, head.id)).fetchone() for name in names)
    return ConversationTree(head, items, [row_to_turn(row) for row in rows if row is not None], num_stored_items)


def find_conversation_of(db: sqlite3.Connection, owner: str, member_id: str) -> str:
    row = db.execute(
        "SELECT c.id FROM conversations c JOIN (SELECT conversation_id FROM items WHERE id = :member UNION "
        "SELECT conversation_id FROM turns WHERE id = :member) m ON m.conversation_id = c.id WHERE c.owner = :owner",
        {"member": member_id, "owner": owner},
    ).fetchone()
    if row is None:
        raise NotFoundError(f"no response or message {member_id!r}")
    found: str = row[0]
    return found


def read_owners(db: sqlite3.Connection) -> Sequence[str]:
    """Return every owner of a conversation, in order."""
    return tuple(owner for (owner,) in db.execute("SELECT DISTINCT owner FROM conversations ORDER BY owner"))


def find_claim(db: sqlite3.Connection, owner: str, key: str) -> Claim | None:
    """Return the claim of an idempotency key, or None if it is unknown or expired."""
    row = db.execute(
        "SELECT key, digest, target FROM claims WHERE owner = ? AND key = ? AND expires_at > ?",
        (owner, key, time.time()),
    ).fetchone()
    return Claim(*row) if row is not None else None


def put_claim(db: sqlite3.Connection, owner: str, claim: Claim | None) -> None:
    """Store a claim, if given, and delete expired ones. Raises: IdempotencyConflictError."""
    if claim is None:
        return
    present = find_claim(db, owner, claim.key)
    if present is not None:
        raise IdempotencyConflictError(present)
    now = time.time()
    db.execute("DELETE FROM claims WHERE expires_at <= ?", (now,))
    db.execute(
        "INSERT INTO claims (owner, key, digest, target, expires_at) VALUES (?, ?, ?, ?, ?)",
        (owner, claim.key, claim.digest, claim.target, now + CLAIM_TTL_S),
    )


def fill_reserve(db: sqlite3.Connection) -> None:
    """Write as much as a large request does, to check that the file accepts it.

    It is a claim with an empty key, which no request can use.
    """
    db.execute(
        "INSERT OR REPLACE INTO claims VALUES ('', '', '', zeroblob(?), ?)", (RESERVE_BYTES, time.time() + CLAIM_TTL_S)
    )


def free_reserve(db: sqlite3.Connection) -> None:
    """Delete what `fill_reserve` wrote; the file keeps its size, so the next writes have room."""
    db.execute("DELETE FROM claims WHERE owner = '' AND key = ''")


def _create(db: sqlite3.Connection, conversation: Conversation) -> None:
    insert_conversation(db, conversation)
    index_title(db, conversation.id, conversation.title)


class _Items(NamedTuple):
    """New messages, encoded before the writer thread has to wait for it."""

    rows: Sequence[ItemRow]
    parents: Sequence[str]  # of messages whose parent is not among them
    ids: frozenset[str]

    @classmethod
    def of(cls, items: Sequence[Item]) -> _Items:
        before: set[str] = set()
        parents: dict[str, None] = {}
        for item in items:
            if item.parent_id is not None and item.parent_id not in before:
                parents[item.parent_id] = None
            before.add(item.id)
        return cls([ItemRow.of(item) for item in items], list(parents), frozenset(before))


async def _encoded(items: Sequence[Item]) -> _Items:
    """Encode messages, on a thread if they are many or long."""
    if sum(len(item.text) + len(item.token_ids) + _CHARS_PER_ITEM for item in items) <= _INLINE_CHARS:
        return _Items.of(items)
    return await asyncio.to_thread(_Items.of, items)


def _add(db: sqlite3.Connection, conversation_id: str, items: _Items, turns: Sequence[Turn]) -> None:
    for parent_id in items.parents:
        _require_item(db, conversation_id, parent_id, "parent_id")
    insert_items(db, conversation_id, items.rows)
    for turn in turns:
        put_turn(db, conversation_id, turn)


def _delete_messages(db: sqlite3.Connection, conversation_id: str, deletion: MessageDeletion) -> None:
    db.execute("PRAGMA defer_foreign_keys = ON")  # parents may be deleted before their former children are updated
    inside = "WHERE id = ? AND conversation_id = ?"
    for table, ids in (("items", deletion.removed_items), ("turns", deletion.removed_turns)):
        db.executemany(f"DELETE FROM {table} {inside}", ((each, conversation_id) for each in ids))
    for item in deletion.items:
        move_item(db, conversation_id, item)
    for turn in deletion.turns:
        put_turn(db, conversation_id, turn)


def _merge(
    db: sqlite3.Connection, conversation: Conversation, items: Sequence[Item], turns: Sequence[Turn]
) -> MergeResult:
    holder = db.execute("SELECT owner FROM conversations WHERE id = ?", (conversation.id,)).fetchone()
    if holder is None:
        _create(db, conversation)
        head = conversation
    else:
        head = read_head(db, conversation.owner, conversation.id)
    new_items = [item for item in items if not _is_held(db, "items", head.id, item.id)]
    new_turns = [turn for turn in turns if not _is_held(db, "turns", head.id, turn.id)]
    _add(db, head.id, _Items.of(new_items), new_turns)
    if holder is not None and (new_items or new_turns):
        head = _store_change(db, head, head_after_append(head, conversation.active_leaf))
    return MergeResult(head, holder is None, len(new_items), len(new_turns))


def _is_held(db: sqlite3.Connection, table: str, conversation_id: str, member_id: str) -> bool:
    """Check whether the conversation has that row. Raises: NotFoundError if another one has it."""
    row = db.execute(f"SELECT conversation_id FROM {table} WHERE id = ?", (member_id,)).fetchone()
    if row is not None and row[0] != conversation_id:
        raise NotFoundError(f"conversation {conversation_id!r} has no {member_id!r}")
    return row is not None


def _require_item(db: sqlite3.Connection, conversation_id: str, item_id: str, param: str) -> None:
    row = db.execute("SELECT 1 FROM items WHERE id = ? AND conversation_id = ?", (item_id, conversation_id)).fetchone()
    if row is None:
        raise NotFoundError(f"conversation {conversation_id!r} has no message {item_id[:128]!r}", param=param)


def _require_members(db: sqlite3.Connection, conversation_id: str, member_ids: Sequence[str]) -> None:
    """Raise ConversationBusyError unless all of these messages and responses are stored in the conversation."""
    query = (
        "SELECT count(*) FROM json_each(:members) AS member "
        "WHERE EXISTS (SELECT 1 FROM items WHERE id = member.value AND conversation_id = :conversation) "
        "OR EXISTS (SELECT 1 FROM turns WHERE id = member.value AND conversation_id = :conversation)"
    )
    values = {"members": json.dumps(member_ids), "conversation": conversation_id}
    if db.execute(query, values).fetchone()[0] < len(member_ids):
        raise deleted_meanwhile_error()


def _require_room(db: sqlite3.Connection, conversation_id: str, num_new: int, max_items: int) -> None:
    num_items = _num_items(db, conversation_id)
    if num_items + num_new > max_items:
        raise ConversationFullError(num_items, num_new, max_items)


def _num_items(db: sqlite3.Connection, conversation_id: str) -> int:
    query = "SELECT count(*) FROM items WHERE conversation_id = ?"
    num_items: int = db.execute(query, (conversation_id,)).fetchone()[0]
    return num_items


def _store_change(db: sqlite3.Connection, head: Conversation, changed: Conversation) -> Conversation:
    """Store the new head and, if it changed, the title's index entry."""
    update_conversation(db, changed)
    if changed.title != head.title:
        index_title(db, head.id, changed.title)
    return changed


def open_to_read(path: Path) -> sqlite3.Connection:
    """Return a read-only connection.

    Raises: StoreUnusableError for a file that is not a chatcache store or is of a newer version.
    """
    if not path.is_file():
        raise StoreUnusableError(f"{path}: there is no such file")
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        db = sqlite3.connect(uri, uri=True, timeout=_BACKUP_BUSY_S, isolation_level=None)
    except sqlite3.Error as error:
        raise open_error(path, error) from error
    try:
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
        has_conversations = db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'conversations'").fetchone()
    except sqlite3.Error as error:
        db.close()
        raise StoreUnusableError(f"{path}: {error}") from error
    if version > len(MIGRATIONS) or not has_conversations:
        db.close()
        reason = f"was written by a newer chatcache (schema {version})" if has_conversations else "has no conversations"
        raise StoreUnusableError(f"{path} {reason}")
    return db


def _check_copy(db: sqlite3.Connection, copy: Path) -> None:
    found = [row[0] for row in db.execute("PRAGMA integrity_check(3)")]
    dangling = db.execute("PRAGMA foreign_key_check").fetchone()
    if found != ["ok"] or dangling is not None:
        detail = (
            f"a row of {dangling[0]} has a dangling reference" if found == ["ok"] else " ".join(" ".join(found).split())
        )
        raise StoreUnusableError(f"the copy is damaged, and so is its source ({detail})")
