"""A Triton kernel that only reads memory: the bandwidth limit of kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
NUM_WAVES = 8  # programs per multiprocessor


@triton.jit  # type: ignore[untyped-decorator]
def _sum_blocks(source, out, num_blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum every num_programs-th block into out[program].

    Grid: (programs,). source [num_blocks * BLOCK] float32.
    """
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(program, num_blocks, tl.num_programs(0)):
        total += tl.load(source + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + program, tl.sum(total))


def read_all(source: Tensor, out: Tensor) -> None:
    """Read all of `source`, and store a partial sum per program in `out`.

    Shapes: source [S] float32, S a multiple of BLOCK; out [programs] float32.
    """
    _sum_blocks[(out.numel(),)](source, out, source.numel() // BLOCK, BLOCK=BLOCK, num_warps=8)


def num_programs() -> int:
    """Return the number of programs that fill the device."""
    return NUM_WAVES * int(torch.cuda.get_device_properties(0).multi_processor_count)
