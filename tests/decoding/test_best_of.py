"""best_of against running all candidates and sorting them."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.decoding.strategy import make_strategy
from chatcache.types.actions import Candidates
from chatcache.types.request import GenerateRequest, SamplingParams
from chatcache.types.stats import ModelInfo
from tests.decoding.decode_driver import Run, TableModel, run

PROMPT = (1, 2, 3)
VOCAB_SIZE = 12
MODEL_INFO = ModelInfo(name="toy", digest="00", vocab_size=VOCAB_SIZE, max_model_len=99, eos_token_ids=(0,))


def sample(params: SamplingParams, model: TableModel, seed: int, shuffle: random.Random | None = None) -> Run:
    request = GenerateRequest(request_id="r", prompt=PROMPT, params=params)
    strategy = make_strategy(request, MODEL_INFO, seed=seed, max_tokens=9, token_bytes=None)
    return run(strategy, PROMPT, model, shuffle=shuffle)


@given(
    n=st.integers(1, 5),
    more=st.integers(1, 5),
    seed=st.integers(0, 9),
    model=st.integers(0, 30),
    logprobs=st.sampled_from([None, 0, 2]),
    temperature=st.sampled_from([0.0, 1.0, 2.0]),
    shuffle=st.none() | st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_the_best_of_all_candidates_come_back_in_order(
    n: int, more: int, seed: int, model: int, logprobs: int | None, temperature: float, shuffle: random.Random | None
) -> None:
    table = TableModel(VOCAB_SIZE, model)
    params = SamplingParams(n=n, best_of=n + more, temperature=temperature, logprobs=logprobs)
    got = sample(params, table, seed, shuffle)
    everything = sample(msgspec.structs.replace(params, n=n + more, best_of=None), table, seed)
    means = {
        index: one.done.score / len(one.tokens) for index, one in everything.outcomes.items() if one.done is not None
    }
    order = sorted(means, key=lambda index: (-means[index], index))[:n]
    assert sorted(got.outcomes) == list(range(n))
    for index, origin in enumerate(order):
        have, want = got.outcomes[index], everything.outcomes[origin]
        assert (have.tokens, have.logprobs) == (want.tokens, want.logprobs)
        assert have.done is not None and want.done is not None
        assert have.done.index == index and have.done.score == pytest.approx(want.done.score)
        assert (have.done.finish_reason, have.done.stop_reason) == (want.done.finish_reason, want.done.stop_reason)


def test_nothing_is_emitted_before_the_end() -> None:
    params = SamplingParams(n=1, best_of=2, ignore_eos=True)
    request = GenerateRequest(request_id="r", prompt=PROMPT, params=params)
    strategy = make_strategy(request, MODEL_INFO, seed=1, max_tokens=2, token_bytes=None)
    assert strategy.max_branches == 2 and len(strategy.draws(0)) == 2
    first = strategy.advance({0: (Candidates((5,), (-1.0,)), Candidates((6,), (-9.0,)))})
    assert first.outputs == () and len(first.actions) == 2
    last = strategy.advance({branch: (Candidates((7,), (-1.0,)),) for branch in (0, 1)})
    assert last.finished and len(last.outputs) == 2


def test_as_many_as_asked_for_stream_as_ever() -> None:
    params = SamplingParams(n=2, best_of=2, ignore_eos=True)
    request = GenerateRequest(request_id="r", prompt=PROMPT, params=params)
    strategy = make_strategy(request, MODEL_INFO, seed=1, max_tokens=5, token_bytes=None)
    assert strategy.advance({0: (Candidates((5,), (-1.0,)), Candidates((6,), (-9.0,)))}).outputs
