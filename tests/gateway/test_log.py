"""The event log: every reader can rebuild the response from any position."""

from __future__ import annotations

import asyncio
import json
import random
import tracemalloc
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatcache.errors import InvalidRequestError, NotFoundError
from chatcache.gateway.api.logprobs import PackedLogprobs
from chatcache.gateway.limits import admission
from chatcache.gateway.limits.admission import LoopTurns
from chatcache.gateway.responses import log_frames
from chatcache.gateway.responses import registry as registry_module
from chatcache.gateway.responses.event_log import MAX_LAG_FRAMES, LogReader, ResponseLog
from chatcache.gateway.responses.log_frames import LogFrame, has_references
from chatcache.gateway.responses.registry import KEEP_ENDED_S, ResponseRegistry, Run
from chatcache.gateway.schemas.responses import OutputMessage
from chatcache.types.events import TokenLogprob

Frame = dict[str, Any]


def fill(log: ResponseLog, num_deltas: int, num_items: int = 2, seed: int = 0) -> None:
    """Fill a log with deltas and random unnumbered frames, up to the terminal frame."""
    draws = random.Random(seed)
    log.append("response.created", response={"id": log.response_id})
    for index in range(num_items):
        item = OutputMessage(f"msg_{index}", "assistant", "in_progress", [])
        log.append("response.output_item.added", output_index=index, item=item)
    for number in range(num_deltas):
        index = draws.randrange(num_items)
        log.append("response.output_text.delta", item_id=f"msg_{index}", output_index=index, delta=f"é{number} ")
        if draws.random() < 0.2:
            log.append_unnumbered("response.progress", at=number)
    log.append_unnumbered("conversation.updated", conversation={"id": "conv_1"})
    log.append("response.completed", response={"id": log.response_id})


def frames_of(frames: list[LogFrame]) -> list[Frame]:
    decoded: list[Frame] = [json.loads(frame.data) for frame in frames]
    for frame, found in zip(frames, decoded, strict=True):
        assert (found["type"], found.get("sequence_number")) == (
            frame.kind, found["sequence_number"] if frame.kind == "response.snapshot" else frame.number
        )  # fmt: skip
    return decoded


async def read(log: ResponseLog, after: int = -1, *, extended: bool = False, most: int = 10**9) -> list[Frame]:
    found: list[LogFrame] = []
    with log.reader(after, extended=extended) as reader:
        while len(found) < most and (frames := await reader.next()):
            found += [await whole(reader, frame) for frame in frames]
    return frames_of(found)


async def whole(reader: LogReader, frame: LogFrame) -> LogFrame:
    """Return a frame with its log-probabilities."""
    if not has_references(frame):
        return frame
    return frame._replace(data=b"".join(reader.pieces(frame)))


def texts(frames: list[Frame]) -> dict[str, str]:
    """Return the texts that a client shows after these frames."""
    shown: dict[str, str] = {}
    for frame in frames:
        if frame["type"] == "response.snapshot":
            shown = {output["item_id"]: output["text"] for output in frame["outputs"]}
        elif frame["type"] == "response.output_item.added":
            shown[frame["item"]["id"]] = ""
        elif frame["type"].endswith(".delta"):
            shown[frame["item_id"]] += frame["delta"]
    return shown


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@given(num_deltas=st.integers(0, 700), seed=st.integers(0, 3), data=st.data())
@pytest.mark.slow
def test_plain_reader_receives_every_number_from_any_position(num_deltas: int, seed: int, data: st.DataObject) -> None:
    async def work() -> None:
        log = ResponseLog("resp_1")
        fill(log, num_deltas, seed=seed)
        if data.draw(st.booleans()):
            log.close()
        after = data.draw(st.integers(-1, log.last_number))
        frames = await read(log, after, most=log.last_number - after)
        assert [frame["sequence_number"] for frame in frames] == list(range(after + 1, log.last_number + 1))
        before = await read(log, most=log.last_number)
        assert texts(before[: after + 1] + frames) == texts(before)

    run(work())


