"""Host memory for CPU models: huge pages, reuse of freed memory, prefaulting of KV pages.

Decode is bound by reading weights. On 4 KiB pages every page costs an address translation, and the hardware prefetcher
stops at page ends, so `HostArena` packs weights into large blocks for which the system uses 2 MiB pages.

The activations of a long prompt are tens of megabytes that are freed and allocated again in every layer. By default the
C library returns such blocks to the system at once, and the next layer waits for zeroed pages: 24,000 of them in a
prompt of 2,048 tokens (SmolLM2-135M shape), 12 % of its time. `reuse_freed_memory` and `reuse_large_blocks` end that.

The KV pages of a CPU model get physical memory on their first write. That write is slow: the system clears the memory,
and a virtual machine may have to request it from its host (measured: 1 GiB took 2.4 s). `PagePrefaulter` therefore
prefaults pages ahead of their use, in a thread that works while no step runs. During steps it would take a core, and
steps waited for it, presumably for locks of the system's memory management: next to two busy programs on two cores, 16
prompts of 64 tokens took up to 7 s instead of 1.5, whatever the priority of the thread.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from chatcache_kernels.types import PageStore
from torch import Tensor

log = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes: a cache line, and a row of an AMX tile
_PIECE_BYTES = 64 * 2**20

# parameters of glibc's mallopt(3) and their values
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_SETTINGS = {
    _MMAP_THRESHOLD: 32 * 2**20,  # the maximum
    _MMAP_MAX: 65536,  # the default
    _TRIM_THRESHOLD: 2**30,
    _TOP_PAD: 16 * 2**20,
}

PREFAULT_AHEAD_BYTES = 512 * 2**20
_STEP_BYTES = 2 * 2**20  # of one layer's keys or values at a time: one huge page
IDLE_S = 0.05  # after a step, until the system counts as idle
_POLL_S = 0.1
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE (Linux 5.14): prefault without changing contents; safe during writes


class HostArena:
    """Allocates tensors from large blocks that are freed when the last tensor in them is freed."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        if num_bytes > len(self._piece):
            # numpy requests huge pages and, unlike torch.zeros, does not write to the memory
            self._piece = torch.from_numpy(np.empty(max(num_bytes, _PIECE_BYTES) + ALIGNMENT, np.uint8))
            self._piece = self._piece[-self._piece.data_ptr() % ALIGNMENT :]
        taken = self._piece[:num_bytes]
        self._piece = self._piece[-(-num_bytes // ALIGNMENT) * ALIGNMENT :]
        return taken.view(dtype).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor in the arena."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def reuse_freed_memory() -> None:
    """Configure the C library to keep freed memory instead of returning it to the system.

    A setting of the whole process; glibc only.
    """
    for parameter, value in _SETTINGS.items():
        _set_option(parameter, value)


def reuse_large_blocks() -> None:
    """Configure the C library to keep freed blocks of more than 32 MiB, too, until `reuse_freed_memory` is called.

    For the time after a model is loaded: weights that are released while it loads should return to the system.
    """
    _set_option(_MMAP_MAX, 0)


def _set_option(parameter: int, value: int) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    if not mallopt(parameter, value):
        log.info("mallopt(%d, %d) was refused", parameter, value)


class PagePrefaulter:
    """Prefaults `ahead_bytes` of KV memory past the highest page in use, while no step runs.

    Call it from one thread; the prefaulting itself runs in a background thread.
    """

    def __init__(self, stores: Sequence[PageStore], ahead_bytes: int = PREFAULT_AHEAD_BYTES) -> None:
        self._layers = [layer for store in stores for memory in store.tensors for layer in memory]
        self._num_pages = len(self._layers[0])
        self._num_ahead = max(1, ahead_bytes // sum(store.page_bytes for store in stores))
        self._step = max(1, _STEP_BYTES // max(map(_page_bytes, self._layers)))
        self._num_prefaulted = 0  # pages below this one are prefaulted, or being prefaulted
        self._target = 0
        self._lock = threading.Lock()
        self._idle_from_s = 0.0  # by `time.perf_counter`
        self._closing = threading.Event()
        self._populate = _madvise_populate()
        self.thread: threading.Thread | None = None
        close = weakref.WeakMethod(self.close)
        atexit.register(lambda: (method := close()) is not None and method())

    @property
    def is_closed(self) -> bool:
        """Return whether prefaulting has ended: closed, or not supported by the system."""
        return self._populate is None

    def ensure(self, page: int) -> None:
        """Start prefaulting past `page`, which is now in use; never waits."""
        end = min(page + 1 + self._num_ahead, self._num_pages)
        if self.is_closed or end <= self._target:
            return
        with self._lock:
            self._target = min(end + self._num_ahead // 4, self._num_pages)  # not a new thread for every page
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name="prefault-pages", daemon=True)
                self.thread.start()

    def pause(self) -> None:
        """Stop prefaulting until `resume`, because a step begins; never waits."""
        self._idle_from_s = math.inf

    def resume(self) -> None:
        """Continue prefaulting if no step begins in the next IDLE_S seconds."""
        self._idle_from_s = time.perf_counter() + IDLE_S

    def close(self) -> None:
        """Stop prefaulting and wait for the thread.

        A thread that outlives the interpreter could abort the process.
        """
        with self._lock:
            self._populate, thread = None, self.thread
        self._closing.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                first, end = self._num_prefaulted, min(self._num_prefaulted + self._step, self._target)
                populate = self._populate
                if first >= end or populate is None:
                    self.thread = None
                    return
                self._num_prefaulted = end
            for layer in self._layers:
                while not self.is_closed and (wait_s := self._idle_from_s - time.perf_counter()) > 0:
                    self._closing.wait(min(wait_s, _POLL_S))
                page_bytes = _page_bytes(layer)
                if self.is_closed or not populate(layer.data_ptr() + first * page_bytes, (end - first) * page_bytes):
                    self.close()
                    break


def _page_bytes(layer: Tensor) -> int:
    return layer.stride(0) * layer.element_size()


def _madvise_populate() -> Callable[[int, int], bool] | None:
    """Return populate(address, num_bytes), None if the system does not support it."""
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def populate(address: int, num_bytes: int) -> bool:
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        if madvise(start, address + num_bytes - start, _POPULATE_WRITE) == 0:
            return True
        log.info("KV pages are not prefaulted: %s", os.strerror(ctypes.get_errno()))
        return False

    return populate
