"""Sampling and n-best: every candidate equals itself alone; rules and reports are honoured."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.decoding.strategy import make_strategy
from chatcache.types.actions import DrawSpec, Finish
from chatcache.types.request import GenerateRequest, SamplingParams
from chatcache.types.stats import ModelInfo
from tests.decoding.decode_driver import Logits, Outcome, Run, TableModel, draw, edited, log_softmax, run

PROMPT = (1, 2, 3, 4)
VOCAB_SIZE = 16
BYTES = tuple(bytes([0x61 + i]) for i in range(VOCAB_SIZE))
MODEL_INFO = ModelInfo(name="toy", digest="00", vocab_size=VOCAB_SIZE, max_model_len=999, eos_token_ids=(0,))


def sample(
    params: SamplingParams, logits: Logits, *, seed: int = 0, max_tokens: int = 12, shuffle: random.Random | None = None
) -> Run:
    request = GenerateRequest(request_id="r", prompt=PROMPT, params=params)
    strategy = make_strategy(request, MODEL_INFO, seed=seed, max_tokens=max_tokens, token_bytes=BYTES)
    return run(strategy, PROMPT, logits, shuffle=shuffle)


def alone(params: SamplingParams, logits: Logits, *, seed: int, lane: int, max_tokens: int) -> Outcome:
    """Sample one candidate with the plainest loop there is: whole outputs, formulas, no strategy."""
    outcome = Outcome()
    text, score = "", 0.0
    spec = DrawSpec(seed=seed % 2**64, lane=lane, temperature=params.temperature, num_top=params.logprobs or 0)
    while outcome.done is None:
        context = PROMPT + tuple(outcome.tokens)
        values = logits(context).astype(float)
        for token in range(VOCAB_SIZE):
            if token in context:
                values[token] *= 1 / params.repetition_penalty if values[token] > 0 else params.repetition_penalty
            count = outcome.tokens.count(token)
            values[token] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
            values[token] += (params.logit_bias or {}).get(token, 0.0)
        if len(outcome.tokens) < params.min_tokens:
            values[[*(() if params.ignore_eos else (0,)), *params.stop_token_ids]] = float("-inf")
        (token,) = draw(values.astype("float32"), spec, len(context)).tokens
        score += float(log_softmax(logits(context))[token])
        outcome.tokens.append(token)
        text += chr(0x61 + token)
        enough = len(outcome.tokens) >= params.min_tokens
        matched = [stop for stop in params.stop if text.endswith(stop) and enough]
        if token == 0 and not params.ignore_eos:
            outcome.done = Finish(lane, "stop", None, score)
        elif token in params.stop_token_ids:
            outcome.done = Finish(lane, "stop", token, score)
        elif matched:
            outcome.done = Finish(lane, "stop", max(matched, key=len), score)
        elif len(outcome.tokens) == max_tokens:
            outcome.done = Finish(lane, "length", None, score)
    return outcome


@given(
    n=st.integers(1, 6),
    seed=st.integers(-(2**63), 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    repetition=st.sampled_from([1.0, 1.0, 1.3]),
    presence=st.sampled_from([0.0, 0.0, 0.8]),
    frequency=st.sampled_from([0.0, 0.0, -0.6]),
    bias=st.none() | st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, 1.5]), max_size=3),
    min_tokens=st.integers(0, 5),
    ignore_eos=st.booleans(),
    stop=st.lists(st.sampled_from(["b", "cd", "ef", "d"]), max_size=2, unique=True),
    stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2),
    model=st.integers(0, 50),
    shuffle=st.none() | st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_each_candidate_equals_itself_alone(
    n: int,
    seed: int,
    temperature: float,
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float] | None,
    min_tokens: int,
    ignore_eos: bool,
    stop: list[str],
    stop_token_ids: list[int],
    model: int,
    shuffle: random.Random | None,
) -> None:
    """Whatever the siblings do and in whatever order branches progress."""
    params = SamplingParams(
        n=n,
        temperature=temperature,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop=tuple(stop),
        stop_token_ids=tuple(stop_token_ids),
    )
    logits = TableModel(VOCAB_SIZE, model)
    got = sample(params, logits, seed=seed, shuffle=shuffle)
    assert sorted(got.outcomes) == list(range(n))
    for lane, outcome in got.outcomes.items():
        want = alone(params, logits, seed=seed, lane=lane, max_tokens=12)
        assert outcome.tokens == want.tokens
        assert outcome.done is not None and want.done is not None
        assert replace(outcome.done, score=0) == replace(want.done, score=0)
        assert outcome.done.score == pytest.approx(want.done.score, abs=1e-4)
        assert outcome.logprobs == []


def test_lanes_differ_and_seeds_differ() -> None:
    logits = TableModel(VOCAB_SIZE, 1, sharpness=0.5)
    params = SamplingParams(n=8, ignore_eos=True)
    first = {tuple(outcome.tokens) for outcome in sample(params, logits, seed=1).outcomes.values()}
    other = {tuple(outcome.tokens) for outcome in sample(params, logits, seed=2).outcomes.values()}
    assert len(first) == 8 and not first & other


def test_logprobs_are_raw() -> None:
    logits = TableModel(VOCAB_SIZE, 2)
    params = SamplingParams(temperature=0.3, logit_bias={5: 9.0}, logprobs=2, ignore_eos=True)
    outcome = sample(params, logits).outcomes[0]
    for place, (token, entry) in enumerate(zip(outcome.tokens, outcome.logprobs, strict=True)):
        raw = log_softmax(logits(PROMPT + tuple(outcome.tokens[:place])))
        assert entry.logprob == pytest.approx(float(raw[token]))
        assert [t for t, _ in entry.top] == (-raw).argsort(kind="stable")[:2].tolist()
    assert outcome.done is not None
    assert outcome.done.score == pytest.approx(sum(entry.logprob for entry in outcome.logprobs))


def test_logprobs_zero_reports_the_chosen_token_only() -> None:
    outcome = sample(SamplingParams(logprobs=0, ignore_eos=True), TableModel(VOCAB_SIZE, 2)).outcomes[0]
    assert len(outcome.logprobs) == len(outcome.tokens) and all(entry.top == () for entry in outcome.logprobs)


def test_filters_reach_the_draw() -> None:
    params = SamplingParams(n=3, top_k=-1, top_p=0.5, min_p=0.1, temperature=0.4, logprobs=7)
    request = GenerateRequest(request_id="r", prompt=PROMPT, params=params)
    strategy = make_strategy(request, MODEL_INFO, seed=-1, max_tokens=5, token_bytes=None)
    want = DrawSpec(seed=2**64 - 1, temperature=0.4, top_k=0, top_p=0.5, min_p=0.1, num_top=7)
    assert strategy.draws(0) == tuple(replace(want, lane=lane) for lane in range(3))
    assert strategy.max_branches == 3 and not strategy.lockstep
    with pytest.raises(KeyError):
        strategy.draws(1)


def test_the_root_may_end_before_its_siblings() -> None:
    """The root's own candidate stops at its first token; the others still fork off its pages."""
    logits = TableModel(VOCAB_SIZE, 4, sharpness=0.2)
    params = SamplingParams(n=6, stop_token_ids=())
    runs = [sample(params, logits, seed=seed) for seed in range(60)]
    first = [[run.outcomes[lane].tokens == [0] for lane in range(6)] for run in runs]
    assert any(ends[0] and not all(ends) for ends in first)
    assert any(not ends[0] and any(ends) for ends in first)