@given(num_deltas=st.integers(0, 900), seed=st.integers(0, 3), cuts=st.lists(st.integers(0, 900), max_size=4))
@pytest.mark.slow
def test_extended_reader_resumed_repeatedly_receives_the_same_text(num_deltas: int, seed: int, cuts: list[int]) -> None:
    async def work() -> None:
        log = ResponseLog("resp_1")
        fill(log, num_deltas, seed=seed)
        log.close()
        whole = texts(await read(log))
        seen: list[Frame] = []
        for cut in [*cuts, 10**9]:
            numbers = [frame["sequence_number"] for frame in seen if "sequence_number" in frame]
            got = await read(log, numbers[-1] if numbers else -1, extended=True)
            seen += got[:cut]
        numbers = [frame["sequence_number"] for frame in seen if "sequence_number" in frame]
        snapshots = [frame["type"] == "response.snapshot" for frame in seen if "sequence_number" in frame]
        steps = zip(numbers, numbers[1:], snapshots[1:], strict=False)
        assert all(now == last + 1 or (skips and now > last) for last, now, skips in steps)
        assert texts(seen) == whole
        assert seen[0]["type"] == "response.created"
        kinds = [frame["type"] for frame in seen]
        assert kinds[-1] == "response.completed" and kinds.count("response.completed") == 1
        assert "conversation.updated" in kinds

    run(work())


def test_log_sends_a_snapshot_to_lagging_readers_only() -> None:
    async def work() -> None:
        log = ResponseLog("resp_1")
        quick, slow, plain = log.reader(extended=True), log.reader(extended=True), log.reader()
        log.append("response.created", response={})
        item = OutputMessage("msg_0", "assistant", "in_progress", [])
        log.append("response.output_item.added", output_index=0, item=item)
        got: list[LogFrame] = []
        for number in range(1000):
            log.append("response.output_text.delta", item_id="msg_0", output_index=0, delta=f"{number} ")
            if number % 50 == 0:
                got += await quick.next()
        behind = frames_of(list(await slow.next()))
        assert [frame["type"] for frame in behind] == ["response.created", "response.snapshot"]
        assert behind[1]["outputs"][0]["text"] == "".join(f"{number} " for number in range(1000))
        assert behind[1]["sequence_number"] == log.last_number == slow.sent_number
        assert quick.num_snapshots == 0 and slow.num_snapshots == 1
        log.append("response.completed", response={})
        assert [frame.kind for frame in await slow.next()] == ["response.completed"]
        log.close()
        assert not await slow.next()
        assert [frame.number async for frame in plain] == list(range(log.last_number + 1))

    run(work())


def test_log_lag_counts_bytes_except_of_a_single_large_frame() -> None:
    async def work() -> None:
        log = ResponseLog("resp_1")
        reader = log.reader(extended=True)
        log.append("response.created", response={"x": "y" * 300_000})
        assert [frame.kind for frame in await reader.next()] == ["response.created"]
        for _ in range(3):
            log.append("response.output_text.done", text="x" * 100_000)
        assert [frame.kind for frame in await reader.next()] == ["response.snapshot"]
        log.append("response.completed", response={"x": "y" * 600_000})
        assert [frame.kind for frame in await reader.next()] == ["response.completed"]

    run(work())


