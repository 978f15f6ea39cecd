"""A server whose store has keys: of two users of one tenant, of another tenant, an administrator's, a revoked one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from chatcache.auth import KeyRecord, new_key
from chatcache.config import ServerConfig
from chatcache.storage.open import open_keys
from tests.gateway.serving import Server

Headers = dict[str, str]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Held:
    """A key in somebody's hand."""

    key: str
    record: KeyRecord

    @property
    def bearer(self) -> Headers:
        return {"authorization": f"Bearer {self.key}"}


def give(config: ServerConfig, tenant: str, user: str = "", **fields: Any) -> Held:
    """As `chatcache keys create`, in a process of its own or not."""

    async def create() -> Held:
        key, record = new_key(tenant, user, **fields)
        async with open_keys(config) as keys:
            await keys.create(record)
        return Held(key, record)

    return _run(create())


def take_away(config: ServerConfig, held: Held) -> None:
    """As `chatcache keys revoke`."""

    async def revoke() -> None:
        async with open_keys(config) as keys:
            await keys.revoke(held.record.id, time.time())

    _run(revoke())


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """On a thread of its own: the caller's may have a loop already (Playwright's)."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, work).result()


@dataclass
class Keyed:
    """Who there is. `gone` was `ann`'s other key."""

    server: Server
    ann: Held
    bob: Held
    other: Held
    admin: Held
    gone: Held

    def give(self, tenant: str, user: str = "", **fields: Any) -> Held:
        """One more key, known to the server at once."""
        held = give(self.server.config, tenant, user, **fields)
        self.server.call(self.server.gateway.key_cache.refresh())
        return held

    def take_away(self, held: Held) -> None:
        """Revoke a key; the server will find out."""
        take_away(self.server.config, held)

    def session_of(self, held: Held) -> Headers:
        """What a browser on this server's page sends."""
        status, headers, _ = self.server.request("POST", "/v1/session", headers=held.bearer)
        assert status == 200
        return {"cookie": headers["set-cookie"].partition(";")[0], "origin": self.server.url}


@contextmanager
def keyed(folder: Path, **settings: Any) -> Iterator[Keyed]:
    config = ServerConfig(**{"db": str(folder / "keyed.db"), "sse_keep_alive_interval_s": 0, **settings})
    ann, bob, other = give(config, "acme", "ann"), give(config, "acme", "bob"), give(config, "other")
    admin, gone = give(config, "ops", is_admin=True), give(config, "acme", "ann")
    take_away(config, gone)
    with Server(config) as server:
        yield Keyed(server.wait_ready(), ann, bob, other, admin, gone)
