"""8-bit weights: loading, model info and generation.

The oracle is the same model with the dequantised weights in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chatcache_kernels import cpu
from chatcache_kernels.cpu import bf16, expert_layer
from chatcache_kernels.cpu.compact import FEW_TOKENS
from chatcache_kernels.cpu.int8 import quantise
from safetensors.torch import load_file, save_file
from torch import Tensor

from chatcache.bench.drivers import SHAPES, write_model
from chatcache.config import EngineConfig
from chatcache.errors import ModelFolderError
from chatcache.model import linear
from chatcache.model.decoder import Decoder
from chatcache.model.linear import (
    MEASURED_ROUNDS,
    Int8Linear,
    PanelLinearFactory,
    choose_dtype,
    fast_linear,
    measure_compact_tokens,
    weight_sizes,
)
from chatcache.model.loading import loader
from chatcache.model.loading.loader import (
    COMPACT_MIN_BYTES,
    DUAL_LAYOUT_MAX_BYTES,
    can_keep_both_layouts,
    choose_linear,
    choose_module_linear,
    load_model,
)
from chatcache.model.runner import Runner
from chatcache.types.request import SamplingParams
from tests.model.drive import Driver, greedy, make_draws
from tests.model.families import EXPERTS, LAYERS, VOCAB, Sample, save_random

Get = Callable[[str], Sample]
Load = Callable[..., Runner]


def rounded(sample: Sample, folder: Path) -> Path:
    """Copy a model with dequantised 8-bit weights and an untied output head."""
    shutil.copytree(sample.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    for name, weight in tensors.items():
        if weight.ndim == 2 and "embed_tokens" not in name:
            numbers, scales = quantise(weight)
            tensors[name] = numbers.float() * scales[:, None]
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return folder


def logprobs(runner: Runner, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Return the log-probabilities of what follows each prompt, [prompts, V]."""
    everything = make_draws([{"row": row, "num_top": VOCAB} for row in range(len(prompts))])
    result = Driver(runner).feed(dict(enumerate(prompts)), everything)
    tokens = torch.from_numpy(result.top_tokens[:, :VOCAB]).long()
    return torch.empty(len(prompts), VOCAB).scatter_(1, tokens, torch.from_numpy(result.top_logprobs[:, :VOCAB]))


@pytest.mark.parametrize(
    "name", ["llama", "llama-biases", "qwen2", "qwen3", "phi3-native", "gemma2", "qwen3-5", "falcon-h1"]
)
@pytest.mark.slow
def test_int8_logits_equal_the_dequantised_model(name: str, sample_of: Get, load: Load, tmp_path: Path) -> None:
    sample = sample_of(name)
    ours, exact = load(sample.folder, quantization="int8"), load(rounded(sample, tmp_path / "rounded"))
    got = logprobs(ours, sample.prompts)
    torch.testing.assert_close(got, logprobs(exact, sample.prompts), atol=1e-4, rtol=1e-4)
    unquantised = logprobs(load(sample.folder), sample.prompts)
    assert 0 < (got - unquantised).norm() / unquantised.norm() < 0.05
    assert greedy(ours, sample.prompts, 8, chunk=7) == greedy(exact, sample.prompts, 8, chunk=7)


def test_model_info_reports_quantised_sizes(sample_of: Get, load: Load) -> None:
    folder = sample_of("llama").folder
    plain, int8 = load(folder).model_info, load(folder, quantization="int8").model_info
    assert (plain.quantization, plain.precision) == ("none", "float32")
    assert (int8.quantization, int8.precision) == ("int8", "float32, int8 weights")
    assert int8.digest != plain.digest == load(folder, quantization="none").model_info.digest
    assert int8.num_parameters == plain.num_parameters
    assert plain.step_bytes == plain.weight_bytes == 4 * plain.num_parameters  # tied
    table = 4 * VOCAB * 64
    assert int8.weight_bytes == int8.step_bytes + table
    weights, outputs = 3 * (128 * 64 + 64 * 64 + 192 * 64 + 96 * 64), 3 * (128 + 64 + 192 + 64)
    padding = (224 - VOCAB) * 64  # of the head, to whole panels
    assert int8.step_bytes == weights + VOCAB * 64 + padding + 4 * (outputs + VOCAB) + 4 * 7 * 64
    untied = load(sample_of("qwen2").folder).model_info
    assert untied.step_bytes == untied.weight_bytes - table


