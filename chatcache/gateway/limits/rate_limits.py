"""Limits of API keys: requests and tokens per minute, concurrent candidates, tokens per day.

    admit: reserve the largest cost -> reply runs -> commit: charge the actual cost and return the rest

Only computed tokens count: prompt tokens that were not cached, and every token sampled for each candidate or beam. A
request counts once per candidate. A rejection states how long to wait; a request that is sent again after that time is
accepted, unless the same key used more in the meantime.

Gateways on one Redis send each other what they charge (`Charge`), every SHARE_INTERVAL_S, so that the limits per minute
and of concurrent candidates hold for all of them together, except for what arrives within that time. While they do not
reach each other, each counts alone. A request that another gateway continues moves there with its reservation
(`hand_over`, `adopt`), and is charged there, also if the first gateway has died.

`DailyUsage` counts the tokens of each key today (UTC). Usage is kept in memory and stored later while the store does
not answer, so that an outage does not reject requests. Several gateways on one store see each other's usage after each
flush. A gateway that is killed loses unstored counts.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

from chatcache.auth import DAY_S, utc_day
from chatcache.conversations.store import StoreUnavailableError
from chatcache.errors import InvalidRequestError, QuotaExceededError, RateLimitError
from chatcache.gateway.auth.principal import KeyLimits, Principal

log = logging.getLogger(__name__)


class UsageStore(Protocol):
    """The methods of a key store that daily usage needs."""

    async def add_usage(self, day: int, tokens: Mapping[str, int], *, writer: str, number: int) -> None: ...

    async def usage(self, day: int) -> Mapping[str, int]: ...


class DailyUsage:
    """Daily token counts of one gateway. Without a `store` they last until the process ends.

    Counts are sent with a writer id and a number, so that the store can ignore a batch that it already has.
    """

    def __init__(self, *, wall_s: Callable[[], float] = time.time) -> None:
        self.store: UsageStore | None = None
        self.wall_s = wall_s
        self._stored: Mapping[str, int] = {}
        self._stored_day = -1
        self._unstored: dict[int, Counter[str]] = {}
        self._writer = secrets.token_hex(8)
        self._last_number = 0
        self._unconfirmed: dict[int, tuple[int, Counter[str]]] = {}  # sent, with no reply yet: day -> number, counts
        self._lock = asyncio.Lock()

    @property
    def today(self) -> int:
        return utc_day(self.wall_s())

    def used(self, key_id: str) -> int:
        """Tokens used today, by all gateways as of the last read plus unstored ones."""
        stored = self._stored.get(key_id, 0) if self._stored_day == self.today else 0
        return stored + self._unstored.get(self.today, Counter())[key_id]

    def day_ends_in_s(self) -> int:
        """Seconds until the next day (UTC), rounded up."""
        return DAY_S - int(self.wall_s()) % DAY_S

    def add(self, key_id: str, num_tokens: int) -> None:
        if num_tokens:
            self._unstored.setdefault(self.today, Counter())[key_id] += num_tokens

    async def load(self) -> None:
        """Read today's stored usage, unless it was read already."""
        if self.store is None or self._stored_day == self.today:
            return
        async with self._lock:
            if self._stored_day == self.today:
                return
            try:
                await self._read(self.store)
            except StoreUnavailableError:
                log.warning("could not read today's token usage from the store")

    async def flush(self) -> None:
        """Store the unstored counts and read those of other gateways. Keep what cannot be stored."""
        if self.store is None:
            self._unstored = {day: tokens for day, tokens in self._unstored.items() if day == self.today}
            return
        if not self._unstored and self._stored_day < 0:
            return  # no key has a daily limit
        async with self._lock:
            try:
                for day in list(self._unstored):
                    if day in self._unconfirmed:
                        await self._send(self.store, day)
                    if day in self._unstored:
                        await self._send(self.store, day)
                await self._read(self.store)
            except StoreUnavailableError:
                log.warning("could not store token usage; keeping it in memory")

    async def _send(self, store: UsageStore, day: int) -> None:
        """Store the counts of a day.

        A batch that may have been stored already is sent again unchanged, under its old number, which the store
        recognises.
        """
        if day not in self._unconfirmed:
            self._last_number += 1
            self._unconfirmed[day] = self._last_number, Counter(self._unstored[day])
        number, tokens = self._unconfirmed[day]
        await store.add_usage(day, tokens, writer=self._writer, number=number)
        del self._unconfirmed[day]
        self._unstored[day] -= tokens  # more may have been added since
        if not self._unstored[day]:
            del self._unstored[day]
        if day == self._stored_day:
            self._stored = Counter(self._stored) + tokens

    async def _read(self, store: UsageStore) -> None:
        day = self.today
        self._stored, self._stored_day = await store.usage(day), day


