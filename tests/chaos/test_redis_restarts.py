"""Test Redis restarts and outages under load (goal G10): fast refusals, no lost acknowledged turn, recovery.

The gateway is a separate process with the garbage collector settings of `chatcache serve`: in the test process, with
the objects of other tests, the collector would dominate the measured refusal times.
"""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.gateway.serving import wait_until
from tests.gateway.test_killed import Clients, Gateway, check_ledger
from tests.support.redis_servers import RedisServer, redis_server

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
REFUSED_S = 1.0
RETURNED_S = 5.0


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis", appendfsync="always") as server:
        yield server


def refusal_s(gateway: Gateway) -> float:
    """Return the time until a new turn is refused with the documented error."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    try:
        began_s = time.monotonic()
        body = json.dumps({"input": "Not now", "max_output_tokens": 1})
        connection.request("POST", "/v1/responses", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        content = json.loads(answer.read())
        took_s = time.monotonic() - began_s
    finally:
        connection.close()
    assert (answer.status, content["error"]["code"]) == (503, "store_unavailable"), content
    assert int(answer.headers["retry-after"]) >= 1
    return took_s


def is_ready(gateway: Gateway) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    finally:
        connection.close()


def return_s(gateway: Gateway) -> float:
    """Return the time until the gateway is ready."""
    began_s = time.monotonic()
    wait_until(lambda: is_ready(gateway), "service to be back", PATIENCE_S)
    return time.monotonic() - began_s


def restart(redis: RedisServer, num_restarts: int, outage_s: float) -> tuple[float, float]:
    """Restart Redis under six clients, then stop it; return the slowest refusal and recovery in seconds.

    Every second time Redis hangs before it is killed, which the gateway detects by a timeout.
    """
    refusals_s: list[float] = []
    slowest_return_s = 0.0
    gateway = Gateway(redis.url)
    clients = Clients([gateway])
    try:
        for number in range(num_restarts):
            clients.wait_for(len(clients.acknowledged) + 5)
            redis.signal(signal.SIGSTOP if number % 2 else signal.SIGKILL)
            refusals_s.append(refusal_s(gateway))
            redis.kill()
            redis.start()
            slowest_return_s = max(slowest_return_s, return_s(gateway))
        clients.wait_for(len(clients.acknowledged) + 5)
        redis.kill()
        until_s = time.monotonic() + outage_s
        while True:
            refusals_s.append(refusal_s(gateway))
            if time.monotonic() >= until_s:
                break
        redis.start()
        slowest_return_s = max(slowest_return_s, return_s(gateway))
        clients.wait_for(len(clients.acknowledged) + 5)
    finally:
        clients.stop()
        gateway.kill()
    check_ledger(redis, clients)
    slowest_s = max(refusals_s)
    print(f"{len(clients.acknowledged)} acknowledged, {clients.num_sent_again} sent again")
    print(f"{len(refusals_s)} refused, median {median(refusals_s):.3f} s, slowest {slowest_s:.3f} s")
    return slowest_s, slowest_return_s


def test_restarts_lose_no_acknowledged_turn(redis: RedisServer) -> None:
    restart(redis, 2, 0.0)


@pytest.mark.long
def test_twenty_restarts_and_an_outage_meet_the_time_limits(redis: RedisServer) -> None:
    slowest_refusal_s, slowest_return_s = restart(redis, 20, 60.0)
    print(f"refused within {slowest_refusal_s:.3f} s, back within {slowest_return_s:.3f} s")
    assert slowest_refusal_s <= REFUSED_S and slowest_return_s <= RETURNED_S


def test_injected_bug_redis_without_append_only_file_is_found(tmp_path: Path) -> None:
    """Injected bug: Redis without its append-only file, as if it had one."""
    lossy = redis_server(tmp_path / "redis", "--appendonly", "no")
    with lossy as redis, pytest.raises(AssertionError, match="lost"):
        restart(redis, 1, 0.0)
