"""Test that cancelled Redis calls never leave their reply to another caller (goal G13), with 4 ms network delay."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import venv
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio.connection

from chatcache.conversations.store import StoreUnavailableError
from chatcache.conversations.tree import Conversation
from chatcache.storage import redis_client
from chatcache.storage.redis import RedisStore
from chatcache.storage.redis_client import RedisConnection
from tests.chaos import cancelled_reads
from tests.chaos.processes import with_port
from tests.chaos.proxy import proxied
from tests.support.redis_servers import RedisServer, redis_server

pytestmark = pytest.mark.slow

DELAY_S = 0.004
LEAKY = "4.5.3"  # the version with CVE-2023-28858
SEED = int(os.environ.get("CHATCACHE_TEST_SEED", "7"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@dataclass(slots=True)
class Found:
    num_cancelled: int = 0
    num_right: int = 0
    num_wrong: int = 0


async def read_and_leave(server: RedisServer, num_to_cancel: int) -> Found:
    """Read conversations and cancel half of the readers at random; return what the others received."""
    server.admin.flushall()
    draw, found = random.Random(SEED), Found()
    async with proxied(server.port) as proxy:
        store = RedisStore(with_port(server.url, proxy.port))
        names = [f"conv_{number}" for number in range(20)]
        for name in names:
            await store.create(Conversation(name, "me", 1.0, 1.0, title=name))
        proxy.delay_s = DELAY_S

        async def read(name: str) -> None:
            try:
                is_right = (await store.get("me", name)).title == name
            except StoreUnavailableError:  # a busy machine may exceed the timeout of the connection
                await asyncio.sleep(0.05)
            except Exception:  # a reply of another command
                found.num_wrong += 1
            else:
                found.num_right += is_right
                found.num_wrong += not is_right

        while found.num_cancelled < num_to_cancel:
            tasks = [asyncio.create_task(read(draw.choice(names))) for _ in range(40)]
            await asyncio.sleep(draw.uniform(0, 0.02))
            for task in draw.sample(tasks, 20):
                found.num_cancelled += task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        proxy.delay_s = 0.0
        await store.close()
    return found


async def test_cancelled_calls_leave_no_reply_for_other_callers(server: RedisServer) -> None:
    found = await read_and_leave(server, 300)
    assert found.num_wrong == 0 and found.num_right > 0


@pytest.mark.long
async def test_ten_thousand_cancelled_calls_leave_no_reply_for_other_callers(server: RedisServer) -> None:
    found = await read_and_leave(server, 10_000)
    print(found)
    assert found.num_wrong == 0 and found.num_right > 0


async def test_injected_bug_connection_reused_after_cancel_is_found(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Injected bug: commands run in the caller's task, on connections that stay open when it is cancelled."""

    async def run(self: Any, work: Callable[[Any], Awaitable[Any]], *, order: str = "", is_slow: bool = False) -> Any:
        return await self._run_checked(work, is_slow)

    original = redis.asyncio.connection.AbstractConnection.read_response

    async def read_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await original(self, *args, **{**kwargs, "disconnect_on_error": False})

    monkeypatch.setattr(RedisConnection, "run", run)
    monkeypatch.setattr(redis_client, "_NUM_CONNECTIONS", 2)
    monkeypatch.setattr(redis.asyncio.connection.AbstractConnection, "read_response", read_response)
    found = await read_and_leave(server, 300)
    print(found)
    assert found.num_wrong > 0


async def cancelled_through(server: RedisServer, python: Path | str, num_to_cancel: int) -> dict[str, Any]:
    """Run the check with redis-py alone, in its own process."""
    async with proxied(server.port) as proxy:
        proxy.delay_s = DELAY_S
        url = with_port(server.url, proxy.port)
        command = [str(python), cancelled_reads.__file__, url, str(num_to_cancel), str(SEED)]
        done = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        output, _ = await done.communicate()
    assert done.returncode == 0
    found: dict[str, Any] = json.loads(output)
    return found


def environment_of_old(folder: Path) -> Path:
    """Return the interpreter of an environment with the old redis-py."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", f"redis=={LEAKY}"]
    if subprocess.run(install, check=False).returncode:
        pytest.skip(f"needs redis-py {LEAKY}, which could not be installed")
    return python


@pytest.mark.long
async def test_redis_py_with_the_bug_fails_and_the_installed_one_passes(server: RedisServer, tmp_path: Path) -> None:
    """Negative control: the check finds the bug of redis-py 4.5.3 and passes with the installed version."""
    old = environment_of_old(tmp_path / "old")
    leaky = await cancelled_through(server, old, 10_000)
    ours = await cancelled_through(server, sys.executable, 10_000)
    print(leaky, ours)
    assert leaky["version"] == LEAKY and leaky["wrong"] > 0
    assert ours["version"] != LEAKY and ours["wrong"] == 0
