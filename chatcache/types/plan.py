"""The step plan, all that the model runner needs for one step, and the step's result.

Both are immutable data, and the only data exchanged with the model runner (or other ranks). A plan carries changes
only: the runner keeps one page-table row per slot (a branch), so a decode step costs O(rows), not O(context length).
The runner applies a plan in this order:

    1. `forks`       copy page-table rows: table[dst, :num_pages] = table[src, :num_pages], in the order given
    2. `updates`     table[slot, index] = page
    3. `swaps_out`   host[host page] = pages[page], all layers: before this plan writes any page;
                     `state_swaps_out`: host states[host state] = states[state]
    4. `swaps_in`    pages[page] = host[host page]; may read host pages that this plan's swaps_out wrote;
                     `state_swaps_in`: states[state] = host states[host state]
    5. `copies`      copy page contents src -> dst, all layers (copy on write); no dst is also a src in one plan
       `state_copies`: states[dst] = states[src], all recurrent layers: forks, restored snapshots, the zero state 0
    6. `rows`        write K and V of the new tokens, attend, compute the logits of each drawn row's last token;
                     recurrent layers read states[rows.state] and update it in place
    7. `draws`       turn logits into candidates; `scores`: log-probabilities of the prompt's own tokens;
                     `pools`: sums of hidden states
    8. `state_saves` states[dst] = states[src]: snapshots of states that the rows have just updated

A model without recurrent or convolution layers has no states, and all lists of states are empty. State 0 is zero and
never written. No target of a list of states is a source in the same list.

Symbols: R rows (branches granted tokens), T new tokens of all rows, D draws, P = `page_size` tokens. The token at
position p of a branch is stored in page table[slot, p // P] at offset p % P:

    table[slot]   [ 7 ][ 3 ][12 ]     P = 4: position 9 of this branch is on page 12 at offset 1
    positions      0-3  4-7  8-11
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]


PENDING_TOKEN = -1
"""In `Rows.tokens`: the token sampled for this row's slot by the previously launched step, still on the device."""


def _no_pairs() -> I32:
    return np.zeros((0, 2), np.int32)


def _no_states() -> I32:
    return np.zeros(0, np.int32)


NOTHING_LEFT = "no token is left to draw: every one is banned"  # ends a branch, see `StepResult.faults`


@dataclass(frozen=True, slots=True)
class Rows:
    """The branches that compute tokens in this step: prefill chunks and decode tokens alike.

    Shapes: slot, start, num_tokens [R]; tokens [T], the new tokens of all rows one after another, T = sum(num_tokens).
    Row r computes positions start[r] to start[r] + num_tokens[r] - 1; earlier positions are already in its pages.
    PENDING_TOKEN stands for the token that the previous step samples for the same slot and that is not read back yet.
    It is allowed in a row of one token whose slot had exactly one draw, of width 1, in that step.
    state [R]: the state that each row reads and updates in place; of shape [0] if the model has none.
    """

    slot: I32
    start: I32
    num_tokens: I32
    tokens: I32
    state: I32 = field(default_factory=_no_states)

    def select(self, which: NDArray[np.integer[Any]]) -> Rows:
        """Return the rows at these ascending indices."""
        is_kept = np.zeros(len(self.slot), bool)
        is_kept[which] = True
        tokens = self.tokens[np.repeat(is_kept, self.num_tokens)]
        state = self.state[which] if len(self.state) else self.state
        return Rows(self.slot[which], self.start[which], self.num_tokens[which], tokens, state)

    def concat(self, other: Rows) -> Rows:
        """Return these rows followed by `other`."""
        return Rows(
            np.concatenate((self.slot, other.slot)),
            np.concatenate((self.start, other.start)),
            np.concatenate((self.num_tokens, other.num_tokens)),
            np.concatenate((self.tokens, other.tokens)),
            np.concatenate((self.state, other.state)),
        )


EDIT = np.dtype([("ids", np.int32), ("scale", np.float32), ("add", np.float32)])
EditTable = NDArray[np.void]
"""Rows of type EDIT with unique ids. Shape [K]."""


def edit_table(ids: ArrayLike, scale: ArrayLike, add: ArrayLike) -> EditTable:
    """Return the table of an edit. Shapes [K]."""
    table = np.empty(np.shape(ids), EDIT)
    table["ids"], table["scale"], table["add"] = ids, scale, add
    return table


class LogitEdit(msgspec.Struct, frozen=True, gc=False):
    """Sparse change to the logits of one draw: penalties, logit_bias, bans (min_tokens).

    logit = logit / scale if logit > 0 else logit * scale; then logit += add; a ban is add = -inf. The table belongs to
    the decoding strategy, which may change it when the step has its result.
    """

    draw: int
    table: EditTable


