"""The page store of the CPU backend: allocation, reads, copies, swaps. `rope` writes.

K pages are [Hkv, D, P], so that the scores of consecutive tokens fill a register; V pages are [Hkv, P, D], so that the
dimensions of one token do. Memory comes from numpy, which asks the OS for huge pages, and is not written before use: a
store of many gigabytes is allocated at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from ..types import HostPages, KVPages, PageStore
from .launch import Launch, choose_num_threads, compile_kernel, define_job
from .simd import FLOAT32, INT64, fetch_add, load, pointer, store, zeros

_LANES = 16

COPY_JOB, _PACK = define_job(
    "source target copies num_copies num_layers num_floats source_layer source_page target_layer target_page"
)
"""Addresses, counts and strides in float32.

Num_floats: one page of one layer, viewed as float32.
"""


def allocate_pages(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KVPages:
    """Allocate a store of uninitialised pages."""
    k = empty_pages((num_layers, num_pages, num_kv_heads, head_dim, page_size), dtype)
    v = empty_pages((num_layers, num_pages, num_kv_heads, page_size, head_dim), dtype)
    return KVPages(k, v, page_size, num_kv_heads, head_dim)


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialised tensor with numpy."""
    memory = np.empty(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


def write_slots_torch(pages: KVPages, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store keys and values of new tokens with torch, for shapes without a kernel."""
    page, offset = slots // pages.page_size, slots % pages.page_size
    pages.k[layer].permute(0, 3, 1, 2)[page, offset] = k.to(pages.k.dtype)
    pages.v[layer].transpose(1, 2)[page, offset] = v.to(pages.v.dtype)


def read_pages(pages: KVPages, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values at `slots`.

    Shapes: slots [n] -> [n, num_kv_heads, head_dim] each.
    """
    page, offset = slots // pages.page_size, slots % pages.page_size
    return pages.k[layer].permute(0, 3, 1, 2)[page, offset], pages.v[layer].transpose(1, 2)[page, offset]


def copy_pages(pages: PageStore, copies: Tensor) -> None:
    """Copy whole pages, all layers. Shapes: copies [n, 2] (source, target).

    No target is also a source.
    """
    for memory in pages.tensors:
        _copy_between(memory, memory, copies)


def swap_out(pages: PageStore, host: HostPages, swaps: Tensor) -> None:
    """Copy whole pages to the host, all layers. Shapes: swaps [n, 2] (page, host page).

    The host pages must be distinct.
    """
    for memory, kept in zip(pages.tensors, host.tensors, strict=True):
        _copy_between(memory, kept.transpose(0, 1), swaps)


def swap_in(pages: PageStore, host: HostPages, swaps: Tensor) -> None:
    """Copy whole pages from the host, all layers. Shapes: swaps [n, 2] (host page, page).

    The target pages must be distinct.
    """
    for memory, kept in zip(pages.tensors, host.tensors, strict=True):
        _copy_between(kept.transpose(0, 1), memory, swaps)


def _copy_between(source: Tensor, target: Tensor, copies: Tensor) -> None:
    """Copy pages of one store of keys or values to another.

    Shapes: source, target [L, N, ...]; copies [n, 2].
    """
    layer_bytes = source[0, 0].numel() * source.element_size()  # of one page and layer
    if layer_bytes % (4 * _LANES):
        start, end = copies.long().unbind(1)
        target[:, end] = source[:, start]
        return
    copies, each = copies.to(torch.int64).contiguous(), source.element_size()
    source_layer, source_page = (stride * each // 4 for stride in source.stride()[:2])
    target_layer, target_page = (stride * each // 4 for stride in target.stride()[:2])
    job = _PACK.pack(
        0, 0, source.data_ptr(), target.data_ptr(), copies.data_ptr(), copies.shape[0], source.shape[0],
        layer_bytes // 4, source_layer, source_page, target_layer, target_page,
    )  # fmt: skip
    _copy_kernel()(job, choose_num_threads(copies.shape[0] * source.shape[0] * layer_bytes // 4))


@cache
def _copy_kernel() -> Launch:
    """Return the launcher of the page copy kernel. Its argument record is a COPY_JOB.

    A work item is one page of one layer.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, COPY_JOB)[0]
        zero, copies = zeros(_LANES), pointer(INT64, job.copies)
        source, target = pointer(FLOAT32, job.source), pointer(FLOAT32, job.target)
        item = fetch_add(address, 0, 1)
        while item < job.num_copies * job.num_layers:
            copy, layer = divmod(item, job.num_layers)
            start = layer * job.source_layer + copies[2 * copy] * job.source_page
            end = layer * job.target_layer + copies[2 * copy + 1] * job.target_page
            for i in range(0, job.num_floats, _LANES):
                store(target, end + i, load(zero, source, start + i))
            item = fetch_add(address, 0, 1)

    return compile_kernel(kernel)
