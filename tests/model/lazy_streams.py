"""Streams that run work as late, or as early, as the declared waits allow.

A missing wait then changes results. A lazy stream runs nothing until the result is needed: the host waits for an event,
or another stream that runs meets its wait for one. An eager stream runs everything at once, up to a wait for an event
that has not been reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from chatcache.model.streams import StreamEvent, Streams, Work


@dataclass(frozen=True, slots=True)
class LazyEvent:
    """The first `count` entries of a stream."""

    stream: LazyStream
    count: int

    def wait(self) -> None:
        self.stream.run_to(self.count)


@dataclass(eq=False, slots=True)
class LazyStream:
    """A `streams.Stream`. `ignores_waits`: an injected bug that drops its waits."""

    eager: bool = False
    ignores_waits: bool = False
    entries: list[Work | LazyEvent] = field(default_factory=list)
    num_done: int = 0
    peers: list[LazyStream] = field(default_factory=list)

    def submit(self, work: Work) -> None:
        self.entries.append(work)
        self.pump()

    def record_event(self) -> LazyEvent:
        return LazyEvent(self, len(self.entries))

    def wait_event(self, mark: StreamEvent) -> None:
        assert isinstance(mark, LazyEvent)
        if not self.ignores_waits:
            self.entries.append(mark)
            self.pump()

    def run_to(self, count: int) -> None:
        """Run the first `count` entries, and what they wait for."""
        while self.num_done < count:
            self._next()

    def pump(self) -> None:
        """Run what can run already, if this is an eager stream."""
        while self.eager and self.num_done < len(self.entries):
            entry = self.entries[self.num_done]
            if isinstance(entry, LazyEvent) and entry.stream.num_done < entry.count:
                return
            self._next()

    def _next(self) -> None:
        place = self.num_done
        entry = self.entries[place]
        if isinstance(entry, LazyEvent):
            entry.wait()
            self.num_done = max(self.num_done, place + 1)  # what ran meanwhile may have gone on here
            return
        self.num_done += 1
        entry()
        for peer in self.peers:
            peer.pump()


def lazy_streams(
    main_eager: bool, side_eager: bool, inject: Callable[[LazyStream, LazyStream], None] = lambda main, side: None
) -> Streams:
    """Return a pair of streams; `inject` may make them ignore waits."""
    main, side = LazyStream(main_eager), LazyStream(side_eager)
    main.peers.append(side)
    side.peers.append(main)
    inject(main, side)
    return Streams(main, side)


ORDERS = {"both late": (False, False), "side early": (False, True), "side late": (True, False)}
"""(main eager, side eager)"""
