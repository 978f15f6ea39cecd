"""Requests of a gateway that ends, taken over by another one, over a real Redis."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from chatcache.cluster import bus, remote_engine, takeover, worker_host
from chatcache.cluster.placed_requests import Attempt, PlacedRequest, PlacedRequests, RequestRecord
from chatcache.cluster.remote_engine import RemoteEngine
from chatcache.cluster.takeover import RECORDED, history, read_outboxes, records_key, take_records, write_records
from chatcache.engine_process.protocol import Answer, Events, Notice, encode_error
from chatcache.errors import OverloadedError
from chatcache.types.events import EngineEvent, Finished, Started, Tokens
from chatcache.types.request import GenerateRequest, SamplingParams
from tests.cluster.test_workers import collect, tokens_of, worker
from tests.engine_process.engines import expected_tokens, until
from tests.support.redis_servers import RedisServer


@pytest.fixture(autouse=True)
def quick_polls(patient_bus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notice quickly that a lease is gone, and wait long for the answer of a worker."""
    monkeypatch.setattr(bus, "RENEW_S", 0.15)
    monkeypatch.setattr(remote_engine, "_POLL_S", 0.1)
    monkeypatch.setattr(takeover, "ADOPT_TIMEOUT_S", 30.0)
    monkeypatch.setattr(worker_host, "ADOPT_S", 30.0)


def chat_request(name: str, max_tokens: int) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(request_id=name, prompt=(5,), params=params, conversation_id="c")


