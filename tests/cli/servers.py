"""Start `chatcache serve` as a process on a free loopback port."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

START_TIMEOUT_S = 180.0
OPTIONS = ("--port", "0", "--dtype", "float32", "--attention-backend", "reference", "--kv-memory", "4MiB")


def environment() -> dict[str, str]:
    """Return the environment of a child process: import path, one thread, plain output."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}


class Server:
    """Running server process; `output` is everything it has printed."""

    options: tuple[str, ...] = ("serve", *OPTIONS)

    def __init__(self, folder: Path | str, cwd: Path, *more: str) -> None:
        self.process = subprocess.Popen(
            self.command(str(folder), *more),
            cwd=cwd,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def command(self, folder: str, *more: str) -> list[str]:
        command, *options = self.options
        return [sys.executable, "-m", "chatcache", command, folder, *options, *more]

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.output += line

    def saw(self, pattern: str) -> re.Match[str]:
        """Wait until the output matches."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            match = re.search(pattern, self.output)
            if match:
                return match
            if self.process.poll() is not None:
                self._reader.join(60)
                match = re.search(pattern, self.output)
                if match:
                    return match
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in:\n{self.output}")

    @property
    def url(self) -> str:
        return self.saw(r"http://[\d.]+:\d+")[0]

    def ready(self) -> str:
        """Wait until the server is ready and return its URL."""
        self.saw(r"ready +http")
        return self.url

    def child(self) -> int:
        """Return the process id of the engine."""
        return child_of(self.process.pid)

    def signal(self, number: int = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        code = self.process.wait(120)
        self._reader.join(60)
        return code

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self._reader.join(60)
            self.process.stdout.close()


class Worker(Server):
    """Running worker process."""

    options = ("worker", *OPTIONS[2:])


class GatewayOnly(Server):
    """Running gateway process, which uses the engines of workers."""

    options = ("gateway", *OPTIONS[:2])


def child_of(process_id: int) -> int:
    """Return the process id of the first child."""
    return int(Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()[0])


@contextlib.contextmanager
def serving(folder: Path | str, cwd: Path, *more: str) -> Iterator[Server]:
    server = Server(folder, cwd, *more)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def detached(cwd: Path, pattern: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `chatcache` in a terminal that is closed when the output matches; yield the process and that output."""
    terminal, stdio = pty.openpty()
    command = [sys.executable, "-m", "chatcache", *arguments]
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(), stdin=stdio, stdout=stdio, stderr=stdio, start_new_session=True
    )
    os.close(stdio)
    output = ""
    try:
        with os.fdopen(terminal, "rb", buffering=0) as screen:
            while not re.search(pattern, output):
                assert select.select([screen], [], [], START_TIMEOUT_S)[0], f"no {pattern!r} in:\n{output}"
                output += screen.read(65536).decode(errors="replace")  # OSError when the process has ended
        yield process, output
    finally:
        process.kill()
        process.wait()


def until_status(url: str, status: int) -> httpx.Response:
    """Poll a route until it answers with `status`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        response = httpx.get(url, timeout=60)
        if response.status_code == status:
            return response
        assert time.monotonic() < deadline, response.text
        time.sleep(0.02)
