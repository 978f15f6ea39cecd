"""Batch-invariant variants of the `triton` operations: results do not depend on other rows.

No bit of a token's result depends on other rows, their number or order, on how many of its row's tokens are computed at
once, or on which pages are shared. The operations are those of `triton`; this module restricts how they are used:

- Attention: one tile height and therefore one compiled kernel for prompts and decode steps (`plan_invariant_work`).
  Splits and tiles of keys begin at multiples of fixed numbers. A tile may hold keys that some of its tokens do not see:
  their scores are -inf, so they add exact zeros and leave the running maximum; a split of which a token sees no key has
  the log-sum-exp -inf and adds exact zeros to the merge, in which every split has a lane of its own.
- Norms and the activation: the number of threads of a row depends on its width only, and rows are reduced apart. A
  kernel compiled for unaligned pointers may add up in another order, so inputs are aligned first.
- The rotary embedding with its page write: a program handles one token.
- Linear layers: `invariant_matmul`.

It has the operations of models that run in the native decoder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import AttentionBatch, HeadNorms, KVPages
from ..work_list import plan_invariant_work as prepare
from . import attention, fused, rope
from .pages import allocate_pages, copy_pages, read_pages, swap_in, swap_out, write_pages

__all__ = [
    "add_rms_norm",
    "allocate_pages",
    "clamped_silu_mul",
    "copy_pages",
    "gelu_mul",
    "paged_attention",
    "prepare",
    "read_pages",
    "rms_norm",
    "rope_write",
    "silu_mul",
    "swap_in",
    "swap_out",
    "write_pages",
]

ALIGNMENT_BYTES = 16


def paged_attention(
    q: Tensor,
    pages: KVPages,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend as `triton.paged_attention` does, by a work list of `prepare`.

    Raises: ValueError as `triton.paged_attention`, and for sinks, which tokens with one split and tokens with several
    would add in different ways.
    """
    if sinks is not None:
        raise ValueError("attention sinks depend on the batch")
    return attention.paged_attention(_align(q), pages, layer, batch, scale, window, softcap, fixed_tiles=True)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise as `triton.rms_norm` does."""
    _require_dtypes(weight, x)
    return fused.rms_norm(_align(x), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add and normalise as `triton.add_rms_norm` does."""
    _require_dtypes(weight, x, residual)
    return fused.add_rms_norm(_align(x), _align(residual), weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Apply the activation as `triton.silu_mul` does."""
    return fused.silu_mul(_align(gate_up))


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Apply the activation as `triton.gelu_mul` does."""
    return fused.gelu_mul(_align(gate_up))


def clamped_silu_mul(gate_up: Tensor, slope: float, limit: float) -> Tensor:
    """Apply the activation as `triton.clamped_silu_mul` does."""
    return fused.clamped_silu_mul(_align(gate_up), slope, limit)


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: KVPages,
    layer: int,
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Normalise, rotate and store as `triton.rope_write` does."""
    if norms is not None:
        _require_dtypes(norms.q, q, k)
        _require_dtypes(norms.k, q, k)
    return rope.rope_write(_align(q), _align(k), _align(v), cos, sin, pages, layer, slots, norms)


def _align(x: Tensor) -> Tensor:
    """Return x at an address that is a multiple of ALIGNMENT_BYTES, copied only if it is not."""
    return x.clone() if x.data_ptr() % ALIGNMENT_BYTES else x


def _require_dtypes(weight: Tensor, *rows: Tensor) -> None:
    """Raise ValueError for rows of several dtypes, or a weight of another one that is not float32.

    Their norms would be torch's, which depend on the batch.
    """
    dtype = rows[0].dtype
    if any(row.dtype != dtype for row in rows) or weight.dtype not in (dtype, torch.float32):
        names = ", ".join(str(tensor.dtype) for tensor in (*rows, weight))
        raise ValueError(f"norms of numbers of {names}: must be one dtype, or weights in float32")
