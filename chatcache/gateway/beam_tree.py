"""The live beams of a response as one tree, for readers that have not heard how it grew.

0 -- 1 -- 3 -- 6 (live)        told to them: 1 3 6 7, and that 6 and 7 are live
      \\    `--- 7 (live)
       `- 4                    nothing live is below it any more: forgotten
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Raw

from chatcache.gateway.jsonio import encode

BEAM = "response.beam"
_NODE_OVERHEAD_BYTES = 250  # the objects around a node


class _Node(NamedTuple):
    parent: int
    data: bytes


class BeamTree:
    """Nodes that lead to live beams. What a node costs is paid once, when it comes or goes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._nodes: dict[int, _Node] = {}  # parents before children
        self._num_children: defaultdict[int, int] = defaultdict(int)
        self._live: tuple[int, ...] = ()

    def take(self, nodes: Sequence[Mapping[str, Any]], live: Sequence[int]) -> None:
        """New nodes, parents first, and where live beams end now: the fields of a `response.beam`."""
        perhaps_gone = [*self._live, *(node["id"] for node in nodes)]
        for node in nodes:
            self._nodes[node["id"]] = added = _Node(node["parent"], encode(node))
            self._num_children[added.parent] += 1
            self.num_bytes += len(added.data) + _NODE_OVERHEAD_BYTES
        self._live = tuple(live)
        ends = frozenset(live)
        for node_id in perhaps_gone:
            self._drop(node_id, ends)

    def frame(self, response_id: str) -> bytes | None:
        """The whole tree as one frame; None while there is none."""
        if not self._nodes:
            return None
        nodes = Raw(b"[%s]" % b",".join(node.data for node in self._nodes.values()))
        return encode({"type": BEAM, "response_id": response_id, "whole": True, "nodes": nodes, "live": self._live})

    def _drop(self, node_id: int, ends: frozenset[int]) -> None:
        """Forget a node that leads nowhere, and its ancestors that led nowhere else."""
        while node_id in self._nodes and node_id not in ends and not self._num_children[node_id]:
            gone = self._nodes.pop(node_id)
            del self._num_children[node_id]
            self._num_children[gone.parent] -= 1
            self.num_bytes -= len(gone.data) + _NODE_OVERHEAD_BYTES
            node_id = gone.parent
