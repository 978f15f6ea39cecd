"""The page store on a GPU: allocation, reads, writes, copies, swaps to host memory.

K and V are [L, N, Hkv, P, D]: the tokens of one head in a page are contiguous, so that a tile of keys is read in long
runs, and one page of one layer is one run of memory. In FP8 they are [L, N, Hkv, P * (D + 4)]: the numbers of a head as
before, followed by P scales in float32.

Swaps. The layers of a page are far apart in the store and contiguous in host memory. Pages are therefore gathered into
a device buffer in the host's order, in one launch, and copied with one transfer per run of consecutive host pages (K
and V separately); swapping in is the same in reverse. Copy engines move the bytes and no program waits for the bus, so
a swap on its own stream leaves the multiprocessors to the step that runs at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ..fp8 import DTYPE as FP8
from ..fp8 import SCALE_BYTES, unpack_vectors
from ..types import HostPages, KVPages, PageStore
from .fp8 import quantise_heads
from .launch import EXACT, FP8_ARCH, choose_num_warps, contiguous_last_dim, heads_per_program, next_power_of_2, round_to
from .variants import Variant, trace_variants

COPY_BLOCK_WORDS = 1024
"""int32 words of K and of V that one program copies: 4 KiB each."""
WRITE_TILE_ELEMENTS = 2048
"""Elements of K and of V that one program writes."""


def allocate_pages(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KVPages:
    """Allocate a store of zeroed pages.

    Slots are written before they are read, but zeros make sure that lanes which are masked out never multiply a NaN,
    and a store that is too large fails here. The fill runs at memory speed (tens of milliseconds for a whole GPU).
    """
    shape: tuple[int, ...] = (num_layers, num_pages, num_kv_heads, page_size, head_dim)
    if dtype == FP8:
        shape = (*shape[:3], page_size * (head_dim + SCALE_BYTES))
    k, v = (torch.zeros(shape, dtype=dtype) for _ in "kv")
    return KVPages(k, v, page_size, num_kv_heads, head_dim)


def read_pages(pages: KVPages, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values at `slots`.

    Shapes: slots [n] -> [n, num_kv_heads, head_dim] each; of quantised pages in float32.
    """
    page, offset = slots.long() // pages.page_size, slots.long() % pages.page_size
    if pages.is_fp8:
        k, v = (_unpack(store[layer].view(torch.uint8)[page], offset, pages) for store in pages.tensors)
        return k, v
    return pages.k[layer].transpose(1, 2)[page, offset], pages.v[layer].transpose(1, 2)[page, offset]


def _unpack(held: Tensor, offset: Tensor, pages: KVPages) -> Tensor:
    """Return one token of each page. Shapes: held [n, Hkv, P * (D + 4)] uint8, offset [n] -> [n, Hkv, D] float32."""
    shape, end = (*held.shape[:2], pages.page_size, -1), pages.page_size * pages.head_dim
    vectors = torch.cat((held[..., :end].reshape(shape), held[..., end:].reshape(shape)), -1)
    return unpack_vectors(vectors[torch.arange(len(offset)), :, offset])


