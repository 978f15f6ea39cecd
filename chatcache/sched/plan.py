"""The plan: everything the runner needs for one step, as immutable data, and the result it answers with.

Only this crosses into torch (or to another rank). It carries *deltas*: the runner keeps one page-table row per branch
slot, so a decode step costs O(rows), not O(context). The runner applies a plan in this order:

    1. `forks`    copy page-table rows: table[dst, :num_pages] = table[src, :num_pages], in the order given
    2. `updates`  table[slot, index] = page
    3. `copies`   copy page contents src -> dst, all layers (copy-on-write); no dst is a src in one plan
    4. rows       write K/V of the new tokens, attend, produce logits of each drawn row's last token
    5. `draws`    turn logits into candidates

Symbols: R rows (a branch granted tokens), T new tokens in all, D draws, page P = `page_size` tokens,
slot row = one branch's page table; a token at position p of a branch lives in page table[slot, p // P], offset p % P.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rows:
    """Branches that run this step, prefill chunks and decode tokens alike.

    Shapes: slot, start, num_tokens [R]; tokens [T] is the rows' new tokens one after another, T = sum(num_tokens).
    Row r computes positions start[r] .. start[r] + num_tokens[r] - 1; keys before `start` are already in its pages.
    """

    slot: I32
    start: I32
    num_tokens: I32
    tokens: I32


@dataclass(frozen=True, slots=True)
class LogitEdit:
    """Sparse change to one draw's logits: penalties, logit_bias, bans (min_tokens). Ids unique.

    logit = logit / scale if logit > 0 else logit * scale; then logit += add. Shapes: ids, scale, add [K].
    A ban is add = -inf.
    """

    draw: int
    ids: I32
    scale: F32
    add: F32


@dataclass(frozen=True, slots=True)
class Draws:
    """What to draw from which row's last-token logits. Shapes [D]. A prompt's last chunk is drawn n times for n-best.

    width 1: sample one token (`temperature` 0 = argmax, lowest id wins ties); noise is keyed by (seed, lane, position)
    so that a draw depends on nothing else. width > 1: the `width` most likely tokens with their log-softmax
    (after edits, no temperature), best first, ties to the lower id: what beam search needs.
    num_top: how many top alternatives of the *raw* log-softmax to report besides.
    """

    row: I32
    width: I32
    seed: U64
    lane: I32
    position: I32
    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    num_top: I32
    edits: tuple[LogitEdit, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Shapes: forks [F, 3] (src slot, dst slot, num_pages), updates [U, 3] (slot, index, page),
    copies [C, 2] (src page, dst page); all int32."""

    step: int
    forks: I32
    updates: I32
    copies: I32
    rows: Rows
    draws: Draws


@dataclass(frozen=True, slots=True)
class StepResult:
    """Candidates of each draw, in draw order. W = max width, L = max num_top; unused cells are id -1, -inf.

    Shapes: tokens, logprobs [D, W]; top_tokens, top_logprobs [D, L]. Width-1 logprobs are of the raw log-softmax
    (before edits and temperature), width>1 of the edited one. `faults`: (draw, message) for rows whose logits are not
    finite or whose sampling failed; their candidates must not be used and their request must end.
    """

    tokens: I32
    logprobs: F32
    top_tokens: I32
    top_logprobs: F32
    faults: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """What the runner offers the scheduler, fixed for its life. Page 0 is the null page and is counted."""

    num_pages: int
    page_size: int
    num_slots: int
    max_model_len: int
    kv_bytes: int = 0
