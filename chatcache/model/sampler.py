"""Turn logits into candidates, for all draws of a step at once.

Order, as in vLLM: edits (penalties, bias, bans) -> temperature -> min_p -> top_k -> top_p -> draw. Reported
log-probabilities of sampled tokens are of the raw log-softmax, before any of it. Among equal logits the lower id comes
first everywhere; exactly `top_k` tokens stay.

Symbols: D draws, U distinct drawn rows, V vocabulary, K candidates kept for filtering.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.noise import draw_keys, gumbel, token_base
from chatcache.model.transfer import to_device
from chatcache.sched.plan import F32, I32, Draws, StepResult

Index = NDArray[np.intp]
Flags = NDArray[np.bool_]

MIN_CANDIDATES = 256
NOT_FINITE = "the model produced logits that are not finite"
NOTHING_LEFT = "no token is left to draw: every one is banned"


@dataclass(slots=True)
class _Answer:
    """The result under construction, on the host."""

    tokens: I32
    logprobs: F32


class Sampler:
    """Draws candidates. Holds only the hashed vocabulary of `noise.py`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._base = token_base(vocab_size, device)

    def sample(self, logits: Tensor, index: Index, draws: Draws) -> StepResult:
        """Return the candidates of every draw.

        Shapes: logits [U, V], any float dtype; index [D], the logits row of each draw.
        """
        num_draws = len(index)
        width = np.minimum(draws.width, self.vocab_size)
        answer = _Answer(
            np.full((num_draws, int(width.max(initial=1))), -1, np.int32),
            np.full((num_draws, int(width.max(initial=1))), -np.inf, np.float32),
        )
        raw = logits.float()
        lse = raw.logsumexp(-1)
        identity = len(index) == len(raw) and bool((index == np.arange(len(index))).all())
        where = self._put(index)
        edited = _apply_edits(raw if identity else raw[where], draws, identity) if draws.edits else None
        view = _View(raw, edited, where, identity)
        one = np.flatnonzero(draws.width == 1)
        many = np.flatnonzero(draws.width > 1)
        dead = np.zeros(num_draws, bool)
        if one.size:
            dead[one] = self._draw_one(view, one, draws, lse, answer)
        if many.size:
            dead[many] = self._draw_many(view, many, width[many], answer)
        top_tokens, top_logprobs = self._report(view, lse, draws.num_top)
        broken = ~torch.isfinite(lse).cpu().numpy()[index]
        faults = tuple((int(d), NOT_FINITE if broken[d] else NOTHING_LEFT) for d in np.flatnonzero(broken | dead))
        for draw, _ in faults:
            answer.tokens[draw], answer.logprobs[draw] = -1, -np.inf
        return StepResult(answer.tokens, answer.logprobs, top_tokens, top_logprobs, faults)

    def _draw_one(self, view: _View, which: Index, draws: Draws, lse: Tensor, answer: _Answer) -> Flags:
        """Sample the width-1 draws; return which of them had nothing left."""
        greedy = which[draws.temperature[which] <= 0]
        warm = which[draws.temperature[which] > 0]
        chosen = torch.empty(len(draws.row), dtype=torch.int64, device=self.device)
        if greedy.size:
            chosen[self._put(greedy)] = view.edited_rows(greedy).argmax(-1)
        if warm.size:
            chosen[self._put(warm)] = self._draw_warm(view.edited_rows(warm), _take(draws, warm))
        at = self._put(which)
        ids, rows = chosen[at], view.where[at]
        logprobs = view.raw[rows, ids] - lse[rows]
        last = view.raw[rows, ids] if view.edited is None else view.edited[at, ids]
        answer.tokens[which, 0] = ids.cpu().numpy()
        answer.logprobs[which, 0] = logprobs.cpu().numpy()
        lost: Flags = (~torch.isfinite(last)).cpu().numpy()
        return lost

    def _draw_warm(self, logits: Tensor, draws: Draws) -> Tensor:
        """Return a sampled id for each row. Shapes: logits [S, V] -> [S]."""
        temperature = self._put(draws.temperature)[:, None]
        scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
        low, high = (self._put(word) for word in draw_keys(draws.seed, draws.lane, draws.position))
        limited = (draws.top_k > 0) & (draws.top_k < self.vocab_size)
        filtered = limited | (draws.top_p < 1) | (draws.min_p > 0)
        chosen = torch.empty(len(scaled), dtype=torch.int64, device=self.device)
        free = np.flatnonzero(~limited)
        if free.size:
            at = self._put(free)
            best = (gumbel(self._base, low[at], high[at]) + scaled[at]).argmax(-1)
            chosen[at] = best
            if filtered[free].any():
                filtered[free] &= ~self._passes(scaled[at], best, _take(draws, free))
        left = np.flatnonzero(filtered)
        size = max(MIN_CANDIDATES, int(np.where(limited, draws.top_k, 0).max()))
        while left.size:
            at, size = self._put(left), min(size, self.vocab_size)
            values, ids, covered = self._filter(scaled[at], _take(draws, left), size)
            best = (values + gumbel(self._base[ids], low[at], high[at])).argmax(-1, keepdim=True)
            chosen[at] = ids.gather(-1, best).squeeze(-1)  # rows that are not covered are overwritten next time
            left, size = left[~covered], self.vocab_size
        return chosen

    def _passes(self, scaled: Tensor, chosen: Tensor, draws: Draws) -> Flags:
        """Tell whether the best of all tokens survives min_p and top_p: then it is the best of the survivors too, and
        nothing need be sorted. Shapes: scaled [S, V], chosen [S]."""
        at = chosen[:, None]
        value, ids = scaled.gather(-1, at), torch.arange(self.vocab_size, device=self.device)
        floor = self._floor(draws)
        ahead = (scaled > value) | ((scaled == value) & (ids < at))
        weight = scaled.exp().masked_fill_(scaled < floor, 0.0)
        before = (weight * ahead).sum(-1) / weight.sum(-1)
        top_p = self._put(draws.top_p)
        kept = (value >= floor).squeeze(-1) & ((before < top_p) | (top_p >= 1))
        passed: Flags = kept.cpu().numpy()
        return passed

    def _floor(self, draws: Draws) -> Tensor:
        """Return the least scaled logit that min_p lets pass, [S, 1]; the best token sits at 0."""
        with np.errstate(divide="ignore"):
            return self._put(np.log(np.maximum(draws.min_p, 0.0)).astype(np.float32))[:, None]

    def _filter(self, scaled: Tensor, draws: Draws, size: int) -> tuple[Tensor, Tensor, Flags]:
        """Apply min_p, top_k and top_p among the `size` most likely tokens.

        Return (values, ids) [S, size], dropped cells at -inf, and covered [S]: whether `size` was enough to be exact.
        """
        if (draws.min_p > 0).any():
            scaled = scaled.masked_fill(scaled < self._floor(draws), -torch.inf)
        limited = (draws.top_k > 0) & (draws.top_k < self.vocab_size)
        values, ids = top_tokens(scaled, size)
        rank = torch.arange(size, device=self.device)
        limit = self._put(np.where(limited, draws.top_k, size))[:, None]
        values = values.masked_fill(rank >= limit, -torch.inf)
        covered = limited | (size == self.vocab_size) | torch.isneginf(values[:, -1]).cpu().numpy()
        if (draws.top_p < 1).any():
            total = torch.where(self._put(limited), values.logsumexp(-1), scaled.logsumexp(-1))
            mass = (values - total[:, None]).exp()
            before = mass.cumsum(-1) - mass
            top_p = self._put(draws.top_p.astype(np.float32))[:, None]
            dropped = (before >= top_p) & (top_p < 1) & (rank > 0)
            covered |= dropped[:, -1].cpu().numpy()
            values = values.masked_fill(dropped, -torch.inf)
        return values, ids, covered

    def _draw_many(self, view: _View, which: Index, width: NDArray[Any], answer: _Answer) -> Flags:
        """Fill the wide draws with their most likely tokens; return which of them had nothing left."""
        rows = view.edited_rows(which)
        size = int(width.max())
        values, ids = top_tokens(rows, size)
        logprobs = (values - rows.logsumexp(-1, keepdim=True)).cpu().numpy()
        used: Flags = (np.arange(size) < width[:, None]) & np.isfinite(logprobs)
        answer.tokens[which, :size] = np.where(used, ids.cpu().numpy(), -1)
        answer.logprobs[which, :size] = np.where(used, logprobs, -np.inf)
        lost: Flags = ~used[:, 0]
        return lost

    def _report(self, view: _View, lse: Tensor, num_top: I32) -> tuple[I32, F32]:
        """Return the top alternatives of the raw log-softmax, [D, L] each."""
        size = min(int(num_top.max(initial=0)), self.vocab_size)
        tokens = np.full((len(num_top), size), -1, np.int32)
        logprobs = np.full((len(num_top), size), -np.inf, np.float32)
        which = np.flatnonzero(num_top > 0)
        if which.size:
            rows, place = np.unique(view.where.cpu().numpy()[which], return_inverse=True)
            values, ids = top_tokens(view.raw[self._put(rows)], size)
            values = values - lse[self._put(rows), None]
            used = np.arange(size) < num_top[which, None]
            tokens[which] = np.where(used, ids.cpu().numpy()[place], -1)
            logprobs[which] = np.where(used, values.cpu().numpy()[place], -np.inf)
        return tokens, logprobs

    def _put(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self.device)