def write_pages(pages: KVPages, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store keys and values of new tokens.

    Shapes: k, v [num_tokens, num_kv_heads, head_dim] (any strides over tokens and heads); slots [num_tokens].
    """
    num_tokens, num_heads, dim = k.shape
    if not num_tokens:
        return
    k, v = contiguous_last_dim(k), contiguous_last_dim(v)
    heads, dim_block = heads_per_program(num_heads, dim, WRITE_TILE_ELEMENTS), next_power_of_2(dim)
    write_pages_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        k, v, pages.k, pages.v, slots.contiguous(), layer, pages.k.stride(0),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        NUM_HEADS=num_heads, DIM=dim, PAGE=pages.page_size, HEAD_STRIDE=pages.head_elements, HEADS=heads,
        DIM_BLOCK=dim_block, num_warps=choose_num_warps(heads * dim_block, 8), **EXACT,
    )  # fmt: skip


def copy_pages(pages: PageStore, copies: Tensor) -> None:
    """Copy whole pages, all layers, in one launch. Shapes: copies [n, 2] (source, target).

    No target is also a source.
    """
    words = _word_stores(pages)
    copy_page_words(words, words, copies)


def as_words(store: Tensor) -> Tensor:
    """Return a view of a K or V store as int32 [num_layers, num_pages, words]."""
    return store.view(*store.shape[:2], -1).view(torch.int32)


def copy_page_words(source: tuple[Tensor, ...], target: tuple[Tensor, ...], pairs: Tensor) -> None:
    """Copy pages between the tensors of two stores (one or two each: K, V), all layers, in one launch.

    Shapes: each tensor int32 [num_layers, pages, words]; words are contiguous, other strides are free and equal for K
    and V; pairs [n, 2] (source page, target page), of any integer type.
    """
    num_layers, _, words = source[0].shape
    if not len(pairs):
        return
    copy_words_kernel[(triton.cdiv(words, COPY_BLOCK_WORDS), num_layers, len(pairs))](
        source[0], source[-1], target[0], target[-1], pairs.contiguous(),
        *source[0].stride()[:2], *target[0].stride()[:2],
        WORDS=words, BLOCK=COPY_BLOCK_WORDS, num_warps=4, **EXACT,
    )  # fmt: skip


def variants(arch: int) -> Iterator[Variant]:
    """Yield the kernel variants of copies and writes, also for stores above 2^31 elements."""
    for num_pages, heads, dim, dtype in (
        (50, 3, 64, torch.bfloat16), (9000, 8, 128, torch.bfloat16), (50, 5, 80, torch.float32),
        (9000, 8, 128, FP8),
    ):  # fmt: skip
        if dtype == FP8 and arch < FP8_ARCH:
            continue
        with torch.device("meta"):
            pages = allocate_pages(30, num_pages, 16, heads, dim, dtype)
            pairs = torch.empty(7, 2, dtype=torch.int32)
            stage = torch.empty(7, 30, as_words(pages.k).shape[2], dtype=torch.int32).transpose(0, 1)
            both = as_words(pages.k), as_words(pages.v)
            k = torch.empty(7, 3 * heads, dim, dtype=torch.bfloat16 if dtype == FP8 else dtype)[:, heads : 2 * heads]
            slots = torch.empty(7, dtype=torch.int64)
        yield from trace_variants(partial(copy_pages, pages, pairs), wide=True)
        yield from trace_variants(partial(copy_page_words, both, (stage, stage), pairs.long()), wide=True)
        yield from trace_variants(partial(write_pages, pages, 1, k, k, slots), wide=dtype != FP8)


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def copy_words_kernel(  # type: ignore[no-untyped-def]
    source_k,
    source_v,
    target_k,
    target_v,
    pairs,
    source_layer,
    source_page,
    target_layer,
    target_page,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one block of one page and layer, of K and of V. Grid: (WORDS / BLOCK, L, C).

    Shapes: see `copy_page_words`; the other arguments are strides in int32. Copying int32 preserves every bit pattern;
    four 16-byte loads per thread are in flight before the first store.
    """
    layer, pair = tl.program_id(1).to(tl.int64), tl.program_id(2)
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < WORDS
    start, end = tl.load(pairs + 2 * pair).to(tl.int64), tl.load(pairs + 2 * pair + 1).to(tl.int64)
    source = layer * source_layer + start * source_page
    target = layer * target_layer + end * target_page
    k = tl.load(source_k + source + word, mask=inside)
    v = tl.load(source_v + source + word, mask=inside)
    tl.store(target_k + target + word, k, mask=inside)
    tl.store(target_v + target + word, v, mask=inside)


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slots"])
def write_pages_kernel(  # type: ignore[no-untyped-def]
    k,
    v,
    k_pages,
    v_pages,
    slots,
    layer,
    layer_stride,
    k_token,
    k_head,
    v_token,
    v_head,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Write HEADS heads of one token to its page. Grid: (T, NUM_HEADS / HEADS).

    Shapes: k, v [T, NUM_HEADS, DIM], pages [L, N, NUM_HEADS, HEAD_STRIDE], slots [T].
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, DIM_BLOCK)[None, :]
    inside = (head < NUM_HEADS) & (column < DIM)
    slot = tl.load(slots + token).to(tl.int64)
    to = layer.to(tl.int64) * layer_stride + slot // PAGE * (NUM_HEADS * HEAD_STRIDE) + head * HEAD_STRIDE
    keys = tl.load(k + token * k_token + head * k_head + column, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(v + token * v_token + head * v_head + column, mask=inside, other=0.0).to(tl.float32)
    store_heads(k_pages + to, keys, inside, head < NUM_HEADS, slot % PAGE, column, DIM, PAGE)
    store_heads(v_pages + to, values, inside, head < NUM_HEADS, slot % PAGE, column, DIM, PAGE)


@triton.jit
def store_heads(target, x, inside, has_head, offset, column, DIM: tl.constexpr, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store one token's vectors of several heads in a page, quantised if its numbers are FP8.

    Shapes: target [heads, 1], pointers to the first element of each head in the page; x [heads, DIM_BLOCK] float32, 0
    where not `inside`; has_head [heads, 1]; column [1, DIM_BLOCK]. `offset`: of the token in the page.
    """
    kind: tl.constexpr = target.dtype.element_ty
    at = target + offset * DIM + column
    if kind == tl.float8e4nv:
        numbers, scales = quantise_heads(x, tl.max(tl.abs(x), axis=1, keep_dims=True))
        tl.store(at, numbers, mask=inside)
        tl.store((target + PAGE * DIM).to(tl.pointer_type(tl.float32), bitcast=True) + offset, scales, mask=has_head)
    else:
        tl.store(at, round_to(x, kind), mask=inside)


STAGE_BYTES = 1 << 25
"""Bytes of keys and values gathered at a time: 0.6 ms on a 50 GB/s bus, 20 us to gather."""


def swap_out(pages: PageStore, host: HostPages, swaps: Tensor) -> None:
    """Copy whole pages to the host, all layers. Shapes: swaps [n, 2] (page, host page).

    The host pages must be distinct. Queued on the current stream: synchronise before reading host memory. `swaps` in
    host memory avoids a wait.
    """
    order = _to_host_array(swaps)
    order = order[np.argsort(order[:, 1], kind="stable")]
    for part, staged in _iter_batches(pages, order):
        copy_page_words(
            _word_stores(pages), _layers_first(staged), _page_pairs(part[:, 0], np.arange(len(part)), pages)
        )
        for first, last in _consecutive_runs(part[:, 1]):
            begin = int(part[first, 1])
            for kept, stage in zip(host.tensors, staged, strict=True):
                as_words(kept)[begin : begin + last - first].copy_(stage[first:last], non_blocking=True)


def swap_in(pages: PageStore, host: HostPages, swaps: Tensor) -> None:
    """Copy whole pages from the host, all layers. Shapes: swaps [n, 2] (host page, page).

    The target pages must be distinct; a host page may be copied to several of them. Queued on the current stream.
    """
    order = _to_host_array(swaps)
    order = order[np.argsort(order[:, 0], kind="stable")]
    for part, staged in _iter_batches(pages, order):
        wanted, place = np.unique(part[:, 0], return_inverse=True)
        for first, last in _consecutive_runs(wanted):
            begin = int(wanted[first])
            for kept, stage in zip(host.tensors, staged, strict=True):
                stage[first:last].copy_(as_words(kept)[begin : begin + last - first], non_blocking=True)
        copy_page_words(_layers_first(staged), _word_stores(pages), _page_pairs(place, part[:, 1], pages))


def _to_host_array(swaps: Tensor) -> NDArray[np.int64]:
    """Return the swaps as a numpy array."""
    return swaps.cpu().numpy().astype(np.int64)


def _iter_batches(pages: PageStore, order: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], tuple[Tensor, ...]]]:
    """Split swaps into batches; yield them with staging buffers, one per tensor, int32 [batch, L, words].

    All batches use the same buffers; the stream keeps them in order. After the last batch the memory is reused by later
    work of the same stream.
    """
    count = max(1, STAGE_BYTES // pages.page_bytes)
    words = as_words(pages.tensors[0])
    shape = (min(count, len(order)), words.shape[0], words.shape[2])
    staged = tuple(torch.empty(shape, dtype=torch.int32, device=words.device) for _ in pages.tensors)
    for first in range(0, len(order), count):
        part = order[first : first + count]
        yield part, tuple(stage[: len(part)] for stage in staged)


def _consecutive_runs(host_pages: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of each run of consecutive host pages."""
    breaks = np.flatnonzero(np.diff(host_pages) != 1) + 1
    edges = [0, *breaks.tolist(), len(host_pages)]
    return pairwise(edges)


def _word_stores(pages: PageStore) -> tuple[Tensor, ...]:
    """Return the tensors of a store viewed as int32, see `as_words`."""
    return tuple(as_words(memory) for memory in pages.tensors)


def _layers_first(staged: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return staging buffers with the layers first, as in the store."""
    return tuple(stage.transpose(0, 1) for stage in staged)


def _page_pairs(source: NDArray[np.int64], target: NDArray[np.int64], pages: PageStore) -> Tensor:
    """Return (source, target) pairs on the device of the pages."""
    pairs = torch.from_numpy(np.stack((source, target), 1))
    device = pages.tensors[0].device
    if device.type == "cuda":  # a copy from pageable memory may wait for the stream
        pairs = pairs.pin_memory()
    return pairs.to(device, non_blocking=True)
