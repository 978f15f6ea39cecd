"""Real redis-server processes that tests start, kill, suspend and restart over the same files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import redis

from chatcache.cli.redis_acl import acl_file
from chatcache.conversations.store import StoreUnavailableError
from chatcache.storage.redis import RedisStore
from tests.support.ports import free_port


def redis_binary() -> str:
    path = shutil.which("redis-server")
    if path is None:
        pytest.skip("needs a Redis: apt-get install redis-server")
    return path


class RedisServer:
    """One server over one folder. `url` is of a user without scripts and administrative commands."""

    def __init__(self, folder: Path, *settings: str, appendfsync: str = "everysec") -> None:
        self._folder = folder
        self.port = free_port()
        self._command = [
            redis_binary(),
            *("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(folder), "--save", ""),
            *("--appendonly", "yes", "--appendfsync", appendfsync, "--loglevel", "warning"),
            *("--aclfile", str(folder / "users.acl"), *settings),
        ]
        # The shipped user, and an administrator for the tests.
        (folder / "users.acl").write_text(f"{acl_file('secret')}user admin on nopass ~* &* +@all\n")
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://chatcache:secret@127.0.0.1:{self.port}/0"
        self.admin = redis.Redis(port=self.port, username="admin", password="any", protocol=2)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> RedisServer:
        self._process = subprocess.Popen(self._command, cwd=self._folder)
        deadline_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(redis.RedisError):
                self.admin.ping()
                return self
            assert time.monotonic() < deadline_s and self._process.poll() is None, "redis-server did not start"
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the server without a shutdown."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        self.admin.close()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        self.admin.close()
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            self._process.wait()


@contextlib.contextmanager
def redis_server(folder: Path, *settings: str, appendfsync: str = "everysec") -> Iterator[RedisServer]:
    folder.mkdir(exist_ok=True)
    server = RedisServer(folder, *settings, appendfsync=appendfsync)
    try:
        yield server.start()
    finally:
        server.close()


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        await asyncio.sleep(0.02)


async def answers(store: RedisStore) -> bool:
    try:
        await store.check()
    except StoreUnavailableError:
        return False
    return True
