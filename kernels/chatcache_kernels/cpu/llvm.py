"""LLVM's instructions in kernels: what the intrinsics of `vectors` and its neighbours are written with.

An intrinsic is a typing function, which returns a signature and a generator of code; these make the code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def instruction(function: Callable[..., Any]) -> Any:
    """Register a typing function that returns (signature, code generator) as callable from kernels."""
    return intrinsic(prefer_literal=True)(function)


def wide(lanes: int, element: ir.Type = F32) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def constant(lanes: int, value: float, element: ir.Type = F32) -> ir.Constant:
    return ir.Constant(wide(lanes, element), [value] * lanes)


def call(builder: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """Call an LLVM intrinsic by its full name."""
    function_type = ir.FunctionType(result, [a.type for a in args])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, function_type, name), args)


def splat(builder: Any, value: Any, lanes: int) -> Any:
    none = ir.Constant(wide(lanes, value.type), ir.Undefined)
    one = builder.insert_element(none, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, none, constant(lanes, 0, I32))


def element_pointer(builder: Any, pointer: Any, index: Any, element: ir.Type) -> Any:
    base = builder.bitcast(pointer, element.as_pointer())
    return builder.gep(base, [index], source_etype=element)
