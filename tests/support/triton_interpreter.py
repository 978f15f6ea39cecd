"""Changes of Triton's interpreter: a faster lookup of builtins, and products that do not depend on other rows."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


def cache_builtin_lookup(patch: pytest.MonkeyPatch) -> None:
    """Make the interpreter find the names it patches only once: inspecting `triton.language` takes half of its time."""
    names: dict[Any, list[str]] = {}

    def builtins_of(namespace: Any) -> list[str]:
        if namespace not in names:
            names[namespace] = [name for name, member in inspect.getmembers(namespace) if tl.core.is_builtin(member)]
        return names[namespace]

    def patch_builtin(namespace: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(namespace):
            member = getattr(namespace, name)
            if tl.core.is_builtin(member):  # not while the patch of an outer kernel is active
                interpreter._patch_attr(namespace, name, member, builder, scope)

    for namespace in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtins_of(namespace)  # before anything is patched
    patch.setattr(interpreter, "_patch_builtin", patch_builtin)


def multiply_rows_alone(patch: pytest.MonkeyPatch) -> None:
    """Make the interpreter add up each element of a product alone, instead of calling numpy's BLAS."""

    def create_dot(self: object, a: Any, b: Any, d: Any, *precision: object) -> Any:
        terms = a.data[..., :, None, :] * b.data.swapaxes(-1, -2)[..., None, :, :]
        return interpreter.TensorHandle(terms.sum(-1, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
