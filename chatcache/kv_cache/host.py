"""The host KV cache: copies of the pages of preempted requests in host memory (swapping).

    store   page --copied in this step--> host page    held by the preempted request; can be matched after the step
    load    page <--copied in this step-- host page    retained until the step is over, so that it is not overwritten

A step makes its copies to the host before it writes any page. So the scheduler may release a page, and allocate it to
another request of the same step, while its copy is still pending. A host page that a step reads is never one that the
same step writes.

Host pages form a `PagePool` with the same page keys as on the device: after the request has released them they can
still be matched, until the copies of another request need their space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chatcache.kv_cache.page_hash import PageContent
from chatcache.kv_cache.pool import PagePool


class PendingLoad(NamedTuple):
    """A pending copy from `host_page` to a device page.

    `content` is None if only a part of the page's tokens are used.
    """

    host_page: int
    content: PageContent | None


class HostKVCache:
    """A pool of host pages, and the copies to and from them that the next step makes.

    Host pages are numbered from 1 here, as in every pool, and from 0 in step plans.
    """

    def __init__(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages + 1)
        self.num_pages_out = 0
        self.num_pages_in = 0
        self._pending_stores: dict[bytes, tuple[int, int, PageContent]] = {}  # by page key: (page, host page, content)
        self._pending_loads: dict[int, PendingLoad] = {}  # by device page

    # -- copies to the host ---------------------------------------------------------------------------------------

    def num_missing(self, contents: Mapping[int, PageContent]) -> int:
        """Count the distinct contents of these pages that have no copy on the host yet. A query."""
        return len(self._partition(contents)[1])

    def store(self, contents: Mapping[int, PageContent]) -> list[int] | None:
        """Retain one host page for each distinct content; None, and no change, if too few are free.

        Contents without a copy on the host are copied in this step.
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
        """Split contents into those with a host page, present or pending, and those without.

        Returns (host pages, [(page, content) without one]).
        """
        found: dict[int, None] = {}
        missing: dict[bytes, tuple[int, PageContent]] = {}
        for page, content in contents.items():
            if (load := self._pending_loads.get(page)) is not None:  # the page itself is not filled yet
                found[load.host_page] = None
            elif (pending := self._pending_stores.get(content.key)) is not None:
                found[pending[1]] = None
            elif (host_page := self.pool.find(content)) is not None:
                found[host_page] = None
            else:
                missing[content.key] = page, content
        return list(found), list(missing.values())

    def release(self, host_pages: Sequence[int]) -> None:
        """Release host pages that `store` returned.

        Pending copies to pages that have no holder left are cancelled.
        """
        self.pool.release(host_pages)
        if self._pending_stores:
            self._pending_stores = {key: copy for key, copy in self._pending_stores.items() if self.pool.refs[copy[1]]}

    def unpublish(self, content: PageContent, num_kept_tokens: int = 0) -> None:
        """Remove this content, and its prefixes of more than `num_kept_tokens` tokens, from the index."""
        for host_page in self.pool.published_prefixes(content.parent, content.tokens, num_kept_tokens):
            self.pool.unpublish(host_page)

    # -- copies from the host -------------------------------------------------------------------------------------

    def load(self, page: int, load: PendingLoad) -> None:
        """Fill the newly allocated `page` from the host in this step."""
        self.pool.retain((load.host_page,))
        self._pending_loads[page] = load

    def is_loading(self, page: int) -> bool:
        return page in self._pending_loads

    def invalidate_load(self, page: int) -> None:
        """Record that the step writes to `page` after loading it.

        The loaded content is then not final, and is not published.
        """
        if page in self._pending_loads:
            self._pending_loads[page] = self._pending_loads[page]._replace(content=None)

    def cancel_unreferenced_loads(self, refs: Sequence[int]) -> None:
        """Cancel the loads of device pages that were released before the step.

        `refs` are the reference counts of the device pool.
        """
        for page in [page for page in self._pending_loads if not refs[page]]:
            self.pool.release((self._pending_loads.pop(page).host_page,))

    # -- the step -------------------------------------------------------------------------------------------------

    def pending_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the step's copies: [(page, host page)] to the host, [(host page, page)] from it.

        Host pages are numbered as in step plans.
        """
        outs = [(page, host_page - 1) for page, host_page, _ in self._pending_stores.values()]
        return outs, [(load.host_page - 1, page) for page, load in self._pending_loads.items()]

    def complete_step(self) -> list[tuple[int, PageContent]]:
        """Publish the copies of the executed step; return the loaded (device page, content) pairs.

        Pages that were loaded only in part are left out.
        """
        self.num_pages_out += len(self._pending_stores)
        self.num_pages_in += len(self._pending_loads)
        for _, host_page, content in self._pending_stores.values():
            self.pool.publish(host_page, content)
        self._pending_stores.clear()
        loaded = [(page, load.content) for page, load in self._pending_loads.items()]
        self.abort_step()
        return [(page, content) for page, content in loaded if content is not None]

    def abort_step(self) -> None:
        """Cancel all copies of a failed step.

        It is unknown which of them were made, so none is published.
        """
        self._pending_stores.clear()
        for load in self._pending_loads.values():
            self.pool.release((load.host_page,))
        self._pending_loads.clear()
