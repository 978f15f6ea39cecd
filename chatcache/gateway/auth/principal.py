"""The authenticated caller of a request, and session cookies.

A session cookie is signed with the digest of an API key. The server stores no sessions; one ends when its key is
revoked or it expires.
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

COOKIE_NAME = "chatcache_session"
SESSION_LIFETIME_S = 7 * 86_400
_COOKIE_VALUE = re.compile(r"([A-Za-z0-9_]{1,64})\.([0-9]{1,12})\.([0-9a-f]{64})")
_SCOPE_KEY = "chatcache.principal"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one API key; None means unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    tokens_per_day: int | None = None


@dataclass(frozen=True, slots=True)
class Principal:
    """The identity of an API key or session.

    `owner` owns the conversations. `tenant` is the cache namespace, which all users of a tenant share. `expires_at` is
    when a session ends (seconds since 1970); None for an API key.
    """

    key_id: str
    tenant: str
    owner: str
    is_admin: bool = False
    limits: KeyLimits = KeyLimits()
    expires_at: int | None = None


OPEN_SERVER_PRINCIPAL = Principal("", "", "", is_admin=True)  # principal of all requests to a server without API keys


def set_principal(scope: Scope, found: Principal | ChatcacheError) -> None:
    """Store the principal in the ASGI scope, or the error that explains why there is none."""
    scope[_SCOPE_KEY] = found


def current_principal(scope: Scope) -> Principal:
    """Return the principal of the request.

    Raises: the stored error (AuthenticationError, PermissionDeniedError, StoreUnavailableError).
    """
    found = scope.get(_SCOPE_KEY)
    if isinstance(found, Principal):
        return found
    raise found if isinstance(found, ChatcacheError) else AuthenticationError("the request was not authenticated")


def find_principal(scope: Scope) -> Principal | None:
    """Return the principal of the request, or None if it is not authenticated."""
    found = scope.get(_SCOPE_KEY)
    return found if isinstance(found, Principal) else None


def optional_principal(connection: HTTPConnection) -> Principal | None:
    """Return the principal of the connection, or None if it is not authenticated."""
    return find_principal(connection.scope)


def principal_of(connection: HTTPConnection) -> Principal:
    """Return the principal of the connection. Raises: as `current_principal`."""
    return current_principal(connection.scope)


def owner_of(connection: HTTPConnection) -> str:
    """Return the owner of the conversations, "" on an open server. Raises: as `principal_of`."""
    return principal_of(connection).owner


def tenant_of(connection: HTTPConnection) -> str:
    """Return the cache namespace, "" on an open server. Raises: as `principal_of`."""
    return principal_of(connection).tenant


class Session(NamedTuple):
    """Contents of a session cookie. Not authentic until `signature` was compared."""

    key_id: str
    expires_at: int
    signature: str


def parse_session(value: str) -> Session | None:
    """Parse a cookie value; None if it is malformed."""
    found = _COOKIE_VALUE.fullmatch(value)
    return Session(found[1], int(found[2]), found[3]) if found is not None else None


def session_signature(key_id: str, expires_at: int, digest: bytes) -> str:
    return hmac.new(digest, f"chatcache session {key_id} {expires_at}".encode(), "sha256").hexdigest()


def session_cookie_value(key_id: str, expires_at: int, digest: bytes) -> str:
    """Return the signed cookie value."""
    return f"{key_id}.{expires_at}.{session_signature(key_id, expires_at, digest)}"


def set_cookie_header(value: str, max_age_s: int, path: str, *, secure: bool) -> str:
    """Return the Set-Cookie header value.

    HttpOnly hides the cookie from scripts; SameSite=Strict keeps other sites from sending it.
    """
    return f"{COOKIE_NAME}={value}; Max-Age={max_age_s}; Path={path or '/'}; HttpOnly; SameSite=Strict" + (
        "; Secure" if secure else ""
    )
