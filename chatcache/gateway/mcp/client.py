"""One connection to an MCP server over streamable HTTP, through the SDK (`chatcache[mcp]`).

Each listing and each call has a connection of its own: users share no session, and a server that fails leaves nothing
behind. The client offers the server neither sampling nor elicitation nor roots. It connects to the configured URL
only: the SDK follows redirects within the origin of the URL, and no others.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import anyio
import httpx2
import mcp_types as types
import msgspec
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from chatcache import __version__
from chatcache.config import McpServer, format_size
from chatcache.gateway.errors import McpServerError

MAX_BODY_BYTES = 4 * 1024 * 1024  # of one response of a server
MAX_LIST_PAGES = 16
MAX_SERVER_TEXT = 500  # characters of an error that a server sends

# These loggers write URLs, headers (at level debug) and parts of results, which may be secret.
for _name in ("mcp", "client", "httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Return the TLS settings of all connections; reading the certificates takes tens of milliseconds."""
    return httpx2.create_ssl_context()


async def list_tools(server: McpServer) -> Sequence[types.Tool]:
    """Return the tools of a server, in its order. Raises: McpServerError."""
    tools: list[types.Tool] = []
    async with _connect(server) as client:
        cursor: str | None = None
        for _ in range(MAX_LIST_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
    return tools


async def call_tool(server: McpServer, tool: str, arguments: dict[str, object]) -> tuple[str, bool]:
    """Call a tool; return the text of its result, and whether the result is an error. Raises: McpServerError."""
    found: list[tuple[str, bool]] = []
    try:
        async with _connect(server) as client:
            result = await client.call_tool(tool, arguments)
            found.append((_text_of(result), result.is_error))
    except McpServerError:
        if not found:  # otherwise only the end of the connection failed
            raise
    return found[0]


@asynccontextmanager
async def _connect(server: McpServer) -> AsyncIterator[Client]:
    """Connect to a server; the block may take `timeout_s`. Raises: McpServerError for every failure within."""
    transport = _BoundedTransport()
    try:
        with anyio.fail_after(server.timeout_s):
            async with httpx2.AsyncClient(
                transport=transport,
                headers={**server.headers, "accept-encoding": "identity"},
                timeout=None,  # of the whole block
            ) as http:
                client = Client(
                    streamable_http_client(server.url, http_client=http),
                    client_info=types.Implementation(name="chatcache", version=__version__),
                    cache=None,
                )
                async with client:
                    yield client
    except TimeoutError:
        raise McpServerError(f"the MCP server {server.name!r} did not answer within {server.timeout_s:g} s") from None
    except Exception as error:
        reason = transport.failure or _describe(error)
        raise McpServerError(f"the MCP server {server.name!r} failed: {reason}") from None


def _describe(error: BaseException) -> str:
    """Describe a failure without the URL, which may be secret."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, MCPError):
        text = " ".join(error.message.split())
        return text if len(text) <= MAX_SERVER_TEXT else f"{text[:MAX_SERVER_TEXT]}…"
    if isinstance(error, httpx2.ConnectError):
        return f"no connection: {_connect_reason(error)}"
    return type(error).__name__


def _connect_reason(error: BaseException) -> str:
    """Describe the first cause of a failed connection, without addresses."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    match error:
        case ssl.SSLCertVerificationError():
            return f"its certificate is not accepted, {error.verify_message}"
        case ssl.SSLError():
            return f"TLS failed, {(error.reason or 'unknown reason').replace('_', ' ').lower()}"
        case socket.gaierror():
            return "its host name is not known"
        case OSError(errno=int(number)):
            return os.strerror(number).lower()
    return type(error).__name__


class _BoundedTransport(httpx2.AsyncBaseTransport):
    """HTTP transport that refuses large and compressed responses, which could expand without limit.

    `failure`: why a response was refused or has a status of an error; "" for none.
    """

    def __init__(self) -> None:
        self._inner = httpx2.AsyncHTTPTransport(verify=_ssl_context())
        self.failure = ""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._inner.handle_async_request(request)
        if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            self.failure = "it sent a compressed response"
            await response.aclose()
            raise httpx2.ReadError(self.failure, request=request)
        if response.status_code in (401, 403):
            self.failure = f"it refused the request with status {response.status_code}"
        response.stream = _BoundedStream(cast(httpx2.AsyncByteStream, response.stream), self)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, transport: _BoundedTransport) -> None:
        self._inner = inner
        self._transport = transport

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._inner:
            num_bytes += len(part)
            if num_bytes > MAX_BODY_BYTES:
                self._transport.failure = f"its response is larger than {format_size(MAX_BODY_BYTES)}"
                raise httpx2.StreamError(self._transport.failure)
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()


def _text_of(result: types.CallToolResult) -> str:
    """Return the text of a result; of other content, a note that it is not shown.

    Structured content is returned as JSON if there is no other: servers send it as text, too.
    """
    if not result.content and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(_block_text(block) for block in result.content)


def _block_text(block: types.ContentBlock) -> str:
    if isinstance(block, types.TextContent):
        return str(block.text)
    if isinstance(block, types.ImageContent | types.AudioContent):
        return f"[{block.type}, {block.mime_type}: not shown]"
    if isinstance(block, types.ResourceLink):
        return f"[resource {block.uri}]"
    resource = block.resource
    if isinstance(resource, types.TextResourceContents):
        return str(resource.text)
    return f"[resource {resource.uri}, {resource.mime_type or 'binary'}: not shown]"
