"""Beams and distinct candidates under a constraint against all token sequences it allows, enumerated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from chatcache.types.plan import F32
from chatcache.types.request import BeamSearchParams, SamplingParams, StructuredOutputs
from tests.decoding.decode_driver import Run, TableModel, log_softmax, run
from tests.decoding.toy_vocab import CONTROL, EOS, PIECES, PROMPT, VOCAB_SIZE, strategy_of, text_of

CHOICES = ("abc", "ab", "aab", "baa", "é")
Path = tuple[tuple[int, ...], float]


def allowed(text: bytes, members: list[bytes]) -> list[int]:
    """The ordinary tokens that may follow `text`, by their text alone."""
    if not any(member.startswith(text) and member != text for member in members):
        return []
    return [
        token
        for token, piece in enumerate(PIECES)
        if piece and token not in (EOS, CONTROL) and any(member.startswith(text + piece) for member in members)
    ]


def every(
    model: Callable[[tuple[int, ...]], F32], members: list[bytes], max_tokens: int, *, renormalised: bool = False
) -> Iterator[Path]:
    """Yield every complete sequence and its log-probability: raw, or of what is allowed at each token."""

    def below(tokens: tuple[int, ...], total: float) -> Iterator[Path]:
        text = text_of(tokens)
        following = allowed(text, members)
        if not following or len(tokens) == max_tokens:
            yield tokens, total
            return
        ending = [EOS] if text in members else []
        logits = model(PROMPT + tokens)
        if renormalised:
            masked = np.full(VOCAB_SIZE, -np.inf, np.float32)
            masked[following + ending] = logits[following + ending]
            logits = masked
        logprobs = log_softmax(logits)
        for token in ending:
            yield (*tokens, token), total + float(logprobs[token])
        for token in following:
            yield from below((*tokens, token), total + float(logprobs[token]))

    return below((), 0.0)


def beams(params: BeamSearchParams, model: TableModel, max_tokens: int = 8) -> Run:
    return run(strategy_of(params, max_tokens=max_tokens), PROMPT, model)


@pytest.mark.parametrize("model", range(3))
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("max_tokens", [2, 8])
def test_wide_beams_are_an_enumeration_of_what_is_allowed(model: int, length_penalty: float, max_tokens: int) -> None:
    table, members = TableModel(VOCAB_SIZE, model), [text.encode() for text in CHOICES]
    want = [(total / len(tokens) ** length_penalty, tokens) for tokens, total in every(table, members, max_tokens)]
    want.sort(reverse=True)
    width = len(want)
    assert 8 < width <= 64
    params = BeamSearchParams(
        beam_width=width,
        length_penalty=length_penalty,
        early_stopping="never",
        structured_outputs=StructuredOutputs(choice=CHOICES),
    )
    found = beams(params, table, max_tokens)
    for index, (score, tokens) in enumerate(want):
        outcome = found.outcomes[index]
        assert tuple(outcome.tokens) == tokens and outcome.done is not None
        assert outcome.done.score == pytest.approx(score, rel=1e-4, abs=1e-4)
        complete = tokens[-1] == EOS or not allowed(text_of(tokens), members)
        assert outcome.done.finish_reason == ("stop" if complete else "length")


@pytest.mark.parametrize("groups", [1, 2])
def test_narrow_beams_stay_allowed(groups: int) -> None:
    params = BeamSearchParams(
        beam_width=4,
        num_beam_groups=groups,
        diversity_penalty=0.5 * (groups - 1),
        structured_outputs=StructuredOutputs(regex="(ab|ba){2,3}é?"),
    )
    found = beams(params, TableModel(VOCAB_SIZE, 5), 30)
    texts = [text_of(outcome.tokens).decode() for outcome in found.outcomes.values()]
    assert len(texts) == 4 and all(text.replace("ab", "").replace("ba", "") in ("", "é") for text in texts)


def test_min_tokens_holds_back_eos_in_beams() -> None:
    params = BeamSearchParams(beam_width=3, min_tokens=4, structured_outputs=StructuredOutputs(regex="[xy]{1,9}"))
    found = beams(params, TableModel(VOCAB_SIZE, 1), 9)
    assert all(len(outcome.tokens) > 4 for outcome in found.outcomes.values())


@pytest.mark.parametrize("model", range(3))
def test_distinct_candidates_are_all_there_are(model: int) -> None:
    """As many as there are sequences: each is found, with its exact probability under the masked distribution."""
    choices = ("abc", "aab", "é")
    table, members = TableModel(VOCAB_SIZE, model), [text.encode() for text in choices]
    want = dict(every(table, members, 8, renormalised=True))
    assert math.fsum(math.exp(total) for total in want.values()) == pytest.approx(1.0, abs=1e-4)
    params = SamplingParams(n=len(want) + 2, distinct=True, structured_outputs=StructuredOutputs(choice=choices))
    found = run(strategy_of(params, seed=model), PROMPT, table)
    got = {tuple(outcome.tokens): outcome.done for outcome in found.outcomes.values() if outcome.tokens}
    assert got.keys() == want.keys()
    for tokens, done in got.items():
        assert done is not None and done.finish_reason == "stop"
        assert done.score == pytest.approx(want[tokens], abs=1e-3)
