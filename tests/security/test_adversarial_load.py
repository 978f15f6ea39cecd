"""Test that valid adversarial requests neither end the engine nor affect others (CVE-2026-105757, -114049)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec import structs

from chatcache import factory as compose
from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.errors import ChatcacheError
from chatcache.scheduler.request import LiveRequest
from chatcache.types.plan import StepPlan, StepResult
from tests.security.adversarial_load import NUM_REFERENCES, LoadResult, LoadRun
from tests.security.adversarial_requests import Adversary
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

SEED = int(os.environ.get("CHATCACHE_TEST_SEED", 16))
VOCAB = 96
PIECES = tuple(bytes([32 + token]) if token else b"" for token in range(VOCAB))
Patch = pytest.MonkeyPatch


def fake_engine(runner_class: type[FakeRunner] = FakeRunner, *, ahead: bool = False, num_pages: int = 400) -> Engine:
    runner = runner_class(fake_capacity(num_pages, num_host_pages=200, has_async_launch=ahead), VOCAB)
    config = EngineConfig(strict=True, max_num_batched_tokens=256, max_num_seqs=64)
    return Engine(runner, fake_model_info(VOCAB), config, PIECES, special_ids=(0,))


def run_load(engine: Engine, num_requests: int, seed: int = SEED, *, structures: bool = True) -> LoadResult:
    adversary = Adversary(
        seed, engine.model_info.vocab_size, max_model_len=engine.model_info.max_model_len, structures=structures
    )
    return LoadRun(engine, adversary, num_requests).run()


@pytest.mark.parametrize(
    "ahead", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["synchronous", "asynchronous"]
)
@pytest.mark.slow
def test_adversarial_requests_change_no_reference_result(ahead: bool) -> None:
    seen = run_load(fake_engine(ahead=ahead), 500)
    assert seen.num_finished > 250 and seen.num_references > 2 * NUM_REFERENCES and seen.failed


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_hundred_thousand_adversarial_requests_change_no_reference_result(part: int) -> None:
    run_load(fake_engine(ahead=part % 2 > 0, num_pages=(400, 90)[part % 3 == 0]), 10_000, SEED + part)


def real_engine() -> Engine:
    """Return an engine with a network that computes, in the batch-invariant mode."""
    return compose.build_engine(
        EngineConfig(
            strict=True,
            dtype="float32",
            deterministic=True,
            kv_memory_bytes=16 << 20,
            max_num_seqs=64,
            max_num_batched_tokens=256,
        )
    )


@pytest.mark.slow
def test_adversarial_requests_with_a_real_network_change_no_reference_result() -> None:
    seen = run_load(real_engine(), 80)
    assert seen.num_finished > 40


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_many_adversarial_requests_with_a_real_network_change_no_reference_result(part: int) -> None:
    run_load(real_engine(), 5_000, SEED + part)


class LeakingEdits(FakeRunner):
    """Applies each edit of logits to the next sample too, like stale state in a row."""

    def execute(self, plan: StepPlan) -> StepResult:
        draws, num_draws = plan.draws, len(plan.draws.row)
        edits = {
            (edit.draw + 1) % num_draws: structs.replace(edit, draw=(edit.draw + 1) % num_draws) for edit in draws.edits
        }
        edits |= {edit.draw: edit for edit in draws.edits}
        return super().execute(replace(plan, draws=replace(draws, edits=tuple(edits.values()))))


class PositionNoise(FakeRunner):
    """Derives the noise from the position in the batch."""

    def execute(self, plan: StepPlan) -> StepResult:
        lanes = plan.draws.lane + plan.draws.row
        return super().execute(replace(plan, draws=replace(plan.draws, lane=lanes.astype(plan.draws.lane.dtype))))


def error_escapes(patch: Patch) -> type[FakeRunner]:
    """Do not catch the error of a single request."""

    def fail(self: Engine, request: LiveRequest, error: BaseException) -> None:
        raise error

    patch.setattr(Engine, "_close_failed", fail)
    return FakeRunner


def state_leaks(patch: Patch) -> type[FakeRunner]:
    return LeakingEdits


def noise_by_position(patch: Patch) -> type[FakeRunner]:
    return PositionNoise


@pytest.mark.parametrize(
    ("bug", "error", "words"),
    [
        (error_escapes, ChatcacheError, r"no token|cannot be used|structured_outputs"),
        (state_leaks, AssertionError, r"reference\d+ differs"),
        (noise_by_position, AssertionError, r"reference\d+ differs"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_injected_bug_is_found(
    bug: Callable[[Patch], type[FakeRunner]], error: type[Exception], words: str, monkeypatch: Patch
) -> None:
    runner_class = bug(monkeypatch)
    with pytest.raises(error, match=words):
        run_load(fake_engine(runner_class), 300)
