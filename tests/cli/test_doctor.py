"""`chatcache doctor` against machines, folders, files and proxies that are as they should be, and that are not."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from chatcache.cli import doctor as machine
from chatcache.cli.doctor import Finding, State, settings
from chatcache.cli.doctor import server as ask_server
from chatcache.cli.main import app
from chatcache.config import EngineConfig, ServerConfig
from chatcache.storage.sqlite import SqliteStore
from chatcache.storage.sqlite_schema import MIGRATIONS
from tests.gateway.serving import Server
from tests.support.redis_servers import redis_server

KEY = "sk-doctor-1234567890"


def found(findings: Iterator[Finding], what: str) -> Finding:
    return next(each for each in findings if each.what == what)


def of_settings(what: str, folder: Path, model: str = "", port: int = 0, db: str = "") -> Finding:
    config = ServerConfig(port=port, db=db or str(folder / "chat.db"))
    return found(settings(EngineConfig(model=model), config), what)


def test_the_command_tells_of_everything_and_ends_well(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--port", "0", "--db", str(tmp_path / "chat.db")])
    assert result.exit_code == 0, result.output
    for what in ("Python", "Packages", "Processor", "GPU", "Memory", "Compiled kernels", "Model", "Conversations"):
        assert what in result.output
    assert not (tmp_path / "chat.db").exists()  # looking changes nothing


def test_the_command_ends_with_1_if_anything_is_bad(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path), "--port", "0", "--db", str(tmp_path / "chat.db")])
    assert result.exit_code == 1 and f"{tmp_path}/config.json: missing" in result.output


def test_a_folder_without_a_tokenizer_is_bad(tmp_path: Path, folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        os.link(folder / name, tmp_path / name)
    finding = of_settings("Model", tmp_path, str(tmp_path))
    assert finding.state is State.BAD and "tokenizer" in finding.found
    assert of_settings("Model", tmp_path, str(folder)).state is State.GOOD


def test_weights_that_are_not_whole_are_bad(tmp_path: Path, folder: Path) -> None:
    cut = Path(shutil.copytree(folder, tmp_path / "cut")) / "model.safetensors"
    os.truncate(cut, cut.stat().st_size - 1)
    finding = of_settings("Model", tmp_path, str(cut.parent))
    assert finding.state is State.BAD and f"{cut}: truncated" in finding.found


def test_a_model_that_is_not_here_is_fetched_unless_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = of_settings("Model", tmp_path, "nobody/has-this")
    assert finding.state is State.WARNING and "fetches" in finding.remedy
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert of_settings("Model", tmp_path, "nobody/has-this").state is State.BAD
    assert of_settings("Model", tmp_path, "no body/has-this").state is State.BAD


def test_databases(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    assert "will be made" in of_settings("Conversations", tmp_path).found
    SqliteStore(path)
    assert of_settings("Conversations", tmp_path).state is State.GOOD
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    assert "newer" in of_settings("Conversations", tmp_path).found
    path.write_bytes(b"anything else, but long enough to have a header " * 40)
    for leftover in tmp_path.glob("chat.db-*"):
        leftover.unlink()
    finding = of_settings("Conversations", tmp_path)
    assert finding.state is State.BAD and "not a database" in finding.found
    nowhere = of_settings("Conversations", tmp_path, db=str(tmp_path / "no" / "chat.db"))
    assert nowhere.state is State.BAD and "no folder" in nowhere.found


def test_a_damaged_database_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE conversations (id TEXT, pad TEXT)")
        db.executemany("INSERT INTO conversations VALUES (?, ?)", [(str(n), "x" * 500) for n in range(200)])
        db.execute("CREATE INDEX ids ON conversations (id)")
        db.commit()
    assert of_settings("Conversations", tmp_path).state is State.GOOD
    data = bytearray(path.read_bytes())
    data[8192:8700] = os.urandom(508)
    path.write_bytes(data)
    assert of_settings("Conversations", tmp_path).state is State.BAD


def test_little_room_on_disk_and_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.room_on_disk("Disk", tmp_path).state is State.GOOD
    monkeypatch.setattr(machine, "LEAST_DISK_BYTES", 2**60)
    monkeypatch.setattr(machine, "LEAST_MEMORY_BYTES", 2**60)
    assert machine.room_on_disk("Disk", tmp_path).state is State.WARNING
    assert found(machine.machine(), "Memory").state is State.WARNING


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("doctor")
    with Server(ServerConfig(db=str(path / "chat.db"), api_keys=(KEY,)), eos_every=10_000) as server:
        server.runner.delay_s = 0.005
        yield server.wait_ready()


def test_an_address_that_is_taken(tmp_path: Path, gateway: Server) -> None:
    finding = of_settings("Address", tmp_path, port=gateway.port)
    assert finding.state is State.WARNING and "a chatcache serves org/tiny-hash there" in finding.found
    assert finding.remedy == f"--port {gateway.port + 1} for another, with a --db of its own"
    with stranger() as port:
        finding = of_settings("Address", tmp_path, port=port)
        assert finding.state is State.BAD and "chatcache" not in finding.found
        assert finding.remedy == f"--port {port + 1} for another, or end the program that has it"


def test_the_help_is_of_looking_and_not_of_chatting() -> None:
    shown = " ".join(CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": "200"}).stdout.split())
    assert "Check this running server instead of this machine." in shown and "Use this server" not in shown


def test_a_good_server(gateway: Server) -> None:
    findings = {each.what: each for each in ask_server(f"{gateway.url}/v1", KEY)}
    assert {what: each.state for what, each in findings.items()} == dict.fromkeys(
        ("Server", "Streams", "WebSocket"), State.GOOD
    ), findings


def test_a_server_that_wants_another_key(gateway: Server) -> None:
    assert found(ask_server(gateway.url, "sk-wrong-000000"), "API key").state is State.BAD


def test_a_server_that_is_not_there() -> None:
    (finding,) = ask_server("http://127.0.0.1:9", None)
    assert finding.state is State.BAD
    with stranger() as port:
        (finding,) = ask_server(f"http://127.0.0.1:{port}", None)
        assert finding.state is State.BAD


def test_a_proxy_that_holds_streams_back_and_drops_upgrades(gateway: Server) -> None:
    with proxy(gateway.url) as port:
        findings = {each.what: each for each in ask_server(f"http://127.0.0.1:{port}", KEY)}
    assert findings["Streams"].state is State.WARNING and "proxy_buffering" in findings["Streams"].remedy
    assert findings["WebSocket"].state is State.BAD and "Upgrade" in findings["WebSocket"].remedy


@contextlib.contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield listener.server_address[1]
        finally:
            listener.shutdown()
            thread.join()


def stranger() -> contextlib.AbstractContextManager[int]:
    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None: ...

    return answering(Stranger)


def proxy(upstream: str) -> contextlib.AbstractContextManager[int]:
    """One that reads an answer to its end before it passes it on, and knows nothing of upgrades."""

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            kept = ("authorization", "content-type")
            headers = {name: value for name in kept if (value := self.headers.get(name))}
            answer = httpx.request(self.command, upstream + self.path, content=body, headers=headers, timeout=60)
            self.send_response(answer.status_code)
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    return answering(Proxy)


def test_a_redis_server_is_looked_at(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        for url, state, told in (
            (server.url, State.GOOD, "in the Redis server"),
            (server.url.replace("secret", "wrong"), State.BAD, "rejects the login"),
            ("redis://127.0.0.1:1", State.WARNING, "no Redis server yet"),
            ("http://127.0.0.1", State.BAD, "not a URL"),
        ):
            finding = found(settings(EngineConfig(), ServerConfig(port=0, redis=url)), "Conversations")
            assert finding.state is state and told in finding.found
            assert "secret" not in finding.found and "wrong" not in finding.found
        assert server.admin.keys("*") == []  # looking changes nothing
