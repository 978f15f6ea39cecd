"""G10: Redis restarted under load, and gone for a while: refused at once, nothing acknowledged lost, then service.

The gateway is a process of its own, its collector calmed as `chatcache serve` does it: beside the threads of a test, in
a process full of other tests' objects, what a refusal waits for is the collector.
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
    """How long a new turn takes to be refused, as it should be."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    try:
        began_s = time.monotonic()
        body = json.dumps({"input": "Not now", "max_output_tokens": 1})
        connection.request("POST", "/v1/responses", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        told = json.loads(answer.read())
        took_s = time.monotonic() - began_s
    finally:
        connection.close()
    assert (answer.status, told["error"]["code"]) == (503, "store_unavailable"), told
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
    """How long until service is as it was."""
    began_s = time.monotonic()
    wait_until(lambda: is_ready(gateway), "service to be back", PATIENCE_S)
    return time.monotonic() - began_s


def restart(redis: RedisServer, num_restarts: int, outage_s: float) -> tuple[float, float]:
    """Restarts under six clients, then an outage; the slowest refusal and the slowest return, in seconds.

    Every other time Redis hangs before it dies, which is found out by waiting for it.
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


def test_nothing_acknowledged_is_lost_by_restarts(redis: RedisServer) -> None:
    restart(redis, 2, 0.0)


@pytest.mark.long
def test_the_same_of_twenty_restarts_and_a_minute_without(redis: RedisServer) -> None:
    slowest_refusal_s, slowest_return_s = restart(redis, 20, 60.0)
    print(f"refused within {slowest_refusal_s:.3f} s, back within {slowest_return_s:.3f} s")
    assert slowest_refusal_s <= REFUSED_S and slowest_return_s <= RETURNED_S


def test_a_server_that_keeps_nothing_would_be_seen(tmp_path: Path) -> None:
    """The planted bug: Redis without its append-only file, acknowledged as if it had one."""
    lossy = redis_server(tmp_path / "redis", "--appendonly", "no")
    with lossy as redis, pytest.raises(AssertionError, match="lost"):
        restart(redis, 1, 0.0)
