"""Test a gateway killed between storing a turn and answering; the client retries at another gateway (goal G7)."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import pytest

from tests.gateway.kept import server_on
from tests.gateway.test_killed import Gateway
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.slow

KEY = "once-and-only"


def send(port: int) -> tuple[int, str]:
    """Return status and response id. Raises: OSError or HTTPException if there was no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        body = json.dumps({"input": KEY, "max_output_tokens": 3, "ignore_eos": True})
        headers = {"content-type": "application/json", "idempotency-key": KEY}
        connection.request("POST", "/v1/responses", body, headers)
        answer = connection.getresponse()
        return answer.status, str(json.loads(answer.read()).get("id"))
    finally:
        connection.close()


def retry_until_answered(port: int) -> str:
    """Retry until the gateway answers; return the response id."""
    while (answer := send(port))[0] == 503:
        pass
    assert answer[0] == 200
    return answer[1]


def kill_and_retry(kept: RedisServer | str, *more: str) -> None:
    """Kill a gateway after it has stored a turn, then retry at another gateway on the same store."""
    store = kept.url if isinstance(kept, RedisServer) else kept
    dying = Gateway(store, "mute", *more)
    try:
        with pytest.raises((OSError, http.client.HTTPException)):
            retry_until_answered(dying.port)
    finally:
        dying.kill()
    other = Gateway(store, *more)
    try:
        ids = {retry_until_answered(other.port), send(other.port)[1]}
        assert len(ids) == 1, "one key made two responses"
    finally:
        other.kill()
    with server_on(kept) as server:
        server.wait_ready()
        titles = [each["title"] for each in server.request("GET", "/v1/conversations?limit=100")[2]["data"]]
        assert titles == [KEY], f"the turn is stored {len(titles)} times"
        items = server.request("GET", f"/v1/responses/{ids.pop()}/input_items")[2]["data"]
        assert [item["content"][0]["text"] for item in items] == [KEY]


def test_turn_stored_before_the_kill_is_not_executed_again(kept: RedisServer | str) -> None:
    kill_and_retry(kept)


def test_injected_bug_forgotten_key_after_a_kill_is_found(tmp_path: Path) -> None:
    """Injected bug: the gateway does not look up idempotency keys."""
    with pytest.raises(AssertionError, match=r"two responses|times"):
        kill_and_retry(str(tmp_path / "chat.db"), "forgetful")
