"""List the kernel variants that real models launch, to compile all of them without a GPU.

A module with kernels has a function `variants(arch)`, which yields them for a compute capability (90 for 9.0).
`trace_variants` records the launches of the module's own functions for tensors on the `meta` device, so types,
constants and options are those of real launches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32",
    torch.int16: "*i16", torch.uint8: "*u8", torch.int8: "*i8", torch.bool: "*i1", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel as it is compiled: argument types, constants, options such as num_warps.

    signature: every parameter in order ("constexpr" for constants). aligned: parameters that are multiples of 16; None
    for all pointers. wide: memory must be read and written 16 bytes per thread.
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any]
    aligned: tuple[str, ...] | None = None
    wide: bool = False

    @property
    def name(self) -> str:
        """Return a name that identifies the variant in a report."""
        types = "/".join(sorted({kind for kind in self.signature.values() if kind.startswith("*")}))
        facts = " ".join(f"{name}={value}" for name, value in self.constexprs.items())
        return f"{self.kernel.__module__}.{self.kernel.__name__} {types} {facts} {dict(self.options)}"


def trace_variants(call: Callable[[], object], *, wide: bool = False) -> Iterator[Variant]:
    """Yield a variant for each kernel that `call` would launch on `meta` tensors."""
    launches: list[Variant] = []
    with _recording(launches, wide):
        call()
    yield from launches


@contextmanager
def _recording(launches: list[Variant], wide: bool) -> Iterator[None]:
    """Record launches instead of running them."""
    launch = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        launches.append(specialize(kernel, args, given, wide=wide))

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch


def specialize(kernel: Any, args: tuple[Any, ...], given: dict[str, Any], *, wide: bool = False) -> Variant:
    """Return the variant that Triton would compile for a launch of `kernel`, a JITFunction."""
    options = {name: value for name, value in given.items() if name not in kernel.arg_names}
    bound = inspect.signature(kernel.fn).bind(*args, **{n: v for n, v in given.items() if n in kernel.arg_names})
    bound.apply_defaults()
    signature, constexprs, aligned = {}, {}, []
    for parameter in kernel.params:
        name, value = parameter.name, bound.arguments[parameter.name]
        free = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not free):
            signature[name], constexprs[name] = "constexpr", value
            continue
        signature[name] = _type_of(value)
        divisible = isinstance(value, Tensor | int) and _address(value) % 16 == 0
        if divisible and not free and not parameter.do_not_specialize_on_alignment:
            aligned.append(name)
    return Variant(kernel, signature, constexprs, options, tuple(aligned), wide)


def _address(value: Tensor | int) -> int:
    """Return an integer as is, and a tensor's byte offset in its memory."""
    return int(value.storage_offset()) * value.element_size() if isinstance(value, Tensor) else value


def _type_of(value: Any) -> str:
    """Return Triton's name of an argument's type."""
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a kernel takes no {type(value).__name__}")
