"""How a model on a CPU gets memory: weights on huge pages, and freed memory kept for the next step.

Reading weights is what a decode step waits for. On 4 KiB pages every page costs a look-up, and the CPU's prefetcher
stops at each page's end; so weights lie together in large pieces that ask the system for 2 MiB pages.

The activations of a long prompt are tens of megabytes that are freed and allocated again in every layer. By default the
C library gives such pieces back to the system at once, and the next layer waits for 4 KiB pages of zeros: 24,000 of
them in a prompt of 2,048 tokens (SmolLM2-135M shape), 12 % of its time.

Touch page memory before it is written for the first time.

The store of a CPU model takes memory from the system only where pages are in use. But the first touch costs time when
somebody waits for it: the system clears the memory, and a virtual machine may have to get it from its host first (on
one, 1 GiB took 2.4 s, and a tenth of that when the host had it). So a thread of lowest priority stays ahead.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch
from chatcache_kernels.types import KVPages
from torch import Tensor

log = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes: a cache line, and a row of an AMX tile
_PIECE_BYTES = 64 * 2**20

# glibc's mallopt(3): parameters, and what they are set to
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = {_MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 2**30, _TOP_PAD: 16 * 2**20}  # 32 MiB: the most it takes


class HostArena:
    """Memory that lives as long as anything in it: pieces are handed out and never taken back."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor that holds nothing defined yet."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        if num_bytes > len(self._piece):
            # numpy asks for huge pages and, unlike torch.zeros, touches nothing
            self._piece = torch.from_numpy(np.empty(max(num_bytes, _PIECE_BYTES) + ALIGNMENT, np.uint8))
            self._piece = self._piece[-self._piece.data_ptr() % ALIGNMENT :]
        taken = self._piece[:num_bytes]
        self._piece = self._piece[-(-num_bytes // ALIGNMENT) * ALIGNMENT :]
        return taken.view(dtype).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def reuse_freed_memory() -> None:
    """Tell the C library to reuse what is freed rather than return it; a setting of the whole process, glibc only."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for parameter, value in _SETTINGS.items():
        if not mallopt(parameter, value):
            log.info("mallopt(%d, %d) was refused", parameter, value)


PREFAULT_AHEAD_BYTES = 512 * 2**20
_STEP_BYTES = 2 * 2**20  # of one layer's keys or values at a time: a huge page
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: as if written, contents unchanged; safe beside real writes


class PagePrefaulter:
    """Keeps `ahead_bytes` behind the highest page in use touched. One thread calls; the work is done on another."""

    def __init__(self, pages: KVPages, ahead_bytes: int = PREFAULT_AHEAD_BYTES) -> None:
        self._layers = [layer for store in (pages.k, pages.v) for layer in store]
        page_bytes = _page_bytes(self._layers[0])
        self._num_pages = len(self._layers[0])
        self._num_ahead = max(1, ahead_bytes // (page_bytes * len(self._layers)))
        self._step = max(1, _STEP_BYTES // page_bytes)
        self._num_prefaulted = 0  # pages below are, or are being, touched
        self._target = 0
        self._lock = threading.Lock()
        self._populate = _madvise_populate()
        self.thread: threading.Thread | None = None
        close = weakref.WeakMethod(self.close)
        atexit.register(lambda: (method := close()) is not None and method())

    @property
    def is_closed(self) -> bool:
        """Whether nothing more will be touched: closed, or the system cannot."""
        return self._populate is None

    def ensure(self, page: int) -> None:
        """Say that `page` is in use; never waits."""
        end = min(page + 1 + self._num_ahead, self._num_pages)
        if self.is_closed or end <= self._target:
            return
        with self._lock:
            self._target = min(end + self._num_ahead // 4, self._num_pages)  # a thread now and then, not at every page
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name="touch-pages", daemon=True)
                self.thread.start()

    def close(self) -> None:
        """Touch nothing more, and wait for the thread: one that outlives the interpreter may abort the process."""
        with self._lock:
            self._populate, thread = None, self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        _lowest_priority()
        while True:
            with self._lock:
                first, end = self._num_prefaulted, min(self._num_prefaulted + self._step, self._target)
                populate = self._populate
                if first >= end or populate is None:
                    self.thread = None
                    return
                self._num_prefaulted = end
            for layer in self._layers:
                page_bytes = _page_bytes(layer)
                if self.is_closed or not populate(layer.data_ptr() + first * page_bytes, (end - first) * page_bytes):
                    self.close()
                    break


def _page_bytes(layer: Tensor) -> int:
    return layer.stride(0) * layer.element_size()


def _madvise_populate() -> Callable[[int, int], bool] | None:
    """Return populate(address, num_bytes), None where the system has no such thing."""
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def populate(address: int, num_bytes: int) -> bool:
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        if madvise(start, address + num_bytes - start, _POPULATE_WRITE) == 0:
            return True
        log.info("page memory is not touched ahead: %s", os.strerror(ctypes.get_errno()))
        return False

    return populate


def _lowest_priority() -> None:
    """Let everybody else's threads go first; on Linux a priority is a thread's own."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    except OSError:
        pass
