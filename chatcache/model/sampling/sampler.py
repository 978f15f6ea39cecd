"""Sample tokens from logits, and score prompt tokens, for all draws of a step at once.

Order of operations, as in vLLM: edits (penalties, bias, bans) and masks -> temperature -> min_p -> top_k -> top_p ->
draw. Reported log-probabilities are those of the raw log-softmax, before any of these. Equal logits are ranked by
ascending token id everywhere; exactly `top_k` tokens remain.

Prompt scores are the log-probabilities of given next tokens under the raw log-softmax. A chunk of 2,048 tokens with a
vocabulary of 150,000 would be 1.2 GB of float32 logits. The network therefore returns logits in parts of at most
`PART_BYTES` (in its own dtype), and each part is scored `CHUNK_BYTES` of float32 at a time. With the temporaries of
log-softmax and ranking a chunk takes about 2 x CHUNK_BYTES, 5 x if equal logits must be ranked: at most 256 + 80 MiB
for any prompt and vocabulary, as long as one row fits a chunk.

Symbols: D draws, U distinct logits rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.sampling.ops import (
    Filters,
    Flags,
    Index,
    apply_edits,
    apply_masks,
    apply_temperature,
    argmax,
    draw_keys,
    draw_tokens,
    edits_log_softmax,
    gumbel,
    gumbel_argmax,
    log_sum_exp,
    select_draws,
    token_base,
    top_tokens,
)
from chatcache.model.streams import to_device
from chatcache.types.plan import F32, I32, I64, NOTHING_LEFT, Draws, Rows, Scores, StepResult

PART_BYTES = 256 << 20
CHUNK_BYTES = 16 << 20

NOT_FINITE = "the model produced logits that are not finite"


class PendingDraws(Protocol):
    """Draws that a device may still be computing."""

    def result(self) -> StepResult:
        """Wait for the device and return the sampled tokens."""
        ...


class TokenSampler(Protocol):
    """Samples tokens: `Sampler`, or `DeviceSampler` with Triton."""

    def warm_up(self, dtype: torch.dtype = torch.float32) -> None:
        """Run every kind of draw on logits of this dtype, so that all kernels are compiled."""
        ...

    def sample(self, logits: Tensor, index: Index, draws: Draws) -> StepResult:
        """Draw and wait for the result; shapes as `enqueue`."""
        ...

    def prompt_scorer(self, rows: Rows, scores: Scores) -> PromptScorer:
        """Return the scorer for a step's `Scores`."""
        ...

    def enqueue(
        self, logits: Tensor, index: Index, draws: Draws, slots: I32 | None = None, last: Tensor | None = None
    ) -> PendingDraws:
        """Enqueue the draws on the current stream.

        Shapes: logits [U, V], any float dtype; index [D], the logits row of each draw; slots [D] and last [slots], any
        integer type: the slot that stores the token of each draw of width 1 for the next step, -1 for none.
        """
        ...


