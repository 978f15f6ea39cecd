"""The page map for whoever polls it, at a cost that steps do not feel."""

from __future__ import annotations

import time
from collections.abc import Callable

from chatcache.kv.page_map import PageStates, page_cells, page_states
from chatcache.sched.scheduler import Scheduler
from chatcache.types.pages import PageMap

MAX_SHARE = 0.01  # of the engine's time


class PageGauge:
    """All see the same look at the pages. A new one is taken once MAX_SHARE of the time since the last one covers it:
    where it takes 3 ms (100,000 pages), three times a second; of a small pool, whenever somebody asks."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._pages: PageStates | None = None
        self._stale_at_s = 0.0

    def read(self, namespace: str | None) -> PageMap:
        """Draw the pages as a namespace may see them, or (None) as they are."""
        now_s, kv = self._clock(), self._scheduler.kv
        pages = self._pages
        if pages is None or now_s >= self._stale_at_s:
            tables = [table for request in self._scheduler.running for table in request.tables()]
            pages = self._pages = page_states(kv, tables)
            then_s = self._clock()
            self._stale_at_s = then_s + (then_s - now_s) / MAX_SHARE
        per_cell, cells = page_cells(pages, namespace)
        return PageMap(page_size=kv.page_size, num_pages=len(pages.states), num_pages_per_cell=per_cell, cells=cells)
