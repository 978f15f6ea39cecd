"""Docstrings, comments and names are plain technical English (word list in `tests/support/language.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.language import ROOT, check, findings

CHECKED = ["kernels/bench", "loadtest"]
WORD_LISTS = {ROOT / "tests" / "support" / "language.py", ROOT / "tests" / "test_language.py"}


@pytest.mark.parametrize("folder", CHECKED)
def test_folder_uses_standard_terms(folder: str) -> None:
    assert not [str(found) for found in check([ROOT / folder]) if found.path not in WORD_LISTS]


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
