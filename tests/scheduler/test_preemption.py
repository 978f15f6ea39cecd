"""The choice between swapping and recomputation follows the measured costs."""

from __future__ import annotations

import pytest

from chatcache.scheduler.preemption import NUM_REMEMBERED_STEPS, CostModel, PrefillSpeed


def test_prefill_speed_is_the_median_of_prompt_steps() -> None:
    speed = PrefillSpeed()
    assert speed.seconds_per_token() is None
    for _ in range(10):
        speed.record(1000, 1, 0.5)
    speed.record(1000, 1, 60.0)  # a step that compiled a kernel
    speed.record(4, 2, 0.4)  # a small prompt: slow per token
    assert speed.seconds_per_token() == pytest.approx(0.5e-3)


def test_prefill_speed_ignores_decode_steps() -> None:
    speed = PrefillSpeed()
    speed.record(32, 32, 0.1)
    speed.record(40, 32, 0.1)
    assert speed.seconds_per_token() is None
    speed.record(2048, 32, 0.2048)
    for _ in range(1000):
        speed.record(32, 32, 0.1)
    assert speed.seconds_per_token() == pytest.approx(1e-4)


def test_prefill_speed_forgets_old_steps() -> None:
    speed = PrefillSpeed()
    speed.record(10**6, 1, 1.0)
    for _ in range(NUM_REMEMBERED_STEPS):
        speed.record(100, 1, 1.0)
    assert speed.seconds_per_token() == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("num_tokens", "num_out", "num_in", "swaps"),
    [(1000, 63, 63, True), (1000, 1, 1000, False), (10, 1, 1, False), (10, 0, 0, True)],
)
def test_cost_model_chooses_the_cheaper_way(num_tokens: int, num_out: int, num_in: int, swaps: bool) -> None:
    cost = CostModel("auto", swap_page_s=1e-3)
    cost.prefill.record(1000, 1, 0.2)  # 0.2 ms a token
    assert cost.prefers_swap(num_tokens, num_out, num_in) is swaps
    assert CostModel("swap", 1.0).prefers_swap(num_tokens, num_out, num_in)
    assert not CostModel("recompute", 0.0).prefers_swap(num_tokens, num_out, num_in)


def test_cost_model_with_an_unknown_mode_raises() -> None:
    with pytest.raises(ValueError, match="auto, swap, recompute, got 'swop'"):
        CostModel("swop")
