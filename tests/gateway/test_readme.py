"""The API page is run: each curl line as it stands, with ids of things that exist; each route has one."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from websockets.sync.client import connect

import chatcache.gateway
from chatcache.config import ServerConfig
from chatcache.gateway import json_codec as jsonio
from chatcache.gateway import uvicorn_limits as http
from chatcache.gateway.api import pagination as paging
from chatcache.gateway.api import params as tooling
from chatcache.gateway.openapi import document
from chatcache.gateway.routes import OPERATIONS
from chatcache.gateway.schemas import requests as wire
from chatcache.gateway.schemas import requests as wire_messages
from chatcache.gateway.websocket import connection as ws
from chatcache.gateway.websocket import streams as lanes
from chatcache.types.request import MAX_N, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS
from tests.gateway.described import Described
from tests.gateway.frames import receive
from tests.gateway.serving import MODEL, Server
from tests.gateway.test_rest import converse

API_PAGE = Path(chatcache.gateway.__file__).with_name("README.md")
FRONT_PAGE = API_PAGE.parents[2] / "README.md"
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks(page: Path) -> list[str]:
    return [block.replace("\\\n", " ") for block in _BLOCK.findall(page.read_text())]


def _commands(page: Path) -> list[str]:
    return [line for block in _blocks(page) for line in block.splitlines() if line.startswith("curl ")]


COMMANDS = [*_commands(FRONT_PAGE), *_commands(API_PAGE)]


def _called(command: str) -> tuple[str, str]:
    """The method and path of a curl line."""
    words = shlex.split(command, comments=True)
    has_body = any(word in ("-d", "--data", "--data-binary", "-F") for word in words)
    method = words[words.index("-X") + 1] if "-X" in words else "POST" if has_body else "GET"
    url = next(word for word in words if word.startswith("$U/") or "127.0.0.1" in word)
    return method, "/" + url.removeprefix("http://").partition("/")[2].partition("?")[0]


def test_every_route_has_a_curl_line() -> None:
    described = Described(document("0"))
    lines = {described.operation(*_called(command))["operationId"] for command in _commands(API_PAGE)}
    operations = {
        operation["operationId"]: f"{method.upper()} {path}"
        for path, methods in described.document["paths"].items()
        for method, operation in methods.items()
    }
    missing = sorted(name for key, name in operations.items() if key not in lines)
    assert not missing, f"no curl line in {API_PAGE.name} of chatcache/gateway for: {missing}"
    assert len(operations) == len(OPERATIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the lines run, one after another: what one writes, another may read."""
    return tmp_path_factory.mktemp("curl")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[:90])
def test_each_curl_line_succeeds(server: Server, folder: Path, command: str) -> None:
    response = converse(server, "Hello pages", instructions="Be brief.", ignore_eos=True, max_output_tokens=8)
    ids = {
        "conv_x": response["conversation"]["id"],
        "msg_x": response["output"][0]["id"],
        "resp_x": response["id"],
        "chatcache-builtin": MODEL,
        "http://127.0.0.1:8000": server.url,
    }
    for shown, real in ids.items():
        command = command.replace(shown, real)
    # A function, so that the line stays as it is: an HTTP error is one of the command's.
    script = f'curl() {{ command curl --fail-with-body -sS --max-time 30 "$@"; }}\n{command}\n'
    environment = {**os.environ, "U": server.url, "KEY": "any"}
    done = subprocess.run(
        ["bash", "-ec", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-500:]}{done.stderr[-500:]}"


FRAMES = [line[2:] for block in _blocks(API_PAGE) for line in block.splitlines() if line.startswith("> {")]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame[:60])
def test_each_frame_shown_is_taken(server: Server, url: str, frame: str) -> None:
    response = converse(server, "Hello")
    for shown, real in (("resp_x", response["id"]), ("msg_x", response["output"][0]["id"])):
        frame = frame.replace(shown, real)
    assert json.loads(frame)
    with connect(url, subprotocols=["chatcache.v1"]) as socket:  # type: ignore[list-item]
        assert receive(socket)["type"] == "session.created"
        socket.send(frame)
        first = receive(socket)
    assert first["type"] != "error", first


def test_the_pages_show_something() -> None:
    assert len(_commands(FRONT_PAGE)) >= 3 and len(COMMANDS) > len(OPERATIONS) and FRAMES
    assert str(API_PAGE.relative_to(FRONT_PAGE.parent)) in FRONT_PAGE.read_text()


def test_the_limits_shown_are_the_limits() -> None:
    section = API_PAGE.read_text().partition("## Limits\n")[2].partition("\n## ")[0]
    server = ServerConfig()
    limits = {
        "body": f"{server.max_body_bytes // 2**20} MiB (413) / {server.max_frame_bytes // 2**20} MiB (close 1009)",
        "values": f"{jsonio.MAX_VALUES:,} / {jsonio.MAX_NODES:,} / {jsonio.MAX_DEPTH}",
        "a body that stops": f"{server.body_timeout_s:g} s (408)",
        "`n`": str(MAX_N),
        "messages": f"{wire.MAX_MESSAGES}; {wire_messages.MAX_PARTS}; {wire.MAX_PROMPTS}",
        "`tools`": f"{wire_messages.MAX_TOOLS}; "
        f"{tooling.MAX_SCHEMA_BYTES >> 10} KiB; {tooling.MAX_TOOLS_BYTES >> 10} KiB",
        "`stop`": f"{MAX_STOP_STRINGS}; 64",
        "`top_logprobs`": str(MAX_TOP_LOGPROBS),
        "lanes": f"{lanes.MAX_LANES}; {lanes.MAX_QUEUED}",
        "frames": f"{ws.MAX_FRAMES_PER_S:g} a second, {ws.MAX_BURST:g} at once (close {ws.TOO_MANY})",
        "pieces": f"{http.MAX_PIECES:,}; {http.MAX_FRAMES_PER_S:g} a second, {http.MAX_FRAMES_AT_ONCE:g} at once "
        f"(close {ws.TOO_MANY})",
        "entries of a list": str(paging.MAX_LIMIT),
    }
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    for what, limit in limits.items():
        assert [row[1] for row in rows if row[0].startswith(what)] == [limit], what
