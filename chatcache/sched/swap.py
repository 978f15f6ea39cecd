"""What a preempted request keeps in host memory until it runs again, and whether it is worth it."""

from __future__ import annotations

from chatcache.kv.cache import KVCache
from chatcache.kv.keys import TOKEN_BYTES
from chatcache.sched.cost import CostModel
from chatcache.sched.request import LiveRequest


class Swaps:
    """Host pages held by preempted requests. A request holds them until all its branches have come back."""

    def __init__(self, kv: KVCache, cost: CostModel) -> None:
        self.cost = cost
        self.num_preemptions = 0
        self._kv = kv
        self._returning: set[LiveRequest] = set()

    def keep(self, request: LiveRequest) -> bool:
        """Copy out what the request's pages hold, if that is cheaper than computing it again and there is room.

        Call before its branches part: the copies are made before anything else in this step's plan.
        """
        if self._kv.host is None:
            return False
        contents = self._kv.contents(request.tables())
        num_tokens = sum(len(content.tokens) for content in contents.values()) // TOKEN_BYTES
        num_missing = self._kv.host.num_missing(contents)
        if not contents or not self.cost.prefers_swap(num_tokens, num_missing, len(contents)):
            return False
        host_pages = self._kv.swap_out(contents)
        if host_pages is None:
            return False
        request.host_pages += host_pages
        self.num_preemptions += 1
        return True

    def start(self, request: LiveRequest) -> None:
        if request.host_pages:
            self._returning.add(request)

    def stop(self, request: LiveRequest) -> None:
        self._returning.discard(request)

    def settle(self) -> None:
        """Let go of the host pages of requests that are back: the step that loaded them has been executed."""
        for request in [request for request in self._returning if not request.num_waiting_branches]:
            self._returning.remove(request)
            self.drop(request)

    def drop(self, request: LiveRequest) -> None:
        """Let go of the host pages that the request holds."""
        if request.host_pages and self._kv.host is not None:
            self._kv.host.release(request.host_pages)
            request.host_pages = []
