"""Fixtures: a tiny model folder, and one server shared by tests that do not stop it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.servers import Server, serving
from tests.llm.tiny_llama import make_model, write_folder

MAX_LONG_LEN = 32_768


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Undo what a command that runs in this process has configured: its stream is closed after the test."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    path.mkdir()
    write_folder(path, make_model())
    return path


@pytest.fixture(scope="module")
def long_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a context in which a reply runs for several seconds."""
    path = tmp_path_factory.mktemp("long")
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MAX_LONG_LEN}))
    return path


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(folder, tmp_path_factory.mktemp("cwd")) as server:
        server.ready()
        yield server
