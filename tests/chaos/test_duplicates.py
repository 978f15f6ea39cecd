"""Test duplicate submissions, ten per idempotency key, through two gateways: one turn per key (goal G12)."""

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
    """Submit until a response is acknowledged; return its id."""
    while True:
        body = {"input": key, "max_output_tokens": 2, "ignore_eos": True}
        status, _, answer = server.request("POST", "/v1/responses", body, {"idempotency-key": key})
        if status == 200:
            return str(answer["id"])
        assert status == 503, answer


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
    """Submit several keys at a time, in random order, alternately to both gateways."""
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


def test_ten_submissions_of_a_key_make_one_turn(kept: RedisServer | str) -> None:
    check_duplicates(kept, 8)


@pytest.mark.long
def test_ten_thousand_submissions_make_one_turn_per_key(kept: RedisServer | str) -> None:
    check_duplicates(kept, 1000)


def test_injected_bug_forgotten_idempotency_keys_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected bug: gateways do not look up idempotency keys."""

    async def find_nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(IdempotencyKey, "find_target", find_nothing)
    monkeypatch.setattr(IdempotencyKey, "claim", lambda *_: None)
    with pytest.raises(AssertionError, match="more than one"):
        check_duplicates(str(tmp_path / "chat.db"), 1)