RESERVED_TOKENS = 256  # reserved for a candidate without a limit; most are shorter
SECOND_NS = 1_000_000_000
CLEANUP_INTERVAL_S = 5.0
SHARE_INTERVAL_S = 0.05
REPORT_LIFETIME_NS = 15 * SECOND_NS  # of what another gateway runs; repeated at each cleanup
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
MINUTE_NS = 60_000_000_000


class TokenBucket:
    """Token bucket: `limit` tokens per period are refilled, and it holds at most `burst` tokens.

    Full at first. Times are nanoseconds of a monotonic clock. The arithmetic is exact (a token is `period_ns` units and
    each nanosecond adds `limit` units), so a caller that waits for `wait_ns` is admitted to the nanosecond.
    """

    def __init__(self, limit: int, now_ns: int, *, period_ns: int = MINUTE_NS, burst: int | None = None) -> None:
        self.limit = limit
        self._period_ns = period_ns
        self._level = self._capacity = (limit if burst is None else burst) * period_ns
        self._updated_ns = now_ns

    def wait_ns(self, cost: int, now_ns: int) -> int:
        """Time until `cost` tokens are available, 0 for now.

        A cost above the capacity waits for a full bucket.
        """
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


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Estimated cost of a request, before its text is tokenised.

    `width`: candidates or beams of all prompts. `max_tokens`: of each candidate, None for no limit. `is_opportunistic`:
    runs only while the engine is idle and is charged for its tokens, but not as a request.
    """

    num_prompt_tokens: int
    num_prompts: int = 1
    width: int = 1
    max_tokens: int | None = None
    is_opportunistic: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens to reserve."""
        each = RESERVED_TOKENS if self.max_tokens is None else self.max_tokens
        return self.num_prompt_tokens + self.width * each

    @property
    def num_requests(self) -> int:
        return 0 if self.is_opportunistic else self.width


@dataclass(frozen=True, slots=True)
class Charge:
    """What one gateway has charged to a key since its last report; negative numbers were returned.

    `num_running`: all candidates of the key that run on that gateway.
    """

    key_id: str
    limits: KeyLimits
    num_requests: int
    num_tokens: int
    num_running: int


class Reservation:
    """The reserved cost of an admitted request.

    Only the first call of `commit`, `refund` or `hand_over` has an effect.
    """

    def __init__(self, account: KeyAccount | None, cost: RequestCost) -> None:
        self._account = account
        self._cost = cost

    def commit(self, num_tokens: int | None) -> None:
        """Charge the tokens that were computed; None charges what was reserved."""
        account, self._account = self._account, None
        if account is not None:
            account.commit(self._cost, self._cost.num_tokens if num_tokens is None else num_tokens)

    def refund(self) -> None:
        """Return the reservation without any charge: the server could not do the work."""
        account, self._account = self._account, None
        if account is not None:
            account.refund(self._cost)

    def hand_over(self) -> None:
        """Leave the reservation to another gateway, which continues the request and charges all of it."""
        account, self._account = self._account, None
        if account is not None:
            account.count_running(self._cost, -1)


