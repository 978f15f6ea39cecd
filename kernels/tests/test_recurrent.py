"""causal_conv, gated_delta_rule and ssd_scan of every backend, against `reference` and the functions of transformers.

Rows have mixed lengths, some are empty, and slots are drawn at random; slots that no row with tokens names must be
bit-identical afterwards.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from chatcache_kernels import cpu, reference, triton
from chatcache_kernels.cpu import batch_invariant
from torch import Tensor
from torch.nn import functional
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

pytestmark = pytest.mark.usefixtures("poisoned_memory", "fresh_random")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LENGTHS = (3, 1, 0, 70, 1, 17, 0, 1)
INTERPRETED_LENGTHS = (3, 1, 0, 35)  # the interpreter is slow
NUM_SLOTS = 12


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call: `tokens` have one entry per token, `states` one per slot."""

    function: str
    tokens: Mapping[str, Tensor]
    weights: Mapping[str, object]
    states: Tensor

    def run(self, module: ModuleType, slots: Tensor, lengths: tuple[int, ...], states: Tensor) -> Tensor:
        """Run rows of given lengths on the first tokens; update `states`."""
        offsets = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0).to(slots.device, torch.int32)
        tokens = {name: values[: sum(lengths)] for name, values in self.tokens.items()}
        function: Callable[..., Tensor] = getattr(module, self.function)
        return function(**tokens, **self.weights, states=states, slots=slots, offsets=offsets)

    def select(self, indices: Tensor) -> Inputs:
        return replace(self, tokens={name: values[indices] for name, values in self.tokens.items()})

    def to(self, device: str) -> Inputs:
        tokens = {name: values.to(device) for name, values in self.tokens.items()}
        weights = {name: w.to(device) if isinstance(w, Tensor) else w for name, w in self.weights.items()}
        return Inputs(self.function, tokens, weights, self.states.to(device))


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def conv(num_tokens: int, dtype: torch.dtype, channels: int = 272, taps: int = 4, plain: bool = False) -> Inputs:
    """Draw inputs that are a part of a wider tensor, as a projection's output is split."""
    wide = noise(num_tokens, channels + 48, dtype=dtype)
    bias = None if plain else noise(channels, dtype=dtype)
    weights = {"weight": noise(channels, taps, dtype=dtype), "bias": bias, "activation": None if plain else "silu"}
    return Inputs("causal_conv", {"x": wide[:, :channels]}, weights, noise(NUM_SLOTS, channels, taps - 1, dtype=dtype))


def delta(
    num_tokens: int, dtype: torch.dtype, key_heads: int = 2, heads: int = 4, dim_k: int = 32, dim_v: int = 64,
    plain: bool = False,
) -> Inputs:  # fmt: skip
    q, k, v = torch.split(
        noise(num_tokens, 2 * key_heads * dim_k + heads * dim_v, dtype=dtype),
        [key_heads * dim_k, key_heads * dim_k, heads * dim_v], dim=1,
    )  # fmt: skip
    if plain:
        q, k = (functional.normalize(x.float(), dim=-1).to(dtype) for x in (q, k))
    tokens = {
        "q": q.reshape(-1, key_heads, dim_k),
        "k": k.reshape(-1, key_heads, dim_k),
        "v": v.reshape(-1, heads, dim_v),
        "g": -functional.softplus(noise(num_tokens, heads)) * torch.tensor([0.01, 0.3, 1.0, 20.0])[:heads],
        "beta": noise(num_tokens, heads, dtype=dtype).sigmoid(),
    }
    weights = {"scale": dim_k**-0.5, "l2_norm": not plain}
    return Inputs("gated_delta_rule", tokens, weights, noise(NUM_SLOTS, heads, dim_k, dim_v))


