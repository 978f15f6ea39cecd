"""Data that all backends share: the page store, the attention batch and its work list.

The KV layout and the symbols in shapes are described in the docstring of the package `chatcache_kernels`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .fp8 import DTYPE as FP8
from .fp8 import SCALE_BYTES

I32 = NDArray[np.int32]
OS_PAGE_BYTES = 4096


class PageStore(Protocol):
    """Pages of one kind of layers, as copies and swaps see them.

    `tensors`: each [num_layers, num_pages, ...]; they have the same size, and a page and layer is contiguous in each.
    """

    @property
    def tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def page_size(self) -> int: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys and values of the layers that have the same heads, in pages.

    Shapes: k, v [num_layers, num_pages, ...] with page_size * num_kv_heads * head_dim elements per page and layer. The
    order of those elements belongs to the backend (see the package docstring); other code must not index into it.
    In float8_e4m3fn, each token and head has 4 bytes more: the scale of its numbers, in float32.
    """

    k: Tensor
    v: Tensor
    page_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the store."""
        return self.k, self.v

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return self.k.shape[0]

    @property
    def num_pages(self) -> int:
        """Return the number of pages, including the null page."""
        return self.k.shape[1]

    @property
    def is_fp8(self) -> bool:
        """Return whether keys and values are quantised."""
        return self.k.dtype == FP8

    @property
    def head_elements(self) -> int:
        """Return how many elements of `k`, and of `v`, a page has for one head and layer."""
        return self.page_size * (self.head_dim + (SCALE_BYTES if self.is_fp8 else 0))

    @property
    def page_bytes(self) -> int:
        """Return the size of one page in bytes: keys and values of every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_elements * self.k.element_size()

    @property
    def num_bytes(self) -> int:
        """Return the size of the whole store in bytes."""
        return self.num_pages * self.page_bytes


@dataclass(frozen=True, slots=True)
class LatentPages:
    """Latents of the layers that have the same latent attention, in pages; see `reference_latent`.

    Shapes: data [num_layers, num_pages, page_size, width]. `rank`: dimensions of the latent, which come first.
    """

    data: Tensor
    rank: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensor of the store."""
        return (self.data,)

    @property
    def page_size(self) -> int:
        """Return the number of tokens of a page."""
        return self.data.shape[2]

    @property
    def num_pages(self) -> int:
        """Return the number of pages, including the null page."""
        return self.data.shape[1]

    @property
    def page_bytes(self) -> int:
        """Return the size of one page in bytes: the latents of every layer."""
        return self.data[:, 0].numel() * self.data.element_size()


@dataclass(frozen=True, slots=True)
class HostPages:
    """Swapped pages of one page store in host memory.

    All layers of a page are contiguous, so that a page is one transfer.
    `tensors`: those of the page store that it was made for, each [num_host_pages, num_layers, ...]; inside a page the
    order is that of the store.
    """

    tensors: tuple[Tensor, ...]

    @classmethod
    def allocate(cls, pages: PageStore, num_pages: int) -> HostPages:
        """Allocate host memory for `num_pages` pages, numbered from 0; there is no null page.

        The operating system commits memory only when it is first written.
        """
        return cls(tuple(_allocate_host(store, num_pages) for store in pages.tensors))

    @property
    def num_pages(self) -> int:
        """Return the number of host pages."""
        return self.tensors[0].shape[0]


def _allocate_host(store: Tensor, num_pages: int) -> Tensor:
    """Allocate page-aligned host memory that shares no OS page, so that it can be pinned."""
    shape = num_pages, store.shape[0], *store.shape[2:]
    num_bytes = store.element_size() * math.prod(shape)
    # numpy does not write to large buffers and, unlike torch, asks the OS for huge pages
    memory = np.empty(num_bytes + 2 * OS_PAGE_BYTES, np.uint8)
    first = -memory.ctypes.data % OS_PAGE_BYTES
    return torch.from_numpy(memory[first : first + num_bytes]).view(store.dtype).view(shape)


@dataclass(frozen=True, slots=True)
class WorkList:
    """Attention work items whose query tiles have the same maximum size.

    An item is a set of new tokens (its members) times a range of keys of one sequence. Members see the keys of that
    range up to and including their own position, which may be none.

    Shapes: items [num_items, 6] int32, one line each:
        0 row of `AttentionBatch.tables` to read the keys through
        1 first key, 2 end key (exclusive), as positions in the sequence
        3 first entry of `members`, 4 number of members
        5 first partial state: member n writes state first_state + n. -1: there is no other item for these tokens, the
          result is final and goes to the output.
    members [num_members] int32: indices of new tokens (items of the same tokens share entries).
    num_items [1] int32: items after that are leftovers in a static buffer. `max_members` * G queries fit a tile.
    """

    items: Tensor
    members: Tensor
    num_items: Tensor
    max_members: int


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Plan of a step's attention: work items, and the partial states to merge for each token.

    A partial state is (weighted values [num_heads, head_dim], log-sum-exp [num_heads]) in float32. States merge by
    log-sum-exp in the order listed, as in Flash-Decoding and FlashInfer's cascade attention.

    Shapes: positions [num_tokens] int32, each token's position in its sequence; merge_tokens [num_merges] int32: tokens
    that have partial states; merge_offsets [num_merges + 1], merge_states [num_states] int32; num_merges [1] int32
    (entries after that are leftovers in a static buffer). The partial states of token merge_tokens[x] are
    merge_states[merge_offsets[x] : merge_offsets[x + 1]]. `num_states` is a host number. `lists`: work lists with
    different limits on the rows per item (`max_members`); an empty one is left out, except in static buffers.
    """

    lists: tuple[WorkList, ...]
    positions: Tensor
    merge_tokens: Tensor
    merge_offsets: Tensor
    merge_states: Tensor
    num_merges: Tensor
    num_states: int

    def to(self, device: torch.device | str) -> AttentionWork:
        """Return the plan on another device."""
        lists = tuple(
            WorkList(one.items.to(device), one.members.to(device), one.num_items.to(device), one.max_members)
            for one in self.lists
        )
        names = ("positions", "merge_tokens", "merge_offsets", "merge_states", "num_merges")
        return replace(self, lists=lists, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True, slots=True)
