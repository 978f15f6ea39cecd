"""The branches of a search: which parent's pages each survivor goes on with."""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.decode.actions import BranchAction, Extend, Fork, Retire
from chatcache.decode.streaming import Node


class Lineage:
    """Live branches and the ids of new ones; an id is used once in a request's life."""

    def __init__(self) -> None:
        self._live: list[int] = [0]
        self._next = 1

    def move(self, survivors: Sequence[Node]) -> tuple[BranchAction, ...]:
        """Give each surviving node its branch, and return the actions that move the branches under them.

        The first child of a branch inherits it, the others are forked from it. Childless branches go first, so that no
        more are ever alive than before or after. Nodes are distinct, their parents live.
        """
        families: dict[int, list[Node]] = {branch: [] for branch in self._live}
        for node in survivors:
            parent = node.up().branch
            siblings = families[parent]
            node.branch = self._new() if siblings else parent
            siblings.append(node)
        self._live = [node.branch for node in survivors]
        actions: list[BranchAction] = [Retire(branch) for branch, children in families.items() if not children]
        for branch, children in families.items():
            actions += [Fork(branch, child.branch, child.token) for child in children[1:]]
            actions += [Extend(branch, child.token) for child in children[:1]]
        return tuple(actions)

    def _new(self) -> int:
        self._next += 1
        return self._next - 1
