"""The second tier: copies of pages in host memory, under the same names, for requests that were preempted.

    hold    page --copied in this step--> host page     held by the request that left; matchable once the step is done
    load    page <--copied in this step-- host page     pinned until the step is done: nobody overwrites it meanwhile

A plan copies out before anything in it writes. So a page may be released, and handed to somebody else of the same plan,
while its copy is still to be made. A host page that is being read in a plan is never one that the plan writes.

Host pages are a `PagePool`: let go of by their request they stay matchable until another request's copies need room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chatcache.kv_cache.page_hash import PageContent
from chatcache.kv_cache.pool import PagePool


class PendingLoad(NamedTuple):
    """Copy `host_page` in; `content` is what the page will then hold, None if only part of it was wanted."""

    host_page: int
    content: PageContent | None


class HostKVCache:
    """`num_pages` host pages. Numbered from 1 in here, as every pool does, and from 0 in plans."""

    def __init__(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages + 1)
        self.num_pages_out = 0
        self.num_pages_in = 0
        self._pending_stores: dict[bytes, tuple[int, int, PageContent]] = {}  # by key: (page, host page, content)
        self._pending_loads: dict[int, PendingLoad] = {}  # by page

    # -- out ------------------------------------------------------------------------------------------------------

    def num_missing(self, contents: Mapping[int, PageContent]) -> int:
        """Count the distinct contents of these pages that would have to be copied out. A query."""
        return len(self._partition(contents)[1])

    def store(self, contents: Mapping[int, PageContent]) -> list[int] | None:
        """Hold a host page for each distinct content of these pages: all of them, or None and no change.

        What is not here yet is copied out in this step's plan.
        """
        held, missing = self._partition(contents)
        self.pool.retain(held)
        fresh = self.pool.allocate(len(missing))
        if fresh is None:
            self.pool.release(held)
            return None
        for host_page, (page, content) in zip(fresh, missing, strict=True):
            self._pending_stores[content.key] = page, host_page, content
        return held + fresh

    def _partition(self, contents: Mapping[int, PageContent]) -> tuple[list[int], list[tuple[int, PageContent]]]:
        """Tell what is here, or on its way, from what is missing: (host pages, [(page, content)])."""
        here: dict[int, None] = {}
        missing: dict[bytes, tuple[int, PageContent]] = {}
        for page, content in contents.items():
            if (load := self._pending_loads.get(page)) is not None:  # the page itself is yet to be filled
                here[load.host_page] = None
            elif (leaving := self._pending_stores.get(content.key)) is not None:
                here[leaving[1]] = None
            elif (host_page := self.pool.find(content)) is not None:
                here[host_page] = None
            else:
                missing[content.key] = page, content
        return list(here), list(missing.values())

    def release(self, host_pages: Sequence[int]) -> None:
        """Let go of host pages that `hold` returned; copies that nobody waits for any more are not made."""
        self.pool.release(host_pages)
        if self._pending_stores:
            self._pending_stores = {key: move for key, move in self._pending_stores.items() if self.pool.refs[move[1]]}

    def unpublish(self, content: PageContent) -> None:
        """Take this content, and every beginning of it, out of the index."""
        for host_page in self.pool.published_prefixes(content.parent, content.tokens):
            self.pool.unpublish(host_page)

    # -- in -------------------------------------------------------------------------------------------------------

    def load(self, page: int, load: PendingLoad) -> None:
        """Have the held, fresh `page` filled in this step's plan."""
        self.pool.retain((load.host_page,))
        self._pending_loads[page] = load

    def is_loading(self, page: int) -> bool:
        return page in self._pending_loads

    def invalidate_load(self, page: int) -> None:
        """Note that a page which is being loaded will be written on in the same step: its content is not final."""
        if page in self._pending_loads:
            self._pending_loads[page] = self._pending_loads[page]._replace(content=None)

    def cancel_unreferenced_loads(self, refs: Sequence[int]) -> None:
        """Drop the loads of pages that were let go of again before the step."""
        for page in [page for page in self._pending_loads if not refs[page]]:
            self.pool.release((self._pending_loads.pop(page).host_page,))

    # -- the step -------------------------------------------------------------------------------------------------

    def pending_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """List this step's copies as plans number them: [(page, host page)] out and [(host page, page)] in."""
        outs = [(page, host_page - 1) for page, host_page, _ in self._pending_stores.values()]
        return outs, [(load.host_page - 1, page) for page, load in self._pending_loads.items()]

    def complete_step(self) -> list[tuple[int, PageContent]]:
        """Note that the step was executed: copies out can be found now. Return what the loaded pages hold."""
        self.num_pages_out += len(self._pending_stores)
        self.num_pages_in += len(self._pending_loads)
        for _, host_page, content in self._pending_stores.values():
            self.pool.publish(host_page, content)
        self._pending_stores.clear()
        loaded = [(page, load.content) for page, load in self._pending_loads.items()]
        self.abort_step()
        return [(page, content) for page, content in loaded if content is not None]

    def abort_step(self) -> None:
        """Note that the step was given up: nobody knows what its copies have reached, so none can be found."""
        self._pending_stores.clear()
        for load in self._pending_loads.values():
            self.pool.release((load.host_page,))
        self._pending_loads.clear()
