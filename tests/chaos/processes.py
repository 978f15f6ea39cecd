"""Processes of a run: gateways and workers with their engine processes, and the store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from tests.chaos.http_client import Lost, ask
from tests.chaos.plan import StoreKind
from tests.chaos.proxy import Proxy
from tests.chaos.server_process import CLOCK
from tests.chaos.tagged_model import STEP_S
from tests.support.ports import free_port
from tests.support.redis_servers import RedisServer, SentinelGroup

START_TIMEOUT_S = 120.0
LOG_LINES = 40
PROGRAM: tuple[str, ...] = ("-m", "tests.chaos.server_process")


class Server:
    """A gateway or a worker, across restarts. `name`: of its log file. `arguments`: of `server_process`."""

    def __init__(self, number: int, name: str, arguments: Sequence[str], folder: Path, *, step_s: float) -> None:
        self.number = number
        self.name = name
        self.clock = folder / f"clock-{name}"
        self.set_clock(0)
        self.lock = asyncio.Lock()  # one fault at a time
        self.is_meant_to_run = False
        self.engines: set[int] = set()
        self._arguments = arguments
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._environment |= {CLOCK: str(self.clock), STEP_S: str(step_s), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        self.process: subprocess.Popen[bytes] | None = None
        self._log = folder / f"{name}.log"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def set_clock(self, off_s: int) -> None:
        """Shift the wall clock of the process."""
        self.clock.write_text(f"{off_s:+d}")

    def start(self) -> None:
        command = [sys.executable, *PROGRAM, *self._arguments]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        self.is_meant_to_run = True

    def engine(self) -> int | None:
        """Process id of the engine process, or None."""
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                if b"chatcache.engine_process.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    self.engines.add(int(child))
                    return int(child)
        return None

    async def is_ready(self) -> bool:
        raise NotImplementedError

    async def wait_ready(self) -> None:
        """Wait until the process is ready. Raises: TimeoutError."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not await self.is_ready():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.name} is not ready:\n{self.last_output()}")
            await asyncio.sleep(0.05)
        self.engine()

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.engine()
        self.is_meant_to_run = False
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def end(self, grace_s: float) -> int | None:
        """Send SIGTERM and return the exit status; kill the process after `grace_s` and return None."""
        self.engine()
        self.is_meant_to_run = False
        assert self.process is not None
        self.signal(signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                return self.process.returncode
            await asyncio.sleep(0.02)
        self.kill()
        return None

    def last_output(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(lines[-LOG_LINES:])


class Gateway(Server):
    """One gateway on a fixed port. `bus`: the URL of the bus of its workers; "" for an own engine process."""

    def __init__(self, number: int, store: str, bus: str, folder: Path, *, step_s: float) -> None:
        self.port = free_port()
        self.num_fds = 0  # open files of this process when it became ready
        self._counted = 0
        arguments = ["gateway", store, str(self.port), *([bus] if bus else [])]
        super().__init__(number, f"gateway-{number}", arguments, folder, step_s=step_s)

    async def is_ready(self) -> bool:
        try:
            return (await ask(self.port, "GET", "/readyz")).status == 200
        except Lost:
            return False

    async def wait_ready(self) -> None:
        await super().wait_ready()
        if self._counted != self.pid:
            self._counted, self.num_fds = self.pid, len(os.listdir(f"/proc/{self.pid}/fd"))


class Worker(Server):
    """One worker on the bus."""

    def __init__(self, number: int, bus: str, folder: Path, *, step_s: float) -> None:
        self._ready_file = folder / f"ready-{number}"
        arguments = ["worker", f"w{number}", bus, str(self._ready_file)]
        super().__init__(number, f"worker-{number}", arguments, folder, step_s=step_s)

    def start(self) -> None:
        self._ready_file.unlink(missing_ok=True)
        super().start()

    async def is_ready(self) -> bool:
        return self._ready_file.exists()


class Rig:
    """All processes of a run. The Redis server is reached through a proxy, one with Sentinels directly."""

    def __init__(self, folder: Path, num_gateways: int, num_workers: int, store: StoreKind, *, step_s: float) -> None:
        self.redis: RedisServer | None = None
        self.group: SentinelGroup | None = None
        self.proxy: Proxy | None = None
        self.db = folder / "chat.db"
        self.redis_lock = asyncio.Lock()
        self._folder, self._num_gateways, self._num_workers, self._step_s = folder, num_gateways, num_workers, step_s
        self._store = store
        self.gateways: list[Gateway] = []
        self.workers: list[Worker] = []

    async def start(self) -> None:
        store = bus = str(self.db)
        if self._store == "sentinel":
            self.group = await asyncio.to_thread(SentinelGroup(self._folder / "redis").start)
            store, bus = f"{self.group.url}?wait_replicas=1", self.group.url
        elif self._store == "redis":
            folder = self._folder / "redis"
            folder.mkdir()
            self.redis = RedisServer(folder, "--logfile", str(folder / "redis.log"), appendfsync="always")
            await asyncio.to_thread(self.redis.start)
            self.proxy = await Proxy(self.redis.port).start()
            store = bus = with_port(self.redis.url, self.proxy.port)
        for number in range(self._num_workers):
            self.workers.append(Worker(number, bus, self._folder, step_s=self._step_s))
        for number in range(self._num_gateways):
            self.gateways.append(Gateway(number, store, bus if self.workers else "", self._folder, step_s=self._step_s))
        for server in self.servers:
            server.start()

    @property
    def servers(self) -> list[Server]:
        return [*self.workers, *self.gateways]

    async def close(self) -> None:
        for server in self.servers:
            if server.process is not None and server.process.poll() is None:
                server.kill()
        if self.proxy is not None:
            await self.proxy.close()
        for redis in (self.redis, self.group):
            if redis is not None:
                redis.close()

    def is_any_engine_left(self) -> bool:
        """Return whether an engine process outlived its gateway or worker."""
        return any(is_alive(engine) for server in self.servers for engine in server.engines)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and b"chatcache.engine_process.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def with_port(url: str, port: int) -> str:
    """Return the URL with another port."""
    parts = urlsplit(url)
    address = f"{parts.username}:{parts.password}@127.0.0.1:{port}"
    return urlunsplit((parts.scheme, address, parts.path, parts.query, parts.fragment))
