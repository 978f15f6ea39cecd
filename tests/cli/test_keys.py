"""`chatcache keys` as one calls it, on either store, beside a server that runs."""

from __future__ import annotations

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
from tests.gateway.serving import Server, wait_until
from tests.support.redis_servers import RedisServer, redis_server

PATIENCE_S = 60.0


def call(*args: str, group: str = "keys") -> Result:
    """On a thread of its own, which has no event loop yet."""
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(CliRunner().invoke, app, [group, *args], env={"COLUMNS": "200"}).result()
    assert result.exception is None or isinstance(result.exception, SystemExit | ChatcacheError), result.exception
    return result


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["--db", "--redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    if request.param == "--db":
        return "--db", str(tmp_path / "chat.db")
    server: RedisServer = request.getfixturevalue("redis")
    server.admin.flushall()
    return "--redis", server.url


def config_of(place: tuple[str, str]) -> ServerConfig:
    return ServerConfig(**{place[0].removeprefix("--"): place[1]})  # type: ignore[arg-type]


def test_a_key_is_shown_once_and_opens_the_running_server_until_it_is_revoked(place: tuple[str, str]) -> None:
    with Server(config_of(place)) as server:
        server.wait_ready()

        def status(key: str) -> int:
            return server.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})[0]

        made = call("create", "--tenant", "acme", "--user", "ann", "--name", "laptop", *place)
        assert made.exit_code == 0
        key = made.stdout.strip()
        assert key.startswith("cck_") and key not in made.stderr and "acme/ann" in made.stderr
        wait_until(lambda: server.request("GET", "/v1/models")[0] == 401, "the server to close", PATIENCE_S)
        assert status(key) == 200
        shown = [json.loads(line) for line in call("list", "--json", *place).stdout.splitlines()]
        assert [(each["tenant"], each["user"], each["name"]) for each in shown] == [("acme", "ann", "laptop")]
        for listing in (call("list", *place).stdout, json.dumps(shown)):
            assert key not in listing and key.rpartition("_")[2] not in listing
            assert hashlib.sha256(key.encode()).hexdigest() not in listing
        assert call("revoke", shown[0]["id"], *place).exit_code == 0
        wait_until(lambda: status(key) == 401, "the key to be refused", PATIENCE_S)


def test_the_key_is_nowhere_in_the_files(tmp_path: Path) -> None:
    key = call("create", "--tenant", "acme", "--db", str(tmp_path / "chat.db")).stdout.strip()
    secret = key.rpartition("_")[2].encode()
    assert not [path.name for path in tmp_path.iterdir() if secret in path.read_bytes()]
    with sqlite3.connect(tmp_path / "chat.db") as db:
        assert db.execute("SELECT digest FROM keys").fetchall() == [(hashlib.sha256(key.encode()).digest(),)]
    db.close()


def test_limits_are_kept_and_listed(place: tuple[str, str]) -> None:
    limits = ["--requests-per-minute", "60", "--tokens-per-minute", "7000", "--max-concurrent", "2"]
    made = json.loads(
        call("create", "--tenant", "acme", "--admin", *limits, "--tokens-per-day", "90000", "--json", *place).stdout
    )
    listed = json.loads(call("list", "--json", *place).stdout)
    assert {**listed, "key": made["key"]} == made and listed["is_admin"] is True
    assert [listed[name] for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent")] == [60, 7000, 2]
    table = call("list", *place).stdout
    assert "60 requests/min, 7,000 tokens/min, 2 at once, 90,000 tokens/day" in table and "admin" in table
    call("revoke", made["id"], *place)
    assert "nothing, since" in call("list", *place).stdout


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["create"], "--tenant"),
        (["create", "--tenant", "a/b"], "--tenant"),
        (["create", "--tenant", "a", "--user", "a b"], "--user"),
        (["create", "--tenant", "a", "--max-concurrent", "0"], "--max-concurrent"),
        (["create", "--tenant", "a", "--tokens-per-day", "9" * 20], "--tokens-per-day"),
    ],
)
def test_what_cannot_be_is_refused_by_its_flag(tmp_path: Path, args: list[str], hint: str) -> None:
    result = call(*args, "--db", str(tmp_path / "chat.db"))
    assert result.exit_code == 2 and hint in result.stderr
    assert not (tmp_path / "chat.db").exists()


