"""Recurrent and convolution layers: states in slots give what transformers computes over whole sequences."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.model.runner import Runner
from chatcache.model.states import StateShape, StateStore
from chatcache.types.events import Failed, Started, Tokens
from chatcache.types.plan import Pools, Rows, Scores, StepPlan
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from tests.model.drive import Driver, greedy, make_draws
from tests.model.families import NUM_NEW, RECURRENT, VOCAB, Sample

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
TOLERANCE = 1e-4

Get = Callable[[str], Sample]
Load = Callable[..., Runner]


@dataclass(frozen=True)
class Loaded:
    """A model with states and its runner."""

    sample: Sample
    runner: Runner


FAST = ("qwen3-5", "lfm2", "falcon-h1")  # one of each kind of layer
PARAMS = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT]


@pytest.fixture(scope="module", params=PARAMS)
def loaded(request: pytest.FixtureRequest, sample_of: Get, load: Load) -> Loaded:
    sample = sample_of(request.param)
    return Loaded(sample, load(sample.folder, max_num_seqs=8))


def test_every_family_keeps_states_and_few_page_layers(loaded: Loaded) -> None:
    capacity, geometry = loaded.runner.capacity(), loaded.runner._network.geometry
    assert capacity.num_states > 8
    assert capacity.state_bytes == geometry.state_bytes > 0
    assert sum(store.num_layers for store in geometry.stores) == sum(layer is not None for layer in geometry.layers)
    assert loaded.runner._states is not None
    assert all(not tensor.any() for tensor in loaded.runner._states.tensors)  # the warm-up left no trace


@pytest.mark.parametrize("chunk", [None, 7])
def test_greedy_tokens_in_one_batch_equal_transformers(loaded: Loaded, chunk: int | None) -> None:
    answers = greedy(loaded.runner, loaded.sample.prompts, NUM_NEW, chunk)
    assert tuple(map(tuple, answers)) == loaded.sample.answers


def test_any_division_of_a_prompt_gives_the_log_probabilities_of_transformers(loaded: Loaded) -> None:
    noise = np.random.default_rng(SEED)
    prompt = list(loaded.sample.prompts[2])
    cuts = sorted({0, len(prompt), *noise.integers(1, len(prompt), 5).tolist()})
    driver = Driver(loaded.runner)
    for first, end in pairwise(cuts):
        result = driver.feed({0: prompt[first:end]}, make_draws([{"row": 0, "num_top": VOCAB}]))
        check_logprobs(loaded.sample, prompt[:end], result.top_tokens[0], result.top_logprobs[0])


def test_forks_diverge_from_a_copy_of_the_state(loaded: Loaded) -> None:
    prompt = list(loaded.sample.prompts[1])
    driver = Driver(loaded.runner)
    driver.feed({0: prompt})
    driver.fork(0, 1)
    driver.fork(0, 2)
    tails = {0: [3], 1: [5, 8, 1], 2: [9, 9]}
    result = driver.feed(tails, make_draws([{"row": row, "num_top": VOCAB} for row in range(3)]))
    for row, tail in tails.items():
        check_logprobs(loaded.sample, prompt + tail, result.top_tokens[row], result.top_logprobs[row])


def test_scores_and_pools_update_states_once(loaded: Loaded) -> None:
    prompt = list(loaded.sample.prompts[1])
    driver = Driver(loaded.runner)
    targets = np.array([*prompt[1:], -1], np.int32)
    zero = np.zeros(1, np.int32)
    pools = Pools(zero, zero + len(prompt))
    result = driver.feed({0: prompt}, scores=Scores(zero, zero, targets), pools=pools)
    assert result.scores is not None
    assert result.pooled is not None
    with torch.inference_mode():
        out = loaded.sample.oracle(torch.tensor([prompt]), output_hidden_states=True)
    want = out.logits[0].log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
    np.testing.assert_allclose(result.scores[:-1], want, atol=TOLERANCE)
    again = driver.feed({0: [7]}, make_draws([{"row": 0, "num_top": VOCAB}]))
    check_logprobs(loaded.sample, [*prompt, 7], again.top_tokens[0], again.top_logprobs[0])


def test_saved_and_swapped_states_continue_as_before(loaded: Loaded) -> None:
    """A snapshot taken after a step restores it; one that was in host memory continues the same."""
    prompt, runner = list(loaded.sample.prompts[0]), loaded.runner
    driver = Driver(runner)
    driver.feed({0: prompt})
    runner.execute(states_plan(saves=[(1, 4)]))
    driver.feed({0: [1, 2]})
    runner.execute(states_plan(out=[(4, 0)]))
    runner.execute(states_plan(copies=[(0, 4)]))
    runner.execute(states_plan(back=[(0, 5)]))
    driver.fork(0, 1)  # with the pages of the prompt and the state before the last two tokens
    driver.length[1] = len(prompt)
    driver._state_copies = [(5, 2)]
    result = driver.feed({1: [4]}, make_draws([{"row": 0, "num_top": VOCAB}]))
    check_logprobs(loaded.sample, [*prompt, 4], result.top_tokens[0], result.top_logprobs[0])


@pytest.mark.parametrize("has_begun", [False, True])
def test_memory_error_never_updates_a_state_twice(
    sample_of: Get, load: Load, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """A step that runs out of memory before any layer is split; one that ran some layers fails."""
    sample = sample_of("qwen3-5")
    runner = load(sample.folder, max_num_seqs=8)
    kernels, prompt = runner._kernels, list(sample.prompts[1])
    real = kernels.gated_delta_rule if has_begun else runner._network.forward

    def fail(*args: Any, **options: Any) -> torch.Tensor:
        tokens = args[0]
        if len(tokens) > 8:
            raise torch.OutOfMemoryError(f"{len(tokens)} tokens")
        out: torch.Tensor = real(*args, **options)
        return out

    driver = Driver(runner)
    if has_begun:
        monkeypatch.setattr(kernels, "gated_delta_rule", fail)
        with pytest.raises(torch.OutOfMemoryError):
            driver.feed({0: prompt})
        return
    monkeypatch.setattr(runner._network, "forward", fail)
    result = driver.feed({0: prompt}, make_draws([{"row": 0, "num_top": VOCAB}]))
    check_logprobs(sample, prompt, result.top_tokens[0], result.top_logprobs[0])


def test_store_copies_slots_and_rejects_unknown_ones() -> None:
    shapes = [StateShape((3,), torch.float32), StateShape((2, 2), torch.bfloat16), StateShape((3,), torch.float32)]
    store = StateStore(shapes, 4, 2, torch.device("cpu"))
    assert [tuple(tensor.shape) for tensor in store.tensors] == [(5, 3), (5, 2, 2), (5, 3)]
    for number, tensor in enumerate(store.tensors):
        tensor[1] = number + 1
    store.copy(np.array([(1, 2), (0, 3)], np.int32))
    for number, tensor in enumerate(store.tensors):
        assert (tensor[2] == number + 1).all()
        assert not tensor[[0, 3]].any()
    for pairs in ([(1, 0)], [(1, 4)], [(-1, 1)]):
        with pytest.raises(ValueError, match="a plan names state"):
            store.copy(np.array(pairs, np.int32))
    with pytest.raises(ValueError, match="a plan names state 0"):
        store.step(np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="host state 2"):
        store.check_swaps(np.array([(1, 2)], np.int32), np.zeros((0, 2), np.int32))


def states_plan(copies: Any = (), saves: Any = (), out: Any = (), back: Any = ()) -> StepPlan:
    """Return a plan without rows that moves states."""
    none = np.zeros((0, 3), np.int32)
    empty = np.zeros(0, np.int32)
    copies, saves, out, back = (np.array(pairs, np.int32).reshape(-1, 2) for pairs in (copies, saves, out, back))
    return StepPlan(
        0, none, none, none[:, :2], Rows(empty, empty, empty, empty), make_draws([]),
        state_copies=copies, state_saves=saves, state_swaps_out=out, state_swaps_in=back,
    )  # fmt: skip


def check_logprobs(sample: Sample, tokens: list[int], top_tokens: Any, top_logprobs: Any) -> None:
    """Compare the log-probabilities of the token after `tokens` with those of transformers."""
    got = np.empty(VOCAB, np.float32)
    got[top_tokens] = top_logprobs
    np.testing.assert_allclose(got, sample.logprobs(tuple(tokens)), atol=TOLERANCE)


def answer(engine: Engine, prompts: Sequence[Sequence[int]], params: Params) -> tuple[list[list[int]], int]:
    """Answer prompts together; return the tokens of the first candidate of each, and how many were cached."""
    found: list[list[int]] = [[] for _ in prompts]
    num_cached = 0
    for index, prompt in enumerate(prompts):
        engine.add(GenerateRequest(request_id=str(index), prompt=tuple(prompt), params=params))
    while engine.has_work():
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Started):
                num_cached += event.num_cached_tokens
            if isinstance(event, Tokens) and not event.index:
                found[int(event.request_id)] += event.token_ids
    return found, num_cached


@pytest.mark.slow
def test_conversation_continues_from_the_state_at_the_end_of_its_turn(loaded: Loaded) -> None:
    """The second turn reads the first from the cache, and its tokens are those of transformers."""
    engine = Engine(loaded.runner, loaded.runner.model_info, EngineConfig(max_num_batched_tokens=24))
    greedy_params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    first, _ = answer(engine, loaded.sample.prompts, greedy_params)
    assert first == [list(tokens[:12]) for tokens in loaded.sample.answers]
    turns = [[*prompt, *tokens, 3, 1, 4] for prompt, tokens in zip(loaded.sample.prompts, first, strict=True)]
    second, num_cached = answer(engine, turns, greedy_params)
    assert num_cached >= sum(map(len, loaded.sample.prompts))
    for turn, tokens in zip(turns, second, strict=True):
        assert tokens == generate(loaded.sample.oracle, turn, 12)


@pytest.mark.slow
def test_beams_equal_transformers_beams(loaded: Loaded) -> None:
    engine = Engine(loaded.runner, loaded.runner.model_info, EngineConfig(max_num_batched_tokens=24))
    params = BeamSearchParams(beam_width=4, max_tokens=16, ignore_eos=True)
    for _ in range(2):  # the second time from the cache
        found, _ = answer(engine, loaded.sample.prompts[:2], params)
        wanted = [generate(loaded.sample.oracle, list(prompt), 16, num_beams=4) for prompt in loaded.sample.prompts[:2]]
        assert found == wanted


def generate(oracle: Any, prompt: list[int], num_new: int, **options: Any) -> list[int]:
    """Return what transformers generates without sampling."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, pad_token_id=0, **options
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_deterministic_logits_do_not_depend_on_batch_or_chunks(name: str, sample_of: Get, load: Load) -> None:
    sample = sample_of(name)
    runner = load(sample.folder, max_num_seqs=8, deterministic=True, attention_backend="auto")
    whole = bits(runner, [{0: sample.prompts[1], 1: sample.prompts[0]}])
    chunks = [{0: sample.prompts[1][:3]}, {0: sample.prompts[1][3:9], 1: sample.prompts[0][:4]}]
    assert bits(runner, [{1: sample.prompts[0]}])[1] == whole[1]
    assert bits(runner, [*chunks, {1: sample.prompts[0][4:], 0: sample.prompts[1][9:]}]) == whole


def bits(runner: Runner, steps: Sequence[Mapping[int, Sequence[int]]]) -> dict[int, list[tuple[int, float]]]:
    """Return the log-probabilities of the whole vocabulary after each slot's tokens."""
    driver, found = Driver(runner), {}
    for grants in steps:
        result = driver.feed(grants, make_draws([{"row": row, "num_top": VOCAB} for row in range(len(grants))]))
        for row, slot in enumerate(grants):
            found[slot] = list(zip(result.top_tokens[row].tolist(), result.top_logprobs[row].tolist(), strict=True))
    return found
