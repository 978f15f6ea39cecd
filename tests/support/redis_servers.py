"""Real redis-server processes that tests start, kill, suspend and restart over the same files.

`CHATCACHE_TEST_REDIS=valkey-server` tests another server program, by name or path.
"""

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
from chatcache.conversations.tree import Conversation
from chatcache.errors import NotFoundError
from chatcache.storage.redis import RedisStore
from tests.support.ports import free_port


def redis_binary() -> str:
    program = os.environ.get("CHATCACHE_TEST_REDIS", "redis-server")
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"needs {program}: apt-get install redis-server")
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
            *("--aclfile", str(folder / "users.acl")),
        ]
        # The shipped user, and an administrator for the tests.
        (folder / "users.acl").write_text(f"{acl_file('secret')}user admin on nopass ~* &* +@all\n")
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://chatcache:secret@127.0.0.1:{self.port}/0"
        self.admin = redis.Redis(port=self.port, username="admin", password="any", protocol=2)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> RedisServer:
        self._process = subprocess.Popen([*self._command, *self._settings], cwd=self._folder)
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

    def start_as_primary(self) -> RedisServer:
        """Start a server that was promoted, as its rewritten configuration would."""
        self._settings = tuple(
            word
            for at, word in enumerate(self._settings)
            if "--replicaof" not in self._settings[max(at - 1, 0) : at + 1]
        )
        return self.start()

    @contextlib.contextmanager
    def cut_off(self) -> Iterator[None]:
        """Reject replicas and Sentinels, which log in as the administrator, but no client."""
        self.admin.acl_setuser("admin", enabled=False)  # this connection stays logged in
        self.admin.execute_command("CLIENT", "KILL", "USER", "admin", "SKIPME", "yes")
        try:
            yield
        finally:
            self.admin.acl_setuser("admin", enabled=True)

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
    folder.mkdir(parents=True, exist_ok=True)
    server = RedisServer(folder, *settings, appendfsync=appendfsync)
    try:
        yield server.start()
    finally:
        server.close()


class SentinelGroup:
    """A primary with two replicas, and three Sentinels that name another primary 1.5 s after its death."""

    SERVICE = "store"

    def __init__(self, folder: Path, *settings: str) -> None:
        settings = ("--masteruser", "admin", "--masterauth", "any", *settings)
        self.servers = [RedisServer(_made(folder / "0"), *settings)]
        source = ("--replicaof", f"127.0.0.1 {self.servers[0].port}")
        self.servers += [RedisServer(_made(folder / str(number)), *source, *settings) for number in (1, 2)]
        self._ports = [free_port() for _ in range(3)]
        self._folder = folder
        self._sentinels: list[subprocess.Popen[bytes]] = []
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        self.url = f"redis+sentinel://chatcache:secret@{hosts}/{self.SERVICE}/0"

    def start(self) -> SentinelGroup:
        for server in self.servers:
            server.start()
        for port in self._ports:
            config = self._folder / f"sentinel-{port}.conf"
            config.write_text(
                f"bind 127.0.0.1\nport {port}\ndir {self._folder}\n"
                f"sentinel monitor {self.SERVICE} 127.0.0.1 {self.servers[0].port} 2\n"
                f"sentinel auth-user {self.SERVICE} admin\nsentinel auth-pass {self.SERVICE} any\n"
                f"sentinel down-after-milliseconds {self.SERVICE} 1500\n"
                f"sentinel failover-timeout {self.SERVICE} 10000\n"
            )
            command = [redis_binary(), str(config), "--sentinel", "--loglevel", "warning"]
            self._sentinels.append(subprocess.Popen(command, cwd=self._folder, stdout=subprocess.DEVNULL))
        deadline_s = time.monotonic() + 60
        while not self._is_ready():
            assert time.monotonic() < deadline_s, "the Sentinels do not know each other and the replicas"
            time.sleep(0.05)
        return self

    def primary(self) -> RedisServer:
        """Return the server that the Sentinels name as the primary."""
        with redis.Redis(port=self._ports[0], protocol=2) as sentinel:
            _, port = sentinel.sentinel_get_master_addr_by_name(self.SERVICE)
        return next(server for server in self.servers if server.port == port)

    def _is_ready(self) -> bool:
        for port in self._ports:
            try:
                with redis.Redis(port=port, protocol=2) as sentinel:
                    state = sentinel.sentinel_master(self.SERVICE)
            except redis.RedisError:
                return False
            if state["num-other-sentinels"] < 2 or state["num-slaves"] < 2:
                return False
        return self.is_in_sync()

    def is_in_sync(self) -> bool:
        """Return whether the other two servers follow the primary, so that a failover to either loses nothing."""
        return str(self.primary().admin.info("replication")).count("'online'") == 2

    def close(self) -> None:
        for process in self._sentinels:
            process.kill()
            process.wait()
        for server in self.servers:
            server.close()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


@contextlib.contextmanager
def sentinel_group(folder: Path, *settings: str) -> Iterator[SentinelGroup]:
    group = SentinelGroup(folder, *settings)
    try:
        yield group.start()
    finally:
        group.close()


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        await asyncio.sleep(0.02)


async def create(store: RedisStore, head: Conversation) -> None:
    """Create a conversation, although a busy machine may answer too late at first."""

    async def is_created() -> bool:
        with contextlib.suppress(StoreUnavailableError):
            try:
                await store.get(head.owner, head.id)
            except NotFoundError:
                await store.create(head)
            return True
        return False

    await until(is_created, "a new conversation")


async def answers(store: RedisStore) -> bool:
    try:
        await store.check()
    except StoreUnavailableError:
        return False
    return True
