"""`make loadtest` through two gateways and three workers finds what one engine with all the pages finds."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from loadtest.__main__ import main
from tests.cli.servers import GatewayOnly, Server, Worker
from tests.support.redis_servers import redis_server
from tests.support.round_robin import RoundRobin

NUM_WORKERS = 3
KV_MIB = 64  # of each worker
MIN_SHARE = 0.97  # of what one engine finds; short chats find less, as each worker computes the system prompt
MIN_SHORT_SHARE = 0.93
DEMO_MODEL = ""
AS_INSTALLED = ("--dtype", "auto", "--attention-backend", "auto")  # other tests use a slower backend

_WITHOUT_PLACES = """
import sys
from chatcache.cluster.redis_placement import RedisPlacementIndex
from chatcache.cli.main import main

RedisPlacementIndex.record = lambda *_: None
sys.exit(main())
"""


class GatewayWithoutPlaces(GatewayOnly):
    """Injected bug: the gateway records nothing of what the workers have cached."""

    def command(self, folder: str, *more: str) -> list[str]:
        return [sys.executable, "-c", _WITHOUT_PLACES, *super().command(folder, *more)[3:]]


@contextlib.contextmanager
def cluster(kind: type[GatewayOnly], cwd: Path) -> Iterator[str]:
    """Yield the URL of two gateways behind a proxy."""
    with redis_server(cwd / "redis") as redis, contextlib.ExitStack() as stack:
        bus = ("--bus", redis.url)
        workers = [
            Worker(DEMO_MODEL, cwd, *bus, *AS_INSTALLED, "--worker-name", f"w{number}", "--kv-memory", f"{KV_MIB}MiB")
            for number in range(NUM_WORKERS)
        ]
        gateways = [kind(DEMO_MODEL, cwd, *bus, "--redis", redis.url) for _ in range(2)]
        for process in (*workers, *gateways):
            stack.callback(process.stop)
        ports = [httpx.URL(gateway.ready()).port or 0 for gateway in gateways]
        for gateway in gateways:
            for number in range(NUM_WORKERS):
                gateway.saw(rf"worker w{number}\.\w+ is connected")
        proxy = RoundRobin(ports)
        stack.callback(proxy.close)
        yield f"http://127.0.0.1:{proxy.port}"
        assert min(proxy.counts.values()) > 0


def cached_share(url: str, folder: Path, users: int, turns: int) -> float:
    """Return the share of the prompt tokens of `make loadtest` that was cached."""
    arguments = ["--users", str(users), "--turns", str(turns), "--max-tokens", "24", "--seed", "1"]
    assert main(["--url", url, *arguments, "--out", str(folder)]) == 0
    (written,) = folder.glob("*.json")
    summary = json.loads(written.read_text())["summary"]
    assert summary["turns"] == users * turns
    return float(summary["cached_share"])


@pytest.fixture(scope="module")
def share_of_one(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], float]:
    """Return the share of one engine with the pages of all workers."""

    @functools.cache
    def share(users: int, turns: int) -> float:
        cwd = tmp_path_factory.mktemp("one")
        options = ("--db", str(cwd / "chat.db"), "--kv-memory", f"{NUM_WORKERS * KV_MIB}MiB")
        server = Server(DEMO_MODEL, cwd, *AS_INSTALLED, *options)
        try:
            return cached_share(server.ready(), cwd / "load", users, turns)
        finally:
            server.stop()

    return share


@pytest.mark.slow
@pytest.mark.parametrize(
    ("users", "turns", "min_share"),
    [(8, 12, MIN_SHORT_SHARE), pytest.param(16, 20, MIN_SHARE, marks=pytest.mark.long)],
)
def test_workers_behind_two_gateways_find_the_pages_that_one_engine_finds(
    users: int, turns: int, min_share: float, share_of_one: Callable[[int, int], float], tmp_path: Path
) -> None:
    expected = share_of_one(users, turns)
    with cluster(GatewayOnly, tmp_path) as url:
        found = cached_share(url, tmp_path / "three", users, turns)
    print(f"cached share: one engine {expected:.4f}, three workers {found:.4f}, {found / expected:.3f} of it")
    assert found >= min_share * expected


@pytest.mark.slow
def test_gateways_that_record_no_places_find_less(share_of_one: Callable[[int, int], float], tmp_path: Path) -> None:
    with cluster(GatewayWithoutPlaces, tmp_path) as url:
        found = cached_share(url, tmp_path / "three", 8, 12)
    print(f"cached share without places {found:.4f}")
    assert found < MIN_SHORT_SHARE * share_of_one(8, 12)
