"""Convert a bf16 folder of a type in `ARCHITECTURES` to GGUF, without a vocabulary: `to_gguf.py FOLDER FILE`."""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

import gguf  # type: ignore[import-not-found,unused-ignore]
import numpy as np

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "qwen3_5_text": "qwen35"}
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
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
FLOAT32 = ("ssm_conv1d.weight", "ffn_gate_inp.weight")  # matrices that llama.cpp reads in float32


def convert(folder: pathlib.Path, target: pathlib.Path) -> None:
    """Write `target`. Raises: ValueError for a model that is not bf16, or of another type."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise ValueError(f"{folder}: a {kind} model; only {', '.join(ARCHITECTURES)} are converted")
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    rope = config.get("rope_parameters") or config
    num_experts = config.get("num_local_experts") or config.get("num_experts") or 0
    writer: Any = gguf.GGUFWriter(str(target), ARCHITECTURES[kind])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    rotated = int(dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    if kind == "qwen3_moe":
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if kind == "qwen3_5_text":
        third = rotated // 6  # text has the same position in each section
        writer.add_rope_dimension_sections([rotated // 2 - 2 * third, third, third, 0])
        _add_delta_rule(writer, config)
    experts: dict[str, dict[int, Any]] = {}
    for name, bits in read_bf16(folder / "model.safetensors"):
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates neighbours in a Llama model, and halves, as transformers does, in a Qwen3 model
            count = heads if "q_proj" in name else kv_heads
            bits = bits.reshape(count, 2, dim // 2, -1).swapaxes(1, 2).reshape(bits.shape)
        if found := EXPERTS.fullmatch(name):
            layer, expert, part = found.groups()
            one = experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})
            one[int(expert)] = bits
            continue
        _add(writer, gguf_name(name, kind), bits, kind)
    for name, parts in experts.items():
        _add(writer, name, np.stack([parts[expert] for expert in range(num_experts)]), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_delta_rule(writer: Any, config: dict[str, Any]) -> None:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if keys != values:
        raise ValueError("only models with as many key heads as value heads in the delta rule are converted")
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(keys)
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * values)
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)


def _add(writer: Any, name: str, bits: Any, kind: str) -> None:
    """Add a tensor: matrices in bf16, others in float32."""
    if bits.ndim > 1 and not name.endswith(FLOAT32):
        raw = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        return
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    if name.endswith("ssm_conv1d.weight"):
        values = values[:, 0]
    elif name.endswith("ssm_a"):
        values = -np.exp(values)
    elif kind == "qwen3_5_text" and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
        values = values + 1.0  # transformers stores these norms around zero
    writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))


def gguf_name(name: str, kind: str) -> str:
    """Return a tensor's GGUF name in a model of type `kind`."""
    if not name.startswith("model.layers."):
        return NAMES[name]
    _, _, number, rest = name.split(".", 3)
    if kind == "qwen3_5_text" and rest == "post_attention_layernorm.weight":
        return f"blk.{number}.post_attention_norm.weight"
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
