"""Stop rules: EOS, stop token ids, stop strings and length.

Stop strings are matched on bytes, so that neither token boundaries nor split UTF-8 characters can hide one. The state
per branch is an immutable `StopProgress`, so forking a branch shares it. It includes the state of the thinking budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from chatcache.decoding.thinking import ThinkingRules, ThoughtProgress
from chatcache.errors import InvalidRequestError
from chatcache.types.events import FINISH_LENGTH, FINISH_STOP, STOP_DEAD_END
from chatcache.types.request import Params
from chatcache.types.stats import ModelInfo


@dataclass(frozen=True, slots=True)
class StopResult:
    """Reason why a candidate ended; fields as in `types.events.CandidateDone`."""

    finish_reason: str
    stop_reason: str | int | None = None


DEAD_END = StopResult(FINISH_LENGTH, STOP_DEAD_END)
"""The grammar requires more text, but no token of the vocabulary continues it; the text is cut off."""


class StopProgress(msgspec.Struct, frozen=True, gc=False):
    """State of the stop rules in one branch.

    Its length and the last bytes that may belong to a stop string. `thought`: state of the thinking budget, None at the
    start and without a budget.
    """

    num_tokens: int = 0
    last_bytes: bytes = b""
    thought: ThoughtProgress | None = None


START = StopProgress()


class StopRules:
    """Stop rules of one request, shared by all its branches.

    `terminal_ids`: tokens that end a candidate (EOS unless ignored, stop token ids). Neither they nor stop strings end
    a candidate before `min_tokens` tokens; until then the ids are banned from draws (`banned_ids`). `thinking`: the
    thinking budget.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        eos_ids: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        token_bytes: Sequence[bytes] | None = None,
        thinking: ThinkingRules | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.thinking = thinking
        self.terminal_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos_ids, *stop_ids)))
        self._eos_ids = frozenset(eos_ids)
        self._stops = tuple((text, text.encode()) for text in stop_strings)
        self._tail_bytes = max((len(needle) for _, needle in self._stops), default=1) - 1
        if self._stops and token_bytes is None:
            raise InvalidRequestError("stop strings need a model with a tokenizer", param="stop")
        self._token_bytes: Sequence[bytes] = token_bytes or ()

    @classmethod
    def of(
        cls,
        params: Params,
        model_info: ModelInfo,
        *,
        max_tokens: int,
        token_bytes: Sequence[bytes] | None,
        prompt: Sequence[int] = (),
    ) -> StopRules:
        """Build the rules of a request.

        Raises: InvalidRequestError for stop strings without a tokenizer.
        """
        thinking, marks = None, params.thinking_marks
        if params.thinking_token_budget is not None and marks is not None:
            prefix = prompt[len(prompt) - marks.num_prefix_tokens :]
            thinking = ThinkingRules(params.thinking_token_budget, marks, token_bytes or (), prefix)
        return cls(
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            eos_ids=() if params.ignore_eos else model_info.eos_token_ids,
            stop_ids=params.stop_token_ids,
            stop_strings=params.stop,
            token_bytes=token_bytes,
            thinking=thinking,
        )

    @property
    def has_stop_strings(self) -> bool:
        """True if the request has stop strings."""
        return bool(self._stops)

    def banned_ids(self, progress: StopProgress) -> tuple[int, ...]:
        """Return the ids that must not be drawn next: the terminal ids before `min_tokens` tokens."""
        return self.terminal_ids if progress.num_tokens < self.min_tokens else ()

    def advance(self, progress: StopProgress, token: int) -> tuple[StopProgress, StopResult | None]:
        """Return the state after `token` and, if the candidate ends with it, the reason."""
        num_tokens = progress.num_tokens + 1
        tail, stop = progress.last_bytes, None
        if self._stops:
            tail, stop = self._find_stop(progress.last_bytes, token)
        thought = None if self.thinking is None else self.thinking.advance(progress.thought, token)
        after = StopProgress(num_tokens, tail, thought)
        if token in self.terminal_ids:
            return after, StopResult(FINISH_STOP) if token in self._eos_ids else StopResult(FINISH_STOP, token)
        if stop is not None and num_tokens >= self.min_tokens:
            return after, StopResult(FINISH_STOP, stop)
        if num_tokens >= self.max_tokens:
            return after, StopResult(FINISH_LENGTH)
        return after, None

    def _find_stop(self, tail: bytes, token: int) -> tuple[bytes, str | None]:
        """Find the stop string that ends first within `token` (the longest of those)."""
        piece = self._token_bytes[token] if 0 <= token < len(self._token_bytes) else b""
        text = tail + piece
        best: tuple[int, int, str] | None = None
        for stop, needle in self._stops:
            start = text.find(needle, max(0, len(tail) - len(needle) + 1))
            if start >= 0 and (best is None or (start + len(needle), start) < best[:2]):
                best = (start + len(needle), start, stop)
        kept = text[len(text) - self._tail_bytes :] if len(text) > self._tail_bytes else text
        return kept, best[2] if best else None
