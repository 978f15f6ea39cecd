"""The text model of a composite folder answers as the composite model of transformers does for text."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from chatcache.errors import ModelFolderError
from chatcache.model.decoder import Decoder
from chatcache.model.runner import Runner
from chatcache.model.transformers.towers import PREFIXES
from tests.model.drive import Driver, greedy, make_draws
from tests.model.families import EXPERTS, GATED, VOCAB, make_sample
from tests.model.test_folders import set_config

Load = Callable[..., Runner]
NUM_NEW = 16
TEXT = {**GATED, "head_dim": 16}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = {**VISION, "image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
QWEN_TOKENS = {"image_token_id": 190, "video_token_id": 191, "vision_start_token_id": 192, "vision_end_token_id": 193}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}


def _qwen3_vl() -> Any:
    vision = {**QWEN_VISION, "deepstack_visual_indexes": [0]}
    return transformers.Qwen3VLConfig(text_config={**TEXT, **SECTIONS}, vision_config=vision, **QWEN_TOKENS)


def _qwen2_5_vl() -> Any:
    return transformers.Qwen2_5_VLConfig(text_config={**GATED, **SECTIONS}, vision_config=QWEN_VISION, **QWEN_TOKENS)


def _mistral3(kind: str) -> Any:
    text = {**TEXT, "model_type": kind, "sliding_window": None}
    vision = {**PATCHES, "model_type": "pixtral", "head_dim": 16}
    return transformers.Mistral3Config(
        text_config=text, vision_config=vision, tie_word_embeddings=False, image_token_index=190
    )


def _gemma3() -> Any:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    text = {**TEXT, "sliding_window": 12, "query_pre_attn_scalar": 16, "layer_types": kinds}
    vision = {**PATCHES, "vision_use_head": False}
    return transformers.Gemma3Config(
        text_config={**text, "tie_word_embeddings": True}, vision_config=vision, mm_tokens_per_image=4,
        image_token_index=190, boi_token_index=191, eoi_token_index=192,
    )  # fmt: skip


def _llava() -> Any:
    vision = {**PATCHES, "model_type": "siglip_vision_model"}
    return transformers.LlavaConfig(
        text_config={**GATED, "model_type": "llama"}, vision_config=vision, image_token_index=190
    )


def _gemma4() -> Any:
    text = {
        **TEXT, "global_head_dim": 32, "sliding_window": 12, "num_kv_shared_layers": 0, "pad_token_id": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB, "tie_word_embeddings": True,
    }  # fmt: skip
    vision = {**VISION, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 32}
    return transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=190, boi_token_id=191,
        eoi_token_id=192, audio_token_id=193, boa_token_id=194, video_token_id=195,
    )  # fmt: skip


def _llama4() -> Any:
    text = {**TEXT, "intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 16}
    sizes = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    return transformers.Llama4Config(text_config=text, vision_config={**PATCHES, **sizes})


def _qwen3_5(kind: Any, **experts: int) -> Any:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    text = {**TEXT, **heads, **sizes, **experts, "layer_types": kinds}
    return kind(text_config=text, vision_config=QWEN_VISION, **QWEN_TOKENS)


COMPOSITES: dict[str, tuple[Callable[[], Any], bool]] = {
    "qwen3-vl": (_qwen3_vl, True),
    "qwen2.5-vl": (_qwen2_5_vl, True),
    "mistral3": (lambda: _mistral3("mistral"), True),
    "ministral3": (lambda: _mistral3("ministral3"), False),
    "gemma3": (_gemma3, False),
    "gemma4": (_gemma4, False),
    "llama4": (_llama4, False),
    "qwen3.5": (lambda: _qwen3_5(transformers.Qwen3_5Config), False),
    "qwen3.5-moe": (
        lambda: _qwen3_5(transformers.Qwen3_5MoeConfig, **EXPERTS, shared_expert_intermediate_size=32),
        False,
    ),
    "llava": (_llava, True),
}
"""Name -> config, and whether its text model runs natively."""


def save_composite(name: str, folder: Path) -> Any:
    """Save a composite model with random weights, in several shards; return its transformers object."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(sum(map(ord, name)))
    config = COMPOSITES[name][0]()
    oracle = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    norms_at = 0.0 if "gemma" in name else 1.0
    with torch.no_grad():
        for tensor, weight in oracle.named_parameters():
            is_norm = weight.ndim == 1 and tensor.endswith("weight")
            weight.normal_(norms_at if is_norm else 0.0, 0.2)
    oracle.save_pretrained(folder, max_shard_size="100KB")
    return oracle


