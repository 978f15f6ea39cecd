"""Changes of Triton's interpreter: a faster lookup of builtins, and products that do not depend on other rows."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


def cache_lookups(patch: pytest.MonkeyPatch) -> None:
    """Compute once what the interpreter computes for every operation: half of its time is spent on names and types."""
    _cache_builtins(patch)
    _cache_types(patch)


def _cache_builtins(patch: pytest.MonkeyPatch) -> None:
    """Find the names to patch only once; patch nothing again in the functions that a kernel calls."""
    names: dict[Any, list[str]] = {}
    patch_lang = interpreter._patch_lang

    def builtins_of(namespace: Any) -> list[str]:
        if namespace not in names:
            names[namespace] = [name for name, member in inspect.getmembers(namespace) if tl.core.is_builtin(member)]
        return names[namespace]

    def patch_builtin(namespace: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(namespace):
            member = getattr(namespace, name)
            if tl.core.is_builtin(member):  # not while the patch of an outer kernel is active
                interpreter._patch_attr(namespace, name, member, builder, scope)

    @cache
    def languages_of(function: Any) -> list[Any]:
        return [tl, *(tl.core for member in function.__globals__.values() if member is tl.core)]

    def patch_once(function: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages_of(function)):
            return patch_lang(function)
        return None  # called by a kernel, whose scope restores the names

    for namespace in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtins_of(namespace)  # before anything is patched
    patch.setattr(interpreter, "_patch_builtin", patch_builtin)
    patch.setattr(interpreter, "_patch_lang", patch_once)


def _cache_types(patch: pytest.MonkeyPatch) -> None:
    """Keep the numpy types, shapes and names of the types of tensors."""
    numpy_types: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    block_shapes: dict[tuple[Any, ...], Any] = {}
    shapes: dict[str, tuple[Any, Any]] = {}
    find_numpy_type, compare = interpreter._get_np_dtype, tl.core.tuple.__eq__
    make_block, make_tensor = tl.core.block_type.__init__, tl.core.tensor.__init__

    def numpy_type(of: Any) -> Any:
        if of.name not in numpy_types:
            numpy_types[of.name] = find_numpy_type(of)
        return numpy_types[of.name]

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key in blocks:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = blocks[key]
        else:
            make_block(self, element_ty, shape)
            self.shape = block_shapes.setdefault(key[1:], self.shape)
            blocks[key] = self.shape, self.numel, self.name

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[type.name]

    def are_equal(self: Any, other: Any) -> bool:
        return self is other or bool(compare(self, other))

    patch.setattr(interpreter, "_get_np_dtype", numpy_type)
    patch.setattr(tl.core.block_type, "__init__", init_block)
    patch.setattr(tl.core.tensor, "__init__", init_tensor)
    patch.setattr(tl.core.tuple, "__eq__", are_equal)


def multiply_rows_alone(patch: pytest.MonkeyPatch) -> None:
    """Make the interpreter add up each element of a product alone, instead of calling numpy's BLAS."""

    def create_dot(self: object, a: Any, b: Any, d: Any, *precision: object) -> Any:
        terms = a.data[..., :, None, :] * b.data.swapaxes(-1, -2)[..., None, :, :]
        return interpreter.TensorHandle(terms.sum(-1, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
