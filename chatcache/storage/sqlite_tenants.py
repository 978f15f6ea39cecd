"""Data of tenants in the SQLite file besides conversations: API keys, their usage, and saved prompts."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from chatcache.auth import USAGE_RETENTION_DAYS, WRITER_PREFIX, KeyRecord
from chatcache.conversations.store import (
    MAX_SAVED_PROMPTS,
    PromptExistsError,
    PromptLibraryFullError,
    SavedPrompt,
    unknown_prompt,
)
from chatcache.errors import NotFoundError
from chatcache.storage.sqlite_threads import SqliteThread, SqliteWriter

SERVER = "\0server"  # the owner of jobs that are not of one tenant: keys, checkpoints, health checks
_LIMITS = "requests_per_minute, tokens_per_minute, max_concurrent, tokens_per_day"
_COLUMNS = f"id, digest, tenant, user, name, is_admin, {_LIMITS}, created_at, revoked_at"
_MARKS = ", ".join("?" * len(_COLUMNS.split(",")))
_PROMPT_COLUMNS = "name, text, description, created_at, updated_at"


class SqliteKeys:
    """`KeyStore` on a file that the caller opens and closes."""

    def __init__(self, writer: SqliteWriter) -> None:
        self._writer = writer

    async def create(self, record: KeyRecord) -> None:
        row = tuple(getattr(record, column) for column in _COLUMNS.split(", "))
        await self._writer.run(
            SERVER, lambda db: db.execute(f"INSERT INTO keys ({_COLUMNS}) VALUES ({_MARKS})", row).rowcount
        )

    async def list(self) -> Sequence[KeyRecord]:
        return await self._writer.run(SERVER, list_keys)

    async def revoke(self, key_id: str, at: float) -> KeyRecord:
        def job(db: sqlite3.Connection) -> KeyRecord:
            db.execute("UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (at, key_id))
            row = db.execute(f"SELECT {_COLUMNS} FROM keys WHERE id = ?", (key_id,)).fetchone()
            if row is None:
                raise NotFoundError(f"no key {key_id!r}", param="id")
            return _record(row)

        return await self._writer.run(SERVER, job)

    async def version(self) -> int:
        # Keys are never deleted and never un-revoked: these counts only grow.
        return await self._writer.run(
            SERVER, lambda db: int(db.execute("SELECT count(*) + count(revoked_at) FROM keys").fetchone()[0])
        )

    async def add_usage(self, day: int, tokens: Mapping[str, int], *, writer: str, number: int) -> None:
        rows = [(day, key_id, count) for key_id, count in tokens.items()]
        mark = (day, WRITER_PREFIX + writer, number)

        def job(db: sqlite3.Connection) -> None:
            if db.execute("SELECT 1 FROM usage WHERE day = ? AND key_id = ? AND tokens >= ?", mark).fetchone():
                return
            db.execute("INSERT OR REPLACE INTO usage (day, key_id, tokens) VALUES (?, ?, ?)", mark)
            db.executemany(
                "INSERT INTO usage (day, key_id, tokens) VALUES (?, ?, ?)"
                " ON CONFLICT (day, key_id) DO UPDATE SET tokens = tokens + excluded.tokens",
                rows,
            )
            db.execute("DELETE FROM usage WHERE day < ?", (day - USAGE_RETENTION_DAYS,))

        await self._writer.run(SERVER, job)

    async def usage(self, day: int) -> Mapping[str, int]:
        query = "SELECT key_id, tokens FROM usage WHERE day = ? AND key_id NOT LIKE ?"
        return await self._writer.run(SERVER, lambda db: dict(db.execute(query, (day, f"{WRITER_PREFIX}%")).fetchall()))


class SqliteSavedPrompts:
    """`SavedPromptStore` on a file that the caller opens and closes."""

    def __init__(self, writer: SqliteWriter, readers: SqliteThread) -> None:
        self._writer = writer
        self._readers = readers

    async def list(self, tenant: str) -> Sequence[SavedPrompt]:
        query = f"SELECT {_PROMPT_COLUMNS} FROM prompts WHERE tenant = ? ORDER BY name"
        return await self._readers.run(
            tenant, lambda db: tuple(SavedPrompt(*row) for row in db.execute(query, (tenant,)))
        )

    async def get(self, tenant: str, name: str) -> SavedPrompt:
        return await self._readers.run(tenant, lambda db: _read_prompt(db, tenant, name))

    async def create(self, tenant: str, prompt: SavedPrompt) -> None:
        def job(db: sqlite3.Connection) -> None:
            _require_unused(db, tenant, prompt.name)
            count = db.execute("SELECT count(*) FROM prompts WHERE tenant = ?", (tenant,)).fetchone()[0]
            if count >= MAX_SAVED_PROMPTS:
                raise PromptLibraryFullError(count)
            _put_prompt(db, tenant, prompt)

        await self._writer.run(tenant, job)

    async def update(
        self,
        tenant: str,
        name: str,
        *,
        new_name: str | None = None,
        text: str | None = None,
        description: str | None = None,
    ) -> SavedPrompt:
        def job(db: sqlite3.Connection) -> SavedPrompt:
            present = _read_prompt(db, tenant, name)
            changed = present.changed(new_name, text, description)
            if changed.name != name:
                _require_unused(db, tenant, changed.name)
                _delete_prompt(db, tenant, name)
            _put_prompt(db, tenant, changed)
            return changed

        return await self._writer.run(tenant, job)

    async def delete(self, tenant: str, name: str) -> None:
        def job(db: sqlite3.Connection) -> None:
            if not _delete_prompt(db, tenant, name):
                raise unknown_prompt(name)

        await self._writer.run(tenant, job)


def list_keys(db: sqlite3.Connection) -> Sequence[KeyRecord]:
    return [_record(row) for row in db.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY created_at, id")]


def _record(row: tuple[object, ...]) -> KeyRecord:
    values = dict(zip(_COLUMNS.split(", "), row, strict=True))
    return KeyRecord(**(values | {"is_admin": bool(values["is_admin"])}))  # type: ignore[arg-type]


def _read_prompt(db: sqlite3.Connection, tenant: str, name: str) -> SavedPrompt:
    row = db.execute(f"SELECT {_PROMPT_COLUMNS} FROM prompts WHERE tenant = ? AND name = ?", (tenant, name)).fetchone()
    if row is None:
        raise unknown_prompt(name)
    return SavedPrompt(*row)


def _require_unused(db: sqlite3.Connection, tenant: str, name: str) -> None:
    if db.execute("SELECT 1 FROM prompts WHERE tenant = ? AND name = ?", (tenant, name)).fetchone():
        raise PromptExistsError(name)


def _put_prompt(db: sqlite3.Connection, tenant: str, prompt: SavedPrompt) -> None:
    row = (tenant, prompt.name, prompt.text, prompt.description, prompt.created_at, prompt.updated_at)
    db.execute(f"INSERT OR REPLACE INTO prompts (tenant, {_PROMPT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", row)


def _delete_prompt(db: sqlite3.Connection, tenant: str, name: str) -> bool:
    """Delete a prompt; return whether it existed."""
    return db.execute("DELETE FROM prompts WHERE tenant = ? AND name = ?", (tenant, name)).rowcount > 0
