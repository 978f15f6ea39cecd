"""Pages on loan to host memory: what swapping a request out and in again moves."""

from __future__ import annotations

import time

import numpy as np
import torch
from chatcache_kernels.types import HostPages, KVPages

from chatcache.model.attention import AttentionBackend
from chatcache.model.transfer import to_device
from chatcache.sched.plan import I32

NUM_MEASURED_PAGES = 8
MEASURE_S = 0.02


class Swaps:
    """The host store and the copies to and from it. Without host pages it refuses every swap."""

    def __init__(self, kernels: AttentionBackend, pages: KVPages, num_host_pages: int) -> None:
        self._kernels = kernels
        self._pages = pages
        self._host = HostPages.allocate(pages, num_host_pages)

    def apply(self, swaps_out: I32, swaps_in: I32) -> None:
        """Move pages out, then in. Shapes: swaps_out [S, 2] (page, host page), swaps_in [S, 2] (host page, page).

        Raises: ValueError for a page that does not exist: copying to it would spoil other memory.
        """
        if len(swaps_out):
            self._check(swaps_out[:, 0], swaps_out[:, 1])
            self._kernels.swap_out(self._pages, self._host, to_device(swaps_out, self._pages.k.device))
        if len(swaps_in):
            self._check(swaps_in[:, 1], swaps_in[:, 0])
            self._kernels.swap_in(self._pages, self._host, to_device(swaps_in, self._pages.k.device))

    def measure_page_s(self) -> float:
        """Return how long one page takes one way, the best of a few; 0 without host pages. No page changes."""
        count = min(NUM_MEASURED_PAGES, self._host.num_pages, self._pages.num_pages - 1)
        if not count:
            return 0.0
        ours, theirs = np.arange(1, count + 1, dtype=np.int32), np.arange(count, dtype=np.int32)
        out, back = np.stack((ours, theirs), 1), np.stack((theirs, ours), 1)
        best, deadline = float("inf"), time.perf_counter() + MEASURE_S
        for attempt in range(20):
            start = time.perf_counter()
            self.apply(out, back)
            if self._pages.k.device.type == "cuda":
                torch.cuda.synchronize(self._pages.k.device)
            end = time.perf_counter()
            if attempt:  # the first compiles, and touches fresh memory
                best = min(best, end - start)
            if attempt and end > deadline:
                break
        return best / (2 * count)

    def _check(self, pages: I32, host_pages: I32) -> None:
        for name, ids, count in (
            ("page", pages, self._pages.num_pages),
            ("host page", host_pages, self._host.num_pages),
        ):
            if ids.min() < 0 or ids.max() >= count:
                raise ValueError(f"a swap names {name} {ids.max() if ids.max() >= count else ids.min()} of {count}")
