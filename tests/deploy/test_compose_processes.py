"""Test the processes of `docker compose --profile cpu up`: commands, environments, health checks, restarts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from openai import OpenAI
from websockets.sync.client import connect

from chatcache.cli.server import uvicorn_config
from chatcache.config import ServerConfig
from chatcache.transfer.archive import check_archive
from tests.deploy.compose_processes import LocalServices, resolved
from tests.gateway.serving import Server
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
    url = f"http://127.0.0.1:{services_running.ports[SERVER]}/v1"
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
    client = redis.Redis(port=services_running.ports["redis"], username="chatcache", password=password, protocol=2)
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
        stranger = redis.Redis(port=services_running.ports["redis"], username=name, password=secret, protocol=2)
        with pytest.raises((redis.AuthenticationError, redis.ResponseError)):
            stranger.ping()
        stranger.close()


@pytest.fixture
def scaled_running(tmp_path: Path) -> Iterator[LocalServices]:
    redis_binary()
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx: apt-get install nginx-light")
    with LocalServices(tmp_path, resolved("scale"), GENTLE) as services:
        yield services


REDISES = ("redis-1", "redis-2", "redis-3")
SENTINELS = ("sentinel-1", "sentinel-2", "sentinel-3")


def test_scaled_services_answer_through_the_proxy_and_survive_a_killed_gateway_and_a_killed_primary(
    scaled_running: LocalServices, tmp_path: Path
) -> None:
    services = scaled_running
    services.run("redis-acl")
    for names in (REDISES, SENTINELS, ("worker", "gateway-1", "gateway-2")):
        for name in names:
            services.start(name)
        for name in names:
            services.wait_healthy(name)
    services.start("proxy")
    address = f"127.0.0.1:{services.ports['proxy']}"
    services.wait(lambda: _status(f"http://{address}/readyz") == 200, "proxy")

    with OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        turns = [client.responses.create(model="chatcache-builtin", input="My name is Ada.", temperature=0)]
        for _ in range(5):  # whichever gateway each of them reaches
            turns.append(
                client.responses.create(
                    model="chatcache-builtin",
                    input="What is my name?",
                    temperature=0,
                    previous_response_id=turns[-1].id,
                )
            )
        assert all("Ada" in turn.output_text for turn in turns[1:])
        usage = turns[-1].usage
        assert usage is not None and usage.input_tokens_details.cached_tokens > 0

        arguments = {"extra_body": {"ignore_eos": True}, "max_output_tokens": 1000}
        with client.responses.create(model="chatcache-builtin", input="Hi", stream=True, **arguments) as events:  # type: ignore[call-overload]
            running = next(event.response.id for event in events if event.type == "response.created")
            next(event for event in events if event.type == "response.output_text.delta")
            assert client.responses.cancel(running).status == "cancelled"  # a proxy that buffers has no text so early

    with connect(f"ws://{address}/v1/responses", subprotocols=["chatcache.v1"]) as socket:  # type: ignore[list-item]
        assert json.loads(socket.recv(timeout=60))["type"] == "session.created"
        socket.send(json.dumps({"type": "response.create", "input": "Hello", "max_output_tokens": 8}))
        while json.loads(socket.recv(timeout=60))["type"] not in ("response.completed", "response.incomplete"):
            pass

    services.kill("gateway-1")
    for _ in range(6):
        assert _status(f"http://{address}/v1/models") == 200

    with redis.Redis(port=services.ports["sentinel-1"], protocol=2) as sentinel:
        services.wait(lambda: sentinel.sentinel_master("store")["num-slaves"] == 2, "sentinel-1")
        services.kill("redis-1")
        new = {services.ports[name] for name in REDISES[1:]}
        services.wait(lambda: sentinel.sentinel_get_master_addr_by_name("store")[1] in new, "sentinel-1")
    say = {"input": "What is my name?", "previous_response_id": turns[-1].id, "max_output_tokens": 8}
    services.wait(lambda: _answer(f"http://{address}/v1/responses", say).get("status") == "completed", "gateway-2")
    password = (tmp_path / "secret" / "password").read_text()
    with redis.Redis(port=services.ports["redis-1"], username="sentinel", password=password, protocol=2) as old:
        services.start("redis-1")
        services.wait_healthy("redis-1")
        services.wait(lambda: old.execute_command("ROLE")[0] == b"slave", "redis-1")
    assert not any(password in services.log(name) for name in (*REDISES, *SENTINELS, "gateway-2"))
    assert services.stop("proxy") == 0 and services.stop("worker") == 0
    assert services.names("home") == services.names("cwd") == set()


def test_proxy_keeps_the_scheme_of_a_proxy_in_front_of_it(scaled_running: LocalServices) -> None:
    """A session cookie is Secure exactly if the client's own connection has TLS."""
    services, key = scaled_running, "sk-proxied-12345678"
    config = ServerConfig(db=":memory:", api_keys=(key,), allowed_hosts=("chat.example.org",))
    with Server(config, settings=uvicorn_config) as gateway:
        gateway.wait_ready()
        services.ports["gateway-1"] = gateway.port
        services.start("proxy")
        address = f"http://127.0.0.1:{services.ports['proxy']}"
        services.wait(lambda: _status(f"{address}/readyz") == 200, "proxy")
        known = {"authorization": f"Bearer {key}", "host": "chat.example.org"}
        for given, is_secure in (({}, False), ({"x-forwarded-proto": "https"}, True)):
            answer = httpx.post(f"{address}/v1/session", headers={**known, **given}, timeout=60)
            assert answer.status_code == 200
            assert answer.headers["set-cookie"].endswith("; Secure") is is_secure
        assert services.stop("proxy") == 0


def _answer(url: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = httpx.post(url, json=body, timeout=60).json()
    except httpx.TransportError:
        return {}
    return found


def _status(url: str) -> int:
    try:
        return httpx.get(url, timeout=60).status_code
    except httpx.TransportError:
        return 0
