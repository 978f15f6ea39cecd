"""Random plans with swaps, copies and writes equal plain tensors in the documented order."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from chatcache_kernels.types import HostPages
from torch import Tensor

from chatcache.config import EngineConfig
from chatcache.errors import ModelFolderError
from chatcache.model.attention import AttentionStep, allocate_stores, choose_backend
from chatcache.model.geometry import Geometry
from chatcache.model.loading.loader import SWAP_MAX_BYTES, plan_capacity
from chatcache.model.runner import Runner, allocate_locked
from chatcache.types.plan import KVCapacity, Rows, StepPlan
from chatcache.types.stats import ModelInfo
from tests.model.drive import Driver, make_draws
from tests.model.families import VOCAB, Sample

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
LAYERS, PAGES, HOST_PAGES, SIZE, HEADS, DIM, SLOTS = 2, 12, 7, 8, 2, 16, 3
GEOMETRY = Geometry.uniform(LAYERS, HEADS, HEADS, DIM, 4, torch.float32, torch.device("cpu"))


@dataclass
class Writer:
    """A network that stores numbers made from token id and layer, and predicts nothing."""

    geometry: Geometry = GEOMETRY

    def forward(self, tokens: Tensor, positions: Tensor, step: AttentionStep, drawn: Tensor | None) -> Tensor:
        for layer in range(LAYERS):
            k = cells(tokens, layer)
            step.kernels.write_pages(step.pages, layer, k, -k, step.batch.slots)
        return torch.zeros(len(tokens if drawn is None else drawn), self.geometry.vocab_size)

    def hidden_states(self, tokens: Tensor, positions: Tensor, step: AttentionStep, wanted: Tensor) -> Tensor:
        raise NotImplementedError

    def logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError


def cells(tokens: Tensor, layer: int) -> Tensor:
    """Return what `Writer` stores, [T, Hkv, D]."""
    return tokens[:, None, None] * 1000.0 + layer * 500.0 + torch.arange(HEADS * DIM).view(HEADS, DIM)


def pairs(noise: np.random.Generator, sources: int, targets: int, first: int) -> np.ndarray:
    """Return up to three random (source, target), no target twice; device pages start at 1."""
    count = int(noise.integers(0, 4))
    source = noise.integers(1 - first, sources, count)
    target = noise.permutation(np.arange(first, targets))[:count]
    return np.stack((source, target), 1).astype(np.int32)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_random_plans_move_pages_as_documented(backend: str) -> None:
    noise = np.random.default_rng(SEED)
    name, kernels = choose_backend(backend, torch.device("cpu"))
    (store,) = allocate_stores(kernels, GEOMETRY, PAGES, SIZE)
    for memory in store.tensors:
        memory.zero_()
    capacity = KVCapacity(PAGES, SIZE, SLOTS, 4 * SIZE, num_host_pages=HOST_PAGES)
    model_info = ModelInfo(name="writer", digest="00", vocab_size=4, max_model_len=4 * SIZE, eos_token_ids=())
    runner = Runner(Writer(), kernels, (store,), capacity, model_info)
    expected = torch.zeros(LAYERS, PAGES, SIZE, HEADS, DIM)
    host = torch.zeros(LAYERS, HOST_PAGES, SIZE, HEADS, DIM)
    runner.execute(swap_plan(out=[(0, page) for page in range(HOST_PAGES)]))  # the room holds nothing defined yet
    tables = np.zeros((SLOTS, 4), np.int32)
    for step in range(300):
        out, back = pairs(noise, PAGES, HOST_PAGES, 0), pairs(noise, HOST_PAGES, PAGES, 1)
        copies = pairs(noise, PAGES, PAGES, 1)
        copies = copies[~np.isin(copies[:, 1], copies[:, 0])]
        slot, index = int(noise.integers(SLOTS)), int(noise.integers(4))
        page = int(noise.integers(1, PAGES))
        tables[slot, index] = page
        tokens = noise.integers(0, 4, int(noise.integers(1, SIZE + 1)))
        for source, target in out:
            host[:, target] = expected[:, source]
        for source, target in back:
            expected[:, target] = host[:, source]
        for source, target in copies:
            expected[:, target] = expected[:, source]
        for layer in range(LAYERS):
            expected[layer, page, : len(tokens)] = cells(torch.from_numpy(tokens), layer)
        start = np.array([index * SIZE], np.int32)
        rows = Rows(np.array([slot], np.int32), start, np.array([len(tokens)], np.int32), tokens.astype(np.int32))
        update = np.array([(slot, index, page)], np.int32)
        none = np.zeros((0, 3), np.int32)
        runner.execute(StepPlan(step, none, update, copies, rows, make_draws([]), out, back))
        for layer in range(LAYERS):
            k, v = read(kernels, store, layer)
            assert torch.equal(k, expected[layer]), f"seed {SEED}: {name}, step {step}"
            assert torch.equal(v, -expected[layer]), f"seed {SEED}: {name}, step {step}"


def read(kernels: object, store: object, layer: int) -> tuple[Tensor, Tensor]:
    """Return all keys and values of a layer, [N, P, Hkv, D]."""
    k, v = kernels.read_pages(store, layer, torch.arange(PAGES * SIZE))  # type: ignore[attr-defined]
    return k.view(PAGES, SIZE, HEADS, DIM), v.view(PAGES, SIZE, HEADS, DIM)


def swap_plan(out: list[tuple[int, int]] | None = None, back: list[tuple[int, int]] | None = None) -> StepPlan:
    none, empty = np.zeros((0, 3), np.int32), np.zeros(0, np.int32)
    swaps_out, swaps_in = (np.array(pairs or [], np.int32).reshape(-1, 2) for pairs in (out, back))
    rows = Rows(empty, empty, empty, empty)
    return StepPlan(0, none, none, none[:, :2], rows, make_draws([]), swaps_out, swaps_in)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_swapped_branch_continues_from_other_pages(
    backend: str, sample_of: Callable[[str], Sample], load: Callable[..., Runner]
) -> None:
    """A branch swapped out and in to other pages has the bits of one that stayed.

    Its first pages are overwritten by another prompt meanwhile.
    """
    sample = sample_of("llama")
    driver = Driver(load(sample.folder, attention_backend=backend))
    prompt = sample.prompts[2]
    driver.feed({0: prompt[:-1], 1: prompt[:-1]})
    away = [(page, 3 + index) for index, page in enumerate(driver.pages[1])]
    driver.runner.execute(swap_plan(out=away))
    driver.next_page, after = driver.pages[1][0], driver.next_page
    driver.feed({2: sample.prompts[3][: len(prompt) - 1]})
    assert driver.pages[2] == driver.pages[1]
    driver.pages[1] = list(range(after, after + len(away)))
    driver.next_page = after + len(away)
    driver._updates += [(1, index, page) for index, page in enumerate(driver.pages[1])]
    driver.runner.execute(swap_plan(back=[(kept, page) for (_, kept), page in zip(away, driver.pages[1], strict=True)]))
    whole = make_draws([{"row": row, "num_top": VOCAB} for row in range(2)])
    result = driver.feed({0: prompt[-1:], 1: prompt[-1:]}, whole)
    assert np.array_equal(result.top_logprobs[0], result.top_logprobs[1])
    assert np.array_equal(result.top_tokens[0], result.top_tokens[1])


def test_swap_of_a_missing_page_is_rejected(sample_of: Callable[[str], Sample], load: Callable[..., Runner]) -> None:
    runner = load(sample_of("llama").folder, attention_backend="cpu")
    pages, host_pages = runner.capacity().num_pages, runner.capacity().num_host_pages
    for swap in ((1, host_pages), (pages, 0), (1, -1), (-1, 0)):
        with pytest.raises(ValueError, match=r"a swap names (host )?page -?\d+ of \d+"):
            runner.execute(swap_plan(out=[swap]))
        with pytest.raises(ValueError, match=r"a swap names (host )?page -?\d+ of \d+"):
            runner.execute(swap_plan(back=[swap[::-1]]))


def test_warm_up_measures_the_time_of_a_swap(sample_of: Callable[[str], Sample], load: Callable[..., Runner]) -> None:
    folder = sample_of("llama").folder
    assert 0 < load(folder).capacity().swap_page_s < 1.0
    off = load(folder, swap_space_bytes=0).capacity()
    assert (off.num_host_pages, off.swap_page_s) == (0, 0.0)


def test_plan_capacity_sizes_the_host_pages() -> None:
    page_bytes = GEOMETRY.page_bytes(8)

    def host_pages(num_bytes: int | None, kv_bytes: int = 64 * page_bytes) -> int:
        config = EngineConfig(page_size=8, kv_memory_bytes=kv_bytes, swap_space_bytes=num_bytes)
        return plan_capacity(config, GEOMETRY, 1 << 20).num_host_pages

    assert host_pages(None) == 32
    assert host_pages(None, 1 << 40) == SWAP_MAX_BYTES // page_bytes
    assert host_pages(0) == 0
    assert host_pages(5 * page_bytes + 1) == 5
    for wrong in (-1, page_bytes - 1):
        with pytest.raises(ModelFolderError, match=f"swap_space_bytes {wrong} .* takes {page_bytes} bytes"):
            host_pages(wrong)


def test_unused_host_pages_take_no_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    _, kernels = choose_backend("cpu", torch.device("cpu"))
    (store,) = allocate_stores(kernels, GEOMETRY, 4, SIZE)
    before = resident_bytes()
    host = HostPages.allocate(store, (1 << 30) // store.page_bytes)
    assert host.num_pages * store.page_bytes == 1 << 30
    assert resident_bytes() - before < 1 << 24


class RefusingSystem:
    """Locks the first store of host pages, and refuses to lock the second."""

    def __init__(self) -> None:
        self.locked: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.locked:
            return 1
        self.locked.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.locked.remove(address)


def test_refused_lock_leaves_an_optional_swap_space_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    system = RefusingSystem()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: system)
    stores = allocate_stores(choose_backend("reference", GEOMETRY.device)[1], GEOMETRY, PAGES, SIZE)
    (host,), addresses = allocate_locked(stores, HOST_PAGES, is_optional=True)
    assert host.num_pages == 0 and not addresses and not system.locked
    with pytest.raises(ModelFolderError, match="swap_space_bytes: the system does not lock"):
        allocate_locked(stores, HOST_PAGES, is_optional=False)
    assert not system.locked
