"""Steps launched ahead, on streams that run as late or as early as the declared waits allow: the same as in turn."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from chatcache.model.cuda_graphs import capture_sizes
from chatcache.model.runner import AsyncLaunch
from tests.model.lazy_streams import ORDERS, LazyStream, lazy_streams
from tests.model.lives import NUM_SLOTS, Life, Outcome, live, make_runner

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
@pytest.mark.parametrize("order", list(ORDERS))
def test_a_life_ahead_is_the_same_life(order: str, sizes: list[int]) -> None:
    outcome = run(order, sizes=sizes)
    assert outcome.differing() is None, f"seed {SEED}"
    assert outcome.num_unseen > 100


def deaf_main(main: LazyStream, side: LazyStream) -> None:
    main.ignores_waits = True


def deaf_side(main: LazyStream, side: LazyStream) -> None:
    side.ignores_waits = True


@pytest.mark.parametrize(("order", "plant"), [("side late", deaf_main), ("side early", deaf_side)])
def test_planted_missing_waits(order: str, plant: Plant) -> None:
    """Steps that do not wait for pages on their way in or out; pages that leave before the steps before are done."""
    assert run(order, plant).differing() is not None, f"seed {SEED}"
