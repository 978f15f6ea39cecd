"""What a key may take: requests and tokens a minute, so much at once, tokens a day.

    admit: reserves what the work may come to --- the reply runs --- settle: what it came to instead

Tokens are those that are computed: prompt tokens that were not found in the cache, and every token drawn, of each
candidate or beam. A request counts once for each of its candidates. A refusal tells how long to wait, and whoever waits
so long is let in, unless the same key took more meanwhile.

A bucket that fills steadily: what a key may take in a minute, with a minute's worth at once after a pause.

    level <= limit --- take(cost) ---> level - cost, refilled by `limit` a minute

Whole numbers throughout (a token is MINUTE_NS units, a nanosecond brings `limit` of them), so that whoever waited as
long as they were told is let in, to the nanosecond.

How often somebody may do something.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from chatcache.errors import InvalidRequestError, QuotaExceededError, RateLimitError
from chatcache.gateway.auth.principal import KeyLimits, Principal
from chatcache.gateway.limits.usage import DailyUsage

MINUTE_NS = 60_000_000_000


class TokenBucket:
    """Token bucket: `limit` tokens are refilled in each period, and at most `burst` tokens are available at once.

    Full at first. Times are nanoseconds of a monotonic clock. The arithmetic is exact (a token is `period_ns` units and
    each nanosecond adds `limit` units), so a caller that waits for `wait_ns` is admitted to the nanosecond.
    """

    def __init__(self, limit: int, now_ns: int, *, period_ns: int = MINUTE_NS, burst: int | None = None) -> None:
        self.limit = limit
        self._period_ns = period_ns
        self._level = self._capacity = (limit if burst is None else burst) * period_ns
        self._updated_ns = now_ns

    def wait_ns(self, cost: int, now_ns: int) -> int:
        """Time until `cost` tokens are available, 0 for now. A cost above the capacity waits for a full bucket."""
        missing = min(cost * self._period_ns, self._capacity) - self._level_at(now_ns)
        return max(0, -(-missing // self.limit))

    def try_consume(self, cost: int, now_ns: int) -> bool:
        """Consume `cost` tokens, or none and return False if fewer are available."""
        if self.wait_ns(cost, now_ns):
            return False
        self.consume(cost, now_ns)
        return True

    def consume(self, cost: int, now_ns: int) -> None:
        """Consume tokens even if they are not available; the level may become negative."""
        self._level = self._level_at(now_ns) - cost * self._period_ns
        self._updated_ns = now_ns

    def refund(self, cost: int, now_ns: int) -> None:
        """Return tokens that were consumed; a negative `cost` consumes more."""
        self._level = min(self._capacity, self._level_at(now_ns) + cost * self._period_ns)
        self._updated_ns = now_ns

    def remaining(self, now_ns: int) -> int:
        return max(0, self._level_at(now_ns) // self._period_ns)

    def full_in_ns(self, now_ns: int) -> int:
        return -(-(self._capacity - self._level_at(now_ns)) // self.limit)

    def _level_at(self, now_ns: int) -> int:
        return min(self._capacity, self._level + (now_ns - self._updated_ns) * self.limit)


RESERVED_TOKENS = 256  # of a candidate that may get as long as the context allows: few do
SECOND_NS = 1_000_000_000
CLEANUP_INTERVAL_S = 5.0
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


@dataclass(frozen=True, slots=True)
class RequestCost:
    """What is asked for, as far as can be told before the text is tokenised.

    `width`: candidates or beams, of all prompts; `max_tokens` of each, None for as many as go. `is_side`: computed
    while nobody else needs the engine; it costs its tokens only.
    """

    num_prompt_tokens: int
    num_prompts: int = 1
    width: int = 1
    max_tokens: int | None = None
    is_opportunistic: bool = False

    @property
    def num_tokens(self) -> int:
        """What to reserve for it."""
        each = RESERVED_TOKENS if self.max_tokens is None else self.max_tokens
        return self.num_prompt_tokens + self.width * each

    @property
    def num_requests(self) -> int:
        return 0 if self.is_opportunistic else self.width


class Reservation:
    """Work that was admitted, until it is settled. Every method may be called again, and then does nothing."""

    def __init__(self, account: KeyAccount | None, work: RequestCost) -> None:
        self._account = account
        self._work = work

    def commit(self, num_tokens: int | None) -> None:
        """The work is over and came to so many tokens; None: as many as were reserved."""
        account, self._account = self._account, None
        if account is not None:
            account.commit(self._work, self._work.num_tokens if num_tokens is None else num_tokens)

    def refund(self) -> None:
        """The server could not take the work: it costs nothing."""
        account, self._account = self._account, None
        if account is not None:
            account.refund(self._work)


class KeyAccount:
    """What one key has taken lately. Nothing here waits: deciding and taking are one step."""

    def __init__(self, key_id: str, limits: KeyLimits, usage: DailyUsage, clock_ns: Callable[[], int]) -> None:
        self.limits = limits
        self._key_id = key_id
        self._usage = usage
        self._clock_ns = clock_ns
        now_ns = clock_ns()
        self._requests = _bucket(limits.requests_per_minute, now_ns)
        self._tokens = _bucket(limits.tokens_per_minute, now_ns)
        self._num_running = 0  # candidates
        self._num_reserved = 0  # tokens, of work that is not settled

    @property
    def is_idle(self) -> bool:
        """Whether a new account would be the same."""
        buckets, now_ns = (self._requests, self._tokens), self._clock_ns()
        is_full = all(bucket is None or not bucket.full_in_ns(now_ns) for bucket in buckets)
        return is_full and not self._num_running and not self._num_reserved

    def admit(self, work: RequestCost) -> None:
        """Reserve what the work may come to, or nothing.

        Raises: InvalidRequestError for more candidates than may ever run at once, QuotaExceededError, RateLimitError.
        """
        now_ns = self._clock_ns()
        self._check_running(work)
        waits_s = self._waits_s(work, now_ns)
        self._check_day(max((wait_s for wait_s, *_ in waits_s), default=0))
        self._check_minute(waits_s)
        if self._requests is not None:
            self._requests.consume(work.num_requests, now_ns)
        if self._tokens is not None:
            self._tokens.consume(work.num_tokens, now_ns)
        self._num_running += work.num_requests
        self._num_reserved += work.num_tokens

    def commit(self, work: RequestCost, num_tokens: int) -> None:
        self._release(work, num_tokens)
        if self.limits.tokens_per_day is not None:
            self._usage.add(self._key_id, num_tokens)

    def refund(self, work: RequestCost) -> None:
        self._release(work, 0)
        if self._requests is not None:
            self._requests.refund(work.num_requests, self._clock_ns())

    def headers(self) -> dict[str, str]:
        """The state now, as OpenAI's clients know it. Tokens are the minute's; the day's where only that is limited."""
        now_ns, told = self._clock_ns(), dict[str, str]()
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                told |= _told(kind, bucket.limit, bucket.remaining(now_ns), bucket.full_in_ns(now_ns))
        most = self.limits.tokens_per_day
        if self._tokens is None and most is not None:
            left = max(0, most - self._usage.used(self._key_id) - self._num_reserved)
            told |= _told("tokens", most, left, self._usage.day_ends_in_s() * SECOND_NS)
        return told

    def _release(self, work: RequestCost, num_tokens: int) -> None:
        self._num_running -= work.num_requests
        self._num_reserved -= work.num_tokens
        if self._tokens is not None:
            self._tokens.refund(work.num_tokens - num_tokens, self._clock_ns())

    def _check_running(self, work: RequestCost) -> None:
        most = self.limits.max_concurrent
        if most is None or not work.num_requests:
            return
        if work.width > most:
            raise InvalidRequestError(
                f"this key may have {most} candidates at once, and this asks for {work.width}", param="n"
            )
        if self._num_running + work.width > most:
            raise RateLimitError(
                f"{self._num_running} candidates of this key are running, of at most {most} at once; "
                "try again when one has ended"
            )

    def _check_day(self, wait_s: int) -> None:
        """`wait_s`: how long the minute's limits ask to wait anyway."""
        most = self.limits.tokens_per_day
        if most is None:
            return
        used = self._usage.used(self._key_id)
        if used >= most:
            raise QuotaExceededError(
                f"this key's {most} tokens of the day are used up; the next day begins at 00:00 UTC",
                retry_after_s=max(self._usage.day_ends_in_s(), wait_s),
            )
        if used + self._num_reserved >= most:
            raise RateLimitError(
                f"what is running may use up this key's {most} tokens of the day; try again when it has ended"
            )

    def _check_minute(self, waits_s: Sequence[tuple[int, str, TokenBucket, int]]) -> None:
        """Raises: RateLimitError for the limit that takes longest."""
        wait_s, kind, bucket, cost = max(waits_s, key=itemgetter(0), default=(0, "", None, 0))
        if bucket is not None and wait_s:
            raise RateLimitError(
                f"this key may take {bucket.limit} {kind} a minute, and this needs {cost}; "
                f"{bucket.remaining(self._clock_ns())} are left; try again in {wait_s} s",
                retry_after_s=wait_s,
            )

    def _waits_s(self, work: RequestCost, now_ns: int) -> list[tuple[int, str, TokenBucket, int]]:
        """Of each limit of the minute: how long to wait, whole seconds, and for what."""
        wanted = (("requests", self._requests, work.num_requests), ("tokens", self._tokens, work.num_tokens))
        return [
            (-(-bucket.wait_ns(cost, now_ns) // SECOND_NS), kind, bucket, cost)
            for kind, bucket, cost in wanted
            if bucket is not None
        ]


class RateLimiter:
    """The accounts of all keys that have limits."""

    def __init__(self, usage: DailyUsage | None = None, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.usage = usage if usage is not None else DailyUsage()
        self.clock_ns = clock_ns
        self._accounts: dict[str, KeyAccount] = {}

    @property
    def num_accounts(self) -> int:
        """Keys that took something lately."""
        return len(self._accounts)

    async def load_usage(self, principal: Principal) -> None:
        """Have the store tell, once a day, what the key has used of it."""
        if principal.limits.tokens_per_day is not None:
            await self.usage.load()

    def admit(self, principal: Principal, work: RequestCost) -> Reservation:
        """Raises: as `KeyAccount.admit`."""
        if principal.limits == KeyLimits():
            return Reservation(None, work)
        account = self._account(principal)
        account.admit(work)
        return Reservation(account, work)

    def headers(self, principal: Principal) -> dict[str, str]:
        """`x-ratelimit-*` of an answer; none for a key without limits."""
        return {} if principal.limits == KeyLimits() else self._account(principal).headers()

    async def cleanup_loop(self) -> None:
        """Tidy every few seconds, for ever."""
        while True:
            await asyncio.sleep(CLEANUP_INTERVAL_S)
            await self.cleanup()

    async def cleanup(self) -> None:
        """Store what was used; forget who is as good as new."""
        for key_id in [key_id for key_id, account in self._accounts.items() if account.is_idle]:
            del self._accounts[key_id]
        await self.usage.flush()

    def _account(self, principal: Principal) -> KeyAccount:
        account = self._accounts.get(principal.key_id)
        if account is None or account.limits != principal.limits:
            account = KeyAccount(principal.key_id, principal.limits, self.usage, self.clock_ns)
            self._accounts[principal.key_id] = account
        return account


def _bucket(limit: int | None, now_ns: int) -> TokenBucket | None:
    return TokenBucket(limit, now_ns) if limit is not None else None


def _told(kind: str, limit: int, remaining: int, reset_ns: int) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{kind}": str(limit),
        f"x-ratelimit-remaining-{kind}": str(remaining),
        f"x-ratelimit-reset-{kind}": _duration(reset_ns),
    }


def _duration(ns: int) -> str:
    """As OpenAI writes it: 20ms, 7s, 1m30s, 2h5m0s. Rounded up."""
    if ns < SECOND_NS:
        return f"{-(-ns // 1_000_000)}ms"
    minutes, seconds = divmod(-(-ns // SECOND_NS), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}s" if hours else f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
