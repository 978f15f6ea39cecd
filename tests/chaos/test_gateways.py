"""G7: a gateway dies by SIGKILL exactly between store and answer; the client goes elsewhere and says it again."""

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


def say(port: int) -> tuple[int, str]:
    """Status and response id. Raises: OSError, HTTPException where there was no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        body = json.dumps({"input": KEY, "max_output_tokens": 3, "ignore_eos": True})
        headers = {"content-type": "application/json", "idempotency-key": KEY}
        connection.request("POST", "/v1/responses", body, headers)
        answer = connection.getresponse()
        return answer.status, str(json.loads(answer.read()).get("id"))
    finally:
        connection.close()


def until_ready(port: int) -> str:
    """The response id, from a gateway that may be starting."""
    while (answer := say(port))[0] == 503:
        pass
    assert answer[0] == 200
    return answer[1]


def die_and_say_again(kept: RedisServer | str, *more: str) -> None:
    """A gateway that is killed once it has stored what it was told; then another one, over the same store."""
    store = kept.url if isinstance(kept, RedisServer) else kept
    dying = Gateway(store, "mute", *more)
    try:
        with pytest.raises((OSError, http.client.HTTPException)):
            until_ready(dying.port)
    finally:
        dying.kill()
    other = Gateway(store, *more)
    try:
        ids = {until_ready(other.port), say(other.port)[1]}
        assert len(ids) == 1, "one key made two responses"
    finally:
        other.kill()
    with server_on(kept) as server:
        server.wait_ready()
        titles = [each["title"] for each in server.request("GET", "/v1/conversations?limit=100")[2]["data"]]
        assert titles == [KEY], f"it was said {len(titles)} times"
        items = server.request("GET", f"/v1/responses/{ids.pop()}/input_items")[2]["data"]
        assert [item["content"][0]["text"] for item in items] == [KEY]


def test_what_was_stored_and_not_acknowledged_is_there_once(kept: RedisServer | str) -> None:
    die_and_say_again(kept)


def test_a_gateway_that_forgets_its_keys_would_say_it_twice(tmp_path: Path) -> None:
    """The planted bug."""
    with pytest.raises(AssertionError, match=r"two responses|times"):
        die_and_say_again(str(tmp_path / "chat.db"), "forgetful")