def test_a_candidate_of_one_token() -> None:
    got = sample(SamplingParams(n=4, max_tokens=1), TableModel(VOCAB_SIZE, 4), max_tokens=1)
    assert got.num_steps == 1 and all(len(outcome.tokens) == 1 for outcome in got.outcomes.values())


def test_bias_of_minus_100_bans_in_practice_and_min_tokens_always() -> None:
    logits = TableModel(VOCAB_SIZE, 6)
    params = SamplingParams(logit_bias={0: 100.0}, min_tokens=4, n=3)
    for outcome in sample(params, logits).outcomes.values():
        assert 0 not in outcome.tokens[:4] and outcome.tokens[4] == 0
    banned = msgspec.structs.replace(params, logit_bias={0: -100.0})
    assert all(0 not in outcome.tokens for outcome in sample(banned, logits).outcomes.values())


def test_the_driver_edits_as_the_plan_says() -> None:
    """The oracle's own arithmetic: positive logits are divided, negative ones multiplied, then shifted."""
    logits = TableModel(VOCAB_SIZE, 0)(PROMPT)
    params = SamplingParams(repetition_penalty=2.0)
    request = GenerateRequest(request_id="r", prompt=(int(logits.argmax()), int(logits.argmin())), params=params)
    (spec,) = make_strategy(request, MODEL_INFO, seed=0, max_tokens=5, token_bytes=None).draws(0)
    changed = edited(logits, spec)
    assert changed[logits.argmax()] == logits.max() / 2 and changed[logits.argmin()] == logits.min() * 2


@pytest.mark.parametrize(("top_k", "drawn_with"), [(VOCAB_SIZE - 1, VOCAB_SIZE - 1), (VOCAB_SIZE, 0), (2**31 - 1, 0)])
def test_top_k_that_keeps_every_token_filters_nothing(top_k: int, drawn_with: int) -> None:
    request = GenerateRequest(request_id="r", prompt=PROMPT, params=SamplingParams(top_k=top_k))
    strategy = make_strategy(request, MODEL_INFO, seed=1, max_tokens=4, token_bytes=BYTES)
    assert [spec.top_k for spec in strategy.draws(0)] == [drawn_with]