@dataclass(frozen=True, slots=True)
class _View:
    """Logits as the draws see them. Shapes: raw [U, V]; edited [D, V] or None (no edits); where [D] rows of raw."""

    raw: Tensor
    edited: Tensor | None
    where: Tensor
    identity: bool

    def edited_rows(self, which: Index) -> Tensor:
        """Return the edited logits of some draws (ascending), without a copy where all are meant."""
        if self.edited is None and not self.identity:
            return self.raw[self.where[to_device(which, self.raw.device)]]
        rows = self.raw if self.edited is None else self.edited
        return rows if len(which) == len(rows) else rows[to_device(which, rows.device)]


def top_tokens(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` largest of each row and their ids, best first, equal values by ascending id.

    Shapes: values [N, V] float32 -> [N, size] each. One more is fetched than asked: if it equals the last, `topk`
    chose among equals as it liked, and those rows are done again over unique integer keys.
    """
    vocab_size = values.shape[-1]
    found, ids = values.topk(min(size + 1, vocab_size))
    if found.shape[-1] > size:
        tied = (found[:, size] == found[:, size - 1]).nonzero().squeeze(-1)
        found, ids = found[:, :size], ids[:, :size]
        if tied.numel():
            ids[tied] = _ordered_keys(values[tied]).topk(size).indices
            found = values.gather(-1, ids)
    ids, order = ids.sort(-1)
    found, again = found.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return found, ids.gather(-1, again)


def _ordered_keys(values: Tensor) -> Tensor:
    """Return int64 keys that sort like (value, -id): float32 bits made monotone, above the reversed id."""
    bits = (values + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 turns -0.0 into 0.0
    monotone = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    reverse = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return (monotone << 32) | reverse


def _apply_edits(logits: Tensor, draws: Draws, copy: bool) -> Tensor:
    """Return logits [D, V] with every `LogitEdit` applied; `copy` says that `logits` is not ours to change."""
    logits = logits.clone() if copy else logits

    def put(parts: list[NDArray[Any]]) -> Tensor:
        return to_device(np.concatenate(parts), logits.device)

    draw = put([np.full(len(edit.ids), edit.draw, np.int64) for edit in draws.edits])
    ids = put([edit.ids.astype(np.int64) for edit in draws.edits])
    scale, add = put([edit.scale for edit in draws.edits]), put([edit.add for edit in draws.edits])
    old = logits[draw, ids]
    logits[draw, ids] = torch.where(old > 0, old / scale, old * scale) + add
    return logits


def _take(draws: Draws, which: Index) -> Draws:
    """Return the filters and keys of some draws; edits stay behind, they are applied already."""
    if len(which) == len(draws.row):
        return draws
    fields = ("row", "width", "seed", "lane", "position", "temperature", "top_k", "top_p", "min_p", "num_top")
    return Draws(**{name: getattr(draws, name)[which] for name in fields})
