"""Fair turns between owners, and the memory that large requests leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from chatcache.gateway.auth.principal import OPEN_SERVER_PRINCIPAL, Principal, set_principal
from chatcache.gateway.heap import MIN_CHANGE_BYTES, HeapTrimmer, resident_bytes, trim_heap
from chatcache.gateway.limits import admission
from chatcache.gateway.limits.admission import LoopTurns
from chatcache.gateway.middleware import MAX_OWNER_READS, ReadTurnsMiddleware

MIB = 1 << 20
ANN, BOB = Principal("key-1", "tenant", "ann"), Principal("key-2", "tenant", "bob")


class SlowApp:
    """Counts the requests of each owner that have begun; their answers begin and end when the events are set."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_answers = 0
        self.may_answer = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        await self.may_answer.wait()
        self.num_answers += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b""})


async def receive() -> Message:
    raise NotImplementedError


async def ignore(message: Message) -> None:
    """Accept a message."""


def start(app: ReadTurnsMiddleware, who: Principal, method: str = "GET") -> asyncio.Task[None]:
    scope: dict[str, Any] = {"type": "http", "method": method}
    set_principal(scope, who)
    return asyncio.create_task(app(scope, receive, ignore))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_reads_of_an_owner_wait_for_each_other_until_their_answers_begin() -> None:
    slow = SlowApp()
    app = ReadTurnsMiddleware(slow)
    reads = [start(app, ANN) for _ in range(3 * MAX_OWNER_READS)]
    await settle()
    assert slow.num_begun == MAX_OWNER_READS
    reads[MAX_OWNER_READS].cancel()  # one that waits
    reads[0].cancel()  # one that runs
    await settle()
    assert slow.num_begun == MAX_OWNER_READS + 1
    slow.may_answer.set()
    await settle()
    assert slow.num_answers == 3 * MAX_OWNER_READS - 2, "an answer that is being sent does not count"
    slow.may_end.set()
    await asyncio.gather(*reads, return_exceptions=True)


@pytest.mark.parametrize(("who", "method"), [(BOB, "GET"), (OPEN_SERVER_PRINCIPAL, "GET"), (ANN, "POST")])
async def test_requests_of_others_and_writes_do_not_wait_for_reads(who: Principal, method: str) -> None:
    slow = SlowApp()
    app = ReadTurnsMiddleware(slow)
    reads = [start(app, ANN) for _ in range(3 * MAX_OWNER_READS)]
    others = [start(app, who, method) for _ in range(MAX_OWNER_READS)]
    await settle()
    assert slow.num_begun == 2 * MAX_OWNER_READS
    for task in (*reads, *others):
        task.cancel()
    await asyncio.gather(*reads, *others, return_exceptions=True)


async def wait_until_done(turns: LoopTurns) -> None:
    async with asyncio.timeout(60):
        while turns._waiting:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)


async def test_owner_has_one_turn_of_work_for_each_turn_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "TURN_S", 0.0)
    monkeypatch.setattr(admission, "PAUSE_FACTOR", 0.0)
    turns, order = LoopTurns(), list[str]()

    def work(name: str, count: int) -> Callable[[float], bool]:
        left = [count]

        def do(deadline_s: float) -> bool:
            order.append(name)
            left[0] -= 1
            return left[0] > 0

        return do

    for name in ("ann 1", "ann 2", "ann 3"):
        turns.add("ann", work(name, 3))
    turns.add("bob", work("bob", 3))
    assert order == [], "work is done in later turns of the event loop"
    await wait_until_done(turns)
    assert order[:6] == ["ann 1", "bob", "ann 2", "bob", "ann 3", "bob"]
    assert order[6:] == ["ann 1", "ann 2", "ann 3"] * 2
    turns.add("bob", work("again", 1))
    await wait_until_done(turns)
    assert order[12:] == ["again"]


async def test_heap_trimmer_after_a_change_of_memory_trims_until_it_is_unchanged() -> None:
    sizes, trimmed = [100 * MIB], list[int]()
    trimmer = HeapTrimmer(lambda: sizes[0], lambda: trimmed.append(sizes[0]))

    async def check(size: int) -> list[int]:
        sizes[0] = size
        trimmed.clear()
        await trimmer.check()
        return list(trimmed)

    almost = MIN_CHANGE_BYTES - 1
    assert await check(100 * MIB + almost) == []
    assert await check(140 * MIB) == [140 * MIB]
    assert await check(140 * MIB) == [140 * MIB], "once more when it grows no longer"
    assert await check(140 * MIB) == [], "what remains after that is in use"
    assert await check(140 * MIB - almost) == []
    assert await check(120 * MIB) == [120 * MIB], "large blocks were freed, and small ones with them"
    assert await check(120 * MIB) == [120 * MIB]
    assert await check(120 * MIB) == []


async def test_heap_trimmer_counts_changes_from_the_memory_after_the_trim() -> None:
    sizes, trimmed = [100 * MIB], list[int]()

    def trim() -> None:
        trimmed.append(sizes[0])
        sizes[0] = 100 * MIB

    trimmer = HeapTrimmer(lambda: sizes[0], trim)
    for size in (140 * MIB, 100 * MIB, 100 * MIB):
        sizes[0] = size
        await trimmer.check()
    assert trimmed == [140 * MIB, 100 * MIB]


def test_trim_heap_is_possible_on_this_system() -> None:
    trim_heap()
    assert resident_bytes() >= 0