@dataclass(frozen=True, slots=True)
class CompletedDraws:
    """Draws that are done. Satisfies `PendingDraws`."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


class Sampler:
    """Samples tokens with torch, or with the CPU's kernels.

    Its only state is the table of hashed token ids.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._base = token_base(vocab_size, device)
        self._filters = Filters(vocab_size, device)

    def warm_up(self, dtype: torch.dtype = torch.float32) -> None:
        """Draw greedily, with top_p and with top_k, and plainly, so that all kernels are compiled."""
        zero, none = np.zeros(3, np.int32), np.zeros(3, np.float32)
        temperature, top_p = np.array([0.0, 1.0, 1.0], np.float32), np.array([1.0, 0.9, 1.0], np.float32)
        top_k = np.array([0, 0, 2], np.int32)
        draws = Draws(zero, zero + 1, zero.astype(np.uint64), zero, zero, temperature, top_k, top_p, none, zero)
        logits = torch.zeros(1, self.vocab_size, dtype=dtype, device=self.device)
        for each in (draws, replace(draws, top_k=zero, top_p=none + 1)):
            self.sample(logits, np.zeros(3, np.intp), each)

    def enqueue(
        self, logits: Tensor, index: Index, draws: Draws, slots: I32 | None = None, last: Tensor | None = None
    ) -> CompletedDraws:
        """Draw, and store tokens in `last`; shapes as `TokenSampler.enqueue`."""
        result = self.sample(logits, index, draws)
        if slots is not None and last is not None:
            kept = np.flatnonzero(slots >= 0)
            tokens = np.maximum(result.tokens[kept, 0], 0)
            if self.device.type == "cpu":
                last.numpy()[slots[kept]] = tokens
            else:
                at = self._to_device(slots[kept].astype(np.int64))
                last.index_copy_(0, at, self._to_device(tokens).to(last.dtype))
        return CompletedDraws(result)

    def prompt_scorer(self, rows: Rows, scores: Scores) -> PromptScorer:
        """Return the scorer for a step's `Scores`."""
        return HostPromptScorer(rows, scores, self.vocab_size)

    def sample(self, logits: Tensor, index: Index, draws: Draws) -> StepResult:
        """Return the sampled tokens of every draw.

        Shapes: logits [U, V], any float dtype; index [D], the logits row of each draw.
        """
        if (drawn := draw_tokens(logits, index, draws, self._base)) is not None:
            return _simple_result(*drawn)
        num_draws = len(index)
        width = np.minimum(draws.width, self.vocab_size)
        wide, warm = draws.width > 1, draws.temperature > 0
        has_noise = bool((wide & warm).any())
        arrays = _ResultArrays.empty(
            num_draws, int(width.max(initial=1)), noisy=has_noise, raw=has_noise or bool(edits_log_softmax(draws).any())
        )
        raw = logits.float()
        lse = log_sum_exp(raw)
        view = _LogitsView.of(raw, index, draws, lse)
        empty = np.zeros(num_draws, bool)
        if not wide.all():
            empty[~wide] = self._draw_single(view, np.flatnonzero(~wide), draws, lse, arrays)
        best, noisy = np.flatnonzero(wide & ~warm), np.flatnonzero(wide & warm)
        if best.size:
            empty[best] = self._draw_greedy_wide(view, best, width[best], lse, arrays)
        if noisy.size:
            empty[noisy] = self._draw_without_replacement(
                view, noisy, width[noisy], select_draws(draws, noisy), lse, arrays
            )
        top_tokens, top_logprobs = self._top_alternatives(view, lse, draws.num_top)
        broken = ~torch.isfinite(lse).cpu().numpy()[index]
        faults = tuple((int(d), NOT_FINITE if broken[d] else NOTHING_LEFT) for d in np.flatnonzero(broken | empty))
        for draw, _ in faults:
            arrays.clear(draw)
        return StepResult(
            arrays.tokens, arrays.logprobs, top_tokens, top_logprobs, faults, arrays.perturbed, arrays.raw_logprobs
        )

    def _draw_single(self, view: _LogitsView, which: Index, draws: Draws, lse: Tensor, arrays: _ResultArrays) -> Flags:
        """Sample the draws of width 1; return which of them had no allowed token."""
        greedy = which[draws.temperature[which] <= 0]
        warm = which[draws.temperature[which] > 0]
        chosen = torch.empty(len(draws.row), dtype=torch.int64, device=self.device)
        if greedy.size:
            chosen[self._to_device(greedy)] = argmax(view.changed_rows(greedy))
        if warm.size:
            chosen[self._to_device(warm)] = self._draw_random(view.changed_rows(warm), select_draws(draws, warm))
        at = self._to_device(which)
        ids, rows = chosen[at], view.where[at]
        logprobs = view.raw[rows, ids] - lse[rows]
        last = view.raw[rows, ids] if view.changed is None else view.changed[at, ids]
        arrays.tokens[which, 0] = ids.cpu().numpy()
        arrays.logprobs[which, 0] = logprobs.cpu().numpy()
        lost: Flags = (~torch.isfinite(last)).cpu().numpy()
        return lost

    def _draw_random(self, logits: Tensor, draws: Draws) -> Tensor:
        """Return a sampled id for each row. Shapes: logits [S, V] -> [S]."""
        draws = replace(draws, num_top=np.zeros_like(draws.num_top), edits=(), masks=())  # the logits have these
        chosen = torch.empty(len(logits), dtype=torch.int64, device=self.device)
        for which in self._filters.split_by_top_k(draws):
            at, some = self._to_device(which), select_draws(draws, which)
            rows = logits if len(which) == len(logits) else logits[at]
            drawn = draw_tokens(rows, np.arange(len(which)), some, self._base)
            if drawn is None:
                chosen[at] = self._draw_filtered(rows, some)
            else:
                chosen[at] = torch.from_numpy(np.maximum(drawn[0], 0)).long()
        return chosen

    def _draw_filtered(self, logits: Tensor, draws: Draws) -> Tensor:
        """Return a sampled id for each row with torch: on a GPU, and on a CPU for a large top_k."""
        scaled = self._scaled(logits, draws)
        low, high = self._keys(draws)
        filtered, free = self._filters.has_filter(draws), np.flatnonzero(~self._filters.has_top_k(draws))
        chosen = torch.empty(len(scaled), dtype=torch.int64, device=self.device)
        if free.size:
            at = self._to_device(free)
            best = gumbel_argmax(scaled if free.size == len(scaled) else scaled[at], self._base, low[at], high[at])
            chosen[at] = best
            if filtered[free].any():
                filtered[free] &= ~self._filters.accepts(scaled[at], best, select_draws(draws, free))
        for some, values, ids in self._filters.filtered_candidates(scaled, draws, np.flatnonzero(filtered)):
            at = self._to_device(some)
            best = (values + gumbel(self._base[ids], low[at], high[at])).argmax(-1, keepdim=True)
            chosen[at] = ids.gather(-1, best).squeeze(-1)
        return chosen

    def _draw_greedy_wide(
        self, view: _LogitsView, which: Index, width: NDArray[Any], raw_lse: Tensor, arrays: _ResultArrays
    ) -> Flags:
        """Fill wide draws at temperature 0 with their most likely tokens.

        Return which of them had no allowed token.
        """
        rows = view.changed_rows(which)
        size = int(width.max())
        values, ids = top_tokens(rows, size)
        lse = log_sum_exp(rows) if view.unmasked is None else view.unmasked[self._to_device(which)]
        logprobs = (values - lse[:, None]).cpu().numpy()
        used: Flags = (np.arange(size) < width[:, None]) & np.isfinite(logprobs)
        arrays.tokens[which, :size] = np.where(used, ids.cpu().numpy(), -1)
        arrays.logprobs[which, :size] = np.where(used, logprobs, -np.inf)
        if view.edited.any():
            at = view.where[self._to_device(which)][:, None]
            raw_logprobs = (view.raw[at, ids] - raw_lse[at]).cpu().numpy()
            arrays.raw_logprobs[which, :size] = np.where(used & view.edited[which, None], raw_logprobs, -np.inf)
        lost: Flags = ~used[:, 0]
        return lost

    def _draw_without_replacement(
        self, view: _LogitsView, which: Index, width: NDArray[Any], draws: Draws, lse: Tensor, arrays: _ResultArrays
    ) -> Flags:
        """Fill wide draws at a positive temperature with tokens drawn without replacement.

        The noise and the compared sums are those of draws of width 1, so the first token is the one that such a draw
        returns. Return which draws had no allowed token.
        Source: the Gumbel top-k trick (Kool et al. 2019).
        """
        scaled = self._scaled(view.changed_rows(which), draws)
        filtered = np.flatnonzero(self._filters.has_filter(draws))
        for some, values, ids in self._filters.filtered_candidates(scaled, draws, filtered):
            scaled[self._to_device(some)] = torch.full_like(scaled[: len(some)], -torch.inf).scatter_(-1, ids, values)
        low, high = self._keys(draws)
        size = int(width.max())
        sums, ids = top_tokens(gumbel(self._base, low, high) + scaled, size)
        total = log_sum_exp(scaled)[:, None]
        logprobs = (scaled.gather(-1, ids) - total).cpu().numpy()
        used: Flags = (np.arange(size) < width[:, None]) & np.isfinite(logprobs)
        arrays.tokens[which, :size] = np.where(used, ids.cpu().numpy(), -1)
        arrays.logprobs[which, :size] = np.where(used, logprobs, -np.inf)
        arrays.perturbed[which, :size] = np.where(used, (sums - total).cpu().numpy(), -np.inf)
        rows = view.where[self._to_device(which)][:, None]
        arrays.raw_logprobs[which, :size] = np.where(used, (view.raw[rows, ids] - lse[rows]).cpu().numpy(), -np.inf)
        lost: Flags = ~used[:, 0]
        return lost

    def _top_alternatives(self, view: _LogitsView, lse: Tensor, num_top: I32) -> tuple[I32, F32]:
        """Return the top alternatives of the raw log-softmax, [D, L] each."""
        size = min(int(num_top.max(initial=0)), self.vocab_size)
        tokens = np.full((len(num_top), size), -1, np.int32)
        logprobs = np.full((len(num_top), size), -np.inf, np.float32)
        which = np.flatnonzero(num_top > 0)
        if which.size:
            rows, place = np.unique(view.where.cpu().numpy()[which], return_inverse=True)
            values, ids = top_tokens(view.raw[self._to_device(rows)], size)
            values = values - lse[self._to_device(rows), None]
            used = np.arange(size) < num_top[which, None]
            tokens[which] = np.where(used, ids.cpu().numpy()[place], -1)
            logprobs[which] = np.where(used, values.cpu().numpy()[place], -np.inf)
        return tokens, logprobs

    def _scaled(self, logits: Tensor, draws: Draws) -> Tensor:
        """Return the logits divided by the temperature, with the largest at 0."""
        return apply_temperature(logits, self._to_device(draws.temperature))

    def _keys(self, draws: Draws) -> tuple[Tensor, Tensor]:
        low, high = draw_keys(draws.seed, draws.lane, draws.position)
        return self._to_device(low), self._to_device(high)

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self.device)


