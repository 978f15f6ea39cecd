"""Python blocks and the outputs that README and docs show, run against the demo model."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from chatcache import LLM
from chatcache.config import EngineConfig, ServerConfig
from chatcache.factory import build_engine, load_tokenizer
from tests.gateway.documents import ALL_PAGES, Block, blocks
from tests.gateway.serving import MODEL, Server

CONFIG = EngineConfig(dtype="float32", attention_backend="reference", device="cpu", kv_memory_bytes=8 * 2**20)
BLOCKS = [block for page in ALL_PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
CURL = [block for block in BLOCKS if not block.language and block.output]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the demo model."""
    tokenizer = load_tokenizer(CONFIG)
    config = ServerConfig(db=str(tmp_path_factory.mktemp("db") / "chat.db"))
    server = Server(
        config, load_tokenizer=lambda: tokenizer, tokenizer=tokenizer, build_engine=lambda: build_engine(CONFIG)
    )
    with server:
        yield server.wait_ready()
        server.wait_idle()


def _here(text: str, server: Server) -> str:
    """The example with this server's address and model name."""
    return text.replace("http://127.0.0.1:8000", server.url).replace("chatcache-builtin", MODEL)


def _assert_shown(output: str, shown: str) -> None:
    """Check that the output has what the document shows: each part between ellipses, in order."""
    parts = [part.strip() for part in re.split(r"\.\.\.", shown)]
    position = 0
    for part in filter(None, (line for each in parts for line in each.splitlines())):
        found = output.find(part, position)
        assert found >= 0, f"not in the output: {part}\n{output}"
        position = found + len(part)


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"{block.page}-{block.text[:40]!r}")
def test_python_example_prints_what_the_document_shows(
    demo: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, block: Block
) -> None:
    small: Any = functools.partial(LLM, dtype="float32", attention_backend="reference", kv_memory="8MiB")
    monkeypatch.setattr("chatcache.LLM", small, raising=False)
    exec(compile(_here(block.text, demo), block.page, "exec"), {"__name__": "example"})  # noqa: S102
    output = capsys.readouterr().out
    assert output.strip()
    _assert_shown(output, block.output)


@pytest.mark.parametrize("block", CURL, ids=lambda block: f"{block.page}-{block.text[:40]!r}")
def test_curl_example_prints_what_the_document_shows(demo: Server, block: Block) -> None:
    for python in (each for each in PYTHON if each.page == block.page):
        exec(compile(_here(python.text, demo), python.page, "exec"), {"__name__": "example"})  # noqa: S102
    done = subprocess.run(
        ["bash", "-ec", _here(block.text, demo)], capture_output=True, text=True, timeout=60, check=True
    )
    _assert_shown(done.stdout, block.output)


def test_documents_show_outputs() -> None:
    assert sum(bool(block.output) for block in PYTHON) >= 2 and CURL


def test_wrong_output_is_found() -> None:
    with pytest.raises(AssertionError, match="not in the output"):
        _assert_shown("1 of 2", "1 ... 3")
