"""G12: every request ten times at once, through two gateways over one store: one turn for each key."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chatcache.gateway.api.idempotency import IdempotencyKey
from tests.gateway.kept import server_on
from tests.gateway.serving import Server
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.slow

NUM_TIMES = 10


def submit(server: Server, key: str) -> str:
    """The id of the response, however often it takes."""
    while True:
        body = {"input": key, "max_output_tokens": 2, "ignore_eos": True}
        status, _, told = server.request("POST", "/v1/responses", body, {"idempotency-key": key})
        if status == 200:
            return str(told["id"])
        assert status == 503, told


def conversations(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        page = server.request("GET", f"/v1/conversations?limit=100{after}")[2]
        found += page["data"]
        if not page["has_more"]:
            return found
        after = f"&after={page['next']}"


def check_duplicates(kept: RedisServer | str, num_keys: int) -> None:
    """Submissions of several keys at a time, in any order, alternately to either gateway."""
    with server_on(kept) as one, server_on(kept) as two, ThreadPoolExecutor(2 * NUM_TIMES) as pool:
        for server in (one, two):
            server.wait_ready()
        work = [(server, f"key-{number}") for number in range(num_keys) for server in [one, two] * (NUM_TIMES // 2)]
        for start in range(0, len(work), 4 * NUM_TIMES):
            random.Random(start).shuffle(some := work[start : start + 4 * NUM_TIMES])
            given = list(pool.map(lambda each: (each[1], submit(*each)), some))
            assert len(set(given)) == len({key for key, _ in given}), "a key made more than one response"
        assert sorted(each["title"] for each in conversations(one)) == sorted(f"key-{n}" for n in range(num_keys))
        for server in (one, two):
            server.wait_idle()


def test_of_each_key_there_is_one_turn(kept: RedisServer | str) -> None:
    check_duplicates(kept, 8)


@pytest.mark.long
def test_the_same_of_ten_thousand_submissions(kept: RedisServer | str) -> None:
    check_duplicates(kept, 1000)


def test_gateways_that_forget_their_keys_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug."""

    async def know_nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(IdempotencyKey, "find_target", know_nothing)
    monkeypatch.setattr(IdempotencyKey, "claim", lambda *_: None)
    with pytest.raises(AssertionError, match="more than one"):
        check_duplicates(str(tmp_path / "chat.db"), 1)
