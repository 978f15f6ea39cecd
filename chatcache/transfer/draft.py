"""Drafts: conversations read from a file, checked, under the ids of the file.

Files may come from strangers, so a draft is checked before use: every parent exists and comes first, and no item is its
own ancestor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chatcache.conversations.tree import Conversation, Item, Turn
from chatcache.errors import InvalidRequestError

MAX_ITEMS = 100_000


@dataclass(frozen=True, slots=True)
class Draft:
    """A conversation to be imported, with the ids of its file. `items` are parents first.

    `skipped`: number of parts of the file that are not messages, by kind. `is_exact`: replies have their tokens.
    """

    conversation: Conversation
    items: tuple[Item, ...]
    turns: tuple[Turn, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    is_exact: bool = False


def parents_first(items: Sequence[Item]) -> tuple[Item, ...]:
    """Order items so that every parent precedes its children.

    The given order is kept where possible. Raises: InvalidRequestError naming the item, for duplicate ids, missing
    parents and cycles.
    """
    if len(items) > MAX_ITEMS:
        raise InvalidRequestError(f"items: at most {MAX_ITEMS}, got {len(items)}", param="items")
    positions: dict[str, int] = {}
    for index, item in enumerate(items):
        if positions.setdefault(item.id, index) != index:
            raise InvalidRequestError(
                f"items[{index}].id: {item.id!r} was items[{positions[item.id]}] already", param="items"
            )
    for index, item in enumerate(items):
        if item.parent_id is not None and item.parent_id not in positions:
            raise InvalidRequestError(f"items[{index}].parent_id: there is no item {item.parent_id!r}", param="items")
    done: set[str] = set()
    ordered: list[Item] = []
    for index, item in enumerate(items):
        ancestors: list[Item] = []
        seen: set[str] = set()
        while item.id not in done:
            if item.id in seen:
                raise InvalidRequestError(f"items[{index}]: {item.id!r} is among its own ancestors", param="items")
            seen.add(item.id)
            ancestors.append(item)
            if item.parent_id is None:
                break
            item = items[positions[item.parent_id]]
        ordered += reversed(ancestors)
        done |= seen
    return tuple(ordered)


class Ancestry:
    """Ancestor queries in constant time at any depth.

    A depth-first walk numbers entry and exit of each item.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        """Walk the tree of `items` and number them; parents must come before their children."""
        children: dict[str | None, list[str]] = {}
        for item in items:
            children.setdefault(item.parent_id, []).append(item.id)
        self._entered: dict[str, int] = {}
        self._left: dict[str, int] = {}
        clock = 0
        stack = [(item_id, False) for item_id in children.get(None, ())]
        while stack:
            item_id, is_leaving = stack.pop()
            clock += 1
            if is_leaving:
                self._left[item_id] = clock
                continue
            self._entered[item_id] = clock
            stack.append((item_id, True))
            stack += [(child, False) for child in children.get(item_id, ())]

    def is_on_path(self, ancestor: str, item_id: str) -> bool:
        """Check whether `ancestor` is the item or one of its ancestors."""
        return self._entered[ancestor] <= self._entered[item_id] and self._left[item_id] <= self._left[ancestor]