def test_weight_sizes_counts_transformers_models_whole() -> None:
    assert weight_sizes(1000, torch.bfloat16, None) == (2000, 2000)


@pytest.mark.parametrize("has_panels", [True, False])
@pytest.mark.parametrize("has_onednn", [True, False])
@pytest.mark.parametrize("compact_tokens", [2, FEW_TOKENS])
def test_layers_with_a_compact_copy_equal_torch(has_onednn: bool, has_panels: bool, compact_tokens: int) -> None:
    make = PanelLinearFactory(has_onednn=has_onednn, has_panels=has_panels, compact_tokens=compact_tokens)
    weight, bias = torch.randn(96, 64).bfloat16(), torch.randn(96).bfloat16()
    layer = make(weight, bias)
    for num_tokens in (1, 3, FEW_TOKENS, FEW_TOKENS + 1, 70):
        x = torch.randn(num_tokens, 64).bfloat16()
        expected = x.float() @ weight.float().T + bias.float()
        assert torch.allclose(layer(x).float(), expected, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_mlp_in_tiles_equals_torch(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make, tiles = PanelLinearFactory(has_onednn=True), []
    weights = [torch.randn(2 * 96, 64).bfloat16() / 8, torch.randn(64, 96).bfloat16() / 8]
    biases = [torch.randn(len(weight)).bfloat16() if has_bias else None for weight in weights]
    up, down = (make(weight, bias) for weight, bias in zip(weights, biases, strict=True))
    x = torch.randn(70, 64).bfloat16()
    expected = linear.gated_mlp(up, down, x, cpu.silu_mul)

    def choose(*sizes: int) -> int:
        tiles.append(sizes)
        return 32

    monkeypatch.setattr(expert_layer, "choose_mlp_tokens", choose)
    got = linear.gated_mlp(up, down, x, cpu.silu_mul)
    assert tiles == [(70, 64, 96)]
    assert torch.allclose(got.float(), expected.float(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("has_panels", [True, False])
def test_compact_copies_serve_the_steps_in_which_they_are_faster(
    has_panels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[torch.Tensor] = []

    def measure(*times_of_compact: float) -> int:
        compact_times = (*times_of_compact, *[2.0] * FEW_TOKENS.bit_length())
        times = iter([time for compact in compact_times for time in (compact, 1.0) * MEASURED_ROUNDS])

        def seconds(layer: Any, x: torch.Tensor) -> float:
            results.append(layer(x))
            return next(times)

        monkeypatch.setattr(linear, "_seconds", seconds)
        return measure_compact_tokens.__wrapped__(has_panels, 2**30)

    monkeypatch.setattr(linear, "_cache_bytes", lambda: 5 << 20)
    assert measure_compact_tokens(has_panels, 1) in {0, *(2**power for power in range(FEW_TOKENS.bit_length()))}
    assert measure() == measure(1.0, 1.0) == measure(0.98, 0.98) == 0
    assert measure(0.9) == 1
    assert measure(0.9, 0.8, 0.95) == measure(1.0, 0.9, 0.8) == 4
    assert measure(*[0.5] * FEW_TOKENS.bit_length()) == FEW_TOKENS
    assert {each.shape for each in results} == {(2**power, 3072) for power in range(FEW_TOKENS.bit_length())}
    for compact, other in zip(results[::2], results[1::2], strict=True):
        assert torch.allclose(compact, other, rtol=2**-6, atol=2**-3)


def test_weight_sizes_counts_compact_copies_as_read() -> None:
    make = PanelLinearFactory(compact_tokens=1)
    make(torch.ones(64, 1024, dtype=torch.bfloat16))  # 12 bits a number, 8 bytes a tile, and a header
    share = (64 * 1024 * 1.5 + 1024) / (64 * 1024 * 2)
    assert weight_sizes(1000, torch.bfloat16, None, make) == (2000, round(2000 * share))


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"deterministic": True}], ids=str)
def test_step_bytes_leave_out_experts_that_a_token_does_not_read(
    options: dict[str, Any], load: Load, tmp_path: Path
) -> None:
    config = transformers.Qwen3MoeConfig(**LAYERS, **EXPERTS, head_dim=32, mlp_only_layers=[1])
    save_random(config, tmp_path)
    info = load(tmp_path, attention_backend="cpu", **options).model_info
    weights = 3 * 3 * 64 * 32  # of one expert in the three layers that have some
    scales = 3 * (64 + 64) * 4
    num_bytes = weights + scales if "quantization" in options else 4 * weights
    assert info.weight_bytes - info.step_bytes == 2 * num_bytes  # two of four


def test_unsupported_quantization_is_rejected(sample_of: Get, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ModelFolderError, match=r"config\.json: quantization int8 saves too little: .* of this gpt2 are not in plain"
    ):
        load(sample_of("gpt2").folder, quantization="int8")
    with pytest.raises(ModelFolderError, match="quantization 'int4' is not supported; choose none, int8 or fp8"):
        load(sample_of("llama").folder, quantization="int4")
    monkeypatch.setattr(loader, "choose_device", lambda name: torch.device("meta"))
    with pytest.raises(ModelFolderError, match=r"quantization int8 works on CPUs only.*on meta"):
        load(sample_of("llama").folder, quantization="int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_model_can_be_deterministic(sample_of: Get, load: Load, dtype: str) -> None:
    """The check at load passes, and answers do not depend on chunks."""
    sample = sample_of("qwen3")
    runner = load(sample.folder, quantization="int8", deterministic=True, attention_backend="auto", dtype=dtype)
    together = logprobs(runner, sample.prompts)
    assert torch.equal(together, torch.cat([logprobs(runner, [prompt]) for prompt in sample.prompts]))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(SHAPES["tiny"], folder)
    return folder


@pytest.mark.slow
def test_small_steps_use_the_fused_decoder(tiny: Path) -> None:
    runner = load_model(
        EngineConfig(model=str(tiny), dtype="bfloat16", quantization="int8", kv_memory_bytes=1 << 20, device="cpu")
    )
    network = runner._network
    assert isinstance(network, Decoder)
    assert isinstance(network._head, Int8Linear)
    assert network._fused is not None
    assert network._fused._megakernel is not None
    assert network._embedding.dtype == torch.bfloat16
    quick = greedy(runner, [[1, 2, 3], [4] * 20], 6)
    network._fused = None
    assert greedy(runner, [[1, 2, 3], [4] * 20], 6) == quick


@pytest.mark.slow
def test_int8_demo_model_gives_mostly_the_same_text() -> None:
    """Its greedy answers are the same text but for a few."""
    from chatcache import LLM  # imports packages that machines for kernel tests lack

    prompts = ["Hello! Who are you?", "What is a KV cache?", "Tell me a joke.", "What can you do?", "Thank you!"]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = []
    for quantization in (None, "int8"):
        with LLM(quantization=quantization, kv_memory="64MiB", device="cpu") as llm:
            outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
    assert all(texts[1])
    same = sum(first == second for first, second in zip(*texts, strict=True))
    assert same >= 3, texts


@pytest.mark.parametrize(("amx", "pairs"), [(True, True), (False, True), (False, False)])
def test_bf16_layers_are_in_the_layouts_that_suit_the_cpu(
    amx: bool, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compact copies pay with bf16 products only; without those, oneDNN's layout does not, and panels are enough."""
    monkeypatch.setattr(bf16, "has_amx", lambda: amx)
    monkeypatch.setattr(bf16, "has_avx512_bf16", lambda: pairs)
    monkeypatch.setattr(loader, "measure_compact_tokens", lambda has_panels, _: 2 if has_panels else 4)
    cpu, has_products, most = torch.device("cpu"), amx or pairs, COMPACT_MIN_BYTES
    for num_bytes, free_bytes, fits in ((most, 4 * most, True), (most, 4 * most - 1, False), (most - 1, 2**40, False)):
        monkeypatch.setattr(loader, "free_host_bytes", lambda free_bytes=free_bytes: free_bytes)
        for choose in (choose_linear, choose_module_linear):
            make = choose(EngineConfig(), num_bytes, torch.bfloat16, cpu)
            assert isinstance(make, PanelLinearFactory) and make.has_panels
            assert make.has_onednn == has_products
            assert make.compact_tokens == (2 if fits and has_products else 0)
        same = choose_module_linear(EngineConfig(deterministic=True), 2**20, torch.bfloat16, cpu)
        assert isinstance(same, PanelLinearFactory) and not same.has_onednn
    monkeypatch.setattr(loader, "free_host_bytes", lambda: 1 << 40)
    large = choose_linear(EngineConfig(), 16 << 30, torch.bfloat16, cpu)
    assert isinstance(large, PanelLinearFactory)
    assert (large.compact_tokens, large.has_panels) == ((4, False) if has_products else (0, True))
    monkeypatch.setattr(loader, "measure_compact_tokens", lambda has_panels, _: 0)
    assert (choose_linear(EngineConfig(), 16 << 30, torch.bfloat16, cpu) is fast_linear) == has_products
    assert choose_module_linear(EngineConfig(), 2**20, torch.float32, cpu) is fast_linear


@pytest.mark.parametrize(
    ("flags", "options", "dtype"),
    [
        ("avx2 avx512f avx512_bf16", {}, torch.bfloat16),
        ("avx2 avx512_bf16", {"deterministic": True}, torch.bfloat16),
        ("avx2 amx_bf16", {"attention_backend": "reference"}, torch.bfloat16),
        ("sse2 avx2", {}, torch.bfloat16),
        ("sse2 avx2", {"quantization": "int8"}, torch.bfloat16),
        ("sse2 avx2", {"deterministic": True}, torch.float32),
        ("sse2 avx2", {"attention_backend": "reference"}, torch.float32),
        ("sse2", {}, torch.float32),
        ("", {}, torch.float32),
        ("", {"dtype": "bfloat16"}, torch.bfloat16),
    ],
)
def test_dtype_is_bfloat16_where_the_cpu_multiplies_or_widens_it_fast(
    flags: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"processor\t: 0\nflags\t\t: fpu {flags}\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text if str(self) == "/proc/cpuinfo" else "")
    assert choose_dtype(EngineConfig(**options), torch.device("cpu")) == dtype


def test_dtype_is_float32_where_the_system_does_not_describe_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", fail)
    assert choose_dtype(EngineConfig(), torch.device("cpu")) == torch.float32


def test_choose_linear_keeps_both_layouts_if_memory_allows(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    gib = 2**30
    assert can_keep_both_layouts(gib, 3 * gib)
    assert not can_keep_both_layouts(gib, 3 * gib - 3)
    assert not can_keep_both_layouts(DUAL_LAYOUT_MAX_BYTES + 1, 1 << 60)  # an 8B model, whatever there is
    monkeypatch.setattr(bf16, "has_avx512_bf16", lambda: True)
    cpu = torch.device("cpu")
    for free_bytes, expected, words in (
        (9 * gib, PanelLinearFactory, "kept in panels"),
        (gib, type(fast_linear), "kept for oneDNN"),
    ):
        monkeypatch.setattr(loader, "free_host_bytes", lambda free_bytes=free_bytes: free_bytes)
        caplog.clear()
        with caplog.at_level("INFO"):
            assert isinstance(choose_linear(EngineConfig(), gib, torch.bfloat16, cpu), expected)
        assert words in caplog.text
        assert choose_linear(EngineConfig(), gib, torch.float32, cpu) is fast_linear
