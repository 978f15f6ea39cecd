"""Read memory and do nearly nothing with it: the ceiling of kernels that only read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
WAVES = 8  # programs for each multiprocessor


@triton.jit  # type: ignore[untyped-decorator]
def _sum_blocks(source, out, num_blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum every num_programs-th block into out[program]. Grid: (programs,). source [num_blocks * BLOCK] float32."""
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(program, num_blocks, tl.num_programs(0)):
        total += tl.load(source + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + program, tl.sum(total))


def read_all(source: Tensor, out: Tensor) -> None:
    """Read all of `source` [S] float32, S a multiple of BLOCK; out [programs] float32 receives partial sums."""
    _sum_blocks[(out.numel(),)](source, out, source.numel() // BLOCK, BLOCK=BLOCK, num_warps=8)


def num_programs() -> int:
    """Return how many programs fill the device."""
    return WAVES * int(torch.cuda.get_device_properties(0).multi_processor_count)
