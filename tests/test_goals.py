"""Check the table of promises in README.md: every promise has a test and an injected bug, and both exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.security.test_advisories import functions_in

TESTS = Path(__file__).parent
GOALS = {f"G{number}" for number in (7, 9, 10, 11, 12, 13, 15, 16, 17, 18, 19, 20, 22, 24, 25, 27)}
GOALS |= {f"F{number}" for number in (2, 3, 4, 6, 7, 8, 9, 10, 11)}
_ROW = re.compile(r"^\| \*\*([FG]\d+)\*\* [^|]+\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
_NAME = re.compile(r"`([\w/]+\.py)::(\w+)`")
_LONG = re.compile(r"`pytest -m long ([^`]+)`")


def check(text: str) -> None:
    rows = _ROW.findall(text)
    assert len(rows) == text.count("\n| **"), "a row is not of four cells"
    missing = GOALS - {goal for goal, *_ in rows}
    assert not missing, f"the table lacks {missing}"
    for goal, tests, injected, in_full in rows:
        for names in (tests, injected):
            found = _NAME.findall(names)
            assert found, f"{goal} has no test, or no injected bug"
            for file, name in found:
                assert (TESTS / file).is_file() and name in functions_in(file), f"there is no {file}::{name}"
        for files in _LONG.findall(in_full):
            for file in files.split():
                assert "mark.long" in (TESTS.parent / file).read_text(), f"nothing in {file} is long"


def text() -> str:
    return (TESTS / "README.md").read_text()


def test_every_promise_has_a_test_and_an_injected_bug() -> None:
    check(text())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("**G22**", "**G23**", "the table lacks {'G22'}"),
        (
            "::test_poisoned_requests_fail_alone",
            "::test_poisoned_requests_fail",
            "there is no engine_process/test_restarts.py::test_poisoned_requests_fail",
        ),
        ("`cli/test_drain.py::test_drain_check_finds_a_server_that_interrupts_nothing`", "none", "G24 has no test"),
        (
            "long tests/storage/test_durability.py",
            "long tests/storage/test_sqlite_faults.py",
            "test_sqlite_faults.py is long",
        ),
    ],
    ids=["missing promise", "unknown test", "no injected bug", "full size without long mark"],
)
def test_incomplete_table_is_rejected(old: str, new: str, words: str) -> None:
    assert old in text()
    with pytest.raises(AssertionError, match=re.escape(words)):
        check(text().replace(old, new))
