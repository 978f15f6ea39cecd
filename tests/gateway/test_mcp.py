"""MCP servers behind the gateway: tools, confirmation, results, limits and failures, with a server of the SDK."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from chatcache.config import McpServer, ServerConfig
from chatcache.errors import ChatcacheError, NotFoundError
from chatcache.gateway.mcp import servers as mcp_servers
from chatcache.gateway.mcp.client import list_tools
from chatcache.gateway.mcp.servers import LIST_LIFETIME_S, MAX_CALLS_PER_OWNER, MAX_RESULT_BYTES, McpServers
from tests.gateway.described import Described
from tests.gateway.documents import DOCS, command_lines
from tests.gateway.keyed import give
from tests.gateway.serving import Server, wait_until
from tests.gateway.test_openapi import described
from tests.support.mcp_server import ToolServer, served, tools
from tests.support.ports import free_port

__all__ = ["described", "tools"]

pytest.importorskip("mcp", reason="needs pip install 'chatcache[mcp]'")
SECRET = "tok-6d1f"


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory, tools: ToolServer) -> Iterator[Server]:
    """A gateway that knows the tool server by several names, and one that is down."""
    path: Path = tmp_path_factory.mktemp("db")
    headers = {"Authorization": f"Bearer {SECRET}"}
    configured = (
        McpServer(name="tools", url=f"{tools.url}?key={SECRET}", headers=headers, allow=("add",)),
        McpServer(name="few", url=tools.url, tools=("note", "wait"), allow=("wait",), timeout_s=2),
        McpServer(name="down", url=f"http://127.0.0.1:{free_port()}/{SECRET}"),
    )
    with Server(ServerConfig(db=str(path / "chat.db"), mcp_servers=configured)) as server:
        yield server.wait_ready()


@pytest.fixture(autouse=True)
def no_calls(tools: ToolServer) -> None:
    tools.calls.clear()
    tools.release.clear()
    tools.cancelled.clear()


def call(server: Server, name: str, tool: str, arguments: object = None, **more: object) -> tuple[int, Any]:
    text = json.dumps(arguments or {})
    status, _, answer = server.post("/v1/mcp/calls", server=name, tool=tool, arguments=text, **more)
    return status, answer


def test_server_list_has_state_and_tools_but_no_secret(server: Server, described: Described, tools: ToolServer) -> None:
    path = "/v1/mcp/servers"
    wait_until(lambda: [each["state"] for each in server.request("GET", path)[2]["data"]][:2] == ["ready"] * 2, "tools")
    status, _, page = server.request("GET", path)
    described.check("GET", "/v1/mcp/servers", status, page)
    shown = {each["name"]: each for each in page["data"]}
    assert [(name, each["state"]) for name, each in shown.items()] == [
        ("tools", "ready"),
        ("few", "ready"),
        ("down", "unavailable"),
    ]
    names = ["add", "note", "files_list", "picture", "fail", "long", "wait"]
    assert [tool["name"] for tool in shown["tools"]["tools"]] == names
    add = shown["tools"]["tools"][0]
    assert add["description"] == "Add two numbers." and add["parameters"]["required"] == ["a", "b"]
    assert [tool["needs_confirmation"] for tool in shown["tools"]["tools"]] == [False, *[True] * 6]
    assert [tool["name"] for tool in shown["few"]["tools"]] == ["note", "wait"]
    assert "no connection" in shown["down"]["error"] and shown["down"]["tools"] == []
    assert SECRET not in json.dumps(page) and str(tools.port) not in json.dumps(page)
    assert any(headers.get("authorization") == f"Bearer {SECRET}" for headers in tools.headers)


def test_server_without_mcp_servers_lists_none(tmp_path: Path) -> None:
    with Server(ServerConfig(db=str(tmp_path / "chat.db"))) as plain:
        plain.wait_ready()
        assert plain.request("GET", "/v1/mcp/servers")[2] == {"object": "list", "data": []}
        assert call(plain, "tools", "add")[0] == 404


def test_allowed_tool_runs_without_confirmation(server: Server, described: Described, tools: ToolServer) -> None:
    status, answer = call(server, "tools", "add", {"a": 2, "b": 3})
    described.check("POST", "/v1/mcp/calls", status, answer)
    assert (answer["output"], answer["is_error"]) == ("5", False)
    assert tools.calls == [("add", {"a": 2, "b": 3})]


def test_other_tool_runs_only_with_confirmation(server: Server, tools: ToolServer) -> None:
    for more in ({}, {"confirmed": False}):
        status, answer = call(server, "tools", "note", {"text": "hi"}, **more)
        assert (status, answer["error"]["code"]) == (403, "confirmation_required")
        assert answer["error"]["param"] == "confirmed"
    assert tools.calls == []
    assert call(server, "tools", "note", {"text": "hi"}, confirmed=True)[1]["output"] == "noted: hi"
    assert tools.calls == [("note", {"text": "hi"})]


def test_documented_curl_line_calls_a_tool(server: Server, tools: ToolServer) -> None:
    (line,) = (line for line in command_lines(DOCS / "mcp.md", "curl") if "/v1/mcp/calls" in line)
    for shown, real in (('"docs"', '"tools"'), ('"search"', '"note"'), ("query", "text")):
        line = line.replace(shown, real)
    words = shlex.split(line.replace("$U", server.url))
    answer = subprocess.run([*words, "-sS"], capture_output=True, check=True, timeout=60).stdout
    assert json.loads(answer)["output"] == "noted: pages"
    assert tools.calls == [("note", {"text": "pages"})]


def test_tool_with_a_name_of_other_characters_is_called_by_its_own(server: Server) -> None:
    assert call(server, "tools", "files_list", confirmed=True)[1]["output"] == "a.txt"


def test_tool_that_is_not_offered_is_not_found(server: Server, tools: ToolServer) -> None:
    unknown = [("few", "add", "tool"), ("tools", "files.list", "tool"), ("other", "add", "server")]
    unknown += [("tools", "x" * 9999, "tool"), ("x" * 9999, "add", "server")]
    for name, tool, param in unknown:
        status, answer = call(server, name, tool, {"a": 1, "b": 1}, confirmed=True)
        assert (status, answer["error"]["param"]) == (404, param)
        assert len(answer["error"]["message"]) < 200
    assert tools.calls == []


def test_image_is_named_and_failure_of_a_tool_is_its_output(server: Server) -> None:
    assert call(server, "tools", "picture", confirmed=True)[1]["output"] == "Here it is:\n[image, image/png: not shown]"
    status, failed = call(server, "tools", "fail", confirmed=True)
    assert status == 200 and failed["is_error"] and "fail" in failed["output"]


def test_long_result_is_cut_between_characters(server: Server) -> None:
    size = MAX_RESULT_BYTES  # characters of two bytes
    output = call(server, "tools", "long", {"size": size}, confirmed=True)[1]["output"]
    text, _, note = output.partition("\n")
    assert text == "é" * (MAX_RESULT_BYTES // 2) and note == "[cut here: the result has 512 KiB]"


def test_response_over_the_limit_is_refused(server: Server) -> None:
    status, answer = call(server, "tools", "long", {"size": 3_000_000}, confirmed=True)
    assert status == 502 and "larger than 4 MiB" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("", "ends too early"),
        ("[1]", "a JSON object"),
        ('{"a": 1, "a": 2}', "same key"),
        ('{"a": NaN}', "not valid JSON"),
        (json.dumps({"text": "x" * 65_536}), "larger than 64 KiB"),
    ],
)
def test_wrong_arguments_are_refused_before_the_call(
    server: Server, tools: ToolServer, arguments: str, reason: str
) -> None:
    status, _, answer = server.post("/v1/mcp/calls", server="tools", tool="add", arguments=arguments)
    assert (status, answer["error"]["param"]) == (400, "arguments") and reason in answer["error"]["message"]
    assert tools.calls == []


def test_slow_tool_is_a_clear_error(server: Server, tools: ToolServer) -> None:
    status, answer = call(server, "few", "wait")
    assert (status, answer["error"]["code"]) == (502, "mcp_server_error")
    assert answer["error"]["message"] == "the MCP server 'few' did not answer within 2 s"
    assert tools.cancelled.wait(60), "the call does not go on"


def test_call_of_a_server_that_is_down_is_a_clear_error(server: Server) -> None:
    status, answer = call(server, "down", "add", confirmed=True)
    assert (
        status == 502
        and answer["error"]["message"] == "the MCP server 'down' failed: no connection: connection refused"
    )


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:1/mcp", "connection refused"),
        ("http://nowhere.invalid/mcp", "its host name is not known"),
        ("https://127.0.0.1:{port}/mcp", "TLS failed, wrong version number"),
    ],
)
def test_failed_connection_names_its_cause_without_the_address(tools: ToolServer, url: str, reason: str) -> None:
    port = tools.url.rpartition(":")[2].partition("/")[0]
    server = McpServer(name="there", url=url.format(port=port))
    with pytest.raises(ChatcacheError) as caught:
        asyncio.run(list_tools(server))
    assert caught.value.message == f"the MCP server 'there' failed: no connection: {reason}"


def test_server_that_never_answers_does_not_delay_the_others(
    tools: ToolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_servers, "LIST_WAIT_S", 1.0)

    async def wait_for_tools() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            silent = McpServer(name="mute", url=f"http://127.0.0.1:{mute.getsockname()[1]}/mcp", timeout_s=600)
            found = McpServers((silent, McpServer(name="tools", url=tools.url)))
            try:
                async with asyncio.timeout(60):
                    while [each.state for each in await found.list()] != ["connecting", "ready"]:
                        pass  # a busy machine may take longer than LIST_WAIT_S
            finally:
                await found.close()

    asyncio.run(wait_for_tools())


def test_tools_are_read_again_after_their_lifetime(tools: ToolServer) -> None:
    now = [0.0]

    async def readings() -> list[int]:
        found = McpServers((McpServer(name="tools", url=tools.url),), clock=lambda: now[0])
        counts = []
        for at in (0.0, LIST_LIFETIME_S - 1, LIST_LIFETIME_S + 1):
            now[0], before = at, len(tools.headers)
            await found.list()
            counts.append(len(tools.headers) - before)
        await found.close()
        return counts

    first, second, third = asyncio.run(readings())
    assert first > 0 and second == 0 and third == first


def test_server_that_recovers_is_found_again(tools: ToolServer) -> None:
    now, port = [0.0], free_port()

    async def recover() -> str:
        found = McpServers(
            (McpServer(name="late", url=f"http://127.0.0.1:{port}/mcp", allow=("add",)),), lambda: now[0]
        )
        assert [each.state for each in await found.list()] == ["unavailable"]
        with pytest.raises(ChatcacheError, match="no connection"):
            await found.call("", "late", "add", '{"a": 1, "b": 1}', confirmed=False)
        late = ToolServer(port=port)
        with served(late.app(), port):
            now[0] = 60.0
            result = await found.call("", "late", "add", '{"a": 1, "b": 1}', confirmed=False)
            await found.close()
        return result.output

    assert asyncio.run(recover()) == "2"


def test_calls_of_one_owner_are_bounded(tools: ToolServer) -> None:
    async def run() -> tuple[list[str], int]:
        found = McpServers((McpServer(name="tools", url=tools.url, allow=("wait", "add")),))
        running = [
            asyncio.create_task(found.call("ann", "tools", "wait", "{}", confirmed=False))
            for _ in range(MAX_CALLS_PER_OWNER)
        ]
        while tools.num_waiting < MAX_CALLS_PER_OWNER:  # noqa: ASYNC110 - counted in another thread
            await asyncio.sleep(0.01)
        with pytest.raises(ChatcacheError) as refused:
            await found.call("ann", "tools", "add", '{"a": 1, "b": 1}', confirmed=False)
        other = await found.call("bob", "tools", "add", '{"a": 1, "b": 1}', confirmed=False)
        tools.release.set()
        outputs = [result.output for result in await asyncio.gather(*running)]
        after = await found.call("ann", "tools", "add", '{"a": 1, "b": 1}', confirmed=False)
        assert other.output == after.output == "2"
        await found.close()
        return outputs, refused.value.status

    outputs, status = asyncio.run(run())
    assert outputs == ["released"] * MAX_CALLS_PER_OWNER and status == 429


def test_call_ends_when_its_client_disconnects(server: Server, tools: ToolServer) -> None:
    body = json.dumps({"server": "tools", "tool": "wait", "confirmed": True}).encode()
    head = f"POST /v1/mcp/calls HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\ncontent-type: application/json\r\n"
    with server.connect() as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: tools.num_waiting == 1, "the call runs")
    assert tools.cancelled.wait(60)
    wait_until(lambda: tools.num_waiting == 0, "the end of the call")


def test_gateway_answers_while_tools_run(server: Server, tools: ToolServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(call, server, "tools", "wait", confirmed=True)
        wait_until(lambda: tools.num_waiting == 1, "the call runs")
        assert server.request("GET", "/readyz")[0] == 200
        tools.release.set()
        assert running.result()[1]["output"] == "released"


def test_redirect_to_another_origin_is_not_followed(tools: ToolServer) -> None:
    port = free_port()

    async def redirect(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await Request(scope, receive).body()
            await RedirectResponse(tools.url, 307)(scope, receive, send)

    async def read() -> str:
        headers = {"Authorization": f"Bearer {SECRET}"}
        found = McpServers((McpServer(name="moved", url=f"http://127.0.0.1:{port}/mcp", headers=headers),))
        (only,) = await found.list()
        await found.close()
        return only.error

    before = len(tools.headers)
    with served(redirect, port):
        assert "not followed" in asyncio.run(read())
    assert len(tools.headers) == before


def test_compressed_response_is_refused() -> None:
    port = free_port()

    async def compressed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await Request(scope, receive).body()
            headers = {"content-encoding": "gzip", "content-type": "application/json"}
            await Response(b"\x1f\x8b", headers=headers)(scope, receive, send)

    async def read() -> str:
        found = McpServers((McpServer(name="zip", url=f"http://127.0.0.1:{port}/mcp"),))
        (only,) = await found.list()
        await found.close()
        return only.error

    with served(compressed, port):
        assert asyncio.run(read()) == "the MCP server 'zip' failed: it sent a compressed response"


def test_log_has_neither_headers_nor_addresses_nor_contents(
    server: Server, tools: ToolServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert call(server, "tools", "note", {"text": "private words"}, confirmed=True)[0] == 200
        assert call(server, "down", "note", {"text": "private words"}, confirmed=True)[0] == 502
    lines = [record.getMessage() for record in caplog.records if record.threadName != "mcp-server"]
    assert any("tools.note answered in" in line for line in lines)
    assert not [line for line in lines if SECRET in line or "private words" in line or f":{tools.port}" in line]


def test_tool_that_is_too_large_or_too_deep_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"properties": {"a": deep}}

    class Tool:
        def __init__(self, name: str, schema: dict[str, Any]) -> None:
            self.name, self.input_schema, self.description, self.title = name, schema, None, None

    given = [Tool("a.b", {}), Tool("a_b", {}), Tool("deep", deep), Tool("large", {"x": "y" * 70_000}), Tool("c", {})]
    offered = mcp_servers._offered(McpServer(name="s", url="http://s", allow=("gone",)), given)
    assert [(tool.name, tool.mcp_name) for tool in offered.values()] == [("a_b", "a.b"), ("c", "c")]
    text = caplog.text
    assert text.count("is left out") == 3 and "has no tool 'gone'" in text


def test_routes_need_a_key_on_a_server_with_keys(tmp_path: Path, tools: ToolServer) -> None:
    config = ServerConfig(
        db=str(tmp_path / "chat.db"), mcp_servers=(McpServer(name="tools", url=tools.url, allow=("add",)),)
    )
    key = give(config, "acme", "ann")
    with Server(config) as keyed:
        keyed.wait_ready()
        body = {"server": "tools", "tool": "add", "arguments": '{"a": 1, "b": 1}'}
        assert keyed.request("GET", "/v1/mcp/servers")[0] == 401
        assert keyed.request("POST", "/v1/mcp/calls", body)[0] == 401
        assert tools.calls == []
        assert keyed.request("POST", "/v1/mcp/calls", body, key.bearer)[2]["output"] == "2"


def test_close_ends_a_reading_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "LIST_WAIT_S", 0.1)

    async def close() -> tuple[int, int]:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            url = f"http://127.0.0.1:{mute.getsockname()[1]}/mcp"
            found = McpServers((McpServer(name="mute", url=url, timeout_s=600),))
            await found.list()
            before = len(asyncio.all_tasks())
            await asyncio.wait_for(found.close(), 60)
            with pytest.raises(ChatcacheError, match="shutting down"):
                await found.list()
            return before, len(asyncio.all_tasks())

    before, after = asyncio.run(close())
    assert before > 1 and after == 1


def test_unknown_server_is_not_found() -> None:
    with pytest.raises(NotFoundError):
        asyncio.run(McpServers(()).call("", "a", "b", "{}", confirmed=True))
