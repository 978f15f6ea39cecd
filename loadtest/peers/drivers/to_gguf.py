"""Convert a bf16 Llama or Qwen3 folder to GGUF, without a vocabulary: `to_gguf.py FOLDER FILE`."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import gguf  # type: ignore[import-not-found,unused-ignore]
import numpy as np

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def convert(folder: pathlib.Path, target: pathlib.Path) -> None:
    """Write `target`. Raises: ValueError for a model that is not bf16 Llama or Qwen3."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    architecture = config["model_type"]
    if architecture not in ("llama", "qwen3"):
        raise ValueError(f"{folder}: a {architecture} model; only llama and qwen3 are converted")
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    writer: Any = gguf.GGUFWriter(str(target), architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, bits in read_bf16(folder / "model.safetensors"):
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates neighbours in a Llama model, and halves, as transformers does, in a Qwen3 model
            count = heads if "q_proj" in name else kv_heads
            bits = bits.reshape(count, 2, dim // 2, -1).swapaxes(1, 2).reshape(bits.shape)
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Return a tensor's GGUF name."""
    if not name.startswith("model.layers."):
        return NAMES[name]
    _, _, number, rest = name.split(".", 3)
    return f"blk.{number}.{NAMES[rest]}"


def read_bf16(path: pathlib.Path) -> Any:
    """Yield (name, bits as uint16) of every tensor."""
    data = np.memmap(path, np.uint8, "r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + length].tobytes())
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} is {entry['dtype']}, only BF16 is converted")
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


if __name__ == "__main__":
    convert(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
