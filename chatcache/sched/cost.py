"""Swap or recompute: which way a preempted request comes back sooner, by what was measured here.

swap       pages to copy out now + pages to copy in later, each `swap_page_s` (measured when the runner was built)
recompute  tokens to compute again, each the seconds that prompt tokens took in the steps of late
"""

from __future__ import annotations

from collections import deque

SWAP = "swap"
RECOMPUTE = "recompute"
AUTO = "auto"
PREEMPTIONS = (AUTO, SWAP, RECOMPUTE)

NUM_REMEMBERED_STEPS = 64


class PrefillSpeed:
    """Seconds per prompt token, over the last steps that mostly computed prompts.

    A decode step reads all weights for a few tokens: per token it is slow, and says nothing of a prompt's chunk. It is
    left out. The median, weighted by tokens, is deaf to the odd step that compiled something or was held up.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=NUM_REMEMBERED_STEPS)  # (seconds per token, tokens)

    def note(self, num_tokens: int, num_rows: int, seconds: float) -> None:
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
        if preemption not in PREEMPTIONS:
            raise ValueError(f"preemption must be one of {', '.join(PREEMPTIONS)}, got {preemption!r}")
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
