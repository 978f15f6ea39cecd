"""The clock that several processes share: when each tick was."""

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
    """The text of the token every stream gets at `tick`."""
    return f" t{tick:04x}"


class Ticks:
    """When each tick was: nanoseconds of the monotonic clock, in a file that several processes map."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * NUM_TICKS))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.at_ns: NDArray[np.int64] = np.frombuffer(self._map, np.int64)

    def note(self, tick: int) -> None:
        self.at_ns[tick % NUM_TICKS] = time.monotonic_ns()


class Beat:
    """The clock itself: `num_phases` ticks in the time between a stream's tokens; a stream has its turn in one."""

    def __init__(self, tokens_per_s: float, num_phases: int) -> None:
        self.num_phases = num_phases
        self._period_s = 1 / (tokens_per_s * num_phases)
        self._begun_s = time.monotonic()
        self.tick = 0

    def delay_s(self) -> float:
        """How long until the next tick."""
        return self._begun_s + (self.tick + 1) * self._period_s - time.monotonic()

    def advance(self) -> int:
        """Begin the next tick; ticks that were missed are not made up for."""
        late = int(-self.delay_s() / self._period_s)
        self.tick += 1 + max(0, late)
        return self.tick


def settings(ticks: Path, tokens_per_s: float, num_phases: int) -> dict[str, str]:
    """The environment for a process with a clock."""
    return {ENVIRONMENT: f"{tokens_per_s} {num_phases} {ticks}"}


def from_environment() -> tuple[Beat, Ticks]:
    tokens_per_s, num_phases, path = os.environ[ENVIRONMENT].split(" ", 2)
    return Beat(float(tokens_per_s), int(num_phases)), Ticks(Path(path))
