"""The measured speed of steps: medians of recent ones, and a line over the number of branches."""

from __future__ import annotations

import pytest

from chatcache.scheduler.speed import NUM_REMEMBERED_STEPS, DecodeSpeed, PrefillSpeed


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


def test_decode_speed_is_a_step_and_the_slope_over_branches() -> None:
    speed = DecodeSpeed()
    assert speed.seconds_per_step() is None and speed.seconds_per_branch() is None
    for _ in range(20):
        speed.record(2, 2, 0.012)
    assert speed.seconds_per_step() == pytest.approx(0.012) and speed.seconds_per_branch() is None
    for _ in range(1000):
        speed.record(32, 32, 0.042)
    speed.record(32, 32, 9.0)  # a step that was delayed
    speed.record(2048, 32, 5.0)  # with a prompt
    assert speed.seconds_per_step() == pytest.approx(0.042)
    assert speed.seconds_per_branch() == pytest.approx(0.001)


def test_decode_speed_of_steps_that_do_not_lengthen_has_no_negative_slope() -> None:
    speed = DecodeSpeed()
    speed.record(1, 1, 0.02)
    speed.record(8, 8, 0.01)
    assert speed.seconds_per_branch() == 0.0


def test_slope_over_branches_ignores_steps_of_a_time_when_the_machine_was_idle() -> None:
    speed = DecodeSpeed()
    for _ in range(20):
        speed.record(1, 1, 0.003)
    for number in range(40):  # three processes on one processor
        speed.record(*((3, 3, 0.023) if number % 2 else (6, 6, 0.026)))
    assert speed.linear_fit() == pytest.approx((0.02, 0.001))


def test_slope_over_branches_needs_different_numbers_of_them() -> None:
    """Steps of 64 branches were slow by chance; those of 16 are older and show more."""
    speed = DecodeSpeed()
    for _ in range(20):
        speed.record(16, 16, 0.030)
        speed.record(63, 63, 0.077)
    for _ in range(20):
        speed.record(64, 64, 0.090)
    assert speed.seconds_per_branch() == pytest.approx((0.090 - 0.030) / 48)


def test_branches_never_cost_more_than_the_whole_step() -> None:
    speed = DecodeSpeed()
    speed.record(2, 2, 0.001)
    speed.record(4, 4, 0.020)
    assert speed.linear_fit() == pytest.approx((0.0, 0.005))
