"""Test a running server: it reads no pickle, opens no connection, listens on one socket and logs no prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from tests.cli.servers import Server, environment

pytestmark = pytest.mark.slow

KEY = "sk-quiet-marker-456"
SECRET_WORDS = "xylocopa violacea"
HOOKS = Path(__file__).parent / "hooks"


class WatchedServer(Server):
    """`chatcache serve` under `python -O`, with audit hooks in its process and in the engine process."""

    def __init__(self, folder: Path, cwd: Path, *more: str, **extra: str) -> None:
        self.tried = cwd / "tried.txt"
        options = ("--port", "0", "--kv-memory", "4MiB", "--host", "0.0.0.0", "--api-key", KEY, *more)
        env = environment() | {"CHATCACHE_TEST_TRIED": str(self.tried), "HF_HUB_OFFLINE": "1"} | extra
        env["PYTHONPATH"] = os.pathsep.join([str(HOOKS), env["PYTHONPATH"]])
        command = [sys.executable, "-O", "-m", "chatcache", "serve", str(folder), *options]
        self.process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def complaints(self) -> list[str]:
        return self.tried.read_text().splitlines() if self.tried.exists() else []


@dataclass
class Seen:
    """Observations of one server from start to stop."""

    answers: dict[str, Any] = field(default_factory=dict)
    listeners: list[str] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    output: str = ""
    complaints: list[str] = field(default_factory=list)


def sockets_of(pids: list[int]) -> tuple[list[str], list[str]]:
    """Return listening TCP and UDP addresses of these processes, and the peers of their other sockets."""
    inodes: set[str] = set()
    for pid in pids:
        for name in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(name))
            except OSError:
                continue
    listeners, peers = [], []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            _, local, remote, state, *rest = line.split()
            if f"socket:[{rest[5]}]" not in inodes:
                continue
            if state == "0A" or table.startswith("udp"):
                listeners.append(f"{table} {local}")
            else:
                peers.append(remote)
    return listeners, peers


def live(folder: Path, cwd: Path, *more: str, **extra: str) -> Seen:
    """Start a server, use all of its transports, inspect its sockets, stop it."""
    seen = Seen()
    server = WatchedServer(folder, cwd, *more, **extra)
    try:
        server.saw(r"Ready|ready")
        url = "http://127.0.0.1:" + server.saw(r"http://[\w.\[\]:]+?:(\d+)")[1]
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
            _use(client, seen)
            use_socket(url, seen)
            seen.listeners, seen.peers = sockets_of([server.process.pid, server.child()])
        server.signal()
        seen.answers["exit"] = server.wait()
    finally:
        server.stop()
    seen.output, seen.complaints = server.output, server.complaints()
    return seen


def _use(client: httpx.Client, seen: Seen) -> None:
    said = [{"role": "user", "content": SECRET_WORDS}]
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", {"messages": said, "max_tokens": 3}),
        "stream": ("/v1/chat/completions", {"messages": said, "max_tokens": 3, "stream": True}),
        "response": ("/v1/responses", {"input": SECRET_WORDS, "max_output_tokens": 3}),
        "choice": (
            "/v1/chat/completions",
            {"messages": said, "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 9},
        ),
        "bad": ("/v1/chat/completions", {"messages": said, "temperature": -1}),
        "n": ("/v1/chat/completions", {"messages": said, "n": 10**6}),
        "image": (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://192.0.2.1/x"}}]}
                ]
            },
        ),
    }
    for name, (path, body) in bodies.items():
        seen.answers[name] = client.post(path, json=body).status_code
    seen.answers["no key"] = client.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code
    seen.answers["page"] = client.get("/").status_code


def use_socket(url: str, seen: Seen) -> None:
    with connect(
        url.replace("http", "ws") + "/v1/responses",
        additional_headers={"authorization": f"Bearer {KEY}"},
        subprotocols=[Subprotocol("chatcache.v1")],
    ) as socket:
        socket.send(json.dumps({"type": "response.create", "input": SECRET_WORDS, "max_output_tokens": 3}))
        while (frame := json.loads(socket.recv(timeout=60)))["type"] not in (
            "response.completed",
            "response.incomplete",
        ):
            assert frame["type"] != "error", frame
        seen.answers["ws"] = frame["type"]


def check(seen: Seen) -> None:
    assert not seen.complaints, "\n".join(seen.complaints)
    for name in ("chat", "stream", "response", "choice", "page"):
        assert seen.answers[name] == 200, (name, seen.answers[name])
    assert seen.answers["ws"] in ("response.completed", "response.incomplete")
    for name, status in {"bad": 400, "n": 400, "image": 400, "no key": 401}.items():
        assert seen.answers[name] == status, f"{name}: {seen.answers[name]}"
    assert len(seen.listeners) == 1 and seen.listeners[0].startswith("tcp 00000000:"), seen.listeners
    assert all(is_loopback(peer) for peer in seen.peers), seen.peers
    assert seen.answers["exit"] == 0
    assert "Traceback" not in seen.output
    for secret in (SECRET_WORDS, SECRET_WORDS.split()[0], KEY, "quiet-marker"):
        assert secret not in seen.output, f"{secret!r} was logged"


def is_loopback(remote: str) -> bool:
    """Return whether an address in the format of /proc/net is a loopback address."""
    address = remote.partition(":")[0]
    return address.endswith(("7F", "0100007F")) or address == "0" * 24 + "01000000"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.llm.tiny_llama import make_model, write_folder

    path: Path = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    path.mkdir()
    write_folder(path, make_model())
    return path


OPTIONS = ("--dtype", "float32", "--attention-backend", "reference")


@pytest.fixture(scope="module")
def seen(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return live(model, tmp_path_factory.mktemp("cwd"), *OPTIONS)


def test_server_reads_no_pickle_connects_nowhere_and_listens_once(seen: Seen) -> None:
    check(seen)


def test_hooks_report_what_they_watch(tmp_path: Path) -> None:
    """Run in an interpreter without a server, which starts faster."""
    tried = tmp_path / "tried.txt"
    env = environment() | {"CHATCACHE_TEST_TRIED": str(tried), "CHATCACHE_TEST_PLANT": "1", "PYTHONPATH": str(HOOKS)}
    subprocess.run([sys.executable, "-O", "-c", "pass"], env=env, check=True)
    assert [line.split(" from ")[0] for line in tried.read_text().splitlines()] == [
        "pickle.loads",
        "socket.connect ('192.0.2.1', 9)",
    ]


@pytest.mark.long
def test_server_with_all_violations_is_found(model: Path, tmp_path: Path) -> None:
    injected = live(model, tmp_path, *OPTIONS, CHATCACHE_TEST_PLANT="1")
    assert any("192.0.2.1" in line for line in injected.complaints)
    assert any("pickle" in line for line in injected.complaints)
    assert len(injected.listeners) > 1
    with pytest.raises(AssertionError, match=r"192\.0\.2\.1"):
        check(injected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("listener", "tcp 00000000:1F40"),
        ("peer", "010200C0:0050"),
        ("complaint", "eval from"),
        ("said", f"'{SECRET_WORDS}' was logged"),
        ("key", f"'{KEY}' was logged"),
        ("unauthorised", "no key: 200"),
    ],
)
def test_check_finds_each_violation(change: str, words: str, seen: Seen) -> None:
    injected = Seen(dict(seen.answers), list(seen.listeners), list(seen.peers), seen.output, list(seen.complaints))
    match change:
        case "listener":
            injected.listeners.append("tcp 00000000:1F40")
        case "peer":
            injected.peers.append("010200C0:0050")
        case "complaint":
            injected.complaints.append("eval from somewhere")
        case "said":
            injected.output += f"INFO prompt: {SECRET_WORDS}"
        case "key":
            injected.output += f"INFO authorization {KEY}"
        case "unauthorised":
            injected.answers["no key"] = 200
    with pytest.raises(AssertionError, match=words):
        check(injected)
