"""G13: callers that go away while they wait for Redis, behind 4 ms of network: nobody reads somebody else's answer."""

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
LEAKY = "4.5.3"  # the version that CVE-2023-28858 is about
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
    """Readers of conversations, half of whom leave at any moment; what the others read."""
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
            except StoreUnavailableError:  # a busy machine may take longer than the link waits
                await asyncio.sleep(0.05)
            except Exception:  # what belongs to another command altogether
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


async def test_whoever_leaves_takes_nothing_of_others_along(server: RedisServer) -> None:
    found = await read_and_leave(server, 300)
    assert found.num_wrong == 0 and found.num_right > 0


@pytest.mark.long
async def test_the_same_of_ten_thousand(server: RedisServer) -> None:
    found = await read_and_leave(server, 10_000)
    print(found)
    assert found.num_wrong == 0 and found.num_right > 0


async def test_a_link_that_leaves_replies_behind_would_be_seen(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: work on the caller's own task, over connections that stay open when it is cancelled."""

    async def run(
        self: Any, work: Callable[[Any], Awaitable[Any]], *, order: str = "", is_patient: bool = False
    ) -> Any:
        return await self._guarded(work, is_patient)

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
    """The bare check, in a process of its own."""
    async with proxied(server.port) as proxy:
        proxy.delay_s = DELAY_S
        url = with_port(server.url, proxy.port)
        command = [str(python), cancelled_reads.__file__, url, str(num_to_cancel), str(SEED)]
        done = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        said, _ = await done.communicate()
    assert done.returncode == 0
    found: dict[str, Any] = json.loads(said)
    return found


def environment_of_old(folder: Path) -> Path:
    """The interpreter of an environment that has the library as it was."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", f"redis=={LEAKY}"]
    if subprocess.run(install, check=False).returncode:
        pytest.skip(f"needs redis-py {LEAKY}, which could not be installed")
    return python


@pytest.mark.long
async def test_the_library_that_had_the_bug_has_it_here(server: RedisServer, tmp_path: Path) -> None:
    """The check has the power to see it: redis-py 4.5.3 fails, the one we have does not."""
    old = environment_of_old(tmp_path / "old")
    leaky = await cancelled_through(server, old, 10_000)
    ours = await cancelled_through(server, sys.executable, 10_000)
    print(leaky, ours)
    assert leaky["version"] == LEAKY and leaky["wrong"] > 0
    assert ours["version"] != LEAKY and ours["wrong"] == 0
