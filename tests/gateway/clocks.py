"""A clock that the test advances."""

from __future__ import annotations


class Clock:
    """Monotonic and wall time that advance together."""

    def __init__(self, wall_s: float = 1_000_000.0) -> None:
        self.elapsed_ns = 0
        self._wall_s = wall_s

    def now_ns(self) -> int:
        return 10**15 + self.elapsed_ns

    def wall_s(self) -> float:
        return self._wall_s + self.elapsed_ns / 1e9

    def pass_ns(self, ns: int) -> None:
        self.elapsed_ns += ns

    def pass_s(self, seconds: int) -> None:
        self.pass_ns(seconds * 10**9)
