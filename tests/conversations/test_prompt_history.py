"""Comparison of prompts: what changed, and how many tokens stay the same."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from chatcache.conversations.prompt import Function, Message
from chatcache.conversations.prompt_history import Comparison, PromptHistory, PromptRecord, compare, num_equal

SYSTEM, USER = Message(role="system", content="Be kind."), Message(role="user", content="Hi")
ANSWER = Message(role="assistant", content="Hello")
EARLIER = PromptRecord((SYSTEM, USER), (), array("i", range(10)))


def record(tokens: list[int], *messages: Message, **fields: Any) -> PromptRecord:
    return PromptRecord(messages, fields.pop("functions", ()), array("i", tokens), **fields)


def changed_at(index: int) -> list[int]:
    return [*range(index), *range(100, 120)]


OTHER = Message(role="system", content="Be brief.")
BYE = Message(role="user", content="Bye")
TOOLS = (Function("clock"),)


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (record([*range(30)], SYSTEM, USER, ANSWER, BYE), Comparison(None, 10, 0)),
        (record([*range(30)], OTHER, USER), Comparison(None, 10, 0)),  # what the template shows counts
        (record(changed_at(8), SYSTEM, USER, ANSWER, BYE), Comparison(None, 8, 0)),
        (record(changed_at(2), SYSTEM, USER, ANSWER, BYE), Comparison("other", 2, 8)),
        (record(changed_at(2), OTHER, USER), Comparison("system", 2, 8)),
        (record(changed_at(2), USER), Comparison("system", 2, 8)),
        (record(changed_at(0), SYSTEM, USER, functions=TOOLS), Comparison("tools", 0, 10)),
        (record(changed_at(7), SYSTEM, BYE), Comparison("messages", 7, 3)),
        (record([*range(5)], SYSTEM), Comparison("messages", 5, 5)),
        (record(changed_at(7), SYSTEM, BYE, is_compacted=True), Comparison("compacted", 7, 3)),
    ],
)
def test_compare_names_the_first_change(later: PromptRecord, expected: Comparison) -> None:
    assert compare(EARLIER, later, page_size=4) == expected


def test_num_equal_equals_a_count() -> None:
    draws = random.Random(5)
    for _ in range(300):
        one = [draws.randrange(2) for _ in range(draws.randrange(40))]
        cut = draws.randrange(len(one) + 1)
        other = [*one[:cut], *(draws.randrange(2) for _ in range(draws.randrange(9)))]
        count = 0
        while count < min(len(one), len(other)) and one[count] == other[count]:
            count += 1
        assert num_equal(array("i", one), array("i", other)) == count


def test_history_is_bounded_and_keeps_what_is_used() -> None:
    history = PromptHistory(max_tokens=25)
    history.add("ann", "a", EARLIER)
    history.add("ann", "b", EARLIER)
    assert history.find("ann", "a") is EARLIER and history.find("bob", "a") is None
    history.add("ann", "c", EARLIER)
    assert history.find("ann", "b") is None
    assert history.find("ann", "a") is history.find("ann", "c") is EARLIER
