"""Every bound on both sides, and the field named in the error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chatcache.decoding.strategy import validate_params
from chatcache.errors import InvalidRequestError
from chatcache.types.request import BeamSearchParams, Params, SamplingParams

VOCAB_SIZE = 100
INF, NAN = float("inf"), float("nan")
SHARED_GOOD: dict[str, list[Any]] = {
    "max_tokens": [None, 1, 2**31 - 1],
    "min_tokens": [0, 16],
    "stop": [(), None, "x", ["x"], ("é" * 256,), ("x",) * 16],
    "stop_token_ids": [(0, 99), tuple(range(64))],
    "logprobs": [None, 0, 20, -1],
    "repetition_penalty": [1e-3, 10],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2.0, 2.0],
    "logit_bias": [None, {}, {0: -100, 99: 100.0}],
    "no_repeat_ngram_size": [0, 1, 3],
    "bad_words_ids": [(), [[1]], [[1, 2], [99]]],
    "allowed_token_ids": [None, [0], (1, 99)],
    "prompt_logprobs": [None, 0, 20],
    "ignore_eos": [True],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
}
SHARED_BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 2**31, 1.5, True, "3", 10**5000],
    "min_tokens": [-1, 17, None, 0.5],
    "stop": [("",), ("x" * 257,), ("x",) * 17, (3,), ("\ud800",)],
    "stop_token_ids": [(-1,), (100,), tuple(range(65)), (1.0,), (True,)],
    "logprobs": [-2, 21, True, 1.0],
    "repetition_penalty": [0, 1e-300, 9.9e-4, -1, 10.1, NAN, INF],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, INF],
    "logit_bias": [{-1: 0}, {100: 0}, {1: 100.1}, {1: -101}, {1: NAN}, {"1": 0}, [1], dict.fromkeys(range(1025), 0)],
    "no_repeat_ngram_size": [-1, 1.0, True, None],
    "bad_words": [["word"]],
    "bad_words_ids": [[[]], [[100]], [[-1]], [[1.0]], [[1]] * 1025, [[1] * 257]],
    "allowed_token_ids": [[], [100], [-1], [1.0]],
    "prompt_logprobs": [-1, 21, True, 1.0, NAN, "3"],
    "ignore_eos": [1, None, "yes"],
    "include_stop_str_in_output": [0],
    "skip_special_tokens": [None],
}
SAMPLING_GOOD: dict[str, list[Any]] = {
    "n": [1, 1024],
    "best_of": [None, 1, 1024],
    "temperature": [0, 0.0, 2, 100.0],
    "top_p": [1e-9, 1],
    "top_k": [-1, 0, 101, 2**31 - 1],
    "min_p": [0, 1],
    "seed": [None, -(2**63), 2**64 - 1],
}
SAMPLING_BAD: dict[str, list[Any]] = {
    "n": [0, 1025, -1, 1.0, None, True],
    "best_of": [0, 1025, -1, 2.0, True, "3"],
    "temperature": [-0.1, 100.1, NAN, INF, -INF, "1", None, True, 10**400],
    "top_p": [0, 1.01, -0.5, NAN],
    "top_k": [-2, 2**31, 1.0],
    "min_p": [-0.01, 1.01, NAN],
    "seed": [-(2**63) - 1, 2**64, 1.0, "7", False],
}
BEAM_GOOD: dict[str, list[Any]] = {
    "beam_width": [4, 1024],
    "n": [None, 1, 4],
    "length_penalty": [-10, 0, 10.0],
    "early_stopping": [True, False, "never"],
    "num_beam_groups": [1, 2, 4],
    "diversity_penalty": [0, 0.0],
    "stream_beams": [True, False],
}
BEAM_BAD: dict[str, list[Any]] = {
    "beam_width": [0, 1025, 2.0, None],
    "n": [0, 5, 1.0],
    "length_penalty": [-10.1, 10.1, NAN, INF, None],
    "early_stopping": [None, 1, 0, "always", ""],
    "num_beam_groups": [0, 3, 5, 2.0, None, True],
    "diversity_penalty": [-0.1, 0.1, 101, NAN, INF, None],
    "stream_beams": [None, 1],
}


def cases(*tables: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for table in tables for name, values in table.items() for value in values]


def label(value: object) -> str:
    return value if isinstance(value, str) and value.isascii() else type(value).__name__


def changed(params: Params, name: str, value: Any) -> Params:
    return msgspec.structs.replace(params, **{name: value})


@pytest.mark.parametrize(("name", "value"), cases(SHARED_GOOD, SAMPLING_GOOD), ids=label)
def test_sampling_accepts_the_bounds(name: str, value: Any) -> None:
    validate_params(changed(SamplingParams(), name, value), VOCAB_SIZE)


@pytest.mark.parametrize(("name", "value"), cases(SHARED_BAD, SAMPLING_BAD), ids=label)
def test_sampling_refuses_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        validate_params(
            changed(SamplingParams(), name, value), 2000 if name == "logit_bias" and len(value) > 9 else 100
        )
    assert caught.value.param == name
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(("name", "value"), cases(SHARED_GOOD, BEAM_GOOD), ids=label)
def test_beams_accept_the_bounds(name: str, value: Any) -> None:
    validate_params(changed(BeamSearchParams(), name, value), VOCAB_SIZE)


@pytest.mark.parametrize(("name", "value"), cases(SHARED_BAD, BEAM_BAD), ids=label)
def test_beams_refuse_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        validate_params(changed(BeamSearchParams(), name, value), VOCAB_SIZE)
    assert caught.value.param == name


def test_groups_divide_the_width_and_a_penalty_needs_them() -> None:
    validate_params(BeamSearchParams(beam_width=6, num_beam_groups=3, diversity_penalty=100), VOCAB_SIZE)
    for bad, param, words in [
        (BeamSearchParams(beam_width=6, num_beam_groups=4), "num_beam_groups", r"must divide beam_width \(6\), got 4"),
        (BeamSearchParams(beam_width=6, num_beam_groups=7), "num_beam_groups", "must be between 1 and 6, got 7"),
        (BeamSearchParams(diversity_penalty=0.5), "diversity_penalty", "needs num_beam_groups of at least 2"),
        (BeamSearchParams(num_beam_groups=2, diversity_penalty=-1), "diversity_penalty", "between 0 and 100, got -1"),
    ]:
        with pytest.raises(InvalidRequestError, match=words) as caught:
            validate_params(bad, VOCAB_SIZE)
        assert caught.value.param == param


def test_distinct_needs_noise_and_ranks_by_itself() -> None:
    validate_params(SamplingParams(distinct=True, n=1024, temperature=0.1), VOCAB_SIZE)
    for bad, param, words in [
        (SamplingParams(distinct=True, temperature=0.0), "distinct", "needs a temperature greater than 0, got 0"),
        (SamplingParams(distinct=True, best_of=4), "best_of", "exclude each other"),
        (SamplingParams(distinct="yes"), "distinct", "must be true or false, got 'yes'"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(InvalidRequestError, match=words) as caught:
            validate_params(bad, VOCAB_SIZE)
        assert caught.value.param == param


def test_bounds_are_in_the_message() -> None:
    with pytest.raises(InvalidRequestError, match="temperature must be between 0 and 100, got 101"):
        validate_params(SamplingParams(temperature=101), VOCAB_SIZE)
    with pytest.raises(InvalidRequestError, match="top_p must be greater than 0 and at most 1, got 0"):
        validate_params(SamplingParams(top_p=0), VOCAB_SIZE)
    with pytest.raises(InvalidRequestError, match="n must be between 1 and 4, got 5"):
        validate_params(BeamSearchParams(n=5), VOCAB_SIZE)


def test_defaults_are_valid() -> None:
    validate_params(SamplingParams(), 1)
    validate_params(BeamSearchParams(), 1)


def test_foreign_params_are_refused() -> None:
    with pytest.raises(InvalidRequestError):
        validate_params({"n": 1}, VOCAB_SIZE)  # type: ignore[arg-type]


def test_best_of_is_at_least_n() -> None:
    validate_params(SamplingParams(n=3, best_of=3, temperature=0.0), VOCAB_SIZE)
    with pytest.raises(InvalidRequestError, match=r"best_of \(with n 3\) must be between 3 and 1024, got 2") as caught:
        validate_params(SamplingParams(n=3, best_of=2), VOCAB_SIZE)
    assert caught.value.param == "best_of"
