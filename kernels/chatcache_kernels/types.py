"""Data shared by all backends: the page store, and what one step's attention needs to know.

Symbols (drawn in kernels/README.md): L layers, N pages, P page size in tokens, H query heads, Hkv key/value heads,
G = H / Hkv, D head size, R rows of a step, T new tokens of a step, M host pages, slot = page * P + offset;
of a work list: I items, B members of all items, S partial states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

I32 = NDArray[np.int32]
MEMORY_PAGE_BYTES = 4096


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
        k, v = (_host_like(store, num_pages) for store in (pages.k, pages.v))
        return cls(k, v)

    @property
    def num_pages(self) -> int:
        """Return M."""
        return self.k.shape[0]


def _host_like(store: Tensor, num_pages: int) -> Tensor:
    """Return room for pages of a store, alone on the memory pages that it lies on, for those are what can be locked."""
    shape = num_pages, store.shape[0], *store.shape[2:]
    num_bytes = store.element_size() * math.prod(shape)
    # numpy leaves large buffers untouched and, unlike torch, asks for huge pages
    memory = np.empty(num_bytes + 2 * MEMORY_PAGE_BYTES, np.uint8)
    first = -memory.ctypes.data % MEMORY_PAGE_BYTES
    return torch.from_numpy(memory[first : first + num_bytes]).view(store.dtype).view(shape)


@dataclass(frozen=True, slots=True)
class WorkList:
    """Pieces of attention whose tiles hold the same number of queries. One piece: some tokens against some keys.

    Shapes: items [I, 6] int32: (row of `tables` to read keys through, first key, end key, first member, number of
    members, first state); members [B] int32: which of the step's T tokens take part (items of the same tokens name the
    same members); num_items [1] int32. The keys are positions first .. end - 1, and a member sees those up to its own,
    which may be none. Member number n of an item leaves its partial result in state first_state + n, or, where
    first_state is -1, has no other piece and is written to the output. Items past
    `num_items` are leftovers of a static buffer. `max_members` x G queries fit a tile.
    """

    items: Tensor
    members: Tensor
    num_items: Tensor
    max_members: int


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """How the attention of a step is cut into pieces, and which partial states make up a token's output.

    A state is (weighted values [H, D], log-sum-exp [H]) in float32; states merge by log-sum-exp, in the order listed.
    Shapes: positions [T] int32, of each token in its row; merge_tokens [X] int32: the tokens with states, those of
    token merge_tokens[x] are merge_states[merge_offsets[x] .. merge_offsets[x + 1] - 1]; merge_offsets [X + 1],
    merge_states [S] int32; num_merges [1] int32 (X; what follows is left over). `num_states`: S, on the host. Lists
    differ in `max_members`; one without a piece is left out, unless a static buffer keeps its place.
    """

    lists: tuple[WorkList, ...]
    positions: Tensor
    merge_tokens: Tensor
    merge_offsets: Tensor
    merge_states: Tensor
    num_merges: Tensor
    num_states: int

    def to(self, device: torch.device | str) -> AttentionWork:
        """Return the work on another device."""
        lists = tuple(
            WorkList(one.items.to(device), one.members.to(device), one.num_items.to(device), one.max_members)
            for one in self.lists
        )
        names = ("positions", "merge_tokens", "merge_offsets", "merge_states", "num_merges")
        return replace(self, lists=lists, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True, slots=True)
class HostList:
    """`WorkList` in numpy."""

    items: I32
    members: I32
    max_members: int

    def tensors(self) -> WorkList:
        """Return the same as tensors, on the host."""
        num_items = torch.from_numpy(np.array([len(self.items)], np.int32))
        return WorkList(torch.from_numpy(self.items), torch.from_numpy(self.members), num_items, self.max_members)


@dataclass(frozen=True, slots=True)
class HostWork:
    """`AttentionWork` in numpy."""

    lists: tuple[HostList, ...]
    positions: I32
    merge_tokens: I32
    merge_offsets: I32
    merge_states: I32

    @property
    def num_states(self) -> int:
        """Return S."""
        return len(self.merge_states)

    def tensors(self) -> AttentionWork:
        """Return the same as tensors, on the host."""
        return AttentionWork(
            lists=tuple(one.tensors() for one in self.lists),
            positions=torch.from_numpy(self.positions),
            merge_tokens=torch.from_numpy(self.merge_tokens),
            merge_offsets=torch.from_numpy(self.merge_offsets),
            merge_states=torch.from_numpy(self.merge_states),
            num_merges=torch.from_numpy(np.array([len(self.merge_tokens)], np.int32)),
            num_states=self.num_states,
        )


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of an RMSNorm over each query head and each key head, applied before the rotation. Shapes: q, k [D]."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which tokens a step adds and where each row's keys lie. Built once a step, used by every layer.

    Row r adds tokens at positions start[r] .. start[r] + num_tokens[r] - 1; they are entries
    offsets[r] .. offsets[r + 1] - 1 of the step's T tokens and are written to `slots`. A token at position p of row r
    lies in page tables[r, p // P] at offset p % P; entries past a row's last page are never read.

    Shapes: tables [R, max_pages], start [R], num_tokens [R], offsets [R + 1] int32; slots [T] int64.
    `max_new_tokens`, `max_context_tokens`: the largest num_tokens and start + num_tokens (host numbers, 0 if R = 0).
    `work`: the same as a work list, for backends whose `prepare` makes one.
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
