r"""What the caller may already know: tokens that every candidate still possible has in common are final.

Live branches and finished candidates are leaves of one tree of tokens. A leaf that is let go takes with it what only it
stood on, and the tree is agreed on down to the first node with two children:

    root - a - b - c - d     live            agreed: a b
                 \ e        finished

Every node is added once and removed at most once, and what is agreed only moves down: O(width) a step, whatever the
length.

The branches of a search: which parent's pages each survivor goes on with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chatcache.types.actions import BranchAction, Emit, Extend, Fork, Release
from chatcache.types.events import TokenLogprob

NO_SCORE = -1.0e9  # of a candidate that does not exist


class Node:
    """A token after those of `parent`. `num_holds` leaves end here; `id` is unique in its tree, the root's is 0.

    `branch` is where the node's children are drawn, while it is live. `ended`: it is the last token of a candidate.
    """

    __slots__ = ("branch", "children", "ended", "id", "logprob", "num_holds", "parent", "token")

    def __init__(self, id: int, token: int, logprob: TokenLogprob | None, parent: Node | None) -> None:
        self.id = id
        self.token = token
        self.logprob = logprob
        self.parent = parent
        self.children: dict[int, Node] = {}  # by token
        self.num_holds = 0
        self.branch = 0
        self.ended = False

    def up(self) -> Node:
        """Return the parent. Raises: LookupError for the root."""
        if self.parent is None:
            raise LookupError("the root has no parent")
        return self.parent

    def left_the_tree(self) -> bool:
        return self.parent is not None and self.parent.children.get(self.token) is not self

    def path_below(self, above: Node) -> list[Node]:
        """List the nodes from `above` (left out) down to this one. Raises: LookupError if it is not above."""
        path: list[Node] = []
        node = self
        while node is not above:
            path.append(node)
            node = node.up()
        return path[::-1]


class TokenTree:
    """The tokens that somebody holds. `agreed` is the deepest node that all of them have in common."""

    def __init__(self) -> None:
        self.root = Node(0, -1, None, None)
        self.agreed = self.root
        self._num_added = 0

    def grow(self, parent: Node, token: int, logprob: TokenLogprob | None = None) -> Node:
        """Return the node of `token` below `parent`, held once more."""
        node = parent.children.get(token)
        if node is None:
            self._num_added += 1
            node = parent.children[token] = Node(self._num_added, token, logprob, parent)
        node.num_holds += 1
        return node

    def release(self, node: Node) -> None:
        """Let go of a node once; nodes that nobody stands on any more leave the tree."""
        node.num_holds -= 1
        while not node.num_holds and not node.children and node is not self.root:
            parent = node.up()
            del parent.children[node.token]
            node = parent

    def agree(self) -> Node:
        """Move `agreed` down as far as it goes now, and return it."""
        while len(self.agreed.children) == 1 and not self.agreed.num_holds:
            (self.agreed,) = self.agreed.children.values()
        return self.agreed


class Stream:
    """Tells the caller each candidate's tokens once, in order, in as many pieces as it takes."""

    def __init__(self, tree: TokenTree, num_candidates: int, *, with_logprobs: bool) -> None:
        self._told = [tree.root] * num_candidates
        self._with_logprobs = with_logprobs

    def tell(self, index: int, node: Node) -> Iterator[Emit]:
        """Yield what candidate `index`, which passes through `node`, has not been told of yet."""
        path = node.path_below(self._told[index])
        self._told[index] = node
        if path:
            entries = tuple(step.logprob for step in path if step.logprob is not None) if self._with_logprobs else ()
            yield Emit(index, tuple(step.token for step in path), entries)


class BranchReassignment:
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
            actions.append(Release(node.branch, keep_tail))
        return actions

    def _new(self) -> int:
        self._next += 1
        return self._next - 1


def _standing(node: Node) -> Node:
    """Return the deepest node at or above this one that still stands in the tree."""
    while node.left_the_tree():
        node = node.up()
    return node
