"""Placement index: which worker is believed to hold the cached pages of which prefix.

The gateway that owns a reply records the places of the prompt when it has been computed, and those of the reply when
the turn has finished; the prompt of the next request looks them up. So the index needs no events from the engines. It
can be wrong in one way only: a worker has evicted the pages since. The next request that is sent there because of it
makes it true again.

    page keys of a prompt   k1  k2 ... k16 ... k32 ... k93 ... k101
    boundaries                         ^       ^       ^       ^
                                       |       |       |       last full page
                                       |       |       end of the first message (system prompt)
                                       powers of two

Only a few boundaries of a prompt have places, at most MAX_BOUNDARIES, so that a lookup is one small MGET.
Page keys are tenant-scoped hash chains: a place never leads to the pages of another tenant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

MAX_BOUNDARIES = 32
MIN_BOUNDARY_PAGES = 16
MIN_PAGES_WITHOUT_MESSAGES = 4
MAX_HOLDERS = 8
MAX_CONTINUATIONS = 17
"""Continuations counted of a place. With more, the discount of a shared prefix has reached its limit."""
TTL_S = 1800.0


@dataclass(frozen=True, slots=True)
class Boundary:
    """A page boundary of a prompt that is recorded in the index.

    `key`: hash chain up to this boundary. `num_tokens`: prompt tokens before it. `continuation`: identifies the page
    after it; None if there is no full page after it.
    """

    key: Hashable
    num_tokens: int
    continuation: Hashable | None = None


@dataclass(slots=True)
class Place:
    """What is known of one prefix: its holders, and different pages seen after it.

    `holders`: worker name -> incarnation of the worker when it computed this prefix, least recent first.
    """

    holders: dict[str, int] = field(default_factory=dict)
    continuations: set[Hashable] = field(default_factory=set)
    recorded_at_s: float = 0.0


def boundary_pages(num_pages: int, message_end_pages: Sequence[int] = (), limit: int = MAX_BOUNDARIES) -> list[int]:
    """Return the page counts of a prompt that are recorded and looked up, ascending, at most `limit`.

    `message_end_pages`: full pages before the end of each message, ascending. Chosen are, by importance: the last full
    page; the end of the first message (the system prompt); powers of two from MIN_BOUNDARY_PAGES on, without messages
    from MIN_PAGES_WITHOUT_MESSAGES on with four steps per doubling; the ends of the latest messages. The page before
    such an end is chosen, too, because a template adds tokens after a reply.
    """
    if num_pages < 1 or limit < 1:
        return []
    ends = [page for page in message_end_pages if 0 < page <= num_pages]
    first, steps = (MIN_BOUNDARY_PAGES, 1) if ends else (MIN_PAGES_WITHOUT_MESSAGES, 4)
    growing = _growing_pages(num_pages, first, steps)
    chosen = dict.fromkeys((num_pages, *ends[:1], *reversed(growing)))
    for end in reversed(ends):
        if len(chosen) >= limit:
            break
        chosen.update(dict.fromkeys((end, max(1, end - 1))))
    return sorted(list(chosen)[:limit])


def _growing_pages(num_pages: int, first: int, steps_per_doubling: int) -> list[int]:
    """Return page counts from `first` to `num_pages` that double, perhaps in several steps."""
    steps = (divmod(step, steps_per_doubling) for step in count())
    pages = ((first << doublings) + (first << doublings) * part // steps_per_doubling for doublings, part in steps)
    return list(takewhile(lambda page: page <= num_pages, pages))


def boundaries_of(
    page_keys: Sequence[Hashable], page_size: int, message_end_tokens: Sequence[int] = ()
) -> tuple[Boundary, ...]:
    """Return the boundaries of tokens with these page keys, one key per full page."""
    num_pages = len(page_keys)
    pages = boundary_pages(num_pages, [end // page_size for end in message_end_tokens])
    return tuple(
        Boundary(page_keys[page - 1], page * page_size, page_keys[page] if page < num_pages else None) for page in pages
    )


class MemoryPlacementIndex:
    """Placement index in the memory of one process, bounded by age and number of places."""

    def __init__(self, ttl_s: float = TTL_S, max_holders: int = MAX_HOLDERS, max_places: int = 1_000_000) -> None:
        self._ttl_s, self._max_holders, self._max_places = ttl_s, max_holders, max_places
        self._places: OrderedDict[Hashable, Place] = OrderedDict()  # least recently recorded first

    def __len__(self) -> int:
        return len(self._places)

    def lookup(self, boundaries: Sequence[Boundary], now_s: float) -> list[Place | None]:
        """Return the place of each boundary, None where nothing is known or the place has expired."""
        found = [self._places.get(boundary.key) for boundary in boundaries]
        oldest_s = now_s - self._ttl_s
        return [place if place is not None and place.recorded_at_s >= oldest_s else None for place in found]

    def record(self, boundaries: Sequence[Boundary], worker: str, incarnation: int, now_s: float) -> None:
        """Record that a worker has computed tokens with these boundaries; the least recent holders are dropped."""
        places, oldest_s = self._places, now_s - self._ttl_s
        for boundary in boundaries:
            place = places.get(boundary.key)
            if place is None or place.recorded_at_s < oldest_s:
                place = places[boundary.key] = Place()
            places.move_to_end(boundary.key)
            place.recorded_at_s = now_s
            place.holders.pop(worker, None)
            place.holders[worker] = incarnation
            if len(place.holders) > self._max_holders:
                del place.holders[next(iter(place.holders))]
            if boundary.continuation is not None and len(place.continuations) < MAX_CONTINUATIONS:
                place.continuations.add(boundary.continuation)
        while places and (len(places) > self._max_places or next(iter(places.values())).recorded_at_s < oldest_s):
            places.popitem(last=False)
