"""Token ids of `bad_words`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from msgspec.structs import replace

from chatcache.errors import InvalidRequestError
from chatcache.types.request import BeamSearchParams, SamplingParams, format_value

AnyParams = TypeVar("AnyParams", SamplingParams, BeamSearchParams, SamplingParams | BeamSearchParams)


class Encoder(Protocol):
    """The part of `Tokenizer` that is needed here."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...


def encode_bad_words(words: Iterable[str], tokenizer: Encoder) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that write each word at the start of a text and after a space.

    The rule is that of vLLM: the form after a space counts if it has another first token and the same length.
    Raises: InvalidRequestError for a word that is not a text, or that has no tokens.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise InvalidRequestError(
                f"bad_words must be texts of at least 1 letter, got {format_value(word)}", param="bad_words"
            )
        bare, spaced = (tuple(tokenizer.encode(text)) for text in (word.lstrip(), " " + word.lstrip()))
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return tuple(sequences)


def resolve_bad_words(params: AnyParams, tokenizer: Encoder) -> AnyParams:
    """Return the parameters with `bad_words` as token ids. Raises: InvalidRequestError."""
    if not params.bad_words:
        return params
    ids = (*params.bad_words_ids, *encode_bad_words(params.bad_words, tokenizer))
    return replace(params, bad_words=(), bad_words_ids=ids)
