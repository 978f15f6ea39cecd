"""Penalties, logit_bias and banned ids as one sparse edit of the logits.

For a token that occurs `c` times in the output (`seen`: in the prompt or output), with logit l:

    l = l / repetition if l > 0 else l * repetition        if seen      (CTRL, Keskar et al. 2019; as transformers)
    l = l + bias - presence * [c > 0] - frequency * c                   (as OpenAI)

and -inf while the token is banned. A step costs one table update and a copy of one entry per distinct edited token, or
nothing if no penalty, bias or ban is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from chatcache.types.plan import F32, I32
from chatcache.types.request import SamplingParams

Edit = tuple[I32, F32, F32]


class LogitEdits:
    """Edit table of one branch. Rows [0, size) are in use; ids are unique and only appended."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], bannable: Sequence[int] = ()) -> None:
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._counting = self._repetition != 1.0 or self._presence != 0.0 or self._frequency != 0.0
        bias = params.logit_bias or {}
        self._always_applies = self._counting or bool(bias)
        seen = sorted(set(prompt)) if self._repetition != 1.0 else []
        ids = list(dict.fromkeys((*seen, *bias, *bannable)))
        self._size = len(ids)
        self._row = {token: row for row, token in enumerate(ids)}
        self._bannable = np.array([self._row[token] for token in bannable], dtype=np.intp)
        self._ids: I32 = np.array(ids, dtype=np.int32)
        self._scale: F32 = np.ones(len(ids), dtype=np.float32)
        self._scale[: len(seen)] = self._repetition
        self._bias = bias
        self._add: F32 = np.array([bias.get(token, 0.0) for token in ids], dtype=np.float32)
        self._count: dict[int, int] = {}

    @property
    def is_empty(self) -> bool:
        """True if `edit` always returns None."""
        return not self._counting and self._size == 0

    def fork(self) -> LogitEdits:
        """Return an independent copy for a forked branch.

        O(rows), or the table itself without penalties.
        """
        if not self._counting:
            return self
        copied = copy(self)
        copied._row, copied._count = dict(self._row), dict(self._count)
        copied._ids, copied._scale, copied._add = self._ids.copy(), self._scale.copy(), self._add.copy()
        return copied

    def record(self, token: int) -> None:
        """Count an output token."""
        if not self._counting:
            return
        row = self._row.get(token)
        if row is None:
            row = self._append(token)
        count = self._count[token] = self._count.get(token, 0) + 1
        self._scale[row] = self._repetition
        self._add[row] = self._bias.get(token, 0.0) - self._presence - self._frequency * count

    def edit(self, *, ban: bool) -> Edit | None:
        """Return copies of (ids, scale, add), each [num_edited]; None without edits."""
        if self._size == 0 or not (ban or self._always_applies):
            return None
        add = self._add[: self._size].copy()
        if ban:
            add[self._bannable] = -np.inf
        return self._ids[: self._size], self._scale[: self._size].copy(), add

    def _append(self, token: int) -> int:
        row = self._size
        if row == len(self._ids):
            room = max(16, row)
            self._ids = np.concatenate((self._ids, np.zeros(room, dtype=np.int32)))
            self._scale = np.concatenate((self._scale, np.zeros(room, dtype=np.float32)))
            self._add = np.concatenate((self._add, np.zeros(room, dtype=np.float32)))
        self._ids[row] = token
        self._row[token] = row
        self._size = row + 1
        return row
