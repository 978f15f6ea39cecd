"""Fixtures: a tiny model folder, and one server shared by tests that do not stop it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.servers import Server, serving
from tests.llm.tiny_llama import make_model, write_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    path.mkdir()
    write_folder(path, make_model())
    return path


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(folder, tmp_path_factory.mktemp("cwd")) as server:
        server.ready()
        yield server
