"""`chatcache doctor` and the store: what Redis keeps, what its user may, who is let in, room for a copy."""

from __future__ import annotations

import asyncio
from pathlib import Path

from chatcache.auth import new_key
from chatcache.cli import doctor as machine
from chatcache.cli.doctor import Finding, State, settings
from chatcache.config import EngineConfig, ServerConfig
from chatcache.storage.open import open_keys
from tests.support.redis_servers import RedisServer, redis_server


def told(**place: object) -> dict[str, Finding]:
    config = ServerConfig(port=0, **place)  # type: ignore[arg-type]
    return {each.what: each for each in settings(EngineConfig(), config)}


def all_of_admin(server: RedisServer) -> list[Finding]:
    config = ServerConfig(port=0, redis=f"redis://admin:any@127.0.0.1:{server.port}/0")
    return list(settings(EngineConfig(), config))


def of_admin(server: RedisServer) -> dict[str, Finding]:
    return {each.what: each for each in all_of_admin(server)}


def test_what_redis_keeps_and_what_its_user_may(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", appendfsync="always") as server:
        modest = told(redis=server.url)
        assert modest["Redis user"].state is State.GOOD
        assert modest["Redis"].state is State.GOOD  # of 7.0, which tells such a user nothing; or it is newer, and does
        admin = of_admin(server)
        assert admin["Redis user"].state is State.WARNING
        assert all(may in admin["Redis user"].found for may in ("administer", "scripts", "others' keys"))
        assert "survives a power cut" in admin["Redis"].found
        server.admin.config_set("appendfsync", "everysec")
        assert "last second" in of_admin(server)["Redis"].found
        server.admin.config_set("appendonly", "no")
        assert of_admin(server)["Redis"].state is State.WARNING
        server.admin.config_set("maxmemory-policy", "allkeys-lru")
        assert any("forgets" in each.found for each in all_of_admin(server))


def make_key(config: ServerConfig, *, revoked: bool = False) -> None:
    async def run() -> None:
        async with open_keys(config) as keys:
            _, record = new_key("acme")
            await keys.create(record)
            if revoked:
                await keys.revoke(record.id, 1.0)

    asyncio.run(run())


def test_who_is_let_in(tmp_path: Path) -> None:
    db = str(tmp_path / "chat.db")
    assert told(db=db)["Keys"].state is State.GOOD
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.test"):
        config = ServerConfig(port=0, db=db, host=host)
        finding = next(each for each in settings(EngineConfig(), config) if each.what == "Keys")
        assert finding.state is State.WARNING and "keys create" in finding.remedy
    assert told(db=db, host="0.0.0.0", api_keys=("sk-12345678",))["Keys"].state is State.GOOD
    make_key(ServerConfig(db=db))
    make_key(ServerConfig(db=db), revoked=True)
    closed = told(db=db, host="0.0.0.0")["Keys"]
    assert closed.state is State.GOOD and "2 in the store, 1 of them revoked" in closed.found
    with redis_server(tmp_path / "redis") as server:
        assert told(redis=server.url, host="0.0.0.0")["Keys"].state is State.WARNING
        make_key(ServerConfig(redis=server.url))
        assert "1 in the store" in told(redis=server.url, host="0.0.0.0")["Keys"].found


def test_there_must_be_room_for_a_copy(tmp_path: Path) -> None:
    assert machine.room_on_disk("Disk", tmp_path, 2**10).state is State.GOOD
    finding = machine.room_on_disk("Disk", tmp_path, 2**60)
    assert finding.state is State.WARNING and "a copy takes" in finding.found
