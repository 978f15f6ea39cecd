"""Helpers of all launches: sizes, strides, exact-rounding options, rounding to bfloat16."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

FP8_ARCH = 89
"""Compute capability from which GPUs convert and multiply FP8 numbers."""

EXACT = {"enable_fp_fusion": False}
"""Options of kernels that round as the reference does: no fused multiply-add."""


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n; 1 for n < 2."""
    return 1 << max(n - 1, 0).bit_length()


def contiguous_last_dim(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension, copied only if it is not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def heads_per_program(num_heads: int, dim: int, tile: int) -> int:
    """Return how many heads a program processes: a power of two, `tile` elements at most."""
    return max(1, min(next_power_of_2(num_heads), tile // next_power_of_2(dim)))


def choose_num_warps(tile: int, each: int, most: int = 4) -> int:
    """Return the number of warps for a tile, so that a thread has `each` elements if possible.

    `tile`: elements of the tile, a power of two. `most`: maximum number of warps.
    """
    return max(1, min(most, tile // (32 * each)))


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def _convert_one_element_arrays() -> None:
    """Let the interpreter of Triton 3.6 read loop bounds: numpy 2.4 does not convert its one-element arrays."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if INTERPRETED.value and triton.__version__.startswith("3.6."):
    _convert_one_element_arrays()


@triton.jit
def round_to(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return float32 `x` as `dtype`, rounded to nearest even.

    A plain cast on a GPU. Triton's interpreter truncates to bfloat16, so there the bits are computed.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        return (nearest >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
