"""Failures at any moment: a response ends exactly once and its pages are freed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from chatcache.config import ServerConfig
from chatcache.gateway.responses.event_log import TERMINAL as ENDS
from chatcache.gateway.responses.event_log import ResponseLog
from chatcache.gateway.responses.run import DetachTimer, LiveResponse
from chatcache.storage.sqlite import SqliteStore
from tests.gateway.frames import LONG, Frame, ask, receive, send, until_end
from tests.gateway.serving import Server, hurry, slowed, wait_until
from tests.support.virtual_time import run_in_virtual_time


class FaultyStore(SqliteStore):
    """A store whose next writes of replies fail, after a delay if set."""

    num_faults = 0
    delay_s = 0.0
    holds_opening = False

    async def append(self, *args: Any, **more: Any) -> Any:
        turn = args[3] if len(args) > 3 else more.get("turn")
        if turn is not None and turn.status != "in_progress":
            await asyncio.sleep(self.delay_s)
            if self.num_faults:
                self.num_faults -= 1
                raise OSError("disk full: /secret/path")
        elif turn is not None:
            while self.holds_opening:  # noqa: ASYNC110 - it is another thread that ends this
                await asyncio.sleep(0.01)
        return await super().append(*args, **more)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, FaultyStore]]:
    store = FaultyStore(tmp_path_factory.mktemp("db") / "c.db")
    with Server(ServerConfig(disconnect_grace_period_s=0.2), store=store) as server:
        yield server.wait_ready(), store


@pytest.fixture
def server(faulty: tuple[Server, FaultyStore]) -> Iterator[Server]:
    server, store = faulty
    yield server
    store.num_faults, store.delay_s, store.holds_opening = 0, 0.0, False
    server.wait_idle()
    assert not server.gateway.responses.running()


@pytest.fixture
def store(faulty: tuple[Server, FaultyStore]) -> FaultyStore:
    return faulty[1]


def begin(socket: ClientConnection, **fields: Any) -> str:
    send(socket, **{**LONG, **fields})
    frames = [receive(socket)]
    while frames[-1]["type"] != "response.output_text.delta":
        frames.append(receive(socket))
    response_id: str = frames[0]["response"]["id"]
    return response_id


def logged_kinds(server: Server, response_id: str) -> list[str]:
    """Return the kinds of the whole log once it is closed."""

    async def read() -> list[str]:
        with server.gateway.responses.get("", response_id).log.reader() as reader:
            return [frame.kind async for frame in reader]

    return server.call(read())


def ends(kinds: list[str]) -> list[str]:
    return [kind for kind in kinds if kind in ENDS]


def assert_one_end(server: Server, frames: list[Frame], response_id: str, kind: str) -> None:
    assert frames[-1]["type"] == kind
    kinds = logged_kinds(server, response_id)
    assert ends(kinds) == [kind] == ends([frame["type"] for frame in frames])
    assert "secret" not in str(frames)


@pytest.mark.parametrize("num_faults", [1, 2])
@pytest.mark.slow
def test_store_failure_at_the_end_fails_the_response_once(
    server: Server, store: FaultyStore, socket: ClientConnection, num_faults: int
) -> None:
    with slowed(server, 0.01):
        response_id = begin(socket)
        store.num_faults = num_faults  # the second: that it failed cannot be stored either
        hurry(server)
        frames = until_end(socket)
    assert_one_end(server, frames, response_id, "response.failed")
    assert frames[-1]["response"]["error"]["code"] and frames[-1]["response"]["status"] == "failed"
    store.num_faults = 0
    assert ask(socket, input="still here")["output"]


def test_store_failure_during_cancel_ends_the_response_once(
    server: Server, store: FaultyStore, socket: ClientConnection
) -> None:
    with slowed(server, 0.01):
        response_id = begin(socket)
        store.num_faults = 1
        send(socket, "response.cancel", response_id=response_id)
        frames = until_end(socket)
    assert_one_end(server, frames, response_id, "response.failed")


def test_store_failure_during_steering_returns_the_input(
    server: Server, store: FaultyStore, socket: ClientConnection
) -> None:
    """Nothing was stored that a successor could continue."""
    with slowed(server, 0.01):
        response_id = begin(socket)
        store.num_faults = 1
        send(socket, "response.steer", previous_response_id=response_id, input="x")
        frames = until_end(socket)
        failed = receive(socket)
    assert frames[-1]["type"] == "response.failed"
    assert failed["type"] == "response.steer.failed" and failed["error"]["code"] == "successor_creation_failed"
    assert ends(logged_kinds(server, response_id)) == ["response.failed"]


def test_steer_while_the_successor_is_created_is_rejected(
    server: Server, store: FaultyStore, socket: ClientConnection
) -> None:
    """The old response has ended; the successor does not exist yet."""
    with slowed(server, 0.01):
        first = begin(socket)
        store.holds_opening = True
        send(socket, "response.steer", previous_response_id=first, input="x")
        assert until_end(socket)[-1]["response"]["incomplete_details"] == {"reason": "steered"}
        send(socket, "response.steer", previous_response_id=first, input="too late")
        failed = receive(socket)
        store.holds_opening = False
        created = receive(socket)
        assert failed["error"]["code"] == "response_not_active" and failed["steer"]["input"] == "too late"
        assert created["response"]["previous_response_id"] == first
        send(socket, "response.cancel", response_id=created["response"]["id"])
        until_end(socket)


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_cancel_concurrent_with_the_end_gives_one_terminal_event(
    server: Server, store: FaultyStore, url: str, delay_s: float
) -> None:
    """Either may win; only a cancelled response has a receipt."""
    store.delay_s = delay_s
    seen: set[str] = set()
    for number in range(10):
        with slowed(server, 0.002 if number else 1.0), connect(url) as socket:  # the first is cancelled, surely
            send(socket, **{**LONG, "max_output_tokens": 12})
            response_id = receive(socket)["response"]["id"]
            time.sleep(number * 0.006)
            send(socket, "response.cancel", response_id=response_id)
            frames = until_end(socket)
        if frames[-1]["type"] == "error":  # it had ended before the cancel came
            assert frames[-1]["status"] == 404
        kinds = logged_kinds(server, response_id)
        assert len(ends(kinds)) == 1
        for end in (frame for frame in frames if frame["type"] in ENDS):
            assert ("receipt" in end) == (end["response"]["status"] == "cancelled")
            seen.add(end["response"]["status"])
    assert "cancelled" in seen


def test_engine_failure_ends_the_response_once(
    server: Server, socket: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slowed(server, 0.01):
        response_id = begin(socket)
        with monkeypatch.context() as patch:
            patch.setattr(server.runner, "draw", _broken)
            frames = until_end(socket)
    assert_one_end(server, frames, response_id, "response.failed")
    assert ask(socket, input="still here")["output"]
    wait_until(lambda: not server.gateway.responses.running(), "all to be over")


def _broken(*_: object) -> Any:
    raise RuntimeError("a kernel fell over at /secret/path")


def test_cancelled_task_ends_its_response(server: Server, socket: ClientConnection) -> None:
    with slowed(server, 0.01):
        response_id = begin(socket)
        run = server.gateway.responses.get("", response_id).run
        assert run is not None
        server.loop.call_soon_threadsafe(run.task.cancel)
        frames = until_end(socket)
    assert_one_end(server, frames, response_id, "response.failed")


def test_engine_stream_without_final_event_fails_the_response(
    server: Server, socket: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(self: LiveResponse) -> None: ...

    monkeypatch.setattr(LiveResponse, "_consume_events", silent)
    send(socket, **LONG)
    frames = until_end(socket)
    monkeypatch.undo()
    assert_one_end(server, frames, frames[0]["response"]["id"], "response.failed")


def test_shutdown_ends_every_response_once(tmp_path: Path) -> None:
    with Server(ServerConfig(db=str(tmp_path / "c.db"))) as server:
        server.wait_ready()
        server.runner.delay_s = 0.01
        with contextlib.ExitStack() as stack:
            url = f"ws://127.0.0.1:{server.port}/v1/responses"
            ids = [begin(stack.enter_context(connect(url))) for _ in range(3)]
            logs = [server.gateway.responses.get("", response_id).log for response_id in ids]
            server.stop()
    assert [log.terminal for log in logs] == ["response.incomplete"] * 3 and all(log.is_closed for log in logs)


def test_detach_timer_restarts_with_every_reader() -> None:
    async def work() -> None:
        log = ResponseLog("resp_1")
        ended = asyncio.Event()

        async def end() -> None:
            ended.set()

        lifetime = DetachTimer(log, 0.1, end)
        lifetime.start()
        for _ in range(4):
            with log.reader():
                await asyncio.sleep(0.03)
            await asyncio.sleep(0.03)
        with log.reader(), log.reader():
            await asyncio.sleep(0.25)
        assert not ended.is_set()
        async with asyncio.timeout(60):
            await ended.wait()
        lifetime.stop()
        ended.clear()
        with log.reader():
            pass
        await asyncio.sleep(0.2)
        assert not ended.is_set(), "what is over needs no end"

    run_in_virtual_time(work())


def test_detach_timer_without_limit_never_expires() -> None:
    async def work() -> None:
        log = ResponseLog("resp_1")

        async def end() -> None:
            raise AssertionError("ended")

        lifetime = DetachTimer(log, None, end)
        lifetime.start()
        with log.reader():
            pass
        await asyncio.sleep(0.05)
        lifetime.stop()

    run_in_virtual_time(work())


def test_message_deleted_during_regeneration_is_rejected(
    server: Server, store: FaultyStore, socket: ClientConnection
) -> None:
    """Planned before and stored after the deletion: rejected, and the tree stays valid."""
    origin = ask(socket, input="Hello")
    item, path = origin["input_item_ids"][0], f"/v1/conversations/{origin['conversation']['id']}"
    store.holds_opening = True
    with slowed(server, 0.01):
        send(socket, **{**LONG, "input": [], "previous_item_id": item})
        wait_until(lambda: server.num_pages_in_use() > 0, "the engine to have it")
    assert server.request("DELETE", f"{path}/items/{item}")[0] == 200
    store.holds_opening = False
    refused = receive(socket)
    assert (refused["status"], refused["error"]["code"]) == (409, "conversation_busy"), refused
    status, _, listed = server.request("GET", f"{path}/items")
    assert status == 200 and [each["id"] for each in listed["data"]] == [origin["output"][0]["id"]]
