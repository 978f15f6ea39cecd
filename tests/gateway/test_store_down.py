"""The store dies, hangs or is full.

New turns are refused, running responses continue and are saved later.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from chatcache.gateway.context import PendingSaves
from tests.gateway.kept import server_on
from tests.gateway.responding import Events, running_id
from tests.gateway.serving import Server, hurry, slowed, wait_until
from tests.support.redis_servers import RedisServer, redis_server

PATH = "/v1/responses"
# Long enough that the store is gone before the end, however busy the machine.
LONG: dict[str, Any] = {"input": "Hi", "ignore_eos": True, "stream": True, "max_output_tokens": 900}
Outage = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def mortal_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis", appendfsync="always") as server:
        yield server


@contextlib.contextmanager
def killed(redis: RedisServer) -> Iterator[None]:
    redis.kill()
    yield
    redis.start()


@contextlib.contextmanager
def hung(redis: RedisServer) -> Iterator[None]:
    redis.signal(signal.SIGSTOP)
    yield
    redis.signal(signal.SIGCONT)


@contextlib.contextmanager
def full() -> Iterator[None]:
    """Nothing beyond a page of any file can be written, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(params=["killed", "hung", "full"])
def outage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, Outage]]:
    """A gateway, and a way for its store to be of no use for a while."""
    if request.param == "full":
        with server_on(str(tmp_path / "chat.db")) as server:
            yield server.wait_ready(), full
        return
    redis: RedisServer = request.getfixturevalue("mortal_redis")
    with server_on(redis) as server:
        yield server.wait_ready(), lambda: {"killed": killed, "hung": hung}[request.param](redis)


def texts(server: Server, conversation: str) -> list[str]:
    found = server.request("GET", f"/v1/conversations/{conversation}/items?order=asc")[2]
    return [each["content"][0]["text"] for each in found["data"]] if "data" in found else []


def refused(server: Server) -> float:
    """A new turn is refused as it should be. How long that took."""
    began_s = time.monotonic()
    status, headers, body = server.post(PATH, input="Not now ")
    took_s = time.monotonic() - began_s
    assert (status, body["error"]["code"]) == (503, "store_unavailable"), body
    assert int(headers["retry-after"]) >= 1
    return took_s


@pytest.mark.slow
def test_turns_are_refused_and_what_runs_goes_on(outage: tuple[Server, Outage]) -> None:
    server, begin = outage
    with Events(server, PATH, LONG) as events, slowed(server, 0.02):
        created = events.next()
        assert created is not None
        response_id, conversation = running_id(server), created["response"]["conversation"]["id"]
        with begin():
            assert any(refused(server) < 1.0 for _ in range(5))
            with connect(f"ws://127.0.0.1:{server.port}{PATH}") as socket:
                socket.send(json.dumps({"type": "response.create", "input": "Not now "}))
                frame = json.loads(socket.recv())
                assert (frame["status"], frame["error"]["code"]) == (503, "store_unavailable")
            status, _, body = server.request("GET", "/readyz")
            assert (status, body["status"], body["error"]["code"]) == (503, "unavailable", "store_unavailable")
            hurry(server)
            end = list(events)[-1]
            assert (end["type"], end["saved"]) == ("response.incomplete", False)
            assert server.request("GET", f"{PATH}/{response_id}")[2]["saved"] is False
            assert server.post(PATH, input="Hi", store=False, max_output_tokens=4)[0] == 200
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            assert server.post("/v1/chat/completions", **chat)[0] == 200
            assert server.post(PATH, input="More", previous_response_id=response_id)[0] == 503
    said = end["response"]["output"][0]["content"][0]["text"]
    wait_until(lambda: server.request("GET", "/readyz")[0] == 200, "the store to be back")
    status, _, body = server.post(PATH, input="More", previous_response_id=response_id, max_output_tokens=4)
    assert status == 200 and "saved" not in body
    assert texts(server, conversation)[:3] == ["Hi", said, "More"]
    assert "saved" not in server.request("GET", f"{PATH}/{response_id}")[2]
    server.wait_idle()


@pytest.mark.slow
def test_it_is_saved_without_being_asked_for(mortal_redis: RedisServer) -> None:
    with server_on(mortal_redis) as server:
        server.wait_ready()
        _saved_later(server, mortal_redis)


def _saved_later(server: Server, redis: RedisServer, timeout_s: float = 60.0) -> None:
    with Events(server, PATH, LONG) as events, slowed(server, 0.02):
        created = events.next()
        assert created is not None
        with killed(redis):
            hurry(server)
            end = list(events)[-1]
    said = end["response"]["output"][0]["content"][0]["text"]
    assert end["saved"] is False
    conversation = created["response"]["conversation"]["id"]
    wait_until(lambda: texts(server, conversation) == ["Hi", said], "the reply to be stored", timeout_s)


@pytest.mark.slow
def test_store_down_reply_not_kept_for_saving_is_detected(
    mortal_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Injected bug: the test above detects a reply that is never saved."""
    monkeypatch.setattr(PendingSaves, "add", lambda *_: None)
    with server_on(mortal_redis) as server:
        server.wait_ready()
        with pytest.raises(AssertionError, match="to be stored"):
            _saved_later(server, mortal_redis, timeout_s=1.5)


def test_a_gateway_starts_before_its_store(mortal_redis: RedisServer) -> None:
    mortal_redis.kill()
    with server_on(mortal_redis) as server:
        wait_until(lambda: server.request("GET", "/readyz")[2]["status"] == "unavailable", "readiness to tell")
        refused(server)
        mortal_redis.start()
        server.wait_ready()
        # A store that syncs every write may take longer than the timeout on a busy machine.
        wait_until(lambda: server.post(PATH, input="Hi", max_output_tokens=4)[0] == 200, "a turn to be stored")


@pytest.mark.parametrize(
    "path",
    ["/v1/conversations/{conversation}", "/v1/responses/{response}", "/v1/conversations/{conversation}/items/{item}"],
)
@pytest.mark.slow
def test_what_is_acknowledged_before_it_is_unsaved_can_be_deleted(mortal_redis: RedisServer, path: str) -> None:
    """What goes while a reply waits to be saved takes it along, or waits for that; nothing waits for ever."""
    with server_on(mortal_redis) as server:
        server.wait_ready()
        with Events(server, PATH, LONG) as events, slowed(server, 0.02):
            created = events.next()
            assert created is not None
            response = created["response"]
            path = path.format(
                conversation=response["conversation"]["id"], response=response["id"], item=response["input_item_ids"][0]
            )
            with killed(mortal_redis):
                hurry(server)
                assert list(events)[-1]["saved"] is False
                server.call(_hold(server.gateway.pending_saves))
        wait_until(lambda: server.request("GET", "/readyz")[0] == 200, "the store to be back")
        assert server.request("DELETE", path)[0] == 200
        server.call(server.gateway.pending_saves.flush())
        assert not server.gateway.pending_saves._pending


async def _hold(unsaved: PendingSaves) -> None:
    """Let it not retry by itself."""
    assert unsaved._task is not None
    unsaved._task.cancel()
