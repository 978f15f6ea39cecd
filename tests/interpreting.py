"""Triton's interpreter, without looking through all of `triton.language` again whenever one kernel calls another."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


def remember_builtins(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter patch the same names as ever, found once: half of its time goes into finding them."""
    names: dict[Any, list[str]] = {}

    def found_in(place: Any) -> list[str]:
        if place not in names:
            names[place] = [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]
        return names[place]

    def patch_builtin(place: Any, builder: Any, scope: Any) -> None:
        for name in found_in(place):
            member = getattr(place, name)
            if tl.core.is_builtin(member):  # it is not while a caller's patch is in place
                interpreter._patch_attr(place, name, member, builder, scope)

    for place in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        found_in(place)  # before anything is patched
    patch.setattr(interpreter, "_patch_builtin", patch_builtin)
