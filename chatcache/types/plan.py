"""The plan: everything the runner needs for one step, as immutable data, and the result it answers with.

Only this crosses into torch (or to another rank). It carries *deltas*: the runner keeps one page-table row per branch
slot, so a decode step costs O(rows), not O(context). The runner applies a plan in this order:

    1. `forks`      copy page-table rows: table[dst, :num_pages] = table[src, :num_pages], in the order given
    2. `updates`    table[slot, index] = page
    3. `swaps_out`  host[host page] = pages[page], all layers: before anything in this plan writes the page
    4. `swaps_in`   pages[page] = host[host page]; may read what this plan's swaps_out wrote
    5. `copies`     copy page contents src -> dst, all layers (copy-on-write); no dst is a src in one plan
    6. rows         write K/V of the new tokens, attend, produce logits of each drawn row's last token
    7. `draws`      turn logits into candidates; `scores` say how likely the prompt's own tokens were

Symbols: R rows (a branch granted tokens), T new tokens in all, D draws, page P = `page_size` tokens,
slot row = one branch's page table; a token at position p of a branch lives in page table[slot, p // P], offset p % P.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]


PENDING_TOKEN = -1
"""In `Rows.tokens`: the token that this row's slot was drawn in the step launched just before, still on the device."""


def _no_pairs() -> I32:
    return np.zeros((0, 2), np.int32)


@dataclass(frozen=True, slots=True)
class Rows:
    """Branches that run this step, prefill chunks and decode tokens alike.

    Shapes: slot, start, num_tokens [R]; tokens [T] is the rows' new tokens one after another, T = sum(num_tokens).
    A token may be PENDING_TOKEN, in a row of one token whose slot was drawn once, width 1, in the step before.
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
class LogitMask:
    """The tokens that one draw may choose (a constraint): bit id % 32 of word id // 32. Shape [ceil(V / 32)].

    Applied with the edits: every other token's logit becomes -inf. Ids beyond the last word are forbidden.
    """

    draw: int
    words: U32


@dataclass(frozen=True, slots=True)
class Draws:
    """What to draw from which row's last-token logits. Shapes [D]. A prompt's last chunk is drawn n times for n-best.

    width 1: sample one token (`temperature` 0 = argmax, lowest id wins ties); noise is keyed by (seed, lane, position)
    so that a draw depends on nothing else. width > 1, temperature 0: the `width` most likely tokens with their
    log-softmax (after edits, no temperature; a mask leaves tokens out without renormalising the rest), best first, ties
    to the lower id: what beam search needs. width > 1, temperature > 0: `width` tokens without replacement (Gumbel
    top-k, Kool et al. 2019), by descending log-probability + noise, with both; log-probabilities are those after edits,
    masks, temperature and filters.
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
    masks: tuple[LogitMask, ...] = ()


@dataclass(frozen=True, slots=True)
class Scores:
    """Rows of which every new token's successor is to be scored under the raw log-softmax (prompt logprobs).

    Shapes: row, num_top [S]; targets [sum(num_tokens[row])]: for each token of these rows, in row order, the token
    that follows it in the prompt, -1 for none (the result's cell is then nan).
    """

    row: I32
    num_top: I32
    targets: I32


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Shapes: forks [F, 3] (src slot, dst slot, num_pages), updates [U, 3] (slot, index, page),
    copies [C, 2] (src page, dst page), swaps_out [S, 2] (page, host page), swaps_in [S, 2] (host page, page); int32."""

    step: int
    forks: I32
    updates: I32
    copies: I32
    rows: Rows
    draws: Draws
    swaps_out: I32 = field(default_factory=_no_pairs)
    swaps_in: I32 = field(default_factory=_no_pairs)
    scores: Scores | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Candidates of each draw, in draw order. W = max width, L = max num_top; unused cells are id -1, -inf.

    Shapes: tokens, logprobs [D, W]; top_tokens, top_logprobs [D, L]; perturbed [D, W], or [D, 0] if nothing is drawn
    without replacement. Width-1 logprobs are of the raw log-softmax (before edits and temperature), width>1 as `Draws`
    says; `raw_logprobs`, parallel to `perturbed`, are of the raw log-softmax there too. `faults`: (draw, message) for
    rows whose logits are not finite or whose sampling failed; their candidates must not be used and their request must
    end. Scores, if asked for, are parallel to `Scores.targets` (T of them): scores [T], score_tokens, score_logprobs
    [T, max num_top]; nan where there is no target. Where there is one, nan means logits that are not finite: that row's
    request must end.
    """

    tokens: I32
    logprobs: F32
    top_tokens: I32
    top_logprobs: F32
    faults: tuple[tuple[int, str], ...] = ()
    perturbed: F32 | None = None
    raw_logprobs: F32 | None = None
    scores: F32 | None = None
    score_tokens: I32 | None = None
    score_logprobs: F32 | None = None


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """What the runner offers the scheduler, fixed for its life. Page 0 is the null page and is counted.

    `num_host_pages` can hold swapped pages (no null page among them: 0 .. num_host_pages - 1); moving one page either
    way takes `swap_page_s` seconds, as measured when the runner was built. `has_async_launch`: `launch` returns before
    the step is done, so that the next step, with tokens PENDING_TOKEN, can be launched before the first one ends.
    """

    num_pages: int
    page_size: int
    num_slots: int
    max_model_len: int
    kv_bytes: int = 0
    num_host_pages: int = 0
    swap_page_s: float = 0.0
    has_async_launch: bool = False
