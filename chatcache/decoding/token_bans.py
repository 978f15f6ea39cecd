"""Tokens that must not follow the tokens of a branch: repeated n-grams, the ends of bad words, and masks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from chatcache.decoding.grammar.compiler import to_bitmask
from chatcache.decoding.grammar.state import Constraint, GrammarState
from chatcache.decoding.stopping import StopProgress, StopRules
from chatcache.types.actions import LogitChanges
from chatcache.types.plan import U32, EditTable
from chatcache.types.request import DecodingParams


class TokenBans:
    """The bans of one branch, which depend on its tokens.

    An n-gram must not occur twice in prompt and output (as `no_repeat_ngram_size` of transformers). A bad word of
    several tokens bans its last token after the others, if they are in the output (as vLLM; transformers also finds
    them in the prompt).
    """

    def __init__(self, params: DecodingParams, prompt: Sequence[int]) -> None:
        self._bad_words = [array("i", ids) for ids in params.bad_words_ids if len(ids) > 1]
        self._ngram_size = params.no_repeat_ngram_size
        self._tokens = array("i", prompt if self._ngram_size else ())  # the prompt matters for n-grams only
        self._num_prompt = len(self._tokens)

    @property
    def is_empty(self) -> bool:
        """True if no token is ever banned."""
        return not (self._bad_words or self._ngram_size)

    def fork(self) -> TokenBans:
        """Return an independent copy for a forked branch."""
        copied = TokenBans.__new__(TokenBans)
        copied._bad_words, copied._ngram_size = self._bad_words, self._ngram_size
        copied._tokens, copied._num_prompt = self._tokens[:], self._num_prompt
        return copied

    def record(self, token: int) -> None:
        """Append an output token."""
        self._tokens.append(token)

    def banned_ids(self) -> set[int]:
        """Return the tokens that must not be drawn next."""
        banned = self._ends_of_repeated_ngrams() if self._ngram_size else set()
        for word in self._bad_words:
            num_before = len(word) - 1
            has_room = len(self._tokens) - self._num_prompt >= num_before
            if has_room and self._tokens[-num_before:] == word[:-1]:
                banned.add(word[-1])
        return banned

    def _ends_of_repeated_ngrams(self) -> set[int]:
        tokens = np.frombuffer(self._tokens, np.int32) if self._tokens else np.zeros(0, np.int32)
        num_before = self._ngram_size - 1
        num_ngrams = len(tokens) - num_before
        if num_ngrams < 1:
            return set()
        begins_alike = np.ones(num_ngrams, bool)
        for offset in range(num_before):
            begins_alike &= tokens[offset : offset + num_ngrams] == tokens[num_ngrams + offset]
        return set(tokens[num_before:][begins_alike].tolist())


class TokenMasks:
    """Masks of one request: the tokens that its grammar and its `allowed_token_ids` both allow.

    A token that ends the reasoning is forced instead, if the grammar allows it.
    """

    def __init__(self, params: DecodingParams, constraint: Constraint | None, rules: StopRules | None = None) -> None:
        ids = params.allowed_token_ids
        self._thinking = None if rules is None else rules.thinking
        self._constraint = constraint
        self._allowed = None if ids is None else to_bitmask(ids, max(ids) + 1)

    @property
    def is_empty(self) -> bool:
        """True if every token is always allowed."""
        return self._constraint is None and self._allowed is None and self._thinking is None

    def changes(
        self, edit: EditTable | None, grammar_state: GrammarState | None, progress: StopProgress
    ) -> LogitChanges:
        """Return the edit and the mask of a branch; a forced token is drawn without an edit."""
        forced = None if self._thinking is None else self._thinking.mask(progress.thought)
        if forced is not None and self._constraint is not None:
            words = self._constraint.mask(grammar_state, progress.num_tokens)
            num_words = min(len(words), len(forced))
            forced = forced if (words[:num_words] & forced[:num_words]).any() else None
        if forced is not None:
            return None, forced
        return edit, self.mask(grammar_state, progress.num_tokens)

    def mask(self, grammar_state: GrammarState | None, num_tokens: int) -> U32 | None:
        """Return the mask words of the tokens that may follow `num_tokens` tokens of a branch; None for all."""
        if self._constraint is None:
            return self._allowed
        mask = self._constraint.mask(grammar_state, num_tokens)
        if self._allowed is None:
            return mask
        num_words = min(len(mask), len(self._allowed))
        both: U32 = mask[:num_words] & self._allowed[:num_words]
        return both
