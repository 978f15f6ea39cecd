"""Types of the route table, and Starlette routes built from it, with permission checks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Mount, Route, WebSocketRoute, request_response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from chatcache.errors import NotFoundError
from chatcache.gateway.auth.principal import current_principal
from chatcache.gateway.errors import PermissionDeniedError
from chatcache.gateway.schemas.server import Error

# open: any client. key: a valid key or session, or a server without keys. admin: a key made with --admin.
Permission = Literal["open", "key", "admin"]
Handler = Callable[[Request], Awaitable[Response]]
SSE = "text/event-stream"


class Body(NamedTuple):
    """A JSON request body: one object with the fields of several structs."""

    name: str
    kinds: tuple[type[msgspec.Struct], ...]
    required: bool = True


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path: handler, required permission, types of request and response.

    `body`: the JSON request body; `upload_types`: media types of a body that is a file instead.
    `response`: type of the body with status 200, None for text of `media_type`; `text_types`: further media types.
    `stream`: type of each server-sent event, or of each line of another `stream_media_type`, where the client may ask
    for a stream.
    `error`: the error envelope; `errors`: statuses with it, besides those that every route has; `error_bodies`: larger
    error bodies.
    `idempotent`: the route reads the `Idempotency-Key` header.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    permission: Permission
    summary: str
    body: Body | None = None
    query: type[msgspec.Struct] | None = None
    upload_types: tuple[str, ...] = ()
    response: object = None
    media_type: str = "application/json"
    text_types: tuple[str, ...] = ()
    stream: object = None
    stream_media_type: str = SSE
    error: type[msgspec.Struct] = Error
    errors: tuple[int, ...] = ()
    error_bodies: Mapping[int, object] = field(default_factory=dict)
    idempotent: bool = False


@dataclass(frozen=True, slots=True)
class Socket:
    """A WebSocket: handler, required permission, and the accepted messages by their `type`."""

    path: str
    handler: Callable[[WebSocket], Awaitable[None]]
    permission: Permission
    summary: str
    messages: Mapping[str, Body]


@dataclass(frozen=True, slots=True)
class PageFiles:
    """A route that serves files of the chat page. It is open and not in the OpenAPI document."""

    route: Route | Mount

    @property
    def path(self) -> str:
        return self.route.path

    @property
    def permission(self) -> Permission:
        return "open"


Entry = Operation | Socket | PageFiles


class MethodDispatcher:
    """ASGI app of one path: calls the handler of the request's method, or raises 405.

    One Starlette route serves all methods of a path. Two routes, one per method, would let the wrong method of
    `/v1/conversations/export` fall through to `/v1/conversations/{id}`.
    """

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.methods = tuple(handlers)
        self._apps = {method: request_response(handler) for method, handler in handlers.items()}
        if "GET" in self._apps:
            self._apps.setdefault("HEAD", self._apps["GET"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._apps.get(scope["method"])
        if app is None:
            raise HTTPException(405, headers={"Allow": ", ".join(self._apps)})
        await app(scope, receive, send)


class ProtectedRoute(BaseRoute):
    """A route that checks the required permission before anything else, also before the method."""

    def __init__(self, route: Route | WebSocketRoute | Mount, permission: Permission) -> None:
        self.route = route
        self.path = route.path
        self.permission = permission

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self.route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the permission, then run the route.

        Raises: AuthenticationError, PermissionDeniedError, StoreUnavailableError.
        """
        if self.permission != "open":
            principal = current_principal(scope)
            if self.permission == "admin" and not principal.is_admin:
                raise PermissionDeniedError(f"{self.path} is for keys made with --admin", code="admin_only")
        await self.route.handle(scope, receive, send)


class UnknownPath:
    """ASGI app for paths without a route.

    Clients without a valid key get 401, so they cannot probe paths.
    """

    def __init__(self, not_found: ASGIApp) -> None:
        self._not_found = not_found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raise 404 for a client with a valid key.

        Raises: AuthenticationError, PermissionDeniedError, StoreUnavailableError; NotFoundError for a WebSocket, which
        Starlette would only close.
        """
        current_principal(scope)
        if scope["type"] == "websocket":
            raise NotFoundError("no WebSocket is served here")
        await self._not_found(scope, receive, send)


def build_routes(entries: Iterable[Entry]) -> Sequence[ProtectedRoute]:
    """Build the application's routes. Literal path segments match before parameters.

    Raises: ValueError if two methods of one path require different permissions.
    """
    routes: list[ProtectedRoute] = []
    methods: dict[str, dict[str, Handler]] = defaultdict(dict)
    permissions: dict[str, Permission] = {}
    for entry in entries:
        if isinstance(entry, Operation):
            if permissions.setdefault(entry.path, entry.permission) != entry.permission:
                raise ValueError(f"the methods of {entry.path} require different permissions")
            methods[entry.path][entry.method] = entry.handler
        elif isinstance(entry, Socket):
            routes.append(ProtectedRoute(WebSocketRoute(entry.path, entry.handler), entry.permission))
        else:
            routes.append(ProtectedRoute(entry.route, entry.permission))
    for path, handlers in methods.items():
        routes.append(ProtectedRoute(Route(path, MethodDispatcher(handlers)), permissions[path]))
    return sorted(routes, key=lambda route: ["{" in segment for segment in route.path.split("/")])
