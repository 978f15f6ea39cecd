"""One response's frames, append-only, for as many readers as like."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

Frame = dict[str, Any]


class ResponseLog:
    """Frames of one response in order. Appending never waits for a reader. Belongs to one event loop.

    Numbered frames carry `sequence_number` 0, 1, 2, ... without gaps; unnumbered ones are for `chatcache.v1` only.
    """

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._num_numbered = 0
        self._closed = False
        self._grown = asyncio.Event()

    def append(self, kind: str, **fields: object) -> None:
        """Add a numbered frame."""
        self._add({"type": kind, "sequence_number": self._num_numbered, **fields})
        self._num_numbered += 1

    def note(self, kind: str, **fields: object) -> None:
        """Add a frame outside the numbering."""
        self._add({"type": kind, **fields})

    def close(self) -> None:
        self._closed = True
        self._grown.set()

    async def follow(self) -> AsyncIterator[Frame]:
        """Yield every frame from the first on, until the log is closed."""
        position = 0
        while True:
            while position < len(self._frames):
                position += 1
                yield self._frames[position - 1]
            if self._closed:
                return
            self._grown.clear()
            await self._grown.wait()

    def _add(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._grown.set()
