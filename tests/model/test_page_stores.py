"""Layers of several shapes, shared layers and chunks: random plans against attention without pages."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from chatcache_kernels import cpu, reference
from chatcache_kernels.cpu import batch_invariant
from torch import Tensor

from chatcache.config import EngineConfig
from chatcache.errors import ModelFolderError
from chatcache.model.attention import AttentionBackend
from chatcache.model.geometry import AttentionLayer, Geometry, KVShape, LayerPlace, StoreShape, WorkForm
from chatcache.model.loading.loader import plan_capacity
from chatcache.model.page_tables import ChunkRows
from chatcache.model.runner import AsyncLaunch
from tests.model import listed
from tests.model.lives import CHUNKED, LAYERS, MIXED, NUM_SLOTS, VOCAB, Life, Reader, make_runner

SEED = int(os.environ.get("CHATCACHE_TEST_SEED", 7))


class Dense:
    """Attention of one whole sequence, from its keys and values in order. Replaces an `AttentionStep`."""

    def __init__(self, geometry: Geometry) -> None:
        self.layers = geometry.layers
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float) -> Tensor:
        shape = self.layers[layer]
        assert shape is not None
        if shape.kv_layer is not None:
            k, v = self.kept[shape.kv_layer]
        self.kept[layer] = k, v
        group = shape.num_heads // shape.kv.num_kv_heads
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        i = torch.arange(len(q))
        hidden = i[None, :] > i[:, None]
        if shape.chunk is not None:
            hidden |= i[None, :] // shape.chunk != i[:, None] // shape.chunk
        scores = torch.einsum("nhd,shd->hns", q, k) * scale
        return torch.einsum("hns,shd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def dense_logprobs(network: Reader, tokens: list[int]) -> Tensor:
    ids = torch.tensor(tokens)
    step = Dense(network.geometry)
    return network.forward(ids, torch.arange(len(ids)), step, ids.new_tensor([len(ids) - 1])).log_softmax(-1)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [MIXED, CHUNKED], ids=["mixed", "chunked"])
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(reference, marks=pytest.mark.slow),
        cpu,
        pytest.param(batch_invariant, marks=pytest.mark.slow),
        listed,
    ],
    ids=lambda module: module.__name__[-8:],
)
def test_random_plans_give_the_results_of_dense_attention(
    backend: AttentionBackend, layers: tuple[AttentionLayer | None, ...]
) -> None:
    """Prompts in chunks, forks, copies on write, swaps; and captured steps with the backend of work lists."""
    ahead = AsyncLaunch([1, 4, NUM_SLOTS]) if backend is listed else None
    runner = make_runner(ahead, kernels=backend, network=Reader(layers=layers))
    assert len({store.tensors[0].shape[2:] for store in runner._eager._stores}) == 3
    runner.warm_up()
    assert (runner.captured_steps[0] > 0) == (backend is listed and layers is MIXED)
    oracle, life, num_checked = Reader(layers=layers), Life(np.random.default_rng(SEED)), 0
    for step in range(200):
        if step >= 60 and num_checked > 20:
            break
        plan, slots = life.plan()
        result = runner.execute(plan)
        for draw in np.flatnonzero(plan.draws.width == 1).tolist():
            row = int(plan.draws.row[draw])
            branch = life.branches[slots[row]]
            end = branch.num_computed + int(plan.rows.num_tokens[row])
            want = dense_logprobs(oracle, branch.tokens[:end])[int(result.tokens[draw, 0])]
            assert abs(float(result.logprobs[draw, 0]) - float(want)) < 2e-4, f"seed {SEED}: step {step}"
            num_checked += end > 24
        life.take(plan, slots, result)
    assert num_checked > 20
    runner.close()


def test_layers_are_divided_among_stores_and_forms() -> None:
    geometry = Geometry(CHUNKED, VOCAB, torch.bfloat16, torch.device("cpu"))
    assert geometry.stores == (
        StoreShape(KVShape(1, 16), 3), StoreShape(KVShape(2, 16), 1), StoreShape(KVShape(1, 8), 2)
    )  # fmt: skip
    assert geometry.forms == (WorkForm(2), WorkForm(1), WorkForm(4), WorkForm(2, 16), WorkForm(4, 24))
    assert geometry.places[:3] == (LayerPlace(0, 0, 0, True), LayerPlace(1, 0, 1, True), None)
    assert geometry.places[5:] == (LayerPlace(1, 0, 1, False), LayerPlace(0, 2, 3, True), LayerPlace(2, 1, 4, True))
    assert geometry.page_bytes(8) == 8 * 2 * 2 * (3 * 16 + 2 * 16 + 2 * 8)
    assert Geometry(LAYERS, VOCAB, torch.bfloat16, torch.device("cpu")).forms == (WorkForm(2),)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_cut_where_chunks_begin(seed: int) -> None:
    """Each token of a piece finds its chunk's keys at the pages that the whole row has for them."""
    noise, size, chunk = np.random.default_rng(seed), 4, 12
    start, counts = noise.integers(0, 40, 5).astype(np.int32), noise.integers(0, 30, 5).astype(np.int32)
    tables = noise.integers(1, 1000, (5, -(-int((start + counts).max()) // size))).astype(np.int32)
    pieces = ChunkRows.cut(tables, start, counts, size, chunk)
    want = [
        [tables[row, key // size] * size + key % size for key in range(position // chunk * chunk, position + 1)]
        for row in range(5)
        for position in range(start[row], start[row] + counts[row])
    ]
    got = [
        [pieces.tables[row, key // size] * size + key % size for key in range(position + 1)]
        for row in range(len(pieces.start))
        for position in range(pieces.start[row], pieces.start[row] + pieces.num_tokens[row])
    ]
    assert got == want
    assert pieces.offsets.tolist() == [0, *np.cumsum(pieces.num_tokens)] and pieces.tables.shape[1] <= chunk // size


def test_chunk_that_pages_do_not_divide_is_refused() -> None:
    geometry = Geometry(CHUNKED, VOCAB, torch.float32, torch.device("cpu"))
    with pytest.raises(ModelFolderError, match="page_size 16 does not divide the attention chunks of 24 tokens"):
        plan_capacity(EngineConfig(page_size=16), geometry, 64)
    assert plan_capacity(EngineConfig(page_size=8), geometry, 64).num_pages > 2
