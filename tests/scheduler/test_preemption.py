"""The choice between swapping and recomputation follows the measured costs."""

from __future__ import annotations

import pytest

from chatcache.scheduler.preemption import CostModel


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
