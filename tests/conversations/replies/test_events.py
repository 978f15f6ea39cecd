"""Reply events: delta batching keeps text and order; live beams as text against decoding every path from the root."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.conversations.replies.events import (
    BatchedEvent,
    BeamNode,
    BeamReader,
    CallDelta,
    DeltaBatcher,
    ReplyBeams,
    ReplyDelta,
    merge_beams,
)
from chatcache.errors import EngineError
from chatcache.types.events import Beams, LiveBeam, TokenLogprob
from tests.gateway.serving import tiny_tokenizer

WINDOW_S = 0.5  # a busy machine may stop a test for a moment between two deltas


def delta(index: int, text: str) -> ReplyDelta:
    return ReplyDelta(index, text, (ord(text[0]),), (TokenLogprob(-1.0),))


async def collect(*events: ReplyDelta | ReplyBeams | float | None, window_s: float = 5.0) -> list[BatchedEvent | None]:
    """Return what is emitted for the events; a number is a pause, None is another message, sent after a flush."""
    emitted: list[BatchedEvent | None] = []
    batcher = DeltaBatcher(emitted.append, window_s)
    for event in events:
        if isinstance(event, float):
            await asyncio.sleep(event)
        elif event is None:
            await batcher.flush()
            emitted.append(None)
        else:
            batcher.push(event)
    batcher.close()
    return emitted


async def test_delta_batcher_burst_becomes_the_first_delta_and_one_merged_delta() -> None:
    events = delta(0, "a"), delta(0, "b"), delta(1, "x"), delta(0, "c"), None, delta(1, "y"), None
    got = await collect(*events)
    assert got[:2] == [delta(0, "a"), delta(1, "x")]
    joined = got[2]
    assert isinstance(joined, ReplyDelta) and (joined.index, joined.text, joined.token_ids) == (0, "bc", (98, 99))
    assert len(joined.logprobs) == 2
    assert got[3:] == [None, delta(1, "y"), None]


async def test_delta_batcher_emits_pending_deltas_at_the_end_of_the_window() -> None:
    """Also if no further event arrives."""
    got: asyncio.Queue[BatchedEvent] = asyncio.Queue()
    batcher = DeltaBatcher(got.put_nowait, WINDOW_S)
    for text in "abc":
        batcher.push(delta(0, text))
    async with asyncio.timeout(60):
        assert await got.get() == delta(0, "a")
        assert await got.get() == ReplyDelta(0, "bc", (98, 99), (TokenLogprob(-1.0),) * 2)


async def test_delta_batcher_close_discards_pending_deltas() -> None:
    got: list[BatchedEvent] = []
    batcher = DeltaBatcher(got.append, WINDOW_S)
    batcher.push(delta(0, "a"))
    batcher.push(delta(0, "b"))
    batcher.close()
    await asyncio.sleep(1.5 * WINDOW_S)
    assert got == [delta(0, "a")]


async def test_delta_batcher_slow_deltas_pass_unchanged() -> None:
    events = [delta(0, text) for text in "abc"]
    assert await collect(events[0], 0.02, events[1], 0.02, events[2], window_s=0.001) == events


async def test_delta_batcher_failing_emit_is_raised_by_the_next_call() -> None:
    failed = asyncio.Event()

    def emit(event: BatchedEvent) -> None:
        if isinstance(event, ReplyDelta) and event.text == "b":
            failed.set()
            raise EngineError("x")

    batcher = DeltaBatcher(emit, WINDOW_S)
    batcher.push(delta(0, "a"))
    batcher.push(delta(0, "b"))
    async with asyncio.timeout(60):
        await failed.wait()
    with pytest.raises(EngineError):
        await batcher.flush()
    with pytest.raises(EngineError):
        batcher.push(delta(0, "c"))


async def test_delta_batcher_emits_events_of_many_candidates_in_several_turns() -> None:
    """At the end of the window, and in a flush."""
    sizes: list[int] = []
    emitted: list[BatchedEvent] = []
    batcher = DeltaBatcher(emitted.append, WINDOW_S)

    async def count_turns() -> None:
        while True:
            sizes.append(len(emitted))
            await asyncio.sleep(0)

    for text in "ab":
        for index in range(64):
            batcher.push(delta(index, text))
    assert len(emitted) == 64
    counting = asyncio.create_task(count_turns())
    async with asyncio.timeout(60):
        while len(emitted) < 128:  # noqa: ASYNC110 - the batcher has no event for it
            await asyncio.sleep(0)
    for index in range(64):
        batcher.push(delta(index, "c"))
    await batcher.flush()
    counting.cancel()
    batcher.close()
    assert len(emitted) == 192
    assert max(after - before for before, after in pairwise(sizes)) <= 8


@pytest.mark.parametrize("window_s", [0.0, 0.001, 1.0])
async def test_delta_batcher_never_loses_or_reorders_text(window_s: float) -> None:
    events = [delta(number % 3, chr(97 + number % 26)) for number in range(300)]
    got = await collect(*events[:150], 0.005, *events[150:], None, window_s=window_s)
    for index in range(3):
        expected = "".join(event.text for event in events if event.index == index)
        assert "".join(e.text for e in got if isinstance(e, ReplyDelta) and e.index == index) == expected


async def test_delta_batcher_merges_beam_updates_separately_from_text() -> None:
    def beams(number: int) -> ReplyBeams:
        return ReplyBeams((BeamNode(number, number - 1, "x", -1.0),), (number,))

    got = await collect(beams(1), delta(0, "a"), beams(2), delta(0, "b"), beams(3), delta(0, "c"), None)
    assert got == [
        beams(1),
        delta(0, "a"),
        ReplyBeams((*beams(2).nodes, *beams(3).nodes), (3,)),
        ReplyDelta(0, "bc", (98, 99), (TokenLogprob(-1.0),) * 2),
        None,
    ]


async def test_delta_batcher_keeps_text_reasoning_and_calls_separate_and_in_order() -> None:
    held = ReplyDelta(0, "", (1,), (TokenLogprob(-2.0),))
    thoughts = [ReplyDelta(0, "", (), reasoning=text) for text in "ab"]
    calls = [ReplyDelta(0, "", (), calls=(CallDelta(0, text),)) for text in "cd"]
    got = await collect(delta(0, "-"), *thoughts, held, delta(0, "x"), delta(0, "y"), *calls, delta(0, "z"), None)
    emitted = [event for event in got if isinstance(event, ReplyDelta)]
    assert [(event.reasoning, event.text, "".join(call.arguments for call in event.calls)) for event in emitted] == [
        *[("", "-", ""), ("ab", "", ""), ("", "xy", ""), ("", "", "cd"), ("", "z", "")]
    ]
    assert emitted[2].logprobs == (*held.logprobs, TokenLogprob(-1.0), TokenLogprob(-1.0))


BYTES = {piece[0]: token for token, piece in enumerate(tiny_tokenizer().token_bytes) if len(piece) == 1}


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="aé你🎉", min_size=1, max_size=6), st.data())
def test_beam_reader_character_split_into_tokens_is_emitted_whole(text: str, data: st.DataObject) -> None:
    """Every byte is a token, next to other beams: the path still spells the text."""
    reader = BeamReader(tiny_tokenizer().token_bytes)
    spelled, node, number = "", 0, 0
    for step, byte in enumerate(text.encode()):
        others = [LiveBeam(number + 2 + at, node, BYTES[0x41 + at], -1.0) for at in range(data.draw(st.integers(0, 2)))]
        mine = LiveBeam(number + 1, node, BYTES[byte], -0.5)
        got = reader.read(Beams("r", step + 1, (mine, *others)))
        assert got.live == tuple(beam.node for beam in (mine, *others))
        assert [each.parent for each in got.nodes] == [node] * (1 + len(others))
        spelled += got.nodes[0].text
        assert text.startswith(spelled)
        node, number = mine.node, number + 1 + len(others)
    assert spelled == text


def test_merge_beams_keeps_every_node_and_the_latest_live_beams() -> None:
    first, then = (BeamNode(number, number - 1, "x", -1.0) for number in (1, 2))
    one = merge_beams(ReplyBeams((first,), (1,)), ReplyBeams((then,), (2,)))
    assert one == ReplyBeams((first, then), (2,))
