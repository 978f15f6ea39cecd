"""Chunks that add text and nothing else, which nearly all are: everything around the text is encoded once."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Raw

from chatcache.chat.events import ReplyDelta
from chatcache.gateway.jsonio import encode

_SEAM = "\ue000"  # private use, and the last of its kind in any chunk


class PlainChunks:
    """`chunk(index, text)` is the chunk as an object; `of` gives the same as JSON."""

    def __init__(self, chunk: Callable[[int, str], object]) -> None:
        self._chunk = chunk
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def of(self, event: ReplyDelta) -> Raw:
        around = self._around.get(event.index)
        if around is None:
            before, _, behind = encode(self._chunk(event.index, _SEAM)).rpartition(encode(_SEAM))
            around = self._around[event.index] = before, behind
        return Raw(around[0] + encode(event.text) + around[1])


def is_plain(event: ReplyDelta) -> bool:
    """Whether text is all it has for a client that asked for neither log-probabilities nor token ids."""
    return bool(event.text) and not event.reasoning and not event.calls