def ssd(
    num_tokens: int, dtype: torch.dtype, groups: int = 2, heads: int = 4, dim_p: int = 16, dim_n: int = 32,
    plain: bool = False,
) -> Inputs:  # fmt: skip
    x, b, c = torch.split(
        noise(num_tokens, heads * dim_p + 2 * groups * dim_n, dtype=dtype),
        [heads * dim_p, groups * dim_n, groups * dim_n], dim=1,
    )  # fmt: skip
    tokens = {
        "x": x.reshape(-1, heads, dim_p),
        "dt": functional.softplus(noise(num_tokens, heads)),
        "b": b.reshape(-1, groups, dim_n),
        "c": c.reshape(-1, groups, dim_n),
    }
    weights = {"a": -torch.tensor([0.02, 0.5, 2.0, 30.0])[:heads], "d": None if plain else noise(heads)}
    return Inputs("ssd_scan", tokens, weights, noise(NUM_SLOTS, heads, dim_p, dim_n))


Make = Callable[..., Inputs]
MAKERS: tuple[Make, ...] = (conv, delta, ssd)
SMALL: Mapping[str, tuple[Make, dict[str, int | bool]]] = {
    "conv": (conv, {}),
    "conv of 3 taps, plain": (conv, {"channels": 48, "taps": 3, "plain": True}),
    "conv of 20 channels": (conv, {"channels": 20, "taps": 2}),
    "delta": (delta, {}),
    "delta of heads of 16, plain": (delta, {"heads": 2, "dim_k": 16, "dim_v": 16, "plain": True}),
    "delta of heads of 8": (delta, {"key_heads": 1, "heads": 2, "dim_k": 8, "dim_v": 8}),
    "delta of heads of 6": (delta, {"key_heads": 1, "heads": 2, "dim_k": 6, "dim_v": 6}),
    "ssd": (ssd, {}),
    "ssd of heads of 8, plain": (ssd, {"groups": 1, "dim_p": 8, "dim_n": 16, "plain": True}),
    "ssd of heads of 6": (ssd, {"groups": 1, "dim_p": 6, "dim_n": 5}),
}
LARGE: Mapping[str, tuple[Make, dict[str, int | bool]]] = {
    "Qwen3.5 convolution": (conv, {"channels": 6144}),
    "Qwen3.5": (delta, {"key_heads": 2, "heads": 4, "dim_k": 128, "dim_v": 128}),
    "Bamba": (ssd, {"groups": 1, "heads": 4, "dim_p": 64, "dim_n": 128}),
    "Falcon-H1": (ssd, {"groups": 1, "heads": 4, "dim_p": 64, "dim_n": 256}),
}
CASES_OF_ALL_SIZES = [
    pytest.param(make, sizes, id=name, marks=[pytest.mark.slow] if name in LARGE else [])
    for name, (make, sizes) in {**SMALL, **LARGE}.items()
]
MODULES = [pytest.param(module, id=module.__name__.rpartition(".")[2]) for module in (cpu, batch_invariant, triton)]


def device_of(module: ModuleType, triton_device: str) -> str:
    return triton_device if module is triton else "cpu"


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare up to a fraction of the largest number: sums have another order."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    most = float(expected.float().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * most)


@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])])
@pytest.mark.parametrize(("make", "sizes"), CASES_OF_ALL_SIZES)
@pytest.mark.parametrize("module", MODULES)
def test_mixed_rows_equal_reference(
    module: ModuleType, make: Make, sizes: dict[str, int | bool], dtype: torch.dtype, triton_device: str
) -> None:
    device = device_of(module, triton_device)
    lengths = INTERPRETED_LENGTHS if module is triton else LENGTHS
    inputs = make(sum(lengths) + 5, dtype, **sizes).to(device)
    torch.set_num_threads(3)
    slots = torch.randperm(NUM_SLOTS, dtype=torch.int32)[: len(lengths)].to(device)
    expected_states, states = inputs.states.clone(), inputs.states.clone()
    expected = inputs.run(reference, slots, lengths, expected_states)
    out = inputs.run(module, slots, lengths, states)
    assert_close(out, expected, TOLERANCE[dtype])
    assert_close(states, expected_states, TOLERANCE[dtype])
    used = [slot for slot, length in zip(slots.tolist(), lengths, strict=True) if length]
    unused = [slot for slot in range(NUM_SLOTS) if slot not in used]
    assert torch.equal(states[unused], inputs.states[unused])
    assert not any(torch.equal(states[slot], inputs.states[slot]) for slot in used)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("module", MODULES)
