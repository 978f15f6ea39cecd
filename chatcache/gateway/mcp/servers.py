"""The configured MCP servers: their tools, cached, and calls of tools within limits.

A server's tools are functions of a namespace with the server's name. Names of tools that functions cannot have are
written with `_` in place of other characters.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from chatcache.config import McpServer, format_size
from chatcache.errors import ChatcacheError, InvalidRequestError, NotFoundError, OverloadedError, RateLimitError
from chatcache.gateway.errors import McpServerError, PermissionDeniedError, ShuttingDownError
from chatcache.gateway.json_codec import MAX_DEPTH, decode_object, encode

log = logging.getLogger(__name__)

MAX_TOOLS = 128  # of a server
MAX_SCHEMA_BYTES = 64 * 1024  # of a tool with its description
MAX_ARGUMENT_BYTES = 64 * 1024
MAX_RESULT_BYTES = 256 * 1024
MAX_CALLS = 64
MAX_CALLS_PER_OWNER = 8
LIST_WAIT_S = 3.0  # for servers that answer slowly; they are listed later
LIST_LIFETIME_S = 300.0
FAILURE_LIFETIME_S = 10.0
_MAX_NAME_CHARS = 64
_MAX_SCHEMA_DEPTH = MAX_DEPTH - 8  # in the body of a request, the schema is nested in tools of tools

State = Literal["ready", "connecting", "unavailable"]


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool as it is offered to the model. `mcp_name`: its name on the server."""

    name: str
    mcp_name: str
    description: str
    parameters: dict[str, Any]
    needs_confirmation: bool


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a tool: its text, whether it is an error, and how long the call took."""

    output: str
    is_error: bool
    duration_s: float


@dataclass(slots=True)
class ServerTools:
    """The tools of one server as last read. `error`: why they could not be read; the tools are then older ones."""

    server: McpServer
    tools: dict[str, ServerTool] = field(default_factory=dict)
    error: str = ""
    expires_at: float = 0.0
    reading: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        if self.error:
            return "unavailable"
        return "ready" if self.expires_at else "connecting"


class McpServers:
    """The MCP servers of a gateway. Belongs to one event loop."""

    def __init__(self, servers: Sequence[McpServer], clock: Callable[[], float] = time.monotonic) -> None:
        self._servers = {server.name: ServerTools(server) for server in servers}
        self._clock = clock
        if servers:
            from chatcache.gateway.mcp import client  # the SDK is an optional extra; importing it takes a second

            self._client = client
        self._num_calls: Counter[str] = Counter()
        self._is_closed = False

    async def list(self) -> Sequence[ServerTools]:
        """Return all servers, after reading the tools of those that were not read lately.

        A server that takes longer than `LIST_WAIT_S` is read further in the background.
        """
        if reading := [task for each in self._servers.values() if (task := self._read_if_old(each)) is not None]:
            await asyncio.wait(reading, timeout=LIST_WAIT_S)
        return tuple(self._servers.values())

    async def call(self, owner: str, server: str, tool: str, arguments: str, *, confirmed: bool) -> CallResult:
        """Call a tool with a JSON text as the arguments.

        Raises: NotFoundError, InvalidRequestError, PermissionDeniedError without a required confirmation,
        RateLimitError, OverloadedError; McpServerError if the server fails.
        """
        given = _parse_arguments(arguments)
        with self._slot(owner):
            found = await self._find(server, tool)
            if found.needs_confirmation and not confirmed:
                raise PermissionDeniedError(
                    f"{server}.{tool} runs only after the user's confirmation",
                    param="confirmed",
                    code="confirmation_required",
                )
            started_at = self._clock()
            output, is_error = await self._client.call_tool(self._servers[server].server, found.mcp_name, given)
            duration_s = self._clock() - started_at
        log.info("tool %s.%s %s in %.2f s", server, tool, "failed" if is_error else "answered", duration_s)
        return CallResult(_cut(output), is_error, duration_s)

    async def close(self) -> None:
        """End the connections that read tools. Calls end with their requests."""
        self._is_closed = True
        reading = [each.reading for each in self._servers.values() if each.reading is not None]
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)

    @contextmanager
    def _slot(self, owner: str) -> Iterator[None]:
        """Count a call while it runs. Raises: RateLimitError, OverloadedError."""
        if self._num_calls[owner] >= MAX_CALLS_PER_OWNER:
            raise RateLimitError(f"{MAX_CALLS_PER_OWNER} calls of tools are running already; try again later")
        if self._num_calls.total() >= MAX_CALLS:
            raise OverloadedError("too many calls of tools are running; try again later")
        self._num_calls[owner] += 1
        try:
            yield
        finally:
            self._num_calls[owner] -= 1
            if not self._num_calls[owner]:
                del self._num_calls[owner]

    async def _find(self, server: str, tool: str) -> ServerTool:
        """Return an offered tool, after reading the server's tools if they never were.

        Raises: NotFoundError; McpServerError if the tools cannot be read.
        """
        if (known := self._servers.get(server)) is None:
            raise NotFoundError(f"no MCP server {server[:128]!r} is configured", param="server")
        if known.state != "ready" and (reading := self._read_if_old(known)) is not None:
            await asyncio.shield(reading)
        if (found := known.tools.get(tool)) is not None:
            return found
        if known.error:
            raise McpServerError(known.error)
        raise NotFoundError(f"the MCP server {server!r} has no tool {tool[:128]!r}", param="tool")

    def _read_if_old(self, known: ServerTools) -> asyncio.Task[None] | None:
        """Start to read a server's tools if they were not read lately; return the task while it runs.

        Raises: ShuttingDownError.
        """
        if self._is_closed:
            raise ShuttingDownError("the server is shutting down")
        if known.reading is None and self._clock() >= known.expires_at:
            known.reading = asyncio.create_task(self._read(known))
        return known.reading

    async def _read(self, known: ServerTools) -> None:
        server, lifetime_s = known.server, LIST_LIFETIME_S
        try:
            known.tools = _offered(server, await self._client.list_tools(server))
            known.error = ""
        except ChatcacheError as error:
            if known.error != error.message:
                log.warning("%s", error.message)
            known.error, lifetime_s = error.message, FAILURE_LIFETIME_S
        finally:
            known.reading = None
        known.expires_at = self._clock() + lifetime_s


def _offered(server: McpServer, tools: Sequence[Any]) -> dict[str, ServerTool]:
    """Return the tools that are offered to the model, by name. Tools that cannot be offered are logged."""
    offered: dict[str, ServerTool] = {}
    for tool in tools[:MAX_TOOLS] if server.tools is None else tools:
        if server.tools is not None and tool.name not in server.tools:
            continue
        name = re.sub(r"[^a-zA-Z0-9_-]", "_", tool.name)[:_MAX_NAME_CHARS]
        description = tool.description or tool.title or ""
        if problem := _problem(name, offered, description, tool.input_schema):
            log.warning("tool %r of the MCP server %s is left out: %s", tool.name, server.name, problem)
            continue
        needs_confirmation = tool.name not in server.allow
        offered[name] = ServerTool(name, tool.name, description, tool.input_schema, needs_confirmation)
    if missing := {*(server.tools or ()), *server.allow} - {tool.name for tool in tools}:
        log.warning("the MCP server %s has no tool %s", server.name, ", ".join(map(repr, sorted(missing))))
    return offered


def _problem(name: str, offered: Container[str], description: str, schema: dict[str, Any]) -> str:
    """Return why a tool cannot be offered; "" if it can."""
    if not name or name in offered:
        return "another tool has its name"
    if len(encode([description, schema])) > MAX_SCHEMA_BYTES:
        return f"its description and schema are larger than {format_size(MAX_SCHEMA_BYTES)}"
    if _depth(schema) > _MAX_SCHEMA_DEPTH:
        return f"its schema nests deeper than {_MAX_SCHEMA_DEPTH}"
    return ""


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _parse_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call. Raises: InvalidRequestError."""
    if len(text.encode()) > MAX_ARGUMENT_BYTES:
        raise InvalidRequestError(f"arguments: larger than {format_size(MAX_ARGUMENT_BYTES)}", param="arguments")
    try:
        return decode_object(text)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"arguments: not a JSON object ({error.message})", param="arguments") from None


def _cut(text: str) -> str:
    """Cut a result that is too long, with a note about it."""
    data = text.encode()
    if len(data) <= MAX_RESULT_BYTES:
        return text
    kept = data[:MAX_RESULT_BYTES].decode("utf-8", "ignore")
    return f"{kept}\n[cut here: the result has {format_size(len(data))}]"