def _simple_result(tokens: I32, logprobs: F32) -> StepResult:
    """Return the result of draws of width 1 without alternatives; a token of -1 is a fault."""
    none = np.empty((len(tokens), 0), np.float32)
    faults: tuple[tuple[int, str], ...] = ()
    if tokens.min() < 0:
        faults = tuple((draw, NOT_FINITE) for draw in np.flatnonzero(tokens < 0).tolist())
    return StepResult(tokens[:, None], logprobs[:, None], none.astype(np.int32), none, faults, none, none)


@dataclass(frozen=True, slots=True)
class _ResultArrays:
    """The arrays of a step's result, on the host."""

    tokens: I32
    logprobs: F32
    perturbed: F32
    raw_logprobs: F32

    @classmethod
    def empty(cls, num_draws: int, width: int, *, noisy: bool, raw: bool) -> _ResultArrays:
        return cls(
            np.full((num_draws, width), -1, np.int32),
            np.full((num_draws, width), -np.inf, np.float32),
            np.full((num_draws, width if noisy else 0), -np.inf, np.float32),
            np.full((num_draws, width if raw else 0), -np.inf, np.float32),
        )

    def clear(self, draw: int) -> None:
        self.tokens[draw] = -1
        self.logprobs[draw] = self.perturbed[draw] = self.raw_logprobs[draw] = -np.inf


