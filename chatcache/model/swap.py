"""Pages on loan to host memory: what swapping a request out and in again moves, beside the steps.

    side   wait for the steps before | read pages that leave | write pages that return |
    main                             | ... wait for what this plan needs of it | copies, rows of this plan

Host pages are touched by the side stream alone, so its order is all the protection they need.
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
    """The host store and the copies to and from it. Without host pages it refuses every swap."""

    def __init__(
        self, kernels: AttentionBackend, pages: KVPages, num_host_pages: int, streams: Streams | None = None
    ) -> None:
        self._kernels = kernels
        self._pages = pages
        self._device = pages.k.device
        self._streams = streams or make_streams(self._device)
        self._host = HostPages.allocate(pages, num_host_pages)
        self._unlock: Callable[[], object] = _no_unlock
        if self._device.type == "cuda":  # memory must not go while it is locked, whoever forgets to close
            self._unlock = weakref.finalize(self, _unlock, _lock(self._host), self._host, self._streams.side)
        self._swap_out_event: StreamEvent | None = (
            None  # after it, the pages that the last plan sent away may be written
        )

    def apply(self, swaps_out: I32, swaps_in: I32, written: I32 | I64 | None = None) -> None:
        """Move pages out, then in, before what is submitted to the main stream from now on needs it.

        Shapes: swaps_out [S, 2] (page, host page), swaps_in [S, 2] (host page, page). `written`: the pages that this
        plan's copies and rows write, any if None. If none of them leaves, the main stream need not wait for the pages
        that leave before the next plan.
        Raises: ValueError for a page that does not exist: copying to it would spoil other memory.
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
        side.wait_event(
            main.record_event()
        )  # pages leave as the steps before left them, and nobody reads those that return fill
        side.submit(lambda: self._move(swaps_out, swaps_in))
        if len(swaps_in) or written is None or np.isin(swaps_out[:, 0], written).any():
            main.wait_event(side.record_event())
        else:
            self._swap_out_event = side.record_event()

    def measure_page_s(self) -> float:
        """Return how long one page takes one way, the best of a few; 0 without host pages. No page changes."""
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
            if attempt:  # the first compiles, and touches fresh memory
                best = min(best, end - start)
            if attempt and end > deadline:
                break
        return best / (2 * count)

    def close(self) -> None:
        """Let go of the host pages."""
        self._streams.side.record_event().wait()
        self._unlock()

    def _move(self, swaps_out: I32, swaps_in: I32) -> None:
        with torch.inference_mode():  # which pages go where is told in host memory, for that is where it is needed
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
    """Unlock nothing, where nothing is locked."""


def _unlock(addresses: list[int], host: HostPages, side: Stream) -> None:
    """Unlock `host`, which has been kept until here, once the stream that touches it is done."""
    with suppress(RuntimeError):  # a lost device touches nothing any more
        side.record_event().wait()
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _lock(host: HostPages) -> list[int]:
    """Lock the host pages in memory, where devices reach them, and return the addresses to unlock.

    torch's own pinned memory comes in powers of two; this is exactly what was asked for.
    Raises: ModelFolderError where the system does not allow so much locked memory.
    """
    addresses = []
    for store in (host.k, host.v):
        size = store.numel() * store.element_size()
        if not size:
            continue
        status = int(torch.cuda.cudart().cudaHostRegister(store.data_ptr(), size, 0))  # type: ignore[no-untyped-call]
        if status:
            raise ModelFolderError(
                f"swap_space_bytes: the system does not lock {size} bytes of memory (CUDA error {status}); say less"
            )
        addresses.append(store.data_ptr())
    log.info("swap room: %d pages, locked in memory", host.num_pages)
    return addresses