def test_ack_window_applies_after_the_first_ack() -> None:
    async def work() -> None:
        log = ResponseLog("resp_1")
        free, acking = log.reader(), log.reader(extended=True)
        log.append("response.created", response={})
        item = OutputMessage("msg_0", "assistant", "in_progress", [])
        log.append("response.output_item.added", output_index=0, item=item)
        acking.ack(-1)
        await acking.next()
        with pytest.raises(InvalidRequestError, match="sequence_number"):
            acking.ack(5000)
        for number in range(1000):
            log.append("response.output_text.delta", item_id="msg_0", output_index=0, delta=f"{number} ")
        log.close()
        while acking.is_open:
            assert await acking.next()
        assert acking.sent_number >= MAX_LAG_FRAMES - 1
        waiting = asyncio.create_task(first_of(acking))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        acking.ack(acking.sent_number)
        assert await waiting == ()
        assert len([frame async for frame in free]) == log.last_number + 1

    run(work())


def test_log_rejects_a_second_terminal_frame() -> None:
    async def work() -> None:
        log = ResponseLog("resp_1")
        fill(log, 3)
        assert log.terminal == "response.completed"
        with pytest.raises(RuntimeError, match="ended twice"):
            log.append("response.failed", response={})

    run(work())


def test_reader_after_a_future_number_is_rejected() -> None:
    async def work() -> None:
        log = ResponseLog("resp_1")
        fill(log, 3)
        with pytest.raises(InvalidRequestError, match="starting_after"):
            log.reader(log.last_number + 1)
        log.close()
        assert not await read(log, log.last_number)

    run(work())


def test_log_without_readers_is_compressed() -> None:
    """To a tenth of its JSON, at about 200 bytes an event."""

    async def work() -> None:
        log = ResponseLog("resp_1")
        fill(log, 5000)
        raw = sum(len(json.dumps(frame)) for frame in await read(log, most=5000))
        assert log.num_bytes < raw / 2
        log.close()
        assert log.num_bytes < raw / 4

    run(work())


SCORED = [(0, TokenLogprob(-0.5, ((1, -1.0),) * 20))]
TOP = [{"token": "b", "logprob": -1.0, "bytes": [98]}] * 20
LOGPROBS = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": TOP}]


def fill_with_logprobs(log: ResponseLog, num_candidates: int, num_deltas: int) -> None:
    """Fill a log with the four frames that repeat the log-probabilities of each candidate."""
    for _ in range(num_deltas):
        for index in range(num_candidates):
            log.append(
                "response.output_text.delta",
                item_id=f"msg_{index}",
                delta="a",
                logprobs=log.logprobs.add(index, SCORED),
            )
    for index in range(num_candidates):
        for kind in ("response.output_text.done", "response.content_part.done"):
            log.append(kind, item_id=f"msg_{index}", logprobs=log.logprobs.all_of(index))
    items = [{"logprobs": log.logprobs.all_of(index)} for index in range(num_candidates)]
    log.append("response.completed", response={"output": items})
    log.close()


def test_log_stores_logprobs_once_and_readers_receive_them_in_every_frame() -> None:
    num_candidates, num_deltas = 3, 200
    once = num_candidates * num_deltas * len(json.dumps(LOGPROBS))
    log = ResponseLog("resp_1", (b"a", b"b"))
    tracemalloc.start()
    fill_with_logprobs(log, num_candidates, num_deltas)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert log.num_bytes < once / 3 and num_bytes < once / 2

    async def check() -> None:
        frames = await read(log)
        assert frames == await read(log, after=-1)
        for frame in frames:
            if frame["type"] == "response.output_text.delta":
                assert frame["logprobs"] == LOGPROBS
            elif frame["type"] == "response.completed":
                assert frame["response"]["output"] == [{"logprobs": LOGPROBS * num_deltas}] * num_candidates
            else:
                assert frame["logprobs"] == LOGPROBS * num_deltas
        with log.reader() as reader:
            while batch := await reader.next():
                assert sum(len(frame.data) for frame in batch) <= 2 * log_frames.MAX_RESOLVED_BYTES
                assert len(batch) == 1 or not any(has_references(frame) for frame in batch)

    run(check())


class CountingEntries(PackedLogprobs):
    """Counts the entries that it encodes."""

    num_encoded = 0

    def read(self, start: int, end: int) -> Iterator[bytes]:
        self.num_encoded += end - start
        return super().read(start, end)


