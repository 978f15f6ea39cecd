"""Beam search against exhaustive enumeration and against a dense, share-nothing implementation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.decoding.strategy import make_strategy
from chatcache.types.request import BeamSearchParams, GenerateRequest
from chatcache.types.stats import ModelInfo
from tests.decoding.decode_driver import Logits, Outcome, Run, TableModel, log_softmax, run

PROMPT = (1, 2, 3)
BYTES = tuple(bytes([0x61 + i]) for i in range(26))
Ends = Callable[[tuple[int, ...]], bool]


def beam_run(
    params: BeamSearchParams, logits: Logits, *, vocab_size: int, eos: tuple[int, ...], max_tokens: int
) -> Run:
    model_info = ModelInfo(name="toy", digest="00", vocab_size=vocab_size, max_model_len=1000, eos_token_ids=eos)
    request = GenerateRequest(request_id="r", prompt=PROMPT, params=params)
    return run(make_strategy(request, model_info, seed=0, max_tokens=max_tokens, token_bytes=BYTES), PROMPT, logits)


def beam(
    params: BeamSearchParams, logits: Logits, *, vocab_size: int, eos: tuple[int, ...], max_tokens: int
) -> list[Outcome]:
    outcomes = beam_run(params, logits, vocab_size=vocab_size, eos=eos, max_tokens=max_tokens).outcomes
    assert list(outcomes) == list(range(params.n if params.n is not None else params.beam_width))
    return list(outcomes.values())


def enumerate_all(
    logits: Logits, vocab_size: int, ends: Ends, max_tokens: int, length_penalty: float
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield (score, output) of every output that ends, or reaches max_tokens."""
    open_outputs: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for length in range(1, max_tokens + 1):
        grown = [
            (total + float(log_softmax(logits(PROMPT + output))[token]), (*output, token))
            for (total, output), token in itertools.product(open_outputs, range(vocab_size))
        ]
        yield from ((t / length**length_penalty, o) for t, o in grown if ends(o) or length == max_tokens)
        open_outputs = [(t, o) for t, o in grown if not ends(o)]


def dense_beam(
    logits: Logits,
    params: BeamSearchParams,
    *,
    vocab_size: int,
    num_ends: int,
    ends: Ends,
    max_tokens: int,
    banned: tuple[int, ...] = (),
) -> list[tuple[float, tuple[int, ...]]]:
    """Beam search over whole vocabularies, outputs copied at each step; returns the kept (score, output)."""
    width, power = params.beam_width, params.length_penalty
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    kept: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, max_tokens + 1):
        grown = []
        for total, output in beams:
            scores = log_softmax(logits(PROMPT + output))
            barred = banned if length <= params.min_tokens else ()
            grown += [(total + float(scores[t]), (*output, t)) for t in range(vocab_size) if t not in barred]
        grown.sort(key=lambda pair: -pair[0])
        grown = grown[: max(2, 1 + num_ends) * width]
        over = [length == max_tokens or ends(output) for _, output in grown]
        kept += [(t / length**power, o) for (t, o), end in zip(grown[:width], over, strict=False) if end]
        kept = sorted(kept, key=lambda pair: -pair[0])[:width]
        beams = [pair for pair, end in zip(grown, over, strict=True) if not end][:width]
        if not beams or (len(kept) == width and params.early_stopping is True):
            break
        horizon = max_tokens if params.early_stopping == "never" and power > 0 else length
        if len(kept) == width and beams[0][0] / horizon**power <= kept[-1][0]:
            break
    return kept


def agree(got: list[Outcome], want: list[tuple[float, tuple[int, ...]]]) -> None:
    assert [tuple(outcome.tokens) for outcome in got] == [output for _, output in want[: len(got)]]
    for outcome, (score, _) in zip(got, want, strict=False):
        assert outcome.done is not None
        assert outcome.done.score == pytest.approx(score, abs=2e-5)


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(5))
def test_wide_enough_is_exact(seed: int, length_penalty: float) -> None:
    """No prefix of 3 tokens x 3 steps is pruned at width 27: the result is the true ranking of all outputs."""
    logits = TableModel(3, seed)
    params = BeamSearchParams(beam_width=27, n=5, length_penalty=length_penalty, early_stopping="never", max_tokens=4)
    everything = sorted(enumerate_all(logits, 3, lambda output: output[-1] == 2, 4, length_penalty), reverse=True)
    agree(beam(params, logits, vocab_size=3, eos=(2,), max_tokens=4), everything)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("length_penalty", [-0.7, 0.0, 0.6, 1.0, 2.0])
