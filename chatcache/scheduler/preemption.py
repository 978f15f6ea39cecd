"""Preemption: the choice between swapping and recomputation, and swapped requests.

The two costs are estimated from measurements on this machine:

    swap       (pages to copy to the host now + pages to copy back later) * `swap_page_s`, measured at startup
    recompute  (tokens to compute again) * seconds per prompt token in recent steps
"""

from __future__ import annotations

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import TOKEN_BYTES
from chatcache.scheduler.request import LiveRequest
from chatcache.scheduler.speed import DecodeSpeed, PrefillSpeed

SWAP = "swap"
RECOMPUTE = "recompute"
AUTO = "auto"
PREEMPTION_MODES = (AUTO, SWAP, RECOMPUTE)


class CostModel:
    """Chooses between swapping and recomputation, unless the `preemption` mode fixes the choice."""

    def __init__(self, preemption: str = AUTO, swap_page_s: float = 0.0) -> None:
        if preemption not in PREEMPTION_MODES:
            raise ValueError(f"preemption must be one of {', '.join(PREEMPTION_MODES)}, got {preemption!r}")
        self._preemption = preemption
        self._swap_page_s = swap_page_s
        self.prefill = PrefillSpeed()
        self.decode = DecodeSpeed()

    def prefers_swap(self, num_tokens: int, num_pages_out: int, num_pages_in: int) -> bool:
        """Return whether swapping costs less than computing `num_tokens` again.

        Swapping copies `num_pages_out` pages to the host now, and `num_pages_in` pages back later.
        """
        if self._preemption != AUTO:
            return self._preemption == SWAP
        seconds_per_token = self.prefill.seconds_per_token()
        if seconds_per_token is None:  # no prompt was measured yet, so there is nothing to compare with
            return True
        return (num_pages_out + num_pages_in) * self._swap_page_s < num_tokens * seconds_per_token


class SwapTracker:
    """Tracks the host pages of preempted requests, until all their branches run again.

    `returning`: the running requests that hold host pages.
    """

    def __init__(self, kv: KVCache, cost: CostModel) -> None:
        self.cost = cost
        self.num_preemptions = 0
        self._kv = kv
        self.returning: set[LiveRequest] = set()

    def swap_out_if_cheaper(self, request: LiveRequest) -> bool:
        """Swap a request's pages to the host, if that is cheaper and the host has space.

        Returns whether it did. Call before the request's branches are detached; the step then copies the pages before
        it writes any of them.
        """
        if self._kv.host is None:
            return False
        contents = self._kv.page_contents(request.tables())
        num_tokens = sum(len(content.tokens) for content in contents.values()) // TOKEN_BYTES
        num_missing = self._kv.host.num_missing(contents)
        if not contents or not self.cost.prefers_swap(num_tokens, num_missing, len(contents)):
            return False
        host_pages = self._kv.swap_out(contents)
        if host_pages is None:
            return False
        request.host_pages += host_pages
        if self._kv.states is not None:
            request.host_states += self._kv.states.swap_out(request.tables())
        self.num_preemptions += 1
        return True

    def release_returned(self) -> None:
        """Release the host pages of requests whose branches all run again.

        Call when the step that loaded the pages was executed.
        """
        for request in [request for request in self.returning if not request.num_waiting_branches]:
            self.returning.remove(request)
            self.release(request)

    def release(self, request: LiveRequest) -> None:
        """Release the host pages that the request holds."""
        if request.host_pages and self._kv.host is not None:
            self._kv.host.release(request.host_pages)
            request.host_pages = []
        if request.host_states and self._kv.states is not None:
            self._kv.states.host.release(request.host_states)
            request.host_states = []
