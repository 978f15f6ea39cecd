"""As much of msgspec as the engine below the bus needs, for machines that have torch but not msgspec.

Only `gpu_check.py` and bare test runs put this folder on the path, and only where the real one is missing. Structs are
dataclasses here: `frozen` gives them a hash but nothing refuses an assignment, `gc`, `tag` and the like mean nothing,
and nothing is encoded or decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, dataclass_transform


@dataclass_transform()
class Struct:
    """The base class: annotated names become fields, as in a dataclass."""

    def __init_subclass__(cls, *, frozen: bool = False, kw_only: bool = False, **_options: Any) -> None:
        super().__init_subclass__()
        dataclass(kw_only=kw_only, unsafe_hash=frozen)(cls)
