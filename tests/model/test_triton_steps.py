"""Random plans on Triton kernels equal the reference.

Fixed buffers, asynchronous launches, and swaps on lazy streams.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
from chatcache_kernels import triton

from chatcache.model import static_steps
from chatcache.model.cuda_graphs import capture_sizes
from chatcache.model.geometry import AttentionLayer
from chatcache.model.runner import AsyncLaunch
from tests.model.drive import short_warm_up
from tests.model.lazy_streams import lazy_streams
from tests.model.lives import CHUNKED, LAYERS, MIXED, NUM_SLOTS, Life, Reader, live, make_runner

pytestmark = pytest.mark.slow

SEED = int(os.environ["CHATCACHE_TEST_SEED"])


@pytest.mark.interpreter  # tests/gpu has the same with real streams
@pytest.mark.parametrize("layers", [LAYERS, MIXED, CHUNKED], ids=["alike", "mixed", "chunked"])
def test_random_plans_on_triton_kernels_equal_the_reference(
    layers: Sequence[AttentionLayer | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatcache_kernels.work_list.SPLIT_TOKENS", 16)
    monkeypatch.setattr(static_steps, "SPLIT_TOKENS", 16)
    runner = make_runner(
        AsyncLaunch(capture_sizes(NUM_SLOTS), prompt_sizes=(16, 64)),
        lazy_streams(False, False),
        triton,
        Reader(layers=layers),
    )
    with short_warm_up():
        runner.warm_up()
    plain = make_runner(network=Reader(layers=layers))
    life, num_unseen = Life(np.random.default_rng(SEED), decode_only=0.6), 0
    for _ in range(8):  # as a rule one round is enough
        outcome = live(plain, runner, life, 25)
        assert outcome.differing() is None, f"seed {SEED}"
        num_unseen += outcome.num_unseen
        if num_unseen > 10:
            return
    raise AssertionError(f"seed {SEED}: only {num_unseen} tokens were not seen by the host")
