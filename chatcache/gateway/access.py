"""What each route wants of whoever calls it. A route that is not in the table is not served: default deny.

open    anybody, with or without a key
key     somebody: a valid key or session, or an open server
admin   a key that may look after the server
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from chatcache.errors import NotFound
from chatcache.gateway.errors import Forbidden
from chatcache.gateway.principal import who

Need = Literal["open", "key", "admin"]

ACCESS: Mapping[str, Need] = {
    "/": "open",
    "/assets": "open",
    "/{file}": "open",
    "/livez": "open",
    "/readyz": "open",
    "/health": "open",
    "/version": "open",
    "/openapi.json": "open",
    "/metrics": "admin",
    "/tokenize": "key",
    "/detokenize": "key",
    "/v1/session": "open",  # the ways in and out; the handlers ask for the key
    "/v1/models": "key",
    "/v1/models/{id:path}": "key",
    "/v1/chat/completions": "key",
    "/v1/completions": "key",
    "/v1/responses": "key",
    "/v1/responses/input_tokens": "key",
    "/v1/responses/{id}": "key",
    "/v1/responses/{id}/cancel": "key",
    "/v1/responses/{id}/input_items": "key",
    "/v1/cache/explain": "key",
    "/v1/cache/accounts": "key",
    "/v1/cache/map": "key",
    "/v1/cache/warmth": "key",
    "/v1/conversations": "key",
    "/v1/conversations/export": "key",
    "/v1/conversations/import": "key",
    "/v1/conversations/{id}": "key",
    "/v1/conversations/{id}/export": "key",
    "/v1/conversations/{id}/title": "key",
    "/v1/conversations/{id}/items": "key",
    "/v1/conversations/{id}/items/{item_id}": "key",
    "/v1/conversations/{id}/items/{item_id}/tokens": "key",
    "/v1/conversations/{id}/items/{item_id}/tokens/{index}": "key",
}


class Protected(BaseRoute):
    """A route behind what it needs, which is looked at before anything else of it: methods too."""

    def __init__(self, route: BaseRoute, need: Need) -> None:
        self.route = route
        self.need = need
        self.path: str = getattr(route, "path", "")

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self.route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: Unauthorized, Forbidden, StoreUnavailable."""
        if self.need != "open":
            principal = who(scope)
            if self.need == "admin" and not principal.is_admin:
                raise Forbidden(f"{self.path} is for keys made with --admin", code="admin_only")
        await self.route.handle(scope, receive, send)


class Unmatched:
    """What no route is. What is here and what is not, strangers are not told."""

    def __init__(self, not_found: ASGIApp) -> None:
        self._not_found = not_found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: Unauthorized, Forbidden, StoreUnavailable; NotFound for a WebSocket, which else just ends."""
        who(scope)
        if scope["type"] == "websocket":
            raise NotFound("no WebSocket is served here")
        await self._not_found(scope, receive, send)


def protected(routes: Iterable[BaseRoute]) -> list[BaseRoute]:
    """Every route behind what the table says. Raises: LookupError for one of which it says nothing."""
    return [Protected(route, _need_of(route)) for route in routes]


def _need_of(route: BaseRoute) -> Need:
    path = getattr(route, "path", None)
    if not isinstance(path, str) or path not in ACCESS:
        raise LookupError(f"who may use {path or route!r} is not said in gateway/access.py")
    return ACCESS[path]
