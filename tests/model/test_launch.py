"""Asynchronous steps on lazy or eager streams equal synchronous ones."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from chatcache.model.cuda_graphs import capture_sizes
from chatcache.model.runner import AsyncLaunch
from tests.model.lazy_streams import ORDERS, LazyStream, lazy_streams
from tests.model.lives import NUM_SLOTS, Life, Outcome, live, make_runner

pytestmark = pytest.mark.slow

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
SIZES = capture_sizes(NUM_SLOTS)

Plant = Callable[[LazyStream, LazyStream], None]


def run(
    order: str = "both late", plant: Plant = lambda main, side: None, sizes: list[int] = SIZES, steps: int = 150
) -> Outcome:
    noise = np.random.default_rng(SEED)
    ahead = make_runner(AsyncLaunch(sizes), lazy_streams(*ORDERS[order], plant))
    ahead.warm_up()
    return live(make_runner(), ahead, Life(noise), steps)


@pytest.mark.parametrize("sizes", [SIZES, []], ids=["static", "uncaptured"])
@pytest.mark.parametrize(
    "order", ["both late", *(pytest.param(name, marks=pytest.mark.slow) for name in ORDERS if name != "both late")]
)
def test_asynchronous_steps_equal_synchronous_ones(order: str, sizes: list[int]) -> None:
    outcome = run(order, sizes=sizes)
    assert outcome.differing() is None, f"seed {SEED}"
    assert outcome.num_unseen > 100


def deaf_main(main: LazyStream, side: LazyStream) -> None:
    main.ignores_waits = True


def deaf_side(main: LazyStream, side: LazyStream) -> None:
    side.ignores_waits = True


@pytest.mark.parametrize(("order", "plant"), [("side late", deaf_main), ("side early", deaf_side)])
def test_injected_missing_wait_is_detected(order: str, plant: Plant) -> None:
    """Steps that do not wait for swaps, or swaps that do not wait for earlier steps."""
    assert run(order, plant).differing() is not None, f"seed {SEED}"
