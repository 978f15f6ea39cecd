"""Keys in the SQLite file, beside the conversations."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from chatcache.chat.keys import KEEP_USAGE_DAYS, WRITER, KeyRecord
from chatcache.chat.sqlite_writer import SqliteWriter
from chatcache.errors import NotFound

_LIMITS = "requests_per_minute, tokens_per_minute, max_concurrent, tokens_per_day"
_COLUMNS = f"id, digest, tenant, user, name, is_admin, {_LIMITS}, created_at, revoked_at"
_MARKS = ", ".join("?" * len(_COLUMNS.split(",")))


class SqliteKeys:
    """`KeyStore` on a file that somebody else opens and closes."""

    def __init__(self, writer: SqliteWriter) -> None:
        self._writer = writer

    async def create(self, record: KeyRecord) -> None:
        row = tuple(getattr(record, column) for column in _COLUMNS.split(", "))
        await self._writer.run(lambda db: db.execute(f"INSERT INTO keys ({_COLUMNS}) VALUES ({_MARKS})", row).rowcount)

    async def list(self) -> Sequence[KeyRecord]:
        return await self._writer.run(listed)

    async def revoke(self, key_id: str, at: float) -> KeyRecord:
        def job(db: sqlite3.Connection) -> KeyRecord:
            db.execute("UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (at, key_id))
            row = db.execute(f"SELECT {_COLUMNS} FROM keys WHERE id = ?", (key_id,)).fetchone()
            if row is None:
                raise NotFound(f"no key {key_id!r}", param="id")
            return _record(row)

        return await self._writer.run(job)

    async def version(self) -> int:
        # Keys are never deleted, and revoked for ever: these counts only grow.
        return await self._writer.run(
            lambda db: int(db.execute("SELECT count(*) + count(revoked_at) FROM keys").fetchone()[0])
        )

    async def add_usage(self, day: int, tokens: Mapping[str, int], *, writer: str, number: int) -> None:
        rows = [(day, key_id, count) for key_id, count in tokens.items()]
        mark = (day, WRITER + writer, number)

        def job(db: sqlite3.Connection) -> None:
            if db.execute("SELECT 1 FROM usage WHERE day = ? AND key_id = ? AND tokens >= ?", mark).fetchone():
                return
            db.execute("INSERT OR REPLACE INTO usage (day, key_id, tokens) VALUES (?, ?, ?)", mark)
            db.executemany(
                "INSERT INTO usage (day, key_id, tokens) VALUES (?, ?, ?)"
                " ON CONFLICT (day, key_id) DO UPDATE SET tokens = tokens + excluded.tokens",
                rows,
            )
            db.execute("DELETE FROM usage WHERE day < ?", (day - KEEP_USAGE_DAYS,))

        await self._writer.run(job)

    async def usage(self, day: int) -> Mapping[str, int]:
        query = "SELECT key_id, tokens FROM usage WHERE day = ? AND key_id NOT LIKE ?"
        return await self._writer.run(lambda db: dict(db.execute(query, (day, f"{WRITER}%")).fetchall()))


def listed(db: sqlite3.Connection) -> Sequence[KeyRecord]:
    return [_record(row) for row in db.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY created_at, id")]


def _record(row: tuple[object, ...]) -> KeyRecord:
    values = dict(zip(_COLUMNS.split(", "), row, strict=True))
    return KeyRecord(**(values | {"is_admin": bool(values["is_admin"])}))  # type: ignore[arg-type]
