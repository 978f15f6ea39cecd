"""The Triton sampler equals the CPU sampler: noise, draws, and no waiting for the device."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from chatcache_kernels.triton.sampling import LaunchConfig
from chatcache_kernels.triton.sampling_ops import gumbel, random_bits
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from chatcache.model.sampling.device_sampler import DeviceSampler
from chatcache.model.sampling.ops import draw_keys, token_base
from chatcache.model.sampling.ops import gumbel as cpu_gumbel
from chatcache.model.sampling.sampler import Sampler
from chatcache.types.plan import Draws, LogitEdit, LogitMask, StepResult, edit_table
from tests.model.drive import CPU, KERNELS, make_draws

SEED = int(os.environ["CHATCACHE_TEST_SEED"])

SMALL = LaunchConfig(chunk=128, filter_chunk=64, block=64)
FEW, MANY = (LaunchConfig(rows=rows) if triton.knobs.runtime.interpret else LaunchConfig() for rows in (8, 256))


@triton.jit  # type: ignore[untyped-decorator]
def noise_kernel(base_ptr, bits_ptr, noise_ptr, low, high, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    base = tl.load(base_ptr + at)
    tl.store(bits_ptr + at, random_bits(base, low, high))
    tl.store(noise_ptr + at, gumbel(base, low, high))


def random_draws(rng: np.random.Generator, count: int, num_rows: int, **columns: Any) -> tuple[NDArray[np.intp], Draws]:
    """Return draws at temperatures around 1, of random keys, and their rows of logits."""
    draws = make_draws([{}] * count)
    values = {
        "seed": rng.integers(0, 2**64, count, dtype=np.uint64),
        "lane": rng.integers(0, 64, count, dtype=np.int32),
        "position": rng.integers(0, 2**31, count, dtype=np.int32),
        "temperature": rng.choice([0.6, 1.0, 1.4], count).astype(np.float32),
        **columns,
    }
    fields = {name: values.get(name, getattr(draws, name)) for name in draws.__slots__}
    return rng.integers(0, num_rows, count), Draws(**fields)


def check_draws(got: StepResult, want: StepResult, logits: torch.Tensor, index: NDArray[np.intp], draws: Draws) -> None:
    """Draws differ only where two tokens' scores tie within rounding; log-probabilities by ulps."""
    assert not got.faults and not want.faults
    differ = np.flatnonzero(got.tokens[:, 0] != want.tokens[:, 0])
    assert len(differ) <= 2, f"{len(differ)} of {len(index)} draws differ"
    base = token_base(logits.shape[1], CPU)
    for draw in differ:
        low, high = draw_keys(draws.seed[[draw]], draws.lane[[draw]], draws.position[[draw]])
        noise = cpu_gumbel(base, torch.from_numpy(low), torch.from_numpy(high))[0].double()
        scores = logits[index[draw]].double() / float(draws.temperature[draw]) + noise
        assert abs(scores[got.tokens[draw, 0]] - scores[want.tokens[draw, 0]]) < 1e-5
    same = np.setdiff1d(np.arange(len(index)), differ)
    np.testing.assert_allclose(got.logprobs[same], want.logprobs[same], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [2048, pytest.param(151_936, marks=pytest.mark.slow)])
