"""Processes and arrivals as numbers. Linux: /proc."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadtest.gateway.ticks import NUM_TICKS

Int64s = NDArray[np.int64]
_TOKEN = re.compile(rb" t([0-9a-f]{4})")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Spent:
    """What a process has used so far. `waited_s`: ready to run, but its core was busy with somebody else."""

    cpu_s: float
    user_s: float
    waited_s: float
    rss_bytes: int

    @staticmethod
    def of(pid: int) -> Spent:
        ran_ns = waited_ns = 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            ran, waited, _ = (task / "schedstat").read_text().split()
            ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Spent(ran_ns * 1e-9, int(fields[11]) / _TICKS_PER_S, waited_ns * 1e-9, rss)


@dataclass(slots=True)
class Arrivals:
    """What one stream received: pieces of its bytes, and when each was read (monotonic, ns)."""

    pieces: list[bytes]
    at_ns: list[int]

    def tokens(self) -> tuple[Int64s, Int64s]:
        """(tick modulo NUM_TICKS, arrival) of each token, in order."""
        ends = np.cumsum([len(piece) for piece in self.pieces])
        found = [(int(match[1], 16), match.end()) for match in _TOKEN.finditer(b"".join(self.pieces))]
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        ticks, at = np.array(found, np.int64).T
        arrivals: Int64s = np.array(self.at_ns, np.int64)[np.searchsorted(ends, at)]
        return ticks, arrivals


def latencies_ms(streams: list[Arrivals], tick_at_ns: Int64s, begun_ns: int, ended_ns: int) -> NDArray[np.float64]:
    """Emission to receipt of every token that arrived in the window. Raises: ValueError when a stream lost or repeated
    a token in it."""
    every: list[NDArray[np.float64]] = []
    for stream in streams:
        ticks, arrived = stream.tokens()
        inside = (arrived >= begun_ns) & (arrived < ended_ns)
        ticks, arrived = ticks[inside] % NUM_TICKS, arrived[inside]
        if np.any(np.diff(ticks) <= 0):
            raise ValueError("a stream repeated a token")
        every.append((arrived - tick_at_ns[ticks]) / 1e6)
    return np.concatenate(every) if every else np.empty(0)


def volume(streams: list[Arrivals], begun_ns: int, ended_ns: int) -> tuple[int, int]:
    """(reads, bytes) in the window."""
    sizes = [
        len(piece)
        for stream in streams
        for piece, at_ns in zip(stream.pieces, stream.at_ns, strict=True)
        if begun_ns <= at_ns < ended_ns
    ]
    return len(sizes), sum(sizes)


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)), 3) for p in (50, 90, 99, 99.9)} if len(values) else {}


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