@pytest.mark.parametrize("has_turns", [False, True])
def test_readers_of_a_log_share_the_frames_with_logprobs(has_turns: bool) -> None:
    num_readers, num_deltas = 20, 300

    async def work() -> None:
        log, source, entries = ResponseLog("resp_1"), ResponseLog("resp_1", (b"a", b"b")), CountingEntries((b"a", b"b"))
        log.logprobs._entries[0] = entries
        fill_with_logprobs(source, 1, num_deltas)
        turns = LoopTurns() if has_turns else None

        async def count_bytes() -> int:
            num_bytes = 0
            with log.reader() as reader:
                while frames := await reader.next(turns, "ann"):
                    num_bytes += sum(len(frame.data) for frame in frames)
                    assert log.logprobs.num_shared_bytes <= log_frames.MAX_SHARED_BYTES
            return num_bytes

        reading = [asyncio.create_task(count_bytes()) for _ in range(num_readers)]
        await asyncio.sleep(0)
        while not log.is_closed:
            log.append_copy(source.copy(log.num_frames, log.logprobs.sizes()))
        num_bytes = await asyncio.gather(*reading)
        assert len(set(num_bytes)) == 1 and num_bytes[0] > log_frames.MAX_SHARED_BYTES
        # The last reader shares with no other one: it may encode its last segment again.
        assert num_deltas <= entries.num_encoded <= num_deltas + log_frames.SEGMENT_FRAMES
        assert log.logprobs.num_shared_bytes == 0, "freed with the readers"

    run(work())


def test_readers_of_one_owner_have_one_batch_for_each_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "TURN_S", 0.0)
    monkeypatch.setattr(admission, "PAUSE_FACTOR", 0.0)

    async def work() -> None:
        log, turns, order = ResponseLog("resp_1", (b"a", b"b")), LoopTurns(), list[str]()
        fill_with_logprobs(log, 1, 1000)

        async def count_batches(owner: str) -> None:
            with log.reader() as reader:
                while await reader.next(turns, owner):
                    order.append(owner)

        await asyncio.gather(*(count_batches("ann") for _ in range(8)), count_batches("bob"))
        num_batches = order.count("bob")
        assert num_batches > 10 and order.count("ann") == 8 * num_batches
        last = len(order) - order[::-1].index("bob")
        assert order[:last].count("ann") <= num_batches + 2

    run(work())


def test_single_reader_keeps_no_frames_with_logprobs() -> None:
    async def work() -> None:
        log = ResponseLog("resp_1", (b"a", b"b"))
        fill_with_logprobs(log, 1, 10)
        with log.reader() as reader:
            assert await reader.next() and log.logprobs.num_shared_bytes == 0

    run(work())


def test_reader_of_many_frames_lets_other_tasks_run() -> None:
    async def work() -> None:
        log, num_turns = ResponseLog("resp_1", (b"a", b"b")), 0
        fill_with_logprobs(log, 1, 1000)

        async def count_turns() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        num_bytes = 0
        with log.reader() as reader:
            while frames := await reader.next():
                num_bytes += sum(len(frame.data) for frame in frames)
        counting.cancel()
        assert num_turns >= num_bytes // (2 * log_frames.MAX_RESOLVED_BYTES) > 3

    run(work())


def test_snapshot_reports_the_logprobs_that_it_lacks() -> None:
    for has_logprobs in (False, True):
        log = ResponseLog("resp_1")
        fill(log, 10)
        if has_logprobs:
            log.logprobs.add(0, SCORED)
        (snapshot,) = [frame for frame in log.snapshot(0)[2] if frame.kind == "response.snapshot"]
        assert json.loads(snapshot.data).get("omitted") == (["message.output_text.logprobs"] if has_logprobs else None)


