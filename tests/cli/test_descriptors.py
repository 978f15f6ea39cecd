"""Connections leave descriptors to the rest of the server, and a server takes those it may have."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from chatcache.gateway import uvicorn_limits as descriptors


@pytest.mark.parametrize(
    ("most", "num_free"), [(20_000, 128), (1024, 128), (256, 128), (64, 32), (resource.RLIM_INFINITY, 128)]
)
def test_how_many_descriptors_are_left(most: int, num_free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    most = sys.maxsize if most == resource.RLIM_INFINITY else most
    assert most - descriptors.max_connections() == num_free


def test_the_server_takes_all_the_system_allows() -> None:
    script = (
        "import resource; from chatcache.gateway.uvicorn_limits import raise_most\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200)); raise_most()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(200, 200)"
