"""Conversations as Markdown: roles as headings, texts as they are.

The messages of one branch follow each other. With all branches, messages are numbered from the root downwards, and a
message that does not follow the one before it names its parent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from chatcache.conversations.tree import ConversationTree, Item

_ROLES = {"user": "User", "assistant": "Assistant", "system": "System", "tool": "Tool"}
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


def branch_markdown(title: str, path: Sequence[Item]) -> str:
    """Return one branch."""
    return _document(title, ((_ROLES.get(item.role, item.role), item) for item in path))


def tree_markdown(tree: ConversationTree) -> str:
    """Return every branch, each message once."""
    return _document(tree.conversation.title, _numbered(tree))


def _document(title: str, entries: Iterator[tuple[str, Item]]) -> str:
    parts = [f"# {' '.join(title.split()) or 'Conversation'}"]
    for heading, item in entries:
        parts.append(f"## {heading}")
        parts += [text for text in (_reasoning(item), _closed(item.text.strip("\n")), *_calls(item)) if text]
    return "\n\n".join(parts) + "\n"


def _numbered(tree: ConversationTree) -> Iterator[tuple[str, Item]]:
    children: dict[str | None, list[Item]] = {}
    for item in tree.items.values():
        children.setdefault(item.parent_id, []).append(item)
    numbers: dict[str, int] = {}
    before: str | None = None
    stack = list(reversed(children.get(None, ())))
    while stack:
        item = stack.pop()
        numbers[item.id] = len(numbers) + 1
        heading = f"{numbers[item.id]} · {_ROLES.get(item.role, item.role)}"
        siblings = children[item.parent_id]
        if len(siblings) > 1:
            heading += f" · {1 + next(at for at, each in enumerate(siblings) if each is item)} of {len(siblings)}"
        if item.parent_id != before:
            heading += f" · after {numbers[item.parent_id]}" if item.parent_id is not None else " · from the start"
        before = item.id
        yield heading, item
        stack += reversed(children.get(item.id, ()))


def _reasoning(item: Item) -> str:
    """Return the model's reasoning as a block quote."""
    text = item.parts.reasoning.strip()
    return "\n".join(f"> {line}".rstrip() for line in text.split("\n")) if text else ""


def _calls(item: Item) -> Iterator[str]:
    for call in item.parts.tool_calls:
        longest = max((len(run) for run in re.findall("`+", call.arguments)), default=0)
        fence = "`" * max(3, longest + 1)
        yield f"Call of `{call.name}`:\n\n{fence}json\n{call.arguments}\n{fence}"


def _closed(text: str) -> str:
    """Return the text with its last code block closed, so that it does not include what follows.

    Source: CommonMark 0.31, 4.5.
    """
    fence = ""
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line.rstrip("\r"))
        if match is None:
            continue
        mark, rest = match.groups()
        if not fence:
            if mark[0] == "~" or "`" not in rest:
                fence = mark
        elif mark[0] == fence[0] and len(mark) >= len(fence) and not rest.strip():
            fence = ""
    return f"{text}\n{fence}" if fence else text
