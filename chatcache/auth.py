"""API keys, tenants and users: the stored records and the key store contract.

A key is `cck_<its id>_<secret>`. The secret is shown once and never stored; the store keeps the SHA-256 of the whole
key. An owner of conversations is a tenant, or one user of a tenant, written as "tenant/user". One contract test suite
runs against every implementation of `KeyStore`.
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
MAX_LIMIT = 2**53
USAGE_RETENTION_DAYS = 8
DAY_S = 86_400
WRITER_PREFIX = "@"  # marks an entry of the daily usage that is a writer's last `number`
_PREFIX = "cck_"
_NUM_ID_BYTES = 8
_NUM_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A stored API key without its secret. A limit of None means unlimited.

    `revoked_at`: the time since which the server rejects the key.
    """

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
        """The owner of the conversations that this key gives access to."""
        return owner_name(self.tenant, self.user)


class KeyStore(Protocol):
    """API keys, which are never deleted, and the tokens that each key used per day.

    A call that returns has stored its data durably. Raises: StoreUnavailableError.
    """

    async def create(self, record: KeyRecord) -> None: ...

    async def list(self) -> Sequence[KeyRecord]:
        """Return all keys, revoked ones included, oldest first."""
        ...

    async def revoke(self, key_id: str, at: float) -> KeyRecord:
        """Make the server reject the key from `at` on; revoking again changes nothing.

        Raises: NotFoundError.
        """
        ...

    async def version(self) -> int:
        """Return a number that changes whenever the result of `list` changes."""
        ...

    async def add_usage(self, day: int, tokens: Mapping[str, int], *, writer: str, number: int) -> None:
        """Add to the number of tokens that each key id has used on a day (`utc_day`).

        `writer`: the caller's id. `number`: counts its calls, so that a call is applied only once: a writer that does
        not know whether a call succeeded repeats it with the same number. Days older than `USAGE_RETENTION_DAYS` are
        deleted.
        """
        ...

    async def usage(self, day: int) -> Mapping[str, int]:
        """Return the tokens per key id of all keys that used any on that day."""
        ...


def owner_name(tenant: str, user: str = "") -> str:
    """Return the owner name of a user's conversations, or of the tenant's own without a user.

    Raises: InvalidRequestError for a name that is not allowed.
    """
    check_name(tenant, "tenant")
    if not user:
        return tenant
    return f"{tenant}/{check_name(user, 'user')}"


def namespace_of(owner: str) -> str:
    """Return the tenant of an owner. Users of one tenant share KV pages, and nothing else."""
    return owner.partition("/")[0]


def check_name(name: str, param: str) -> str:
    """Return `name` if it is 1 to 64 letters, digits, `_`, `.` or `-`.

    Raises: InvalidRequestError naming `param`.
    """
    if not _NAME.fullmatch(name):
        message = f"{param} must be 1 to {MAX_NAME_CHARS} letters, digits, '_', '.' or '-', got {name!r}"
        raise InvalidRequestError(message, param=param)
    return name


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
    """Create a key and its record.

    Return the key itself, to be shown once, and the record to store.
    Raises: InvalidRequestError naming the invalid field.
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
    """Return the SHA-256 of a key, which is stored and compared in place of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def key_id_of(key: str) -> str | None:
    """Return the id that an API key contains, or None if it does not have the form of a key.

    Whether a key with that id exists is not checked.
    """
    if not key.startswith(_PREFIX):
        return None
    return f"key_{key.removeprefix(_PREFIX).partition('_')[0]}"


def utc_day(time_s: float) -> int:
    """Return the number of the UTC day that contains a Unix time."""
    return int(time_s // DAY_S)