def test_decode_steps_and_empty_batches_equal_reference(module: ModuleType, make: Make, triton_device: str) -> None:
    device = device_of(module, triton_device)
    inputs = make(5, torch.float32).to(device)
    slots = torch.tensor([7, 2, 11, 1, 4], dtype=torch.int32, device=device)
    expected, states = inputs.states.clone(), inputs.states.clone()
    for lengths in ((1,) * 5, (1,) * 5, (0,) * 5, (1, 0, 1, 0, 0), ()):
        want = inputs.run(reference, slots[: len(lengths)], lengths, expected)
        assert_close(inputs.run(module, slots[: len(lengths)], lengths, states), want, 3e-5)
        assert_close(states, expected, 3e-5)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("module", [cpu, batch_invariant, pytest.param(triton, marks=pytest.mark.slow)])
def test_divided_prompts_equal_whole_prompts(module: ModuleType, make: Make, triton_device: str) -> None:
    """Divide a row at random positions; `cpu` and `cpu.batch_invariant` give equal bits, in any batch."""
    total, draw = 100, random.Random(int(os.environ["CHATCACHE_TEST_SEED"]))
    device = device_of(module, triton_device)
    inputs = make(total, torch.float32).to(device)
    slot = torch.tensor([3], dtype=torch.int32, device=device)
    whole_states = inputs.states.clone()
    whole = inputs.run(module, slot, (total,), whole_states)
    for _ in range(1 if module is triton else 3):
        cuts = sorted({0, total, 1, *draw.sample(range(1, total), 6)})
        states, parts = inputs.states.clone(), []
        for first, end in pairwise(cuts):
            other = draw.randrange(total)  # another row of the batch
            indices = torch.tensor([other, *range(first, end)])
            slots = torch.tensor([9, 3], dtype=torch.int32, device=device)
            parts.append(inputs.select(indices.to(device)).run(module, slots, (1, end - first), states)[1:])
        if module is triton:
            assert_close(torch.cat(parts), whole, 3e-5)
            assert_close(states[3], whole_states[3], 3e-5)
        else:
            assert torch.equal(torch.cat(parts), whole)
            assert torch.equal(states[3], whole_states[3])


