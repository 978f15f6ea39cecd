"""Expert layers of transformers models as grouped products; transformers' own loop over experts is the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from chatcache_kernels import cpu, reference
from torch import Tensor, nn

from chatcache.model.linear import Int8LinearFactory
from chatcache.model.runner import Runner
from chatcache.model.transformers.experts import replace_experts
from tests.model.drive import greedy
from tests.model.families import EXPERTS, FAMILIES, GATED, VOCAB, save_random

Load = Callable[..., Runner]
NUM_NEW = 64
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SIGMOID = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
SIGMOID |= {"first_k_dense_replace": 1, "head_dim": 16}

CONFIGS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: transformers.MixtralConfig(**GATED, **LOCAL),
    "olmoe": lambda: transformers.OlmoeConfig(**GATED, **EXPERTS),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(**GATED, **EXPERTS, shared_expert_intermediate_size=32),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**GATED, **EXPERTS, head_dim=16),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**GATED, **LOCAL),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(**GATED, **SIGMOID),
    "gpt-oss": lambda: transformers.GptOssConfig(**GATED, **LOCAL, head_dim=16, sliding_window=12, swiglu_limit=2.0),
    "gemma4": FAMILIES["gemma4-moe"].config,
    "ernie4-5-moe": lambda: transformers.Ernie4_5_MoeConfig(
        **GATED, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=1
    ),
    "dots1": lambda: transformers.Dots1Config(**GATED, **SIGMOID),
    "minimax-m2": lambda: transformers.MiniMaxM2Config(**GATED, **LOCAL, head_dim=16),
    "hunyuan-moe": lambda: transformers.HunYuanMoEV1Config(**GATED, num_experts=4, moe_topk=2, head_dim=16),
    "phimoe": lambda: transformers.PhimoeConfig(**GATED, **LOCAL),
}


ACTIVATIONS = {"gpt-oss": "clamped_silu_mul", "gemma4": "gelu_mul"}
"""Kernels of the families that do not have `silu_mul`."""


def expert_modules(model: nn.Module) -> list[Any]:
    """Return the expert modules of a transformers model."""
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def make_model(name: str, dtype: torch.dtype) -> Any:
    """Return a model with random weights whose expert modules run transformers' loop."""
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), experts_implementation="eager").eval()
    for weight in model.parameters():
        weight.data.normal_(0.0, 0.2)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_of_each_family_equal_transformers_loop(name: str, dtype: torch.dtype) -> None:
    model = make_model(name, dtype)
    experts = expert_modules(model)[-1]
    kernels = (reference, cpu)
    replaced = [copy.deepcopy(experts) for _ in kernels]
    assert [len(replace_experts(each, backend)) for each, backend in zip(replaced, kernels, strict=True)] == [1, 1]
    for each, backend in zip(replaced, kernels, strict=True):
        activate = each.forward.activate
        assert getattr(activate, "func", activate) is getattr(backend, ACTIVATIONS.get(name, "silu_mul"))
    for num_tokens in (1, 3, 64):
        x = torch.randn(num_tokens, 64).to(dtype)
        ids = torch.rand(num_tokens, 4).argsort(1)[:, :2]
        ids[: num_tokens // 2] = torch.tensor([2, 0])
        weights = torch.rand(num_tokens, 2).to(dtype)
        with torch.inference_mode():
            expected = experts(x, ids, weights).float()
            found = [each(x, ids, weights) for each in replaced]
        for got in found:
            assert got.dtype == dtype
            tolerance = (1e-5 if dtype == torch.float32 else 0.04) * float(expected.abs().max())
            assert float((got.float() - expected).abs().max()) <= tolerance


def test_replaced_weights_are_released_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a weight is packed, those packed before it are gone from the model."""
    model = make_model("qwen3-moe", torch.bfloat16)
    modules, left = expert_modules(model), []
    pack = cpu.pack_experts

    def count_and_pack(*args: Any, **options: Any) -> Any:
        left.append(sum(len(module._parameters) - list(module._parameters.values()).count(None) for module in modules))
        return pack(*args, **options)

    monkeypatch.setattr(cpu, "pack_experts", count_and_pack)
    replace_experts(model, cpu)
    assert left == list(range(2 * len(modules), 0, -1))
    assert all(module.gate_up_proj is None and module.down_proj is None for module in modules)


def test_int8_experts_are_near_those_of_the_model() -> None:
    model = make_model("qwen3-moe", torch.bfloat16)
    experts = expert_modules(model)[0]
    x, ids = torch.randn(40, 64).bfloat16(), torch.rand(40, 4).argsort(1)[:, :2]
    weights = torch.rand(40, 2).bfloat16()
    with torch.inference_mode():
        expected: Tensor = experts(x, ids, weights).float()
        size, int8 = sum(weight.nbytes for weight in experts.parameters()), Int8LinearFactory()
        (replaced,) = replace_experts(experts, cpu, int8)
        got = experts(x, ids, weights).float()
    assert replaced.up.form != "panels"
    assert 2 * int8.num_weights == size and int8.num_bytes < 0.6 * size
    assert 0 < float((got - expected).norm() / expected.norm()) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "cpu") for name in CONFIGS), ("gpt-oss", "reference"), ("glm4-moe", "reference")]
)
def test_families_with_experts_generate_what_transformers_generates(
    name: str, backend: str, load: Load, tmp_path: Any
) -> None:
    """Sixty-four greedy tokens of three prompts in one batch."""
    torch.manual_seed(sum(map(ord, name)))
    oracle = save_random(CONFIGS[name](), tmp_path)
    prompts = [torch.randint(0, VOCAB, (length,)).tolist() for length in (3, 11, 30)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert greedy(load(tmp_path, attention_backend=backend), prompts, NUM_NEW) == expected
