"""Host and Origin checks on every route, over HTTP and WebSocket, with byte-exact requests."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatcache.config import ServerConfig
from chatcache.gateway.auth.middleware import AuthenticationMiddleware
from tests.gateway.keyed import Keyed, keyed
from tests.gateway.serving import Server, parse_head

ALLOWED = "chat.example"
ORIGIN = "https://app.example"

# What a rebound name, a proxy gone wrong or an attacker's client may put there. `{port}` is the server's.
FOREIGN_HOSTS = (
    "evil.example",
    "evil.example:{port}",
    "127.0.0.1.evil.example",
    "127.0.0.1.nip.io:{port}",
    "127.attacker.example",
    "localhost.evil.example",
    "localhost.",
    "localhost@evil.example",
    "evil.example@localhost",
    "evil.example/localhost",
    "a/?x=",
    "a/?x=localhost",
    "localhost/v1/models",
    "localhost#",
    "localhost?x",
    "localhost:80:80",
    "localhost:",
    "localhost:x",
    "localhost\\evil.example",
    "localhost evil.example",
    "evil.example, localhost",
    "localhost,evil.example",
    "[::1].evil.example",
    "[::1",
    "::1]",
    "[::ffff:10.0.0.9]",
    "[::]",
    "0.0.0.0:{port}",
    "0",
    "127.1",
    "2130706433",
    "0x7f.1",
    "127.0.0.2",
    "10.0.0.9",
    "169.254.169.254",
    "xn--lcalhost-n1a",
    "loc\u0430lhost",
    "chat.example.evil.example",
    "notchat.example",
    "chat.example%00",
    "*",
    "",
    "null",
)
OWN_HOSTS = ("localhost", "LOCALHOST:{port}", "127.0.0.1:{port}", "[::1]:{port}", ALLOWED, f"{ALLOWED}:443")

FOREIGN_ORIGINS = (
    "https://evil.example",
    "http://127.0.0.1",
    "http://127.0.0.1:{port}.evil.example",
    "http://127.0.0.1:{port}@evil.example",
    "http://evil.example@127.0.0.1:{port}x",
    "http://127.0.0.1:{port}1",
    "http://localhost:{port}",
    "https://app.example.evil.example",
    "https://evilapp.example",
    "http://app.example",
    "https://app.example:8443",
    "https://app.example/path",
    "https://app.example https://evil.example",
    "https://evil.example https://app.example",
    "null",
    "",
    "file://",
    "chrome-extension://abcdefgh",
    "http://[",
    "http://[::1",
    "*",
    "app.example",
    "//app.example",
)
OWN_ORIGINS = ("http://127.0.0.1:{port}", ORIGIN, "HTTPS://APP.EXAMPLE", "https://127.0.0.1:{port}")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("hosts")
    with keyed(folder, allowed_hosts=(ALLOWED,), cors_origins=(ORIGIN,)) as keys:
        yield keys


def status_of(server: Server, target: str, *headers: tuple[str, str], upgrade: bool = False) -> int:
    """Send exactly these bytes and return the status."""
    lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    if upgrade:
        nonce = base64.b64encode(bytes(16)).decode()
        lines += [
            "upgrade: websocket",
            "connection: upgrade",
            "sec-websocket-version: 13",
            f"sec-websocket-key: {nonce}",
        ]
    else:
        lines.append("connection: close")
    with server.connect() as connection:
        connection.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode())
        data = b""
        while b"\r\n\r\n" not in data and (part := connection.recv(65536)):
            data += part
    return parse_head(data.partition(b"\r\n\r\n")[0])[0]


def bearer(keys: Keyed) -> tuple[str, str]:
    return "authorization", keys.ann.bearer["authorization"]


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_foreign_host_is_rejected_on_every_route(keys: Keyed, host: str) -> None:
    """Also on public routes: 403, or 400 for an invalid header."""
    server, named = keys.server, ("host", host.format(port=keys.server.port))
    for target in ("/", "/livez", "/v1/models", "/metrics", "/nope"):
        assert status_of(server, target, named, bearer(keys)) in (400, 403), target
    assert status_of(server, "/v1/responses", named, bearer(keys), upgrade=True) in (400, 403)


def test_host_header_does_not_change_the_routed_path(keys: Keyed) -> None:
    """CVE-2026-48710: only the routed path decides whether a route is public."""
    for host in ("localhost/livez?", "localhost/?x=", "localhost/assets/"):
        assert status_of(keys.server, "/v1/models", ("host", host)) in (400, 403)
    targets = (
        "/livez/../v1/models",
        "//v1/models",
        "/assets/../v1/models",
        "/assets/%2e%2e/v1/models",
        "/v1/models?x=/livez",
        "/v1/models;/livez",
        "/v1/models%00.js",
        "/V1/MODELS",
        "/v1/models/",
        "/v1/models#/livez",
        "http://localhost/v1/models",
    )
    for target in targets:
        assert status_of(keys.server, target, ("host", "localhost")) in (400, 401, 404), target


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_own_host_is_served(keys: Keyed, host: str) -> None:
    named = ("host", host.format(port=keys.server.port))
    assert status_of(keys.server, "/v1/models", named, bearer(keys)) == 200
    assert status_of(keys.server, "/v1/models", named) == 401
    assert status_of(keys.server, "/v1/responses", named, bearer(keys), upgrade=True) == 101


def test_duplicate_host_header_is_rejected(keys: Keyed) -> None:
    for first, second in (("localhost", "evil.example"), ("evil.example", "localhost")):
        assert status_of(keys.server, "/livez", ("host", first), ("host", second)) in (400, 403)
    assert status_of(keys.server, "/livez") in (400, 403)


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS)
def test_foreign_origin_is_rejected_with_a_valid_key(keys: Keyed, origin: str) -> None:
    """A page that has a valid key may use it from listed origins only."""
    port = keys.server.port
    own, sent = ("host", f"127.0.0.1:{port}"), ("origin", origin.replace("{port}", str(port)))
    assert status_of(keys.server, "/v1/models", own, sent, bearer(keys)) == 403
    assert status_of(keys.server, "/v1/responses", own, sent, bearer(keys), upgrade=True) == 403


@pytest.mark.parametrize("origin", OWN_ORIGINS)
def test_own_origin_is_served(keys: Keyed, origin: str) -> None:
    port = keys.server.port
    own, sent = ("host", f"127.0.0.1:{port}"), ("origin", origin.replace("{port}", str(port)))
    assert status_of(keys.server, "/v1/models", own, sent, bearer(keys)) == 200
    assert status_of(keys.server, "/v1/responses", own, sent, bearer(keys), upgrade=True) == 101


def test_host_check_by_prefix_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected bug: hosts that begin with an allowed name are accepted, as in devframe #319."""

    def check(guard: AuthenticationMiddleware, headers: object) -> None:
        if not str(headers.get("host")).startswith(("127.", "localhost")):  # type: ignore[attr-defined]
            original(guard, headers)  # type: ignore[arg-type]

    original = AuthenticationMiddleware._check_host
    monkeypatch.setattr(AuthenticationMiddleware, "_check_host", check)
    with Server(ServerConfig(db=str(tmp_path / "c.db"))) as server:
        passed = [host for host in FOREIGN_HOSTS if status_of(server, "/livez", ("host", host)) == 200]
    assert "127.attacker.example" in passed
