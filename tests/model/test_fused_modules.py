"""Norms and MLPs of transformers models in single kernels give what the modules give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chatcache_kernels import cpu
from torch import nn

from chatcache.model.transformers.modules import FusedMLP, FusedNorm, fuse_modules
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