def test_equals_dense(width: int, early_stopping: bool | str, length_penalty: float) -> None:
    for seed, eos in itertools.product(range(2), [(5,), (5, 9)]):
        logits = TableModel(20, seed)
        params = BeamSearchParams(beam_width=width, length_penalty=length_penalty, early_stopping=early_stopping)
        ids = eos
        want = dense_beam(
            logits,
            params,
            vocab_size=20,
            num_ends=len(eos),
            ends=lambda output, ids=ids: output[-1] in ids,  # type: ignore[misc]
            max_tokens=9,
        )
        agree(beam(params, logits, vocab_size=20, eos=eos, max_tokens=9), want)


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_stop_strings_end_hypotheses(early_stopping: bool | str, min_tokens: int) -> None:
    stops = ("ab", "c", "ddd")
    for seed, width in itertools.product(range(8), (1, 3, 4)):
        logits = TableModel(6, seed, sharpness=1.0)
        params = BeamSearchParams(beam_width=width, early_stopping=early_stopping, stop=stops, min_tokens=min_tokens)

        def ends(output: tuple[int, ...]) -> bool:
            text = "".join(chr(0x61 + token) for token in output)
            stopped = any(text.endswith(stop) for stop in stops) and len(output) >= min_tokens
            return output[-1] == 5 or stopped

        got = beam(params, logits, vocab_size=6, eos=(5,), max_tokens=7)
        want = dense_beam(logits, params, vocab_size=6, num_ends=1, ends=ends, max_tokens=7, banned=(5,))
        agree(got, want)
        for outcome in got:
            assert outcome.done is not None
            text = "".join(chr(0x61 + token) for token in outcome.tokens)
            matched = [stop for stop in stops if text.endswith(stop) and len(text) >= min_tokens]
            assert outcome.done.stop_reason == (matched[0] if matched and outcome.tokens[-1] != 5 else None)
            assert outcome.done.finish_reason == ("stop" if ends(tuple(outcome.tokens)) else "length")


def test_min_tokens_leaves_terminal_ids_out_without_renormalising() -> None:
    for seed in range(10):
        logits = TableModel(8, seed)
        params = BeamSearchParams(beam_width=3, min_tokens=4, stop_token_ids=(6,))
        got = beam(params, logits, vocab_size=8, eos=(7,), max_tokens=6)
        for outcome in got:
            assert outcome.done is not None
            assert len(outcome.tokens) >= 5 and not {6, 7} & set(outcome.tokens[:4])
            total = sum(
                float(log_softmax(logits(PROMPT + tuple(outcome.tokens[:k])))[token])
                for k, token in enumerate(outcome.tokens)
            )
            assert outcome.done.score == pytest.approx(total / len(outcome.tokens), abs=2e-5)


def test_logprobs_follow_each_hypothesis() -> None:
    logits = TableModel(12, 3)
    params = BeamSearchParams(beam_width=4, n=2, logprobs=3)
    for outcome in beam(params, logits, vocab_size=12, eos=(5,), max_tokens=6):
        assert outcome.done is not None
        assert len(outcome.logprobs) == len(outcome.tokens)
        for k, (token, entry) in enumerate(zip(outcome.tokens, outcome.logprobs, strict=True)):
            raw = log_softmax(logits(PROMPT + tuple(outcome.tokens[:k])))
            assert entry.logprob == pytest.approx(float(raw[token]), abs=1e-6)
            assert [t for t, _ in entry.top] == (-raw).argsort(kind="stable")[:3].tolist()
        total = sum(entry.logprob for entry in outcome.logprobs)
        assert outcome.done.score == pytest.approx(total / len(outcome.tokens), abs=1e-5)


def test_one_beam_that_nothing_can_end_is_greedy() -> None:
    logits = TableModel(7, 4)
    (outcome,) = beam(BeamSearchParams(beam_width=1, ignore_eos=True), logits, vocab_size=7, eos=(2,), max_tokens=9)
    for place, token in enumerate(outcome.tokens):
        assert token == logits(PROMPT + tuple(outcome.tokens[:place])).argmax()
    assert len(outcome.tokens) == 9


def test_stop_token_id_is_reported() -> None:
    logits = TableModel(4, 1)
    params = BeamSearchParams(beam_width=2, stop_token_ids=(3,), ignore_eos=True, early_stopping="never")
    outcomes = beam(params, logits, vocab_size=4, eos=(2,), max_tokens=8)
    assert any(outcome.done is not None and outcome.done.stop_reason == 3 for outcome in outcomes)
    assert all(3 not in outcome.tokens[:-1] for outcome in outcomes)


@given(
    vocab_size=st.integers(2, 9),
    width=st.integers(1, 8),
    max_tokens=st.integers(1, 6),
    seed=st.integers(0, 1000),
    early_stopping=st.sampled_from([True, False, "never"]),
    length_penalty=st.floats(-10, 10),
    min_tokens=st.integers(0, 6),
)
@settings(max_examples=150, deadline=None)
def test_any_shape_ends_within_its_branches(
    vocab_size: int,
    width: int,
    max_tokens: int,
    seed: int,
    early_stopping: bool | str,
    length_penalty: float,
    min_tokens: int,
) -> None:
    """Vocabularies smaller than the width included; the driver checks the action contract at every step."""
    params = BeamSearchParams(
        beam_width=width,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
        min_tokens=min(min_tokens, max_tokens),
    )
    got = beam_run(params, TableModel(vocab_size, seed), vocab_size=vocab_size, eos=(1,), max_tokens=max_tokens)
    assert got.num_steps <= max_tokens and got.most_alive <= width
    outputs = [tuple(outcome.tokens) for outcome in got.outcomes.values() if outcome.tokens]
    assert len(set(outputs)) == len(outputs)
    scores = [outcome.done.score for outcome in got.outcomes.values() if outcome.done]
    assert scores == sorted(scores, reverse=True)
