"""Write trained weights as a folder that `transformers` loads."""

import json
import pathlib
from collections.abc import Mapping

import torch
from safetensors.torch import save_file
from torch import Tensor

from chatcache.builtin.network import Shape
from chatcache.builtin.tokens import SPECIAL


def export(weights: Mapping[str, Tensor], shape: Shape, folder: pathlib.Path) -> None:
    """Write weights (bf16), `config.json` and `generation_config.json`; the files appear "
    "under their names when whole."""
    pad, _, eos = (SPECIAL.index(token) for token in SPECIAL)  # the trainer numbers them first, in this order
    tensors = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    whole = folder / "model.safetensors"
    partial = whole.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(whole)
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": False, "max_new_tokens": 256}
    for name, content in (
        ("config.json", shape.to_hf(bos=pad, eos=eos, pad=pad)),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
