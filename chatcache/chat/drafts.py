"""What an imported file says, before it is anybody's: a checked tree under the ids of its file.

Files come from strangers. Whatever a draft holds can be stored and walked: every parent exists and comes first, and
nothing goes round in circles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chatcache.chat.tree import Conversation, Item, Turn
from chatcache.errors import InvalidRequest

MAX_ITEMS = 100_000


@dataclass(frozen=True, slots=True)
class Draft:
    """A conversation to be imported; its ids are the file's. `items` are parents first.

    `skipped`: what of the file is no message, by kind. `is_exact`: replies come with the tokens they were made of.
    """

    conversation: Conversation
    items: tuple[Item, ...]
    turns: tuple[Turn, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    is_exact: bool = False


def parents_first(items: Sequence[Item]) -> tuple[Item, ...]:
    """Order a tree so that every parent comes before its children, moving nothing that need not move.

    Raises: InvalidRequest naming the item: two of one id, a parent that is not there, a circle.
    """
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(f"items: at most {MAX_ITEMS}, got {len(items)}", param="items")
    places: dict[str, int] = {}
    for at, item in enumerate(items):
        if places.setdefault(item.id, at) != at:
            raise InvalidRequest(f"items[{at}].id: {item.id!r} was items[{places[item.id]}] already", param="items")
    for at, item in enumerate(items):
        if item.parent_id is not None and item.parent_id not in places:
            raise InvalidRequest(f"items[{at}].parent_id: there is no item {item.parent_id!r}", param="items")
    done: set[str] = set()
    ordered: list[Item] = []
    for at, item in enumerate(items):
        above: list[Item] = []
        on_the_way: set[str] = set()
        while item.id not in done:
            if item.id in on_the_way:
                raise InvalidRequest(f"items[{at}]: {item.id!r} is among its own ancestors", param="items")
            on_the_way.add(item.id)
            above.append(item)
            if item.parent_id is None:
                break
            item = items[places[item.parent_id]]
        ordered += reversed(above)
        done |= on_the_way
    return tuple(ordered)


class Ancestry:
    """Who is above whom, in constant time however deep the tree: a walk numbers each item on its way in and out."""

    def __init__(self, items: Sequence[Item]) -> None:
        """`items` are parents first."""
        children: dict[str | None, list[str]] = {}
        for item in items:
            children.setdefault(item.parent_id, []).append(item.id)
        self._entered: dict[str, int] = {}
        self._left: dict[str, int] = {}
        clock = 0
        waiting = [(item_id, False) for item_id in children.get(None, ())]
        while waiting:
            item_id, is_leaving = waiting.pop()
            clock += 1
            if is_leaving:
                self._left[item_id] = clock
                continue
            self._entered[item_id] = clock
            waiting.append((item_id, True))
            waiting += [(child, False) for child in children.get(item_id, ())]

    def is_on_path(self, above: str, below: str) -> bool:
        """Whether `above` is `below` or one of its ancestors."""
        return self._entered[above] <= self._entered[below] and self._left[below] <= self._left[above]
