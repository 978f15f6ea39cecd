"""Return free memory to the system after large requests.

The C library keeps what large bodies and answers have used, in a heap for each thread that has processed one.
`HeapTrimmer` gives it back once the resident memory has changed. Without glibc it does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

INTERVAL_S = 2.0
MIN_CHANGE_BYTES = 8 << 20
MIN_MAPPED_BYTES = 256 << 10
_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_STATUS = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system does not report it."""
    try:
        return int(_STATUS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0


def keep_large_blocks_apart() -> None:
    """Have every block of `MIN_MAPPED_BYTES` mapped by itself, so that it is given back once it is free.

    By default glibc stops to do so for blocks as large as one that was freed, up to 32 MiB.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIN_MAPPED_BYTES)


def trim_heap() -> None:
    """Return the free pages of all heaps to the system."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


class HeapTrimmer:
    """Trims the heap when the resident memory has changed by `MIN_CHANGE_BYTES`, and once more when it is unchanged.

    Large blocks are given back by themselves when they are freed, so that memory which shrinks means that more is free.
    """

    def __init__(self, measure: Callable[[], int] = resident_bytes, trim: Callable[[], None] = trim_heap) -> None:
        self._measure = measure
        self._trim = trim
        self._last_bytes = measure()
        self._has_changed = False

    async def loop(self) -> None:
        """Check every `INTERVAL_S` until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.check()

    async def check(self) -> None:
        """Trim the heap, in a thread, if the memory has changed since the last trim, or had at the last check."""
        had_changed = self._has_changed
        self._has_changed = abs(self._measure() - self._last_bytes) >= MIN_CHANGE_BYTES
        if had_changed or self._has_changed:
            await asyncio.to_thread(self._trim)
            self._last_bytes = self._measure()
