"""Swapping of KV pages to host memory and back, concurrently with the steps.

    side   wait for the steps before | read pages swapped out | write pages swapped in |
    main                             | ... wait for what this plan needs | copies and rows of this plan

Only the side stream accesses host pages, so its order protects them.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from chatcache_kernels.types import HostPages, KVPages

from chatcache.errors import ModelFolderError
from chatcache.model.attention import AttentionBackend
from chatcache.model.streams import Stream, StreamEvent, Streams, make_streams
from chatcache.types.plan import I32, I64

NUM_MEASURED_PAGES = 8
MEASURE_S = 0.02

log = logging.getLogger(__name__)


class SwapExecutor:
    """The host pages and the copies to and from them. Without host pages every swap is an error."""

    def __init__(
        self, kernels: AttentionBackend, pages: KVPages, num_host_pages: int, streams: Streams | None = None
    ) -> None:
        self._kernels = kernels
        self._pages = pages
        self._device = pages.k.device
        self._streams = streams or make_streams(self._device)
        self._host = HostPages.allocate(pages, num_host_pages)
        self._unlock: Callable[[], object] = _no_unlock
        if self._device.type == "cuda":  # memory must be unlocked before it is freed, even without close()
            self._unlock = weakref.finalize(self, _unlock, _lock(self._host), self._host, self._streams.side)
        self._swap_out_event: StreamEvent | None = None  # the next plan may write the swapped-out pages after it

    def apply(self, swaps_out: I32, swaps_in: I32, written: I32 | I64 | None = None) -> None:
        """Swap pages out, then in, before work submitted to the main stream from now on needs them.

        Shapes: swaps_out [S, 2] (page, host page), swaps_in [S, 2] (host page, page). `written`: the pages that this
        plan's copies and rows write, None if unknown. If none of them is swapped out, the main stream waits for the
        swap only before the next plan.
        Raises: ValueError for a page that does not exist: copying to it would corrupt other memory.
        """
        if self._swap_out_event is not None:
            self._streams.main.wait_event(self._swap_out_event)
            self._swap_out_event = None
        if not len(swaps_out) and not len(swaps_in):
            return
        if len(swaps_out):
            self._check(swaps_out[:, 0], swaps_out[:, 1])
        if len(swaps_in):
            self._check(swaps_in[:, 1], swaps_in[:, 0])
        main, side = self._streams.main, self._streams.side
        # earlier steps have written the pages that leave and do not read those that return
        side.wait_event(main.record_event())
        side.submit(lambda: self._move(swaps_out, swaps_in))
        if len(swaps_in) or written is None or np.isin(swaps_out[:, 0], written).any():
            main.wait_event(side.record_event())
        else:
            self._swap_out_event = side.record_event()

    def measure_page_s(self) -> float:
        """Return the seconds to copy one page one way, the best of a few runs; 0 without host pages.

        No page changes its contents.
        """
        count = min(NUM_MEASURED_PAGES, self._host.num_pages, self._pages.num_pages - 1)
        if not count:
            return 0.0
        device_pages, host_pages = np.arange(1, count + 1, dtype=np.int32), np.arange(count, dtype=np.int32)
        out, back = np.stack((device_pages, host_pages), 1), np.stack((host_pages, device_pages), 1)
        best, deadline = float("inf"), time.perf_counter() + MEASURE_S
        for attempt in range(20):
            self._streams.main.record_event().wait()
            start = time.perf_counter()
            self.apply(out, back)
            self._streams.side.record_event().wait()
            end = time.perf_counter()
            if attempt:  # the first run compiles and writes to fresh memory
                best = min(best, end - start)
            if attempt and end > deadline:
                break
        return best / (2 * count)

    def close(self) -> None:
        """Release the host pages."""
        self._streams.side.record_event().wait()
        self._unlock()

    def _move(self, swaps_out: I32, swaps_in: I32) -> None:
        with torch.inference_mode():  # the page numbers stay in host memory, where the kernels read them
            if len(swaps_out):
                self._kernels.swap_out(self._pages, self._host, torch.from_numpy(swaps_out))
            if len(swaps_in):
                self._kernels.swap_in(self._pages, self._host, torch.from_numpy(swaps_in))

    def _check(self, pages: I32, host_pages: I32) -> None:
        for name, ids, count in (
            ("page", pages, self._pages.num_pages),
            ("host page", host_pages, self._host.num_pages),
        ):
            if ids.min() < 0 or ids.max() >= count:
                raise ValueError(f"a swap names {name} {ids.max() if ids.max() >= count else ids.min()} of {count}")


def _no_unlock() -> None:
    """Do nothing: host pages of a CPU are not locked."""


def _unlock(addresses: list[int], host: HostPages, side: Stream) -> None:
    """Unlock the memory of `host` after the stream that accesses it has finished."""
    with suppress(RuntimeError):  # a lost device accesses no memory
        side.record_event().wait()
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _lock(host: HostPages) -> list[int]:
    """Page-lock the host pages, so that devices can access them; return the addresses to unlock.

    torch's own pinned allocations are rounded up to powers of two; this locks exactly the pages.
    Raises: ModelFolderError if the system does not allow that much locked memory.
    """
    addresses = []
    for store in (host.k, host.v):
        size = store.numel() * store.element_size()
        if not size:
            continue
        status = int(torch.cuda.cudart().cudaHostRegister(store.data_ptr(), size, 0))  # type: ignore[no-untyped-call]
        if status:
            raise ModelFolderError(
                f"swap_space_bytes: the system does not lock {size} bytes of memory (CUDA error {status}); lower it"
            )
        addresses.append(store.data_ptr())
    log.info("swap space: %d pages, locked in memory", host.num_pages)
    return addresses
