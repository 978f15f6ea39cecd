"""Who asks: what the guard found out about a request or a socket, and no more than that.

The browser's session: a cookie signed with the digest of a key. Nothing is stored; it dies with the key.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import HTTPConnection
from starlette.types import Scope

from chatcache.errors import ChatcacheError
from chatcache.gateway.errors import AuthenticationError

_IN_SCOPE = "chatcache.principal"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may take; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    tokens_per_day: int | None = None


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a key stands for.

    `owner` is whose conversations, `tenant` the namespace of pages: those of a tenant's users are shared. `expires_at`:
    until when (since 1970) a session is good; None for a key itself.
    """

    key_id: str
    tenant: str
    owner: str
    is_admin: bool = False
    limits: KeyLimits = KeyLimits()
    expires_at: int | None = None


OPEN_SERVER_PRINCIPAL = Principal("", "", "", is_admin=True)  # on an open server


def set_principal(scope: Scope, found: Principal | ChatcacheError) -> None:
    """Note who a connection is of, or why nobody: doors that are open to all let those in too."""
    scope[_IN_SCOPE] = found


def current_principal(scope: Scope) -> Principal:
    """Who asks. Raises: why nobody is known to (AuthenticationError, PermissionDeniedError, StoreUnavailableError)."""
    found = scope.get(_IN_SCOPE)
    if isinstance(found, Principal):
        return found
    raise found if isinstance(found, ChatcacheError) else AuthenticationError("nobody looked at who asks")


def find_principal(scope: Scope) -> Principal | None:
    """Who a connection is of, or None for somebody without a key, or whom nobody has let in."""
    found = scope.get(_IN_SCOPE)
    return found if isinstance(found, Principal) else None


def optional_principal(connection: HTTPConnection) -> Principal | None:
    """Who asks, or None for somebody without a key."""
    return find_principal(connection.scope)


def principal_of(connection: HTTPConnection) -> Principal:
    """Who asks. Raises: as `current_principal`."""
    return current_principal(connection.scope)


def owner_of(connection: HTTPConnection) -> str:
    """Whose conversations are meant; "" on an open server. Raises: as `current_principal`."""
    return principal_of(connection).owner


def tenant_of(connection: HTTPConnection) -> str:
    """The namespace of pages; "" on an open server. Raises: as `current_principal`."""
    return principal_of(connection).tenant


COOKIE_NAME = "chatcache_session"
SESSION_LIFETIME_S = 7 * 86_400
_VALUE = re.compile(r"([A-Za-z0-9_]{1,64})\.([0-9]{1,12})\.([0-9a-f]{64})")


class Session(NamedTuple):
    """What a cookie says; true only with its key's `signature`."""

    key_id: str
    expires_at: int
    signature: str


def parse_session(value: str) -> Session | None:
    """What the cookie says, or None for what no server has made."""
    found = _VALUE.fullmatch(value)
    return Session(found[1], int(found[2]), found[3]) if found is not None else None


def session_signature(key_id: str, expires_at: int, digest: bytes) -> str:
    return hmac.new(digest, f"chatcache session {key_id} {expires_at}".encode(), "sha256").hexdigest()


def session_cookie_value(key_id: str, expires_at: int, digest: bytes) -> str:
    """The value of a cookie."""
    return f"{key_id}.{expires_at}.{session_signature(key_id, expires_at, digest)}"


def set_cookie_header(value: str, max_age_s: int, path: str, *, secure: bool) -> str:
    """The header. No script sees the cookie, and no other site's page sends it."""
    return f"{COOKIE_NAME}={value}; Max-Age={max_age_s}; Path={path or '/'}; HttpOnly; SameSite=Strict" + (
        "; Secure" if secure else ""
    )
