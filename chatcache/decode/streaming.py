"""What the caller may already know: tokens that every candidate still possible has in common are final.

Live branches and finished candidates are leaves of one tree of tokens. A leaf that is let go takes with it what only it
stood on, and the tree is agreed on down to the first node with two children:

    root - a - b - c - d     live            agreed: a b
                 \\ e        finished

Every node is added once and removed at most once, and what is agreed only moves down: O(width) a step, whatever the
length.
"""

from __future__ import annotations

from collections.abc import Iterator

from chatcache.decode.actions import Emit
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
