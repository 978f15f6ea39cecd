"""Linear layers with FP8 weights.

Few rows read the weights only: a product converts them to the type of the activations in registers, so that there is
nothing to quantise, and divides the inputs among programs, so that enough of them read. Many rows multiply FP8 numbers:
`quantise_rows`, then `torch._scaled_mm` if a scale belongs to a whole output, or to a block of 128 x 128 and the chip
is a Hopper; else `block_product_kernel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ..fp8 import DTYPE, LARGEST, TINY, Fp8Weight
from .attention import dot
from .configs import Chip, get_chip
from .launch import EXACT, FP8_ARCH, INTERPRETED, choose_num_warps, next_power_of_2, round_to
from .variants import Variant, trace_variants

MIN_ARCH = FP8_ARCH

FEW_ROWS = 32
"""Number of rows up to which weights are converted; more are faster as FP8 products."""

CUBLAS_ROWS = 256
"""Number of rows from which the products of blocks are those of cuBLAS, which has them for Hopper since CUDA 12.9."""

CUBLAS_ROW_MULTIPLE = 4  # of products of blocks

FEW_OUTPUTS = 64  # of a program for few rows
PROGRAMS_PER_MULTIPROCESSOR = 2
MIN_BLOCKS = 4  # of inputs that a program for few rows reads
BLOCK_K = 128  # inputs of a block, also of those that share a scale
QUANTISE_TILE = 1024
TILE = 128  # rows and outputs of a program for many rows


@dataclass(frozen=True, slots=True)
class Split:
    """Division of the inputs of a product among `count` programs of `num_blocks` blocks each."""

    count: int
    num_blocks: int


def num_locks(weight: Fp8Weight) -> int:
    """Return the number of counters that `multiply_few_rows` needs."""
    return int(triton.cdiv(weight.num_outputs, FEW_OUTPUTS))


def quantise_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise rows in one launch, as `chatcache_kernels.fp8.quantise_rows`."""
    x = x.contiguous()
    num_rows, width = x.shape
    num_groups = triton.cdiv(width, group)
    numbers = torch.empty(num_rows, width, dtype=DTYPE, device=x.device)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    if num_rows and width:
        block = next_power_of_2(group)
        groups = max(1, min(next_power_of_2(num_groups), QUANTISE_TILE // block))
        quantise_kernel[(num_rows, triton.cdiv(num_groups, groups))](
            x, numbers, scales, WIDTH=width, GROUP=group, BLOCK=block, GROUPS=groups, LARGEST=LARGEST, TINY=TINY,
            num_warps=choose_num_warps(groups * block, 8, most=16), **EXACT,
        )  # fmt: skip
    return numbers, scales


def multiply(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias of quantised activations, in two launches, or with cuBLAS a few more.

    Shapes: x [num_tokens, in], bias [out] -> [num_tokens, out]. Numbers of inputs and outputs are multiples of 16.
    """
    out: Tensor
    num_rows = len(x)
    in_cublas = num_rows >= CUBLAS_ROWS and _cublas_has_blocks(weight, get_chip(x.device))
    if in_cublas:
        x = functional.pad(x, (0, 0, 0, -num_rows % CUBLAS_ROW_MULTIPLE))
    numbers, scales = quantise_rows(x, weight.columns)
    if in_cublas:
        scales = scales.t().contiguous().t()  # those of a block of inputs are adjacent
        out = torch._scaled_mm(numbers, weight.numbers.t(), scales, weight.scales.t(), out_dtype=x.dtype)[:num_rows]
        return out if bias is None else out + bias
    if weight.rows == 1 and weight.columns == weight.num_inputs:
        out = torch._scaled_mm(
            numbers, weight.numbers.t(), scales, weight.scales.t(), bias, out_dtype=x.dtype, use_fast_accum=True
        )
        return out
    return _multiply_blocks(numbers, scales, weight, bias, x.dtype)


def _cublas_has_blocks(weight: Fp8Weight, chip: Chip) -> bool:
    """Return whether cuBLAS multiplies with the scales of this weight."""
    cuda = torch.version.cuda
    if chip.major != 9 or cuda is None or tuple(map(int, cuda.split("."))) < (12, 9):
        return False
    return weight.rows == weight.columns == BLOCK_K and not (weight.num_outputs % TILE or weight.num_inputs % BLOCK_K)


def _multiply_blocks(
    numbers: Tensor, scales: Tensor, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply quantised activations with a weight in blocks."""
    num_rows = len(numbers)
    out = torch.empty(num_rows, weight.num_outputs, dtype=dtype, device=numbers.device)
    if num_rows:
        rows = 64 if num_rows <= 64 else TILE
        grid = (triton.cdiv(num_rows, rows), triton.cdiv(weight.num_outputs, TILE))
        block_product_kernel[grid](
            numbers, scales, weight.numbers, weight.scales, bias, out, num_rows,
            NUM_INPUTS=weight.num_inputs, NUM_OUTPUTS=weight.num_outputs, SCALE_ROWS=weight.rows, ROWS=rows,
            OUTPUTS=TILE, BLOCK_K=BLOCK_K, num_warps=rows // 16, num_stages=4,
        )  # fmt: skip
    return out


def multiply_few_rows(x: Tensor, weight: Fp8Weight, bias: Tensor | None, locks: Tensor) -> Tensor:
    """Return x W^T + bias of activations as they are, in one launch.

    Shapes: x [num_tokens, in], at most 64 tokens, bias [out], locks [num_locks(weight)] int32, zeros before and after
    -> [num_tokens, out]. Products on other streams need locks of their own.
    """
    return _multiply_few_rows(x, weight, bias, locks, get_chip(x.device))


def _multiply_few_rows(x: Tensor, weight: Fp8Weight, bias: Tensor | None, locks: Tensor, on: Chip) -> Tensor:
    x = x.contiguous()
    num_rows, num_inputs = x.shape
    out = torch.empty(num_rows, weight.num_outputs, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    split = choose_split(len(locks), triton.cdiv(num_inputs, BLOCK_K), on.multiprocessors)
    shape = (split.count, num_rows, weight.num_outputs) if split.count > 1 else (1,)
    sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    few_rows_kernel[(len(locks), split.count)](
        x, weight.numbers, weight.scales, bias, out, sums, locks, num_rows,
        NUM_INPUTS=num_inputs, NUM_OUTPUTS=weight.num_outputs, SCALE_ROWS=weight.rows,
        HAS_BLOCKS=weight.columns < num_inputs, SPLIT=split.count, NUM_BLOCKS=split.num_blocks,
        ROWS=max(16, next_power_of_2(num_rows)), OUTPUTS=FEW_OUTPUTS, BLOCK_K=BLOCK_K, num_warps=4, num_stages=5,
    )  # fmt: skip
    return out


def choose_split(num_tiles: int, num_blocks: int, multiprocessors: int) -> Split:
    """Return how to divide `num_blocks` blocks of inputs, so that `num_tiles` tiles keep all multiprocessors busy."""
    wanted = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors, num_tiles)
    each = triton.cdiv(num_blocks, max(1, min(wanted, num_blocks // MIN_BLOCKS)))
    return Split(triton.cdiv(num_blocks, each), each)


_LARGEST = tl.constexpr(LARGEST)
_TINY = tl.constexpr(TINY)


@triton.jit
def to_fp8(x):  # type: ignore[no-untyped-def]
    """Return float32 `x`, within the range of float8_e4m3fn, as such a number, rounded to nearest even.

    A plain cast on a GPU. Triton's interpreter truncates, so there the bits are computed: 2^14 has a last bit of 2^-9,
    which is that of the numbers below 2^-6.
    """
    if INTERPRETED:
        magnitude = tl.abs(x).to(tl.int32, bitcast=True)
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        return (tl.where(tl.abs(x) < 0.015625, small, normal) | sign).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def quantise_heads(x, largest):  # type: ignore[no-untyped-def]
    """Return the vectors x in FP8, and their scales. Shapes: x [heads, width] float32, largest, scales [heads, 1].

    `largest`: the largest magnitude of each vector, of which x may be a part.
    """
    largest = tl.maximum(largest, _TINY)
    inverse = tl.div_rn(tl.zeros_like(largest) + _LARGEST, largest)
    return to_fp8(x * inverse), largest * (1 / _LARGEST)


@triton.jit
def quantise_kernel(  # type: ignore[no-untyped-def]
    x,
    numbers,
    scales,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
):
    """Quantise GROUPS groups of one row. Grid: (num_rows, number of groups / GROUPS). BLOCK >= GROUP.

    Shapes: x, numbers [num_rows, WIDTH], scales [num_rows, ceil(WIDTH / GROUP)], contiguous.
    """
    NUM_GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    place = tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + place[None, :]
    inside = (place < GROUP)[None, :] & (column < WIDTH)
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value), axis=1), TINY)
    inverse = tl.div_rn(tl.zeros([GROUPS], tl.float32) + LARGEST, largest)
    tl.store(numbers + row * WIDTH + column, to_fp8(value * inverse[:, None]), mask=inside)
    tl.store(scales + row * NUM_GROUPS + group, largest * (1 / LARGEST), mask=group < NUM_GROUPS)


@triton.jit
def store_outputs(total, bias, out, output, token, has_output, has_token, NUM_OUTPUTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the bias and store a tile. Shapes: total [outputs, tokens], out [num_tokens, NUM_OUTPUTS]."""
    if bias is not None:
        total += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)[:, None]
    at = token.to(tl.int64)[None, :] * NUM_OUTPUTS + output[:, None]
    tl.store(out + at, round_to(total, out.dtype.element_ty), mask=has_output[:, None] & has_token[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    scales,
    bias,
    out,
    sums,
    locks,
    num_rows,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply all rows with OUTPUTS outputs, over NUM_BLOCKS blocks of inputs.

    The weight is the left operand, so that a tile has 64 outputs and no more rows than needed. The last of the SPLIT
    programs of a tile to arrive adds the sums of all in order, and resets the lock.
    Grid: (NUM_OUTPUTS / OUTPUTS, SPLIT). Shapes: x [num_rows, NUM_INPUTS], weight, scales as in `Fp8Weight`, out
    [num_rows, NUM_OUTPUTS], sums [SPLIT, num_rows, NUM_OUTPUTS] float32, locks [number of tiles].
    """
    ALL_BLOCKS: tl.constexpr = (NUM_INPUTS + BLOCK_K - 1) // BLOCK_K
    tile, part = tl.program_id(0), tl.program_id(1)
    output, token = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    has_output, has_token = output < NUM_OUTPUTS, token < num_rows
    from_row = weight + output.to(tl.int64)[:, None] * NUM_INPUTS
    scale_row = output // SCALE_ROWS
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for block in range(part * NUM_BLOCKS, tl.minimum(part * NUM_BLOCKS + NUM_BLOCKS, ALL_BLOCKS)):
        column = block * BLOCK_K + tl.arange(0, BLOCK_K)
        has_column = column < NUM_INPUTS
        if NUM_INPUTS % BLOCK_K == 0 and NUM_OUTPUTS % OUTPUTS == 0:
            numbers = tl.load(from_row + column[None, :])
        else:
            numbers = tl.load(from_row + column[None, :], mask=has_output[:, None] & has_column[None, :], other=0.0)
        at = token[None, :] * NUM_INPUTS + column[:, None]
        tokens = tl.load(x + at, mask=has_token[None, :] & has_column[:, None], other=0.0)
        if HAS_BLOCKS:
            scale = tl.load(scales + scale_row * ALL_BLOCKS + block, mask=has_output, other=0.0)
            total += dot(numbers.to(x.dtype.element_ty), tokens, tl.zeros([OUTPUTS, ROWS], tl.float32)) * scale[:, None]
        else:
            total = dot(numbers.to(x.dtype.element_ty), tokens, total)
    if not HAS_BLOCKS:
        total *= tl.load(scales + scale_row, mask=has_output, other=0.0)[:, None]
    if SPLIT == 1:
        store_outputs(total, bias, out, output, token, has_output, has_token, NUM_OUTPUTS)
    else:
        at, inside = token[None, :] * NUM_OUTPUTS + output[:, None], has_output[:, None] & has_token[None, :]
        tl.store(sums + part * num_rows * NUM_OUTPUTS + at, total, mask=inside)
        tl.debug_barrier()  # all threads have stored before one of them counts
        if tl.atomic_add(locks + tile, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for other in range(SPLIT):
                stored = sums + other * num_rows * NUM_OUTPUTS + at
                total += tl.load(stored, mask=inside, other=0.0, cache_modifier=".cg")
            store_outputs(total, bias, out, output, token, has_output, has_token, NUM_OUTPUTS)
            tl.store(locks + tile, 0)


@triton.jit(do_not_specialize=["num_rows"])
def block_product_kernel(  # type: ignore[no-untyped-def]
    x,
    x_scales,
    weight,
    scales,
    bias,
    out,
    num_rows,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply ROWS rows with OUTPUTS outputs, both in FP8; each block of inputs has scales of its own.

    The sum of a block is exact to the type of the tensor cores, those of all blocks are added in float32.
    Grid: (num_rows / ROWS, NUM_OUTPUTS / OUTPUTS); programs of the same outputs run next to each other. Shapes: x
    [num_rows, NUM_INPUTS], x_scales [num_rows, NUM_INPUTS / BLOCK_K], the rest as in `few_rows_kernel`.
    """
    ALL_BLOCKS: tl.constexpr = (NUM_INPUTS + BLOCK_K - 1) // BLOCK_K
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    has_row, has_output = row < num_rows, output < NUM_OUTPUTS
    row, scale_row = tl.where(has_row, row, 0).to(tl.int64), output // SCALE_ROWS
    x_row, weight_row = x + row[:, None] * NUM_INPUTS, weight + output.to(tl.int64)[None, :] * NUM_INPUTS
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for block in range(ALL_BLOCKS):
        column = block * BLOCK_K + tl.arange(0, BLOCK_K)
        if NUM_INPUTS % BLOCK_K == 0 and NUM_OUTPUTS % OUTPUTS == 0:
            tokens = tl.load(x_row + column[None, :])
            numbers = tl.load(weight_row + column[:, None])
        else:
            has_column = column < NUM_INPUTS
            tokens = tl.load(x_row + column[None, :], mask=has_column[None, :], other=0.0)
            numbers = tl.load(weight_row + column[:, None], mask=has_output[None, :] & has_column[:, None], other=0.0)
        x_scale = tl.load(x_scales + row * ALL_BLOCKS + block)
        scale = tl.load(scales + scale_row * ALL_BLOCKS + block, mask=has_output, other=0.0)
        total += dot(tokens, numbers, tl.zeros([ROWS, OUTPUTS], tl.float32)) * x_scale[:, None] * scale[None, :]
    if bias is not None:
        total += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)[None, :]
    at = row[:, None] * NUM_OUTPUTS + output[None, :]
    tl.store(out + at, round_to(total, out.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


def variants(arch: int) -> Iterator[Variant]:
    """Yield the kernel variants of layers as in Qwen3 0.6B and 8B and Llama 70B, scaled by output and by block."""
    for num_inputs, num_outputs in ((1024, 4096), (3072, 1024), (4096, 24576), (12288, 4096), (8192, 10240), (208, 80)):
        for columns in (num_inputs, 128):
            x = torch.empty(7, num_inputs, dtype=torch.bfloat16, device="meta")
            yield from trace_variants(partial(quantise_rows, x, columns))
            yield from _product_variants(_meta_weight(num_outputs, num_inputs, columns), Chip(arch // 10, 132))


def _product_variants(weight: Fp8Weight, on: Chip) -> Iterator[Variant]:
    locks = torch.empty(num_locks(weight), dtype=torch.int32, device="meta")
    for num_rows in (1, FEW_ROWS):
        x = torch.empty(num_rows, weight.num_inputs, dtype=torch.bfloat16, device="meta")
        yield from trace_variants(partial(_multiply_few_rows, x, weight, None, locks, on))
    if weight.columns == weight.num_inputs:
        return
    for num_rows in (FEW_ROWS + 1, 1024):
        numbers = torch.empty(num_rows, weight.num_inputs, dtype=DTYPE, device="meta")
        scales = torch.empty(num_rows, weight.scales.shape[1], device="meta")
        yield from trace_variants(partial(_multiply_blocks, numbers, scales, weight, None, torch.bfloat16))


def _meta_weight(num_outputs: int, num_inputs: int, columns: int) -> Fp8Weight:
    """Return a weight of no memory."""
    rows = 1 if columns == num_inputs else columns
    scales = torch.empty(triton.cdiv(num_outputs, rows), triton.cdiv(num_inputs, columns), device="meta")
    return Fp8Weight(torch.empty(num_outputs, num_inputs, dtype=DTYPE, device="meta"), scales, rows, columns)
