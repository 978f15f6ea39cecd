"""The placement index in Redis: sharing, live workers, expiry, bounds, outages."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b
from struct import Struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.cluster import bus, redis_placement
from chatcache.cluster.placement import MAX_CONTINUATIONS, MAX_HOLDERS, TTL_S, Boundary, Place
from chatcache.cluster.redis_placement import MAX_RECORDS, RedisPlacementIndex, compact, read_place
from tests.engine_process.engines import until
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.usefixtures("patient_bus")

NOW_S = 1_000_000.0
WORKERS = {7: "a", 8: "b"}
RECORD = Struct("<IQII")


@asynccontextmanager
async def gateway_index(server: RedisServer) -> AsyncIterator[RedisPlacementIndex]:
    client = bus.connect(server.url)
    index = RedisPlacementIndex(client)
    task = asyncio.create_task(index.run())
    yield index
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await client.aclose()


def key(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=32).digest()


def boundary(name: str, num_tokens: int = 64, after: str | None = None) -> Boundary:
    return Boundary(key(name), num_tokens, None if after is None else key(after))


async def holders(index: RedisPlacementIndex, *names: str, now_s: float = NOW_S) -> list[dict[str, int] | None]:
    found = await index.lookup([boundary(name) for name in names], now_s, WORKERS)
    assert found is not None
    return [None if place is None else place.holders for place in found]


async def until_holders(index: RedisPlacementIndex, name: str, expected: dict[str, int] | None) -> None:
    async def condition() -> bool:
        return (await holders(index, name)) == [expected]

    await until(condition)


async def test_two_gateways_share_what_one_learned(server: RedisServer) -> None:
    async with gateway_index(server) as first, gateway_index(server) as second:
        assert await holders(second, "s", "t") == [None, None]
        prompt = [boundary("s", 64, "u"), boundary("t", 128)]
        first.record(prompt, 7, NOW_S)
        await until_holders(second, "t", {"a": 7})
        second.record([boundary("s", 64, "v")], 8, NOW_S)
        await until_holders(first, "s", {"a": 7, "b": 8})
        (place,) = await first.lookup([boundary("s")], NOW_S, WORKERS) or [None]
        assert place is not None and len(place.continuations) == 2


async def test_worker_that_vanished_holds_nothing(server: RedisServer) -> None:
    async with gateway_index(server) as index:
        index.record([boundary("s")], 7, NOW_S)
        await until_holders(index, "s", {"a": 7})
        (place,) = await index.lookup([boundary("s")], NOW_S, {8: "b"}) or [None]
        assert place is not None and place.holders == {}
        restarted = await index.lookup([boundary("s")], NOW_S, {9: "a"})
        assert restarted is not None and restarted[0] is not None and restarted[0].holders == {}


async def test_places_expire_and_repetitions_are_not_written(server: RedisServer) -> None:
    async with gateway_index(server) as index:
        for _ in range(20):
            index.record([boundary("s", 64, "u")], 7, NOW_S)
        await until_holders(index, "s", {"a": 7})
        (name,) = server.admin.keys("*")
        assert server.admin.strlen(name) == RECORD.size
        assert 0 < server.admin.pttl(name) <= TTL_S * 1000
        assert await holders(index, "s", now_s=NOW_S + TTL_S + 1) == [None]
        index.record([boundary("s", 64, "u")], 7, NOW_S + 100)

        async def condition() -> bool:
            return int(server.admin.strlen(name)) == 2 * RECORD.size

        await until(condition)


async def test_long_log_is_replaced_when_it_is_read(server: RedisServer) -> None:
    async with gateway_index(server) as index:
        for number in range(5 * MAX_RECORDS):
            index.record([boundary("s", 64, f"u{number}")], 7 + number % 2, NOW_S)
        await until_holders(index, "s", {"a": 7, "b": 8})
        (name,) = server.admin.keys("*")

        async def condition() -> bool:
            return int(server.admin.strlen(name)) <= MAX_RECORDS * RECORD.size

        await until(condition)
        (place,) = await index.lookup([boundary("s")], NOW_S, WORKERS) or [None]
        assert place is not None and place.holders == {"a": 7, "b": 8}
        assert len(place.continuations) == MAX_CONTINUATIONS


async def test_lookup_during_an_outage_answers_none_and_recovers(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_placement, "PAUSE_S", 0.05)
    async with gateway_index(server) as index:
        index.record([boundary("s")], 7, NOW_S)
        await until_holders(index, "s", {"a": 7})
        monkeypatch.setattr(bus, "TIMEOUT_S", 0.2)
        server.signal(signal.SIGSTOP)
        try:
            assert await index.lookup([boundary("s")], NOW_S, WORKERS) is None
            index.record([boundary("t")], 7, NOW_S)
            assert await index.lookup([boundary("s")], NOW_S, WORKERS) is None, "at once: no try before the pause ends"
        finally:
            server.signal(signal.SIGCONT)

        async def condition() -> bool:
            found = await index.lookup([boundary("s")], NOW_S, WORKERS)
            return found is not None and found[0] is not None and found[0].holders == {"a": 7}

        await until(condition)


OLD_S = int(NOW_S - TTL_S) - 1
records = st.lists(
    st.tuples(
        st.sampled_from([1, 2]), st.integers(7, 18), st.sampled_from([OLD_S, OLD_S + 1, OLD_S + 60]), st.integers(0, 30)
    ),
    max_size=120,
)
EVERY = {incarnation: f"w{incarnation}" for incarnation in range(7, 19)}


def expected_place(found: list[tuple[int, int, int, int]], check: int) -> Place | None:
    """Oracle: apply the records of one place one after the other."""
    place = Place()
    for which, incarnation, at_s, continuation in found:
        if which == check and at_s > OLD_S:
            place.holders.pop(EVERY[incarnation], None)
            place.holders[EVERY[incarnation]] = incarnation
            place.recorded_at_s = at_s
            if continuation and len(place.continuations) < MAX_CONTINUATIONS:
                place.continuations.add(continuation)
    place.holders = dict(list(place.holders.items())[-MAX_HOLDERS:])
    return place if place.recorded_at_s else None


@settings(max_examples=40)
@given(records)
def test_log_reads_as_its_records_one_by_one_and_keeps_its_latest_holders_when_compacted(
    found: list[tuple[int, int, int, int]],
) -> None:
    data = b"".join(RECORD.pack(*record) for record in found)
    for check in (1, 2):
        assert read_place(data, check, NOW_S, EVERY) == expected_place(found, check)
    compacted = compact(data, NOW_S)
    assert len(compacted) <= len(data) and len(compacted) <= MAX_RECORDS // 2 * RECORD.size
    for check in (1, 2):
        before, after = (read_place(each, check, NOW_S, EVERY) for each in (data, compacted))
        if before is not None and after is not None and len(compacted) < MAX_RECORDS // 2 * RECORD.size:
            assert set(after.holders) == set(before.holders)
