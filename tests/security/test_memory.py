"""Test that invalid HTTP and WebSocket input does not increase the memory of a gateway process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from tests.cli.servers import environment
from tests.gateway.serving import Server
from tests.gateway.test_http_fuzz import _fuzz as fuzz_http
from tests.gateway.test_ws_fuzz import _fuzz as fuzz_socket

SEED = int(os.environ.get("CHATCACHE_TEST_SEED", 20))
MAX_GROWTH_BYTES = 32 << 20

pytestmark = [pytest.mark.slow, pytest.mark.linux]  # needs /proc


@dataclass
class Served:
    """The parts of `Server` that the fuzzers use."""

    port: int
    pid: int

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@contextmanager
def served(folder: Path, *more: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "tests.security.gateway_process", str(folder / "chat.db"), *more]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Served(int(process.stdout.readline()), process.pid)
        assert process.poll() is None, "the server has ended"
        process.kill()


def check(server: Served, num_bodies: int) -> None:
    """Fuzz until caches are full, then measure. Raises: AssertionError for growth, a 5xx or a stack trace."""
    one: Any = cast(Server, server)
    for part in range(2):
        fuzz_http(one, SEED + part, num_bodies)
        fuzz_socket(one, SEED + part, num_bodies // 6)
        if part == 0:
            before = server.resident_bytes()
    grown = server.resident_bytes() - before
    print(f"{2 * (num_bodies + num_bodies // 6)} inputs; {grown / 2**20:.1f} MiB more in their second half")
    assert grown <= MAX_GROWTH_BYTES, f"{grown >> 20} MiB more"


@pytest.mark.parametrize("num_bodies", [400, pytest.param(45_000, marks=pytest.mark.long)])
def test_fuzzed_input_does_not_increase_memory(num_bodies: int, tmp_path: Path) -> None:
    with served(tmp_path) as server:
        check(server, num_bodies)


def test_injected_leak_is_found(tmp_path: Path) -> None:
    with served(tmp_path, "leaky") as server, pytest.raises(AssertionError, match="MiB more"):
        check(server, 400)
