"""Fixture: the store that gateways share and that outlives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.kept import KINDS, keeping
from tests.support.redis_servers import RedisServer


@pytest.fixture(params=KINDS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer | str]:
    with keeping(request.param, tmp_path) as store:
        yield store