async def first_of(reader: LogReader) -> tuple[LogFrame, ...]:
    return tuple(await reader.next())


class FakeRun:
    def __init__(self, name: str, owner: str, num_deltas: int = 10, conversation_id: str | None = None) -> None:
        self.id, self.owner = name, owner
        self.log = ResponseLog(name, conversation_id=conversation_id)
        fill(self.log, num_deltas)

    def end_in(self, registry: ResponseRegistry, *, keep: bool = True) -> None:
        self.log.close()
        registry.end(self.id, keep=keep)


def begun(
    registry: ResponseRegistry, name: str, owner: str = "a", num_deltas: int = 10, conversation_id: str | None = None
) -> FakeRun:
    fake = FakeRun(name, owner, num_deltas, conversation_id)
    run: Run = fake  # type: ignore[assignment]
    registry.add(run)
    return fake


def test_registry_checks_owner_and_evicts_by_age_and_bytes() -> None:
    async def work() -> None:
        now_s = [0.0]
        registry = ResponseRegistry(clock=lambda: now_s[0])
        first, second, gone = begun(registry, "r1"), begun(registry, "r2", "b"), begun(registry, "r3")
        assert [run.id for run in registry.running("a")] == ["r1", "r3"] and len(registry.running()) == 3
        assert registry.get("a", "r1").run is not None
        for owner, name in (("a", "r2"), ("b", "r1"), ("", "r1"), ("a", "r4")):
            with pytest.raises(NotFoundError):
                registry.get(owner, name)
        gone.end_in(registry, keep=False)
        assert registry.find("a", "r3") is None
        first.end_in(registry)
        assert registry.get("a", "r1").run is None and registry.find("b", "r1") is None
        now_s[0] = KEEP_ENDED_S - 1
        second.end_in(registry)
        assert registry.find("a", "r1") is not None
        now_s[0] = KEEP_ENDED_S + 1
        assert registry.find("a", "r1") is None and registry.find("b", "r2") is not None
        registry.remove("r2")
        assert registry.find("b", "r2") is None and registry.num_ended_bytes == 0

    run(work())


def test_registry_removes_the_logs_of_a_deleted_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_DELETED_S", 0.02)

    async def work() -> None:
        registry = ResponseRegistry()
        ended, running = (begun(registry, name, conversation_id="conv") for name in ("ended", "running"))
        others = {"b": begun(registry, "r1", "b", conversation_id="conv")}
        others["a"] = begun(registry, "r2", "a", conversation_id="conv_2")
        ended.end_in(registry)
        others["b"].end_in(registry)
        (cancelled,) = registry.remove_conversation("a", "conv")
        assert cancelled.id == "running" and registry.find("a", "ended", deleted=True) is None
        assert registry.get("a", "running").run is not None, "its readers have not read its end yet"
        running.end_in(registry)
        assert registry.find("a", "running") is None
        assert registry.find("a", "running", deleted=True) is not None, "another gateway may have to read its end"
        assert registry.remove_conversation("a", "conv") == ()
        assert registry.find("a", "running", deleted=True) is not None
        for owner, other in others.items():
            assert registry.find(owner, other.id) is not None
            other.end_in(registry)
        await asyncio.sleep(0.05)
        assert registry.find("a", "running", deleted=True) is None
        kept = [registry.get(owner, other.id).num_bytes for owner, other in others.items()]
        assert registry.num_ended_bytes == sum(kept)

    run(work())


def test_registry_evicts_the_oldest_ended_logs_first() -> None:
    async def work() -> None:
        registry = ResponseRegistry(max_ended_bytes=300_000)
        for number in range(60):
            begun(registry, f"r{number}", num_deltas=500).end_in(registry)
            assert registry.num_ended_bytes <= 300_000
        kept = [number for number in range(60) if registry.find("a", f"r{number}") is not None]
        assert kept == list(range(kept[0], 60)) and 5 < len(kept) < 60

    run(work())
