"""Who speaks: Host and Origin allow-lists, then keys and sessions. One answer for HTTP and WebSocket.

What each route wants of them is `access.py`'s affair.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from chatcache.config import ServerConfig
from chatcache.errors import ChatcacheError
from chatcache.gateway.cookies import NAME, Session, read_session
from chatcache.gateway.errors import Forbidden
from chatcache.gateway.keyring import Keyring
from chatcache.gateway.principal import EVERYBODY, Principal, admit

KEY_PROTOCOL = "openai-insecure-api-key."
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_HOST = re.compile(r"(?:\[(?P<ip>[0-9a-f:.]+)\]|(?P<name>[^\s:\[\]/?#@\\]+))(?::[0-9]{1,5})?")
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


class Guard:
    """Refuses foreign hosts and origins before routing. Raises: Forbidden (the request context makes it an answer).

    Sets who asks (`principal.who`): derived from the key, so that the key itself goes no further.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring
        self._hosts = frozenset(host.lower() for host in (*_LOOPBACK_HOSTS, *config.allowed_hosts))
        self._any_host = "*" in self._hosts
        # A page that rebinds DNS sends its own name, never an address: on a public bind, addresses are safe.
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
                admit(scope, self._principal(scope, headers))
            except ChatcacheError as error:  # of no account where everybody may go
                admit(scope, error)
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        given = headers.getlist("host")
        name = _host_name(given[0]) if len(given) == 1 else ""
        if self._any_host or name in self._hosts or (self._any_address and _is_address(name)):
            return
        raise Forbidden("this Host is not served here; allow it with --allowed-host", code="host_not_allowed")

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or origin.lower().rstrip("/") in self._origins:
            return
        if _netloc(origin) == headers.get("host", "").lower():
            return
        raise Forbidden("this Origin is not allowed; allow it with --cors-origin", code="origin_not_allowed")

    def _principal(self, scope: Scope, headers: Headers) -> Principal:
        """Raises: Unauthorized, Forbidden, StoreUnavailable."""
        if self._keyring.is_open:
            return EVERYBODY
        offered = offered_key(scope, headers)
        if offered is not None:
            return self._keyring.of_key(offered)
        session = offered_session(headers)
        if session is None:
            return self._keyring.nobody()
        principal = self._keyring.of_session(session)
        # The browser adds the cookie to whatever a page asks for: what changes something must be this server's page.
        if (scope["type"] == "websocket" or scope["method"] not in _SAFE) and not _is_same_origin(headers):
            raise Forbidden("a session needs the Origin of this server's page", code="origin_not_allowed")
        return principal


def offered_session(headers: Headers) -> Session | None:
    """The cookie, if it looks like one of ours."""
    return read_session(cookie_parser(headers.get("cookie", "")).get(NAME, ""))


def offered_key(scope: Scope, headers: Headers) -> str | None:
    """The key that came along, whatever it is worth."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
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
    return headers.get("sec-fetch-site") == "same-origin"  # which no page can set


def _netloc(origin: str) -> str | None:
    """Host and port of an Origin header, lower case; None for one that names no host."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:  # brackets that do not close
        return None


def _host_name(host: str) -> str:
    """The name of a Host header without its port, lower case, IPv6 without brackets; "" for what is no host."""
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
