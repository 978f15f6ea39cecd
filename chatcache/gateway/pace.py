"""How often somebody may do something."""

from __future__ import annotations


class Pace:
    """So many a second, with some in hand for bursts."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at_s = 0.0

    def take(self, now_s: float, num: int = 1) -> bool:
        """Count some; False when they are too many."""
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < num:
            return False
        self._left -= num
        return True
