"""Reading settings: sizes with units, and chatcache.toml. Precedence is flag > environment > file > default.

The first two are typer's doing; the file becomes click's `default_map`. Nothing else in the house reads either.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chatcache.errors import InvalidRequest

FILE_NAME = "chatcache.toml"
MAX_FILE_BYTES = 1024 * 1024

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def parse_size(text: str | int, *, low: int = 0, high: int = 2**50) -> int:
    """Bytes of "2GiB", "512 MB", "1.5g" or "1048576", between `low` and `high`.

    Raises: InvalidRequest saying what was wrong and what is allowed.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise InvalidRequest(f"{text!r} is not a size; write bytes, or a number with kB, MB, GB, KiB, MiB, GiB")
    num_bytes = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    if not low <= num_bytes <= high:
        raise InvalidRequest(f"{text} is not between {format_size(low)} and {format_size(high)}")
    return num_bytes


def format_size(num_bytes: float) -> str:
    """ "2 GiB", "1.5 MiB", "17 B"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def read_file(path: Path) -> dict[str, Any]:
    """Read settings named like the flags ("kv-memory" or "kv_memory"); a missing file is an empty one.

    Raises: InvalidRequest naming the file, for what is not flat TOML.
    """
    if not path.exists():
        return {}
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InvalidRequest(f"{path}: larger than {format_size(MAX_FILE_BYTES)}")
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: {error}") from None
    for name, value in settings.items():
        if isinstance(value, dict):
            raise InvalidRequest(f"{path}: [{name}] is a table; settings stand at the top level, named like the flags")
    return {name.replace("-", "_"): value for name, value in settings.items()}


def per_command(settings: Mapping[str, Any], commands: Mapping[str, Iterable[str]], path: Path) -> dict[str, Any]:
    """Give each command the settings it has a flag for.

    Raises: InvalidRequest for a name that no command knows.
    """
    known = {name for flags in commands.values() for name in flags}
    for name in settings:
        if name not in known:
            raise InvalidRequest(f"{path}: unknown setting {name!r}")
    return {
        command: {name: settings[name] for name in flags if name in settings} for command, flags in commands.items()
    }


def misspelt(names: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """Of `names` those that nobody knows and that look like a known one, and which: the ends of variables' names."""
    choices = sorted(set(known))
    close = {name: difflib.get_close_matches(name, choices, 1, cutoff=0.7) for name in names if name not in choices}
    return {name: found[0] for name, found in close.items() if found}
