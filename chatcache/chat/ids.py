"""Ids that sort by the time they were made."""

from __future__ import annotations

import secrets
import time


def new_id(prefix: str, separator: str = "_") -> str:
    """Return `prefix_` + 12 hex digits of milliseconds since 1970 + 16 random ones."""
    return f"{prefix}{separator}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}"
