"""Conversations as Markdown, parsed back by a plain reading of headings and fences."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings

from chatcache.conversations.tree import Conversation, ConversationTree, Item, ReplyParts, ToolCall
from chatcache.transfer.format import branch_markdown, tree_markdown
from tests.support.conversation_trees import GeneratedTree, trees


def headings(text: str) -> list[str]:
    """Return the headings outside of code blocks."""
    found, fence = [], ""
    for line in text.split("\n"):
        mark = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if mark and not fence:
            if mark[1][0] == "~" or "`" not in line[mark.end() :]:
                fence = mark[1]
        elif mark and fence and line.strip().startswith(fence) and set(line.strip()) == {fence[0]}:
            fence = ""
        elif not fence and line.startswith("#"):
            found.append(line)
    assert not fence
    return found


def test_branch_markdown_contains_every_part() -> None:
    calls = (ToolCall("c", "find", '{"q": "`x`"}'),)
    path = [
        Item("s", None, "system", "Be kind"),
        Item("u", "s", "user", "Show *me*\n\n```python\nprint(1)\n```\n"),
        Item("a", "u", "assistant", "Sure", parts=ReplyParts("first\nthen", calls)),
        Item("t", "a", "tool", "42"),
    ]
    assert branch_markdown("My\ntitle", path) == (
        "# My title\n\n## System\n\nBe kind\n\n## User\n\nShow *me*\n\n```python\nprint(1)\n```\n\n"
        '## Assistant\n\n> first\n> then\n\nSure\n\nCall of `find`:\n\n```json\n{"q": "`x`"}\n```\n\n## Tool\n\n42\n'
    )
    assert branch_markdown("", []) == "# Conversation\n"


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)",
        "~~~\ncode",
        "````md\n```\ninside\n```",
        "```\na\n```\n```\nb",
        "```js\n~~~\nx\n~~~",
        "   ```\nx",
        "```\nclosed by more\n`````",
        "no ``` fence",
        "```not `a` fence\nx",
        "    ```\nindented code",
        "```\r\nwindows\r\n```\r\n",
        "``` \n```x\n",
    ],
)
def test_markdown_code_block_never_includes_the_next_heading(text: str) -> None:
    written = branch_markdown("T", [Item("a", None, "assistant", text), Item("u", "a", "user", "next")])
    assert headings(written) == ["# T", "## Assistant", "## User"]
    assert text.strip("\n") in written


@settings(deadline=None, max_examples=60)
@given(trees())
@pytest.mark.slow
def test_tree_markdown_has_every_message_once_with_its_parent(generated: GeneratedTree) -> None:
    named = [Item(item.id, item.parent_id, item.role, item.id) for item in generated.tree.items.values()]
    tree = ConversationTree(Conversation("c", "", 0.0, 0.0, "T"), named, ())
    parts = re.split(r"\n\n## ", tree_markdown(tree))[1:]
    by_number: dict[int, str] = {}
    before: int | None = None
    for number, part in enumerate(parts, 1):
        heading, item_id = part.strip().split("\n\n")
        match = re.fullmatch(r"(\d+) · \w+(?: · (\d+) of (\d+))?(?: · (?:after (\d+)|(from the start)))?", heading)
        assert match is not None and int(match[1]) == number, heading
        item = tree.items[item_id]
        siblings = [each.id for each in tree.children(item.parent_id)]
        assert (match[2] is None) == (len(siblings) == 1)
        if match[2] is not None:
            assert siblings[int(match[2]) - 1] == item_id and int(match[3]) == len(siblings)
        above = int(match[4]) if match[4] else None if match[5] or before is None else before
        assert item.parent_id == (by_number[above] if above is not None else None)
        by_number[number], before = item_id, number
    assert sorted(by_number.values()) == sorted(tree.items)


def test_tree_markdown_of_many_siblings_takes_linear_time() -> None:
    """The limit is twenty times what it takes."""
    items = [Item(f"i{at}", None, "user", "x") for at in range(20_000)]
    tree = ConversationTree(Conversation("c", "", 0.0, 0.0, "T"), items, ())
    started_s = time.process_time()
    text = tree_markdown(tree)
    assert time.process_time() - started_s < 2 and "## 20000 · User · 20000 of 20000 · from the start" in text
