"""The part of msgspec that the engine needs, for machines that have torch but not msgspec.

Only `gpu_check.py` and test runs with `bare/pytest.ini` put this folder on the path, and only where msgspec is missing.
Structs are dataclasses here: `frozen` gives them a hash but does not prevent assignment, options such as `gc` and `tag`
are ignored, and nothing can be decoded.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, dataclass_transform

from msgspec import msgpack as msgpack


class Meta:
    """Limits of a field, which matter only to decoding."""

    def __init__(self, **_limits: Any) -> None:
        pass


@dataclass_transform()
class Struct:
    """The base class: annotated names become fields, as in a dataclass."""

    def __init_subclass__(
        cls, *, frozen: bool = False, kw_only: bool = False, eq: bool = True, **_options: Any
    ) -> None:
        super().__init_subclass__()
        for name in inspect.get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, (dict, list, set)):  # msgspec copies an empty one for each struct
                setattr(cls, name, field(default_factory=type(default)))
        dataclass(kw_only=kw_only, unsafe_hash=frozen, eq=eq)(cls)
