"""Live beams as people may read them: each node's own text, and which nodes are in the running."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from chatcache.chat.events import BeamNode, ReplyBeams
from chatcache.types.events import Beams


class BeamReader:
    """Turns the engine's nodes into text. A character whose bytes span nodes belongs to the node that completes it."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._unfinished: dict[int, bytes] = {}

    def read(self, event: Beams) -> ReplyBeams:
        before, self._unfinished = self._unfinished, {}
        nodes = tuple(
            BeamNode(
                beam.node, beam.parent, self._text(beam.node, before.get(beam.parent, b""), beam.token_id), beam.score
            )
            for beam in event.beams
        )
        return ReplyBeams(nodes, tuple(node.id for node in nodes))

    def _text(self, node: int, before: bytes, token: int) -> str:
        piece = self._token_bytes[token] if 0 <= token < len(self._token_bytes) else b""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(before + piece)
        unfinished, _ = decoder.getstate()
        if unfinished:
            self._unfinished[node] = unfinished
        return text


def joined(first: ReplyBeams, then: ReplyBeams) -> ReplyBeams:
    """Several steps as one: all their nodes, in order, and who is left now."""
    return ReplyBeams(first.nodes + then.nodes, then.live)
