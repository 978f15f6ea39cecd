"""The store fixtures."""

from __future__ import annotations

from tests.support.stores import empty_redis, running_redis, store

__all__ = ["empty_redis", "running_redis", "store"]
