"""Reads one stream of frames into the history, optionally leaving it before its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tests.chaos.event_sources import RefusedError, Source
from tests.chaos.history import History
from tests.chaos.http_client import Frame


@dataclass(frozen=True, slots=True)
class Leave:
    """How (fin | rst | leave | stall) and after how many frames to stop reading; `stall` resumes after `for_s`."""

    how: str
    after: int
    for_s: float


@dataclass(slots=True)
class Watch:
    """Position of a reader. `response` is "" until the first frame has been received."""

    op: str
    response: str
    seen: int


async def watch(history: History, source: Source, state: Watch, leave: Leave | None) -> AsyncIterator[Frame]:
    """Yield the numbered frames of one response. Raises: errors of the source; ConnectionError after leaving."""
    stream = f"{state.op}-{id(source):x}-{history.now_s:.4f}"
    if state.response:
        history.note("open", op=state.op, stream=stream, response=state.response, after=state.seen)
    num_frames, how = 0, "lost"
    try:
        async for frame in source.frames():
            if frame["type"] == "response.snapshot":
                state.seen = frame["sequence_number"]
                history.note("jump", stream=stream, seq=state.seen)
                continue
            if "sequence_number" not in frame or frame["type"] == "response.resumed":
                continue
            if not state.response:
                state.response = frame["response"]["id"]
                history.note("open", op=state.op, stream=stream, response=state.response, after=state.seen)
            note_frame(history, stream, frame)
            state.seen = frame["sequence_number"]
            yield frame
            num_frames += 1
            if leave is not None and num_frames == leave.after:
                if leave.how != "stall":
                    how = "cut"
                    raise ConnectionError("left")
                await asyncio.sleep(leave.for_s)
        how = "end"
    except RefusedError:
        how = "refused"
        raise
    finally:
        if how == "cut" and leave is not None and leave.how == "rst":
            source.reset()
        else:
            source.finish()
        if state.response:
            history.note("close", stream=stream, how=how)


def note_frame(history: History, stream: str, frame: Frame) -> None:
    kind = frame["type"]
    text = frame["delta"] if kind.endswith("output_text.delta") else None
    text = frame["text"] if kind.endswith("output_text.done") else text
    number, index = frame["sequence_number"], frame.get("output_index")
    history.note("frame", stream=stream, seq=number, type=kind, index=index, text=text)