def test_noise_kernel_matches_its_definition(vocab_size: int) -> None:
    """Against numpy, in 64-bit integers, as `ops` defines it."""
    rng = np.random.default_rng(SEED)
    seeds, lanes, positions = (rng.integers(0, most, 2) for most in (2**63, 2**31, 2**31))
    lows, highs = draw_keys(seeds.astype(np.uint64), lanes.astype(np.int32), positions.astype(np.int32))
    base = token_base(vocab_size, CPU)
    padded = torch.nn.functional.pad(base, (0, -vocab_size % 2048))
    for low, high in zip(lows.tolist(), highs.tolist(), strict=True):
        on_device = padded.to(KERNELS)
        bits, noise = torch.empty_like(on_device), torch.empty(len(padded), device=KERNELS)
        noise_kernel[(len(padded) // 2048,)](on_device, bits, noise, low, high, BLOCK=2048)
        bits, noise = bits.cpu(), noise.cpu()
        x = np.uint64(0xFFFFFFFF) & (base.numpy().view(np.uint32).astype(np.uint64) ^ np.uint64(low % 2**32))
        x = x * np.uint64(high % 2**32) % np.uint64(2**32)
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
            x = (x ^ x >> np.uint64(shift)) * np.uint64(factor) % np.uint64(2**32)
        assert np.array_equal(bits[:vocab_size].numpy(), (x & np.uint64(0x7FFFFFFF)).astype(np.int32))
        uniform = (bits[:vocab_size].float() + 0.5).double().numpy() * 2.0**-31  # float32, as defined
        uniform = np.minimum(uniform, 1 - 2.0**-24)
        np.testing.assert_allclose(noise[:vocab_size], -np.log(-np.log1p(-uniform)), rtol=1e-6, atol=4e-7)


@pytest.mark.parametrize("num_draws", [1_500, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.slow
def test_draws_equal_the_cpu_sampler(num_draws: int) -> None:
    """Keys, temperatures and logits fresh every run; a fifth of the draws filtered."""
    rng = np.random.default_rng(SEED)
    vocab_size, num_rows = 1_500, 300
    logits = torch.from_numpy(rng.normal(0, 2, (num_rows, vocab_size)).astype(np.float32))
    host, device = Sampler(vocab_size, CPU), DeviceSampler(vocab_size, KERNELS, MANY)
    few = num_draws // 5
    filters = {
        "top_k": rng.choice([0, 1, 2, 40, 1499], few).astype(np.int32),
        "top_p": rng.choice([1.0, 0.95, 0.3], few).astype(np.float32),
        "min_p": rng.choice([0.0, 0.0, 0.05], few).astype(np.float32),
    }
    for count, columns in ((num_draws - few, {}), (few, filters)):
        index, draws = random_draws(rng, count, num_rows, **columns)
        check_draws(
            device.sample(logits.to(KERNELS), index, draws), host.sample(logits, index, draws), logits, index, draws
        )


@pytest.mark.parametrize(
    "vocab_size",
    [
        pytest.param(49_152, marks=pytest.mark.slow),
        pytest.param(151_936, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_draws_over_large_vocabularies_equal_the_cpu_sampler(vocab_size: int) -> None:
    rng = np.random.default_rng(SEED)
    logits = torch.from_numpy(rng.normal(0, 2.5, (3, vocab_size)).astype(np.float32)).to(torch.bfloat16)
    top_k, top_p = np.array([0, 0, 0, 20, 0, 1000], np.int32), np.array([1, 1, 1, 1, 0.9, 0.9], np.float32)
    index, draws = random_draws(rng, 6, 3, top_k=top_k, top_p=top_p, num_top=np.array([3, 0, 0, 0, 0, 0], np.int32))
    host, device = Sampler(vocab_size, CPU), DeviceSampler(vocab_size, KERNELS, FEW)
    want, got = host.sample(logits, index, draws), device.sample(logits.to(KERNELS), index, draws)
    check_draws(got, want, logits, index, draws)
    np.testing.assert_array_equal(got.top_tokens, want.top_tokens)


@pytest.mark.parametrize("top_p", [1.0, pytest.param(0.8, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_frequencies_are_within_four_sigma_of_softmax(top_p: float) -> None:
    """12 tokens x 2 cases: 4 sigma is passed by chance once in 600 runs, so the keys are fixed."""
    logits = torch.tensor([[1.2, 0.1, -0.4, 2.0, 0.7, -1.0, 0.3, 1.1, -2.0, 0.0, 0.5, -0.2]])
    probs = logits[0].double().softmax(-1).numpy()
    order = np.argsort(-probs)
    kept = np.zeros_like(probs)
    before = np.cumsum(probs[order]) - probs[order]
    kept[order[before < top_p]] = probs[order[before < top_p]]
    kept /= kept.sum()
    count = 4_000
    draws = make_draws([{"temperature": 1.0, "seed": 5, "position": place, "top_p": top_p} for place in range(count)])
    tokens = DeviceSampler(12, KERNELS, MANY).sample(logits.to(KERNELS), np.zeros(count, np.intp), draws).tokens[:, 0]
    counts = np.bincount(tokens, minlength=12)
    assert (np.abs(counts - count * kept) <= 4 * np.sqrt(count * kept * (1 - kept))).all()


def mixed(rng: np.random.Generator, vocab_size: int, num_rows: int) -> tuple[torch.Tensor, NDArray[np.intp], Draws]:
    """Return draws of all kinds at once, over logits full of ties."""
    count = 40
    logits = torch.from_numpy(rng.normal(0, 1.5, (num_rows, vocab_size)).astype(np.float32)).to(torch.bfloat16)
    edits = []
    for draw in rng.choice(count, 9, replace=False):
        ids = rng.choice(vocab_size, 30, replace=False).astype(np.int32)
        add = rng.choice([-np.inf, 0.0, 3.0, -1.0], 30).astype(np.float32)
        edits.append(LogitEdit(int(draw), edit_table(ids, rng.uniform(0.5, 2, 30), add)))
    words = rng.integers(0, 2**32, (7, vocab_size // 32 - 1), dtype=np.uint32)
    masked = rng.choice(count, 7, replace=False)
    masks = [LogitMask(int(draw), row) for draw, row in zip(masked, words, strict=True)]
    index, draws = random_draws(
        rng,
        count,
        num_rows,
        width=rng.choice([1, 1, 2, 9, 70], count).astype(np.int32),
        temperature=rng.choice([0.0, 0.5, 1.0, 1.7], count).astype(np.float32),
        top_k=rng.choice([0, 0, 1, 30], count).astype(np.int32),
        top_p=rng.choice([1.0, 1.0, 0.7, 0.99, 0.0], count).astype(np.float32),
        min_p=rng.choice([0.0, 0.0, 0.1], count).astype(np.float32),
        num_top=rng.choice([0, 3, 20], count).astype(np.int32),
        edits=tuple(edits),
        masks=tuple(masks),
    )
    return logits, index, draws


@pytest.mark.parametrize("vocab_size", [pytest.param(320, marks=pytest.mark.slow), 333])
@pytest.mark.slow
def test_mixed_draws_equal_the_cpu_sampler(vocab_size: int) -> None:
    """Chunks smaller than the vocabulary, so that every merge has something to merge."""
    rng = np.random.default_rng(SEED)
    logits, index, draws = mixed(rng, vocab_size, 5)
    want = Sampler(vocab_size, CPU).sample(logits, index, draws)
    got = DeviceSampler(vocab_size, KERNELS, SMALL).sample(logits.to(KERNELS), index, draws)
    assert got.faults == want.faults
    for name in ("tokens", "top_tokens"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    for name in ("logprobs", "top_logprobs", "perturbed", "raw_logprobs"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_row_with_chunks_of_very_different_magnitude_equals_the_cpu_sampler() -> None:
    """One chunk is far below the others, one has no finite logit."""
    rng = np.random.default_rng(SEED)
    logits = torch.from_numpy(rng.normal(0, 1.5, (5, 520)).astype(np.float32))
    logits[:, 128:256] -= 4.0
    logits[1:, 256:384] = -torch.inf
    for top_p in (1.0, 0.9):
        columns = {"top_p": np.full(256, top_p, np.float32), "num_top": np.full(256, 2, np.int32)}
        index, draws = random_draws(rng, 256, 5, **columns)
        got = DeviceSampler(520, KERNELS, SMALL).sample(logits.to(KERNELS), index, draws)
        check_draws(got, Sampler(520, CPU).sample(logits, index, draws), logits, index, draws)


class Waits(TorchDispatchMode):
    """Notes operations for which a GPU would make the host wait."""

    NAMES = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal", "_to_copy")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        options = kwargs or {}
        moves = name == "_to_copy" and "device" in options and not options.get("non_blocking")
        if moves or (name in self.NAMES and name != "_to_copy"):
            self.seen.append(str(func))
        return func(*args, **options)


@pytest.mark.slow
def test_enqueue_does_not_wait_for_the_device() -> None:
    logits, index, draws = mixed(np.random.default_rng(SEED), 320, 5)
    logits = logits.to(KERNELS)
    sampler = DeviceSampler(320, KERNELS, SMALL)
    with Waits() as waits:
        pending = sampler.enqueue(logits, index, draws)
    assert not waits.seen
    assert pending.result().tokens.shape == (40, 70)
    with Waits() as waits:
        (logits.float() > 0).nonzero()
    assert waits.seen, "the watch can see"


def test_tokens_of_single_draws_are_stored_in_their_slots() -> None:
    rng = np.random.default_rng(SEED)
    logits = torch.randn(4, 320, device=KERNELS)
    index, draws = random_draws(rng, 6, 4, width=np.array([1, 2, 1, 1, 1, 1], np.int32))
    last = torch.full((9,), -7, dtype=torch.int32, device=KERNELS)
    result = DeviceSampler(320, KERNELS).enqueue(logits, index, draws, np.array([3, 5, -1, 0, 8, -1], np.int32), last)
    tokens = result.result().tokens[:, 0].tolist()
    assert last.tolist() == [tokens[3], -7, -7, tokens[0], -7, -7, -7, -7, tokens[4]]