class Gateway:
    """A gateway, and the requests that it has taken over or lost."""

    def __init__(self, server: RedisServer, name: str) -> None:
        self.engine = RemoteEngine(server.url, name)
        self.engine.recorder.on_adopt = self._adopt
        self.engine.recorder.on_lost = lambda name: self.lost.append(name)
        self.adopted: dict[str, bytes] = {}
        self.num_events: dict[str, int] = {}
        self.num_takeovers: dict[str, int] = {}
        self.lost: list[str] = []
        self.accepts = True
        self.drains = False

    async def _adopt(self, request: GenerateRequest, data: bytes, num_events: int, num_takeovers: int) -> bool:
        self.adopted[request.request_id] = data
        self.num_takeovers[request.request_id] = num_takeovers
        self.num_events[request.request_id] = num_events
        if self.drains:
            self.engine.recorder.on_adopt = None
        return self.accepts and not self.drains

    async def kill(self) -> None:
        """End without a shutdown. Its lease is gone, as if it had expired."""
        engine = self.engine
        tasks = [*engine._tasks, *(task for worker in engine._workers.values() for task in worker._tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine._redis.delete(bus.gateway_key(engine.id))
        engine._redis.delete = lambda *_: asyncio.sleep(0)


@asynccontextmanager
async def gateways(server: RedisServer, num_workers: int = 1) -> AsyncIterator[tuple[Gateway, Gateway]]:
    first, second = Gateway(server, "one"), Gateway(server, "two")
    async with first.engine, second.engine:

        async def condition() -> bool:
            return all(len(each.engine.workers) == num_workers for each in (first, second))

        await until(condition)
        yield first, second


async def until_sent(engine: RemoteEngine, name: str, num_tokens: int) -> None:
    async def condition() -> bool:
        return engine.num_tokens_sent(name) >= num_tokens

    await until(condition)


async def until_adopted(gateway: Gateway, num_requests: int) -> None:
    async def condition() -> bool:
        return len(gateway.adopted) == num_requests

    await until(condition)


def batches_of(events: list[EngineEvent]) -> list[int]:
    """Return after which events a batch ends."""
    return [event.seq for event in events if not (isinstance(event, Tokens) and event.has_more)]


@pytest.mark.slow
async def test_request_goes_on_with_the_same_events_in_the_same_batches(server: RedisServer) -> None:
    async with worker(server, "a") as only, gateways(server) as (first, second):
        await first.engine.submit(chat_request("r", 400))
        await first.engine.recorder.record("r", b"data")
        seen: list[EngineEvent] = []

        async def read() -> None:
            async for event in first.engine.events("r"):
                seen.append(event)

        reading = asyncio.create_task(read())
        await until_sent(first.engine, "r", 200)
        await first.kill()
        reading.cancel()
        await until_adopted(second, 1)
        assert second.adopted == {"r": b"data"} and second.engine.recorder.num_adopted == 1
        events = await collect(second.engine, "r")
        assert tokens_of(events) == expected_tokens((5,), 400)
        assert isinstance(events[-1], Finished) and not events[-1].cancelled
        assert events[: len(seen)] == seen
        assert len(batches_of(events)) < len(events), "tokens are sent in batches"
        assert second.engine.num_moved == 0, "the worker went on with it"
        assert only.host.num_requests == 0
        second.engine.recorder.discard_record("r")

        async def condition() -> bool:
            return not server.admin.exists(records_key(second.engine.id))

        await until(condition)


@pytest.mark.slow
async def test_request_goes_on_when_gateway_and_worker_end(server: RedisServer) -> None:
    async with worker(server, "a") as one, worker(server, "b") as other, gateways(server, 2) as (first, second):
        await first.engine.submit(chat_request("r", 400))
        await first.engine.recorder.record("r", b"")
        await until_sent(first.engine, "r", 100)
        await asyncio.gather(first.kill(), (one if one.host.num_requests else other).cut_off())
        await until_adopted(second, 1)
        assert tokens_of(await collect(second.engine, "r")) == expected_tokens((5,), 400)
        assert second.engine.num_moved == 1


@pytest.mark.slow
async def test_request_that_has_moved_and_was_taken_over_is_taken_over_again(server: RedisServer) -> None:
    """Worker a ends, then the first gateway, then the second: the events come from two outboxes and three fields."""
    async with worker(server, "a") as one, worker(server, "b") as other, gateways(server, 2) as (first, second):
        await first.engine.submit(chat_request("r", 900))
        await first.engine.recorder.record("r", b"")
        await until_sent(first.engine, "r", 100)
        await (one if one.host.num_requests else other).cut_off()

        async def condition() -> bool:
            return first.engine.num_moved == 1

        await until(condition)
        await until_sent(first.engine, "r", first.engine.num_tokens_sent("r") + 100)
        third = Gateway(server, "three")
        async with third.engine:
            await first.kill()
            adopting = third if not await _adopts(second, third) else second
            await until_sent(adopting.engine, "r", 500)
            await adopting.kill()
            last = second if adopting is third else third
            await until_adopted(last, 1)
            assert tokens_of(await collect(last.engine, "r")) == expected_tokens((5,), 900)


async def _adopts(gateway: Gateway, other: Gateway) -> bool:
    """Return whether the first of two gateways takes the requests over."""

    async def condition() -> bool:
        return bool(gateway.adopted or other.adopted)

    await until(condition)
    assert not (gateway.adopted and other.adopted), "one of them gets a request"
    return bool(gateway.adopted)


@pytest.mark.slow
async def test_request_that_ended_before_it_was_taken_over_is_told_to_its_end(server: RedisServer) -> None:
    async with worker(server, "a"), gateways(server) as (first, second):
        await first.engine.submit(chat_request("r", 200))
        await first.engine.recorder.record("r", b"")
        expected = await collect(first.engine, "r")
        await first.kill()
        await until_adopted(second, 1)
        assert await collect(second.engine, "r") == expected


@pytest.mark.slow
async def test_request_without_record_and_refused_one_are_aborted(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_host, "ADOPT_S", 3.0)
    async with worker(server, "a") as only, gateways(server) as (first, second):
        second.accepts = False
        for name in ("recorded", "not"):
            await first.engine.submit(chat_request(name, 1_000_000))
        await first.engine.recorder.record("recorded", b"")
        await first.kill()
        await until_adopted(second, 1)

        async def condition() -> bool:
            return only.host.num_requests == 0 and (await only.engine.health()).num_running == 0

        await until(condition)
        assert list(second.adopted) == ["recorded"] and second.engine.recorder.num_adopted == 0
        assert not server.admin.exists(records_key(second.engine.id))


@pytest.mark.slow
async def test_gateway_that_was_suspended_loses_what_another_has_taken_over(server: RedisServer) -> None:
    async with worker(server, "a"), gateways(server) as (first, second):
        await first.engine.submit(chat_request("r", 900))
        await first.engine.submit(chat_request("unrecorded", 400))
        await first.engine.recorder.record("r", b"")
        reading = asyncio.create_task(collect(first.engine, "unrecorded"))
        old_id = first.engine.id
        await until_sent(first.engine, "r", 100)
        await take_records(second.engine._redis, old_id, second.engine.id)  # as if its lease had expired before
        server.admin.delete(bus.gateway_key(old_id))

        async def condition() -> bool:
            return first.lost == ["r"]

        await until(condition)
        assert tokens_of(await reading) == expected_tokens((5,), 400), "its other requests are resumed"


@pytest.mark.slow
async def test_killed_engine_of_the_worker_changes_nothing_for_the_gateway_that_takes_over(server: RedisServer) -> None:
    async with worker(server, "a") as only, gateways(server) as (first, second):
        await first.engine.submit(chat_request("r", 400))
        await first.engine.recorder.record("r", b"")
        await until_sent(first.engine, "r", 100)
        os.kill(only.engine.pid or 0, signal.SIGKILL)
        await first.kill()
        await until_adopted(second, 1)
        assert tokens_of(await collect(second.engine, "r")) == expected_tokens((5,), 400)


@pytest.mark.slow
async def test_gateway_that_drains_leaves_what_it_is_taking_over_to_another_one(server: RedisServer) -> None:
    async with worker(server, "a"), gateways(server) as (first, second):
        third = Gateway(server, "three")
        third.engine.recorder.on_adopt = None
        second.drains = True
        async with third.engine:
            await first.engine.submit(chat_request("r", 900))
            await first.engine.recorder.record("r", b"")
            await until_sent(first.engine, "r", 100)
            await first.kill()
            await until_adopted(second, 1)
            assert not second.engine.recorder.num_adopted
            third.engine.recorder.on_adopt = third._adopt
            await second.kill()
            async with asyncio.timeout(60):
                await until_adopted(third, 1)
                assert tokens_of(await collect(third.engine, "r")) == expected_tokens((5,), 900)
            assert (second.num_takeovers["r"], third.num_takeovers["r"]) == (1, 2)


@pytest.mark.slow
async def test_worker_that_answers_late_leaves_no_gap_in_an_adopted_request(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sends to the gateway that has ended, after the outbox was read, is not missing."""
    adopt, read = PlacedRequests.adopt, takeover.read_outboxes

    def adopt_late(self: PlacedRequests, placed: PlacedRequest, gateway: str) -> None:
        asyncio.get_running_loop().call_later(0.3, adopt, self, placed, gateway)

    async def read_and_wait(client: Any, records: Sequence[RequestRecord]) -> Any:
        found = await read(client, records)
        await asyncio.sleep(0.6)
        return found

    monkeypatch.setattr(takeover, "ADOPT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(PlacedRequests, "adopt", adopt_late)
    monkeypatch.setattr(takeover, "read_outboxes", read_and_wait)
    async with worker(server, "a"), gateways(server) as (first, second):
        await first.engine.submit(chat_request("r", 1500))
        await first.engine.recorder.record("r", b"")
        await until_sent(first.engine, "r", 20)
        await first.kill()
        async with asyncio.timeout(60):
            await until_adopted(second, 1)
            assert tokens_of(await collect(second.engine, "r")) == expected_tokens((5,), 1500)
        assert second.engine.num_moved == 1


async def test_records_have_one_owner_and_unreadable_ones_are_skipped(server: RedisServer) -> None:
    client = bus.connect(server.url)
    record = RequestRecord(chat_request("r", 5), (Attempt("one", "w", 1, 0),), "", b"data")
    await write_records(client, "one", [record])
    server.admin.hset(records_key("one"), "bad", b"\xc1")
    assert server.admin.smembers(RECORDED) == {b"one"}
    found = await asyncio.gather(
        *(take_records(client, "one", name) for name in ("two", "three")), return_exceptions=True
    )
    assert [each for each in found if each and not isinstance(each, BaseException)] == [
        [msgspec.structs.replace(record, num_takeovers=1)]
    ]
    assert not server.admin.exists(records_key("one"))
    assert len([name for name in ("two", "three") if server.admin.exists(records_key(name))]) == 1
    await client.aclose()


START = Started("r", 1, 1, 0)


def token(seq: int, name: str = "r") -> Tokens:
    return Tokens(name, seq, 0, (seq,))


def test_history_joins_attempts_and_ends_at_a_gap() -> None:
    refused = encode_error(OverloadedError("full"))
    outboxes: dict[str, list[tuple[str, Notice]] | None] = {
        "w1": [
            ("g1", Events((token(1),))),  # of an earlier submit
            ("g1", Answer(3, refused)),
            ("g1", Answer(4)),
            ("g2", Events((token(2),))),  # of another gateway
            ("g1", Events((START, token(1, "other"), token(2), token(3)))),
            ("g1", Events((token(4),))),  # after the worker counted as lost
        ],
        "w2": [
            ("g1", Events((token(9),))),
            ("g1", Answer(5)),
            ("g1", Events((token(4),))),
            ("g2", Answer(6)),
            ("g2", Events((token(5),))),
        ],
    }
    first = outboxes["w1"] or []
    attempts = (Attempt("g1", "w1", 4, 0), Attempt("g1", "w2", 5, 0, last_seq=3), Attempt("g2", "w2", 6, 0))
    record = RequestRecord(chat_request("r", 9), attempts, "", b"")
    assert history(record, outboxes) == [START, *(token(seq) for seq in range(2, 6))]
    assert history(record, {**outboxes, "w1": None}) is None
    assert history(record, {**outboxes, "w1": first[:5]}) is not None
    assert history(record, {**outboxes, "w1": first[:4]}) is None, "events 1 to 3 are missing"
    never_sent = msgspec.structs.replace(record, attempts=(Attempt("g1", "w1", 99, 0),))
    assert history(never_sent, outboxes) == []


async def test_outbox_whose_first_entries_were_removed_is_incomplete(server: RedisServer) -> None:
    client = bus.connect(server.url)
    record = RequestRecord(chat_request("r", 5), (Attempt("one", "w", 1, 1),), "", b"")
    for number in range(1, 200):
        server.admin.xadd(bus.outbox("w"), {"one": bus.encode_list([])}, id=f"{number}-0")
    assert await read_outboxes(client, [record]) == {"w": []}
    server.admin.xtrim(bus.outbox("w"), minid="2-0", approximate=False)
    assert await read_outboxes(client, [record]) == {"w": []}
    server.admin.xtrim(bus.outbox("w"), minid="3-0", approximate=False)
    assert await read_outboxes(client, [record]) == {"w": None}
    await client.aclose()
