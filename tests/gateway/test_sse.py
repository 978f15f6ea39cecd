"""Keep-alive comments and send timeouts of event streams, on a fake clock."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import anyio
import pytest
from sse_starlette.sse import SendTimeoutError
from starlette.types import Message

from chatcache.gateway.api import sse
from chatcache.gateway.api.sse import KEEP_ALIVE, EventStream


class Clock:
    """A clock that advances when all tasks wait."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + delay_s, id(future), future))
        await future

    async def run(self) -> None:
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            if not self._sleepers:
                return
            self.now_s, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sse, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(sse, "anyio", SimpleNamespace(sleep=clock.sleep, CancelScope=anyio.CancelScope))
    return clock


async def streamed(
    clock: Clock, gaps_s: list[float], keep_alive_s: float, send_s: float = 0.0
) -> list[tuple[float, bytes]]:
    """Run a stream with these gaps before its frames; return what was sent, with times."""
    sent: list[tuple[float, bytes]] = []
    begun_s = clock.now_s

    async def frames() -> AsyncGenerator[bytes, None]:
        for number, gap_s in enumerate(gaps_s):
            await clock.sleep(gap_s)
            yield b"data: %d\n\n" % number

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            sent.append((round(clock.now_s - begun_s, 3), message["body"]))
            if send_s and message["body"] != KEEP_ALIVE:
                await clock.sleep(send_s)

    async def on_end() -> None: ...

    stream = EventStream(frames(), keep_alive_s=keep_alive_s, on_end=on_end, headers={})
    tasks = [asyncio.create_task(stream._stream_response(send)), asyncio.create_task(stream._ping(send))]
    driver = asyncio.create_task(clock.run())
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (*tasks, driver):
            task.cancel()
        await asyncio.gather(*tasks, driver, return_exceptions=True)
    return sent


async def test_busy_stream_sends_no_keep_alive_comments(clock: Clock) -> None:
    sent = await streamed(clock, [10.0] * 20, keep_alive_s=15.0)
    assert len(sent) == 20 and KEEP_ALIVE not in dict(sent).values()


async def test_idle_stream_sends_a_comment_after_the_interval(clock: Clock) -> None:
    sent = await streamed(clock, [4.0, 40.0, 3.0], keep_alive_s=15.0)
    assert [at for at, data in sent if data == KEEP_ALIVE] == [19.0, 34.0]
    assert [at for at, data in sent if data != KEEP_ALIVE] == [4.0, 44.0, 47.0]


async def test_interval_zero_sends_no_comments(clock: Clock) -> None:
    sent = await streamed(clock, [500.0, 500.0], keep_alive_s=0.0)
    assert [data for _, data in sent] == [b"data: 0\n\n", b"data: 1\n\n"]


@pytest.mark.parametrize("keep_alive_s", [0.0, 15.0])
async def test_send_over_the_timeout_ends_the_stream(clock: Clock, keep_alive_s: float) -> None:
    sent = await streamed(clock, [1.0, 1.0], keep_alive_s, send_s=50.0)
    assert len([data for _, data in sent if data != KEEP_ALIVE]) == 2 and KEEP_ALIVE not in dict(sent).values()
    begun_s = clock.now_s
    with pytest.raises(SendTimeoutError):
        await streamed(clock, [1.0, 1.0], keep_alive_s, send_s=70.0)
    assert 60.0 <= clock.now_s - begun_s <= 61.0 + keep_alive_s
