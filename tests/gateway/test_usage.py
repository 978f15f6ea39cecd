"""Daily token usage in a store that several gateways share, with outages."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from chatcache.conversations.store import StoreUnavailableError
from chatcache.gateway.limits.rate_limits import DailyUsage
from tests.gateway.clocks import Clock

DAY_S = 86_400


class Store:
    """Usage in memory. `is_down`: it rejects every call. `before`: called before each operation.

    `is_mute`: it stores the usage but the reply is lost.
    """

    def __init__(self) -> None:
        self.days: dict[int, Counter[str]] = {}
        self.is_down = self.is_mute = False
        self.last: dict[str, int] = {}
        self.before: Callable[[], None] = lambda: None

    async def add_usage(self, day: int, tokens: Mapping[str, int], *, writer: str, number: int) -> None:
        self.before()
        if self.is_down:
            raise StoreUnavailableError("down")
        if self.last.get(writer, 0) < number:
            self.last[writer] = number
            self.days.setdefault(day, Counter()).update(tokens)
        if self.is_mute:
            raise StoreUnavailableError("nobody knows")

    async def usage(self, day: int) -> Mapping[str, int]:
        self.before()
        if self.is_down:
            raise StoreUnavailableError("down")
        return dict(self.days.get(day, {}))


def gateway_over(store: Store, clock: Clock) -> DailyUsage:
    usage = DailyUsage(wall_s=clock.wall_s)
    usage.store = store
    return usage


async def two_gateways() -> None:
    """Check that two gateways store their usage once and both read the sum.

    Raises: AssertionError.
    """
    store, clock = Store(), Clock()
    one, two = gateway_over(store, clock), gateway_over(store, clock)
    await one.load()
    one.add("k", 100)
    assert one.used("k") == 100 and two.used("k") == 0
    await one.flush()
    await one.flush()
    two.add("k", 20)
    await two.load()
    assert two.used("k") == 120
    await two.flush()
    await one.flush()
    assert one.used("k") == two.used("k") == 120
    assert store.days == {one.today: {"k": 120}}


async def test_daily_usage_is_shared_between_gateways() -> None:
    await two_gateways()


async def test_daily_usage_check_finds_double_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Store.add_usage

    async def twice(self: Store, day: int, tokens: Mapping[str, int], *, writer: str, number: int) -> None:
        await original(self, day, tokens, writer=writer, number=number)
        await original(self, day, tokens, writer=f"{writer} again", number=number)

    monkeypatch.setattr(Store, "add_usage", twice)
    with pytest.raises(AssertionError):
        await two_gateways()


async def test_usage_added_during_a_flush_is_kept() -> None:
    store, clock = Store(), Clock()
    usage = gateway_over(store, clock)
    usage.add("k", 10)
    store.before = lambda: usage.add("k", 1)
    await usage.flush()
    store.before = lambda: None
    assert usage.used("k") == 12
    await usage.flush()
    assert usage.used("k") == store.days[usage.today]["k"] == 12


async def test_unconfirmed_usage_is_sent_again_unchanged() -> None:
    """New usage is stored in the same flush, because a server that shuts down has only one."""
    store, clock = Store(), Clock()
    usage = gateway_over(store, clock)
    store.is_mute = True
    for num_tokens in (10, 1, 2):
        usage.add("k", num_tokens)
        await usage.flush()
        assert store.days[usage.today]["k"] == 10
    store.is_mute = False
    await usage.flush()
    assert usage.used("k") == store.days[usage.today]["k"] == 13


async def test_cancelled_flush_is_not_counted_twice() -> None:
    """As when the server ends during a flush: the store has the batch although no one waits."""
    store, clock = Store(), Clock()
    usage = gateway_over(store, clock)
    usage.add("k", 10)
    store.is_mute = True

    class ClientLeftError(Exception):
        pass

    take = store.add_usage

    async def take_and_leave(day: int, tokens: Mapping[str, int], *, writer: str, number: int) -> None:
        with contextlib.suppress(StoreUnavailableError):
            await take(day, tokens, writer=writer, number=number)
        raise ClientLeftError

    store.add_usage = take_and_leave  # type: ignore[method-assign]
    with pytest.raises(ClientLeftError):
        await usage.flush()
    store.add_usage, store.is_mute = take, False  # type: ignore[method-assign]
    await usage.flush()
    assert store.days[usage.today]["k"] == 10


async def test_usage_is_stored_after_a_store_outage() -> None:
    store, clock = Store(), Clock()
    usage = gateway_over(store, clock)
    store.days[usage.today] = Counter(k=50)
    store.is_down = True
    await usage.load()
    usage.add("k", 10)
    await usage.flush()
    assert usage.used("k") == 10, "nobody is kept out for what cannot be known"
    store.is_down = False
    await usage.flush()
    assert usage.used("k") == store.days[usage.today]["k"] == 60


async def test_usage_of_a_past_day_is_stored_under_that_day() -> None:
    store, clock = Store(), Clock(wall_s=7 * DAY_S - 1)
    usage = gateway_over(store, clock)
    usage.add("k", 10)
    clock.pass_s(2)
    assert usage.used("k") == 0
    usage.add("k", 3)
    await usage.flush()
    assert store.days == {6: {"k": 10}, 7: {"k": 3}}
    assert usage.used("k") == 3


async def test_usage_without_a_store_keeps_only_today() -> None:
    clock = Clock()
    usage = DailyUsage(wall_s=clock.wall_s)
    usage.add("k", 10)
    await usage.load()
    await usage.flush()
    assert usage.used("k") == 10
    clock.pass_s(DAY_S)
    await usage.flush()
    clock.pass_s(-DAY_S)
    assert usage.used("k") == 0
