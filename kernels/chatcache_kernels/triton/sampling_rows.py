"""Rows of logits as a draw sees them, and the table that says what each draw wants.

The table is int32 [NUM_FIELDS, N], one column a draw, floats by their bits; the host packs it, kernels read it.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROW = tl.constexpr(0)  # the row of logits it draws from
RAW_ROW = tl.constexpr(1)  # the row whose raw log-softmax it reports; another where the logits were edited
KEY_LOW = tl.constexpr(2)
KEY_HIGH = tl.constexpr(3)
TEMPERATURE = tl.constexpr(4)  # float; 0: no noise
CUT = tl.constexpr(5)  # 1: `sampling_cuts` looks at this row
TOP_K = tl.constexpr(6)  # 0: no limit
TOP_P = tl.constexpr(7)  # float; 1: no limit
FLOOR = tl.constexpr(8)  # float, log(min_p); -inf: no limit
MASK = tl.constexpr(9)  # the row of mask words; -1: none
SLOT = tl.constexpr(10)  # where the token drawn is kept for the next step; -1: nowhere
TARGET = tl.constexpr(11)  # the token to report in place of a draw; -1: none
NUM_FIELDS = 12

MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def draws_of(program, num_draws, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a program's draws [ROWS] and which of them exist; the others repeat the last."""
    draw = program * ROWS + tl.arange(0, ROWS)
    return tl.minimum(draw, num_draws - 1), draw < num_draws


@triton.jit
def number(table_ptr, field: tl.constexpr, draw, num_draws):  # type: ignore[no-untyped-def]
    """Read an int32 field of draws. Shapes: draw [R] -> [R, 1]."""
    return tl.load(table_ptr + field * num_draws + draw)[:, None]


@triton.jit
def real(table_ptr, field: tl.constexpr, draw, num_draws):  # type: ignore[no-untyped-def]
    """Read a float field of draws. Shapes: draw [R] -> [R, 1]."""
    return tl.load(table_ptr + field * num_draws + draw).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def visible(rows_ptr, words_ptr, ids, num_tokens, mask, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (all, allowed): the logits of tokens in float32, and the same with -inf for what a mask forbids.

    Shapes: rows_ptr, words_ptr, mask [R, 1]: where each draw's logits and mask words begin; mask < 0: it has none; ids
    [1, B] -> [R, B] each. Tokens beyond the vocabulary are -inf.
    """
    known = ids < num_tokens
    x = tl.load(rows_ptr + ids, mask=known, other=MINUS_INFINITY).to(tl.float32)
    if MASKED:
        words = tl.load(words_ptr + (ids >> 5), mask=known & (mask >= 0), other=-1)
        return x, tl.where(((words >> (ids & 31)) & 1) != 0, x, MINUS_INFINITY)
    else:
        return x, x


@triton.jit
def is_any(flags):  # type: ignore[no-untyped-def]
    """Tell whether any of [R, 1] flags is set, as one number."""
    return tl.max(tl.max(flags.to(tl.int32), 1), 0) > 0


@triton.jit
def keep(out_ptr, at, values, live):  # type: ignore[no-untyped-def]
    """Store one number for each row. Shapes: at, live [R], values [R, 1]."""
    tl.store(out_ptr + at, tl.sum(values, 1), mask=live)


@triton.jit
def largest(x):  # type: ignore[no-untyped-def]
    """Return the largest of each row. Shapes: [R, B] -> [R, 1]."""
    return tl.max(x, 1)[:, None]


@triton.jit
def total(x):  # type: ignore[no-untyped-def]
    """Add up each row. Shapes: [R, B] -> [R, 1]."""
    return tl.sum(x, 1)[:, None]


@triton.jit
def first_where(flags, ids, otherwise):  # type: ignore[no-untyped-def]
    """Return the least id of those flagged in each row. Shapes: [R, B] -> [R, 1]."""
    return tl.min(tl.where(flags, ids, otherwise), 1)[:, None]


@triton.jit
def no_higher(top):  # type: ignore[no-untyped-def]
    """Return a shift that keeps x - top defined where top is infinite."""
    return tl.where((top > MINUS_INFINITY) & (top < float("inf")), top, 0.0)


@triton.jit
def scale(x, top, temperature):  # type: ignore[no-untyped-def]
    """Divide by the temperature, the largest at 0; -inf, not nan, far below it."""
    return (x - no_higher(top)) * (1.0 / tl.maximum(temperature, 1e-30))
