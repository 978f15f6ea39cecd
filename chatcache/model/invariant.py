"""Linear layers of which no bit of a row's result depends on the rows beside it.

A matrix multiplication adds up in an order of its own for each number of rows: alone or among 31 others, the same row
comes out with other last bits. But for one number of rows the order is the same whatever the rows hold and wherever
they lie, and often it is the same for many numbers. So rows are multiplied in tiles of sizes of which a probe has
shown, on this machine and for this shape, that they agree with each other to the bit; the last tile is filled up with
zeros. The probe compares one thread and all threads, so that results do not depend on the number of threads either.

What a row's bits are is laid down by tiles of `REFERENCE_ROWS` rows on one thread; other sizes are an optimisation.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from chatcache.errors import ModelFolderError
from chatcache.model.linear import Product, packed_product

SIZES = tuple(2**power for power in range(11))
REFERENCE_ROWS = 16
NUM_PROBES = 8
MAX_PROBE_PRODUCTS = 2**31  # multiplications in one probe beyond `REFERENCE_ROWS` rows; larger sizes go unused


class InvariantLinear:
    """A linear layer for inference. Shapes: weight [out, in], bias [out]; call: [T, in] -> [T, out]."""

    __slots__ = ("_num_outputs", "_product", "_sizes")

    def __init__(self, product: Product, num_outputs: int, sizes: tuple[int, ...]) -> None:
        self._product = product
        self._num_outputs = num_outputs
        self._sizes = sizes

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts, first = [], 0
        for size in cut(len(x), self._sizes):
            tile = x[first : first + size]
            first += size
            if len(tile) == size:
                parts.append(self._product(tile))
            else:
                parts.append(self._product(functional.pad(tile, (0, 0, 0, size - len(tile))))[: len(tile)])
        if not parts:
            return x.new_empty(0, self._num_outputs)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class InvariantLinears:
    """Makes the layers of one model; shapes that occur again are probed once.

    Calling it raises ModelFolderError where this machine has no way to multiply such a weight invariantly.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int, torch.dtype, bool], tuple[int, ...]] = {}

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> InvariantLinear:
        num_outputs, num_inputs = weight.shape
        product = packed_product(weight, bias)
        if product is None:
            raise ModelFolderError(
                f"deterministic: oneDNN has no product for a weight of {num_outputs} x {num_inputs} {weight.dtype} "
                "numbers on this machine"
            )
        key = (num_outputs, num_inputs, weight.dtype, bias is not None)
        if key not in self._sizes:
            self._sizes[key] = agreeing_sizes(*key)
        return InvariantLinear(product, num_outputs, self._sizes[key])


def cut(num_rows: int, sizes: tuple[int, ...]) -> Iterator[int]:
    """Yield tile sizes that cover `num_rows`, few and not much too large. `sizes` ascend."""
    while num_rows > 0:
        above = next((size for size in sizes if num_rows <= size), 0)
        below = max((size for size in sizes if size <= num_rows), default=0)
        size = above if above and (above < 2 * num_rows or not below) else below
        yield size
        num_rows -= size


def agreeing_sizes(num_outputs: int, num_inputs: int, dtype: torch.dtype, has_bias: bool) -> tuple[int, ...]:
    """Return the numbers of rows whose products agree with those of `REFERENCE_ROWS` rows on one thread, ascending.

    Raises: ModelFolderError if there is none.
    """
    weight, rows = probes(num_outputs, num_inputs, dtype)
    product = packed_product(weight, rows[0, :1].repeat(num_outputs) if has_bias else None)
    if product is None:
        raise ModelFolderError(
            f"deterministic: oneDNN cannot multiply a weight of {num_outputs} x {num_inputs} {dtype}"
        )
    threads = torch.get_num_threads()
    found = []
    try:
        torch.set_num_threads(1)
        reference = _row_by_row(product, rows, REFERENCE_ROWS)
        for size in SIZES:
            if size > REFERENCE_ROWS and size * weight.numel() > MAX_PROBE_PRODUCTS:
                continue
            if all(_agrees(product, rows, size, count, reference) for count in {1, threads}):
                found.append(size)
    finally:
        torch.set_num_threads(threads)
    if not found:
        raise ModelFolderError(
            f"deterministic: on this machine products with a weight of {num_outputs} x {num_inputs} {dtype} numbers "
            "depend on the batch"
        )
    return tuple(found)


def probes(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a weight and rows whose products show in what order they were added up. Shapes: [out, in], [8, in].

    Most products cancel exactly, so that what is left is rounding, even after it is rounded to bfloat16. Two rows are
    of plain numbers, one is tiny and one huge.
    """
    noise = torch.Generator().manual_seed(num_outputs * 31 + num_inputs)
    half, distinct = num_inputs // 2, min(num_outputs, 512)
    shuffled = torch.randperm(num_inputs, generator=noise)
    pairs = torch.randn(distinct, half, generator=noise)
    odd = torch.zeros(max(distinct, NUM_PROBES), num_inputs - 2 * half)
    weight = torch.cat((pairs, -pairs, odd[:distinct]), dim=1)[:, shuffled].to(dtype)
    weight = weight.repeat(-(-num_outputs // distinct), 1)[:num_outputs].contiguous()
    twins = torch.randn(NUM_PROBES, half, generator=noise)
    rows = torch.cat((twins, twins, odd[:NUM_PROBES]), dim=1)[:, shuffled]
    rows[4:6] = torch.randn(2, num_inputs, generator=noise)
    rows[6] *= 2.0**-120
    rows[7] *= 2.0**90
    return weight, rows.to(dtype)


def _row_by_row(product: Product, rows: Tensor, size: int) -> Tensor:
    """Multiply each row in a tile of its own, in first place, zeros below."""
    return torch.cat([product(functional.pad(row[None], (0, 0, 0, size - 1)))[:1].clone() for row in rows])


def _agrees(product: Product, rows: Tensor, size: int, num_threads: int, reference: Tensor) -> bool:
    """Tell whether tiles of `size` rows give each row its reference bits, in every place and beside other rows."""
    torch.set_num_threads(num_threads)
    places = torch.arange(size)
    for shift in range(NUM_PROBES if size < NUM_PROBES else 2):
        number = (places + 3 * shift) % NUM_PROBES
        if not _same_bits(product(rows[number]), reference[number]):
            return False
    lone = NUM_PROBES if size <= REFERENCE_ROWS else 1
    return _same_bits(_row_by_row(product, rows[:lone], size), reference[:lone])


def _same_bits(one: Tensor, other: Tensor) -> bool:
    kind = torch.int32 if one.dtype == torch.float32 else torch.int16
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))
