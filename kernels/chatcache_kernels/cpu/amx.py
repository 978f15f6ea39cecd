"""AMX for numba: eight tile registers of 16 rows x 64 bytes, and a product of two of them (bf16 in, float32 out).

A tile of x holds 16 tokens x 32 inputs; a tile of weights 32 inputs x 16 outputs, two inputs side by side for each
output; a tile of sums 16 tokens x 16 outputs. Tile numbers are literals. Source: Intel's architecture manual, AMX.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types

from . import llvm
from .llvm import I8, instruction

TILE_ROWS, TILE_BYTES = 16, 1024
CONFIG_BYTES = 64


@cache
def has_amx() -> bool:
    """Tell whether this process may use tiles for bf16: the CPU has them and the system grants them."""
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    grant: Callable[[], bool] | None = getattr(torch.cpu, "_init_amx", None)  # asks the kernel, once per process
    return grant is not None and grant()


def tile_config(num_rows: tuple[int, ...]) -> bytes:
    """Return what `configure` reads: full rows of 64 bytes, and how many of them each tile has."""
    columns = b"".join((64).to_bytes(2, "little") for _ in num_rows)
    return bytes([1, 0]).ljust(16, b"\0") + columns.ljust(32, b"\0") + bytes(num_rows).ljust(16, b"\0")


def _tile(numbers: Any) -> list[Any]:
    return [ir.Constant(I8, number.literal_value) for number in numbers]


def _address(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I8.as_pointer())


@instruction
def configure(typing: Any, address: Any) -> Any:
    """configure(address): set up the tiles from the 64 bytes of a `tile_config`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        llvm.call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), _address(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@instruction
def release(typing: Any) -> Any:
    """release(): let go of the tiles, so that the system need not save them when threads change."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        llvm.call(builder, "llvm.x86.tilerelease", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


@instruction
def tile_clear(typing: Any, tile: Any) -> Any:
    """tile_clear(t): zeros."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        llvm.call(builder, "llvm.x86.tilezero", ir.VoidType(), *_tile((tile,)))
        return context.get_dummy_value()

    return types.void(tile), generate


@instruction
def tile_load(typing: Any, tile: Any, address: Any, stride: Any) -> Any:
    """tile_load(t, address, stride): read the rows, `stride` bytes apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _address(builder, args[1])
        llvm.call(builder, "llvm.x86.tileloadd64", ir.VoidType(), *_tile((tile,)), at, args[2])
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), generate


@instruction
def tile_store(typing: Any, tile: Any, address: Any, stride: Any) -> Any:
    """tile_store(t, address, stride): write the rows, `stride` bytes apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _address(builder, args[1])
        llvm.call(builder, "llvm.x86.tilestored64", ir.VoidType(), *_tile((tile,)), at, args[2])
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), generate


@instruction
def tile_dot(typing: Any, total: Any, x: Any, weight: Any) -> Any:
    """tile_dot(c, a, b): c += a @ b."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        llvm.call(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), *_tile((total, x, weight)))
        return context.get_dummy_value()

    return types.void(total, x, weight), generate
