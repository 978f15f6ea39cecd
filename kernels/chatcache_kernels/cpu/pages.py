"""The CPU's page store: layout, reads and copies; `rope.py` writes.

K pages are [Hkv, D, P] so that the scores of many tokens fill a register; V pages are [Hkv, P, D] so that the
dimensions of one token do. Memory comes from numpy, which asks the kernel for huge pages, and is not touched before it
is used: a store of many gigabytes is ready at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from ..types import KVPages
from .launch import Launch, compile_kernel, record, threads_for
from .vectors import FLOAT32, INT64, fetch_add, load, pointer, store, zeros

_LANES = 16

COPY_JOB, _PACK = record("store copies num_copies num_layers layer_floats page_floats")


def allocate_pages(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KVPages:
    """Return a store of pages that hold nothing defined yet."""
    k = _empty((num_layers, num_pages, num_kv_heads, head_dim, page_size), dtype)
    v = _empty((num_layers, num_pages, num_kv_heads, page_size, head_dim), dtype)
    return KVPages(k, v, page_size, num_kv_heads, head_dim)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    memory = np.empty(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


def write_slots(pages: KVPages, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store keys and values of new tokens, whatever their shape, with torch alone."""
    page, offset = slots // pages.page_size, slots % pages.page_size
    pages.k[layer].permute(0, 3, 1, 2)[page, offset] = k.to(pages.k.dtype)
    pages.v[layer].transpose(1, 2)[page, offset] = v.to(pages.v.dtype)


def read_pages(pages: KVPages, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values at `slots`. Shapes: slots [S] -> [S, Hkv, D] each."""
    page, offset = slots // pages.page_size, slots % pages.page_size
    return pages.k[layer].permute(0, 3, 1, 2)[page, offset], pages.v[layer].transpose(1, 2)[page, offset]


def copy_pages(pages: KVPages, copies: Tensor) -> None:
    """Copy whole pages, all layers. Shapes: copies [C, 2] (src, dst); no dst is a src."""
    copies = copies.to(torch.int64).contiguous()
    page_floats = pages.page_bytes // (8 * pages.num_layers)  # of one layer's keys, seen as float32
    if page_floats % _LANES or pages.page_bytes % (8 * pages.num_layers):
        source, target = copies.unbind(1)
        pages.k[:, target] = pages.k[:, source]
        pages.v[:, target] = pages.v[:, source]
        return
    for memory in (pages.k, pages.v):
        job = _PACK.pack(
            0, 0, memory.data_ptr(), copies.data_ptr(), copies.shape[0], pages.num_layers,
            pages.num_pages * page_floats, page_floats,
        )  # fmt: skip
        _copy_kernel()(job, threads_for(copies.shape[0] * pages.num_layers * page_floats))


@cache
def _copy_kernel() -> Launch:
    """Return the launcher. Takes a COPY_JOB; one piece of work is one page of one layer."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, COPY_JOB)[0]
        zero, memory, copies = zeros(_LANES), pointer(FLOAT32, job.store), pointer(INT64, job.copies)
        piece = fetch_add(address, 0, 1)
        while piece < job.num_copies * job.num_layers:
            layer, copy = divmod(piece, job.num_copies)
            source = layer * job.layer_floats + copies[2 * copy] * job.page_floats
            target = layer * job.layer_floats + copies[2 * copy + 1] * job.page_floats
            for i in range(0, job.page_floats, _LANES):
                store(memory, target + i, load(zero, memory, source + i))
            piece = fetch_add(address, 0, 1)

    return compile_kernel(kernel)
