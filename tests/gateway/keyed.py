"""A server with API keys: two users of a tenant, another tenant, an administrator."""

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
    """An API key and its record."""

    key: str
    record: KeyRecord

    @property
    def bearer(self) -> Headers:
        return {"authorization": f"Bearer {self.key}"}


def give(config: ServerConfig, tenant: str, user: str = "", **fields: Any) -> Held:
    """Create a key as `chatcache keys create` does."""

    async def create() -> Held:
        key, record = new_key(tenant, user, **fields)
        async with open_keys(config) as keys:
            await keys.create(record)
        return Held(key, record)

    return _run(create())


def take_away(config: ServerConfig, held: Held) -> None:
    """Revoke a key as `chatcache keys revoke` does."""

    async def revoke() -> None:
        async with open_keys(config) as keys:
            await keys.revoke(held.record.id, time.time())

    _run(revoke())


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run in a thread: the caller's may have an event loop already (Playwright's)."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, work).result()


@dataclass
class Keyed:
    """The server and its keys. `gone` is a revoked key of `ann`."""

    server: Server
    ann: Held
    bob: Held
    other: Held
    admin: Held
    gone: Held

    def give(self, tenant: str, user: str = "", **fields: Any) -> Held:
        """Create a key that the server knows at once."""
        held = give(self.server.config, tenant, user, **fields)
        self.server.call(self.server.gateway.key_cache.refresh())
        return held

    def take_away(self, held: Held) -> None:
        """Revoke a key; the server learns of it by polling."""
        take_away(self.server.config, held)

    def session_of(self, held: Held) -> Headers:
        """Return the headers that a browser on the server's page sends."""
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
