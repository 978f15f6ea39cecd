"""G10: Redis restarted under load, and gone for a while: refused at once, nothing acknowledged lost, then service."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.chat.redis_servers import RedisServer, redis_server
from tests.gateway.kept import server_on
from tests.gateway.serving import Server, wait_until
from tests.gateway.test_gateway_killed import Clients, check_ledger

PATIENCE_S = 60.0


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis", appendfsync="always") as server:
        yield server


def refusal_s(server: Server) -> float:
    """How long a new turn takes to be refused, as it should be."""
    began_s = time.monotonic()
    status, headers, body = server.post("/v1/responses", input="Not now", max_output_tokens=1)
    took_s = time.monotonic() - began_s
    assert (status, body["error"]["code"]) == (503, "store_unavailable"), body
    assert int(headers["retry-after"]) >= 1
    return took_s


def return_s(server: Server) -> float:
    """How long until service is as it was."""
    began_s = time.monotonic()
    wait_until(lambda: server.request("GET", "/readyz")[0] == 200, "service to be back", PATIENCE_S)
    return time.monotonic() - began_s


def restart(redis: RedisServer, num_restarts: int, outage_s: float) -> tuple[float, float]:
    """Restarts under six clients, then an outage; the slowest refusal (but for 1 %) and return, in seconds."""
    refusals_s: list[float] = []
    slowest_return_s = 0.0
    with server_on(redis) as server:
        server.wait_ready()
        clients = Clients([server])  # type: ignore[list-item]
        try:
            for _ in range(num_restarts):
                clients.wait_for(len(clients.acknowledged) + 5)
                redis.kill()
                redis.start()
                slowest_return_s = max(slowest_return_s, return_s(server))
            clients.wait_for(len(clients.acknowledged) + 5)
            redis.kill()
            until_s = time.monotonic() + outage_s
            while True:
                refusals_s.append(refusal_s(server))
                if time.monotonic() >= until_s:
                    break
            redis.start()
            slowest_return_s = max(slowest_return_s, return_s(server))
            clients.wait_for(len(clients.acknowledged) + 5)
        finally:
            clients.stop()
    check_ledger(redis, clients)
    slowest_s = max(refusals_s)
    print(f"{len(clients.acknowledged)} acknowledged, {clients.num_sent_again} sent again")
    print(f"{len(refusals_s)} refused, median {median(refusals_s):.3f} s, slowest {slowest_s:.3f} s")
    return sorted(refusals_s)[int(len(refusals_s) * 0.99)], slowest_return_s


def test_nothing_acknowledged_is_lost_by_restarts(redis: RedisServer) -> None:
    restart(redis, 2, 0.0)


@pytest.mark.long
def test_the_same_of_twenty_restarts_and_a_minute_without(redis: RedisServer) -> None:
    refused_within_s, slowest_return_s = restart(redis, 20, 60.0)
    print(f"refused within {refused_within_s:.3f} s, back within {slowest_return_s:.3f} s")
    assert refused_within_s <= 1.0 and slowest_return_s <= 5.0


def test_a_server_that_keeps_nothing_would_be_seen(tmp_path: Path) -> None:
    """The planted bug: Redis without its append-only file, acknowledged as if it had one."""
    lossy = redis_server(tmp_path / "redis", "--appendonly", "no")
    with lossy as redis, pytest.raises(AssertionError, match="lost"):
        restart(redis, 1, 0.0)
