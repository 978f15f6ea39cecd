"""Thinking budget: end the reasoning block of a reply with forced tokens.

A reply may begin with a reasoning block, `<think> ... </think>`. Within the last tokens of its budget the block is
ended at the first end of a sentence, at the latest when the budget is used up: each following draw then has a mask with
one token, the next one of the closing sequence. All else in the branch stays as it is, so its pages are kept.

    budget 64      48                     64
    <think> ... ...|... looks right.  </think> \\n\\n  The answer is
                   | window              forced

The state of a branch is an immutable `ThoughtProgress`, a part of its `StopProgress`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from chatcache.decoding.grammar.compiler import to_bitmask
from chatcache.types.plan import U32
from chatcache.types.request import ThinkingMarks

WINDOW_TOKENS = 16  # before the end of the budget, in which a sentence may end the block
MAX_EXCESS_TOKENS = 16  # of the closing sequence beyond the budget
_WHITESPACE = b" \t\r\n"
_BEFORE, _INSIDE, _AFTER = range(3)
_SENTENCE_ENDS = (b".", b"!", b"?", b"\n", "。".encode(), "！".encode(), "？".encode())
_QUOTES = b" \"')*`"


class ThoughtProgress(msgspec.Struct, frozen=True, gc=False):
    """State of the reasoning block in one branch.

    `num_tokens`: tokens up to the end of the block. `last_bytes`: the text that may belong to a marker or end a
    sentence. `num_forced`: tokens of the closing sequence so far.
    """

    phase: int = _BEFORE
    num_tokens: int = 0
    last_bytes: bytes = b""
    num_forced: int = 0


_DONE = ThoughtProgress(_AFTER)


class ThinkingRules:
    """Budget of one request, shared by all its branches.

    `prefix`: tokens at the end of the prompt that belong to the reply already.
    """

    def __init__(
        self, budget: int, marks: ThinkingMarks, token_bytes: Sequence[bytes], prefix: Sequence[int] = ()
    ) -> None:
        self._opening, self._closing = marks.opening.encode(), marks.closing.encode()
        self._closing_ids = marks.closing_ids
        self._token_bytes = token_bytes
        self._latest = max(0, budget - max(0, len(self._closing_ids) - MAX_EXCESS_TOKENS))
        self._earliest = self._latest - min(WINDOW_TOKENS, self._latest // 2)
        self._masks = {token: to_bitmask((token,), token + 1) for token in self._closing_ids}
        self._start = ThoughtProgress(_INSIDE if marks.is_open else _BEFORE)
        for token in prefix:
            self._start = self.advance(self._start, token)

    def mask(self, progress: ThoughtProgress | None) -> U32 | None:
        """Return the mask of the only token that may follow; None if there is no such restriction."""
        token = self._forced_token(progress or self._start)
        return None if token is None else self._masks[token]

    def has_no_mask_soon(self, progress: ThoughtProgress | None) -> bool:
        """Return True if neither the next token nor the one after it is forced, whichever the next one is."""
        progress = progress or self._start
        return progress.phase == _AFTER or progress.num_tokens + 1 < self._earliest

    def _forced_token(self, progress: ThoughtProgress) -> int | None:
        if progress.phase != _INSIDE:
            return None
        if progress.num_forced or progress.num_tokens >= self._latest:
            return self._closing_ids[progress.num_forced]
        if progress.num_tokens >= self._earliest and progress.last_bytes.rstrip(_QUOTES).endswith(_SENTENCE_ENDS):
            return self._closing_ids[0]
        return None

    def advance(self, progress: ThoughtProgress | None, token: int) -> ThoughtProgress:
        """Return the state after `token`; `progress` is None at the start of the branch."""
        progress = progress or self._start
        if progress.phase == _AFTER:
            return progress
        num_forced = progress.num_forced + 1 if token == self._forced_token(progress) else 0
        if num_forced == len(self._closing_ids):
            return _DONE
        text = progress.last_bytes + (self._token_bytes[token] if 0 <= token < len(self._token_bytes) else b"")
        num_tokens, phase = progress.num_tokens + 1, progress.phase
        if phase == _BEFORE:
            text = text.lstrip(_WHITESPACE)
            if not text.startswith(self._opening):
                return ThoughtProgress(_BEFORE, num_tokens, text) if self._opening.startswith(text) else _DONE
            phase, text = _INSIDE, text[len(self._opening) :]
        if self._closing in text and not num_forced:
            return _DONE
        return ThoughtProgress(phase, num_tokens, text[-max(len(self._closing), 8) :], num_forced)
