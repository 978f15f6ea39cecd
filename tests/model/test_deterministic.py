"""Deterministic mode: linear layers, single tokens, the check at load, and rejected models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chatcache_kernels import work_list
from chatcache_kernels.triton import invariant_matmul
from chatcache_kernels.triton.invariant_matmul import Tile, tiles_for
from chatcache_kernels.types import AttentionWork
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from chatcache.config import EngineConfig
from chatcache.errors import ModelFolderError
from chatcache.model import batch_invariant
from chatcache.model.attention import AttentionStep, Network, choose_backend
from chatcache.model.batch_invariant import (
    TILE_SIZES,
    BatchInvariantLinear,
    BatchInvariantLinearFactory,
    TokenByToken,
    TritonLinear,
    TritonLinearFactory,
    check_determinism,
    find_invariant_sizes,
    find_invariant_tiles,
    make_probes,
    tile_sizes,
)
from chatcache.model.decoder import Decoder
from chatcache.model.geometry import Geometry
from chatcache.model.linear import Linear, fast_linear
from chatcache.model.loading import loader
from chatcache.model.loading.loader import load_model
from chatcache.model.loading.weights import Weights
from chatcache.model.runner import Runner
from chatcache.types.plan import I32
from tests.model import determinism
from tests.model.drive import KERNELS, no_warm_up
from tests.model.families import FAMILIES, Sample, save_random

LAYERS = ("qkv", "out", "gate_up", "down")
BF16 = pytest.mark.requires_bf16_products

Get = Callable[[str], Sample]
Load = Callable[..., Runner]


@pytest.fixture(params=[1, 3], ids=["1-thread", "3-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BF16)])
@pytest.mark.parametrize("shape", [(960, 576), (64, 1536), (199, 64), (36, 101)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_batch_invariant_linear_has_the_same_bits_in_any_batch(
    dtype: torch.dtype, shape: tuple[int, int], has_bias: bool, threads: int
) -> None:
    weight, x = torch.randn(shape).to(dtype), torch.randn(300, shape[1]).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    layer = BatchInvariantLinearFactory()(weight.clone(), bias)
    alone = torch.cat([layer(row[None]) for row in x])
    for first, end in ((0, 300), (0, 2), (1, 34), (5, 12), (3, 3), (17, 150)):
        assert torch.equal(layer(x[first:end]), alone[first:end])
    assert torch.equal(layer(x.flip(0)), alone.flip(0))
    assert torch.equal(layer(x.mT.contiguous().mT), alone)
    torch.set_num_threads(1)
    assert torch.equal(layer(x), alone)
    want = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(alone.float(), want, atol=1e-3 if dtype == torch.float32 else 0.5, rtol=1e-2)


@pytest.mark.parametrize("sizes", [TILE_SIZES, TILE_SIZES[:6], (2, 16, 1024), (16,)])
def test_tile_sizes_cover_all_rows(sizes: tuple[int, ...]) -> None:
    for num_rows in (*range(1, 80), 500, 1023, 1025, 3000):
        tiles = list(tile_sizes(num_rows, sizes))
        assert set(tiles) <= set(sizes)
        assert sum(tiles[:-1]) < num_rows <= sum(tiles)
        if sizes in (TILE_SIZES, TILE_SIZES[:6]):
            assert sum(tiles) - num_rows < max(tiles[-1] // 2, 1)
    assert list(tile_sizes(0, sizes)) == []


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_find_invariant_sizes_rejects_another_order_of_summation(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products that add up halves apart from `limit` rows on: sizes from there on are not used."""
    for limit in (2, 8, 64):

        def packed(weight: Tensor, bias: Tensor | None, limit: int = limit) -> Linear:
            w, half = weight.float(), weight.shape[1] // 2

            def product(x: Tensor) -> Tensor:
                rows = [row @ w.T if len(x) < limit else row[:half] @ w[:, :half].T + row[half:] @ w[:, half:].T
                        for row in x.float()]  # fmt: skip
                return torch.stack(rows).to(weight.dtype)

            return product

        monkeypatch.setattr(batch_invariant, "packed_linear", packed)
        found = find_invariant_sizes(64, 64, dtype, has_bias=False)
        assert found == tuple(
            size for size in TILE_SIZES if (size < limit) == (limit > batch_invariant.REFERENCE_ROWS)
        ), limit


def test_batch_dependent_product_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(weight: Tensor, bias: Tensor | None) -> Linear:
        return lambda x: functional.linear(x, weight) + x.sum() * 1e-20

    monkeypatch.setattr(batch_invariant, "packed_linear", packed)
    with pytest.raises(ModelFolderError, match=r"deterministic: .* weight of 64 x 32 .* depend on the batch"):
        find_invariant_sizes(64, 32, torch.float32, has_bias=False)
    monkeypatch.setattr(batch_invariant, "packed_linear", lambda *_: None)
    with pytest.raises(ModelFolderError, match="deterministic: oneDNN has no product for a weight of 4 x 6"):
        BatchInvariantLinearFactory()(torch.ones(4, 6))