@dataclass(frozen=True, slots=True)
class _LogitsView:
    """Logits as each draw reads them.

    Shapes: raw [U, V]; changed [D, V], None without edits and masks; where [D], rows of raw; unmasked [D], log-sum-exp
    before the masks, None without changes or wide draws; edited [D]: draws whose log-softmax is edited (its log-sum-exp
    is 0) instead of the logits. `identity`: whether `where` is 0 .. U - 1.
    """

    raw: Tensor
    changed: Tensor | None
    where: Tensor
    unmasked: Tensor | None
    edited: Flags
    identity: bool

    @classmethod
    def of(cls, raw: Tensor, index: Index, draws: Draws, lse: Tensor) -> _LogitsView:
        """Apply the edits and masks. Shapes: lse [U], log-sum-exp of the raw rows."""
        identity = len(index) == len(raw) and bool((index == np.arange(len(index))).all())
        where = to_device(index, raw.device)
        changed = unmasked = None
        edited = edits_log_softmax(draws)
        if draws.edits or draws.masks:
            changed = raw.clone() if identity else raw[where]
            normalised = to_device(np.flatnonzero(edited), raw.device)
            changed[normalised] -= lse[where[normalised]][:, None]
            apply_edits(changed, draws.edits)
            if (draws.width > 1).any():
                unmasked = log_sum_exp(changed)
                unmasked[normalised] = 0.0
            apply_masks(changed, draws.masks)
        return cls(raw, changed, where, unmasked, edited, identity)

    def changed_rows(self, which: Index) -> Tensor:
        """Return the logits that some draws (ascending) read, edits and masks applied.

        Nothing is copied if all rows are selected.
        """
        if self.changed is None and not self.identity:
            return self.raw[self.where[to_device(which, self.raw.device)]]
        rows = self.raw if self.changed is None else self.changed
        return rows if len(which) == len(rows) else rows[to_device(which, rows.device)]


