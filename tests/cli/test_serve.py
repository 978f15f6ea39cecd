"""`chatcache serve` as a process: start, drain, kill, engine restart, and refused settings."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.cli.servers import OPTIONS, Server, child_of, detached, environment, serving, until_status
from tests.engine_process.test_process import is_alive

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_banner_shows_model_pages_and_access(server: Server) -> None:
    assert "tiny-llama" in server.output
    assert "float32 on cpu, reference attention" in server.output
    assert "pages of 16 tokens, 8 KiB each" in server.output  # 2 layers x 2 x 2 heads x 16 wide x 4 bytes x 16 tokens
    # 4 MiB are 512 pages of 8 KiB. Page 0 is unused, and at most 16 contexts per slot are allocated.
    assert re.search(r"waste +.* of the memory is in no page \(\d+\.\d%\); up to 15 unused tokens", server.output)
    assert "open, from this machine only" in server.output
    models = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert [model["id"] for model in models] == ["tiny-llama"]


def test_server_answers_a_chat_completion(server: Server) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.slow
def test_server_listens_before_the_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as server:
        url = server.url
        os.kill(engine_of(server), signal.SIGSTOP)  # stops loading
        loading = until_status(f"{url}/readyz", 503).json()
        assert loading["status"] == "loading" and 0 <= loading["progress"] < 1
        assert httpx.get(f"{url}/livez", timeout=60).status_code == 200
        refused = httpx.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES}, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
        assert "retry-after" in refused.headers
        os.kill(server.child(), signal.SIGCONT)
        until_status(f"{url}/readyz", 200)


def engine_of(server: Server) -> int:
    """Wait for the engine process and return its id."""
    while True:
        try:
            return server.child()
        except IndexError:
            time.sleep(0.01)


def slow_stream(url: str) -> tuple[socket.socket, bytes]:
    """Start a streamed answer of a few seconds; return the raw socket and the first bytes."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(
        {"messages": MESSAGES, "n": 8, "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 1}
    ).encode()
    sock = socket.create_connection((host, int(port)), timeout=60)
    sock.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    return sock, sock.recv(1024)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
@pytest.mark.slow
def test_server_first_signal_drains(folder: Path, tmp_path: Path, number: int) -> None:
    with serving(folder, tmp_path) as server:
        url, child = server.ready(), server.child()
        sock, received = slow_stream(url)
        with sock:
            server.signal(number)
            server.saw("Draining")
            while chunk := sock.recv(65536):
                received += chunk
        assert b"data: [DONE]" in received
        assert server.wait() == 0
        assert not is_alive(child)


@pytest.mark.slow
def test_server_second_signal_kills(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as server:
        url, child = server.ready(), server.child()
        sock, _ = slow_stream(url)
        with sock:
            os.kill(child, signal.SIGSTOP)  # an engine that does not answer cannot hold up the second signal
            server.signal()
            server.saw("Draining")
            server.signal()
            assert server.wait() == 130
        deadline = time.monotonic() + 60
        while is_alive(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_alive(child)


@pytest.mark.slow
def test_server_without_its_terminal_drains_and_exits_with_0(folder: Path, tmp_path: Path) -> None:
    with detached(tmp_path, "chat page", "serve", str(folder), *OPTIONS) as (process, output):
        sock, received = slow_stream(re.findall(r"http://[\d.]+:\d+", output)[0])
        with sock:
            process.terminate()
            while chunk := sock.recv(65536):
                received += chunk
        assert b"data: [DONE]" in received
        assert process.wait(120) == 0


@pytest.mark.slow
def test_server_without_its_terminal_ends_at_the_second_signal(folder: Path, tmp_path: Path) -> None:
    with detached(tmp_path, "chat page", "serve", str(folder), *OPTIONS) as (process, output):
        url = re.findall(r"http://[\d.]+:\d+", output)[0]
        sock, _ = slow_stream(url)
        with sock:
            os.kill(child_of(process.pid), signal.SIGSTOP)
            process.terminate()
            until_status(f"{url}/readyz", 503)
            process.terminate()
            assert process.wait(120) == 130


@pytest.mark.slow
def test_server_without_its_terminal_drains_while_loading(folder: Path, tmp_path: Path) -> None:
    with detached(tmp_path, "Listening on", "serve", str(folder), *OPTIONS) as (process, _):
        process.terminate()
        assert process.wait(120) == 0


@pytest.mark.slow
def test_server_drains_while_loading(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as server:
        until_status(f"{server.url}/livez", 200)
        child = engine_of(server)
        os.kill(child, signal.SIGSTOP)
        server.signal()
        assert server.wait() == 0
        assert not is_alive(child)


@pytest.mark.slow
def test_server_replaces_a_killed_engine_and_completes_its_streams(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as server:
        url, child = server.ready(), server.child()
        sock, received = slow_stream(url)
        with sock:
            os.kill(child, signal.SIGKILL)
            while chunk := sock.recv(65536):
                received += chunk
        assert b'"error"' not in received and received.count(b"[DONE]") == 1
        assert received.count(b'"finish_reason":"length"') == 8
        until_status(f"{url}/readyz", 200)
        assert server.child() != child
        body = {"messages": MESSAGES, "max_tokens": 2, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200


@pytest.mark.slow
def test_server_reports_a_port_in_use(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "chatcache", "serve", str(folder), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=180)
    assert done.returncode == 1
    assert done.stderr == (
        f"chatcache: cannot listen on 127.0.0.1:{port}: Address already in use; choose another port, for example "
        f"--port {int(port) + 1}, or stop the program that uses this one\n"
    )


@pytest.mark.slow
def test_server_refuses_an_unusable_database(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("certainly not a database, but a user's notes\n" * 100)
    for name, reason in (("notes.db", "not a database"), ("nowhere/chats.db", "unable to open")):
        command = [sys.executable, "-m", "chatcache", "serve", str(folder), "--port", "0", "--db", name]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=180)
        assert done.returncode == 78
        assert done.stderr.startswith(f"chatcache: --db {name}: ") and reason in done.stderr, done.stderr
    assert (tmp_path / "notes.db").read_text().startswith("certainly")


def no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json: missing"


def broken_config(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return "config.json: not valid JSON"


def no_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "model.safetensors: missing"


def truncated_weights(folder: Path) -> str:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    return "model.safetensors"


def no_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").unlink()
    return "tokenizer.json"


def wrong_shape(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 999}))
    return "model.safetensors"


@pytest.mark.parametrize(
    "damage",
    [
        no_config,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (broken_config, no_weights, truncated_weights, no_tokenizer, wrong_shape)
        ),
    ],
)
@pytest.mark.slow
def test_server_exits_with_78_for_a_bad_model_folder(
    folder: Path, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    copy = tmp_path / "damaged"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    reason = damage(copy)
    with serving(copy, tmp_path) as server:
        assert server.wait() == 78
        lines = [line for line in server.output.splitlines() if line.startswith("chatcache: ")]
        assert len(lines) == 1 and reason in lines[0], server.output
        assert "Traceback" not in server.output


@pytest.mark.slow
def test_server_exits_with_78_for_a_missing_model_folder(tmp_path: Path) -> None:
    with serving(tmp_path / "nowhere", tmp_path) as server:
        assert server.wait() == 78
        assert server.output == f"chatcache: {tmp_path / 'nowhere'}: no such folder\n"
