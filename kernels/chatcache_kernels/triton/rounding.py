"""Round to a narrower type as the hardware does, also where the interpreter does not."""

from __future__ import annotations

import triton
import triton.language as tl

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
