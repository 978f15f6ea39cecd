"""Gateways killed by SIGKILL under load: clients retry, every turn is stored exactly once."""

from __future__ import annotations

import collections
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.kept import keeping, server_on
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.slow

NUM_CLIENTS = 6


class Gateway:
    """A gateway process that is killed and restarted, and its current address."""

    def __init__(self, store: str, *more: str) -> None:
        self._command = [sys.executable, "-m", "tests.gateway.killable", store, "0", *more]
        self.start()

    def start(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths}
        self._process = subprocess.Popen(self._command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Clients:
    """Clients that send numbered turns and retry each until it is acknowledged."""

    def __init__(self, gateways: list[Gateway]) -> None:
        self.acknowledged: dict[str, str] = {}
        self.num_sent_again = 0
        self._gateways = gateways
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def wait_for(self, count: int) -> None:
        deadline_s = time.monotonic() + 60
        while len(self.acknowledged) < count:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _run(self, client: int) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            key = f"say-{client}-{number}"
            tries = 0
            while (found := self._send(self._gateways[(client + tries) % len(self._gateways)], key)) is None:
                tries += 1
                self.num_sent_again += 1
                time.sleep(0.02)
            self.acknowledged[key] = found

    def _send(self, gateway: Gateway, key: str) -> str | None:
        """The id of the response; None where there was no answer, or none yet."""
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        try:
            body = json.dumps({"input": key, "max_output_tokens": 3, "ignore_eos": True})
            connection.request(
                "POST", "/v1/responses", body, {"content-type": "application/json", "idempotency-key": key}
            )
            answer = connection.getresponse()
            reported: dict[str, Any] = json.loads(answer.read())
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        assert answer.status in (200, 503), reported
        return str(reported["id"]) if answer.status == 200 else None


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer | str]:
    with keeping(request.param, tmp_path) as store:
        yield store


def live_and_die(kept: RedisServer | str, num_kills: int, *more: str) -> Clients:
    """Kill gateways under load: one gateway on a SQLite file, two on Redis."""
    store, count = (kept.url, 2) if isinstance(kept, RedisServer) else (kept, 1)
    gateways = [Gateway(store, *more) for _ in range(count)]
    try:
        clients = Clients(gateways)
        for number in range(num_kills):
            clients.wait_for(len(clients.acknowledged) + 5)
            gateways[number % count].kill()
            gateways[number % count].start()
        clients.wait_for(len(clients.acknowledged) + 5)
        clients.stop()
    finally:
        for gateway in gateways:
            gateway.kill()
    return clients


def check_ledger(kept: RedisServer | str, clients: Clients) -> None:
    """Check that every acknowledged turn is stored, and every turn once."""
    with server_on(kept) as server:
        server.wait_ready()
        said: collections.Counter[str] = collections.Counter()
        after = ""
        while True:
            page = server.request("GET", f"/v1/conversations?limit=100{after}")[2]
            said.update(each["title"] for each in page["data"])
            if not page["has_more"]:
                break
            after = f"&after={page['next']}"
        assert set(clients.acknowledged) <= set(said), "something acknowledged is lost"
        assert max(said.values()) == 1, "something was said twice"
        for key, response_id in clients.acknowledged.items():
            items = server.request("GET", f"/v1/responses/{response_id}/input_items")[2]["data"]
            assert [item["content"][0]["text"] for item in items] == [key]


def test_killed_gateways_lose_no_acknowledged_turn_and_repeat_none(kept: RedisServer | str) -> None:
    clients = live_and_die(kept, num_kills=2)
    assert clients.num_sent_again
    check_ledger(kept, clients)


@pytest.mark.long
def test_fifty_killed_gateways_lose_no_acknowledged_turn(kept: RedisServer | str) -> None:
    check_ledger(kept, live_and_die(kept, num_kills=50))


def test_gateway_without_idempotency_keys_is_detected(tmp_path: Path) -> None:
    """Injected bug: duplicates appear after kills between store and response."""

    def live_and_die_forgetfully() -> None:
        for number in range(5):
            path = str(tmp_path / f"{number}.db")
            check_ledger(path, live_and_die(path, 1, "forgetful"))

    with pytest.raises(AssertionError, match="twice"):
        live_and_die_forgetfully()