class KeyAccount:
    """Recent usage of one API key. `admit` never awaits, so checking and reserving are atomic."""

    def __init__(self, key_id: str, limits: KeyLimits, usage: DailyUsage, clock_ns: Callable[[], int]) -> None:
        self.limits = limits
        self._key_id = key_id
        self._usage = usage
        self._clock_ns = clock_ns
        now_ns = clock_ns()
        self._requests = _new_bucket(limits.requests_per_minute, now_ns)
        self._tokens = _new_bucket(limits.tokens_per_minute, now_ns)
        self._num_running = 0  # candidates
        self._num_reserved = 0  # tokens of reservations that are not committed
        self._unsent = [0, 0]  # requests and tokens charged since the last `take_charge`
        self._is_changed = False
        self._elsewhere: dict[str, tuple[int, int]] = {}  # running candidates by gateway, and when that expires
        self.on_change: Callable[[], None] = _do_nothing

    @property
    def is_idle(self) -> bool:
        """Whether the account equals a new one: full buckets and no running request."""
        buckets, now_ns = (self._requests, self._tokens), self._clock_ns()
        is_full = all(bucket is None or not bucket.full_in_ns(now_ns) for bucket in buckets)
        return is_full and not self.num_running and not self._num_reserved and not self._is_changed

    @property
    def num_running(self) -> int:
        """Number of running candidates of the key, on all gateways."""
        now_ns = self._clock_ns()
        self._elsewhere = {name: each for name, each in self._elsewhere.items() if each[1] > now_ns}
        return self._num_running + sum(num for num, _ in self._elsewhere.values())

    def take_charge(self, *, repeat: bool = False) -> Charge | None:
        """Return what was charged since the last call, None for nothing. `repeat`: also if candidates run."""
        if not self._is_changed and not (repeat and self._num_running):
            return None
        (num_requests, num_tokens), self._unsent, self._is_changed = self._unsent, [0, 0], False
        return Charge(self._key_id, self.limits, num_requests, num_tokens, self._num_running)

    def add_charge(self, gateway: str, charge: Charge) -> None:
        """Apply what another gateway has charged."""
        now_ns = self._clock_ns()
        for bucket, cost in ((self._requests, charge.num_requests), (self._tokens, charge.num_tokens)):
            if bucket is not None:
                bucket.refund(-cost, now_ns)
        self._elsewhere[gateway] = charge.num_running, now_ns + REPORT_LIFETIME_NS

    def _note(self, num_requests: int, num_tokens: int) -> None:
        """Note a charge for the other gateways."""
        self._unsent[0] += num_requests
        self._unsent[1] += num_tokens
        self._is_changed = True
        self.on_change()

    def admit(self, cost: RequestCost) -> None:
        """Reserve the cost of a request under all limits of the key, or raise and reserve nothing.

        Raises: InvalidRequestError for more candidates than may ever run at once, QuotaExceededError, RateLimitError.
        """
        now_ns = self._clock_ns()
        self._check_running(cost)
        waits = self._waits(cost, now_ns)
        self._check_day(max((wait_s for wait_s, *_ in waits), default=0))
        self._check_minute(waits)
        if self._requests is not None:
            self._requests.consume(cost.num_requests, now_ns)
        if self._tokens is not None:
            self._tokens.consume(cost.num_tokens, now_ns)
        self._note(cost.num_requests, cost.num_tokens)
        self.count_running(cost)

    def count_running(self, cost: RequestCost, sign: int = 1) -> None:
        """Count a request as running here, or no more (`sign` -1), whichever gateway has reserved its cost."""
        self._num_running += sign * cost.num_requests
        self._num_reserved += sign * cost.num_tokens
        self._note(0, 0)

    def commit(self, cost: RequestCost, num_tokens: int) -> None:
        self._release(cost, num_tokens)
        if self.limits.tokens_per_day is not None:
            self._usage.add(self._key_id, num_tokens)

    def refund(self, cost: RequestCost) -> None:
        self._release(cost, 0)
        if self._requests is not None:
            self._requests.refund(cost.num_requests, self._clock_ns())
        self._note(-cost.num_requests, 0)

    def headers(self) -> dict[str, str]:
        """Return `x-ratelimit-*` headers as defined by OpenAI.

        Token headers describe the limit per minute, or the daily limit if that is the only one.
        """
        now_ns, headers = self._clock_ns(), dict[str, str]()
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers |= _rate_headers(kind, bucket.limit, bucket.remaining(now_ns), bucket.full_in_ns(now_ns))
        limit = self.limits.tokens_per_day
        if self._tokens is None and limit is not None:
            left = max(0, limit - self._usage.used(self._key_id) - self._num_reserved)
            headers |= _rate_headers("tokens", limit, left, self._usage.day_ends_in_s() * SECOND_NS)
        return headers

    def _release(self, cost: RequestCost, num_tokens: int) -> None:
        self.count_running(cost, -1)
        if self._tokens is not None:
            self._tokens.refund(cost.num_tokens - num_tokens, self._clock_ns())
        self._note(0, num_tokens - cost.num_tokens)

    def _check_running(self, cost: RequestCost) -> None:
        limit = self.limits.max_concurrent
        if limit is None or not cost.num_requests:
            return
        if cost.width > limit:
            raise InvalidRequestError(
                f"this key may have {limit} candidates at once, and this asks for {cost.width}", param="n"
            )
        if (num_running := self.num_running) + cost.width > limit:
            raise RateLimitError(
                f"{num_running} candidates of this key are running, of at most {limit} at once; "
                "try again when one has ended"
            )

    def _check_day(self, wait_s: int) -> None:
        """Check the daily limit. `wait_s`: how long the limits per minute require to wait.

        Raises: QuotaExceededError, RateLimitError.
        """
        limit = self.limits.tokens_per_day
        if limit is None:
            return
        used = self._usage.used(self._key_id)
        if used >= limit:
            raise QuotaExceededError(
                f"this key's {limit} tokens of the day are used up; the next day begins at 00:00 UTC",
                retry_after_s=max(self._usage.day_ends_in_s(), wait_s),
            )
        if used + self._num_reserved >= limit:
            raise RateLimitError(
                f"what is running may use up this key's {limit} tokens of the day; try again when it has ended"
            )

    def _check_minute(self, waits: Sequence[tuple[int, str, TokenBucket, int]]) -> None:
        """Check the limits per minute. Raises: RateLimitError for the longest wait."""
        wait_s, kind, bucket, cost = max(waits, key=itemgetter(0), default=(0, "", None, 0))
        if bucket is not None and wait_s:
            raise RateLimitError(
                f"this key may take {bucket.limit} {kind} a minute, and this needs {cost}; "
                f"{bucket.remaining(self._clock_ns())} are left; try again in {wait_s} s",
                retry_after_s=wait_s,
            )

    def _waits(self, cost: RequestCost, now_ns: int) -> list[tuple[int, str, TokenBucket, int]]:
        """Compute for each limit per minute: seconds to wait (rounded up), name, bucket, cost."""
        wanted = (("requests", self._requests, cost.num_requests), ("tokens", self._tokens, cost.num_tokens))
        return [
            (-(-bucket.wait_ns(cost, now_ns) // SECOND_NS), kind, bucket, cost)
            for kind, bucket, cost in wanted
            if bucket is not None
        ]


class RateLimiter:
    """The accounts of all API keys that have limits."""

    def __init__(self, usage: DailyUsage | None = None, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.usage = usage if usage is not None else DailyUsage()
        self.clock_ns = clock_ns
        self.publish: Callable[[Sequence[Charge]], None] | None = None  # to the other gateways
        self._timer: asyncio.TimerHandle | None = None
        self._accounts: dict[str, KeyAccount] = {}

    @property
    def num_accounts(self) -> int:
        """Number of keys with recent usage."""
        return len(self._accounts)

    async def load_usage(self, principal: Principal) -> None:
        """Load today's usage of the key from the store, if it has a daily limit."""
        if principal.limits.tokens_per_day is not None:
            await self.usage.load()

    def admit(self, principal: Principal, cost: RequestCost) -> Reservation:
        """Reserve the cost for the key. Raises: as `KeyAccount.admit`."""
        account = self._account_of(principal)
        if account is not None:
            account.admit(cost)
        return Reservation(account, cost)

    def adopt(self, principal: Principal, cost: RequestCost) -> Reservation:
        """Continue the reservation of a gateway that has ended or handed the request over."""
        account = self._account_of(principal)
        if account is not None:
            account.count_running(cost)
        return Reservation(account, cost)

    def _account_of(self, principal: Principal) -> KeyAccount | None:
        """Return the account of a key, None if it has no limits."""
        if principal.limits == KeyLimits():
            return None
        return self._account(principal.key_id, principal.limits)

    def add_charges(self, gateway: str, charges: Sequence[Charge]) -> None:
        """Apply what another gateway has charged."""
        for charge in charges:
            account = self._accounts.get(charge.key_id) or self._account(charge.key_id, charge.limits)
            account.add_charge(gateway, charge)

    def headers(self, principal: Principal) -> dict[str, str]:
        """Return `x-ratelimit-*` headers of a response; none for a key without limits."""
        account = self._account_of(principal)
        return {} if account is None else account.headers()

    async def cleanup_loop(self) -> None:
        """Call `cleanup` every `CLEANUP_INTERVAL_S`, until cancelled."""
        while True:
            await asyncio.sleep(CLEANUP_INTERVAL_S)
            await self.cleanup()

    async def cleanup(self) -> None:
        """Store token usage, drop idle accounts and repeat what runs here to the other gateways."""
        self._send_charges(repeat=True)
        for key_id in [key_id for key_id, account in self._accounts.items() if account.is_idle]:
            del self._accounts[key_id]
        await self.usage.flush()

    def _account(self, key_id: str, limits: KeyLimits) -> KeyAccount:
        account = self._accounts.get(key_id)
        if account is None or account.limits != limits:
            account = self._accounts[key_id] = KeyAccount(key_id, limits, self.usage, self.clock_ns)
            account.on_change = self._schedule
        return account

    def _schedule(self) -> None:
        """Send charges to the other gateways in SHARE_INTERVAL_S."""
        if self.publish is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SHARE_INTERVAL_S, self._send_charges)

    def _send_charges(self, *, repeat: bool = False) -> None:
        self._timer = None
        found = [account.take_charge(repeat=repeat) for account in self._accounts.values()]
        charges = [charge for charge in found if charge is not None]
        if charges and self.publish is not None:
            self.publish(charges)


def _do_nothing() -> None:
    pass


def _new_bucket(limit: int | None, now_ns: int) -> TokenBucket | None:
    return TokenBucket(limit, now_ns) if limit is not None else None


def _rate_headers(kind: str, limit: int, remaining: int, reset_ns: int) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{kind}": str(limit),
        f"x-ratelimit-remaining-{kind}": str(remaining),
        f"x-ratelimit-reset-{kind}": _duration(reset_ns),
    }


def _duration(ns: int) -> str:
    """Format a duration as OpenAI does: 20ms, 7s, 1m30s, 2h5m0s. Rounds up."""
    if ns < SECOND_NS:
        return f"{-(-ns // 1_000_000)}ms"
    minutes, seconds = divmod(-(-ns // SECOND_NS), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}s" if hours else f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
