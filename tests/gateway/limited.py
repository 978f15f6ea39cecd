"""A server whose keys have limits, on a clock that the test turns."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from chatcache.config import ServerConfig
from chatcache.gateway import guard, principal
from chatcache.gateway.principal import Limits, Principal
from tests.gateway.clocks import Clock
from tests.gateway.serving import Server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def tenant_of_key(key: str) -> str:
    """What `--api-key` makes of it."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


@contextmanager
def limited_server(db: str, clock: Clock, keys: Mapping[str, Limits], **settings: Any) -> Iterator[Server]:
    """Serve so many tenants, one for each key, each with its limits."""
    limits = {tenant_of_key(key): most for key, most in keys.items()}
    original = principal.admit

    def admit(scope: Any, who: Any) -> None:
        original(scope, replace(who, limits=limits[who.tenant]) if isinstance(who, Principal) else who)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "admit", admit)
        with Server(ServerConfig(db=db, api_keys=tuple(keys), detach_ttl_s=0.2), **settings) as server:
            server.gateway.limiter.clock_ns = clock.now_ns
            server.gateway.limiter.usage.wall_s = clock.wall_s
            yield server.wait_ready()
            server.runner.delay_s = 0
            server.wait_idle()
