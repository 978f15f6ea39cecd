"""Who asks: what the guard found out about a request or a socket, and no more than that."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import Scope

from chatcache.errors import ChatcacheError
from chatcache.gateway.errors import Unauthorized

_IN_SCOPE = "chatcache.principal"


@dataclass(frozen=True, slots=True)
class Limits:
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
    limits: Limits = Limits()
    expires_at: int | None = None


EVERYBODY = Principal("", "", "", is_admin=True)  # on an open server


def admit(scope: Scope, found: Principal | ChatcacheError) -> None:
    """Note who a connection is of, or why nobody: doors that are open to all let those in too."""
    scope[_IN_SCOPE] = found


def who(scope: Scope) -> Principal:
    """Who asks. Raises: why nobody is known to (Unauthorized, Forbidden, StoreUnavailable)."""
    found = scope.get(_IN_SCOPE)
    if isinstance(found, Principal):
        return found
    raise found if isinstance(found, ChatcacheError) else Unauthorized("nobody looked at who asks")


def admitted(scope: Scope) -> Principal | None:
    """Who a connection is of, or None for somebody without a key, or whom nobody has let in."""
    found = scope.get(_IN_SCOPE)
    return found if isinstance(found, Principal) else None


def signed_in(connection: HTTPConnection) -> Principal | None:
    """Who asks, or None for somebody without a key."""
    return admitted(connection.scope)


def principal_of(connection: HTTPConnection) -> Principal:
    """Who asks. Raises: as `who`."""
    return who(connection.scope)


def owner_of(connection: HTTPConnection) -> str:
    """Whose conversations are meant; "" on an open server. Raises: as `who`."""
    return principal_of(connection).owner


def tenant_of(connection: HTTPConnection) -> str:
    """The namespace of pages; "" on an open server. Raises: as `who`."""
    return principal_of(connection).tenant
