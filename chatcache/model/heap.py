"""How a model on a CPU gets memory: weights on huge pages, and freed memory kept for the next step.

Reading weights is what a decode step waits for. On 4 KiB pages every page costs a look-up, and the CPU's prefetcher
stops at each page's end; so weights lie together in large pieces that ask the system for 2 MiB pages.

The activations of a long prompt are tens of megabytes that are freed and allocated again in every layer. By default the
C library gives such pieces back to the system at once, and the next layer waits for 4 KiB pages of zeros: 24,000 of
them in a prompt of 2,048 tokens (SmolLM2-135M shape), 12 % of its time.
"""

from __future__ import annotations

import ctypes
import logging

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes: a cache line, and a row of an AMX tile
_PIECE_BYTES = 64 * 2**20

# glibc's mallopt(3): parameters, and what they are set to
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = {_MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 2**30, _TOP_PAD: 16 * 2**20}  # 32 MiB: the most it takes


class Arena:
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

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def keep_freed_memory() -> None:
    """Tell the C library to reuse what is freed rather than return it; a setting of the whole process, glibc only."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for parameter, value in _SETTINGS.items():
        if not mallopt(parameter, value):
            log.info("mallopt(%d, %d) was refused", parameter, value)
