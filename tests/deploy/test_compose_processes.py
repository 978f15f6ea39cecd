"""The processes that `docker compose --profile cpu up` would start, with their commands, environments and checks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from chatcache.transfer.archive import check_archive
from tests.deploy.compose_processes import ByHand, resolved
from tests.support.redis_servers import redis_binary

pytestmark = pytest.mark.slow

# No kernel is compiled, few pages are made, one thread computes; a numba cache of the machine's own is used.
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
def hands(tmp_path: Path, services: dict[str, Any]) -> Iterator[ByHand]:
    redis_binary()
    with ByHand(tmp_path, services, GENTLE) as hands:
        yield hands


def test_what_compose_starts_works_together_and_outlives_a_kill(hands: ByHand, tmp_path: Path) -> None:
    assert "made" in hands.run("redis-acl")
    password = (tmp_path / "secret" / "password").read_text()
    assert password not in hands.log("redis-acl")
    hands.start("redis")
    hands.wait_healthy("redis")
    assert not hands.is_healthy(SERVER)  # planted: nobody is there yet
    hands.start(SERVER)
    hands.wait_healthy(SERVER)
    url = f"http://127.0.0.1:{hands.port}/v1"
    with httpx.Client(timeout=120) as client:
        turn = client.post(
            f"{url}/responses", json={"input": "Hello!", "max_output_tokens": 8, "temperature": 0}
        ).json()
    assert turn["status"] in ("completed", "incomplete"), turn
    items = f"{url}/conversations/{turn['conversation']['id']}/items"
    said = httpx.get(items, timeout=60).json()["data"]
    assert len(said) == 2

    hands.kill(SERVER)
    hands.kill("redis")
    hands.start("redis")
    hands.wait_healthy("redis")
    hands.start(SERVER)
    hands.wait_healthy(SERVER)
    assert httpx.get(items, timeout=60).json()["data"] == said
    more = {"input": "And?", "previous_response_id": turn["id"], "max_output_tokens": 4}
    assert httpx.post(f"{url}/responses", json=more, timeout=120).status_code == 200

    # What the README says to do then: a copy of everything, and a key, which closes the running server.
    assert "1 conversations, 4 messages" in hands.exec(SERVER, "db", "export", "/data/monday.jsonl")
    assert check_archive(tmp_path / "data" / "monday.jsonl").num_items == 4
    key = hands.exec(SERVER, "keys", "create", "--tenant", "acme").split()[-1]
    hands.wait(lambda: httpx.get(f"{url}/models", timeout=60).status_code == 401, SERVER)
    models = httpx.get(f"{url}/models", headers={"authorization": f"Bearer {key}"}, timeout=60)
    assert models.status_code == 200 and key not in hands.log(SERVER)

    assert hands.stop(SERVER) == 0, hands.log(SERVER)
    assert password not in hands.log(SERVER) + hands.log("redis")
    assert hands.names("home") == hands.names("cwd") == set()  # a root that cannot be written would not hurt
    assert not (tmp_path / "data" / "chatcache.db").exists()


def test_the_shipped_user_may_do_what_we_do_and_nothing_else(hands: ByHand, tmp_path: Path) -> None:
    hands.run("redis-acl")
    assert "kept" in hands.run("redis-acl")  # the second start changes nothing
    hands.start("redis")
    hands.wait_healthy("redis")
    password = (tmp_path / "secret" / "password").read_text()
    client = redis.Redis(port=hands.redis_port, username="chatcache", password=password, protocol=2)
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
        stranger = redis.Redis(port=hands.redis_port, username=name, password=secret, protocol=2)
        with pytest.raises((redis.AuthenticationError, redis.ResponseError)):
            stranger.ping()
        stranger.close()