@pytest.mark.parametrize("module", [reference, *MODULES])
@pytest.mark.parametrize("form", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_gated_delta_rule_equals_transformers(form: str, module: ModuleType, triton_device: str) -> None:
    device = device_of(module, triton_device)
    inputs = delta(40, torch.float32).to(device)
    states = inputs.states.clone()
    out = inputs.run(module, torch.tensor([5], device=device, dtype=torch.int32), (40,), states)
    tokens = {name: values[None] for name, values in inputs.tokens.items()}
    for name in ("q", "k"):
        tokens[name] = tokens[name].repeat_interleave(2, dim=2)
    expected, state = getattr(modeling_qwen3_next, form)(
        tokens["q"], tokens["k"], tokens["v"], g=tokens["g"], beta=tokens["beta"],
        initial_state=inputs.states[5][None], output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert_close(out, expected[0], 3e-5)
    assert_close(states[5], state[0], 3e-5)


@pytest.mark.parametrize("module", [reference, cpu, batch_invariant, pytest.param(triton, marks=pytest.mark.slow)])
def test_ssd_scan_equals_transformers(module: ModuleType, triton_device: str) -> None:
    """The chunked form of transformers, and its recurrent form from the state in the middle of a prompt."""
    total, cut = (24, 19) if module is triton else (40, 33)
    inputs = ssd(total, torch.float32).to(device_of(module, triton_device))
    x, dt, b, c = (inputs.tokens[name][None] for name in ("x", "dt", "b", "c"))
    a, d, start = inputs.weights["a"], inputs.weights["d"], inputs.states[5][None]
    assert isinstance(a, Tensor) and isinstance(d, Tensor)
    expected, end = modeling_mamba2.mamba2_chunk_scan(
        x, dt, a, b, c, chunk_size=16, D=d, initial_states=start, return_final_states=True
    )
    states, slot = inputs.states.clone(), torch.tensor([5], device=x.device, dtype=torch.int32)
    out = inputs.run(module, slot, (total,), states)
    assert_close(out, expected[0], 3e-5)
    assert_close(states[5], end[0], 3e-5)
    states = inputs.states.clone()
    parts = [inputs.run(module, slot, (cut,), states)]
    state = states[5][None].clone()
    for index in range(cut, total):
        step = torch.tensor([index], device=x.device)
        parts.append(inputs.select(step).run(module, slot, (1,), states))
        one = modeling_mamba2.mamba2_selective_state_update(
            state, x[:, index], dt[:, index, :, None], a[None, :, None, None], b[:, index], c[:, index], d[:, None]
        )
        assert_close(parts[-1], one, 3e-5)
    assert_close(states[5], state[0], 3e-5)
    assert_close(torch.cat(parts), expected[0], 3e-5)


@pytest.mark.parametrize("module", [reference, *MODULES])
def test_causal_conv_equals_transformers(module: ModuleType, triton_device: str) -> None:
    device = device_of(module, triton_device)
    inputs = conv(40, torch.float32).to(device)
    weight, bias = inputs.weights["weight"], inputs.weights["bias"]
    states = torch.zeros_like(inputs.states)
    slot = torch.tensor([5], device=device, dtype=torch.int32)
    out = inputs.run(module, slot, (39,), states)
    x = inputs.tokens["x"].T[None]
    expected = modeling_mamba2.causal_conv1d_fn(x[..., :39], weight, bias, activation="silu")
    assert_close(out, expected[0].T, 3e-5)
    assert torch.equal(states[5], x[0, :, 36:39])
    last = inputs.select(torch.tensor([39], device=device)).run(module, slot, (1,), states)
    cache = functional.pad(x[..., 36:39], (1, 0))
    assert_close(last[0], modeling_mamba2.causal_conv1d_update(x[..., 39:], cache, weight, bias, "silu")[0, :, 0], 3e-5)


@pytest.mark.parametrize("module", [cpu, pytest.param(triton, marks=pytest.mark.slow)])
def test_repeated_keys_do_not_lose_precision(module: ModuleType, triton_device: str) -> None:
    """Feed one token again and again, without decay: the equations of a chunk are then as bad as they get."""
    device = device_of(module, triton_device)
    inputs = delta(200, torch.float32).select(torch.zeros(200, dtype=torch.int64)).to(device)
    tokens = {
        **inputs.tokens,
        "g": torch.zeros_like(inputs.tokens["g"]),
        "beta": torch.ones_like(inputs.tokens["beta"]),
    }
    inputs, slot = replace(inputs, tokens=tokens), torch.tensor([1], dtype=torch.int32, device=device)
    expected_states, states = inputs.states.clone(), inputs.states.clone()
    expected = inputs.run(reference, slot, (200,), expected_states)
    assert_close(inputs.run(module, slot, (200,), states), expected, 3e-5)
    assert_close(states, expected_states, 3e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 16), (9, 4), (0, 32)])
def test_delta_gates_equal_torch(num_tokens: int, num_heads: int, dtype: torch.dtype) -> None:
    both = noise(num_tokens, 3 * num_heads, dtype=dtype) * 30  # softplus and sigmoid at both ends of their ranges
    a, b = both[:, num_heads : 2 * num_heads], both[:, :num_heads]
    decay, dt_bias = -torch.rand(num_heads), torch.randn(num_heads)
    g, beta = cpu.recurrent.delta_gates(a, b, decay, dt_bias)
    torch.testing.assert_close(g, decay * functional.softplus(a.float() + dt_bias))
    torch.testing.assert_close(beta, b.float().sigmoid())
