"""Token ids of bad words, by the rule of vLLM."""

from __future__ import annotations

import pytest

from chatcache.errors import InvalidRequestError
from chatcache.tokenizer.bad_words import encode_bad_words, resolve_bad_words
from chatcache.types.request import BeamSearchParams

IDS = {"cat": [1], " cat": [2], "dog": [3, 4], " dog": [5], "a b": [6, 7], " a b": [6, 8]}


class Words:
    """A tokenizer of a few words."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        assert not add_special_tokens
        return IDS[text]


def test_encode_bad_words_with_and_without_a_leading_space() -> None:
    assert encode_bad_words(["cat"], Words()) == ((1,), (2,))
    assert encode_bad_words([" cat"], Words()) == ((1,), (2,))
    assert encode_bad_words(["dog"], Words()) == ((3, 4),), "another number of tokens after a space"
    assert encode_bad_words(["a b"], Words()) == ((6, 7),), "the same first token after a space"


def test_resolve_bad_words_adds_to_the_token_ids() -> None:
    params = resolve_bad_words(BeamSearchParams(bad_words=("cat",), bad_words_ids=((9, 9),)), Words())
    assert (params.bad_words, params.bad_words_ids) == ((), ((9, 9), (1,), (2,)))


@pytest.mark.parametrize("word", ["", " ", 3])
def test_encode_bad_words_without_letters_is_an_error(word: object) -> None:
    with pytest.raises(InvalidRequestError, match="bad_words"):
        encode_bad_words([word], Words())  # type: ignore[list-item]
