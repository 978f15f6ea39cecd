"""Coalescing keeps the text and the order, sends the first delta at once and never more than one per window."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from chatcache.chat.coalesce import coalesced
from chatcache.chat.events import (
    BeamNode,
    ReplyBeams,
    ReplyDelta,
    ReplyDone,
    ReplyEvent,
    ReplyFinished,
    ReplyStarted,
)
from chatcache.errors import EngineFault
from chatcache.types import TokenLogprob


def delta(index: int, text: str) -> ReplyDelta:
    return ReplyDelta(index, text, (ord(text[0]),), (TokenLogprob(-1.0),))


def done(index: int) -> ReplyDone:
    return ReplyDone(index, "", "stop", None, (), ())


async def source(*events: ReplyEvent | BaseException | float) -> AsyncIterator[ReplyEvent]:
    for event in events:
        if isinstance(event, float):
            await asyncio.sleep(event)
        elif isinstance(event, BaseException):
            raise event
        else:
            yield event


async def collect(*events: ReplyEvent | BaseException | float, window_s: float = 5.0) -> list[ReplyEvent]:
    return [event async for event in coalesced(source(*events), window_s)]


async def test_a_burst_becomes_the_first_delta_and_the_rest() -> None:
    started, end = ReplyStarted(1, 0), ReplyFinished(1, 0, 4)
    got = await collect(
        started, delta(0, "a"), delta(0, "b"), delta(1, "x"), delta(0, "c"), done(0), delta(1, "y"), end
    )
    assert got[:3] == [started, delta(0, "a"), delta(1, "x")]
    joined = got[3]
    assert isinstance(joined, ReplyDelta) and (joined.index, joined.text, joined.token_ids) == (0, "bc", (98, 99))
    assert len(joined.logprobs) == 2
    assert got[4:] == [done(0), delta(1, "y"), end]


async def test_what_waits_is_sent_when_its_window_is_over() -> None:
    """Even if nothing else ever comes."""
    stream = coalesced(source(delta(0, "a"), delta(0, "b"), delta(0, "c"), 60.0), 0.02)
    async with asyncio.timeout(20):
        first, second = await anext(stream), await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert (first, second) == (delta(0, "a"), ReplyDelta(0, "bc", (98, 99), (TokenLogprob(-1.0),) * 2))


async def test_slow_deltas_pass_unchanged() -> None:
    events = [delta(0, text) for text in "abc"]
    assert await collect(events[0], 0.02, events[1], 0.02, events[2], window_s=0.001) == events


async def test_failures_come_after_what_was_said() -> None:
    stream = coalesced(source(delta(0, "a"), delta(0, "b"), EngineFault("x")), 5.0)
    assert [await anext(stream), await anext(stream)] == [delta(0, "a"), delta(0, "b")]
    with pytest.raises(EngineFault):
        await anext(stream)


@pytest.mark.parametrize("window_s", [0.0, 0.001, 1.0])
async def test_text_is_never_lost_or_reordered(window_s: float) -> None:
    events = [delta(number % 3, chr(97 + number % 26)) for number in range(300)]
    got = await collect(*events, done(0), window_s=window_s)
    for index in range(3):
        expected = "".join(event.text for event in events if event.index == index)
        assert "".join(e.text for e in got if isinstance(e, ReplyDelta) and e.index == index) == expected


async def test_live_beams_are_joined_beside_the_text() -> None:
    def beams(number: int) -> ReplyBeams:
        return ReplyBeams((BeamNode(number, number - 1, "x", -1.0),), (number,))

    end = ReplyFinished(1, 0, 4)
    got = await collect(beams(1), delta(0, "a"), beams(2), delta(0, "b"), beams(3), delta(0, "c"), end)
    assert got == [
        beams(1),
        delta(0, "a"),
        ReplyBeams((*beams(2).nodes, *beams(3).nodes), (3,)),
        ReplyDelta(0, "bc", (98, 99), (TokenLogprob(-1.0),) * 2),
        end,
    ]
