"""The CPU's page store: layout, writes, reads and copies.

K pages are [Hkv, D, P] so that the scores of `lanes` tokens fill a register; V pages are [Hkv, P, D] so that the
dimensions of one token do. Memory comes from numpy, which asks the kernel for huge pages (fewer TLB misses, measured),
and is not touched before it is used: a store of many gigabytes is ready at once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..types import KVPages


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


def write_pages(pages: KVPages, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store keys and values of new tokens. Shapes: k, v [T, Hkv, D]; slots [T]."""
    page, offset = slots // pages.page_size, slots % pages.page_size
    pages.k[layer].permute(0, 3, 1, 2)[page, offset] = k.to(pages.k.dtype)
    pages.v[layer].transpose(1, 2)[page, offset] = v.to(pages.v.dtype)


def read_pages(pages: KVPages, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values at `slots`. Shapes: slots [S] -> [S, Hkv, D] each."""
    page, offset = slots // pages.page_size, slots % pages.page_size
    return pages.k[layer].permute(0, 3, 1, 2)[page, offset], pages.v[layer].transpose(1, 2)[page, offset]


def copy_pages(pages: KVPages, copies: Tensor) -> None:
    """Copy whole pages, all layers. Shapes: copies [C, 2] (src, dst); no dst is a src."""
    source, target = copies.long().unbind(1)
    pages.k[:, target] = pages.k[:, source]
    pages.v[:, target] = pages.v[:, source]
