"""The documents against the gateway: curl lines run; routes, fields, frames, error codes and limits are described."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest
from websockets.sync.client import connect

import chatcache
from chatcache.config import ServerConfig
from chatcache.conversations.store import MAX_ITEMS
from chatcache.gateway import json_codec as jsonio
from chatcache.gateway import uvicorn_limits as http
from chatcache.gateway.api import pagination as paging
from chatcache.gateway.api import params as tooling
from chatcache.gateway.limits import admission
from chatcache.gateway.openapi import document
from chatcache.gateway.routes import OPERATIONS, ROUTES, SOCKETS
from chatcache.gateway.routing import Body
from chatcache.gateway.schemas import requests as wire
from chatcache.gateway.schemas import requests as wire_messages
from chatcache.gateway.websocket import connection as ws
from chatcache.gateway.websocket import streams as lanes
from chatcache.types.request import MAX_N, MAX_OUTPUT_LOGPROBS, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS
from tests.gateway.described import Described
from tests.gateway.documents import ALL_PAGES, API_PAGES, DOCS, FRONT_PAGE, ROOT, command_lines, documented, prose
from tests.gateway.frames import receive
from tests.gateway.serving import MODEL, Server
from tests.gateway.test_rest import converse

FOLDERS = ("kernels", "loadtest", "loadtest/peers", "tests", "tests/chaos", "web")
GUIDES = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
GUIDES += [ROOT / folder / "README.md" for folder in FOLDERS]
# Codes of the command line, of a base class that is never raised itself, and of an engine that is then restarted.
NEVER_SENT = {"forbidden", "device_lost", "damaged_archive", "store_unusable", "model_folder_error"}
COMMANDS = [(page, line) for page in ALL_PAGES for line in command_lines(page, "curl")]
CALLS_TOOL = "/v1/mcp/calls"  # `test_mcp` runs this line with a server that has the tool


def _called(command: str) -> tuple[str, str]:
    """The method and path of a curl line."""
    words = shlex.split(command, comments=True)
    has_body = any(word in ("-d", "--data", "--data-binary", "-F") for word in words)
    method = words[words.index("-X") + 1] if "-X" in words else "POST" if has_body else "GET"
    url = next(word for word in words if word.startswith("$U/") or "127.0.0.1" in word)
    return method, "/" + url.removeprefix("http://").partition("/")[2].partition("?")[0]


def test_docs_have_a_curl_line_for_every_route() -> None:
    described = Described(document(ROUTES, "0"))
    lines = {described.operation(*_called(line))["operationId"] for page, line in COMMANDS if page != FRONT_PAGE}
    operations = {
        operation["operationId"]: f"{method.upper()} {path}"
        for path, methods in described.document["paths"].items()
        for method, operation in methods.items()
    }
    missing = sorted(name for key, name in operations.items() if key not in lines)
    assert not missing, f"no curl line in chatcache/gateway/docs for: {missing}"
    assert len(operations) == len(OPERATIONS)


def _documented_routes() -> set[tuple[str, str]]:
    found = (re.fullmatch(r"(GET|POST|DELETE) (/[^? ]*)(\?.*)?", each) for each in documented())
    return {(match[1], match[2]) for match in found if match}


def test_docs_name_every_route_and_no_other() -> None:
    routes = {(each.method, each.path.replace("{id:path}", "{id}")) for each in OPERATIONS}
    routes |= {("GET", each.path) for each in SOCKETS}
    undescribed = routes - _documented_routes() - {(method, path) for method, path in map(_route_of, COMMANDS)}
    assert not undescribed
    assert not _documented_routes() - routes


def _route_of(command: tuple[Path, str]) -> tuple[str, str]:
    method, path = _called(command[1])
    return method, "/v1/models/{id}" if path.startswith("/v1/models/") else path


def _words_in_backticks() -> set[str]:
    return {word for phrase in documented() for word in re.findall(r"[a-z_][a-z0-9_.]*", phrase)}


def test_docs_name_every_request_field() -> None:
    bodies: list[Body] = [each.body for each in OPERATIONS if each.body is not None]
    bodies += [body for socket in SOCKETS for body in socket.messages.values()]
    kinds = {kind for body in bodies for kind in body.kinds} | {each.query for each in OPERATIONS if each.query}
    fields = {name for kind in kinds for name in kind.__struct_encode_fields__}
    assert {"messages", "fork_with", "starting_after", "dry_run"} <= fields
    assert not fields - _words_in_backticks()


def _strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_docs_name_every_frame() -> None:
    sources = DOCS.parent.rglob("*.py")
    pattern = re.compile(r"(response|conversation|session|prompt)(\.[a-z_]+)+")
    frames = {text for path in sources for text in _strings(path) if pattern.fullmatch(text)}
    assert {"response.beam", "prompt.prewarmed", "response.output_text.delta", "response.steer.failed"} <= frames
    assert not frames - _words_in_backticks()


def _error_codes() -> set[str]:
    """Error codes in the source: `code = "..."` of error classes, `code="..."` in calls."""
    sources = (path.read_text(encoding="utf-8") for path in Path(chatcache.__file__).parent.rglob("*.py"))
    nodes = (node for text in sources if re.search(r"\bcode\s*=", text) for node in ast.walk(ast.parse(text)))
    values = (node.value for node in nodes if _is_code(node))
    return {each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def _is_code(node: ast.AST) -> TypeGuard[ast.keyword | ast.Assign]:
    if isinstance(node, ast.Assign):
        return [getattr(target, "id", "") for target in node.targets] == ["code"]
    return isinstance(node, ast.keyword) and node.arg == "code"


def test_docs_name_every_error_code_and_no_other() -> None:
    codes = _error_codes() - NEVER_SENT
    assert len(codes) > 30
    assert not codes - documented()
    section = (DOCS / "errors-and-limits.md").read_text().partition("## Error codes\n")[2].partition("\n## ")[0]
    listed = {code for row in re.findall(r"^\| \d[^|]*\|([^|]*)\|", section, re.MULTILINE) for code in _quoted(row)}
    assert listed <= codes


def _quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the lines run, one after another: what one writes, another may read."""
    return tmp_path_factory.mktemp("curl")


