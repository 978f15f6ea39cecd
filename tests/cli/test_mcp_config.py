"""The file of the MCP servers: what it may have, and errors that name the field and no secret."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from chatcache.cli.serve import convert_flags
from chatcache.config import McpServer, ServerConfig, read_mcp_servers
from chatcache.errors import InvalidRequestError

WHOLE = """
[[server]]
name = "docs"
url = "https://docs.example.org:8443/mcp?project=1"
headers = { Authorization = "Bearer secret", X-Team = "a b" }
tools = ["search", "read.page"]
allow = ["search"]
timeout_s = 2.5

[[server]]
name = "plain"
url = "http://localhost/mcp"
"""
DOCS = McpServer(
    name="docs",
    url="https://docs.example.org:8443/mcp?project=1",
    headers={"Authorization": "Bearer secret", "X-Team": "a b"},
    tools=("search", "read.page"),
    allow=("search",),
    timeout_s=2.5,
)
PLAIN = McpServer(name="plain", url="http://localhost/mcp")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mcp.toml"


def test_file_is_read_in_order_with_defaults(file: Path) -> None:
    file.write_text(WHOLE)
    assert read_mcp_servers(file) == (DOCS, PLAIN)
    assert PLAIN.tools is None and PLAIN.allow == () and PLAIN.headers == {}


def test_repr_of_a_server_has_no_secret() -> None:
    assert repr(ServerConfig(mcp_servers=(DOCS,))).count("McpServer('docs')") == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ('name = "two words"', "$.name"),
        ('name = "docs\\n"', "$.name"),
        ("timeout_s = 0", "$.timeout_s"),
        ("timeout_s = 601", "$.timeout_s"),
        ('timeout_s = "2"', "$.timeout_s"),
        ('timeout = "2"', "`timeout`"),
        ('tools = "search"', "$.tools"),
        ('tools = [""]', "$.tools"),
        ('allow = ["write"]\ntools = ["read"]', "allow: 'write'"),
        ('headers = { Authorization = "secret\\nX: 1" }', "$.headers"),
        ('headers = { Authorization = "sécret" }', "$.headers"),
        ('headers = { "X Y" = "secret" }', "$.headers"),
        ('url = "ftp://h/secret"', "url: must be http"),
        ('url = "https:///secret"', "url: must be http"),
        ('url = "https://h:secret/mcp"', "url: must be http"),
        ('url = "https://user:secret@h/mcp"', "put them into headers"),
        ('url = "https://h/mcp#secret"', "fragment"),
        ('url = "https://h/a secret"', "spaces"),
    ],
)
def test_wrong_field_is_named_without_its_value(file: Path, change: str, named: str) -> None:
    fields = {"name": 'name = "docs"', "url": 'url = "http://h/mcp"'} | {
        line.partition(" ")[0]: line for line in change.split("\n")
    }
    file.write_text("[[server]]\n" + "\n".join(fields.values()))
    with pytest.raises(InvalidRequestError) as found:
        read_mcp_servers(file)
    assert named in found.value.message and "server 1" in found.value.message and str(file) in found.value.message
    assert "secret" not in found.value.message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no tables [[server]]"),
        ("server = 3", "no tables [[server]]"),
        ("servers = []\n" + WHOLE, "'servers'"),
        (WHOLE + '[[server]]\nname = "docs"\nurl = "http://h/mcp"', "server 3: name: 'docs'"),
        ('[[server]]\nname = "docs"', "`url`"),
        ("[[server", "array declaration"),
    ],
)
def test_wrong_file_is_refused(file: Path, text: str, named: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidRequestError) as found:
        read_mcp_servers(file)
    assert named in found.value.message


def _convert(file: Path) -> tuple[McpServer, ...]:
    return convert_flags({"mcp_config": file})[1].mcp_servers


def test_flag_reads_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    file.write_text(WHOLE)
    assert _convert(file) == (DOCS, PLAIN)
    with pytest.raises(typer.BadParameter, match="No such file"):
        _convert(file.with_name("none"))


def test_flag_without_the_package_says_what_to_install(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        assert name == "mcp"

    monkeypatch.setattr(importlib.util, "find_spec", find)
    file.write_text(WHOLE)
    with pytest.raises(typer.BadParameter, match=r"pip install 'chatcache\[mcp\]'"):
        _convert(file)
