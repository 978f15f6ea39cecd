"""Deterministic mode on a GPU: every logit has the bits of the solo run in every configuration.

The requests and the configurations are those of `tests/model/test_determinism_matrix.py`. Splits of attention are
short, so that short contexts have several. Most decode steps are captured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chatcache_kernels import work_list
from chatcache_kernels.triton.invariant_matmul import choose_tile, multiply, tiles_for

from chatcache.model import static_steps
from chatcache.model.batch_invariant import TritonLinear
from chatcache.model.decoder import Decoder
from chatcache.model.runner import Runner
from chatcache.types.request import BeamSearchParams, GenerateRequest, SamplingParams
from tests.gpu.engine_cases import count_replays
from tests.model import determinism
from tests.model.determinism import LONG, MAX_TOKENS, REQUESTS, WAYS, Bits, Way, alone, differing, growing_requests, run
from tests.model.families import save_random

pytestmark = pytest.mark.gpu

SPLIT = 128  # tokens
WIDE = {
    **determinism.SHAPE, "hidden_size": 512, "intermediate_size": 4096, "num_attention_heads": 8, "head_dim": 128,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": determinism.SHAPES["llama"],
    "qwen3": lambda: transformers.Qwen3Config(**WIDE),
    "mistral": lambda: transformers.MistralConfig(**WIDE, sliding_window=50),
}
MODELS = ("llama-float32", "qwen3-bfloat16", "mistral-bfloat16")
CHOSEN_WAYS = (
    "batch1-chunk5-uncached", "batch2-chunk2048-cached", "batch7-chunk5-cached", "batch32-chunk37-cached",
    "batch32-chunk2048-uncached", "batch32-chunk2048-cached", "in-order", "backwards",
)  # fmt: skip

Load = Callable[..., Runner]


@pytest.fixture(scope="module", autouse=True)
def _short_splits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_list, "INVARIANT_SPLIT_TOKENS", SPLIT)
        patch.setattr(static_steps, "SPLIT_TOKENS", SPLIT)
        yield


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Return a function that loads one of MODELS."""

    @cache
    def folder_of(name: str) -> Path:
        torch.manual_seed(sum(map(ord, name)))
        folder = tmp_path_factory.mktemp(name)
        save_random(CONFIGS[name](), folder)
        return folder

    def load(model: str, **more: Any) -> Runner:
        name, dtype = model.split("-")
        return determinism.load(folder_of(name), dtype, device="cuda", backend="triton", max_num_seqs=33, **more)

    return load


@pytest.fixture(scope="module")
def solo(load: Load) -> Callable[[str], tuple[Runner, Bits]]:
    """Return a function that returns a model's runner and the bits of each request run alone."""

    @cache
    def solo(model: str) -> tuple[Runner, Bits]:
        runner = load(model)
        return runner, alone(runner, REQUESTS)

    return solo


Solo = Callable[[str], tuple[Runner, Bits]]


@pytest.mark.parametrize("way", CHOSEN_WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_logits_on_a_gpu_equal_the_solo_run_in_every_configuration(
    model: str, way: str, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, expected = solo(model)
    replayed = count_replays(monkeypatch)
    requests, how = WAYS[way]
    got, _ = run(runner, requests, how)
    assert len(got) == len(requests) * (MAX_TOKENS + 1)
    assert not differing(got, expected)
    assert replayed, "no captured step was run"


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("model", MODELS)
def test_preempted_requests_on_a_gpu_equal_the_solo_run(model: str, preemption: str, solo: Solo) -> None:
    runner, _ = solo(model)
    requests = growing_requests(6, 70)
    got, engine = run(runner, requests, Way(6, 37, num_pages=20, preemption=preemption))
    health = engine.health()
    assert health.num_preemptions >= 3
    assert (health.num_pages_swapped_in > 0) == (preemption == "swap")
    assert not differing(got, alone(runner, requests))


@pytest.mark.parametrize("params", [
    SamplingParams(n=5, temperature=1.0, seed=77, max_tokens=8, ignore_eos=True),
    BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True),
], ids=["samples", "beams"])  # fmt: skip
def test_forked_branch_on_a_gpu_equals_a_recomputed_one(params: SamplingParams | BeamSearchParams, solo: Solo) -> None:
    runner, _ = solo("qwen3-bfloat16")
    request = GenerateRequest(request_id="one", prompt=REQUESTS[1].prompt, params=params)
    forked = run(runner, [request], Way(8), by_tokens=True)[0]
    histories = [cell for cell in forked if isinstance(cell, tuple)]
    assert len(histories) > 20
    for tokens in histories:
        copy = GenerateRequest(request_id="one", prompt=tokens, params=SamplingParams(temperature=0.0, max_tokens=1))
        assert run(runner, [copy], Way(), by_tokens=True)[0][tokens] == forked[tokens]


def test_new_runner_on_a_gpu_computes_the_same_bits(load: Load, solo: Solo) -> None:
    assert not differing(alone(load("qwen3-bfloat16"), LONG), solo("qwen3-bfloat16")[1])


def test_without_deterministic_mode_logits_on_a_gpu_differ(load: Load) -> None:
    """Without this, the other tests could not fail."""
    runner = load("qwen3-bfloat16", deterministic=False)
    assert differing(run(runner, LONG, Way(1, 5))[0], alone(runner, LONG))


def test_injected_split_by_the_number_of_rows_is_detected(solo: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, expected = solo("llama-float32")  # few differences in the last bits of float32 survive in bfloat16

    def split_by_rows(tables: Any, start: Any, *rest: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(work_list, "INVARIANT_SPLIT_TOKENS", SPLIT if len(start) < 3 else 2 * SPLIT)
            return work_list.plan_invariant_work(tables, start, *rest)

    monkeypatch.setattr(runner._tables, "_prepare", split_by_rows)
    assert differing(run(runner, REQUESTS[:8], Way(8, 600))[0], expected)


def test_all_tiles_of_a_gpu_have_equal_bits_or_are_not_used(solo: Solo) -> None:
    """Multiply with the tiles that the layers use, for numbers of rows that choose each of them."""
    runner, _ = solo("qwen3-bfloat16")
    assert isinstance(runner._network, Decoder)
    head = runner._network._head
    assert isinstance(head, TritonLinear)
    weight = torch.randn(28_672, 4096, device="cuda").bfloat16()
    x = torch.randn(300, 4096, device="cuda").bfloat16()
    whole = multiply(x, weight, None, tiles_for(torch.bfloat16)[0])
    chosen = set()
    for num_rows in (1, 2, 17, 64, 65, 300):
        tile = choose_tile(head.tiles, num_rows, len(weight), 132)
        chosen.add(tile)
        assert torch.equal(multiply(x[:num_rows], weight, None, tile), whole[:num_rows])
    assert len(chosen) > 1 or len(head.tiles) == 1
