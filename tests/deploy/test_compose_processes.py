"""Test the processes of `docker compose --profile cpu up`: commands, environments, health checks, restarts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from chatcache.transfer.archive import check_archive
from tests.deploy.compose_processes import LocalServices, resolved
from tests.support.redis_servers import redis_binary

pytestmark = pytest.mark.slow

# No kernel is compiled, few pages are allocated, one thread computes; an existing numba cache is used.
GENTLE = {
    "CHATCACHE_ATTENTION_BACKEND": "reference",
    "CHATCACHE_DTYPE": "float32",
    "CHATCACHE_KV_MEMORY": "64MiB",
    "OMP_NUM_THREADS": "1",
    "NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR", str(Path.home() / ".cache" / "numba")),
}
SERVER = "chatcache-cpu"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return resolved("cpu")


@pytest.fixture
def services_running(tmp_path: Path, services: dict[str, Any]) -> Iterator[LocalServices]:
    redis_binary()
    with LocalServices(tmp_path, services, GENTLE) as services_running:
        yield services_running


def test_services_work_together_and_survive_a_kill(services_running: LocalServices, tmp_path: Path) -> None:
    assert "generated" in services_running.run("redis-acl")
    password = (tmp_path / "secret" / "password").read_text()
    assert password not in services_running.log("redis-acl")
    services_running.start("redis")
    services_running.wait_healthy("redis")
    assert not services_running.is_healthy(SERVER)  # negative control: not started yet
    services_running.start(SERVER)
    services_running.wait_healthy(SERVER)
    url = f"http://127.0.0.1:{services_running.port}/v1"
    with httpx.Client(timeout=120) as client:
        turn = client.post(
            f"{url}/responses", json={"input": "Hello!", "max_output_tokens": 8, "temperature": 0}
        ).json()
    assert turn["status"] in ("completed", "incomplete"), turn
    items = f"{url}/conversations/{turn['conversation']['id']}/items"
    said = httpx.get(items, timeout=60).json()["data"]
    assert len(said) == 2

    services_running.kill(SERVER)
    services_running.kill("redis")
    services_running.start("redis")
    services_running.wait_healthy("redis")
    services_running.start(SERVER)
    services_running.wait_healthy(SERVER)
    assert httpx.get(items, timeout=60).json()["data"] == said
    more = {"input": "And?", "previous_response_id": turn["id"], "max_output_tokens": 4}
    assert httpx.post(f"{url}/responses", json=more, timeout=120).status_code == 200

    # As in the README: export everything, then create a key, which closes the running server to other clients.
    assert "1 conversations, 4 messages" in services_running.exec(SERVER, "db", "export", "/data/monday.jsonl")
    assert check_archive(tmp_path / "data" / "monday.jsonl").num_items == 4
    key = services_running.exec(SERVER, "keys", "create", "--tenant", "acme").split()[-1]
    services_running.wait(lambda: httpx.get(f"{url}/models", timeout=60).status_code == 401, SERVER)
    models = httpx.get(f"{url}/models", headers={"authorization": f"Bearer {key}"}, timeout=60)
    assert models.status_code == 200 and key not in services_running.log(SERVER)

    assert services_running.stop(SERVER) == 0, services_running.log(SERVER)
    assert password not in services_running.log(SERVER) + services_running.log("redis")
    assert services_running.names("home") == services_running.names("cwd") == set()  # a read-only root is possible
    assert not (tmp_path / "data" / "chatcache.db").exists()


def test_shipped_redis_user_has_the_needed_permissions_only(services_running: LocalServices, tmp_path: Path) -> None:
    services_running.run("redis-acl")
    assert "kept" in services_running.run("redis-acl")  # the second start changes nothing
    services_running.start("redis")
    services_running.wait_healthy("redis")
    password = (tmp_path / "secret" / "password").read_text()
    client = redis.Redis(port=services_running.redis_port, username="chatcache", password=password, protocol=2)
    client.set("chatcache:x", "1")
    forbidden: list[tuple[str | int, ...]] = [
        ("EVAL", "return 1", 0),
        ("SCRIPT", "LOAD", "return 1"),
        ("FUNCTION", "LIST"),
        ("CONFIG", "GET", "*"),
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("KEYS", "*"),
        ("SHUTDOWN",),
        ("ACL", "LIST"),
        ("DEBUG", "SLEEP", 0),
        ("MONITOR",),
        ("REPLICAOF", "NO", "ONE"),
        ("MODULE", "LIST"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("GET", "other"),
        ("SET", "other", "1"),
        ("RENAME", "chatcache:x", "other"),
        ("COPY", "chatcache:x", "other"),
        ("SUBSCRIBE", "other"),
    ]
    for command in forbidden:
        with pytest.raises(redis.ResponseError, match=r"no permissions|not allowed"):
            client.execute_command(*command)
    assert client.get("chatcache:x") == b"1"
    client.close()
    for name, secret in ((None, None), ("default", ""), ("chatcache", "wrong")):
        stranger = redis.Redis(port=services_running.redis_port, username=name, password=secret, protocol=2)
        with pytest.raises((redis.AuthenticationError, redis.ResponseError)):
            stranger.ping()
        stranger.close()
