"""The functions of `msgspec.structs` that the engine uses."""

from __future__ import annotations

import dataclasses
from typing import Any

replace = dataclasses.replace


def asdict(struct: Any) -> dict[str, Any]:
    """Return the fields by name, without converting their values."""
    return {field.name: getattr(struct, field.name) for field in dataclasses.fields(struct)}


def force_setattr(struct: Any, name: str, value: Any) -> None:
    """Set a field of a frozen struct."""
    setattr(struct, name, value)
