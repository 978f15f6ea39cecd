"""Ten times the engine's capacity: the queue holds, and other tenants hardly wait.

Everything is counted in engine steps and tokens, so it is the same on any machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import pytest

from chatcache.engine import admission as intake
from chatcache.errors import OverloadedError, RateLimitError
from chatcache.scheduler.fairness import VirtualTokenCounter
from tests.engine.adversarial_load import FLOOD, MOST, SLOTS, AdversarialLoad

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
SLOWER = 2.0  # how much longer the others may wait for their first token
GOODPUT = 0.9


@cache
def without_refusals(num_steps: int) -> AdversarialLoad:
    """Return a run without a flood, in which no request is rejected."""
    return AdversarialLoad(num_floods=0, num_steps=num_steps, seed=SEED).run()


def check_other_tenants(policy: str = "fair", num_steps: int = 400) -> tuple[float, float]:
    """Compare ten tenants with and without a flood.

    Raises: AssertionError if they wait too long.
    """
    alone = without_refusals(num_steps)
    flooded = AdversarialLoad(policy, num_steps=num_steps, seed=SEED).run()
    assert not alone.refused
    assert set(flooded.refused) == {f"{FLOOD}0"}, "only the flood is refused"
    assert flooded.slowest_wait <= SLOWER * alone.slowest_wait, (
        f"{flooded.slowest_wait} after {alone.slowest_wait} steps"
    )
    return alone.slowest_wait, flooded.slowest_wait


@pytest.mark.slow
def test_ten_tenants_under_a_flood_wait_at_most_twice_as_long() -> None:
    check_other_tenants()


def first_come_first_served(patch: pytest.MonkeyPatch) -> str:
    return "fcfs"


def no_shares(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(intake, "check_tenant_share", lambda *_: None)
    return "fair"


def nothing_is_charged(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(VirtualTokenCounter, "charge_start", lambda *_: None)
    patch.setattr(VirtualTokenCounter, "charge_step", lambda *_: None)
    return "fair"


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (first_come_first_served, r"after [\d.]+ steps"),
        (no_shares, "only the flood is refused"),
        (nothing_is_charged, r"after [\d.]+ steps"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
@pytest.mark.slow
def test_a_flood_check_without_fairness_or_shares_fails(
    bug: Callable[[pytest.MonkeyPatch], str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = bug(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        check_other_tenants(policy)


@pytest.mark.parametrize("num_floods", [1, 20])
def test_a_flood_never_overflows_the_queue_and_keeps_the_engine_busy(num_floods: int) -> None:
    crowd = AdversarialLoad(num_polite=0, num_floods=num_floods, seed=SEED).run()
    assert crowd.widest[0] <= MOST and crowd.widest[1] <= MOST // 2
    assert crowd.widest[1 if num_floods == 1 else 0] == (MOST // 2 if num_floods == 1 else MOST), "it was full"
    assert crowd.refusals[RateLimitError if num_floods == 1 else OverloadedError] > 100
    assert crowd.tokens_per_step >= GOODPUT * SLOTS


def test_a_flood_check_detects_an_engine_with_idle_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that leaves half of its slots idle under load fails the check."""
    monkeypatch.setattr("tests.engine.adversarial_load.SLOTS", SLOTS // 2)
    crowd = AdversarialLoad(num_polite=0, seed=SEED).run()
    assert crowd.tokens_per_step < GOODPUT * SLOTS


@pytest.mark.long
def test_a_long_flood_passes_all_checks() -> None:
    alone, flooded = check_other_tenants(num_steps=8_000)
    print(f"first token, p95: {alone} steps alone, {flooded} under a flood of ten times the capacity")
