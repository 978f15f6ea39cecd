"""API keys as they are stored, and what each has used. One contract suite runs against every implementation.

A key is `cck_<its id>_<secret>`. The secret is shown once and never stored: only SHA-256 of the whole key is.

Whose conversations, and whose pages: an owner is a tenant, or one user of it as "tenant/user".
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from chatcache.errors import InvalidRequestError

MAX_NAME_CHARS = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def owner_name(tenant: str, user: str = "") -> str:
    """The owner of a user's conversations; of the tenant's own without a user.

    Raises: InvalidRequestError for a name.
    """
    check_name(tenant, "tenant")
    if not user:
        return tenant
    return f"{tenant}/{check_name(user, 'user')}"


def namespace_of(owner: str) -> str:
    """The tenant of an owner: its users share pages, and nothing else."""
    return owner.partition("/")[0]


def check_name(name: str, param: str) -> str:
    """Raises: InvalidRequestError unless it is 1 to 64 letters, digits, `_`, `.` or `-`."""
    if not _NAME.fullmatch(name):
        message = f"{param} must be 1 to {MAX_NAME_CHARS} letters, digits, '_', '.' or '-', got {name!r}"
        raise InvalidRequestError(message, param=param)
    return name


MAX_LIMIT = 2**53
USAGE_RETENTION_DAYS = 8
DAY_S = 86_400
WRITER_PREFIX = "@"  # before a writer, where its last number stands among a day's tokens by key
_PREFIX = "cck_"
_NUM_ID_BYTES = 8
_NUM_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key, without itself. Limits: None is none. `revoked_at`: since when nobody gets in with it."""

    id: str
    digest: bytes
    tenant: str
    user: str = ""
    name: str = ""
    is_admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    tokens_per_day: int | None = None
    created_at: float = 0.0
    revoked_at: float | None = None

    @property
    def owner(self) -> str:
        """Whose conversations it opens."""
        return owner_name(self.tenant, self.user)


class KeyStore(Protocol):
    """Keys, which are never deleted, and the tokens of each day. Raises: StoreUnavailableError.

    A call that returns has stored what it says, durably.
    """

    async def create(self, record: KeyRecord) -> None: ...

    async def list(self) -> Sequence[KeyRecord]:
        """All of them, revoked ones too, the oldest first."""
        ...

    async def revoke(self, key_id: str, at: float) -> KeyRecord:
        """Let nobody in with it any more; again changes nothing. Raises: NotFoundError."""
        ...

    async def version(self) -> int:
        """Another number whenever `list` would say something else."""
        ...

    async def add_usage(self, day: int, tokens: Mapping[str, int], *, writer: str, number: int) -> None:
        """Count tokens of keys, by id, on a day (`utc_day`). Days long past are forgotten.

        Once for each `number` of a `writer`, which counts up: whoever does not know what became of it calls again.
        """
        ...

    async def usage(self, day: int) -> Mapping[str, int]:
        """The tokens of every key that used any that day, by id."""
        ...


def new_key(
    tenant: str,
    user: str = "",
    name: str = "",
    *,
    is_admin: bool = False,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    max_concurrent: int | None = None,
    tokens_per_day: int | None = None,
) -> tuple[str, KeyRecord]:
    """Make a key: itself, to be shown once, and what is stored of it.

    Raises: InvalidRequestError naming what cannot be.
    """
    owner_name(tenant, user)
    if name:
        check_name(name, "name")
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
        "tokens_per_day": tokens_per_day,
    }
    for field, limit in limits.items():
        if limit is not None and not 1 <= limit <= MAX_LIMIT:
            raise InvalidRequestError(f"{field} must be 1 to {MAX_LIMIT}, got {limit}", param=field)
    key_id = secrets.token_hex(_NUM_ID_BYTES)
    key = f"{_PREFIX}{key_id}_{secrets.token_urlsafe(_NUM_SECRET_BYTES)}"
    record = KeyRecord(
        f"key_{key_id}", key_digest(key), tenant, user, name, is_admin=is_admin, created_at=time.time(), **limits
    )
    return key, record


def key_digest(key: str) -> bytes:
    """What is stored of a key, and compared."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def key_id_of(key: str) -> str | None:
    """The id of the stored key that this would be, or None for a key of another make."""
    if not key.startswith(_PREFIX):
        return None
    return f"key_{key.removeprefix(_PREFIX).partition('_')[0]}"


def utc_day(time_s: float) -> int:
    """The day of a time since 1970, in UTC."""
    return int(time_s // DAY_S)
