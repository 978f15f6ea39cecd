"""Docstrings, comments and names are plain technical English (word list in `tests/support/language.py`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gateway.documents import ALL_PAGES
from tests.support.language import ROOT, check, findings, in_prose

CHECKED = [
    "chatcache",
    "kernels",
    "loadtest",
    "tests/bench",
    "tests/chaos",
    "tests/cli",
    "tests/contracts",
    "tests/conversations",
    "tests/decoding",
    "tests/deploy",
    "tests/demo_model",
    "tests/e2e",
    "tests/engine",
    "tests/engine_process",
    "tests/gateway",
    "tests/gpu",
    "tests/kv_cache",
    "tests/llm",
    "tests/loadtest",
    "tests/model",
    "tests/packaging",
    "tests/scheduler",
    "tests/security",
    "tests/storage",
    "tests/support",
    "tests/tokenizer",
    "tests/transfer",
]
FOLDERS = ("kernels", "loadtest", "loadtest/peers", "tests", "tests/chaos", "web", "chatcache/demo_model")
GUIDES = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
DOCUMENTS = [
    *ALL_PAGES,
    *GUIDES,
    *(ROOT / folder / "README.md" for folder in FOLDERS),
]
WORD_LISTS = {ROOT / "tests" / "support" / "language.py", ROOT / "tests" / "test_language.py"}


@pytest.mark.parametrize("folder", CHECKED)
def test_folder_uses_standard_terms(folder: str) -> None:
    assert not [str(found) for found in check([ROOT / folder]) if found.path not in WORD_LISTS]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_document_uses_standard_terms(page: Path) -> None:
    text = re.sub(r"`[^`\n]+`", "", page.read_text(encoding="utf-8"))  # names in backticks are those of the code
    assert not [f"line {line + 1}: {word!r}: write {instead}" for line, word, instead in in_prose(text)]


@pytest.mark.parametrize(
    "source",
    [
        '"""Whoever asks first."""',
        "def release() -> None:\n    '''Everybody gets a page.'''",
        "x = 1  # compiled by hand",
        "survivors = []",
        "class FrontDoor: ...",
        "def submit(told: int) -> None: ...",
        "class Stream:\n    def __init__(self) -> None:\n        self.num_told = 0",
    ],
)
def test_word_outside_the_standard_terms_is_found(source: str) -> None:
    assert len(findings(Path("example.py"), source)) == 1


@pytest.mark.parametrize("source", ['message = "somebody"', "text = file.tell()", '"""Pages of the untold prefix."""'])
def test_literals_and_names_defined_elsewhere_are_not_checked(source: str) -> None:
    assert not findings(Path("example.py"), source)
