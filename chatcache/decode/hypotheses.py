"""Finished beams: what each is worth, which are kept, and when the search need not go on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chatcache.decode.stop import Ended
from chatcache.decode.streaming import Node
from chatcache.types.params import BeamSearchParams

_F32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A continuation that ended; `node` is its last token."""

    score: float
    node: Node
    ended: Ended


class Hypotheses:
    """The best `width` hypotheses of one group of beams, best first.

    Scores are sum(log p) / num_tokens ** length_penalty, rounded to float32 as transformers holds them.
    """

    def __init__(self, params: BeamSearchParams, width: int, max_tokens: int) -> None:
        self.kept: list[Hypothesis] = []
        self._width = width
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_tokens = max_tokens

    def add(self, found: list[Hypothesis]) -> None:
        """Keep the best of those there are and those found; the older of equals first."""
        self.kept += found
        self.kept.sort(key=lambda hypothesis: -hypothesis.score)
        del self.kept[self._width :]

    def score(self, total: float, num_tokens: int) -> float:
        """Return the score of a summed log-probability at this length."""
        score: float = total / num_tokens**self._length_penalty
        return float(np.float32(min(max(score, -_F32_MAX), _F32_MAX)))

    def settled(self, best_total: float, num_tokens: int) -> bool:
        """Say whether live beams, the best of which has `best_total`, cannot, or need not, improve what is kept."""
        if len(self.kept) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0.0:
            num_tokens = self._max_tokens
        return self.score(best_total, num_tokens) <= self.kept[-1].score
