"""Attention workloads: random keys and values in shuffled pages, larger than the L2 cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import torch
from chatcache_kernels.fp8 import DTYPE as FP8
from chatcache_kernels.types import AttentionBatch, KVPages
from chatcache_kernels.work_list import SharingMode
from numpy.typing import NDArray
from torch import Tensor

I32 = NDArray[np.int32]
PAGE = 16
MIN_ROUND_BYTES = {"full": 2**30, "cpu": 2**26, "tiny": 1}  # read by a round over all layers


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of query heads and key heads, and head size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim}"

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer, in bfloat16."""
        return 4 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Rows:
    """Page tables and lengths of the rows of an attention launch, on the host.

    Shapes: tables [R, pages], start, num_tokens [R]. `num_unique`: tokens in all rows, shared ones counted once.
    """

    tables: I32
    start: I32
    num_tokens: I32
    num_unique: int

    @property
    def num_pages(self) -> int:
        return int(self.tables.max()) + 1

    @property
    def num_attended(self) -> int:
        """Number of tokens that the rows attend to; shared tokens are counted for each row."""
        return int((self.start + self.num_tokens).sum())


def equal_rows(num_rows: int, context: int, new: int, *, shuffled: bool = True) -> Rows:
    """Return rows of `context` tokens each, the last `new` of them new, that share nothing."""
    return tree_rows([(num_rows, context)], new, shuffled=shuffled)


def tree_rows(levels: Sequence[tuple[int, int]], new: int = 1, *, shuffled: bool = True) -> Rows:
    """Return rows that share prefixes: the leaves of a tree.

    A level is (children per node, tokens per child): [(1, 4096), (8, 256)] are 8 branches of 256 tokens each after one
    prompt of 4,096. The tokens of all levels but the last must fill whole pages.
    """
    nodes, tables, used, unique = 1, np.zeros((1, 0), np.int32), 1, 0
    for children, tokens in levels:
        nodes *= children
        num_pages = -(-tokens // PAGE)
        own = np.arange(used, used + nodes * num_pages, dtype=np.int32).reshape(nodes, num_pages)
        tables = np.concatenate((np.repeat(tables, children, axis=0), own), axis=1)
        used, unique = used + nodes * num_pages, unique + nodes * tokens
    if shuffled:
        positions = np.concatenate(([0], 1 + np.random.default_rng(0).permutation(used - 1))).astype(np.int32)
        tables = positions[tables]
    context = sum(tokens for _, tokens in levels)
    counts = np.full(nodes, new, np.int32)
    return Rows(tables, np.full(nodes, context, np.int32) - counts, counts, unique)


def unshared(rows: Rows) -> Rows:
    """Return the same rows with separate pages for each row."""
    tables = np.arange(1, 1 + rows.tables.size, dtype=np.int32).reshape(rows.tables.shape)
    tables = (1 + np.random.default_rng(1).permutation(rows.tables.size).astype(np.int32))[tables - 1]
    return replace(rows, tables=tables, num_unique=rows.num_attended)


@dataclass(frozen=True, slots=True)
class Workload:
    """The inputs of one attention launch per layer. Shapes: q [T, H, D] bfloat16."""

    kernels: ModuleType
    pages: KVPages
    batch: AttentionBatch
    q: Tensor
    heads: Heads

    @property
    def num_layers(self) -> int:
        return self.pages.num_layers

    def attend(self, layer: int) -> Tensor:
        """Compute attention over the pages of one layer."""
        scale = self.heads.head_dim**-0.5
        out: Tensor = self.kernels.paged_attention(self.q, self.pages, layer % self.num_layers, self.batch, scale)
        return out


def build(
    kernels: ModuleType, heads: Heads, rows: Rows, device: str, size: str, *, fp8_pages: bool = False
) -> Workload:
    """Fill pages with random numbers and plan the attention of the rows."""
    layer_bytes = rows.num_pages * PAGE * heads.token_bytes
    num_layers = min(max(4, -(-MIN_ROUND_BYTES[size] // layer_bytes)), 64) if layer_bytes < 4 * 2**30 else 2
    with torch.device(device):
        pages: KVPages = kernels.allocate_pages(
            num_layers, rows.num_pages, PAGE, heads.num_kv_heads, heads.head_dim, FP8 if fp8_pages else torch.bfloat16
        )
        q = torch.randn(int(rows.num_tokens.sum()), heads.num_heads, heads.head_dim).to(torch.bfloat16)
    for store in (pages.k, pages.v):
        if fp8_pages:
            store.view(torch.uint8).random_(0, 64)  # finite numbers, and scales below 1
        else:
            store.normal_()
    return Workload(kernels, pages, make_batch(kernels, heads, rows, device), q, heads)


def make_batch(
    kernels: ModuleType, heads: Heads, rows: Rows, device: str, share: SharingMode = "auto"
) -> AttentionBatch:
    """Return the batch of `rows`, with prefixes shared as in the engine or by `share`.

    A backend with its own planner does not support "always", and "never" is no plan there.
    """
    tables, start, num_tokens = (torch.from_numpy(each) for each in (rows.tables, rows.start, rows.num_tokens))
    batch = AttentionBatch.build(tables, start, num_tokens, PAGE)
    group = heads.num_heads // heads.num_kv_heads
    work = kernels.prepare(rows.tables, rows.start, rows.num_tokens, PAGE, group)
    has_modes = kernels.__name__.endswith(".triton")
    if share == "never" and not has_modes:
        work = None
    elif share != "auto" and has_modes:
        work = kernels.prepare(rows.tables, rows.start, rows.num_tokens, PAGE, group, share=share)
    return replace(batch, work=work).to(device)


def choose_kernels(device: str) -> ModuleType:
    """Return the backend for this device: triton on a GPU, numba on a CPU."""
    import importlib

    return importlib.import_module(f"chatcache_kernels.{'triton' if device.startswith('cuda') else 'cpu'}")
