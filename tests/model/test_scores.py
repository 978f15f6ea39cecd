"""Prompt log-probabilities equal transformers', for any chunks and parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chatcache.model.eager import empty_result
from chatcache.model.runner import Runner
from chatcache.model.sampling import sampler as sampler_module
from chatcache.model.sampling.device_sampler import DeviceSampler
from chatcache.model.sampling.sampler import HostPromptScorer, Sampler, part_sizes, scored_token_indices
from chatcache.types.plan import Rows, Scores, StepResult
from tests.model.drive import CPU, KERNELS, Driver, make_draws
from tests.model.families import VOCAB, Sample

Get = Callable[[str], Sample]
Load = Callable[..., Runner]


def scores_of(rows: list[int], num_top: list[int], targets: list[int]) -> Scores:
    return Scores(*(np.array(column, np.int32) for column in (rows, num_top, targets)))


def rows_of(counts: list[int]) -> Rows:
    zeros = np.zeros(len(counts), np.int32)
    return Rows(zeros, zeros, np.array(counts, np.int32), np.zeros(sum(counts), np.int32))


def check(result: StepResult, cell: int, sample: Sample, before: tuple[int, ...], target: int, num_top: int) -> None:
    assert result.scores is not None and result.score_tokens is not None and result.score_logprobs is not None
    want = sample.logprobs(before)
    assert result.scores[cell] == pytest.approx(float(want[target]), abs=1e-4)
    best = want.topk(num_top)
    assert result.score_tokens[cell, :num_top].tolist() == best.indices.tolist()
    np.testing.assert_allclose(result.score_logprobs[cell, :num_top], best.values, atol=1e-4)
    assert (result.score_tokens[cell, num_top:] == -1).all()
    assert np.isneginf(result.score_logprobs[cell, num_top:]).all()


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # the native decoder; transformers' own code
@pytest.mark.parametrize("part_rows", [1, 4, 1000])
def test_prompt_scores_equal_transformers(
    family: str, part_rows: int, sample_of: Get, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two scored rows and one that is only drawn.

    The second row's prompt arrives in two chunks.
    """
    monkeypatch.setattr(sampler_module, "PART_BYTES", part_rows * VOCAB * 4)
    monkeypatch.setattr(sampler_module, "CHUNK_BYTES", 3 * VOCAB * 4)
    sample = sample_of(family)
    first, second, other = sample.prompts[1][:9], sample.prompts[2][:12], sample.prompts[0]
    driver = Driver(load(sample.folder))
    draws = make_draws([{"row": 0, "num_top": 3}, {"row": 1, "num_top": 3}])
    targets = [*first[1:], -1, *second[1:8]]
    result = driver.feed({0: first, 1: other, 2: second[:7]}, draws, scores_of([0, 2], [2, 0], targets))
    for place in range(8):
        check(result, place, sample, first[: place + 1], first[place + 1], 2)
    assert result.scores is not None and np.isnan(result.scores[8])
    for place in range(7):
        check(result, 9 + place, sample, second[: place + 1], second[place + 1], 0)
    for draw, prompt in enumerate((first, other)):
        assert result.top_tokens[draw].tolist() == sample.logprobs(prompt).topk(3).indices.tolist()
    result = driver.feed({2: second[7:]}, make_draws([{}]), scores_of([0], [5], [*second[8:], -1]))
    for place in range(7, 11):
        check(result, place - 7, sample, second[: place + 1], second[place + 1], 5)
    assert result.tokens[0, 0] == sample.logprobs(second).argmax()


def test_scored_row_without_draws_has_scores(sample_of: Get, load: Load) -> None:
    sample = sample_of("llama")
    prompt = sample.prompts[1][:6]
    result = Driver(load(sample.folder)).feed({0: prompt[:5]}, make_draws([]), scores_of([0], [1], list(prompt[1:])))
    assert result.tokens.size == 0 and not result.faults
    check(result, 4, sample, prompt[:5], prompt[5], 1)


def test_scored_token_indices_follow_the_scored_rows() -> None:
    assert scored_token_indices(rows_of([3, 1, 2]), scores_of([2, 0], [0, 0], [0] * 5)).tolist() == [4, 5, 0, 1, 2]
    assert scored_token_indices(rows_of([3]), scores_of([], [], [])).tolist() == []


@pytest.mark.parametrize(("kind", "device"), [(Sampler, CPU), (DeviceSampler, KERNELS)], ids=["cpu", "triton"])
def test_non_finite_logits_and_ids_out_of_range_score_nan(
    kind: type[Sampler] | type[DeviceSampler], device: torch.device
) -> None:
    scorer = kind(3, device).prompt_scorer(rows_of([4]), scores_of([0], [2], [1, 2, 99, 0]))
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, torch.nan, 1.0], [0.0, 0.0, 0.0], [-torch.inf, 0.0, 0.0]])
    scorer.fill(logits[:1].to(device))
    scorer.fill(logits[1:].to(device))
    result = scorer.add_to(empty_result())
    assert result.scores is not None and result.score_tokens is not None and result.score_logprobs is not None
    assert np.isnan(result.scores).tolist() == [False, True, True, False]
    assert np.isneginf(result.scores[3])
    assert result.score_tokens.tolist() == [[2, 1], [-1, -1], [-1, -1], [1, 2]]
    np.testing.assert_allclose(result.scores[0], logits[0].log_softmax(-1)[1], rtol=1e-6)
    np.testing.assert_allclose(result.score_logprobs[0], logits[0].log_softmax(-1)[[2, 1]], rtol=1e-6)
    np.testing.assert_allclose(result.score_logprobs[3], np.log([0.5, 0.5]), rtol=1e-6)


@pytest.mark.parametrize(
    ("num_first", "num_tokens", "most"), [(0, 10, 4), (3, 10, 4), (7, 10, 4), (2, 2, 4), (0, 0, 4)]
)
def test_part_sizes_are_bounded_and_complete(
    num_first: int, num_tokens: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "PART_BYTES", most * 100 + 99)
    sizes = part_sizes(num_first, num_tokens, 100)
    assert sum(sizes) == num_tokens and sizes[0] >= num_first
    assert all(size <= max(most, num_first) for size in sizes)


class Recorder(TorchDispatchMode):
    """Notes the largest float32 or int64 tensor that any operation makes, in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float32, torch.int64):
                self.largest = max(self.largest, tensor.numel() * tensor.element_size())
        return out


@pytest.mark.parametrize("spread", [1.0, 0.0])
@pytest.mark.slow
def test_scoring_memory_stays_bounded_for_a_large_vocabulary(spread: float) -> None:
    """No tensor exceeds CHUNK_BYTES (twice that for int64 keys).

    300 tokens x 150,000 words would be 180 MB of float32.
    """
    vocab_size, num_tokens = 150_000, 300
    row = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(1)).mul_(spread).to(torch.bfloat16)
    targets = np.random.default_rng(0).integers(0, vocab_size, num_tokens)
    scorer = HostPromptScorer(rows_of([num_tokens]), scores_of([0], [3], targets.tolist()), vocab_size)
    with Recorder() as seen:
        scorer.fill(row.expand(num_tokens, vocab_size))
    assert 0 < seen.largest <= 2 * sampler_module.CHUNK_BYTES
    want = row.float().log_softmax(-1)[0].numpy()
    np.testing.assert_allclose(scorer.values, want[targets], rtol=1e-5)