@pytest.mark.parametrize(
    "command", [line for _, line in COMMANDS if CALLS_TOOL not in line], ids=lambda command: command[:90]
)
def test_documented_curl_line_succeeds(server: Server, folder: Path, command: str) -> None:
    response = converse(server, "Hello pages", instructions="Be brief.", ignore_eos=True, max_output_tokens=8)
    ids = {
        "conv_x": response["conversation"]["id"],
        "msg_x": response["output"][0]["id"],
        "resp_x": response["id"],
        "chatcache-builtin": MODEL,
        "http://127.0.0.1:8000": server.url,
    }
    if "conv_x.secret" in command:
        link = server.post(f"/v1/conversations/{ids['conv_x']}/share")[2]["path"]
        command = command.replace("conv_x.secret", link.rpartition("/")[2])
    for shown, real in ids.items():
        command = command.replace(shown, real)
    # A function, so that the line stays as it is: an HTTP error is one of the command's.
    script = f'curl() {{ command curl --fail-with-body -sS --max-time 30 "$@"; }}\n{command}\n'
    environment = {**os.environ, "U": server.url, "KEY": "any"}
    done = subprocess.run(
        ["bash", "-ec", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-500:]}{done.stderr[-500:]}"


FRAMES = [line[2:] for page in API_PAGES for line in command_lines(page, ">")]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame[:60])
def test_documented_frame_is_accepted(server: Server, url: str, frame: str) -> None:
    response = converse(server, "Hello")
    for shown, real in (("resp_x", response["id"]), ("msg_x", response["output"][0]["id"])):
        frame = frame.replace(shown, real)
    assert json.loads(frame)
    with connect(url, subprotocols=["chatcache.v1"]) as socket:  # type: ignore[list-item]
        assert receive(socket)["type"] == "session.created"
        socket.send(frame)
        first = receive(socket)
    assert first["type"] != "error", first


def test_docs_have_examples() -> None:
    assert len(command_lines(FRONT_PAGE, "curl")) >= 1 and len(COMMANDS) > len(OPERATIONS) and FRAMES


def test_readme_stays_short() -> None:
    assert len(FRONT_PAGE.read_text(encoding="utf-8").split()) <= 900


