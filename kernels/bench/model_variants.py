"""Kernel variants that published models launch, from the shapes in their configuration files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from chatcache_kernels.experts import Activation
from chatcache_kernels.triton import fused, pages, recurrent, rope, sampling
from chatcache_kernels.triton.attention import merge_states, paged_attention_on_chip
from chatcache_kernels.triton.configs import Chip
from chatcache_kernels.triton.sampling_ops import NUM_FIELDS
from chatcache_kernels.triton.variants import Variant, trace_variants
from chatcache_kernels.types import AttentionBatch, AttentionWork, HeadNorms, KVPages, WorkList
from chatcache_kernels.work_list import PREFILL_TILE_QUERIES, tokens_per_tile
from torch import Tensor

PAGE_SIZE = 16
NUM_PAGES = 1 << 20  # stores beyond 2^31 elements, so that offsets are 64 bits wide


class ModelShape(NamedTuple):
    """What the kernels of a model depend on.

    `rotated`: dimensions of a head that are rotated; `float_norms`: the weights of norms are float32.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    hidden: int
    intermediate: int
    vocab_size: int
    head_norms: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    activation: str = "silu"
    float_norms: bool = False


MODELS = {
    "smollm2-135m": ModelShape(9, 3, 64, 64, 576, 1536, 49152),
    "qwen2.5-0.5b": ModelShape(14, 2, 64, 64, 896, 4864, 151936),
    "qwen3-0.6b": ModelShape(16, 8, 128, 128, 1024, 3072, 151936, head_norms=True),
    "llama3.2-1b": ModelShape(32, 8, 64, 64, 2048, 8192, 128256),
    "llama3-8b": ModelShape(32, 8, 128, 128, 4096, 14336, 128256),
    "qwen2.5-7b": ModelShape(28, 4, 128, 128, 3584, 18944, 152064),
    "qwen3-14b": ModelShape(40, 8, 128, 128, 5120, 17408, 151936, head_norms=True),
    "llama3-70b": ModelShape(64, 8, 128, 128, 8192, 28672, 128256),
    "qwen3-30b-a3b": ModelShape(32, 4, 128, 128, 2048, 768, 151936, head_norms=True),
    "phi3-mini": ModelShape(32, 32, 96, 96, 3072, 8192, 32064, window=2047),
    "phi4-mini": ModelShape(24, 8, 128, 96, 3072, 8192, 200064),
    "phi-2": ModelShape(32, 32, 80, 32, 2560, 10240, 51200),
    "mistral-7b": ModelShape(32, 8, 128, 128, 4096, 14336, 32000, window=4096),
    "gemma2-2b": ModelShape(
        8, 4, 256, 256, 2304, 9216, 256000, window=4096, softcap=50.0, activation="gelu", float_norms=True
    ),
    "gemma3-1b": ModelShape(
        4, 1, 256, 256, 1152, 6912, 262144, head_norms=True, window=512, activation="gelu", float_norms=True
    ),
    "gpt-oss-20b": ModelShape(64, 8, 64, 64, 2880, 2880, 201088, window=128, sinks=True, activation="clamped_silu"),
    "falcon-7b": ModelShape(71, 1, 64, 64, 4544, 18176, 65024),
    "starcoder-15b": ModelShape(48, 1, 128, 128, 6144, 24576, 49152),
    "nemotron-15b": ModelShape(48, 8, 128, 64, 6144, 24576, 256000),
}
VOCAB_SIZES = (32_000, 151_936, 262_144)


