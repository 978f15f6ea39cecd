"""Test that every advisory of `advisories.py` has an existing test, or a reason not to have one."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.security.advisories import CLASSES, KNOWN, AdvisoryClass

TESTS = Path(__file__).resolve().parents[1]


@cache
def functions_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def check(classes: Sequence[AdvisoryClass]) -> None:
    found = [name for each in classes for name in each.ids]
    assert len(found) == len(set(found)), "an advisory is listed twice"
    assert not set(KNOWN) - set(found), "advisories without a class"
    for each in classes:
        assert bool(each.tests) != bool(each.not_ours), each.what
        for test in each.tests:
            file, _, name = test.partition("::")
            assert (TESTS / file).is_file() and name in functions_in(file), f"there is no {test}"


def test_every_advisory_has_a_test_or_a_reason() -> None:
    check(CLASSES)


@pytest.mark.parametrize(
    "incomplete",
    [
        CLASSES[1:],
        (*CLASSES, CLASSES[0]),
        (replace(CLASSES[0], tests=()), *CLASSES[1:]),
        (replace(CLASSES[0], tests=("kv_cache/test_pool.py::test_none",)), *CLASSES[1:]),
        (replace(CLASSES[0], tests=("kv/test_none.py::test_none",)), *CLASSES[1:]),
    ],
    ids=["one missing", "one twice", "no test", "unknown test", "unknown file"],
)
def test_incomplete_table_is_rejected(incomplete: Sequence[AdvisoryClass]) -> None:
    with pytest.raises(AssertionError):
        check(incomplete)
