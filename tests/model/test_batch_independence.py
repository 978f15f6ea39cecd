"""A draw has the same bits alone, in any batch, and with any number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from chatcache.model.runner import Runner
from chatcache.model.sampling.ops import Filters, draw_keys, gumbel, log_sum_exp, row_sum, token_base, top_tokens
from chatcache.model.sampling.sampler import Sampler
from chatcache.types.plan import Draws
from tests.model.drive import Driver, make_draws
from tests.model.families import Sample

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
CPU = torch.device("cpu")
BATCHES = (1, 2, 3, 7, 32)


@pytest.fixture(autouse=True, params=[1, 3], ids=["1-thread", "3-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("vocab_size", [199, pytest.param(50003, marks=pytest.mark.slow)])
def test_row_reductions_and_noise_do_not_depend_on_other_rows(vocab_size: int) -> None:
    """Use sizes on both sides of torch's threshold for threads.

    The widths are not multiples of the vector size.
    """
    x, base = torch.randn(33, vocab_size) * 4, token_base(vocab_size, CPU)
    number = np.arange(33, dtype=np.int32)
    low, high = (torch.from_numpy(word) for word in draw_keys(number.astype(np.uint64), number, number))
    ids = torch.randperm(vocab_size)[:50].expand(33, -1)
    functions: dict[str, Callable[[slice], torch.Tensor]] = {
        "log_sum_exp": lambda rows: log_sum_exp(x[rows]),
        "row_sum": lambda rows: row_sum(x[rows].exp()),
        "gumbel": lambda rows: gumbel(base, low[rows], high[rows]),
        "gumbel of some": lambda rows: gumbel(base[ids[rows]], low[rows], high[rows]),
    }
    for name, function in functions.items():
        alone = torch.cat([function(slice(i, i + 1)) for i in range(33)])
        for size in BATCHES:
            for first in (0, 1):
                rows = slice(first, first + size)
                assert torch.equal(function(rows), alone[rows]), (name, size)
    assert torch.equal(gumbel(base, low, high).gather(-1, ids), gumbel(base[ids], low, high))


def random_draws(noise: np.random.Generator, number: int) -> list[dict[str, Any]]:
    """Return draws of every kind, one a row."""
    return [
        {
            "row": row,
            "width": int(noise.choice([1, 1, 1, 5])),
            "seed": int(noise.integers(2**63)),
            "lane": int(noise.integers(9)),
            "position": int(noise.integers(999)),
            "temperature": float(noise.choice([0.0, 0.7, 1.0, 5.0])),
            "top_k": int(noise.choice([0, 0, 3, 300, 700])),
            "top_p": float(noise.choice([1.0, 0.9, 0.99, 0.5])),
            "min_p": float(noise.choice([0.0, 0.0, 0.05])),
            "num_top": int(noise.choice([0, 3])),
        }
        for row in range(number)
    ]


def bits(result: Any, draw: int) -> list[bytes]:
    """Return a draw's answer as bytes, cut to the cells that hold something."""
    cells: list[NDArray[Any]] = [result.tokens, result.logprobs, result.top_tokens, result.top_logprobs]
    if result.perturbed is not None and result.perturbed.size:
        cells.append(result.perturbed)
    return [row[: np.count_nonzero(np.isfinite(row) & (row != -1))].tobytes() for row in (cell[draw] for cell in cells)]


@pytest.mark.parametrize("vocab_size", [1024, pytest.param(40000, marks=pytest.mark.slow)])
def test_draw_has_the_same_bits_in_any_batch(vocab_size: int) -> None:
    noise = np.random.default_rng(SEED)
    sampler = Sampler(vocab_size, CPU)
    logits = torch.from_numpy(noise.normal(0, 3, (32, vocab_size)).astype(np.float32))
    specs = random_draws(noise, 32)

    def sample(rows: NDArray[np.intp]) -> Any:
        draws = make_draws([{**specs[row], "row": place} for place, row in enumerate(rows)])
        return sampler.sample(logits[rows], np.arange(len(rows)), draws)

    alone = [[cell for cell in bits(sample(np.array([row])), 0) if cell] for row in range(32)]
    for size in BATCHES[1:]:
        rows = noise.permutation(32)[:size]
        result = sample(rows)
        for place, row in enumerate(rows):
            assert [cell for cell in bits(result, place) if cell] == alone[row], f"seed {SEED}: {specs[row]}"


def test_top_p_does_not_depend_on_the_number_of_candidates() -> None:
    """A larger top_k of another draw enlarges the candidates of all draws.

    Each top_p here is exactly at a threshold where one more bit in the sums would add a token.
    """
    filters = Filters(2000, CPU)
    scaled = torch.randn(64, 2000, generator=torch.Generator().manual_seed(SEED)) * 2
    scaled -= scaled.amax(-1, keepdim=True)
    weight = top_tokens(scaled, 256)[0].masked_fill(torch.arange(256) >= 200, -torch.inf).exp()
    before = (weight.cumsum(-1) - weight) / weight.cumsum(-1)[:, -1:]
    draws: Draws = make_draws([{"top_k": 200, "top_p": before[row, 90], "temperature": 1.0} for row in range(64)])
    few, many = (filters._cut(scaled, draws, size)[0] for size in (256, 1000))
    assert few.isfinite().sum(-1).tolist() == [90] * 64, f"seed {SEED}"
    assert torch.equal(few, many[:, :256]), f"seed {SEED}"


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_runner_draws_the_same_tokens_for_a_seed_in_any_batch(
    backend: str, sample_of: Callable[[str], Sample], load: Callable[..., Runner]
) -> None:
    """Logits may differ in their last bits without deterministic mode; the draws do not."""
    sample = sample_of("llama")
    runner = load(sample.folder, attention_backend=backend)
    noise = np.random.default_rng(SEED)
    prompts = [sample.prompts[3][: int(noise.integers(1, 40))] for _ in range(max(BATCHES))]

    def continued(chosen: NDArray[np.intp]) -> list[list[int]]:
        driver, outputs = Driver(runner), [[] for _ in chosen]  # type: tuple[Driver, list[list[int]]]
        fed = {slot: prompts[number] for slot, number in enumerate(chosen)}
        for _ in range(6):
            specs = [
                {"row": slot, "seed": int(number), "position": driver.length.get(slot, 0) + len(fed[slot])}
                | {"temperature": 1.0, "top_p": 0.9 if number % 2 else 1.0, "top_k": 30 if number % 3 else 0}
                for slot, number in enumerate(chosen)
            ]
            tokens = driver.feed(fed, make_draws(specs)).tokens[:, 0].tolist()
            fed = {slot: (token,) for slot, token in enumerate(tokens)}
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
        return outputs

    alone = [continued(np.array([number]))[0] for number in range(max(BATCHES))]
    assert len({token for output in alone for token in output}) > 50
    for size in BATCHES[1:]:
        chosen = noise.permutation(max(BATCHES))[:size]
        assert continued(chosen) == [alone[number] for number in chosen], f"seed {SEED}"
