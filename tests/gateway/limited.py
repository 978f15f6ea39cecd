"""A server whose keys have limits, on a simulated clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from chatcache.config import ServerConfig
from chatcache.gateway.auth.principal import KeyLimits
from tests.gateway.clocks import Clock
from tests.gateway.keyed import Headers, Held, give
from tests.gateway.serving import Server


@dataclass
class LimitedServer(Server):
    """`held` maps tenant names to keys."""

    held: Mapping[str, Held] = field(default_factory=dict)

    def bearer(self, tenant: str) -> Headers:
        return self.held[tenant].bearer


def keys_with(db: str, limits: Mapping[str, KeyLimits]) -> dict[str, Held]:
    """Store a key with these limits for each tenant."""
    config = ServerConfig(db=db)
    return {tenant: give(config, tenant, **asdict(most)) for tenant, most in limits.items()}


@contextmanager
def limited_server(db: str, clock: Clock, held: Mapping[str, Held], **settings: Any) -> Iterator[LimitedServer]:
    config = ServerConfig(db=db, disconnect_grace_period_s=0.2, sse_keep_alive_interval_s=0)
    with LimitedServer(config, held=held, **settings) as server:
        server.gateway.limiter.clock_ns = clock.now_ns
        server.gateway.limiter.usage.wall_s = clock.wall_s
        yield server.wait_ready()  # type: ignore[misc]
        server.runner.delay_s = 0
        server.wait_idle()
