"""The store as an operator sees it: what a Redis server keeps, what its user may, and who is let in."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from chatcache.chat.redis_rights import Rights
from chatcache.cli.doctor.findings import Finding, bad, good, warning
from chatcache.config import ServerConfig

WHAT = "Redis"
_KEPT = {"always": "synced at every write: survives a power cut", "everysec": "a power cut takes the last second"}


def redis_findings(rights: Rights) -> Iterator[Finding]:
    yield _kept(rights)
    policy = rights.settings.get("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        yield bad(WHAT, f"maxmemory-policy {policy}: it forgets conversations when it is full", "set it to noeviction")
    rest = {
        "administer it": rights.may_administer,
        "run scripts": rights.may_script,
        "see others' keys": rights.sees_all_keys,
    }
    too_much = [what for what, may in rest.items() if may]
    if too_much:
        remedy = "`chatcache redis-user FOLDER` makes a user for chatcache alone"
        yield warning("Redis user", f"may {', '.join(too_much)}, which nothing here needs", remedy)
    else:
        yield good("Redis user", "for chatcache's keys alone, without scripts or administration")


def _kept(rights: Rights) -> Finding:
    if rights.has_aof is None:
        return good(
            WHAT,
            "this user cannot see the settings; see to it that it has: appendonly yes, maxmemory-policy noeviction",
        )
    if not rights.has_aof:
        return warning(WHAT, "no append-only file: its death takes what came since its last snapshot", "appendonly yes")
    sync = rights.settings.get("appendfsync", "")
    return good(WHAT, f"has an append-only file{f', {_KEPT[sync]}' if sync in _KEPT else ''}")


def keys_finding(config: ServerConfig, num_keys: int, num_revoked: int = 0) -> Finding:
    """Who is let in with these settings. One key, even a revoked one, closes a server."""
    what = "Keys"
    if num_keys or config.api_keys:
        revoked = f", {num_revoked} of them revoked" if num_revoked else ""
        return good(what, f"{num_keys} in the store{revoked}, {len(config.api_keys)} by --api-key: nobody else gets in")
    if _is_loopback(config.host):
        return good(what, f"none: whoever is on this machine gets in at {config.host}")
    remedy = "chatcache keys create --tenant NAME, or --api-key, before others can reach it"
    return warning(what, f"none: whoever reaches {config.host} gets in", remedy)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
