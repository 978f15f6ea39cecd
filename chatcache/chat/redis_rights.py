"""What a Redis server lets its user see and do, found out by asking for things that change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chatcache.chat.redis_link import Refusal, answers
from chatcache.chat.redis_rows import KEYS

_SETTINGS = ("appendonly", "appendfsync", "maxmemory-policy")
_FOREIGN = "a key that is none of chatcache's"


@dataclass(frozen=True, slots=True)
class Rights:
    """`settings` are empty for a user who may not see them. `has_aof`: None where nothing tells."""

    settings: dict[str, str]
    has_aof: bool | None
    may_script: bool
    sees_all_keys: bool
    num_keys: int

    @property
    def may_administer(self) -> bool:
        return bool(self.settings)


def look_around(url: str) -> Rights:
    """Raises: StoreUnavailable."""
    asked: list[tuple[str | int, ...]] = [("CONFIG", "GET", name) for name in _SETTINGS]
    asked += [("WAITAOF", 1, 0, 1000), ("EVAL", "return 1", 0), ("EXISTS", _FOREIGN), ("HLEN", KEYS)]
    *told, aof, script, foreign, num_keys = answers(url, asked)
    settings = {name: value for name, each in zip(_SETTINGS, told, strict=True) if (value := _setting(each))}
    return Rights(
        settings=settings,
        has_aof=settings["appendonly"] == "yes" if "appendonly" in settings else _has_aof(aof),
        may_script=not isinstance(script, Refusal),
        sees_all_keys=not isinstance(foreign, Refusal),
        num_keys=0 if isinstance(num_keys, Refusal) else int(num_keys),
    )


def _setting(told: Any) -> str:
    """The value in an answer to CONFIG GET, of either shape that redis-py gives it."""
    if isinstance(told, Refusal):
        return ""
    values = list(told.values()) if isinstance(told, dict) else list(told)[1:]
    value = values[0] if values else b""
    return value.decode() if isinstance(value, bytes) else str(value)


def _has_aof(waited: Any) -> bool | None:
    """WAITAOF, of Redis 7.2 and later, is for anybody, and fails where there is nothing to wait for."""
    if not isinstance(waited, Refusal):
        return True
    return False if "appendonly is disabled" in waited.reason else None