class PromptScorer(Protocol):
    """Scores the prompt tokens of a step, part by part."""

    def fill(self, logits: Tensor) -> None:
        """Score the next tokens from their logits. Shape [N, V], any float dtype."""
        ...

    def add_to(self, result: StepResult) -> StepResult:
        """Return a step's result with the scores added, after all parts have been filled."""
        ...


class HostPromptScorer:
    """Scores prompt tokens into arrays on the host. Satisfies `PromptScorer`.

    A score is nan where there is no next token or the logits are not finite.
    """

    def __init__(self, rows: Rows, scores: Scores, vocab_size: int) -> None:
        self._targets, self._num_top = score_targets(rows, scores, vocab_size)
        size = min(int(self._num_top.max(initial=0)), vocab_size)
        self._filled = 0
        self.values: F32 = np.full(len(self._targets), np.nan, np.float32)
        self.top_tokens: I32 = np.full((len(self._targets), size), -1, np.int32)
        self.top_logprobs: F32 = np.full((len(self._targets), size), -np.inf, np.float32)

    def add_to(self, result: StepResult) -> StepResult:
        """Return a step's result with the scores added."""
        return replace(result, scores=self.values, score_tokens=self.top_tokens, score_logprobs=self.top_logprobs)

    def fill(self, logits: Tensor) -> None:
        """Score the next tokens from their logits. Shape [N, V], any float dtype."""
        rows = max(CHUNK_BYTES // (4 * logits.shape[-1]), 1)
        for chunk in torch.split(logits, rows):
            self._fill(chunk.float())

    def _fill(self, raw: Tensor) -> None:
        cells = slice(self._filled, self._filled + len(raw))
        self._filled = cells.stop
        lse = log_sum_exp(raw)
        targets = self._targets[cells]
        at = to_device(np.maximum(targets, 0), raw.device)[:, None]
        values = (raw.gather(-1, at).squeeze(-1) - lse).cpu().numpy()
        scored = (targets >= 0) & torch.isfinite(lse).cpu().numpy()
        self.values[cells] = np.where(scored, values, np.nan)
        num_top = self._num_top[cells]
        which = np.flatnonzero(scored & (num_top > 0))
        if which.size:
            self._rank(raw, lse, cells.start, which, num_top)

    def _rank(self, raw: Tensor, lse: Tensor, start: int, which: NDArray[np.intp], num_top: NDArray[Any]) -> None:
        rows = to_device(which, raw.device)
        size = self.top_tokens.shape[1]
        values, ids = top_tokens(raw[rows] if len(which) < len(raw) else raw, size)
        used = np.arange(size) < num_top[which, None]
        self.top_tokens[start + which] = np.where(used, ids.cpu().numpy(), -1)
        self.top_logprobs[start + which] = np.where(used, (values - lse[rows, None]).cpu().numpy(), -np.inf)


def score_parts(scorer: PromptScorer, parts: Iterable[Tensor]) -> None:
    """Score all parts, holding one at a time."""
    for logits in parts:
        scorer.fill(logits)
        del logits


def scored_token_indices(rows: Rows, scores: Scores) -> I64:
    """Return the indices, among the step's tokens, of the tokens of the scored rows.

    Shape [sum(num_tokens[row])], row by row.
    """
    ends = np.cumsum(rows.num_tokens, dtype=np.int64)
    spans = [np.arange(ends[row] - rows.num_tokens[row], ends[row]) for row in scores.row]
    return np.concatenate(spans) if spans else np.zeros(0, np.int64)


def part_sizes(num_first: int, num_tokens: int, row_bytes: int) -> list[int]:
    """Split `num_tokens` rows of logits into parts of at most `PART_BYTES`.

    The first part holds at least `num_first` rows.
    """
    most = max(PART_BYTES // row_bytes, 1)
    first = min(max(num_first, most), num_tokens)
    sizes = [first, *[most] * ((num_tokens - first) // most), (num_tokens - first) % most]
    return [size for size in sizes if size] or [0]


def score_targets(rows: Rows, scores: Scores, vocab_size: int) -> tuple[I64, I32]:
    """Return the next token of each scored token and its number of alternatives.

    A next token outside the vocabulary is -1.
    """
    targets = np.where(scores.targets < vocab_size, scores.targets, -1).astype(np.int64)
    return targets, np.repeat(scores.num_top, rows.num_tokens[scores.row])
