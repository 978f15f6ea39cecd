"""A bucket that fills steadily: what a key may take in a minute, with a minute's worth at once after a pause.

    level <= limit --- take(cost) ---> level - cost, refilled by `limit` a minute

Whole numbers throughout (a token is MINUTE_NS units, a nanosecond brings `limit` of them), so that whoever waited as
long as they were told is let in, to the nanosecond.
"""

from __future__ import annotations

MINUTE_NS = 60_000_000_000


class Bucket:
    """Full at first. Times are nanoseconds of a clock that never goes back."""

    def __init__(self, limit: int, now_ns: int) -> None:
        self.limit = limit
        self._level = self._capacity = limit * MINUTE_NS
        self._at_ns = now_ns

    def wait_ns(self, cost: int, now_ns: int) -> int:
        """How long until so much may be taken; 0 for now. What is more than fits waits until the bucket is full."""
        lacking = min(cost * MINUTE_NS, self._capacity) - self._level_at(now_ns)
        return max(0, -(-lacking // self.limit))

    def take(self, cost: int, now_ns: int) -> None:
        """Take it, whether it is there or not: a debt is filled up first."""
        self._level = self._level_at(now_ns) - cost * MINUTE_NS
        self._at_ns = now_ns

    def give_back(self, cost: int, now_ns: int) -> None:
        """Undo a part of what was taken (or take more, if it is negative)."""
        self._level = min(self._capacity, self._level_at(now_ns) + cost * MINUTE_NS)
        self._at_ns = now_ns

    def remaining(self, now_ns: int) -> int:
        return max(0, self._level_at(now_ns) // MINUTE_NS)

    def full_in_ns(self, now_ns: int) -> int:
        return -(-(self._capacity - self._level_at(now_ns)) // self.limit)

    def _level_at(self, now_ns: int) -> int:
        return min(self._capacity, self._level + (now_ns - self._at_ns) * self.limit)
