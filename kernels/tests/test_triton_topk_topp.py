"""The tokens that top_k, top_p and min_p keep, against sorting in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
import triton
from chatcache_kernels.triton import sampling
from chatcache_kernels.triton import sampling_ops as fields
from numpy.typing import NDArray
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ROWS = 64 if triton.knobs.runtime.interpret else 1
SMALL = sampling.LaunchConfig(filter_chunk=64, block=128, rows=ROWS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Vocabularies of models. The interpreter takes half a minute for one, and as long for every element type.
LARGE = [(vocab_size, dtype) for vocab_size in (49_152, 151_936) for dtype in DTYPES]
if triton.knobs.runtime.interpret:
    LARGE = [(49_152, torch.float32), (151_936, torch.bfloat16)]
ROUNDING = 1e-6  # of a share of the mass; the kernel computes exp and top_p * mass in float32


@dataclass(frozen=True, slots=True)
class Filter:
    """Filters of one draw. 0, 1 and 0 are off."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0


FILTERS = (
    *(Filter(top_k=top_k) for top_k in (1, 2, 17, 150, 332, 333, 5_000)),
    *(Filter(top_p=top_p) for top_p in (0.0, 1e-7, 0.3, 0.9, 0.999, 1 - 1e-6, 1 - 2.0**-24)),
    *(Filter(top_k, top_p) for top_k in (1, 40, 300) for top_p in (1e-3, 0.5, 0.95)),
    Filter(min_p=0.05),
    Filter(min_p=1.0),
    Filter(top_k=40, top_p=0.9, min_p=0.02),
    Filter(top_p=0.9, min_p=0.02),
    Filter(top_k=40, top_p=0.9, temperature=0.25),
    Filter(top_p=0.9, temperature=4.0),
)


def find_kept(
    x: Tensor, filters: list[Filter], words: Tensor | None, launches: sampling.LaunchConfig
) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Return the tokens that the kernels keep, and their scaled logits. Shapes: x [N, V] -> [N, V]."""
    table = torch.zeros(fields.NUM_FIELDS, len(filters), dtype=torch.int32)

    def fill(field: object, values: list[float]) -> None:
        table[field.value] = torch.tensor(values).view(torch.int32)  # type: ignore[attr-defined]

    table[fields.ROW.value] = table[fields.RAW_ROW.value] = torch.arange(len(filters))
    table[fields.MASK.value] = torch.arange(len(filters)) if words is not None else -1
    table[fields.FILTERED.value] = 1
    table[fields.TOP_K.value] = torch.tensor([each.top_k for each in filters])
    temperature = [each.temperature for each in filters]
    fill(fields.TEMPERATURE, temperature)
    fill(fields.TOP_P, [each.top_p for each in filters])
    fill(fields.LOG_MIN_P, [float(np.log(each.min_p)) if each.min_p else -np.inf for each in filters])
    base = torch.zeros(x.shape[1], dtype=torch.int32, device=x.device)
    batch = sampling.DrawBatch(x, x, base, table.to(x.device), words, True, True, launches)
    top, least, last = sampling.find_cutoffs(batch).cpu()
    allowed = x.float().cpu()
    if words is not None:
        allowed = torch.where(unpack(words.cpu(), x.shape[1]), allowed, -torch.inf)
    healthy = allowed.amax(1).isfinite()
    assert top[healthy].equal(allowed.amax(1)[healthy])
    scaled = (allowed - top[:, None]) * (1.0 / torch.tensor(temperature)[:, None])
    ids = torch.arange(x.shape[1])
    kept = (scaled > least[:, None]) | ((scaled == least[:, None]) & (ids <= last.view(torch.int32)[:, None]))
    return (kept & (scaled > -torch.inf)).numpy(), scaled.numpy()


def unpack(words: Tensor, vocab_size: int) -> Tensor:
    """Return the bits of mask words as flags. Shapes: [N, V / 32] -> [N, V]."""
    ids = torch.arange(vocab_size)
    return ((words[:, ids >> 5] >> (ids & 31)) & 1) != 0


def check_kept(kept: NDArray[np.bool_], scaled: NDArray[np.float32], limits: Filter) -> None:
    """Check one row: a prefix of the rank order, exact in its length but for rounding of top_p. Shapes: [V]."""
    order = np.argsort(-scaled, kind="stable")
    weight = np.exp(scaled[order].astype(np.float64))
    floor = np.float32(np.log(limits.min_p)) if limits.min_p else -np.inf
    most = int(((scaled >= floor) & (scaled > -np.inf)).sum())
    if limits.top_k:
        most = min(most, limits.top_k)
    least = most
    if limits.top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(weight[:most])[:-1]]) / weight[:most].sum()
        least = max(int((before < limits.top_p * (1 - ROUNDING) - ROUNDING).sum()), 1)
        most = max(int((before < limits.top_p * (1 + ROUNDING) + ROUNDING).sum()), 1)
    count = int(kept.sum())
    assert kept[order[:count]].all(), "the best tokens in rank order"
    assert least <= count <= most, f"{limits}: {count} of {least} to {most} tokens"


def check_all_kept(kept: NDArray[np.bool_], scaled: NDArray[np.float32], filters: Sequence[Filter]) -> None:
    """Check each row against its filter, as `check_kept` does."""
    for row, limits in enumerate(filters):
        check_kept(kept[row], scaled[row], limits)


def make_rows(kind: str, count: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Return logits [count, vocab_size] of one kind."""
    x = torch.randn(count, vocab_size) * 2
    if kind == "equal":
        x = torch.full_like(x, 1.5)
    elif kind == "ties":
        x = x.round()
    elif kind == "peak":
        x[:, vocab_size // 2] += 30
    elif kind == "one allowed":
        allowed = torch.randint(0, vocab_size, (count, 1))
        x = torch.full_like(x, -torch.inf).scatter_(1, allowed, -3.0)
    elif kind == "few allowed":
        x[:, 5:] = -torch.inf
    elif kind == "padded":
        x[:, -7:] = torch.finfo(torch.float16).min
    return x.to(dtype)


KINDS = ("random", "equal", "ties", "peak", "one allowed", "few allowed", "padded")


@pytest.mark.parametrize("max_found", [8192, 16], ids=["listed", "whole rows"])
@pytest.mark.parametrize(
    "dtype", [DTYPES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])], ids=str
)
@pytest.mark.usefixtures("fresh_random")
def test_cutoffs_of_every_filter_keep_the_sorted_prefix(dtype: torch.dtype, max_found: int, triton_device: str) -> None:
    """Every filter on every kind of row; a list of 16 candidates is too short for most of them."""
    filters = [each for each in FILTERS for _ in KINDS]
    rows = [make_rows(kind, len(FILTERS), 333, dtype) for kind in KINDS]
    x = torch.stack(rows, dim=1).flatten(0, 1).to(triton_device)
    kept, scaled = find_kept(x, filters, None, replace(SMALL, max_found=max_found))
    check_all_kept(kept, scaled, filters)


