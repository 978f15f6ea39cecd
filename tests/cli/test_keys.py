"""`chatcache keys` and `chatcache db assign-owner`, on either store, with a running server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from chatcache.cli.main import app
from chatcache.config import ServerConfig
from chatcache.errors import ChatcacheError
from chatcache.storage import redis_client
from chatcache.storage.sqlite import SqliteStore
from tests.gateway.serving import Server, wait_until
from tests.support.redis_servers import RedisServer, redis_server

PATIENCE_S = 60.0


def call(*args: str, group: str = "keys") -> Result:
    """Run a command in a thread without an event loop."""
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(CliRunner().invoke, app, [group, *args], env={"COLUMNS": "200"}).result()
    assert result.exception is None or isinstance(result.exception, SystemExit | ChatcacheError), result.exception
    return result


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["--db", "--redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    if request.param == "--db":
        return "--db", str(tmp_path / "chat.db")
    monkeypatch.setattr(redis_client, "TIMEOUT_S", redis_client.SLOW_TIMEOUT_S)  # on a busy machine Redis is slow
    server: RedisServer = request.getfixturevalue("redis")
    server.admin.flushall()
    return "--redis", server.url


def store_config(store: tuple[str, str]) -> ServerConfig:
    return ServerConfig(**{store[0].removeprefix("--"): store[1]})  # type: ignore[arg-type]


@pytest.mark.slow
def test_created_key_is_printed_once_and_accepted_until_revoked(store: tuple[str, str]) -> None:
    with Server(store_config(store)) as server:
        server.wait_ready()

        def status(key: str) -> int:
            return server.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})[0]

        created = call("create", "--tenant", "acme", "--user", "ann", "--name", "laptop", *store)
        assert created.exit_code == 0
        key = created.stdout.strip()
        assert key.startswith("cck_") and key not in created.stderr and "acme/ann" in created.stderr
        wait_until(lambda: server.request("GET", "/v1/models")[0] == 401, "the server to close", PATIENCE_S)
        assert status(key) == 200
        shown = [json.loads(line) for line in call("list", "--json", *store).stdout.splitlines()]
        assert [(each["tenant"], each["user"], each["name"]) for each in shown] == [("acme", "ann", "laptop")]
        for listing in (call("list", *store).stdout, json.dumps(shown)):
            assert key not in listing and key.split("_", 2)[2] not in listing
            assert hashlib.sha256(key.encode()).hexdigest() not in listing
        assert call("revoke", shown[0]["id"], *store).exit_code == 0
        wait_until(lambda: status(key) == 401, "the key to be refused", PATIENCE_S)


def test_list_without_keys_reports_an_open_server(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    asyncio.run(SqliteStore(str(path), server_may_run=True).close())
    assert call("list", "--db", str(path)).stdout.startswith("There are no keys: the server is open")
    assert call("list", "--json", "--db", str(path)).stdout == ""


def test_created_key_is_stored_as_a_digest_only(tmp_path: Path) -> None:
    key = call("create", "--tenant", "acme", "--db", str(tmp_path / "chat.db")).stdout.strip()
    secret = key.split("_", 2)[2].encode()
    assert not [path.name for path in tmp_path.iterdir() if secret in path.read_bytes()]
    with sqlite3.connect(tmp_path / "chat.db") as db:
        assert db.execute("SELECT digest FROM keys").fetchall() == [(hashlib.sha256(key.encode()).digest(),)]
    db.close()


def test_create_in_a_new_file_names_the_file_and_the_option_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    for flags in ([], ["--json"]):
        path.unlink(missing_ok=True)
        result = call("create", "--tenant", "acme", "--db", str(path), *flags)
        assert f"{path} did not exist and was created. Start the server with --db {path}" in result.stderr
    assert "did not exist" not in call("create", "--tenant", "acme", "--db", str(path)).stderr


def test_list_shows_limits_and_revocation(store: tuple[str, str]) -> None:
    limits = ["--requests-per-minute", "60", "--tokens-per-minute", "7000", "--max-concurrent", "2"]
    created = json.loads(
        call("create", "--tenant", "acme", "--admin", *limits, "--tokens-per-day", "90000", "--json", *store).stdout
    )
    listed = json.loads(call("list", "--json", *store).stdout)
    assert {**listed, "key": created["key"]} == created and listed["is_admin"] is True
    assert [listed[name] for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent")] == [60, 7000, 2]
    table = call("list", *store).stdout
    assert "60 requests/min, 7,000 tokens/min, 2 at once, 90,000 tokens/day" in table and "admin" in table
    call("revoke", created["id"], *store)
    assert "none: revoked" in call("list", *store).stdout


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["create"], "--tenant"),
        (["create", "--tenant", "a/b"], "--tenant"),
        (["create", "--tenant", "a", "--user", "a b"], "--user"),
        (["create", "--tenant", "a", "--max-concurrent", "0"], "--max-concurrent"),
        (["create", "--tenant", "a", "--tokens-per-day", "9" * 20], "--tokens-per-day"),
        (["create", "--tenant", "a", "--db", ":memory:"], "--db"),
    ],
)
def test_create_refuses_invalid_values_by_flag(tmp_path: Path, args: list[str], hint: str) -> None:
    result = call(*args[:1], "--db", str(tmp_path / "chat.db"), *args[1:])
    assert result.exit_code == 2 and hint in result.stderr
    assert not (tmp_path / "chat.db").exists()


def test_list_and_revoke_create_no_database(tmp_path: Path) -> None:
    for args in (["list"], ["revoke", "key_x"]):
        result = call(*args, "--db", str(tmp_path / "none.db"))
        assert isinstance(result.exception, ChatcacheError) and "none.db" in result.exception.message
    assert not (tmp_path / "none.db").exists()
    call("create", "--tenant", "acme", "--db", str(tmp_path / "chat.db"))
    result = call("revoke", "key_x", "--db", str(tmp_path / "chat.db"))
    assert isinstance(result.exception, ChatcacheError) and "key_x" in result.exception.message


def test_keys_help_explains_access_and_options() -> None:
    assert "open until it has a key" in " ".join(call("--help").stdout.split())
    shown = " ".join(call("create", "--help").stdout.split())
    for word in ("--tenant", "--user", "--admin", "--requests-per-minute", "--json", "SHA-256", "Example"):
        assert word in shown
    assert shown.count("1 to 64 of A-Z a-z 0-9 _ . -") == 3
    assert "5 s" in call("revoke", "--help").stdout


def test_keys_report_an_unreachable_redis(tmp_path: Path) -> None:
    for args in (["list"], ["create", "--tenant", "acme"]):
        result = call(*args, "--redis", "redis://127.0.0.1:1/0")
        assert isinstance(result.exception, ChatcacheError) and "does not answer" in result.exception.message
        assert "start it, or correct the URL" in result.exception.message and result.stderr == "", "one line, by main()"
        assert "cck_" not in result.stdout, "a key that is stored nowhere is not shown"


def test_assign_owner_makes_conversations_without_owner_readable(store: tuple[str, str]) -> None:
    """The first key makes earlier conversations unreadable until an owner is assigned."""
    with Server(store_config(store)) as server:
        server.wait_ready()
        conversation = server.post("/v1/responses", input="Hi", max_output_tokens=2)[2]["conversation"]["id"]
        early = call("assign-owner", "--tenant", "acme", *store, group="db")
        assert isinstance(early.exception, ChatcacheError)
        assert "acme has no key" in early.exception.message and "keys create --tenant acme" in early.exception.message
        assert server.request("GET", f"/v1/conversations/{conversation}")[0] == 200
        created = call("create", "--tenant", "acme", "--user", "ann", *store)
        assert "`chatcache db assign-owner --tenant acme --user ann`" in created.stderr
        bearer = {"authorization": f"Bearer {created.stdout.strip()}"}
        wait_until(lambda: server.request("GET", "/v1/models")[0] == 401, "the server to close", PATIENCE_S)
        assert server.request("GET", f"/v1/conversations/{conversation}", headers=bearer)[0] == 404
        for count in (1, 0):
            assigned = call("assign-owner", "--tenant", "acme", "--user", "ann", *store, group="db")
            assert f"{count} conversations assigned to acme/ann" in assigned.stdout
        assert server.request("GET", f"/v1/conversations/{conversation}", headers=bearer)[0] == 200
        body = {"input": "And?", "conversation": conversation, "max_output_tokens": 2}
        assert server.request("POST", "/v1/responses", body, bearer)[0] == 200
        assert "assign-owner" not in call("create", "--tenant", "acme", *store).stderr


def test_first_key_of_an_empty_store_mentions_no_conversations(store: tuple[str, str]) -> None:
    stderr = call("create", "--tenant", "acme", *store).stderr
    assert "every client needs a key" in stderr and "assign-owner" not in stderr


def test_assign_owner_creates_no_database(tmp_path: Path) -> None:
    result = call("assign-owner", "--tenant", "acme", "--db", str(tmp_path / "none.db"), group="db")
    assert isinstance(result.exception, ChatcacheError) and not (tmp_path / "none.db").exists()
    assert call("assign-owner", "--tenant", "a b", "--db", str(tmp_path / "none.db"), group="db").exit_code == 2
