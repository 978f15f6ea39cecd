"""The branches of a search: which parent's pages each survivor goes on with."""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.decode.actions import BranchAction, Extend, Fork, Retire
from chatcache.decode.streaming import Node


class Lineage:
    """Live branches and the ids of new ones; an id is used once in a request's life."""

    def __init__(self, root: Node) -> None:
        self._live = [root]
        self._next = 1

    def move(self, survivors: Sequence[Node]) -> tuple[BranchAction, ...]:
        """Give each surviving node its branch, and return the actions that move the branches under them.

        The first child of a branch inherits it, the others are forked from it. Childless branches go first, so that no
        more are ever alive than before or after. Nodes are distinct, their parents live.
        """
        families: dict[int, list[Node]] = {node.branch: [] for node in self._live}
        for node in survivors:
            parent = node.up().branch
            siblings = families[parent]
            node.branch = self._new() if siblings else parent
            siblings.append(node)
        losers = [node for node in self._live if not families[node.branch]]
        self._live = list(survivors)
        actions = self._retire(losers)
        for branch, children in families.items():
            actions += [Fork(branch, child.branch, child.token) for child in children[1:]]
            actions += [Extend(branch, child.token) for child in children[:1]]
        return tuple(actions)

    def _retire(self, losers: Sequence[Node]) -> list[BranchAction]:
        """Let branches go without their tails, but for one wherever a candidate ended.

        A candidate's last token is never computed, so only branches that went on beside it hold all that comes before.
        When the last of them goes, its tail page is kept, for the next turn to find the whole of the candidate; while
        one lives, it has the page itself. All other tails would only crowd the index.
        """
        actions: list[BranchAction] = []
        kept: set[Node] = set()
        for node in losers:
            stump = _standing(node)
            keep_tail = stump not in kept and any(child.ended for child in stump.children.values())
            if keep_tail:
                kept.add(stump)
            actions.append(Retire(node.branch, keep_tail))
        return actions

    def _new(self) -> int:
        self._next += 1
        return self._next - 1


def _standing(node: Node) -> Node:
    """Return the deepest node at or above this one that still stands in the tree."""
    while node.left_the_tree():
        node = node.up()
    return node
