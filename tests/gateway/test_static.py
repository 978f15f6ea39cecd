"""Files of the chat page: built or not, with security headers, and no other file of the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from chatcache.config import ServerConfig
from chatcache.gateway import static
from tests.gateway.serving import Server

FILES = {
    "static/index.html": "<!doctype html><title>page</title>",
    "static/theme.js": "1;",
    "static/preview.html": "<title>preview</title>",
    "static/assets/main-abc.js": "2;",
    "static/assets/big-abc.js": "3;" * 2000,
    "static/assets/main-abc.css": "a {}",
    "static/assets/font-abc.woff2": "font",
    "static/secret.py": "no",
    "static/.hidden.js": "no",
    "outside.js": "no",
}


@pytest.fixture(params=["built", "unbuilt"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(static, "STATIC", tmp_path / "static")
    for name, text in FILES.items() if request.param == "built" else ():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with Server(ServerConfig(db=str(folder / "chat.db"), api_keys=("sk",))) as server:
        yield server


def test_index_serves_the_page_or_build_instructions(server: Server, folder: Path) -> None:
    status, headers, text = server.request("GET", "/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert ("<title>page</title>" in text) if (folder / "static").exists() else ("make web" in text)
    assert headers["cache-control"] == "no-cache"


def test_page_files_have_security_headers_and_need_no_key(server: Server, folder: Path) -> None:
    built = (folder / "static").exists()
    for path, cache in (("/theme.js", "no-cache"), ("/assets/main-abc.js", "public, max-age=31536000, immutable")):
        status, headers, _ = server.request("GET", path)
        assert status == (200 if built else 404)
        assert not built or headers["cache-control"] == cache
    for path in ("/", "/theme.js", "/assets/main-abc.js") if built else ("/",):
        headers = server.request("GET", path)[1]
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def test_style_sheets_and_fonts_carry_no_policy(server: Server, folder: Path) -> None:
    """Policies concern documents and workers; these files only cost bytes of the first load."""
    for name in ("main-abc.css", "font-abc.woff2") if (folder / "static").exists() else ():
        status, headers, _ = server.request("GET", f"/assets/{name}")
        assert status == 200 and headers["cache-control"].endswith("immutable")
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert "content-security-policy" not in headers


def test_preview_has_no_origin_and_only_the_page_may_frame_it(server: Server, folder: Path) -> None:
    status, headers, _ = server.request("GET", "/preview.html")
    if not (folder / "static").exists():
        assert status == 404
        return
    directives = dict(each.strip().split(" ", 1) for each in headers["content-security-policy"].split(";"))
    assert (directives["sandbox"], directives["default-src"]) == ("allow-scripts", "'none'")
    assert directives["frame-ancestors"] == "'self'"
    loaded = {name: value.split() for name, value in directives.items() if name not in ("sandbox", "frame-ancestors")}
    assert {source for sources in loaded.values() for source in sources} == {
        "'none'",
        "'unsafe-inline'",
        "data:",
        "blob:",
    }
    assert "frame-src 'self'" in server.request("GET", "/")[1]["content-security-policy"]


def test_large_asset_is_compressed_if_the_client_accepts_gzip(server: Server, folder: Path) -> None:
    if not (folder / "static").exists():
        return
    for path, taken, encoding in (
        ("/assets/big-abc.js", "gzip", "gzip"),
        ("/assets/big-abc.js", "identity", None),
        ("/assets/main-abc.js", "gzip", None),
    ):
        answer = httpx.get(f"{server.url}{path}", headers={"accept-encoding": taken})
        assert answer.status_code == 200 and answer.headers.get("content-encoding") == encoding
        assert answer.text == FILES[f"static{path}"]
        assert answer.headers["content-security-policy"] and answer.headers["cache-control"].endswith("immutable")


@pytest.mark.parametrize(
    "path",
    ["/secret.py", "/.hidden.js", "/../outside.js", "/assets/../../outside.js", "/assets/%2e%2e/%2e%2e/outside.js",
     "/..%2foutside.js", "/assets/nope.js", "/assets/", "/nope.js"],
)  # fmt: skip
def test_paths_outside_the_page_folder_are_not_served(server: Server, path: str) -> None:
    status, _, answer = server.request("GET", path, headers={"authorization": "Bearer sk"})
    assert status == 404 and answer["error"]["code"] == "not_found"


def test_page_behind_a_proxy_prefix_is_served(folder: Path) -> None:
    """The proxy strips the prefix; open routes stay open, closed ones closed."""
    with Server(ServerConfig(db=str(folder / "chat.db"), api_keys=("sk",), root_path="/chat")) as server:
        assert server.request("GET", "/")[0] == server.request("GET", "/livez")[0] == 200
        assert server.request("GET", "/theme.js")[0] == (200 if (folder / "static").exists() else 404)
        assert server.request("GET", "/v1/models")[0] == 401
        assert server.request("GET", "/v1/models", headers={"authorization": "Bearer sk"})[0] == 200
