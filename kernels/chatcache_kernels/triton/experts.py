"""Mixture-of-experts layers: one product for the tokens of each expert, all in one launch.

The work list is computed on the device, so a captured launch serves any routing: its grid has as many tiles as the
worst routing needs, and programs past the last tile end at once. A program finds its expert from the tile numbers at
which experts end. The order of an expert's pairs in its tiles varies from run to run; each row of a product is computed
alone, so the results do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..experts import Activation, Allocate, ExpertWeights, empty, plain_weights
from .attention import dot
from .fused import silu_mul
from .launch import EXACT, next_power_of_2, round_to
from .variants import Variant, trace_variants

PLAN_BLOCK = 1024
COMBINE_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Launch configuration of a product: sizes of a tile in pairs, outputs and bytes of inputs. Not measured."""

    rows: int
    outputs: int
    input_bytes: int
    num_warps: int
    num_stages: int


CONFIGS = (ProductConfig(16, 64, 256, 4, 4), ProductConfig(64, 128, 128, 4, 3), ProductConfig(128, 128, 128, 8, 3))
"""By height of a tile, lowest first."""


def pack_experts(
    weight: Tensor, bias: Tensor | None, *, is_int8: bool = False, allocate: Allocate = empty
) -> ExpertWeights:
    """Return the weights of one linear layer of all experts; both usual layouts are read as they are.

    Shapes: weight [num_experts, out, in], the inputs or the outputs of an expert contiguous; bias [num_experts, out].
    Raises: ValueError for int8, which only the backend `cpu` has.
    """
    if is_int8:
        raise ValueError("int8 experts need the backend cpu")
    if sorted(weight.stride()[1:]) != sorted((1, weight.shape[1 if weight.stride(1) == 1 else 2])):
        weight = weight.contiguous()
    return plain_weights(weight, bias.contiguous() if bias is not None else None)