@pytest.mark.usefixtures("fresh_random")
def test_cutoffs_of_masked_rows_keep_the_sorted_prefix_of_allowed_tokens(triton_device: str) -> None:
    filters = list(FILTERS)
    x = make_rows("ties", len(filters), 333, torch.bfloat16).to(triton_device)
    words = torch.randint(-(2**31), 2**31, (len(filters), 11)).int()
    words[::5] = 0
    words[::5, 3] = 1 << 7  # one allowed token
    kept, scaled = find_kept(x, filters, words.to(triton_device), SMALL)
    check_all_kept(kept, scaled, filters)
    assert kept[::5].sum() == len(filters[::5])


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 5, 64, 65])
@pytest.mark.usefixtures("fresh_random")
def test_cutoffs_of_small_vocabularies_keep_the_sorted_prefix(vocab_size: int, triton_device: str) -> None:
    filters = [Filter(top_k=2), Filter(top_p=0.5), Filter(top_k=3, top_p=0.9), Filter(min_p=0.5)]
    x = make_rows("random", len(filters), vocab_size, torch.float32).to(triton_device)
    kept, scaled = find_kept(x, filters, None, sampling.LaunchConfig(rows=ROWS))
    check_all_kept(kept, scaled, filters)


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "dtype"), LARGE, ids=str)
@pytest.mark.usefixtures("fresh_random")
def test_cutoffs_of_large_vocabularies_keep_the_sorted_prefix(
    vocab_size: int, dtype: torch.dtype, triton_device: str
) -> None:
    """Rows that need the list, and rows whose list overflows."""
    cases = {
        "random": (Filter(50), Filter(50, 0.9), Filter(top_p=0.9), Filter(top_p=0.9, temperature=0.25), Filter(1000)),
        "ties": (Filter(50, 0.9), Filter(top_p=0.5)),
        "equal": (Filter(50), Filter(top_p=0.5)),
        "peak": (Filter(20, 0.95), Filter(top_p=0.95), Filter(min_p=0.1)),
    }
    filters = [each for some in cases.values() for each in some]
    x = torch.cat([make_rows(kind, len(some), vocab_size, dtype) for kind, some in cases.items()])
    kept, scaled = find_kept(x.to(triton_device), filters, None, sampling.LaunchConfig(rows=min(ROWS, 16)))
    check_all_kept(kept, scaled, filters)


@pytest.mark.usefixtures("fresh_random")
def test_cutoffs_next_to_rows_that_are_not_finite_keep_the_sorted_prefix(triton_device: str) -> None:
    filters = list(FILTERS)
    x = make_rows("random", len(filters), 333, torch.float32)
    for first, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[first::6, :: 1 if value < 0 else 7] = value
    kept, scaled = find_kept(x.to(triton_device), filters, None, SMALL)
    for row, limits in enumerate(filters):
        if row % 6 >= 3:
            check_kept(kept[row], scaled[row], limits)


@pytest.mark.usefixtures("fresh_random")
def test_cutoffs_do_not_depend_on_the_length_of_the_list(triton_device: str) -> None:
    """The search in a list and the search in whole rows give the same bits, and so does a repetition."""
    filters = [each for each in FILTERS if each.top_p < 1]
    x = make_rows("random", len(filters), 333, torch.float32).to(triton_device)
    find = partial(find_kept, x, filters, None)
    listed, whole, again = (find(replace(SMALL, max_found=most))[0] for most in (8192, 1, 8192))
    assert np.array_equal(listed, whole)
    assert np.array_equal(listed, again)
