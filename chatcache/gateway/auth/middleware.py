"""Host and Origin checks, authentication and revocation, for HTTP and WebSocket.

The route table (`gateway.routes`) lists the permission that each route requires. When a key is revoked while its
requests run, a request without a response yet gets a 401, and a stream ends with an error event.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatcache.config import ServerConfig
from chatcache.errors import ChatcacheError
from chatcache.gateway.api.sse import EventStream, stream_of
from chatcache.gateway.auth.keys import ApiKeyCache
from chatcache.gateway.auth.principal import (
    COOKIE_NAME,
    OPEN_SERVER_PRINCIPAL,
    Principal,
    Session,
    current_principal,
    parse_session,
    set_principal,
)
from chatcache.gateway.errors import PermissionDeniedError, key_revoked_error

KEY_PROTOCOL = "openai-insecure-api-key."
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_HOST = re.compile(r"(?:\[(?P<ip>[0-9a-f:.]+)\]|(?P<name>[^\s:\[\]/?#@\\]+))(?::[0-9]{1,5})?")
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


class AuthenticationMiddleware:
    """Reject foreign hosts and origins, then authenticate the request and set its principal.

    Only the principal reaches the application, never the key. An authentication error is stored instead of raised,
    because public routes accept requests without a key. Raises: PermissionDeniedError.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, key_cache: ApiKeyCache) -> None:
        self._app = app
        self._key_cache = key_cache
        self._hosts = frozenset(host.lower() for host in (*_LOOPBACK_HOSTS, *config.allowed_hosts))
        self._any_host = "*" in self._hosts
        # DNS rebinding sends a host name, never an address: a public bind can accept any address.
        self._any_address = _is_wildcard(config.host)
        if not self._any_address:
            self._hosts |= {config.host.lower()}
        self._origins = frozenset(origin.lower().rstrip("/") for origin in config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            self._check_host(headers)
            self._check_origin(headers)
            try:
                set_principal(scope, self._principal(scope, headers))
            except ChatcacheError as error:  # raised later, by routes that require a principal
                set_principal(scope, error)
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        given = headers.getlist("host")
        name = _host_name(given[0]) if len(given) == 1 else ""
        if self._any_host or name in self._hosts or (self._any_address and _is_address(name)):
            return
        raise PermissionDeniedError(
            "this Host is not served here; allow it with --allowed-host", code="host_not_allowed"
        )

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or origin.lower().rstrip("/") in self._origins:
            return
        if _netloc(origin) == headers.get("host", "").lower():
            return
        raise PermissionDeniedError(
            "this Origin is not allowed; allow it with --cors-origin", code="origin_not_allowed"
        )

    def _principal(self, scope: Scope, headers: Headers) -> Principal:
        """Authenticate by API key or session cookie.

        Raises: AuthenticationError, PermissionDeniedError, StoreUnavailableError.
        """
        if self._key_cache.is_open:
            return OPEN_SERVER_PRINCIPAL
        offered = read_api_key(scope, headers)
        if offered is not None:
            return self._key_cache.authenticate_key(offered)
        session = read_session_cookie(headers)
        if session is None:
            return self._key_cache.authenticate_without_key()
        principal = self._key_cache.authenticate_session(session)
        # Browsers attach the cookie to requests of any page: unsafe methods need this server's own Origin.
        if (scope["type"] == "websocket" or scope["method"] not in _SAFE) and not _is_same_origin(headers):
            raise PermissionDeniedError("a session needs the Origin of this server's page", code="origin_not_allowed")
        return principal


def read_session_cookie(headers: Headers) -> Session | None:
    """Parse the session cookie; None if it is absent or malformed."""
    return parse_session(cookie_parser(headers.get("cookie", "")).get(COOKIE_NAME, ""))


def read_api_key(scope: Scope, headers: Headers) -> str | None:
    """Read the API key, unchecked.

    It is in the Authorization header, in x-api-key (Anthropic's clients) or in the WebSocket subprotocols.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    if key := headers.get("x-api-key", "").strip():
        return key
    if scope["type"] == "websocket":
        offered: list[str] = scope.get("subprotocols", [])
        for protocol in offered:
            if protocol.startswith(KEY_PROTOCOL):
                return protocol.removeprefix(KEY_PROTOCOL)
    return None


def _is_same_origin(headers: Headers) -> bool:
    origin = headers.get("origin")
    if origin is not None:
        return _netloc(origin) == headers.get("host", "").lower()
    return headers.get("sec-fetch-site") == "same-origin"  # browsers do not let pages set this header


def _netloc(origin: str) -> str | None:
    """Host and port of an Origin header in lower case; None if it names no host."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:  # unbalanced IPv6 brackets
        return None


def _host_name(host: str) -> str:
    """Host name of a Host header in lower case, without port and IPv6 brackets.

    "" for an invalid header.
    """
    found = _HOST.fullmatch(host.strip().lower())
    return (found["ip"] or found["name"] or "") if found is not None else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_wildcard(host: str) -> bool:
    return host in ("", "*") or (_is_address(host) and ipaddress.ip_address(host).is_unspecified)


class RevocationMiddleware:
    """End HTTP requests whose key is revoked while they run.

    The application sees a disconnected client. WebSocket connections watch for revocation themselves.
    """

    def __init__(self, app: ASGIApp, key_cache: ApiKeyCache) -> None:
        self._app = app
        self._key_cache = key_cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            principal = current_principal(scope)
        except ChatcacheError:  # no key, so nothing to revoke
            await self._app(scope, receive, send)
            return
        await self._run(principal, scope, receive, send)

    async def _run(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        ended: asyncio.Event = asyncio.Event()
        tracked = _TrackedSend(send)
        with self._key_cache.watch_revocation(principal, ended.set):
            try:
                await self._app(scope, _RevocableReceive(receive, ended), tracked)
            except ClientDisconnect:
                if not ended.is_set():
                    raise
                if not tracked.has_begun:
                    raise key_revoked_error() from None
            if ended.is_set():
                await tracked.end(stream_of(scope))


class _RevocableReceive:
    """ASGI `receive` that reports a disconnect when the API key is revoked.

    It does so only after the whole request body was received.
    """

    def __init__(self, receive: Receive, revoked: asyncio.Event) -> None:
        self._receive = receive
        self._revoked = revoked
        self._is_whole = False

    async def __call__(self) -> Message:
        if not self._is_whole:
            message = await self._receive()
            self._is_whole = not message.get("more_body", False)
            return message
        tasks = [asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._revoked.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            received = tasks[0]
            return received.result() if received.done() else {"type": "http.disconnect"}  # type: ignore[return-value]
        finally:
            for task in tasks:
                task.cancel()


class _TrackedSend:
    """`send` that records whether the response has started and ended."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_ended = False
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
        elif not message.get("more_body", False):
            self._has_ended = True
        await self._send(message)

    async def end(self, stream: EventStream | None) -> None:
        """End a response that has started; a stream gets a final error event."""
        if self.has_begun and not self._has_ended:
            last = stream.closing_frame(key_revoked_error()) if stream is not None else b""
            await self({"type": "http.response.body", "body": last, "more_body": False})
