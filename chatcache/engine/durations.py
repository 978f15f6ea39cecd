"""How long requests waited, were prefilled and decoded: histograms that travel with the engine's health."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable

from chatcache.sched.request import LiveRequest
from chatcache.types.health import DURATION_BOUNDS_S, Durations


class Histogram:
    """Counts of seconds, one more than there are bounds: the last is of what lies beyond."""

    def __init__(self) -> None:
        self._counts = [0] * (len(DURATION_BOUNDS_S) + 1)
        self._total_s = 0.0

    def observe(self, duration_s: float) -> None:
        self._counts[bisect_left(DURATION_BOUNDS_S, duration_s)] += 1
        self._total_s += duration_s

    def read(self) -> Durations:
        return Durations(tuple(self._counts), self._total_s)


class RequestTimes:
    """Accepted to admitted (`queue`), to the first token (`prefill`), to the last (`decode`), of whoever got there."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.queue = Histogram()
        self.prefill = Histogram()
        self.decode = Histogram()

    def first_token(self, request: LiveRequest) -> None:
        """The first of its tokens, or of its candidates', is there."""
        request.first_token_s = self._clock()
        self.queue.observe(request.admitted_s - request.accepted_s)
        self.prefill.observe(request.first_token_s - request.admitted_s)

    def last_token(self, request: LiveRequest) -> None:
        self.decode.observe(self._clock() - request.first_token_s)
