"""A server in its own process, started as a user starts it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.ports import free_port

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0


@contextlib.contextmanager
def serving(
    command: Sequence[str], folder: Path, *, cwd: Path, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, int]]:
    """Run `command` on a free port, with database and log in `folder`; yield URL and process id when it is ready."""
    port = free_port()
    process = start_server(command, folder, port, cwd=cwd, environment=environment)
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        try:
            process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def start_server(
    command: Sequence[str], folder: Path, port: int, *, cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `command` on a port, with database and log in `folder`, and wait until it is ready."""
    log = folder / "server.log"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CHATCACHE_")}
    # the browser needs a core too; spinning threads would use both
    ours = kept | {"OMP_NUM_THREADS": "1"} | dict(environment or {})
    whole = [*command, "--port", str(port), "--db", str(folder / "chat.db")]
    with log.open("wb") as output:
        process = subprocess.Popen(whole, cwd=cwd, env=ours, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_ready(f"http://127.0.0.1:{port}", process, log)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    pytest.fail(f"the server was not ready after {START_TIMEOUT_S:.0f} s:\n{log.read_text()[-4000:]}")
