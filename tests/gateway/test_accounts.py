"""Rate limits of API keys on a simulated clock: waits suffice, limits are not exceeded."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from chatcache.errors import InvalidRequestError, QuotaExceededError, RateLimitError
from chatcache.gateway.auth.principal import KeyLimits, Principal
from chatcache.gateway.limits import rate_limits as limits
from chatcache.gateway.limits.rate_limits import (
    MINUTE_NS,
    RESERVED_TOKENS,
    Charge,
    DailyUsage,
    RateLimiter,
    RequestCost,
    Reservation,
    TokenBucket,
)
from tests.gateway.clocks import Clock

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
DAY_S = 86_400


def keyed(name: str = "k", /, **most: int) -> Principal:
    return Principal(name, "tenant", "tenant", limits=KeyLimits(**most))


def limiter_on(clock: Clock) -> RateLimiter:
    return RateLimiter(DailyUsage(wall_s=clock.wall_s), clock_ns=clock.now_ns)


def drive(seed: int) -> int:
    """Send random requests and retry each rejected one after its wait; return the rejections.

    Raises: AssertionError if a retry is rejected or more than the limit was admitted.
    """
    rng = random.Random(seed)
    clock = Clock()
    limiter = limiter_on(clock)
    most = {"requests_per_minute": rng.randint(1, 40), "tokens_per_minute": rng.randint(1, 5000)}
    principal = keyed(**{name: limit for name, limit in most.items() if rng.random() < 0.8} or most)
    holds: list[tuple[Reservation, RequestCost]] = []
    num_requests = num_tokens = num_refused = largest = widest = 0
    for _ in range(300):
        clock.pass_ns(rng.choice([0, 1, rng.randrange(10**9), rng.randrange(20 * 10**9)]))
        if holds and rng.random() < 0.4:
            hold, work = holds.pop(rng.randrange(len(holds)))
            spent = rng.randint(0, work.num_tokens)
            num_tokens += spent - work.num_tokens
            hold.commit(spent)
        work = RequestCost(rng.randint(0, 400), width=rng.randint(1, 6), max_tokens=rng.choice([None, 0, 1, 300]))
        try:
            hold = limiter.admit(principal, work)
        except RateLimitError as error:
            num_refused += 1
            clock.pass_s(error.retry_after_s)
            hold = limiter.admit(principal, work)  # the stated wait is sufficient
        holds.append((hold, work))
        num_requests += work.width
        num_tokens += work.num_tokens
        widest, largest = max(widest, work.width), max(largest, work.num_tokens)
        for count, limit, one in (
            (num_requests, principal.limits.requests_per_minute, widest),
            (num_tokens, principal.limits.tokens_per_minute, largest),
        ):
            if limit is not None:
                assert count <= limit * (1 + clock.elapsed_ns / MINUTE_NS) + one
    for hold, _ in holds:
        hold.commit(0)
    clock.pass_s(3600)
    reported = limiter.headers(principal)
    assert all(
        reported[name] == reported[name.replace("remaining", "limit")] for name in reported if "remaining" in name
    )
    return num_refused


def test_rate_limiter_admits_after_the_stated_wait_and_never_more_than_the_limit() -> None:
    assert sum(drive(SEED + turn) for turn in range(40)) > 500


def states_a_wait_one_second_short(patch: pytest.MonkeyPatch) -> None:
    def sooner(message: str, retry_after_s: int) -> RateLimitError:
        return RateLimitError(message, retry_after_s=retry_after_s - 1)

    patch.setattr(limits, "RateLimitError", sooner)


def forgets_the_debt(patch: pytest.MonkeyPatch) -> None:
    original = TokenBucket.consume

    def consume(self: TokenBucket, cost: int, now_ns: int) -> None:
        original(self, min(cost, self.remaining(now_ns)), now_ns)

    patch.setattr(TokenBucket, "consume", consume)


@pytest.mark.parametrize("bug", [states_a_wait_one_second_short, forgets_the_debt])
def test_rate_limit_check_finds_an_injected_bug(bug: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, RateLimitError)):
        sum(drive(SEED + turn) for turn in range(40))


def test_account_counts_each_candidate_as_a_request() -> None:
    clock = Clock()
    limiter, principal = limiter_on(clock), keyed(requests_per_minute=10)
    limiter.admit(principal, RequestCost(1, width=8))
    with pytest.raises(RateLimitError, match="10 requests a minute, and this needs 3; 2 are left; try again in 6 s"):
        limiter.admit(principal, RequestCost(1, width=3))
    limiter.admit(principal, RequestCost(1, width=2))


def test_account_request_above_the_capacity_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    clock = Clock()
    limiter, principal = limiter_on(clock), keyed(tokens_per_minute=600)
    limiter.admit(principal, RequestCost(0, max_tokens=1800)).commit(1800)
    with pytest.raises(RateLimitError) as refusal:
        limiter.admit(principal, RequestCost(10, max_tokens=0))
    assert refusal.value.retry_after_s == 121  # 1200 tokens of debt and 10 more, at 10 a second
    clock.pass_s(120)
    with pytest.raises(RateLimitError):
        limiter.admit(principal, RequestCost(10, max_tokens=0))
    clock.pass_s(1)
    limiter.admit(principal, RequestCost(10, max_tokens=0))


def test_commit_returns_unused_reserved_tokens() -> None:
    clock = Clock()
    limiter, principal = limiter_on(clock), keyed(tokens_per_minute=1000)
    hold = limiter.admit(principal, RequestCost(100, max_tokens=800))
    assert limiter.headers(principal)["x-ratelimit-remaining-tokens"] == "100"
    hold.commit(150)
    hold.commit(150)
    hold.refund()
    assert limiter.headers(principal)["x-ratelimit-remaining-tokens"] == "850", "once"
    limiter.admit(principal, RequestCost(0)).commit(700)  # longer than estimated
    assert limiter.headers(principal)["x-ratelimit-remaining-tokens"] == "150"
    assert RESERVED_TOKENS < 700


def test_refund_returns_the_whole_reservation() -> None:
    clock = Clock()
    limiter, principal = limiter_on(clock), keyed(requests_per_minute=3, tokens_per_minute=900, max_concurrent=2)
    before = limiter.headers(principal)
    limiter.admit(principal, RequestCost(100, width=2, max_tokens=100)).refund()
    assert limiter.headers(principal) == before
    limiter.admit(principal, RequestCost(0, width=2, max_tokens=1))


def test_account_limits_concurrent_candidates() -> None:
    clock = Clock()
    limiter, principal = limiter_on(clock), keyed(max_concurrent=3)
    with pytest.raises(InvalidRequestError, match="3 candidates at once, and this asks for 4") as refusal:
        limiter.admit(principal, RequestCost(1, width=4))
    assert refusal.value.param == "n"
    two, one = limiter.admit(principal, RequestCost(1, width=2)), limiter.admit(principal, RequestCost(1))
    with pytest.raises(RateLimitError, match="3 candidates of this key are running, of at most 3"):
        limiter.admit(principal, RequestCost(1))
    limiter.admit(principal, RequestCost(1, is_opportunistic=True))
    one.commit(0)
    limiter.admit(principal, RequestCost(1))
    with pytest.raises(RateLimitError):
        limiter.admit(principal, RequestCost(1))
    two.commit(None)
    limiter.admit(principal, RequestCost(1, width=2))


def test_daily_limit_resets_at_midnight_utc() -> None:
    clock = Clock(wall_s=5 * DAY_S - 100)
    limiter, principal = limiter_on(clock), keyed(tokens_per_day=1000)
    first = limiter.admit(principal, RequestCost(500, max_tokens=500))
    with pytest.raises(RateLimitError, match="what is running") as refusal:
        limiter.admit(principal, RequestCost(1, max_tokens=1))
    assert not isinstance(refusal.value, QuotaExceededError)
    first.commit(999)
    limiter.admit(principal, RequestCost(1, max_tokens=500)).commit(400)  # the last one may go beyond
    reported = limiter.headers(principal)
    assert reported == {
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m40s",
    }
    with pytest.raises(QuotaExceededError, match="00:00 UTC") as used_up:
        limiter.admit(principal, RequestCost(1))
    assert (used_up.value.code, used_up.value.retry_after_s) == ("insufficient_quota", 100)
    clock.pass_s(99)
    with pytest.raises(QuotaExceededError):
        limiter.admit(principal, RequestCost(1))
    clock.pass_s(1)
    limiter.admit(principal, RequestCost(1))


def test_opportunistic_request_costs_tokens_but_no_request() -> None:
    clock = Clock()
    limiter, principal = limiter_on(clock), keyed(requests_per_minute=1, tokens_per_minute=100, max_concurrent=1)
    limiter.admit(principal, RequestCost(0, max_tokens=0, is_opportunistic=True)).commit(150)
    reported = limiter.headers(principal)
    assert (reported["x-ratelimit-remaining-requests"], reported["x-ratelimit-remaining-tokens"]) == ("1", "0")
    with pytest.raises(RateLimitError):
        limiter.admit(principal, RequestCost(0, max_tokens=0, is_opportunistic=True))  # in debt
    clock.pass_s(30)
    limiter.admit(principal, RequestCost(0, max_tokens=0, is_opportunistic=True))


def test_rate_limit_headers_report_remaining_and_reset() -> None:
    clock = Clock()
    limiter, principal = limiter_on(clock), keyed(requests_per_minute=60, tokens_per_minute=30)
    limiter.admit(principal, RequestCost(0, width=7, max_tokens=0))
    clock.pass_ns(1)
    assert limiter.headers(principal) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "53",
        "x-ratelimit-reset-requests": "7s",
        "x-ratelimit-limit-tokens": "30",
        "x-ratelimit-remaining-tokens": "30",
        "x-ratelimit-reset-tokens": "0ms",
    }
    for _ in range(53):
        limiter.admit(principal, RequestCost(0, max_tokens=0))
    with pytest.raises(RateLimitError):
        limiter.admit(principal, RequestCost(0, max_tokens=0))
    assert limiter.headers(keyed("other")) == {}


async def test_cleanup_drops_idle_accounts() -> None:
    clock = Clock()
    limiter, principal = limiter_on(clock), keyed(requests_per_minute=2, tokens_per_day=10)
    hold = limiter.admit(principal, RequestCost(0, max_tokens=5))
    clock.pass_s(3600)
    await limiter.cleanup()
    assert limiter.num_accounts == 1, "its request runs"
    hold.commit(5)
    await limiter.cleanup()
    assert limiter.num_accounts == 0
    assert limiter.headers(principal)["x-ratelimit-remaining-requests"] == "2"
    limiter.admit(principal, RequestCost(0, max_tokens=5))
    with pytest.raises(RateLimitError):
        limiter.admit(principal, RequestCost(0, max_tokens=5))


def link(*limiters: RateLimiter) -> None:
    """Let each limiter report to the others at once, as messages between gateways do."""
    for number, limiter in enumerate(limiters):

        def publish(charges: Sequence[Charge], sender: int = number) -> None:
            data = msgspec.msgpack.encode(list(charges))
            for receiver, other in enumerate(limiters):
                if receiver != sender:
                    other.add_charges(str(sender), msgspec.msgpack.decode(data, type=list[Charge]))

        limiter.publish = publish
        limiter._schedule = limiter._send_charges  # type: ignore[method-assign]


def test_limits_per_minute_hold_for_two_gateways_together() -> None:
    clock = Clock()
    first, second = limiter_on(clock), limiter_on(clock)
    link(first, second)
    principal = keyed(requests_per_minute=4, tokens_per_minute=1000)
    work = RequestCost(100, max_tokens=100)
    reservations = [limiter.admit(principal, work) for limiter in (first, second, second)]
    assert first.headers(principal) == second.headers(principal)
    assert second.headers(principal)["x-ratelimit-remaining-requests"] == "1"
    first.admit(principal, work)
    for limiter in (first, second):
        with pytest.raises(RateLimitError, match="4 requests a minute"):
            limiter.admit(principal, work)
    reservations[1].commit(50)
    reservations[2].refund()
    assert first.headers(principal)["x-ratelimit-remaining-tokens"] == str(1000 - 200 - 50 - 200)
    second.admit(principal, work)
    with pytest.raises(RateLimitError):
        first.admit(principal, work)


def test_request_that_another_gateway_continues_is_charged_once() -> None:
    clock = Clock()
    first, second, third = limiter_on(clock), limiter_on(clock), limiter_on(clock)
    link(first, second, third)
    principal = keyed(requests_per_minute=5, tokens_per_minute=1000, tokens_per_day=5000, max_concurrent=1)
    work = RequestCost(100, max_tokens=100)
    here = first.admit(principal, work)
    there = second.adopt(principal, work)  # although the first gateway still counts it as running
    here.hand_over()
    here.commit(150)
    with pytest.raises(RateLimitError, match="1 candidates"):
        first.admit(principal, work)
    there.commit(150)
    for limiter in (first, second, third):
        headers = limiter.headers(principal)
        assert headers["x-ratelimit-remaining-requests"] == "4"
        assert headers["x-ratelimit-remaining-tokens"] == str(1000 - 150)
    assert [limiter.usage.used("k") for limiter in (first, second, third)] == [0, 150, 0]
    third.admit(principal, work).refund()


async def test_candidates_that_run_elsewhere_count_until_their_gateway_is_silent() -> None:
    clock = Clock()
    first, second = limiter_on(clock), limiter_on(clock)
    link(first, second)
    principal = keyed(max_concurrent=2)
    running = first.admit(principal, RequestCost(1, width=2))
    for _ in range(5):
        clock.pass_s(10)
        await first.cleanup()  # repeats what runs there
        await second.cleanup()
        with pytest.raises(RateLimitError, match="2 candidates"):
            second.admit(principal, RequestCost(1))
    clock.pass_s(16)  # the first gateway has died
    later = second.admit(principal, RequestCost(1, width=2))
    later.commit(1)
    running.commit(1)
    clock.pass_s(100)
    for limiter in (first, second):
        await limiter.cleanup()
        assert limiter.num_accounts == 0
