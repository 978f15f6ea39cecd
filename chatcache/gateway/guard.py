"""Who may speak: Host and Origin allow-lists, then API keys. One answer for HTTP and WebSocket."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from chatcache.config import ServerConfig
from chatcache.gateway.errors import Forbidden, Unauthorized
from chatcache.gateway.principal import EVERYBODY, Principal, admit
from chatcache.gateway.static import PAGE_FILE

OPEN_PATHS = frozenset({"/", "/livez", "/readyz", "/health", "/version"})
OPEN_PREFIX = "/assets/"
KEY_PROTOCOL = "openai-insecure-api-key."
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


class Guard:
    """Refuses before routing. Raises: Forbidden, Unauthorized (the request context turns them into answers).

    Sets who asks (`principal_of`): derived from the key, so that the key itself goes no further.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in (*_LOOPBACK_HOSTS, *config.allowed_hosts))
        self._any_host = "*" in self._hosts
        # A page that rebinds DNS sends its own name, never an address: on a public bind, addresses are safe.
        self._any_address = _is_wildcard(config.host)
        if not self._any_address:
            self._hosts |= {config.host.lower()}
        self._origins = frozenset(origin.lower().rstrip("/") for origin in config.cors_origins)
        self._keys = tuple(hashlib.sha256(key.encode()).digest() for key in config.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            self._check_host(headers)
            self._check_origin(headers)
            admit(scope, self._principal(scope, headers))
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        name = _host_name(headers.get("host", ""))
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

    def _principal(self, scope: Scope, headers: Headers) -> Principal | None:
        if not self._keys:
            return EVERYBODY
        offered = _offered_key(scope, headers)
        if offered is not None:
            digest = hashlib.sha256(offered.encode("utf-8", "surrogateescape")).digest()
            # Every key is compared, whichever matches: the time taken tells nothing.
            if any([hmac.compare_digest(digest, key) for key in self._keys]):  # noqa: C419
                name = digest.hex()[:32]
                return Principal(name, name, name, is_admin=True)
        if scope["type"] == "http" and _is_open(scope["path"].removeprefix(scope.get("root_path", ""))):
            return None
        raise Unauthorized("a valid API key is required: Authorization: Bearer KEY")


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX) or PAGE_FILE.fullmatch(path) is not None


def _offered_key(scope: Scope, headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    if scope["type"] == "websocket":
        offered: list[str] = scope.get("subprotocols", [])
        for protocol in offered:
            if protocol.startswith(KEY_PROTOCOL):
                return protocol.removeprefix(KEY_PROTOCOL)
    return None


def _netloc(origin: str) -> str | None:
    """Host and port of an Origin header, lower case; None for one that names no host."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:  # brackets that do not close
        return None


def _host_name(host: str) -> str:
    """The name of a Host header without its port, lower case, IPv6 without brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_wildcard(host: str) -> bool:
    return host in ("", "*") or (_is_address(host) and ipaddress.ip_address(host).is_unspecified)