def test_index_and_readme_link_every_page() -> None:
    for index in (DOCS / "README.md", FRONT_PAGE):
        links = {target.resolve() for target, _ in _links(index)}
        assert not {page for page in API_PAGES if page != DOCS / "README.md"} - links, index


def _anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _links(page: Path) -> Iterator[tuple[Path, str]]:
    """Target file and anchor of every relative link."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield (page.parent / path if path else page), anchor


@pytest.mark.parametrize("page", [*ALL_PAGES, *GUIDES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, anchor in _links(page):
        assert target.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose(target), re.MULTILINE)
            assert anchor in map(_anchor, headings), f"{page.name}: no heading #{anchor} in {target.name}"


def test_limits_in_the_docs_are_those_of_the_code() -> None:
    section = (DOCS / "errors-and-limits.md").read_text().partition("## Limits\n")[2].partition("\n## ")[0]
    server = ServerConfig()
    limits = {
        "body": f"{server.max_body_bytes // 2**20} MiB (413) / {server.max_frame_bytes // 2**20} MiB (close 1009)",
        "values": f"{jsonio.MAX_VALUES:,} / {jsonio.MAX_NODES:,} / {jsonio.MAX_DEPTH}",
        "a body that stops": f"{server.body_timeout_s:g} s (408)",
        "`n`": str(MAX_N),
        "messages of": f"{wire.MAX_MESSAGES}; {wire_messages.MAX_PARTS}; {wire.MAX_PROMPTS}",
        "`items` that": f"{wire.MAX_NEW_ITEMS:,}",
        "stored messages of": f"{MAX_ITEMS:,} (400)",
        "`tools`": f"{wire_messages.MAX_TOOLS}; "
        f"{tooling.MAX_SCHEMA_BYTES >> 10} KiB; {tooling.MAX_TOOLS_BYTES >> 10} KiB",
        "`stop`": f"{MAX_STOP_STRINGS}; 64",
        "`top_logprobs`": str(MAX_TOP_LOGPROBS),
        "log-probabilities of": f"{MAX_OUTPUT_LOGPROBS:,} (400); without `max_tokens`, that is the limit "
        "(`x-chatcache-max-tokens`)",
        "concurrent streams": f"{lanes.MAX_STREAMS}; {lanes.MAX_QUEUED}",
        "bytes of": f"{lanes.MAX_QUEUED_BYTES >> 20} MiB (an `error` frame, then close {ws.RATE_LIMITED}); "
        f"{admission.MAX_OWNER_FRAME_BYTES >> 20} MiB (an `error` frame)",
        "WebSockets of": f"{admission.MAX_OWNER_SOCKETS} (429)",
        "frames sent": f"{ws.MAX_FRAMES_PER_S:g} a second, {ws.MAX_BURST:g} at once (an `error` frame, then close "
        f"{ws.RATE_LIMITED})",
        "frames on all": f"{admission.MAX_OWNER_FRAMES_PER_S:g} a second, {admission.MAX_OWNER_FRAME_BURST:g} at once "
        f"(an `error` frame, then close {ws.RATE_LIMITED})",
        "fragments": f"{http.MAX_FRAGMENTS:,}; {http.MAX_FRAMES_PER_S:g} a second, {http.MAX_FRAME_BURST:g} at once "
        f"(close {ws.RATE_LIMITED})",
        "entries of a list": str(paging.MAX_LIMIT),
    }
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    for what, limit in limits.items():
        assert [row[1] for row in rows if row[0].startswith(what)] == [limit], what


def _paths(page: Path) -> set[str]:
    """Modules, packages and files that a page names in backticks."""
    found = re.findall(r"`([\w.-]+(?:/[\w.-]+)+/?)`", prose(page))
    return {path for path in found if not path.startswith(("/", "."))}


@pytest.mark.parametrize("page", [DOCS / "architecture.md", *GUIDES], ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_of_a_page_exist(page: Path) -> None:
    roots = [page.parent, ROOT, ROOT / "chatcache", ROOT / "chatcache/gateway", ROOT / "kernels/chatcache_kernels"]
    roots += [ROOT / "web", ROOT / "kernels"]
    names = {path: [root / path for root in roots] + [root / f"{path}.py" for root in roots] for path in _paths(page)}
    missing = sorted(path for path, places in names.items() if not any(place.exists() for place in places))
    assert not missing, f"{page.name} names files that do not exist"