class HostWorkList:
    """`WorkList` as numpy arrays."""

    items: I32
    members: I32
    max_members: int

    def to_tensors(self) -> WorkList:
        """Return the list as CPU tensors."""
        num_items = torch.from_numpy(np.array([len(self.items)], np.int32))
        return WorkList(torch.from_numpy(self.items), torch.from_numpy(self.members), num_items, self.max_members)


@dataclass(frozen=True, slots=True)
class HostAttentionWork:
    """`AttentionWork` as numpy arrays."""

    lists: tuple[HostWorkList, ...]
    positions: I32
    merge_tokens: I32
    merge_offsets: I32
    merge_states: I32

    @property
    def num_states(self) -> int:
        """Return the number of partial states."""
        return len(self.merge_states)

    def to_tensors(self) -> AttentionWork:
        """Return the plan as CPU tensors."""
        return AttentionWork(
            lists=tuple(one.to_tensors() for one in self.lists),
            positions=torch.from_numpy(self.positions),
            merge_tokens=torch.from_numpy(self.merge_tokens),
            merge_offsets=torch.from_numpy(self.merge_offsets),
            merge_states=torch.from_numpy(self.merge_states),
            num_merges=torch.from_numpy(np.array([len(self.merge_tokens)], np.int32)),
            num_states=self.num_states,
        )


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm weights of query heads and key heads, applied before the rotary embedding.

    Shapes: q, k [head_dim].
    """

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """New tokens of a step, and where each row's keys are stored.

    Built once a step, used by every layer.
    A row is one sequence. Row r adds tokens at positions start[r] .. start[r] + num_tokens[r] - 1. They are entries
    offsets[r] .. offsets[r + 1] - 1 of the step's tokens, and their keys and values are written to `slots`. A token at
    position p of row r is stored in page tables[r, p // page_size] at offset p % page_size. Table entries after a row's
    last page are never read.

    Shapes: tables [num_rows, max_pages], start, num_tokens [num_rows], offsets [num_rows + 1] int32; slots [num_tokens]
    int64. `max_new_tokens`, `max_context_tokens`: maximum of num_tokens and of start + num_tokens (host numbers; 0
    without rows). `work`: the plan, for backends whose `prepare` returns one.
    """

    tables: Tensor
    start: Tensor
    num_tokens: Tensor
    offsets: Tensor
    slots: Tensor
    max_new_tokens: int
    max_context_tokens: int
    work: AttentionWork | None = None

    def to(self, device: torch.device | str) -> AttentionBatch:
        """Return the batch on another device."""
        names = ("tables", "start", "num_tokens", "offsets", "slots")
        work = self.work.to(device) if self.work is not None else None
        return replace(self, work=work, **{name: getattr(self, name).to(device) for name in names})

    @classmethod
    def build(cls, tables: Tensor, start: Tensor, num_tokens: Tensor, page_size: int) -> AttentionBatch:
        """Build a batch; derive its offsets, its cache slots and the largest row and context.

        Shapes: tables [num_rows, max_pages], start, num_tokens [num_rows]; on the CPU.
        """
        tables, start, num_tokens = (x.to(torch.int32).contiguous() for x in (tables, start, num_tokens))
        num_rows = start.numel()
        offsets = torch.zeros(num_rows + 1, dtype=torch.int32)
        torch.cumsum(num_tokens, 0, dtype=torch.int32, out=offsets[1:])
        row = torch.repeat_interleave(torch.arange(num_rows), num_tokens)
        position = torch.arange(row.numel()) - offsets[row] + start[row]
        slots = tables[row, position // page_size].long() * page_size + position % page_size
        max_new_tokens = int(num_tokens.max()) if num_rows else 0
        max_context_tokens = int((start + num_tokens).max()) if num_rows else 0
        return cls(tables, start, num_tokens, offsets, slots, max_new_tokens, max_context_tokens)
