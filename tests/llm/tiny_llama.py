"""A tiny random Llama with a byte tokenizer, as a folder and as transformers' own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """256 bytes, then <eos> (256); the chat template marks roles in brackets."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": TEMPLATE}))


def make_model() -> Any:
    """Weights large enough that greedy tokens vary and near-ties are rare."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=257,
        max_position_embeddings=256,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
    )
    return LlamaForCausalLM(config).eval()


def write_folder(folder: Path, model: Any) -> None:
    """Everything a server needs of a model."""
    model.save_pretrained(folder)
    write_tokenizer(folder)
