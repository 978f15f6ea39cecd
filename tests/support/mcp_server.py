"""A real MCP server on localhost, built with the SDK, that records what it receives."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.support.ports import free_port

START_TIMEOUT_S = 30.0


@dataclass
class ToolServer:
    """Tools with known results. `waiting` calls of the tool `wait` run until `release` is set."""

    port: int = field(default_factory=free_port)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    num_waiting: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def app(self) -> ASGIApp:
        from mcp.server import MCPServer
        from mcp_types import ImageContent, TextContent

        server = MCPServer("tools", log_level="ERROR")

        def add(a: int, b: int) -> int:
            self.calls.append(("add", {"a": a, "b": b}))
            return a + b

        def note(text: str) -> str:
            self.calls.append(("note", {"text": text}))
            return f"noted: {text}"

        def files_list() -> str:
            return "a.txt"

        def picture() -> Any:
            image = ImageContent(type="image", data="aGk=", mime_type="image/png")
            return [TextContent(type="text", text="Here it is:"), image]

        def fail() -> str:
            raise ValueError("the disk is full")

        def long(size: int) -> str:
            return "é" * size

        async def wait() -> str:
            self.num_waiting += 1
            try:
                while not self.release.is_set():  # noqa: ASYNC110 - set by another thread
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            finally:
                self.num_waiting -= 1
            return "released"

        server.add_tool(add, description="Add two numbers.")
        server.add_tool(note)
        server.add_tool(files_list, name="files.list")
        server.add_tool(picture, structured_output=False)
        for tool in (fail, long, wait):
            server.add_tool(tool)
        inner = server.streamable_http_app()

        async def record(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
            await inner(scope, receive, send)

        return record


@contextmanager
def served(app: ASGIApp, port: int) -> Iterator[None]:
    """Serve an application on localhost, in a thread."""
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="mcp-server")
    thread.start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)


@contextmanager
def tool_server() -> Iterator[ToolServer]:
    tools = ToolServer()
    with served(tools.app(), tools.port):
        try:
            yield tools
        finally:
            tools.release.set()


@pytest.fixture(scope="module")
def tools() -> Iterator[ToolServer]:
    """A server for the tests of a module, which import this fixture."""
    with tool_server() as running:
        yield running
