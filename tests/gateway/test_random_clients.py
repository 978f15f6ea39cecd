"""Random clients of two tenants on one server: no fault is found and nothing remains."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatcache.config import EngineConfig, ServerConfig
from tests.gateway.random_client import ENDS, RandomClient, World
from tests.gateway.responding import counted, num_running, num_tasks
from tests.gateway.serving import Server, post_bytes, read_all, wait_until

pytestmark = pytest.mark.slow

KEYS = ("sk-dice-of-one", "sk-dice-of-two")


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with few pages, where requests wait and are preempted."""
    path: Path = tmp_path_factory.mktemp("random")
    config = ServerConfig(db=str(path / "chat.db"), api_keys=KEYS, disconnect_grace_period_s=0.3)
    with Server(config, num_pages=700, engine_config=EngineConfig(max_num_seqs=80, max_queued_requests=40)) as server:
        server.wait_ready()
        with server.connect() as first:  # what runs as long as the server is there
            body = b'{"input":"Hi","max_output_tokens":1,"stream":true}'
            first.sendall(post_bytes(server.port, "/v1/responses", body, f"authorization: Bearer {KEYS[0]}\r\n"))
            assert b"200 OK" in read_all(first)
        server.runner.delay_s = 0.001
        yield server


async def _run_clients(
    server: Server, worlds: tuple[World, World], seed: int, num_clients: int, num_rounds: int
) -> None:
    one, two = worlds
    async with asyncio.TaskGroup() as group:
        for number in range(num_clients):
            mine, other = (one, two) if number % 2 else (two, one)
            group.create_task(RandomClient(server.url, mine, other, seed * 1000 + number).play(num_rounds))


def _check(server: Server, caplog: pytest.LogCaptureFixture, seed: int, num_clients: int, num_rounds: int) -> None:
    worlds = World(KEYS[0]), World(KEYS[1])
    idle = num_tasks(server)
    asyncio.run(_run_clients(server, worlds, seed, num_clients, num_rounds))
    wait_until(lambda: num_running(server) == 0, "every response to end", timeout_s=60)
    server.wait_idle()
    wait_until(lambda: num_tasks(server) <= idle, "every task to end")
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not [logging.Formatter().format(record) for record in errors]
    assert not [fault for world in worlds for fault in world.faults]
    for world, other in (worlds, worlds[::-1]):
        assert world.num_received > num_rounds
        wait_until(lambda key=world.headers: _num_sockets(server, key) == 0, "every socket to be gone")  # type: ignore[misc]
        for response_id in dict.fromkeys(world.responses[-60:]):
            path = f"/v1/responses/{response_id}"
            assert server.request("GET", path, headers=other.headers)[0] == 404
            status, _, response = server.request("GET", path, headers=world.headers)
            assert status == 404 or response["status"] not in ("in_progress", "queued"), response
            status, _, events = server.request("GET", f"{path}?stream=true", headers=world.headers)
            if status == 200:
                kinds = [line[7:] for line in events.splitlines() if line.startswith("event: ")]
                assert len([kind for kind in kinds if kind in ENDS]) == 1, kinds


def _num_sockets(server: Server, key: dict[str, str]) -> int:
    return counted(server, "chatcache_ws_connections", key)


def test_random_clients_of_two_tenants_find_no_fault(small_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    _check(small_server, caplog, seed=1, num_clients=16, num_rounds=6)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 10))
def test_random_clients_of_two_tenants_find_no_fault_for_long(
    small_server: Server, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    _check(small_server, caplog, seed=seed, num_clients=40, num_rounds=25)
