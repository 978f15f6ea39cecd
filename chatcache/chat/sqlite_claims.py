"""Idempotency keys in the SQLite file, written in the transaction of what they are for."""

from __future__ import annotations

import sqlite3
import time

from chatcache.chat.store import KEEP_CLAIMS_S, Claim, KeyTaken


def find_claim(db: sqlite3.Connection, owner: str, key: str) -> Claim | None:
    """What a key was used for, while that is known."""
    row = db.execute(
        "SELECT key, digest, target FROM claims WHERE owner = ? AND key = ? AND expires_at > ?",
        (owner, key, time.time()),
    ).fetchone()
    return Claim(*row) if row is not None else None


def put_claim(db: sqlite3.Connection, owner: str, claim: Claim | None) -> None:
    """Use a key, if there is one, and forget those that are old. Raises: KeyTaken."""
    if claim is None:
        return
    present = find_claim(db, owner, claim.key)
    if present is not None:
        raise KeyTaken(present)
    now = time.time()
    db.execute("DELETE FROM claims WHERE expires_at <= ?", (now,))
    db.execute(
        "INSERT INTO claims (owner, key, digest, target, expires_at) VALUES (?, ?, ?, ?, ?)",
        (owner, claim.key, claim.digest, claim.target, now + KEEP_CLAIMS_S),
    )


def try_writing(db: sqlite3.Connection) -> None:
    """Write something, to see whether that can be done. No claim has an empty key."""
    db.execute("INSERT OR REPLACE INTO claims VALUES ('', '', '', '', ?)", (time.time(),))
