"""`chatcache doctor`: findings for model folders, stores, servers and proxies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from chatcache.auth import new_key
from chatcache.cli import doctor
from chatcache.cli.db import check_redis
from chatcache.cli.doctor import (
    Finding,
    State,
    check_bus,
    check_disk_space,
    check_machine,
    check_running_server,
    check_settings,
)
from chatcache.cli.main import app
from chatcache.cluster.bus import WORKERS, WorkerStatus, new_id, worker_key
from chatcache.config import EngineConfig, ServerConfig
from chatcache.conversations.store import StoreUnavailableError
from chatcache.storage import redis_client
from chatcache.storage.open import open_keys
from chatcache.storage.sqlite import SqliteStore
from chatcache.storage.sqlite_schema import MIGRATIONS
from chatcache.types.stats import EngineHealth, ModelInfo
from tests.gateway.serving import Server
from tests.support.certificates import tls_settings
from tests.support.redis_servers import RedisServer, redis_server

KEY = "sk-doctor-1234567890"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a Redis server longer than usual: on a busy machine it is slow."""
    monkeypatch.setattr(redis_client, "TIMEOUT_S", redis_client.SLOW_TIMEOUT_S)


def finding_of(findings: Iterator[Finding], subject: str) -> Finding:
    return next(each for each in findings if each.subject == subject)


def settings_finding(subject: str, folder: Path, model: str = "", port: int = 0, db: str = "") -> Finding:
    config = ServerConfig(port=port, db=db or str(folder / "chat.db"))
    return finding_of(check_settings(EngineConfig(model=model), config), subject)


def test_doctor_command_on_a_good_machine_reports_every_subject(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--port", "0", "--db", str(tmp_path / "chat.db")])
    assert result.exit_code == 0, result.output
    for what in ("Python", "Packages", "Processor", "GPU", "Memory", "Compiled kernels", "Model", "Conversations"):
        assert what in result.output
    assert not (tmp_path / "chat.db").exists()  # checks change nothing


def test_doctor_command_with_a_failed_check_exits_with_1(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path), "--port", "0", "--db", str(tmp_path / "chat.db")])
    assert result.exit_code == 1 and f"{tmp_path}/config.json: missing" in result.output


