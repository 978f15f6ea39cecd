"""Penalties, logit_bias and banned ids as one sparse edit of the logits.

For a token that occurs `c` times in the output (`seen`: in the prompt or output), with logit l:

    l = l / repetition if l > 0 else l * repetition        if seen      (CTRL, Keskar et al. 2019; as transformers)
    l = l + bias - presence * [c > 0] - frequency * c                   (as OpenAI)

and -inf while the token is banned (`min_tokens`, bad words, repeated n-grams). A step costs one table update.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from chatcache.decoding.token_bans import TokenBans
from chatcache.types.actions import LogitChanges
from chatcache.types.plan import EditTable, edit_table
from chatcache.types.request import DecodingParams


class LogitEdits:
    """Edit table of one branch.

    Rows [0, size) are in use, and their ids are unique. An `edit` is a view of them, which the next `record` changes:
    the step that it was planned for is over then, as a branch has one token per step.
    """

    def __init__(self, params: DecodingParams, prompt: Sequence[int], bannable: Sequence[int] = ()) -> None:
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._first_add = -self._presence - self._frequency
        self._counting = self._repetition != 1.0 or self._presence != 0.0 or self._frequency != 0.0
        bad_tokens = {ids[0]: -np.inf for ids in params.bad_words_ids if len(ids) == 1}
        bias = {**(params.logit_bias or {}), **bad_tokens}
        bans = TokenBans(params, prompt)
        self._bans = None if bans.is_empty else bans
        self.is_recording = self._counting or self._bans is not None
        self._always_applies = self._counting or bool(bias)
        seen = sorted(set(prompt)) if self._repetition != 1.0 else []
        ids = list(dict.fromkeys((*seen, *bias, *bannable)))
        self._size = len(ids)
        self._row = {token: row for row, token in enumerate(ids)}
        self._bannable = np.array([self._row[token] for token in bannable], dtype=np.intp)
        self._bias = bias
        self._num_initial = len(ids)
        self._counts: dict[
            int, int
        ] = {}  # by row: occurrences in the output; absent: 0 of initial rows, 1 of later ones
        self._set_table(edit_table(ids, 1.0, [bias.get(token, 0.0) for token in ids]))
        self._scale[: len(seen)] = self._repetition
        self._edit: EditTable | None = None  # the last one returned, while it is valid
        self._is_banned = False  # in the last one

    @property
    def is_empty(self) -> bool:
        """True if `edit` always returns None."""
        return not self._counting and self._size == 0 and self._bans is None

    @property
    def has_bans(self) -> bool:
        """True if tokens may be banned for a time."""
        return len(self._bannable) > 0 or self._bans is not None

    @property
    def is_fixed(self) -> bool:
        """True if `edit` always returns the same."""
        return not self._counting and not self.has_bans

    def fork(self) -> LogitEdits:
        """Return an independent copy for a forked branch.

        O(rows), or the table itself without penalties.
        """
        if not self._counting and self._bans is None:
            return self
        copied = copy(self)
        copied._bans = None if self._bans is None else self._bans.fork()
        copied._row, copied._counts = dict(self._row), dict(self._counts)
        copied._set_table(self._table.copy())
        copied._edit = None
        return copied

    def record(self, token: int) -> None:
        """Count an output token. Has no effect unless `is_recording`."""
        if self._bans is not None:
            self._bans.record(token)
        if not self._counting:
            return
        size, self._edit = self._size, None
        row = self._row.setdefault(token, size)
        if row == size:  # it was not in the table, and has no bias
            if size == len(self._ids):
                self._grow()
            self._ids[size] = token
            self._size = size + 1
            return
        count = self._counts[row] = self._counts.get(row, 0 if row < self._num_initial else 1) + 1
        self._scale[row] = self._repetition
        self._add[row] = self._bias.get(token, 0.0) - self._presence - self._frequency * count

    def changes(self) -> LogitChanges:
        """Return the edit of a branch without bans and masks."""
        size = self._size
        return self._table[:size] if size else None, None

    def edit(self, *, ban: bool) -> EditTable | None:
        """Return the rows in use; None without edits."""
        edit, size = self._edit, self._size
        if edit is None or ban != self._is_banned:
            edit = None
            if size and (ban or self._always_applies):
                edit = self._table[:size]
                if ban:
                    edit = edit.copy()
                    edit["add"][self._bannable] = -np.inf
                self._edit, self._is_banned = edit, ban
        banned = self._bans.banned_ids() if self._bans is not None else None
        return _with_bans(edit, banned) if banned else edit

    def _grow(self) -> None:
        more = edit_table(np.zeros(max(16, self._size)), self._repetition, self._first_add)
        self._set_table(np.concatenate((self._table, more)))

    def _set_table(self, table: EditTable) -> None:
        self._table = table
        self._ids, self._scale, self._add = table["ids"], table["scale"], table["add"]


def _with_bans(edit: EditTable | None, banned: set[int]) -> EditTable:
    """Return an edit that also bans these ids."""
    new = np.array(sorted(banned), dtype=np.int32)
    if edit is None:
        return edit_table(new, 1.0, -np.inf)
    edit = edit.copy()
    edit["add"][np.isin(edit["ids"], new)] = -np.inf
    return np.concatenate((edit, edit_table(new[~np.isin(new, edit["ids"])], 1.0, -np.inf)))