def _logprobs(runner: Runner, prompt: list[int]) -> torch.Tensor:
    driver = Driver(runner)
    driver.feed({0: prompt[:7]})
    result = driver.feed({0: prompt[7:]}, make_draws([{"row": 0, "num_top": VOCAB}]))
    found = torch.full((VOCAB,), torch.nan)
    found[torch.from_numpy(result.top_tokens[0]).long()] = torch.from_numpy(result.top_logprobs[0])
    return found


@pytest.mark.parametrize("name", COMPOSITES)
def test_composite_folder_equals_transformers_for_text(
    name: str, load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = save_composite(name, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = torch.randint(0, 180, (1, 21))
    # transformers 5.24 fails to run the whole Llama 4 without images
    text_model = oracle.language_model if name == "llama4" else oracle
    with torch.inference_mode():
        want = text_model(input_ids=prompt).logits[0, -1].log_softmax(-1)
        answer = text_model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0
        )
    caplog.set_level(logging.INFO, "chatcache")
    runner = load(tmp_path)
    towers = sum("vis" in each or "projector" in each for each, _ in oracle.named_parameters())
    assert f"text only: {towers} vision tensors skipped" in caplog.messages
    assert isinstance(runner._network, Decoder) == COMPOSITES[name][1]
    torch.testing.assert_close(_logprobs(runner, prompt[0].tolist()), want, atol=1e-4, rtol=1e-4)
    assert greedy(runner, [prompt[0].tolist()], NUM_NEW) == [answer[0, 21:].tolist()]
    text = oracle.get_decoder()
    text = getattr(text, "model", text)
    embeddings = 1 if oracle.get_output_embeddings().weight is text.embed_tokens.weight else 2
    blocks = sum(weight.numel() for each, weight in text.state_dict().items() if "embed_tokens." not in each)
    assert runner.model_info.num_parameters == blocks + embeddings * VOCAB * 64


def test_composite_folder_with_a_timm_tower_loads_without_timm(load: Load, tmp_path: Path) -> None:
    sample = make_sample("gemma3n", tmp_path)
    tensors = {name.replace("model.", "model.language_model.", 1): weight for name, weight in
               load_file(tmp_path / "model.safetensors").items()}  # fmt: skip
    tower = {"model.vision_tower.timm_model.conv_stem.conv.weight": torch.zeros(2)}
    save_file(tensors | tower, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    kinds = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**kinds, "text_config": text, "tie_word_embeddings": False}))
    found = greedy(load(tmp_path), sample.prompts, len(sample.answers[0]))
    assert tuple(map(tuple, found)) == sample.answers


def test_flat_config_of_a_composite_model_loads(load: Load, tmp_path: Path) -> None:
    """As the first configs of Qwen2.5-VL: the fields of the text model at the top, `mrope` as its rope type."""
    oracle = save_composite("qwen2.5-vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    del text["rope_parameters"], text["model_type"]
    rope = {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    (tmp_path / "config.json").write_text(json.dumps({**text, **config, **rope}))
    prompt = torch.randint(0, 180, (1, 21))
    with torch.inference_mode():
        want = oracle(input_ids=prompt).logits[0, -1].log_softmax(-1)
    runner = load(tmp_path)
    assert isinstance(runner._network, Decoder)
    torch.testing.assert_close(_logprobs(runner, prompt[0].tolist()), want, atol=1e-4, rtol=1e-4)


def test_end_of_turn_ids_of_the_text_config_are_read(load: Load, tmp_path: Path) -> None:
    save_composite("mistral3", tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    set_config(tmp_path, eos_token_id=None, text_config={**config["text_config"], "eos_token_id": [3, 4]})
    assert load(tmp_path).model_info.eos_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("mistral3", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight is missing"),
        ("ministral3", "model.layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight is missing"),
        ("mistral3", "lm_head.weight", "lm_head.weight is missing"),
        ("mistral3", "embed_tokens.weight", f"no tensor is named embed_tokens.weight after {PREFIXES[0]}"),
    ],
)
def test_composite_folder_without_a_text_tensor_is_rejected(
    name: str, tensor: str, words: str, load: Load, tmp_path: Path
) -> None:
    save_composite(name, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    shards = json.loads(index.read_text())
    (stored,) = [each for each in shards["weight_map"] if each.endswith(tensor)]
    file = tmp_path / shards["weight_map"].pop(stored)
    index.write_text(json.dumps(shards))
    tensors = load_file(file)
    del tensors[stored]
    save_file(tensors, file)
    with pytest.raises(ModelFolderError, match=words):
        load(tmp_path)


def test_quantised_composite_folder_is_rejected(load: Load, tmp_path: Path) -> None:
    save_composite("mistral3", tmp_path)
    set_config(tmp_path, quantization_config={"quant_method": "hqq"})
    with pytest.raises(ModelFolderError, match="its weights are quantised \\(hqq\\)"):
        load(tmp_path)
