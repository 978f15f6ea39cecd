"""How long a text may be to be worth tokenising.

A tokenizer takes three hundred bytes for each token while it works, and seconds for a million. What is certainly too
long is refused before: what was stored is longer than any request may be.
"""

from __future__ import annotations

from dataclasses import dataclass

from chatcache.errors import ContextTooLong

MAX_PROMPT_CHARS = 8 << 20  # for any model
ALWAYS_CHARS = 64 << 10  # so much is tokenised, and its tokens are told to whoever sent too many
_NORMALISED = 4  # so many characters that a tokenizer may make one of


@dataclass(slots=True)
class PromptBound:
    """What the model says of that; 0 until it is known."""

    max_model_len: int = 0
    max_token_chars: int = 0

    @property
    def max_chars(self) -> int:
        fitting = _NORMALISED * self.max_token_chars * self.max_model_len
        return min(MAX_PROMPT_CHARS, max(ALWAYS_CHARS, fitting)) if fitting else MAX_PROMPT_CHARS

    def check(self, num_chars: int) -> None:
        """Raises: ContextTooLong."""
        if num_chars > self.max_chars:
            told = f"this model's maximum context length is {self.max_model_len} tokens"
            if not self.max_model_len:
                told = f"no prompt may have more than {self.max_chars}"
            raise ContextTooLong(f"the prompt has {num_chars} characters; {told}", param="prompt")
