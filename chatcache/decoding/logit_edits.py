"""Penalties, logit_bias and banned ids as one sparse edit of the logits.

For a token that occurs `c` times in the output (`seen`: in the prompt or output), with logit l:

    l = l / repetition if l > 0 else l * repetition        if seen      (CTRL, Keskar et al. 2019; as transformers)
    l = l + bias - presence * [c > 0] - frequency * c                   (as OpenAI)

and -inf while the token is banned (`min_tokens`, bad words, repeated n-grams). A step costs one table update, and a
copy of the table only if the penalty of a token that is already in it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from chatcache.decoding.token_bans import TokenBans
from chatcache.types.actions import LogitChanges
from chatcache.types.plan import F32, I32
from chatcache.types.request import DecodingParams

Edit = tuple[I32, F32, F32]


class LogitEdits:
    """Edit table of one branch.

    Rows [0, size) are in use, and their ids are unique. Rows that an `edit` has returned are never changed: the plan
    keeps them. A token is appended behind them, and a change of a row copies its column.
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
        self._ids: I32 = np.array(ids, dtype=np.int32)
        self._scale: F32 = np.ones(len(ids), dtype=np.float32)
        self._scale[: len(seen)] = self._repetition
        self._bias = bias
        self._add: F32 = np.array([bias.get(token, 0.0) for token in ids], dtype=np.float32)
        self._counts = [0] * len(ids)  # by row: how often the token occurs in the output
        self._edit: Edit | None = None  # the last one returned, while it is valid
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
        copied._row, copied._counts = dict(self._row), self._counts[:]
        copied._ids, copied._scale, copied._add = self._ids.copy(), self._scale.copy(), self._add.copy()
        copied._edit = None
        return copied

    def record(self, token: int) -> None:
        """Count an output token. Has no effect unless `is_recording`."""
        if self._bans is not None:
            self._bans.record(token)
        if not self._counting:
            return
        size = self._size
        row = self._row.setdefault(token, size)
        if row == size:  # it was not in the table, and has no bias
            if size == len(self._ids):
                self._grow()
            self._ids[size] = token
            self._counts.append(1)
            self._size, self._edit = size + 1, None
            return
        count = self._counts[row] = self._counts[row] + 1
        add = self._bias.get(token, 0.0) - self._presence - self._frequency * count
        if count == 1 and self._scale[row] != self._repetition:
            self._scale = self._scale.copy()
            self._scale[row] = self._repetition
            self._edit = None
        if self._add[row] != add:
            self._add = self._add.copy()
            self._add[row] = add
            self._edit = None

    def changes(self) -> LogitChanges:
        """Return the edit of a branch without bans and masks."""
        edit = self._edit
        if edit is None and (size := self._size):
            edit = self._edit = self._ids[:size], self._scale[:size], self._add[:size]
        return edit, None

    def edit(self, *, ban: bool) -> Edit | None:
        """Return (ids, scale, add), each [num_edited]; None without edits."""
        edit, size = self._edit, self._size
        if edit is None or ban != self._is_banned:
            edit = None
            if size and (ban or self._always_applies):
                add = self._add[:size]
                if ban:
                    add = add.copy()
                    add[self._bannable] = -np.inf
                edit = self._edit = self._ids[:size], self._scale[:size], add
                self._is_banned = ban
        banned = self._bans.banned_ids() if self._bans is not None else None
        return _with_bans(edit, banned) if banned else edit

    def _grow(self) -> None:
        room = max(16, self._size)
        self._ids = np.concatenate((self._ids, np.zeros(room, dtype=np.int32)))
        self._scale = np.concatenate((self._scale, np.full(room, self._repetition, dtype=np.float32)))
        self._add = np.concatenate((self._add, np.full(room, self._first_add, dtype=np.float32)))


def _with_bans(edit: Edit | None, banned: set[int]) -> Edit:
    """Return an edit that also bans these ids."""
    new = np.array(sorted(banned), dtype=np.int32)
    if edit is None:
        return new, np.ones(len(new), np.float32), np.full(len(new), -np.inf, np.float32)
    ids, scale, add = edit
    add = np.where(np.isin(ids, new), np.float32(-np.inf), add)
    new = new[~np.isin(new, ids)]
    return (
        np.concatenate((ids, new)),
        np.concatenate((scale, np.ones(len(new), np.float32))),
        np.concatenate((add, np.full(len(new), -np.inf, np.float32))),
    )
