"""`chatcache serve --redis` as a process: what ends it before it begins. The gateway's tests have what it does then."""

from __future__ import annotations

from pathlib import Path

from tests.cli.servers import serving
from tests.conversations.redis_servers import redis_server


def test_a_server_that_does_not_let_us_in_ends_with_78(folder: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as redis:
        with serving(folder, tmp_path, "--redis", redis.url.replace("secret", "wrong")) as server:
            assert server.wait() == 78
        assert "--redis the Redis server does not let us in" in server.output and "wrong" not in server.output
