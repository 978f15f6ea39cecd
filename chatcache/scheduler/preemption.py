"""Swap or recompute: which way a preempted request comes back sooner, by what was measured here.

swap       pages to copy out now + pages to copy in later, each `swap_page_s` (measured when the runner was built)
recompute  tokens to compute again, each the seconds that prompt tokens took in the steps of late

What a preempted request keeps in host memory until it runs again, and whether it is worth it.
"""

from __future__ import annotations

from collections import deque

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import TOKEN_BYTES
from chatcache.scheduler.request import LiveRequest

SWAP = "swap"
RECOMPUTE = "recompute"
AUTO = "auto"
PREEMPTION_MODES = (AUTO, SWAP, RECOMPUTE)

NUM_REMEMBERED_STEPS = 64


class PrefillSpeed:
    """Seconds per prompt token, over the last steps that mostly computed prompts.

    A decode step reads all weights for a few tokens: per token it is slow, and says nothing of a prompt's chunk. It is
    left out. The median, weighted by tokens, is deaf to the odd step that compiled something or was held up.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=NUM_REMEMBERED_STEPS)  # (seconds per token, tokens)

    def record(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Note an executed step that computed `num_tokens` in `num_rows` rows."""
        if num_tokens >= 2 * num_rows:
            self._steps.append((seconds / num_tokens, num_tokens))

    def seconds_per_token(self) -> float | None:
        """Return the weighted median; None before any prompt was computed."""
        half = sum(num_tokens for _, num_tokens in self._steps) / 2
        for seconds, num_tokens in sorted(self._steps):
            half -= num_tokens
            if half <= 0:
                return seconds
        return None


class CostModel:
    """Chooses how a request is preempted, unless `preemption` says so once and for all."""

    def __init__(self, preemption: str = AUTO, swap_page_s: float = 0.0) -> None:
        if preemption not in PREEMPTION_MODES:
            raise ValueError(f"preemption must be one of {', '.join(PREEMPTION_MODES)}, got {preemption!r}")
        self._preemption = preemption
        self._swap_page_s = swap_page_s
        self.prefill = PrefillSpeed()

    def prefers_swap(self, num_tokens: int, num_pages_out: int, num_pages_in: int) -> bool:
        """Say whether copying these pages out and in again costs less than computing `num_tokens` again."""
        if self._preemption != AUTO:
            return self._preemption == SWAP
        seconds_per_token = self.prefill.seconds_per_token()
        if seconds_per_token is None:  # pages hold tokens that no prompt step computed: nothing to compare with
            return True
        return (num_pages_out + num_pages_in) * self._swap_page_s < num_tokens * seconds_per_token


class SwapTracker:
    """Host pages held by preempted requests. A request holds them until all its branches have come back."""

    def __init__(self, kv: KVCache, cost: CostModel) -> None:
        self.cost = cost
        self.num_preemptions = 0
        self._kv = kv
        self._returning: set[LiveRequest] = set()

    def swap_out_if_cheaper(self, request: LiveRequest) -> bool:
        """Copy out what the request's pages hold, if that is cheaper than computing it again and there is room.

        Call before its branches part: the copies are made before anything else in this step's plan.
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
        self.num_preemptions += 1
        return True

    def on_start(self, request: LiveRequest) -> None:
        if request.host_pages:
            self._returning.add(request)

    def on_stop(self, request: LiveRequest) -> None:
        self._returning.discard(request)

    def release_returned(self) -> None:
        """Let go of the host pages of requests that are back: the step that loaded them has been executed."""
        for request in [request for request in self._returning if not request.num_waiting_branches]:
            self._returning.remove(request)
            self.release(request)

    def release(self, request: LiveRequest) -> None:
        """Let go of the host pages that the request holds."""
        if request.host_pages and self._kv.host is not None:
            self._kv.host.release(request.host_pages)
            request.host_pages = []
