"""A bad model folder gives one error that names the file and the reason."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from chatcache.config import EngineConfig
from chatcache.errors import ModelFolderError
from chatcache.model.loading.config_reader import read_architecture
from chatcache.model.loading.files import read_config, resolve_model_path
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import Runner
from tests.model.families import GATED, Sample, save_random

Get = Callable[[str], Sample]
Load = Callable[..., Runner]


@pytest.fixture
def folder(sample_of: Get, tmp_path: Path) -> Path:
    """Return a valid model folder for the test to corrupt."""
    return Path(shutil.copytree(sample_of("qwen3").folder, tmp_path / "model"))


def of_own_mask(folder: Path) -> None:
    """Replace the model by one of a family that builds an attention mask from its values."""
    (folder / "model.safetensors").unlink()
    save_random(transformers.DogeConfig(**GATED), folder)


def set_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(fields)
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


def set_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


def index(folder: Path, shard: str) -> None:
    (folder / "model.safetensors").rename(folder / "model-1-of-2.safetensors")
    shards = {"model.norm.weight": "model-1-of-2.safetensors", "lm_head.weight": shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def header(folder: Path, raw: bytes) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)


NORM = "model.layers.1.self_attn.q_norm.weight"
CORRUPTIONS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no-config": (lambda f: (f / "config.json").unlink(), ["config.json", "missing"]),
    "config-not-json": (lambda f: (f / "config.json").write_text("{"), ["config.json", "not valid JSON"]),
    "config-not-object": (lambda f: (f / "config.json").write_text("[]"), ["config.json", "not a JSON object"]),
    "no-type": (lambda f: set_config(f, model_type=...), ["config.json", "model_type is missing"]),
    "unknown-type": (lambda f: set_config(f, model_type="wonder"), ["config.json", "'wonder' is not known"]),
    "remote-code": (
        lambda f: set_config(f, model_type="wonder", auto_map={"AutoConfig": "x.Y"}),
        ["config.json", "code from the folder is never run"],
    ),
    "alibi": (lambda f: set_config(f, model_type="bloom"), ["config.json", "bloom", "ALiBi"]),
    "state-space": (
        lambda f: (f / "config.json").write_text('{"model_type": "mamba"}'),
        ["config.json", "mamba has no attention that can run on KV pages"],
    ),
    "own-mask": (of_own_mask, ["config.json", "doge does not run on KV pages", "DogeAttention is not plain causal"]),
    "odd-config": (lambda f: set_config(f, model_type="mamba"), ["config.json", "cannot load this mamba"]),
    "field-missing": (lambda f: set_config(f, hidden_size=...), ["config.json", "hidden_size is missing"]),
    "field-wrong": (lambda f: set_config(f, num_hidden_layers="3"), ["config.json", "num_hidden_layers", "'3'"]),
    "heads": (lambda f: set_config(f, num_key_value_heads=3), ["config.json", "num_key_value_heads 3"]),
    "not-causal": (lambda f: set_config(f, is_causal=False), ["config.json", "is_causal is false"]),
    "fewer-layers": (lambda f: set_config(f, num_hidden_layers=2), ["config.json", "num_hidden_layers is 2"]),
    "more-layers": (lambda f: set_config(f, num_hidden_layers=4), ["model.safetensors", "model.layers.3", "missing"]),
    "shape": (lambda f: set_config(f, intermediate_size=80), ["gate_proj.weight", "[96, 64]", "[80, 64]"]),
    "yarn": (
        lambda f: set_config(f, rope_parameters={"rope_type": "yarn"}),
        ["config.json", "'yarn' needs a positive factor"],
    ),
    "partial-rotary-scaled": (
        lambda f: set_config(f, partial_rotary_factor=0.5, rope_scaling={"rope_type": "linear", "factor": 2.0}),
        ["config.json", "partial_rotary_factor 0.5 with rope scaling 'linear' is not supported"],
    ),
    "no-weights": (lambda f: (f / "model.safetensors").unlink(), ["model.safetensors", "missing"]),
    "pickle-only": (pickled, ["pytorch_model.bin", "pickled weights are refused"]),
    "tensor-missing": (lambda f: set_weights(f, lambda t: t.pop(NORM)), ["model.safetensors", NORM, "missing"]),
    "tensor-quantised": (
        lambda f: set_weights(f, lambda t: t.update({NORM: t[NORM].to(torch.int8)})),
        ["model.safetensors", NORM, "quantised"],
    ),
    "empty-file": (lambda f: truncate(f, 0), ["model.safetensors", "truncated"]),
    "short-header": (lambda f: truncate(f, 100), ["model.safetensors", "truncated"]),
    "short-data": (lambda f: truncate(f, 200_000), ["model.safetensors", "truncated"]),
    "not-safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"PK" * 500), ["not safetensors"]),
    "header-not-json": (lambda f: header(f, b"{" * 20), ["model.safetensors", "header is not JSON"]),
    "header-nonsense": (
        lambda f: header(f, b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": "ab"}}'),
        ["model.safetensors", "tensor x"],
    ),
    "header-negative": (
        lambda f: header(f, b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}'),
        ["model.safetensors", "tensor x"],
    ),
    "shard-missing": (lambda f: index(f, "model-2-of-2.safetensors"), ["model-2-of-2.safetensors", "missing"]),
    "shard-outside": (lambda f: index(f, "../other.safetensors"), ["index.json", "outside the folder"]),
    "shard-absolute": (lambda f: index(f, "/other.safetensors"), ["index.json", "outside the folder"]),
    "eos": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": ["x"]}'),
        ["generation_config.json", "eos_token_id"],
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corrupted_folder_is_rejected_with_file_and_reason(name: str, folder: Path, load: Load) -> None:
    corrupt, words = CORRUPTIONS[name]
    corrupt(folder)
    with pytest.raises(ModelFolderError) as caught:
        load(folder)
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message
    for word in words:
        assert word in caught.value.message


def test_transformers_model_with_missing_tensor_is_rejected(sample_of: Get, tmp_path: Path, load: Load) -> None:
    """transformers would fill them with noise."""
    folder = Path(shutil.copytree(sample_of("gpt2").folder, tmp_path / "model"))
    set_weights(folder, lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.weight"))
    with pytest.raises(ModelFolderError, match=r"tensor transformer\.h\.1\.mlp\.c_fc\.weight is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 257}, "max_model_len 257 is out of bounds: this model allows 1 to 256"),
        ({"kv_memory_bytes": 100}, "kv_memory_bytes 100 is too small"),
        ({"attention_backend": "magic"}, "attention backend 'magic'"),
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"dtype": "float16", "device": "cpu"}, "dtype 'float16' needs a GPU"),
        ({"device": "tpu"}, "device 'tpu'"),
    ],
)
def test_invalid_setting_is_rejected(options: dict[str, Any], words: str, sample_of: Get, load: Load) -> None:
    with pytest.raises(ModelFolderError, match=words):
        load(sample_of("llama").folder, **options)


def test_missing_folder_is_rejected() -> None:
    with pytest.raises(ModelFolderError, match="no such folder"):
        resolve_model_path("./nowhere")
    with pytest.raises(ModelFolderError, match="no such folder"):
        load_model(EngineConfig(model="nowhere"))


OFFLINE = "Cannot find an appropriate cached snapshot folder for the specified revision on the local disk"
REFUSED = "Got: ConnectError: [Errno 111] Connection refused\nAn error happened while trying to locate the files"


@pytest.mark.parametrize(
    ("error", "is_offline", "words"),
    [
        (
            LocalEntryNotFoundError(REFUSED),
            False,
            "https://hub.test cannot be reached (ConnectError: [Errno 111] Connection refused); download the model on "
            "another machine and give its folder, or set HF_ENDPOINT to a mirror",
        ),
        (
            LocalEntryNotFoundError(OFFLINE),
            True,
            "it is not in the Hugging Face cache, where HF_HUB_OFFLINE confines the search; unset HF_HUB_OFFLINE, or "
            "give the folder of a model that was downloaded elsewhere",
        ),
        (ValueError("disk is full\nat line 3"), False, "it could not be fetched from https://hub.test: disk is full"),
    ],
)
def test_hugging_face_id_that_cannot_be_fetched_names_the_reason_and_the_remedy(
    error: Exception, is_offline: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.test")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
    with pytest.raises(ModelFolderError) as caught:
        resolve_model_path("someone/model")
    assert caught.value.message == f"someone/model: no such folder, and {words}"


@pytest.mark.slow
def test_hugging_face_id_without_a_network_fails_within_seconds(tmp_path: Path) -> None:
    """The real client, against a port where nothing listens."""
    code = "from chatcache.model.loading.files import resolve_model_path; resolve_model_path('someone/model')"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr and "set HF_ENDPOINT to a mirror" in done.stderr


def test_file_instead_of_folder_is_rejected(folder: Path) -> None:
    with pytest.raises(ModelFolderError, match="not a model folder"):
        resolve_model_path(str(folder / "config.json"))


def test_gguf_file_and_folder_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for model, reason in ((tmp_path / "x.gguf", "not a model folder"), (tmp_path, "has x.gguf but no config.json")):
        with pytest.raises(ModelFolderError, match=f"{reason}; GGUF is not supported, use the model's folder"):
            read_config(resolve_model_path(str(model)))


def test_sharded_weights_are_read(folder: Path, sample_of: Get, load: Load) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {name: f"part-{position % 2}.safetensors" for position, name in enumerate(names)}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in names if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    model_info = load(folder).model_info
    assert model_info.num_parameters == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("named", ["part-0.safetensors", "part-1.safetensors"])
def test_tensor_in_two_shards_is_read_where_index_and_transformers_agree(folder: Path, load: Load, named: str) -> None:
    from tests.model.drive import greedy

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({NORM: tensors[NORM] * 5}, folder / "part-0.safetensors", {"format": "pt"})
    save_file(tensors, folder / "part-1.safetensors", {"format": "pt"})
    shards = {**dict.fromkeys(tensors, "part-1.safetensors"), NORM: named, "other": "part-0.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert oracle.state_dict()[NORM].equal(tensors[NORM]), "transformers reads the last shard"
    if named == "part-0.safetensors":
        with pytest.raises(ModelFolderError, match=f"tensor {NORM} is in {named} too, and .* does not say part-1"):
            load(folder)
        return
    (answer,) = greedy(load(folder), [[5, 6, 7]], 8)
    with torch.inference_mode():
        logits = oracle(torch.tensor([[5, 6, 7, *answer]]), use_cache=False).logits[0]
    assert logits[2:-1].argmax(-1).tolist() == answer


def test_transformers_4_config_is_equivalent(folder: Path, load: Load, sample_of: Get) -> None:
    """`rope_theta` and `torch_dtype` at the top, as transformers 4 wrote them."""
    from tests.model.drive import greedy

    sample = sample_of("qwen3")
    set_config(folder, rope_parameters=..., dtype=..., rope_theta=10000.0, torch_dtype="float32", rope_scaling=None)
    assert greedy(load(folder), sample.prompts[:1], 8) == [list(sample.answers[0][:8])]


def test_null_num_key_value_heads_is_the_number_of_heads(folder: Path) -> None:
    set_config(folder, num_key_value_heads=None)
    assert read_architecture(read_config(folder), folder).num_kv_heads == 4


LAYER_TYPES = ["full_attention", "sliding_attention", "full_attention"]
SCALING = {"rope_type": "linear", "factor": 3.0}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        pytest.param("llama", {"sliding_window": 8}, id="llama-ignores-windows"),
        pytest.param("mistral-window", {"layer_types": LAYER_TYPES}, id="mistral-windows-of-some-layers"),
        pytest.param("llama", {"rope_scaling": SCALING}, id="rope-scaling-replaces-parameters"),
        pytest.param("llama", {"partial_rotary_factor": 0.5}, id="llama-ignores-partial-rotary-factor"),
        pytest.param("qwen3", {"tie_word_embeddings": True}, id="stored-head-of-a-tied-model"),
    ],
)
def test_changed_config_is_read_as_by_transformers(
    family: str, fields: dict[str, Any], sample_of: Get, tmp_path: Path, load: Load
) -> None:
    from tests.model.drive import greedy

    sample = sample_of(family)
    folder = Path(shutil.copytree(sample.folder, tmp_path / "model"))
    set_config(folder, **fields)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    prompt = sample.prompts[2]
    (answer,) = greedy(load(folder), [prompt], 8)
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_digest_depends_on_config_weights_and_dtype(folder: Path, load: Load) -> None:
    digests = [load(folder).model_info.digest, load(folder).model_info.digest]
    assert digests[0] == digests[1]
    digests.append(load(folder, dtype="bfloat16").model_info.digest)
    set_weights(folder, lambda tensors: tensors[NORM][3:4].add_(1e-3))
    digests.append(load(folder).model_info.digest)
    set_config(folder, rms_norm_eps=1e-5)
    digests.append(load(folder).model_info.digest)
    assert len(set(digests)) == 4


def test_load_model_reports_model_info_capacity_and_progress(folder: Path, load: Load) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    said: list[tuple[float, str]] = []
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        attention_backend="reference",
        max_num_seqs=3,
        max_model_len=100,
        served_model_name="me",
    )
    runner = load_model(config, lambda fraction, what: said.append((fraction, what)))
    model_info, capacity = runner.model_info, runner.capacity()
    assert (model_info.name, model_info.vocab_size, model_info.eos_token_ids, model_info.max_model_len) == (
        "me",
        199,
        (5, 7),
        100,
    )
    assert (capacity.page_size, capacity.num_slots, capacity.max_model_len) == (16, 3, 100)
    assert capacity.num_pages == 1 + 3 * 7  # what three whole contexts can use
    assert capacity.kv_bytes == capacity.num_pages * 16 * 2 * 3 * 2 * 32 * 4
    fractions = [fraction for fraction, _ in said]
    assert fractions == sorted(fractions)
    assert fractions[0] == 0.0
    assert said[-1] == (1.0, "model loaded"), 'the server is "ready" only when its store answers, too'
