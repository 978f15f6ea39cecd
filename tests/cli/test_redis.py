"""`chatcache serve --redis` as a process: refused login and late start of the Redis server."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from tests.cli.servers import serving, until_status
from tests.support.redis_servers import RedisServer, redis_server

pytestmark = pytest.mark.slow


def test_server_exits_with_78_if_redis_rejects_the_login(folder: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as redis:
        with serving(folder, tmp_path, "--redis", redis.url.replace("secret", "wrong")) as server:
            assert server.wait() == 78
        assert "--redis the Redis server rejects the login" in server.output and "wrong" not in server.output


def test_server_is_not_ready_until_redis_answers(folder: Path, tmp_path: Path) -> None:
    """The server starts before Redis does, as after a power cut."""
    redis = RedisServer(tmp_path)
    try:
        with serving(folder, tmp_path, "--redis", redis.url) as server:
            server.saw("Waiting for the Redis server of --redis")
            reply = httpx.get(f"{server.url}/readyz", timeout=60)
            assert (reply.status_code, reply.json()["status"]) == (503, "unavailable"), reply.text
            assert not re.search(r"ready +http", server.output)
            redis.start()
            server.ready()
            until_status(f"{server.url}/readyz", 200)
            server.signal()
            assert server.wait() == 0
    finally:
        redis.close()
