"""`chatcache gateway` and `chatcache worker` as processes over a real Redis, which are killed and suspended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from chatcache.cli.main import app
from chatcache.cluster.bus import RETRY_S
from tests.cli.servers import GatewayOnly, Worker, detached, until_status
from tests.support.redis_servers import RedisServer, redis_server

NUM_STREAMS = 6
NUM_TOKENS = 1000  # so many that no stream ends before the kill, also if this process waits for a processor
SUSPENDED_S = 15.0
FORGETFUL_JOURNAL = """
import msgspec
from chatcache.engine_process.recovery import RequestJournal

original = RequestJournal.resumed_request

def forget_a_token(journal):
    request = original(journal)
    sent = [msgspec.structs.replace(each, tokens=each.tokens[:-4]) for each in request.resume_point.candidates]
    point = msgspec.structs.replace(request.resume_point, candidates=tuple(sent))
    return msgspec.structs.replace(request, resume_point=point)

RequestJournal.resumed_request = forget_a_token
"""


class ForgetfulGateway(GatewayOnly):
    """Injected bug: the gateway resumes requests without their last token."""

    def command(self, folder: str, *more: str) -> list[str]:
        program = f"import sys\nfrom chatcache.cli.main import main\n{FORGETFUL_JOURNAL}\nsys.exit(main())"
        return [sys.executable, "-c", program, *super().command(folder, *more)[3:]]


class Stream:
    """A stream of a completion, read in a thread. `pause_s`: the longest time between two parts of it."""

    def __init__(self, url: str, number: int, max_tokens: int) -> None:
        self.text = ""
        self.error = ""
        self.pause_s = 0.0
        self.is_running = threading.Event()
        body: dict[str, Any] = {
            "prompt": f"Number {number} ",
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self._thread = threading.Thread(target=self._read, args=(url, body))
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any]) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
            last_s = time.monotonic()
            for line in response.iter_lines():
                if '"error"' in line:
                    self.error = line
                self.text += line.partition('"text":')[2].partition(',"')[0]
                if self.text:
                    self.pause_s = max(self.pause_s, time.monotonic() - last_s) if self.is_running.is_set() else 0.0
                    last_s = time.monotonic()
                    self.is_running.set()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(300)
        assert self.has_ended and not self.error, self.error


class Cluster:
    """Workers on a Redis, and a gateway. All workers give the same tokens."""

    def __init__(
        self, kind: type[GatewayOnly], folder: Path, cwd: Path, redis: RedisServer, num_workers: int, *more: str
    ) -> None:
        self._cwd, self._folder, self._redis = cwd, folder, redis
        self._options = more
        self._num_started = 0
        self.workers = [self._start_worker() for _ in range(num_workers)]
        self.gateway = kind(folder, cwd, "--bus", redis.url)

    def _start_worker(self) -> Worker:
        self._num_started += 1
        name = f"w{self._num_started}"
        options = ("--bus", self._redis.url, "--deterministic", "--attention-backend", "cpu", *self._options)
        return Worker(self._folder, self._cwd, *options, "--worker-name", name, "--ready-file", f"ready-{name}")

    def wait_connected(self) -> None:
        self.url = self.gateway.ready()
        for number in range(1, self._num_started + 1):
            self.gateway.saw(rf"worker w{number}\.\w+ is connected")

    def replace_worker(self, number: int) -> None:
        self.workers[number].stop()
        self.workers[number] = self._start_worker()
        self.wait_connected()

    def kill_worker(self, number: int) -> None:
        """Kill a worker; its engine process is suspended, so that it does not even end."""
        os.kill(self.workers[number].child(), signal.SIGSTOP)
        os.kill(self.workers[number].process.pid, signal.SIGKILL)

    def signal_worker(self, number: int, signal_number: int) -> None:
        for process_id in (self.workers[number].child(), self.workers[number].process.pid):
            os.kill(process_id, signal_number)

    def start_streams(self, num_streams: int, max_tokens: int) -> list[Stream]:
        """Start streams and wait until all have text."""
        streams = [Stream(self.url, number, max_tokens) for number in range(num_streams)]
        for stream in streams:
            assert stream.is_running.wait(60), stream.error
        return streams

    def texts(self, streams: list[Stream]) -> list[str]:
        for stream in streams:
            stream.join()
        return [stream.text for stream in streams]

    def stop(self) -> None:
        for process in (*self.workers, self.gateway):
            process.stop()


@contextlib.contextmanager
def cluster(kind: type[GatewayOnly], folder: Path, cwd: Path, num_workers: int, *more: str) -> Iterator[Cluster]:
    with redis_server(cwd / "redis") as redis, contextlib.ExitStack() as stack:
        found = Cluster(kind, folder, cwd, redis, num_workers, *more)
        stack.callback(found.stop)
        found.wait_connected()
        yield found


@pytest.mark.slow
def test_killed_worker_changes_no_answer_and_a_drained_one_ends_with_0(long_folder: Path, tmp_path: Path) -> None:
    with cluster(GatewayOnly, long_folder, tmp_path, 2, "--kv-memory", "64MiB") as found:
        assert {path.name for path in tmp_path.glob("ready-*")} == {"ready-w1", "ready-w2"}
        expected = found.texts(found.start_streams(NUM_STREAMS, NUM_TOKENS))
        assert len(set(expected)) == NUM_STREAMS
        streams = found.start_streams(NUM_STREAMS, NUM_TOKENS)
        found.kill_worker(0)
        assert found.texts(streams) == expected
        assert "are resumed by others" in found.gateway.output
        found.workers[1].signal(signal.SIGTERM)
        assert found.workers[1].wait() == 0 and "Draining" in found.workers[1].output
        assert not (tmp_path / "ready-w2").exists()
        refused = until_status(f"{found.url}/readyz", 503).json()
        assert refused["status"] != "ready"


def test_ready_file_of_a_killed_worker_is_removed_and_a_missing_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []

    def run_worker(*args: object, ready_file: Path) -> int:
        found.append(ready_file.exists())
        return 0

    monkeypatch.setattr("chatcache.cli.worker.run_worker", run_worker)
    monkeypatch.setattr("chatcache.cli.worker.check_model_folder", lambda config: None)
    (tmp_path / "ready").touch()
    command = ["worker", "--bus", "redis://127.0.0.1:1/0", "--ready-file"]
    assert CliRunner().invoke(app, [*command, str(tmp_path / "ready")]).exit_code == 0
    assert found == [False]
    result = CliRunner().invoke(app, [*command, str(tmp_path / "missing" / "ready")])
    assert result.exit_code == 2 and "no such folder" in " ".join(result.output.replace("│", "").split())


@pytest.mark.slow
def test_worker_and_gateway_that_the_bus_refuses_are_not_ready(folder: Path, tmp_path: Path) -> None:
    refused = r"the bus \(--bus\) refuses this process: invalid username-password pair"
    with redis_server(tmp_path / "redis") as redis, contextlib.ExitStack() as stack:
        bus = ("--bus", redis.url.replace("secret", "other"))
        worker = Worker(folder, tmp_path, *bus, "--worker-name", "w1", "--ready-file", "ready-w1")
        stack.callback(worker.stop)
        gateway = GatewayOnly(folder, tmp_path, *bus)
        stack.callback(gateway.stop)
        worker.saw(refused)
        gateway.saw(refused)
        time.sleep(3 * RETRY_S)
        assert "is ready" not in worker.output and not (tmp_path / "ready-w1").exists()
        assert until_status(f"{gateway.url}/readyz", 503).json()["detail"] == "the bus does not answer"
        redis.admin.acl_setuser("chatcache", enabled=True, passwords=["+other"])
        worker.saw(r"Worker w1 is ready: w1\.\w+")
        gateway.ready()
        assert (tmp_path / "ready-w1").exists()


@pytest.mark.slow
def test_worker_and_gateway_without_their_terminals_drain_and_exit_with_0(folder: Path, tmp_path: Path) -> None:
    with (
        redis_server(tmp_path / "redis") as redis,
        detached(tmp_path, "is ready", "worker", str(folder), *Worker.options[1:], "--bus", redis.url) as (worker, _),
        detached(tmp_path, "chat page", "gateway", str(folder), *GatewayOnly.options[1:], "--bus", redis.url) as (
            gateway,
            _,
        ),
    ):
        for process in (gateway, worker):
            process.terminate()
            assert process.wait(120) == 0


@pytest.mark.slow
def test_gateway_that_forgets_a_token_is_detected(long_folder: Path, tmp_path: Path) -> None:
    with cluster(ForgetfulGateway, long_folder, tmp_path, 2, "--kv-memory", "64MiB") as found:
        expected = found.texts(found.start_streams(NUM_STREAMS, NUM_TOKENS))
        streams = found.start_streams(NUM_STREAMS, NUM_TOKENS)
        found.kill_worker(0)
        assert found.texts(streams) != expected


def check_faults(
    found: Cluster, num_faults: int, num_streams: int, max_tokens: int, fault: Callable[[int, list[Stream]], None]
) -> None:
    """Check that no stream is different after a fault of a worker; print the longest pause of a stream."""
    expected = found.texts(found.start_streams(num_streams, max_tokens))
    assert len(set(expected)) == num_streams
    pauses: list[float] = []
    for number in range(num_faults):
        streams = found.start_streams(num_streams, max_tokens)
        fault(number % len(found.workers), streams)
        assert found.texts(streams) == expected, f"after fault {number}"
        pauses.append(max(stream.pause_s for stream in streams))
        found.wait_connected()
    moved = found.gateway.output.count("are resumed by others")
    print(f"{num_faults} faults, {moved} workers lost, longest pause of a stream {max(pauses):.2f} s")
    assert moved >= num_faults


@pytest.mark.long
def test_fifty_killed_workers_change_no_stream(long_folder: Path, tmp_path: Path) -> None:
    with cluster(GatewayOnly, long_folder, tmp_path, 3, "--kv-memory", "64MiB") as found:

        def kill(number: int, streams: list[Stream]) -> None:
            assert not all(stream.has_ended for stream in streams), "the fault is too late"
            found.kill_worker(number)
            found.replace_worker(number)

        check_faults(found, 50, 20, 600, kill)


@pytest.mark.long
def test_twenty_suspended_workers_change_no_stream(long_folder: Path, tmp_path: Path) -> None:
    """They wake while their requests run elsewhere."""
    with cluster(GatewayOnly, long_folder, tmp_path, 2, "--kv-memory", "64MiB") as found:

        def suspend(number: int, streams: list[Stream]) -> None:
            found.signal_worker(number, signal.SIGSTOP)
            time.sleep(SUSPENDED_S)
            found.signal_worker(number, signal.SIGCONT)
            assert not all(stream.has_ended for stream in streams), "it woke too late"

        begin_s = time.monotonic()
        found.texts(found.start_streams(NUM_STREAMS, NUM_TOKENS))
        tokens_per_s = NUM_TOKENS / (time.monotonic() - begin_s)
        check_faults(found, 20, NUM_STREAMS, int(2 * SUSPENDED_S * tokens_per_s), suspend)
