"""Routes of the MCP servers: the servers with their tools, and calls of tools."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from chatcache.gateway.auth.principal import owner_of
from chatcache.gateway.context import gateway_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.mcp.servers import ServerTools
from chatcache.gateway.middleware import cancel_on_disconnect, read_json
from chatcache.gateway.schemas import server as schemas
from chatcache.gateway.schemas.fields import ignored_header, parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import McpCallFields


async def list_servers(request: Request) -> Response:
    """GET /v1/mcp/servers: the configured servers and their tools, without addresses and headers."""
    found = await gateway_of(request).mcp_servers.list()
    return json_response(schemas.McpServerList("list", [_describe(each) for each in found]))


async def call_tool(request: Request) -> Response:
    """POST /v1/mcp/calls: call a tool and wait for its result. The call ends if the client disconnects."""
    body = await read_json(request)
    fields = parse_fields(body, McpCallFields)
    call = gateway_of(request).mcp_servers.call(
        owner_of(request), fields.server, fields.tool, fields.arguments, confirmed=fields.confirmed
    )
    result = await cancel_on_disconnect(request, call)
    answer = schemas.McpCall("mcp.call", result.output, result.is_error, round(result.duration_s, 3))
    return json_response(answer, headers=ignored_header(unknown_fields(body, McpCallFields)))


def _describe(known: ServerTools) -> schemas.McpServer:
    tools = [
        schemas.McpTool(tool.name, tool.description, tool.parameters, tool.needs_confirmation)
        for tool in known.tools.values()
    ]
    return schemas.McpServer(known.server.name, known.state, known.error or None, tools)
