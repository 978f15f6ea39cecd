"""Test that wall-clock jumps of an hour in a running gateway end, lose or repeat nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatcache.gateway.responses.registry import ResponseRegistry
from chatcache.storage import redis_client
from tests.gateway.kept import server_on
from tests.gateway.responding import Events
from tests.gateway.serving import Server, slowed
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.slow

HOUR_S = 3600.0
PATH = "/v1/responses"
Jump = Callable[[float], None]


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Jump:
    """Shifts this process's wall clock by a number of seconds; monotonic clocks are unchanged."""
    real_s, real_ns, off_s = time.time, time.time_ns, 0.0

    def set_off(seconds: float) -> None:
        nonlocal off_s
        off_s = seconds

    monkeypatch.setattr(time, "time", lambda: real_s() + off_s)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(off_s * 1e9))
    return set_off


def send(server: Server, key: str, **fields: Any) -> dict[str, Any]:
    body = {"input": f"Hello {key}", "max_output_tokens": 4, "ignore_eos": True, **fields}
    status, _, answer = server.request("POST", PATH, body, {"idempotency-key": key})
    assert status == 200, answer
    return answer  # type: ignore[no-any-return]


def check_jumps(kept: RedisServer | str, jump: Jump) -> None:
    with server_on(kept) as server:
        server.wait_ready()
        first = send(server, "first")
        for off_s in (HOUR_S, 0.0, -HOUR_S):
            long = {"input": "Hi", "stream": True, "max_output_tokens": 60, "ignore_eos": True}
            with slowed(server, 0.02), Events(server, PATH, long) as events:
                assert events.next() is not None
                jump(off_s)  # during generation
                end = list(events)[-1]
            assert end["type"] == "response.incomplete", end
            assert end["response"]["incomplete_details"]["reason"] == "max_output_tokens"
            assert server.request("GET", f"{PATH}/{first['id']}?stream=true")[0] == 200, "its stream was forgotten"
            assert send(server, "first")["id"] == first["id"], "its key was forgotten"
            again = send(server, f"at-{off_s}", previous_response_id=first["id"])
            head = server.request("GET", f"/v1/conversations/{again['conversation']['id']}")[2]
            assert head["active_leaf"] == again["output"][0]["id"]
        jump(0.0)
        page = server.request("GET", "/v1/conversations?limit=100")[2]["data"]
        assert len(page) == 4 and len({each["id"] for each in page}) == 4
        path = f"/v1/conversations/{first['conversation']['id']}/items?branches=all"
        texts = [
            item["content"][0]["text"] for item in server.request("GET", path)[2]["data"] if item["role"] == "user"
        ]
        assert texts == ["Hello first", "Hello at-3600.0", "Hello at-0.0", "Hello at--3600.0"]
        server.wait_idle()


def test_wall_clock_jumps_of_an_hour_change_nothing(
    kept: RedisServer | str, jump: Jump, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "TIMEOUT_S", redis_client.SLOW_TIMEOUT_S)  # on a busy machine Redis is slow
    check_jumps(kept, jump)


def test_injected_bug_wall_clock_retention_is_found(
    tmp_path: Path, jump: Jump, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Injected bug: responses are kept for fifteen minutes of wall clock."""
    original = ResponseRegistry.__init__

    def init(self: ResponseRegistry) -> None:
        original(self, clock=lambda: time.time())

    monkeypatch.setattr(ResponseRegistry, "__init__", init)
    with pytest.raises(AssertionError, match="forgotten"):
        check_jumps(str(tmp_path / "chat.db"), jump)
