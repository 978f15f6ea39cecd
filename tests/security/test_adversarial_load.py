"""Requests that every check admits: none ends the engine, none reaches another request (CVE-2026-105757, -114049)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from chatcache import factory as compose
from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.errors import ChatcacheError
from chatcache.scheduler.request import LiveRequest
from chatcache.types.plan import StepPlan, StepResult
from tests.security.adversarial_load import NUM_CANARIES, Crowd, Run
from tests.security.adversarial_requests import Adversary
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_facts

SEED = int(os.environ.get("CHATCACHE_TEST_SEED", 16))
VOCAB = 96
PIECES = tuple(bytes([32 + token]) if token else b"" for token in range(VOCAB))
Patch = pytest.MonkeyPatch


def fake_engine(runner_class: type[FakeRunner] = FakeRunner, *, ahead: bool = False, num_pages: int = 400) -> Engine:
    runner = runner_class(fake_capacity(num_pages, num_host_pages=200, has_async_launch=ahead), VOCAB)
    config = EngineConfig(strict=True, max_num_batched_tokens=256, max_num_seqs=64)
    return Engine(runner, fake_facts(VOCAB), config, PIECES, special_ids=(0,))


def crowd(engine: Engine, num_requests: int, seed: int = SEED, *, structures: bool = True) -> Crowd:
    adversary = Adversary(
        seed, engine.model_info.vocab_size, max_model_len=engine.model_info.max_model_len, structures=structures
    )
    return Run(engine, adversary, num_requests).play()


@pytest.mark.parametrize("ahead", [False, True], ids=["each step waited for", "a step ahead"])
def test_no_request_ends_the_engine_or_reaches_a_canary(ahead: bool) -> None:
    seen = crowd(fake_engine(ahead=ahead), 500)
    assert seen.num_finished > 250 and seen.num_canaries > 2 * NUM_CANARIES and seen.failed


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_no_request_of_a_hundred_thousand_does(part: int) -> None:
    crowd(fake_engine(ahead=part % 2 > 0, num_pages=(400, 90)[part % 3 == 0]), 10_000, SEED + part)


def built_in() -> Engine:
    """The model that computes, in the mode that promises equal bits."""
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


def test_nor_with_a_model_that_computes() -> None:
    seen = crowd(built_in(), 80)
    assert seen.num_finished > 40


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_nor_with_a_model_that_computes_for_long(part: int) -> None:
    crowd(built_in(), 5_000, SEED + part)


class Leaking(FakeRunner):
    """Applies each edit of logits to the next draw too: what stale state in a slot amounts to."""

    def execute(self, plan: StepPlan) -> StepResult:
        draws, num_draws = plan.draws, len(plan.draws.row)
        edits = {(edit.draw + 1) % num_draws: replace(edit, draw=(edit.draw + 1) % num_draws) for edit in draws.edits}
        edits |= {edit.draw: edit for edit in draws.edits}
        return super().execute(replace(plan, draws=replace(draws, edits=tuple(edits.values()))))


class Confused(FakeRunner):
    """Numbers its noise by the place in the batch."""

    def execute(self, plan: StepPlan) -> StepResult:
        lanes = plan.draws.lane + plan.draws.row
        return super().execute(replace(plan, draws=replace(plan.draws, lane=lanes.astype(plan.draws.lane.dtype))))


def fault_escapes(patch: Patch) -> type[FakeRunner]:
    """A request's own fault is nobody's to catch."""

    def fail(self: Engine, request: LiveRequest, error: BaseException) -> None:
        raise error

    patch.setattr(Engine, "_close_failed", fail)
    return FakeRunner


def state_leaks(patch: Patch) -> type[FakeRunner]:
    return Leaking


def noise_by_place(patch: Patch) -> type[FakeRunner]:
    return Confused


@pytest.mark.parametrize(
    ("bug", "error", "words"),
    [
        (fault_escapes, ChatcacheError, r"no token|cannot be used|structured_outputs"),
        (state_leaks, AssertionError, r"canary\d+ was disturbed"),
        (noise_by_place, AssertionError, r"canary\d+ was disturbed"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_the_check_fails_on(
    bug: Callable[[Patch], type[FakeRunner]], error: type[Exception], words: str, monkeypatch: Patch
) -> None:
    runner_class = bug(monkeypatch)
    with pytest.raises(error, match=words):
        crowd(fake_engine(runner_class), 300)
