"""What all kernels' launches share: sizes, strides, and the options that never vary.

Round to a narrower type as the hardware does, also where the interpreter does not.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

EXACT = {"enable_fp_fusion": False}
"""Options of kernels that must round as the reference does: a product and a sum are two roundings, not one."""


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is not less than n; 1 for n < 2."""
    return 1 << max(n - 1, 0).bit_length()


def dense_last(x: Tensor) -> Tensor:
    """Return x with its last dimension dense, copied only if it is not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def tile_heads(num_heads: int, dim: int, tile: int) -> int:
    """Return how many heads of `dim` elements a program takes: a power of two, at most `tile` elements."""
    return max(1, min(next_power_of_2(num_heads), tile // next_power_of_2(dim)))


def tile_warps(tile: int, each: int, most: int = 4) -> int:
    """Return the warps for a tile of a power of two of elements, so that every thread has `each` of them if it can."""
    return max(1, min(most, tile // (32 * each)))


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return float32 `x` as `dtype`, to the nearest, ties to even.

    A plain cast on a GPU. Triton's interpreter cuts the low bits of a bfloat16 off, so there the bits are made by hand.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        return (nearest >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