def test_doctor_fails_a_model_folder_without_tokenizer(tmp_path: Path, folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        os.link(folder / name, tmp_path / name)
    finding = settings_finding("Model", tmp_path, str(tmp_path))
    assert finding.state is State.FAIL and "tokenizer" in finding.fact
    assert settings_finding("Model", tmp_path, str(folder)).state is State.OK


def test_doctor_fails_truncated_weights(tmp_path: Path, folder: Path) -> None:
    cut = Path(shutil.copytree(folder, tmp_path / "cut")) / "model.safetensors"
    os.truncate(cut, cut.stat().st_size - 1)
    finding = settings_finding("Model", tmp_path, str(cut.parent))
    assert finding.state is State.FAIL and f"{cut}: truncated" in finding.fact


def test_doctor_warns_of_a_download_and_fails_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = settings_finding("Model", tmp_path, "example/missing")
    assert finding.state is State.WARN and "downloads" in finding.remedy
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert settings_finding("Model", tmp_path, "example/missing").state is State.FAIL
    assert settings_finding("Model", tmp_path, "exam ple/missing").state is State.FAIL


def test_doctor_reports_missing_newer_and_foreign_database_files(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    assert "will be created" in settings_finding("Conversations", tmp_path).fact
    asyncio.run(SqliteStore(path).close())
    assert settings_finding("Conversations", tmp_path).state is State.OK
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    assert "newer" in settings_finding("Conversations", tmp_path).fact
    path.write_bytes(b"anything else, but long enough to have a header " * 40)
    for leftover in tmp_path.glob("chat.db-*"):
        leftover.unlink()
    finding = settings_finding("Conversations", tmp_path)
    assert finding.state is State.FAIL and "not a database" in finding.fact
    nowhere = settings_finding("Conversations", tmp_path, db=str(tmp_path / "no" / "chat.db"))
    assert nowhere.state is State.FAIL and "no such folder" in nowhere.fact


def test_doctor_fails_a_damaged_database(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE conversations (id TEXT, pad TEXT)")
        db.executemany("INSERT INTO conversations VALUES (?, ?)", [(str(n), "x" * 500) for n in range(200)])
        db.execute("CREATE INDEX ids ON conversations (id)")
        db.commit()
    assert settings_finding("Conversations", tmp_path).state is State.OK
    data = bytearray(path.read_bytes())
    data[8192:8700] = os.urandom(508)
    path.write_bytes(data)
    assert settings_finding("Conversations", tmp_path).state is State.FAIL


def test_doctor_warns_of_little_disk_space_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_disk_space(tmp_path).state is State.OK
    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 2**60)
    monkeypatch.setattr(doctor, "MIN_MEMORY_BYTES", 2**60)
    assert check_disk_space(tmp_path).state is State.WARN
    assert finding_of(check_machine(), "Memory").state is State.WARN


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("doctor")
    with Server(ServerConfig(db=str(path / "chat.db"), api_keys=(KEY,)), eos_every=10_000) as server:
        server.runner.delay_s = 0.005
        yield server.wait_ready()


def test_doctor_names_the_server_on_a_port_in_use(tmp_path: Path, gateway: Server) -> None:
    finding = settings_finding("Address", tmp_path, port=gateway.port)
    assert (
        finding.state is State.WARN and "a chatcache server already serves org/tiny-hash on this port" in finding.fact
    )
    assert f"--port {gateway.port + 1} --db" in finding.remedy
    with other_server() as port:
        finding = settings_finding("Address", tmp_path, port=port)
        assert finding.state is State.FAIL and "chatcache" not in finding.fact
        assert f"--port {port + 1}, or stop the program" in finding.remedy


def test_doctor_help_describes_its_own_url_option() -> None:
    shown = " ".join(CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": "200"}).stdout.split())
    assert "Check this running server instead of this machine." in shown and "Use this server" not in shown


def test_doctor_passes_a_good_server(gateway: Server) -> None:
    findings = {each.subject: each for each in check_running_server(f"{gateway.url}/v1", KEY)}
    assert {subject: each.state for subject, each in findings.items()} == dict.fromkeys(
        ("Server", "Streams", "WebSocket"), State.OK
    ), findings


def test_doctor_fails_a_wrong_api_key(gateway: Server) -> None:
    assert finding_of(check_running_server(gateway.url, "sk-wrong-000000"), "API key").state is State.FAIL


def test_doctor_fails_an_address_and_a_key_that_cannot_be_sent() -> None:
    bad = (("http://[::1", None), ("http://127.0.0.1:99999", None), ("http://127.0.0.1:1", "sch\u00fcssel"))
    for url, key in bad:
        (finding,) = check_running_server(url, key)
        assert finding.state is State.FAIL and finding.subject == "Server"


def test_doctor_fails_an_unreachable_server() -> None:
    (finding,) = check_running_server("http://127.0.0.1:9", None)
    assert finding.state is State.FAIL
    with other_server() as port:
        (finding,) = check_running_server(f"http://127.0.0.1:{port}", None)
        assert finding.state is State.FAIL


def test_doctor_reports_a_proxy_that_buffers_streams_and_drops_upgrades(gateway: Server) -> None:
    with proxy(gateway.url) as port:
        findings = {each.subject: each for each in check_running_server(f"http://127.0.0.1:{port}", KEY)}
    assert findings["Streams"].state is State.WARN and "proxy_buffering" in findings["Streams"].remedy
    assert findings["WebSocket"].state is State.FAIL and "Upgrade" in findings["WebSocket"].remedy


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


def other_server() -> contextlib.AbstractContextManager[int]:
    class OtherServer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None: ...

    return answering(OtherServer)


def proxy(upstream: str) -> contextlib.AbstractContextManager[int]:
    """Return a proxy that buffers each response completely and does not forward upgrades."""

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


def test_doctor_reports_reachability_and_login_of_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        for url, state, text in (
            (server.url, State.OK, "in the Redis server"),
            (server.url.replace("secret", "wrong"), State.FAIL, "rejects the login"),
            ("redis://127.0.0.1:1", State.WARN, "not reachable"),
            ("http://127.0.0.1", State.FAIL, "not a URL"),
        ):
            finding = finding_of(check_settings(EngineConfig(), ServerConfig(port=0, redis=url)), "Conversations")
            assert finding.state is state and text in finding.fact
            assert "secret" not in finding.fact and "wrong" not in finding.fact
        assert server.admin.keys("*") == []  # checks change nothing


def findings_by_subject(**store: object) -> dict[str, Finding]:
    config = ServerConfig(port=0, **store)  # type: ignore[arg-type]
    return {each.subject: each for each in check_settings(EngineConfig(), config)}


def admin_findings(server: RedisServer) -> list[Finding]:
    config = ServerConfig(port=0, redis=f"redis://admin:any@127.0.0.1:{server.port}/0")
    return list(check_settings(EngineConfig(), config))


def admin_findings_by_subject(server: RedisServer) -> dict[str, Finding]:
    return {each.subject: each for each in admin_findings(server)}


def bus_findings(url: str) -> dict[str, Finding]:
    return {each.subject: each for each in check_bus(url)}


def register_worker(server: RedisServer, name: str) -> None:
    model_info = ModelInfo(name="m", digest="00", vocab_size=10, max_model_len=8, dtype="float32", attention="cpu")
    status = WorkerStatus(
        id=new_id(name), name=name, numerics="", model_info=model_info, health=EngineHealth(ready=True)
    )
    server.admin.sadd(WORKERS, status.id)
    server.admin.set(worker_key(status.id), msgspec.msgpack.encode(status))


def test_doctor_reports_login_rights_and_workers_of_the_bus(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        server.admin.sadd(WORKERS, "gone.00")  # without a lease
        for url, text in (
            (server.url.replace("secret", "wrong"), "rejects the login"),
            ("redis://127.0.0.1:1", "not reachable"),
            ("http://127.0.0.1", "not a URL"),
        ):
            found = bus_findings(url)
            assert found.keys() == {"Bus"} and found["Bus"].state is State.FAIL and text in found["Bus"].fact
        server.admin.acl_setuser(
            "reader", enabled=True, passwords=["+x"], keys=["chatcache:*"], categories=["+@read", "+@connection"]
        )
        reader = bus_findings(f"redis://reader:x@127.0.0.1:{server.port}/0")["Bus"]
        assert reader.state is State.FAIL and "the user may not use it" in reader.fact and "xadd" in reader.fact
        assert [each.state for each in check_bus(server.url)] == [State.OK, State.WARN]
        for name in ("gpu-1", "gpu-2"):
            register_worker(server, name)
        assert bus_findings(server.url)["Workers"] == Finding("Workers", State.OK, "2 on the bus: gpu-1, gpu-2")
        register_worker(server, "gpu-1")
        assert "a name is repeated" in bus_findings(server.url)["Workers"].fact
        assert not server.admin.keys("chatcache:bus:doctor:*")
        shown = CliRunner().invoke(
            app, ["doctor", "--port", "0", "--db", str(tmp_path / "chat.db"), "--bus", server.url]
        )
        assert "3 on the bus" in shown.output and "secret" not in shown.output


def test_untrusted_certificate_of_redis_is_reported_with_a_remedy(tmp_path: Path) -> None:
    settings, port, certificate = tls_settings(tmp_path)
    with redis_server(tmp_path / "redis", *settings):
        url = f"rediss://chatcache:secret@127.0.0.1:{port}/0"
        for given, remedy in (
            (url, "trust its authority with &ssl_ca_certs=FILE in the URL"),
            (
                f"{url.replace('127.0.0.1', 'localhost')}?ssl_ca_certs={certificate}",
                "use a host name or address of its",
            ),
        ):
            finding = finding_of(check_settings(EngineConfig(), ServerConfig(port=0, redis=given)), "Conversations")
            assert finding.state is State.WARN and remedy in finding.remedy
            with pytest.raises(StoreUnavailableError, match="CERTIFICATE_VERIFY_FAILED") as caught:
                check_redis(given)
            assert remedy in caught.value.message and "correct the URL" not in caught.value.message
        check_redis(f"{url}?ssl_ca_certs={certificate}")


def test_doctor_reports_durability_and_permissions_of_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", appendfsync="always") as server:
        restricted = findings_by_subject(redis=server.url)
        assert restricted["Redis user"].state is State.OK
        assert (
            restricted["Redis"].state is State.OK
        )  # Redis 7.0 hides the settings from this user, newer versions do not
        admin = admin_findings_by_subject(server)
        assert admin["Redis user"].state is State.WARN
        assert all(may in admin["Redis user"].fact for may in ("administer", "scripts", "other programs' keys"))
        assert "a power failure loses nothing" in admin["Redis"].fact
        assert "Redis channels" not in {*restricted, *admin}
        server.admin.acl_setuser(
            "mute", enabled=True, nopass=True, keys=["chatcache:*"], categories=["+@all", "-@dangerous"], reset=True
        )
        mute = findings_by_subject(redis=f"redis://mute:x@127.0.0.1:{server.port}/0")["Redis channels"]
        assert mute.state is State.FAIL and "&chatcache:*" in mute.remedy
        server.admin.config_set("appendfsync", "everysec")
        assert "last second" in admin_findings_by_subject(server)["Redis"].fact
        server.admin.config_set("appendonly", "no")
        assert admin_findings_by_subject(server)["Redis"].state is State.WARN
        server.admin.config_set("maxmemory-policy", "allkeys-lru")
        assert any("evicted" in each.fact for each in admin_findings(server))


def make_key(config: ServerConfig, *, revoked: bool = False) -> None:
    async def run() -> None:
        async with open_keys(config) as keys:
            _, record = new_key("acme")
            await keys.create(record)
            if revoked:
                await keys.revoke(record.id, 1.0)

    asyncio.run(run())


def test_doctor_warns_of_a_reachable_server_without_keys(tmp_path: Path) -> None:
    db = str(tmp_path / "chat.db")
    assert findings_by_subject(db=db)["Keys"].state is State.OK
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.test"):
        config = ServerConfig(port=0, db=db, host=host)
        finding = next(each for each in check_settings(EngineConfig(), config) if each.subject == "Keys")
        assert finding.state is State.WARN and "keys create" in finding.remedy
    assert findings_by_subject(db=db, host="0.0.0.0", api_keys=("sk-12345678",))["Keys"].state is State.OK
    make_key(ServerConfig(db=db))
    make_key(ServerConfig(db=db), revoked=True)
    closed = findings_by_subject(db=db, host="0.0.0.0")["Keys"]
    assert closed.state is State.OK and "2 in the store, 1 of them revoked" in closed.fact
    with redis_server(tmp_path / "redis") as server:
        assert findings_by_subject(redis=server.url, host="0.0.0.0")["Keys"].state is State.WARN
        make_key(ServerConfig(redis=server.url))
        assert "1 in the store" in findings_by_subject(redis=server.url, host="0.0.0.0")["Keys"].fact


def test_doctor_warns_if_a_copy_does_not_fit_the_disk(tmp_path: Path) -> None:
    assert check_disk_space(tmp_path, 2**10).state is State.OK
    finding = check_disk_space(tmp_path, 2**60)
    assert finding.state is State.WARN and "a copy takes" in finding.fact