def test_most_probe_products_cancel() -> None:
    weight, rows = make_probes(600, 128, torch.bfloat16)
    assert (weight.double() @ rows[:4].double().T).abs().max() == 0
    assert (weight.float() @ rows[:4].float().T).abs().max() > 0


@pytest.mark.parametrize("name", ["mistral-window", "phi3-native", "opt", "gpt-oss-sinks"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=BF16)])
@pytest.mark.slow
def test_model_family_passes_the_determinism_check(
    name: str, dtype: str, sample_of: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = FAMILIES[name].native
    if not native:
        monkeypatch.setattr(loader, "is_native", lambda *_: False)
    folder = str(sample_of(name).folder)
    runner = load_model(EngineConfig(model=folder, dtype=dtype, kv_memory_bytes=4 << 20, deterministic=True))
    assert runner._kernels is choose_backend("cpu", torch.device("cpu"), deterministic=True)[1]
    if not native:
        assert isinstance(runner._network, TokenByToken)
        return
    assert isinstance(runner._network, Decoder)
    products = [runner._network._head, *(getattr(layer, name) for layer in runner._network._layers for name in LAYERS)]
    assert all(isinstance(product, BatchInvariantLinear) for product in products)


GEOMETRY = Geometry.uniform(1, 2, 2, 16, 40, torch.float32, torch.device("cpu"))


@dataclass
class BatchDependentNetwork:
    """A network whose logits depend on the batch.

    They are those of the token, plus `share` times the sum of all tokens of the step.
    """

    share: float
    geometry: Geometry = GEOMETRY

    def forward(self, tokens: Tensor, positions: Tensor, step: AttentionStep, drawn: Tensor | None) -> Tensor:
        out = torch.outer(tokens.float() + 1, torch.arange(40) + 1.0) + self.share * tokens.sum()
        return out if drawn is None else out[drawn]

    def hidden_states(self, tokens: Tensor, positions: Tensor, step: AttentionStep, wanted: Tensor) -> Tensor:
        raise NotImplementedError

    def logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("wrapped", [False, True])
def test_batch_dependent_network_is_rejected_unless_run_token_by_token(wrapped: bool) -> None:
    kernels = choose_backend("cpu", torch.device("cpu"), deterministic=True)[1]
    check_determinism(BatchDependentNetwork(0.0), kernels, 8, 99)
    network: Network = TokenByToken(BatchDependentNetwork(0.001)) if wrapped else BatchDependentNetwork(0.001)
    for max_model_len in (99, 2):
        if wrapped:
            check_determinism(network, kernels, 8, max_model_len)
        else:
            with pytest.raises(ModelFolderError, match="deterministic: this model's logits depend on the batch"):
                check_determinism(network, kernels, 8, max_model_len)


@pytest.mark.slow
def test_fast_layers_fail_the_determinism_check(sample_of: Get, load: Load) -> None:
    """True on every machine so far.

    If it passes, deterministic mode costs nothing there, and the test can be removed.
    """
    runner = load(sample_of("llama").folder, attention_backend="cpu")
    with pytest.raises(ModelFolderError, match="depend on the batch"):
        check_determinism(runner._network, choose_backend("reference", torch.device("cpu"))[1], 8, 99)


def test_unsupported_deterministic_model_is_rejected_with_the_reason(
    sample_of: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = sample_of("llama")

    def refusal(folder: Path, **options: Any) -> str:
        with pytest.raises(ModelFolderError) as caught:
            load_model(EngineConfig(model=str(folder), kv_memory_bytes=4 << 20, deterministic=True, **options))
        return str(caught.value)

    assert refusal(sample.folder, attention_backend="reference").startswith(
        "deterministic needs the attention backend 'cpu'"
    )
    assert "8 must divide both" in refusal(sample.folder, page_size=12)
    folder = Path(shutil.copytree(sample.folder, tmp_path / "odd"))
    narrow = {**json.loads((folder / "config.json").read_text()), "intermediate_size": 90}
    (folder / "config.json").write_text(json.dumps(narrow))
    get = Weights.get
    monkeypatch.setattr(
        Weights,
        "get",
        lambda self, name, shape: torch.zeros(shape) if 90 in shape else get(self, name, shape),
    )
    assert "rows of 180 torch.float32 numbers: 16 must divide" in refusal(folder, dtype="float32")


@pytest.mark.interpreter  # on a GPU this backend does not run on the CPU
def test_deterministic_transformers_model_on_triton_is_rejected(sample_of: Get) -> None:
    config = EngineConfig(
        model=str(sample_of("opt").folder),
        dtype="float32",
        device="cpu",
        attention_backend="triton",
        deterministic=True,
    )
    with pytest.raises(ModelFolderError, match=r"models of the native decoder only .*'opt' runs through transformers"):
        load_model(config)


@pytest.mark.usefixtures("dot_of_single_rows")
@pytest.mark.parametrize(
    ("dtype", "has_bias"), [(torch.float32, True), pytest.param(torch.bfloat16, False, marks=pytest.mark.slow)]
)
def test_triton_linear_has_the_same_bits_in_any_batch(dtype: torch.dtype, has_bias: bool) -> None:
    weight, x = torch.randn(160, 64, device=KERNELS).to(dtype), torch.randn(150, 64, device=KERNELS).to(dtype)
    bias = torch.randn(160, device=KERNELS).to(dtype) if has_bias else None
    layer = TritonLinearFactory()(weight, bias)
    whole = layer(x)
    for first, end in ((0, 1), (149, 150), (1, 34), (3, 70), (3, 3)):
        assert torch.equal(layer(x[first:end]), whole[first:end])
    want = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(whole.float(), want, atol=1e-3 if dtype == torch.float32 else 0.2, rtol=1e-2)


def test_triton_linear_factory_probes_each_width_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[tuple[int, ...]] = []

    def find(num_outputs: int, num_inputs: int, *more: Any) -> tuple[Tile, ...]:
        probed.append((num_outputs, num_inputs))
        return tiles_for(torch.float32)

    monkeypatch.setattr(batch_invariant, "find_invariant_tiles", find)
    factory = TritonLinearFactory()
    for num_outputs in (40, 40, 513, 1024, 2048, 50_257):
        factory(torch.empty(num_outputs, 6))
    assert probed == [(40, 6), (513, 6), (512, 6), (512 + 50_257 % 512, 6)]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_tile_with_another_order_of_summation_is_not_used(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong first tile depends on the number of rows, since other tiles are compared with its single rows."""
    tiles = tiles_for(torch.bfloat16)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
        w, half = weight.float(), weight.shape[1] // 2
        is_halved = tile == tiles[wrong] and (wrong > 0 or len(x) > 1)
        rows = [row[:half] @ w[:, :half].T + row[half:] @ w[:, half:].T if is_halved else row @ w.T
                for row in x.float()]  # fmt: skip
        return torch.stack(rows).to(weight.dtype)

    monkeypatch.setattr(invariant_matmul, "multiply", product)
    key = (64, 64, torch.bfloat16, False, torch.device("cpu"))
    if wrong:
        assert find_invariant_tiles(*key) == tuple(tile for tile in tiles if tile != tiles[wrong])
    else:
        with pytest.raises(ModelFolderError, match=r"products with a weight of 64 x 64 .* depend on the batch"):
            find_invariant_tiles(*key)


@pytest.mark.interpreter  # tests/gpu/test_determinism.py compiles the kernels
@pytest.mark.usefixtures("dot_of_single_rows")
@pytest.mark.slow
def test_native_model_on_triton_has_the_same_bits_in_any_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**determinism.SHAPE, "intermediate_size": 96, "num_hidden_layers": 1}
    torch.manual_seed(0)
    save_random(transformers.LlamaConfig(**small), tmp_path)
    monkeypatch.setattr(work_list, "INVARIANT_SPLIT_TOKENS", 16)
    with no_warm_up():
        runner = determinism.load(tmp_path, "float32", backend="triton")
    assert isinstance(runner._network, Decoder) and isinstance(runner._network._head, TritonLinear)
    requests = [
        replace(request, prompt=request.prompt[:20], params=replace(request.params, max_tokens=2))
        for request in determinism.FEW
    ]
    expected = determinism.alone(runner, requests)
    assert not determinism.differing(determinism.run(runner, requests, determinism.Way(3, 7))[0], expected)

    def split_by_rows(tables: I32, start: I32, *rest: Any) -> AttentionWork:
        monkeypatch.setattr(work_list, "INVARIANT_SPLIT_TOKENS", 16 if len(start) > 1 else 64)
        return work_list.plan_invariant_work(tables, start, *rest)

    monkeypatch.setattr(runner._tables, "_prepare", split_by_rows)
    expected = determinism.alone(runner, requests)
    assert determinism.differing(determinism.run(runner, requests, determinism.Way(3, 7))[0], expected)


def test_fast_linear_keeps_the_plain_weight_without_onednn() -> None:
    weight, x = torch.randn(8, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    assert torch.equal(fast_linear(weight)(x), functional.linear(x, weight))
