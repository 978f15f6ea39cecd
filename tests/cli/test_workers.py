"""`chatcache gateway` and `chatcache worker` as processes over a real Redis."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.servers import GatewayOnly, Worker, until_status
from tests.support.redis_servers import redis_server

NUM_STREAMS = 6


def stream(url: str, number: int, texts: dict[int, str], is_running: threading.Event) -> None:
    body: dict[str, Any] = {
        "prompt": f"Number {number} ",
        "max_tokens": 200,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        text = ""
        for line in response.iter_lines():
            text += line.partition('"text":')[2].partition(',"')[0]
            if text:
                is_running.set()
    texts[number] = text


def stream_all(url: str, during: Any = None) -> dict[int, str]:
    """Return the texts of several streams; call `during` when all are running."""
    texts: dict[int, str] = {}
    running = [threading.Event() for _ in range(NUM_STREAMS)]
    threads = [threading.Thread(target=stream, args=(url, n, texts, running[n])) for n in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    for event in running:
        assert event.wait(60)
    if during is not None:
        during()
    for thread in threads:
        thread.join(120)
    return texts


@pytest.mark.slow
def test_killed_worker_changes_no_answer_and_a_drained_one_ends_with_0(folder: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as redis, contextlib.ExitStack() as stack:
        options = ("--bus", redis.url, "--deterministic", "--attention-backend", "cpu")
        names = {name: ("--worker-name", name, "--ready-file", f"ready-{name}") for name in ("a", "b")}
        workers = [Worker(folder, tmp_path, *options, *more) for more in names.values()]
        for worker in workers:
            stack.callback(worker.stop)
            worker.saw("is ready")
        gateway = GatewayOnly(folder, tmp_path, "--bus", redis.url)
        stack.callback(gateway.stop)
        url = gateway.ready()
        for name in ("a", "b"):
            gateway.saw(rf"worker {name}\.\w+ is connected")
        assert {path.name for path in tmp_path.glob("ready-*")} == {"ready-a", "ready-b"}
        expected = stream_all(url)
        assert len(expected) == NUM_STREAMS and len(set(expected.values())) == NUM_STREAMS

        def kill() -> None:
            os.kill(workers[0].child(), signal.SIGSTOP)
            os.kill(workers[0].process.pid, signal.SIGKILL)

        assert stream_all(url, during=kill) == expected
        assert "are resumed by others" in gateway.output
        workers[1].signal(signal.SIGTERM)
        assert workers[1].wait() == 0 and "Draining" in workers[1].output
        assert not (tmp_path / "ready-b").exists()
        refused = until_status(f"{url}/readyz", 503).json()
        assert refused["status"] != "ready"
