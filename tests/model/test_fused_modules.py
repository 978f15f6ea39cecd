"""Norms, MLPs and attention layers of transformers models in few kernels give what the modules give.

That whole models still give the tokens of transformers is tested by `test_parity` and `test_families`.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chatcache_kernels import cpu
from torch import nn

from chatcache.config import EngineConfig
from chatcache.model.loading.loader import load_model
from chatcache.model.transformers.joined_attention import JoinedAttention
from chatcache.model.transformers.modules import FusedMLP, FusedNorm, PackedModule, fuse_modules, replace_modules
from tests.model.families import FAMILIES, RECURRENT, save_random


@pytest.mark.parametrize(
    ("name", "num_norms", "num_mlps"), [("qwen3", 13, 3), ("qwen3-5", 11, 4), ("gemma2", 13, 3), ("opt", 0, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_are_replaced_where_the_kernels_agree(
    name: str, num_norms: int, num_mlps: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Qwen3.5 and Gemma add 1 to the weights of their norms; Gemma's MLP has GELU; OPT has neither."""
    save_random({**FAMILIES, **RECURRENT}[name].config(), tmp_path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        want = model(ids).logits.float()
        fuse_modules(model, cpu)
        got = model(ids).logits.float()

    def count(kind: type[nn.Module]) -> int:
        return sum(isinstance(each, kind) for each in model.modules())

    assert (count(FusedNorm), count(FusedMLP)) == (num_norms, num_mlps)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert (got - want).norm() <= tolerance * want.norm()


JOINED: dict[str, tuple[int, set[str]]] = {
    "gemma2": (3, {"halves"}),
    "gemma3": (3, {"halves"}),
    "gpt-oss-sinks": (3, {"half"}),
    "olmo3": (4, {"halves"}),
    "smollm3": (3, {"halves", "none"}),
    "cohere2": (4, {"repeated_pairs", "none"}),
    "glm4": (3, {"pairs"}),
    "exaone4": (4, {"halves", "none"}),
    "nemotron": (3, {"halves"}),
    "qwen3-5": (1, {"halves"}),
    "lfm2": (2, {"halves"}),
    "gemma4-key-is-value": (2, {"halves"}),
    "gemma4-shared-layers": (2, {"halves"}),
    "ministral3": (0, set()),
    "llama4": (0, set()),
    "deepseek-v3": (0, set()),
}
"""The attention layers that are joined, and their rotations. Gemma 4 has layers that hand their keys on to others, and
Ministral 3 and Llama 4 scale queries by their positions: those stay as they are."""


@pytest.mark.parametrize("name", JOINED)
def test_attention_is_joined_where_it_gives_the_same(name: str, tmp_path: Path) -> None:
    save_random({**FAMILIES, **RECURRENT}[name].config(), tmp_path)
    runner = load_model(EngineConfig(model=str(tmp_path), dtype="float32", kv_memory_bytes=2**22, max_num_seqs=2))
    modules = list(runner._network._model.modules())  # type: ignore[attr-defined]
    joined = [each for each in modules if isinstance(each, JoinedAttention)]
    assert (len(joined), {each.rotation for each in joined}) == JOINED[name]
    assert all(isinstance(each.qkv_proj, PackedModule) for each in joined)


def test_large_scores_in_bfloat16_do_not_keep_attention_from_being_joined(tmp_path: Path) -> None:
    """Rounded differently, scores of several tens give other weights, in both layers."""
    oracle = save_random(FAMILIES["gemma3"].config(), tmp_path)
    for layer in oracle.model.layers:
        layer.self_attn.q_norm.weight.data += 60.0
    oracle.save_pretrained(tmp_path)
    runner = load_model(EngineConfig(model=str(tmp_path), dtype="bfloat16", kv_memory_bytes=2**22, max_num_seqs=2))
    modules = runner._network._model.modules()  # type: ignore[attr-defined]
    assert sum(isinstance(each, JoinedAttention) for each in modules) == 3


def test_a_replaced_module_is_released_before_the_next_one() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    alive = [weakref.ref(each) for each in model]
    left: list[int] = []

    def make(module: nn.Module) -> nn.Module:
        gc.collect()
        left.append(sum(each() is not None for each in alive))
        return nn.Identity()

    replace_modules(model, make)
    assert left == [3, 2, 1] and not list(model.parameters())