def test_where_there_is_nothing_nothing_is_made(tmp_path: Path) -> None:
    for args in (["list"], ["revoke", "key_x"]):
        result = call(*args, "--db", str(tmp_path / "none.db"))
        assert isinstance(result.exception, ChatcacheError) and "none.db" in result.exception.message
    assert not (tmp_path / "none.db").exists()
    call("create", "--tenant", "acme", "--db", str(tmp_path / "chat.db"))
    result = call("revoke", "key_x", "--db", str(tmp_path / "chat.db"))
    assert isinstance(result.exception, ChatcacheError) and "key_x" in result.exception.message


def test_the_help_teaches() -> None:
    assert "open until it has a key" in " ".join(call("--help").stdout.split())
    shown = " ".join(call("create", "--help").stdout.split())
    for word in ("--tenant", "--user", "--admin", "--requests-per-minute", "--json", "SHA-256", "Example"):
        assert word in shown
    assert shown.count("1 to 64 of A-Z a-z 0-9 _ . -") == 3
    assert "5 s" in call("revoke", "--help").stdout


def test_a_redis_that_is_not_there_is_said(tmp_path: Path) -> None:
    for args in (["list"], ["create", "--tenant", "acme"]):
        result = call(*args, "--redis", "redis://127.0.0.1:1/0")
        assert isinstance(result.exception, ChatcacheError) and "does not answer" in result.exception.message
        assert "cck_" not in result.stdout, "a key that is stored nowhere is not shown"


def test_what_nobody_owns_is_handed_over(place: tuple[str, str]) -> None:
    """Beside a server that runs: said while it was open, lost to all by its first key, and then somebody's."""
    with Server(config_of(place)) as server:
        server.wait_ready()
        said = server.post("/v1/responses", input="Hi", max_output_tokens=2)[2]["conversation"]["id"]
        early = call("assign-owner", "--tenant", "acme", *place, group="db")
        assert isinstance(early.exception, ChatcacheError)
        assert "acme has no key" in early.exception.message and "keys create --tenant acme" in early.exception.message
        assert server.request("GET", f"/v1/conversations/{said}")[0] == 200
        made = call("create", "--tenant", "acme", "--user", "ann", *place)
        assert "`chatcache db assign-owner --tenant acme --user ann`" in made.stderr
        bearer = {"authorization": f"Bearer {made.stdout.strip()}"}
        wait_until(lambda: server.request("GET", "/v1/models")[0] == 401, "the server to close", PATIENCE_S)
        assert server.request("GET", f"/v1/conversations/{said}", headers=bearer)[0] == 404
        for count in (1, 0):
            handed = call("assign-owner", "--tenant", "acme", "--user", "ann", *place, group="db")
            assert f"{count} conversations of nobody are acme/ann's now" in handed.stdout
        assert server.request("GET", f"/v1/conversations/{said}", headers=bearer)[0] == 200
        body = {"input": "And?", "conversation": said, "max_output_tokens": 2}
        assert server.request("POST", "/v1/responses", body, bearer)[0] == 200
        assert "belongs to nobody" not in call("create", "--tenant", "acme", *place).stderr


def test_a_first_key_of_an_empty_store_speaks_of_nothing_to_claim(place: tuple[str, str]) -> None:
    told = call("create", "--tenant", "acme", *place).stderr
    assert "every client needs a key" in told and "assign-owner" not in told


def test_nothing_is_claimed_where_there_is_no_store(tmp_path: Path) -> None:
    result = call("assign-owner", "--tenant", "acme", "--db", str(tmp_path / "none.db"), group="db")
    assert isinstance(result.exception, ChatcacheError) and not (tmp_path / "none.db").exists()
    assert call("assign-owner", "--tenant", "a b", "--db", str(tmp_path / "none.db"), group="db").exit_code == 2