def grouped_experts(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, up: ExpertWeights, down: ExpertWeights, activate: Activation
) -> Tensor:
    """Apply the experts that a router chose for each token, and add their results with the router's weights.

    Shapes: x [num_tokens, in], expert_ids (integers), expert_weights [num_tokens, k] -> [num_tokens, out].
    """
    num_tokens, num_choices = expert_ids.shape
    out = torch.empty(num_tokens, down.num_outputs, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    num_experts, num_pairs = len(up.weight), num_tokens * num_choices
    config = choose_config(num_pairs, num_experts)
    plan = plan_pairs(expert_ids, num_experts, config.rows)
    hidden = activate(_multiply(x.contiguous(), up, plan, config, num_pairs, num_choices, gather=True))
    y = _multiply(hidden.contiguous(), down, plan, config, num_pairs, num_choices, gather=False)
    grid = (num_tokens, triton.cdiv(down.num_outputs, COMBINE_BLOCK))
    combine_kernel[grid](
        y, expert_weights.contiguous(), out, CHOICES=num_choices, WIDTH=down.num_outputs, BLOCK=COMBINE_BLOCK,
        num_warps=4, **EXACT,
    )  # fmt: skip
    return out


def choose_config(num_pairs: int, num_experts: int) -> ProductConfig:
    """Return the launch configuration for the mean number of pairs of an expert."""
    mean = num_pairs / num_experts
    return CONFIGS[0 if mean <= 16 else 1 if mean <= 96 else 2]


def plan_pairs(expert_ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert and divide them into tiles of `rows`.

    Returns (pairs, starts, tile_ends), all int32: pairs [num_pairs]: the pair at each place; starts [num_experts + 1]:
    the first place of each expert; tile_ends [num_experts]: the number of tiles of all experts up to this one.
    """
    padded = next_power_of_2(num_experts + 1)
    pairs = torch.empty(expert_ids.numel(), dtype=torch.int32, device=expert_ids.device)
    starts, next_places, tile_ends = torch.empty(3, padded, dtype=torch.int32, device=expert_ids.device)
    plan_pairs_kernel[(1,)](
        expert_ids.contiguous(), pairs, starts, next_places, tile_ends, expert_ids.numel(),
        NUM_EXPERTS=num_experts, EXPERTS=padded, ROWS=rows, BLOCK=PLAN_BLOCK, num_warps=8, **EXACT,
    )  # fmt: skip
    return pairs, starts, tile_ends


def _multiply(
    x: Tensor,
    weights: ExpertWeights,
    plan: tuple[Tensor, Tensor, Tensor],
    config: ProductConfig,
    num_pairs: int,
    num_choices: int,
    *,
    gather: bool,
) -> Tensor:
    """Multiply rows with the weights of their experts.

    `gather`: x has a row for each token, and the result is sorted by expert; otherwise x is sorted by expert, and the
    result has the order of the pairs. Shapes: x [num_tokens or num_pairs, in] -> [num_pairs, out].
    """
    num_experts, (pairs, starts, tile_ends) = len(weights.weight), plan
    out = torch.empty(num_pairs, weights.num_outputs, dtype=x.dtype, device=x.device)
    most_tiles = min(num_pairs, num_experts) + num_pairs // config.rows
    block = max(16, min(config.input_bytes // x.element_size(), next_power_of_2(weights.num_inputs)))
    grid = (triton.cdiv(weights.num_outputs, config.outputs), most_tiles)
    grouped_product_kernel[grid](
        x, weights.weight, weights.bias, out, pairs, starts, tile_ends, NUM_EXPERTS=num_experts,
        EXPERTS=next_power_of_2(num_experts + 1), CHOICES=num_choices, NUM_OUTPUTS=weights.num_outputs,
        NUM_INPUTS=weights.num_inputs, OUTPUT_STRIDE=weights.weight.stride(1), INPUT_STRIDE=weights.weight.stride(2),
        GATHER=gather, HAS_BIAS=weights.bias is not None, ROWS=config.rows, BLOCK_N=config.outputs, BLOCK_K=block,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_pairs"])
def plan_pairs_kernel(  # type: ignore[no-untyped-def]
    ids,
    pairs,
    starts,
    next_places,
    tile_ends,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sort pairs by expert; see `plan_pairs`. Grid: (1,). EXPERTS > NUM_EXPERTS is a power of two.

    Shapes: ids, pairs [num_pairs], starts, next_places (scratch), tile_ends [EXPERTS].
    """
    expert = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        chosen = tl.load(ids + pair, mask=pair < num_pairs, other=EXPERTS - 1).to(tl.int32)
        counts += tl.histogram(chosen, EXPERTS)
    counts = tl.where(expert < NUM_EXPERTS, counts, 0)
    start = tl.cumsum(counts, 0) - counts
    tl.store(starts + expert, start)
    tl.store(next_places + expert, start)
    tl.store(tile_ends + expert, tl.cumsum((counts + ROWS - 1) // ROWS, 0))
    tl.debug_barrier()  # every thread reads next_places
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        chosen = tl.load(ids + pair, mask=pair < num_pairs, other=0).to(tl.int32)
        place = tl.atomic_add(next_places + chosen, 1, mask=pair < num_pairs)
        tl.store(pairs + place, pair, mask=pair < num_pairs)


@triton.jit
def grouped_product_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    pairs,
    starts,
    tile_ends,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    OUTPUT_STRIDE: tl.constexpr,
    INPUT_STRIDE: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply one tile of an expert's pairs with BLOCK_N outputs of its weight.

    Grid: (NUM_OUTPUTS / BLOCK_N, most tiles); programs of one tile run next to each other and share its inputs. Shapes
    as in `_multiply`; weight [NUM_EXPERTS, NUM_OUTPUTS, NUM_INPUTS] in the given strides, bias [NUM_EXPERTS,
    NUM_OUTPUTS].
    """
    tile = tl.program_id(1)
    number = tl.arange(0, EXPERTS)
    ends = tl.load(tile_ends + number, mask=number < NUM_EXPERTS, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert < NUM_EXPERTS:
        first_tile = tl.max(tl.where(ends <= tile, ends, 0), 0)
        place = tl.load(starts + expert) + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
        inside = place < tl.load(starts + expert + 1)
        pair = tl.load(pairs + place, mask=inside, other=0)
        source = tl.where(inside, pair // CHOICES if GATHER else place, 0).to(tl.int64)
        target = (place if GATHER else pair).to(tl.int64)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        has_column = column < NUM_OUTPUTS
        base = weight + expert.to(tl.int64) * NUM_OUTPUTS * NUM_INPUTS
        total = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for first in range(0, NUM_INPUTS, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            has_k = k < NUM_INPUTS
            tokens = tl.load(x + source[:, None] * NUM_INPUTS + k[None, :], mask=has_k[None, :], other=0.0)
            at = k[:, None] * INPUT_STRIDE + column[None, :] * OUTPUT_STRIDE
            weights = tl.load(base + at, mask=has_k[:, None] & has_column[None, :], other=0.0)
            total = dot(tokens, weights, total)
        if HAS_BIAS:
            added = tl.load(bias + expert.to(tl.int64) * NUM_OUTPUTS + column, mask=has_column, other=0.0)
            total += added[None, :].to(tl.float32)
        at = target[:, None] * NUM_OUTPUTS + column[None, :]
        tl.store(out + at, round_to(total, out.dtype.element_ty), mask=inside[:, None] & has_column[None, :])


@triton.jit
def combine_kernel(y, expert_weights, out, CHOICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the results of a token's pairs with their weights. Grid: (num_tokens, WIDTH / BLOCK).

    Shapes: y [num_tokens, CHOICES, WIDTH], expert_weights [num_tokens, CHOICES], out [num_tokens, WIDTH].
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(CHOICES):
        factor = tl.load(expert_weights + token * CHOICES + choice).to(tl.float32)
        part = tl.load(y + (token * CHOICES + choice) * WIDTH + column, mask=inside, other=0.0)
        total += factor * part.to(tl.float32)
    tl.store(out + token * WIDTH + column, round_to(total, out.dtype.element_ty), mask=inside)


def variants(arch: int) -> Iterator[Variant]:
    """Yield the kernel variants of layers as in Qwen3-30B-A3B, gpt-oss-20b, Mixtral and DeepSeek V3."""
    for num_experts, choices, width, inner, is_transposed, dtype in (
        (128, 8, 2048, 768, False, torch.bfloat16),
        (32, 4, 2880, 2880, True, torch.bfloat16),
        (8, 2, 4096, 14336, False, torch.float16),
        (256, 8, 7168, 2048, False, torch.bfloat16),
        (60, 4, 1024, 512, False, torch.float32),
    ):
        up = _meta_weights((num_experts, 2 * inner, width), dtype, is_transposed=is_transposed)
        down = _meta_weights((num_experts, width, inner), dtype, is_transposed=is_transposed)
        for num_tokens in (1, 32 * num_experts // choices, 256 * num_experts // choices):
            x = torch.empty(num_tokens, width, dtype=dtype, device="meta")
            ids = torch.empty(num_tokens, choices, dtype=torch.int64, device="meta")
            routed = torch.empty(num_tokens, choices, dtype=dtype, device="meta")
            yield from trace_variants(partial(grouped_experts, x, ids, routed, up, down, silu_mul))


def _meta_weights(shape: tuple[int, int, int], dtype: torch.dtype, *, is_transposed: bool) -> ExpertWeights:
    """Return weights [num_experts, out, in] of no memory; transposed ones have a bias, as those of gpt-oss."""
    num_experts, num_outputs, num_inputs = shape
    if not is_transposed:
        return pack_experts(torch.empty(shape, dtype=dtype, device="meta"), None)
    weight = torch.empty(num_experts, num_inputs, num_outputs, dtype=dtype, device="meta")
    return pack_experts(weight.mT, torch.empty(num_experts, num_outputs, dtype=dtype, device="meta"))
