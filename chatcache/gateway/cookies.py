"""The browser's session: a cookie signed with the digest of a key. Nothing is stored; it dies with the key."""

from __future__ import annotations

import hmac
import re
from typing import NamedTuple

NAME = "chatcache_session"
LIFE_S = 7 * 86_400
_VALUE = re.compile(r"([A-Za-z0-9_]{1,64})\.([0-9]{1,12})\.([0-9a-f]{64})")


class Session(NamedTuple):
    """What a cookie says; true only with its key's `signature`."""

    key_id: str
    expires_at: int
    signature: str


def read_session(value: str) -> Session | None:
    """What the cookie says, or None for what no server has made."""
    found = _VALUE.fullmatch(value)
    return Session(found[1], int(found[2]), found[3]) if found is not None else None


def signature(key_id: str, expires_at: int, digest: bytes) -> str:
    return hmac.new(digest, f"chatcache session {key_id} {expires_at}".encode(), "sha256").hexdigest()


def signed(key_id: str, expires_at: int, digest: bytes) -> str:
    """The value of a cookie."""
    return f"{key_id}.{expires_at}.{signature(key_id, expires_at, digest)}"


def set_cookie(value: str, max_age_s: int, path: str, *, secure: bool) -> str:
    """The header. No script sees the cookie, and no other site's page sends it."""
    return f"{NAME}={value}; Max-Age={max_age_s}; Path={path or '/'}; HttpOnly; SameSite=Strict" + (
        "; Secure" if secure else ""
    )
