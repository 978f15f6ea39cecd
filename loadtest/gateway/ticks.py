"""The clock that the server and the clients share: the time of each tick, in a mapped file."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NUM_TICKS = 1 << 16
ENVIRONMENT = "CHATCACHE_LOADTEST_CLOCK"


def tick_text(tick: int) -> str:
    """Return the text of the token that every stream gets at `tick`."""
    return f" t{tick:04x}"


class TickTimes:
    """Monotonic time of each tick in nanoseconds, in a file that several processes map."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * NUM_TICKS))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.at_ns: NDArray[np.int64] = np.frombuffer(self._map, np.int64)

    def record(self, tick: int) -> None:
        """Store the current time as the time of `tick`."""
        self.at_ns[tick % NUM_TICKS] = time.monotonic_ns()


class TickClock:
    """Schedule of ticks. A stream emits in one of the `num_phases` ticks of its token interval."""

    def __init__(self, tokens_per_s: float, num_phases: int) -> None:
        self.num_phases = num_phases
        self._period_s = 1 / (tokens_per_s * num_phases)
        self._start_s = time.monotonic()
        self.tick = 0

    def delay_s(self) -> float:
        """Return the seconds until the next tick."""
        return self._start_s + (self.tick + 1) * self._period_s - time.monotonic()

    def advance(self) -> int:
        """Start the next tick and return its number; missed ticks are skipped."""
        late = int(-self.delay_s() / self._period_s)
        self.tick += 1 + max(0, late)
        return self.tick


def clock_environment(path: Path, tokens_per_s: float, num_phases: int) -> dict[str, str]:
    """Return the environment that makes a server process emit tokens by the shared clock in the file `path`.

    `tokens_per_s`: rate of each stream; `num_phases`: ticks per token interval, among which the streams are spread.
    """
    return {ENVIRONMENT: f"{tokens_per_s} {num_phases} {path}"}


def clock_from_environment() -> tuple[TickClock, TickTimes]:
    """Return the clock and the tick times that `clock_environment` configured for this process."""
    tokens_per_s, num_phases, path = os.environ[ENVIRONMENT].split(" ", 2)
    return TickClock(float(tokens_per_s), int(num_phases)), TickTimes(Path(path))
