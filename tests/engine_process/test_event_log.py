"""Event logs are contiguous, read by cursor, and removed when no reader needs them."""

from __future__ import annotations

import asyncio
import random
import tracemalloc

import msgspec
import pytest

from chatcache.engine_process.client import PRUNE_EVENTS, EventLog, EventLogs
from chatcache.errors import InvalidRequestError, NotFoundError
from chatcache.types.events import EngineEvent, Failed, Finished, TokenLogprob, Tokens


def tokens(seq: int) -> Tokens:
    return Tokens("r", seq, 0, (seq,))


def finished(seq: int) -> Finished:
    return Finished("r", seq, 1, 0, seq - 1)


async def collect(logs: EventLogs, after: int = 0) -> list[EngineEvent]:
    return [event async for event in logs.read("r", after)]


async def test_every_reader_reads_all_events_after_its_cursor() -> None:
    logs = EventLogs()
    logs.open("r")
    readers = [asyncio.create_task(collect(logs, after)) for after in range(6)]
    await asyncio.sleep(0)
    for seq in range(1, 5):
        logs.append(tokens(seq))
        await asyncio.sleep(0)
    logs.append(finished(5))
    for after, reader in enumerate(readers):
        assert [event.seq for event in await reader] == list(range(after + 1, 6))


@pytest.mark.parametrize("seq", [0, 1, 3])
def test_append_of_a_gap_or_repetition_raises(seq: int) -> None:
    log = EventLog("r")
    log.append(tokens(1))
    with pytest.raises(ValueError, match=f"seq {seq} after 1"):
        log.append(tokens(seq))


def test_append_after_the_terminal_event_raises() -> None:
    log = EventLog("r")
    log.append(finished(1))
    with pytest.raises(ValueError, match="closed"):
        log.append(tokens(2))


async def test_a_log_is_removed_when_its_end_was_read() -> None:
    logs = EventLogs()
    logs.open("r")
    logs.append(finished(1))
    assert (len(logs), logs.num_open) == (1, 0)
    await collect(logs)
    assert len(logs) == 0
    with pytest.raises(NotFoundError):
        await collect(logs)


async def test_a_reader_that_stops_at_the_terminal_event_has_read_it() -> None:
    logs = EventLogs()
    logs.open("r")
    logs.append(finished(1))
    reader = logs.read("r")
    await anext(reader)
    assert len(logs) == 0


async def test_an_unread_log_is_removed_after_its_retention() -> None:
    logs = EventLogs(retention_s=0.01)
    logs.open("r")
    logs.append(finished(1))
    await asyncio.sleep(0.05)
    assert len(logs) == 0


async def test_a_cursor_past_the_end_ends() -> None:
    logs = EventLogs()
    logs.open("r")
    logs.append(finished(1))
    assert await collect(logs, after=99) == []


async def test_open_of_an_id_in_use_raises() -> None:
    logs = EventLogs()
    logs.open("r")
    with pytest.raises(InvalidRequestError, match="in use"):
        logs.open("r")


async def test_fail_open_ends_each_open_log_once() -> None:
    logs = EventLogs()
    logs.open("r")
    logs.append(tokens(1))
    logs.fail_open("gone", "engine_error")
    logs.fail_open("gone again", "engine_error")
    assert await collect(logs) == [tokens(1), Failed("r", 2, "gone")]


async def test_a_cancelled_reader_does_not_affect_the_others() -> None:
    logs = EventLogs()
    logs.open("r")
    one, two = (asyncio.create_task(collect(logs)) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.sleep(0)
    logs.append(finished(1))
    assert await two == [finished(1)]


async def test_read_events_are_discarded_and_readers_miss_nothing() -> None:
    """Readers come, leave and continue after their last event, compared with all events."""
    log, rng = EventLog("r"), random.Random(3)
    log.scores.append(b"many")
    seen: dict[int, list[int]] = {0: [], 1: []}
    reading = {number: log.read() for number in seen}
    for seq in range(1, 4001):
        log.append(tokens(seq) if seq < 4000 else finished(seq))
        for number, received in seen.items():
            if rng.random() < (0.02, 0.6)[number]:  # a slow reader and a fast one
                for _ in range(rng.randint(1, log.last_seq - len(received))):
                    received.append((await anext(reading[number])).seq)
            if rng.random() < 0.01 and len(received) < log.last_seq:
                await reading[number].aclose()
                reading[number] = log.read(len(received))
                received.append((await anext(reading[number])).seq)
        assert log.last_seq == seq and log.num_retained <= seq - min(map(len, seen.values())) + 2 * PRUNE_EVENTS
    for number, received in seen.items():
        received += [event.seq async for event in reading[number]]
        assert received == list(range(1, 4001))
    assert log.num_retained < 2 * PRUNE_EVENTS and not log.scores
    assert [event.seq async for event in log.read(3990)] == list(range(3991, 4001))
    with pytest.raises(NotFoundError, match="discarded"):
        await anext(log.read(5))


async def test_unread_events_are_not_discarded() -> None:
    log = EventLog("r")
    reader = log.read()
    for seq in range(1, 2001):
        log.append(tokens(seq))
    assert (await anext(reader)).seq == 1 and log.num_retained == 2000
    await reader.aclose()
    for seq in range(2001, 3001):
        log.append(tokens(seq))
    assert log.num_retained == 3000


async def test_log_behind_a_stalled_reader_keeps_logprobs_in_a_fraction_of_their_memory() -> None:
    """The reader still receives all events unchanged."""
    rng, num_events = random.Random(3), 2000

    def scored(seq: int) -> Tokens:
        top = tuple((rng.randrange(150_000), -20 * rng.random()) for _ in range(20))
        return Tokens("r", seq, 1, (rng.randrange(150_000),), (TokenLogprob(-rng.random(), top),), -0.5)

    log, sent = EventLog("r"), [scored(seq) for seq in range(1, num_events + 1)]
    encoded = list(map(msgspec.msgpack.encode, sent))
    tracemalloc.start()
    for data in encoded:  # decoded here, as the engine process sends them
        log.append(msgspec.msgpack.decode(data, type=Tokens))
    num_bytes, _ = tracemalloc.get_traced_memory()
    decoded = [msgspec.msgpack.decode(data, type=Tokens) for data in encoded]
    num_decoded_bytes = tracemalloc.get_traced_memory()[0] - num_bytes
    tracemalloc.stop()
    log.append(finished(num_events + 1))
    assert decoded == sent and num_bytes < num_decoded_bytes / 2
    assert [event async for event in log.read()][:-1] == sent