class LogitMask(msgspec.Struct, frozen=True, gc=False):
    """The tokens that one draw may choose (grammar constraint), as a bit mask.

    Token i is bit i % 32 of word i // 32; the shape is [ceil(V / 32)] for a vocabulary of V tokens. Applied together
    with the edits: the logit of every other token becomes -inf. Ids after the last word are forbidden.
    """

    draw: int
    words: U32


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of a step: what to sample from the logits of which row's last token. Shapes [D].

    width 1: sample one token (`temperature` 0 is argmax; ties go to the lowest id). The noise is keyed by (seed, lane,
    position), so a draw depends on nothing else. The last row of a prompt is drawn n times for n candidates.
    width > 1, temperature 0 (beam search): the `width` most likely tokens with their log-softmax, without temperature,
    best first, ties to the lower id. Edits change the log-softmax instead of the logits; neither they nor a mask
    renormalise it.
    width > 1, temperature > 0: `width` tokens without replacement (Gumbel top-k), in descending order of
    log-probability + noise, both of which are reported; log-probabilities after edits, masks, temperature and filters.
    num_top: how many top alternatives of the raw log-softmax to report in addition.

    Source: Kool et al., "Stochastic Beams and Where to Find Them", ICML 2019 (draws without replacement).
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

    @classmethod
    def of(cls, arrays: Sequence[NDArray[Any]]) -> Draws:
        """Return draws with these `arrays`, without edits and masks."""
        row, width, seed, lane, position, temperature, top_k, top_p, min_p, num_top = arrays
        return cls(row, width, seed, lane, position, temperature, top_k, top_p, min_p, num_top)

    def arrays(self) -> list[NDArray[Any]]:
        """Return the arrays in the order of the constructor's parameters."""
        row, width, seed, lane, position = self.row, self.width, self.seed, self.lane, self.position
        return [row, width, seed, lane, position, self.temperature, self.top_k, self.top_p, self.min_p, self.num_top]

    def select(self, which: NDArray[np.integer[Any]]) -> Draws:
        """Return the draws at these indices, without edits and masks."""
        return Draws.of([array[which] for array in self.arrays()])

    def concat(self, other: Draws) -> Draws:
        """Return these draws followed by `other`."""
        first, second, shift = self.arrays(), other.arrays(), len(self.row)
        edits = [LogitEdit(edit.draw + shift, edit.table) for edit in other.edits]
        masks = [LogitMask(mask.draw + shift, mask.words) for mask in other.masks]
        draws = Draws.of([np.concatenate(pair) for pair in zip(first, second, strict=True)])
        return replace(draws, edits=(*self.edits, *edits), masks=(*self.masks, *masks))


@dataclass(frozen=True, slots=True)
class Scores:
    """Rows whose prompt tokens are scored (prompt log-probabilities).

    A score is the raw log-probability of the token after each new token of the row.

    Shapes: row, num_top [S]; targets [sum(num_tokens[row])]: for each token of these rows, in row order, the token that
    follows it in the prompt, or -1 for none (the cell of the result is then nan).
    """

    row: I32
    num_top: I32
    targets: I32


@dataclass(frozen=True, slots=True)
class Pools:
    """Rows whose final hidden states are summed, for embeddings.

    The final hidden state of a token is what the output head reads, after the last norm. The sum includes the last
    `num_tokens` of the row's new tokens, at least one. Shapes [P].
    """

    row: I32
    num_tokens: I32


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that the runner does in one step, in the order given in the module's docstring.

    Shapes, all int32: forks [F, 3] (src slot, dst slot, num_pages), updates [U, 3] (slot, index, page), copies [C, 2]
    (src page, dst page), swaps_out [S, 2] (page, host page), swaps_in [S, 2] (host page, page). Of states likewise:
    state_copies and state_saves [N, 2] (src, dst), state_swaps_out (state, host state), state_swaps_in (host state,
    state).
    """

    step: int
    forks: I32
    updates: I32
    copies: I32
    rows: Rows
    draws: Draws
    swaps_out: I32 = field(default_factory=_no_pairs)
    swaps_in: I32 = field(default_factory=_no_pairs)
    scores: Scores | None = None
    pools: Pools | None = None
    state_copies: I32 = field(default_factory=_no_pairs)
    state_saves: I32 = field(default_factory=_no_pairs)
    state_swaps_out: I32 = field(default_factory=_no_pairs)
    state_swaps_in: I32 = field(default_factory=_no_pairs)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The candidates of each draw, in draw order, and the prompt scores.

    Shapes, with W = max width and L = max num_top: tokens, logprobs [D, W]; top_tokens, top_logprobs [D, L]; perturbed
    and raw_logprobs [D, W], or [D, 0] if no draw needs them. Unused cells are id -1 and -inf.
    Draws of width 1 report logprobs of the raw log-softmax (before edits and temperature), wider ones those described
    at `Draws`, and in `raw_logprobs` those of the raw log-softmax if they differ. `faults`: (draw, message) for rows
    whose logits are not finite or whose sampling failed; their candidates must not be used, and their request must end.
    With the message NOTHING_LEFT only the branch ends: its draw has no candidates.
    Prompt scores are parallel to `Scores.targets` (T of them): scores [T], score_tokens and score_logprobs
    [T, max num_top], nan where there is no target. A nan where there is a target means logits that are not finite: the
    request of that row must end. `pooled`: the sum of each of the plan's pools, in the same order, [P, hidden].
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
    pooled: F32 | None = None


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """The capacity of a model runner, fixed at startup. `num_pages` includes the null page 0.

    `num_slots`: number of rows of the page table, one per branch. `num_host_pages`: host pages for swapping, numbered 0
    to num_host_pages - 1 (no null page); copying one page takes `swap_page_s` seconds in either direction, measured at
    startup. `has_async_launch`: `launch` returns before the step is done, so that the next step, with tokens
    PENDING_TOKEN, can be launched before the first one ends.
    `num_states`: slots for states of `state_bytes` each, including the zero state 0; 0 for a model without recurrent or
    convolution layers. `num_host_states`: host slots for swapping, copying one takes `swap_state_s` seconds.
    """

    num_pages: int
    page_size: int
    num_slots: int
    max_model_len: int
    kv_bytes: int = 0
    num_host_pages: int = 0
    swap_page_s: float = 0.0
    has_async_launch: bool = False
    num_states: int = 0
    state_bytes: int = 0
    num_host_states: int = 0
    swap_state_s: float = 0.0
