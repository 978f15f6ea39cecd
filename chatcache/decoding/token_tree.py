r"""Token tree of a search: emit tokens as soon as every possible result contains them.

Live branches and finished candidates are leaves of one tree. Releasing a leaf removes the nodes that only it needed.
The tokens down to the first node with two children are common to all results and can be emitted:

    root - a - b - c - d     live            common prefix: a b
                 \ e        finished

Every node is added and removed at most once and the common prefix only grows, so a step costs O(width) at any length.

`BranchReassignment` maps the selected nodes of a step to the branches (page tables) of their parents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from chatcache.types.actions import BranchAction, Emit, Extend, Fork, Release, Reorder
from chatcache.types.events import TokenLogprob

NO_SCORE = -1.0e9  # score of a candidate that does not exist


class Node(msgspec.Struct, eq=False):
    """A token and its position in the tree.

    `num_refs`: number of leaves at this node. `id`: 0 for the root. `branch`: while the node is live, the branch in
    which its children are drawn. `ended`: last token of a candidate. `children` are by token.
    """

    id: int
    token: int
    logprob: TokenLogprob | None
    parent: Node | None
    children: dict[int, Node] = {}
    num_refs: int = 0
    branch: int = 0
    ended: bool = False

    def get_parent(self) -> Node:
        """Return the parent. Raises: LookupError for the root."""
        if self.parent is None:
            raise LookupError("the root has no parent")
        return self.parent

    def path_below(self, above: Node) -> list[Node]:
        """Return the nodes below `above` down to this one.

        Raises: LookupError if it is not an ancestor.
        """
        path: list[Node] = []
        node = self
        while node is not above:
            path.append(node)
            node = node.get_parent()
        return path[::-1]


class TokenTree:
    """Tree of all live and finished candidates.

    `common_prefix`: deepest node on the path of every candidate. `has_ended`: some candidate has ended.
    """

    def __init__(self) -> None:
        self.root = Node(0, -1, None, None)
        self.common_prefix = self.root
        self.has_ended = False
        self._num_added = 0

    def add(self, parent: Node, token: int, logprob: TokenLogprob | None = None) -> Node:
        """Return the child of `parent` for `token`, with one more reference."""
        node = parent.children.get(token)
        if node is None:
            self._num_added += 1
            node = parent.children[token] = Node(self._num_added, token, logprob, parent)
        node.num_refs += 1
        return node

    def release_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.num_refs > 1 or node.children:
                node.num_refs -= 1
            else:
                self.release(node)

    def release(self, node: Node) -> None:
        """Drop one reference; remove nodes that no candidate needs."""
        node.num_refs -= 1
        while not node.num_refs and not node.children and node is not self.root:
            parent = node.get_parent()
            del parent.children[node.token]
            node = parent

    def advance_common_prefix(self) -> Node:
        """Extend `common_prefix` as far as possible and return it."""
        while len(self.common_prefix.children) == 1 and not self.common_prefix.num_refs:
            (self.common_prefix,) = self.common_prefix.children.values()
        return self.common_prefix


class CandidateStream:
    """Emits each token of each candidate exactly once, in order."""

    def __init__(self, tree: TokenTree, num_candidates: int, *, with_logprobs: bool) -> None:
        self._emitted = [tree.root] * num_candidates
        self._last_path: tuple[Node, Node, tuple[int, ...], tuple[TokenLogprob, ...]] = (tree.root, tree.root, (), ())
        self._with_logprobs = with_logprobs

    def emit(self, index: int, node: Node) -> tuple[Emit, ...]:
        """Emit the tokens of candidate `index` down to `node` that were not emitted before."""
        above, self._emitted[index] = self._emitted[index], node
        if above is node:
            return ()
        if self._last_path[:2] != (above, node):  # usually several candidates in turn get the same tokens
            path = node.path_below(above)
            entries = tuple(step.logprob for step in path if step.logprob is not None) if self._with_logprobs else ()
            self._last_path = above, node, tuple(step.token for step in path), entries
        return (Emit(index, *self._last_path[2:]),)


class BranchReassignment:
    """Assigns branches to the selected nodes of a step.

    A branch continues, becomes a copy of another one, or ends; the id of one that ended is not used again.
    """

    def __init__(self, root: Node) -> None:
        self._live = [root]
        self._next = 1

    def reassign(self, nodes: Sequence[Node], *, has_ended: bool = True) -> tuple[BranchAction, ...]:
        """Assign a branch to each node; return the actions that carry this out.

        The first child of a branch continues it, its other children are forked from it. If the number of branches stays
        the same, a branch without children becomes such a fork. Otherwise branches without children are released first,
        so that the number of live branches never exceeds that before or after the step. The nodes are distinct and
        their parents are live. `has_ended`: a candidate in the tree may have ended.
        """
        extended: dict[int, Node] = {}
        parents: list[int] = []  # of the forked nodes
        forked: list[Node] = []
        for node in nodes:
            parent = node.parent.branch if node.parent is not None else 0
            if parent in extended:
                parents.append(parent)
                forked.append(node)
            else:
                extended[parent] = node
                node.branch = parent
        childless = [node for node in self._live if node.branch not in extended]
        self._live = list(nodes)
        releases = self._release(childless) if has_ended else []
        if len(childless) == len(forked) and not any(release.keep_tail for release in releases):
            branches = [node.branch for node in childless]
            for branch, node in zip(branches, forked, strict=True):
                node.branch = branch
            tokens = [node.token for node in (*forked, *extended.values())]
            return (Reorder((*branches, *extended), (*parents, *extended), tuple(tokens)),) if tokens else ()
        if not has_ended:
            releases = [Release(node.branch, False) for node in childless]
        forks: list[BranchAction] = []
        for parent, node in zip(parents, forked, strict=True):
            forks.append(Fork(parent, self._next, node.token))
            node.branch, self._next = self._next, self._next + 1
        return (*releases, *forks, *(Extend(branch, node.token) for branch, node in extended.items()))

    def _release(self, childless: Sequence[Node]) -> list[Release]:
        """Release branches; publish the partial tail page only where a candidate ended.

        The last token of a candidate is never computed, so only branches that continued next to it hold all pages up to
        it. When the last such branch is released, its tail page is published, so that the next turn finds the whole
        candidate in the cache. Tail pages of other branches would only fill the index.
        """
        actions: list[Release] = []
        kept: set[Node] = set()
        for node in childless:
            remaining = node
            while remaining.parent is not None and remaining.parent.children.get(remaining.token) is not remaining:
                remaining = remaining.get_parent()  # up to the deepest one that is still in the tree
            keep_tail = remaining not in kept and any(child.ended for child in remaining.children.values())
            if keep_tail:
                kept.add(remaining)
            actions.append(Release(node.branch, keep_tail))
        return actions
