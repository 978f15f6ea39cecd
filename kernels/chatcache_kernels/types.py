"""Data shared by all backends: the page store, and what one step's attention needs to know.

Symbols (drawn in kernels/README.md): L layers, N pages, P page size in tokens, H query heads, Hkv key/value heads,
G = H / Hkv, D head size, R rows of a step, T new tokens of a step, M host pages, slot = page * P + offset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys and values of all layers, in pages. Opaque: the order inside `k` and `v` belongs to the backend.

    Shapes: k, v are [L, N, ...] with P * Hkv * D elements a page and layer.
    """

    k: Tensor
    v: Tensor
    page_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_layers(self) -> int:
        """Return L."""
        return self.k.shape[0]

    @property
    def num_pages(self) -> int:
        """Return N, the null page counted."""
        return self.k.shape[1]

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page: keys and values of every layer."""
        return 2 * self.num_layers * self.page_size * self.num_kv_heads * self.head_dim * self.k.element_size()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole store."""
        return self.num_pages * self.page_bytes


@dataclass(frozen=True, slots=True)
class HostPages:
    """Room for M swapped pages in host memory, one page's layers side by side, so that a page is one transfer.

    Opaque like `KVPages`, whose order inside a page it shares. Shapes: k, v are [M, L, ...].
    """

    k: Tensor
    v: Tensor

    @classmethod
    def allocate(cls, pages: KVPages, num_pages: int) -> HostPages:
        """Reserve the room; memory that is never written takes none. There is no null page: 0 .. num_pages - 1."""
        # numpy leaves large buffers untouched and, unlike torch, asks for huge pages
        layout, kind = (num_pages, pages.num_layers), f"i{pages.k.element_size()}"
        k, v = (torch.from_numpy(np.empty((*layout, *store.shape[2:]), kind)) for store in (pages.k, pages.v))
        return cls(k.view(pages.k.dtype), v.view(pages.v.dtype))

    @property
    def num_pages(self) -> int:
        """Return M."""
        return self.k.shape[0]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which tokens a step adds and where each row's keys lie. Built once a step, used by every layer.

    Row r adds tokens at positions start[r] .. start[r] + num_tokens[r] - 1; they are entries
    offsets[r] .. offsets[r + 1] - 1 of the step's T tokens and are written to `slots`. A token at position p of row r
    lies in page tables[r, p // P] at offset p % P; entries past a row's last page are never read.

    Shapes: tables [R, max_pages], start [R], num_tokens [R], offsets [R + 1] int32; slots [T] int64.
    `max_new_tokens`, `max_context_tokens`: the largest num_tokens and start + num_tokens (host numbers, 0 if R = 0).
    """

    tables: Tensor
    start: Tensor
    num_tokens: Tensor
    offsets: Tensor
    slots: Tensor
    max_new_tokens: int
    max_context_tokens: int

    def to(self, device: torch.device | str) -> AttentionBatch:
        """Return the batch on another device."""
        names = ("tables", "start", "num_tokens", "offsets", "slots")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @classmethod
    def build(cls, tables: Tensor, start: Tensor, num_tokens: Tensor, page_size: int) -> AttentionBatch:
        """Derive the rest from tables [R, max_pages], start [R] and num_tokens [R], all on the host."""
        tables, start, num_tokens = (x.to(torch.int32).contiguous() for x in (tables, start, num_tokens))
        num_rows = start.numel()
        offsets = torch.zeros(num_rows + 1, dtype=torch.int32)
        torch.cumsum(num_tokens, 0, dtype=torch.int32, out=offsets[1:])
        row = torch.repeat_interleave(torch.arange(num_rows), num_tokens)
        position = torch.arange(row.numel()) - offsets[row] + start[row]
        slots = tables[row, position // page_size].long() * page_size + position % page_size
        most_new = int(num_tokens.max()) if num_rows else 0
        most_context = int((start + num_tokens).max()) if num_rows else 0
        return cls(tables, start, num_tokens, offsets, slots, most_new, most_context)
