"""The tiny model as a folder, as an `LLM`, and as transformers' own model: the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatcache import LLM
from tests.llm.tiny_llama import make_model, write_folder


@pytest.fixture(scope="session")
def oracle() -> Any:
    return make_model()


@pytest.fixture(scope="session")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    write_folder(path, oracle)
    return path


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", attention_backend="reference", kv_memory="4MiB") as llm:
        yield llm