def model_variants(arch: int) -> Iterator[Variant]:
    """Yield the variants of all models in bfloat16, many of them more than once."""
    chip = Chip(arch // 10, 1)
    for shape in MODELS.values():
        yield from _attention_variants(chip, shape)
        yield from _layer_variants(shape)
    for vocab_size in VOCAB_SIZES:
        yield from _sampling_variants(vocab_size)
    yield from _recurrent_variants()


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


_ints = partial(_meta, dtype=torch.int32)
_floats = partial(_meta, dtype=torch.float32)


def _attention_variants(chip: Chip, shape: ModelShape) -> Iterator[Variant]:
    """Yield attention with small, large and prefill tiles, with and without the window, and the merge."""
    group = shape.heads // shape.kv_heads
    k, v = (_meta(2, NUM_PAGES, shape.kv_heads, PAGE_SIZE, shape.head_dim) for _ in "kv")
    store = KVPages(k, v, PAGE_SIZE, shape.kv_heads, shape.head_dim)
    q, sinks = _meta(5, shape.heads, shape.head_dim), _meta(shape.heads) if shape.sinks else None
    for height in {*tokens_per_tile(group), max(1, PREFILL_TILE_QUERIES // group)}:
        tiles = WorkList(_ints(5, 6), _ints(5), _ints(1), height)
        work = AttentionWork((tiles,), _ints(5), _ints(0), _ints(1), _ints(0), _ints(1), 0)
        batch = AttentionBatch(_ints(5, 9), _ints(5), _ints(5), _ints(6), _meta(5, dtype=torch.int64), 1, 9, work)
        for window in {None, shape.window}:
            attend = partial(paged_attention_on_chip, q, store, 1, batch, 0.1, window, shape.softcap, sinks, chip)
            yield from trace_variants(attend)
    work = AttentionWork((), _ints(5), _ints(5), _ints(6), _ints(7), _ints(1), 7)
    states, sums = _floats(7, shape.heads, shape.head_dim), _floats(7, shape.heads)
    yield from trace_variants(partial(merge_states, q, states, sums, work, sinks, chip))


def _layer_variants(shape: ModelShape) -> Iterator[Variant]:
    """Yield the small operations of a layer."""
    heads, kv_heads = shape.heads, shape.kv_heads
    with torch.device("meta"):
        store = pages.allocate_pages(30, 9000, PAGE_SIZE, kv_heads, shape.head_dim, torch.bfloat16)
    qkv, angles = _meta(7, heads + 2 * kv_heads, shape.head_dim), _floats(7, shape.rotated // 2)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
    norm_dtype = torch.float32 if shape.float_norms else torch.bfloat16
    slots, weight = _meta(7, dtype=torch.int64), _meta(shape.head_dim, dtype=norm_dtype)
    norms = HeadNorms(weight, weight, 1e-6) if shape.head_norms else None
    x, scale = _meta(7, shape.hidden), _meta(shape.hidden, dtype=norm_dtype)
    clamped = partial(fused.clamped_silu_mul, slope=1.702, limit=7.0)
    activations: dict[str, Activation] = {
        "silu": fused.silu_mul, "gelu": fused.gelu_mul, "clamped_silu": clamped
    }  # fmt: skip
    activate = activations[shape.activation]
    yield from trace_variants(partial(rope.rope_write, q, k, v, angles, angles, store, 1, slots, norms))
    yield from trace_variants(partial(pages.write_pages, store, 1, k, v, slots))
    yield from trace_variants(partial(pages.copy_pages, store, _ints(7, 2)))
    yield from trace_variants(partial(fused.rms_norm, x, scale, 1e-6))
    yield from trace_variants(partial(fused.add_rms_norm, x, x, scale, 1e-6))
    yield from trace_variants(partial(activate, _meta(7, 2 * shape.intermediate)))


def _recurrent_variants() -> Iterator[Variant]:
    """Yield the recurrent and convolution layers of LFM2, Qwen3.5, Nemotron-H and Falcon-H1."""
    yield from recurrent.conv_variants(2048, 3, None, torch.bfloat16)
    yield from recurrent.delta_variants(16, 16, torch.bfloat16)
    yield from recurrent.ssd_variants(112, 8, 128, torch.bfloat16)
    yield from recurrent.ssd_variants(24, 1, 256, torch.bfloat16)


def _sampling_variants(vocab_size: int) -> Iterator[Variant]:
    """Yield plain, masked and edited draws, ranked tokens and edits."""
    raw, edited = _meta(3, vocab_size), _floats(3, vocab_size)
    base, table = _ints(vocab_size), _ints(NUM_FIELDS, 7)
    last, tokens, faults = (_meta(count, dtype=torch.int64) for count in (9, 7, 7))
    faults, words = faults.int(), _ints(1, -(-vocab_size // 32))
    plain = sampling.DrawBatch(raw, raw, base, table, None, True, True)
    yield from trace_variants(partial(sampling.draw, plain, last, tokens, _floats(7), faults))
    for x in (raw, edited):
        draws = sampling.DrawBatch(x, raw, base, table, words, True, True)
        yield from trace_variants(partial(sampling.draw, draws, last, tokens, _floats(7), faults))
        for size in (8, 100):
            logprobs, perturbed, raw_logprobs = (_floats(7, size) for _ in range(3))
            ranked = sampling.RankedTokens(_ints(7, size), logprobs, perturbed, raw_logprobs, faults)
            yield from trace_variants(partial(sampling.rank_tokens, draws, ranked))
    yield from trace_variants(partial(sampling.apply_edits, edited, tokens.int(), faults, _floats(7), _floats(7)))
