"""Penalties, biases and bans on single tokens' logits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_edits"])
def edit_kernel(x_ptr, rows_ptr, ids_ptr, scale_ptr, add_ptr, x_stride, num_edits, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Change x in place: x / scale if x > 0 else x * scale, plus add.

    Shapes: x float32 [E, V]; rows, ids int32, scale, add float32 [K]; no cell named twice. Grid (ceil(K / BLOCK)).
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < num_edits
    cells = x_ptr + tl.load(rows_ptr + at, mask=known, other=0).to(tl.int64) * x_stride
    cells += tl.load(ids_ptr + at, mask=known, other=0)
    x, by = tl.load(cells, mask=known, other=0.0), tl.load(scale_ptr + at, mask=known, other=1.0)
    x = tl.where(x > 0, tl.div_rn(x, by), x * by) + tl.load(add_ptr + at, mask=known, other=0.0)
    tl.store(cells, x, mask=known)
