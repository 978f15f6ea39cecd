"""min_p, top_k and top_p over scaled logits, exact, without sorting a vocabulary where that can be avoided.

Scaled logits are divided by the temperature and shifted so that the best sits at 0. Symbols: S draws, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.ranking import top_tokens
from chatcache.model.transfer import to_device
from chatcache.model.vocabulary import row_sum, share_ahead
from chatcache.sched.plan import Draws

Index = NDArray[np.intp]
Flags = NDArray[np.bool_]

MIN_CANDIDATES = 256


class Filters:
    """The filters for one vocabulary on one device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device

    def limited(self, draws: Draws) -> Flags:
        """Tell which draws have a top_k that can drop something."""
        flags: Flags = (draws.top_k > 0) & (draws.top_k < self.vocab_size)
        return flags

    def wanted(self, draws: Draws) -> Flags:
        """Tell which draws have any filter at all."""
        flags: Flags = self.limited(draws) | (draws.top_p < 1) | (draws.min_p > 0)
        return flags

    def passes(self, scaled: Tensor, chosen: Tensor, draws: Draws) -> Flags:
        """Tell whether the best of all tokens survives min_p and top_p: then it is the best of the survivors too, and
        nothing need be sorted. Shapes: scaled [S, V], chosen [S]."""
        floor, top_p = self._floor(draws), self._put(draws.top_p)
        before = share_ahead(scaled, chosen, floor.squeeze(-1))
        kept = (scaled.gather(-1, chosen[:, None]) >= floor).squeeze(-1) & ((before < top_p) | (top_p >= 1))
        passed: Flags = kept.cpu().numpy()
        return passed

    def survivors(self, scaled: Tensor, draws: Draws, which: Index) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """Yield (draws, values, ids) until each of the draws `which` has had its turn.

        Shapes: scaled [S, V]; values, ids [s, K], best first, dropped cells at -inf. K is the smallest that will do.
        """
        left = which
        size = max(MIN_CANDIDATES, int(draws.top_k[left[self.limited(draws)[left]]].max(initial=0)))
        while left.size:
            size = min(size, self.vocab_size)
            values, ids, covered = self._cut(scaled[self._put(left)], draws_at(draws, left), size)
            if covered.all():
                yield left, values, ids
                return
            ready = self._put(np.flatnonzero(covered))
            yield left[covered], values[ready], ids[ready]
            left, size = left[~covered], self.vocab_size

    def _cut(self, scaled: Tensor, draws: Draws, size: int) -> tuple[Tensor, Tensor, Flags]:
        """Apply min_p, top_k and top_p among the `size` most likely tokens.

        Return (values, ids) [S, size], dropped cells at -inf, and covered [S]: whether `size` was enough to be exact.
        """
        if (draws.min_p > 0).any():
            scaled = scaled.masked_fill(scaled < self._floor(draws), -torch.inf)
        limited = self.limited(draws)
        values, ids = top_tokens(scaled, size)
        rank = torch.arange(size, device=self.device)
        limit = self._put(np.where(limited, draws.top_k, size))[:, None]
        values = values.masked_fill(rank >= limit, -torch.inf)
        covered = limited | (size == self.vocab_size) | torch.isneginf(values[:, -1]).cpu().numpy()
        if (draws.top_p < 1).any():
            weight = values.exp()
            behind = weight.cumsum(-1)  # one after the other: `size` candidates or more, the sums are the same
            total = torch.where(self._put(limited), behind[:, -1], row_sum(scaled.exp()))
            before = (behind - weight) / total[:, None]
            top_p = self._put(draws.top_p.astype(np.float32))[:, None]
            dropped = (before >= top_p) & (top_p < 1) & (rank > 0)
            covered |= dropped[:, -1].cpu().numpy()
            values = values.masked_fill(dropped, -torch.inf)
        return values, ids, covered

    def _floor(self, draws: Draws) -> Tensor:
        """Return the least scaled logit that min_p lets pass, [S, 1]; the best token sits at 0."""
        with np.errstate(divide="ignore"):
            return self._put(np.log(np.maximum(draws.min_p, 0.0)).astype(np.float32))[:, None]

    def _put(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self.device)


def draws_at(draws: Draws, which: Index) -> Draws:
    """Return the filters and keys of some draws; edits and masks stay behind, they are applied already."""
    if len(which) == len(draws.row):
        return draws
    fields = ("row", "width", "seed", "lane", "position", "temperature", "top_k", "top_p", "min_p", "num_top")
    return Draws(**{name: getattr(draws, name)[which] for name in fields})
