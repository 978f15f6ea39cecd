"""Deterministic mode: logits that do not depend on how requests are batched.

The bits of a token's logits are the same for any batch, order, chunk size, cache state and preemption.

A matrix multiplication may add up its products in another order for each number of rows, so that one row's result has
other last bits alone than among 31 other rows. For one fixed number of rows the order does not depend on what the rows
hold or on their positions, and many numbers of rows share one order.

On a CPU, `BatchInvariantLinear` multiplies rows in tiles whose sizes a probe has shown, on this machine and for this
weight shape, to give the same bits as tiles of `REFERENCE_ROWS` rows on one thread. The last tile is padded with zeros.
The probe compares one thread with all threads, so results do not depend on the number of threads either.

On a GPU, `TritonLinear` uses the tiles of `chatcache_kernels.triton.invariant_matmul` that a probe has shown, on this
device and for this width, to give the same bits as the first one. Each step uses the fastest of them.

The mode is chosen when a model is loaded. The native decoder gets these layers and the kernels of
`chatcache_kernels.cpu.batch_invariant` or `chatcache_kernels.triton.batch_invariant`; a transformers model is run by
`TokenByToken`, on CPUs only. `check_determinism` then computes the same tokens in several arrangements and rejects a
model whose bits differ.

Captured decode steps run the same kernels in the same launch configurations as eager steps, and differ in the size of
their grids only. The sampling kernels of a GPU read each row of logits in blocks whose size depends on the vocabulary
only, with the same number of threads for all draws of a kind, and reduce each row apart, so a token and its
log-probability do not depend on the other draws of a step.

Bits may still differ between machines, GPU models, dtypes, and releases of torch, numba, Triton or transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from chatcache_kernels.types import AttentionBatch
from torch import Tensor
from torch.nn import functional

from chatcache.errors import ModelFolderError
from chatcache.model.attention import AttentionBackend, AttentionStep, Network, allocate_stores
from chatcache.model.geometry import Geometry
from chatcache.model.linear import Linear, packed_linear
from chatcache.model.page_tables import PageTables
from chatcache.model.states import make_states
from chatcache.model.streams import to_device
from chatcache.types.plan import Rows

if TYPE_CHECKING:
    from chatcache_kernels.triton.invariant_matmul import Tile

log = logging.getLogger(__name__)

TILE_SIZES = tuple(2**power for power in range(11))
REFERENCE_ROWS = 16
NUM_PROBES = 8
MAX_PROBE_PRODUCTS = 2**31  # multiplications of one probe; sizes above REFERENCE_ROWS that need more are not used
MAX_PROBE_OUTPUTS = 512  # of a probe on a GPU, whose tiles of outputs are all alike but for the last

Chunk = tuple[int, int, int]  # (prompt, first token, end)
CHECKED_TOKENS = 21
ARRANGEMENTS: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], int, bool], ...] = (
    (((21,), (21,)), 1, False),  # each alone
    (((21,), (21,)), 0, True),  # together, the second prompt first
    (((5, 1, 1, 1, 13), (3, 1, 1, 1, 15)), 1, False),  # chunks and single tokens in the same steps
)
"""Chunk sizes of both prompts, delay of the second prompt in steps, and whether it comes first in a batch."""


class BatchInvariantLinear:
    """Linear layer that multiplies rows in tiles of probed sizes.

    Shapes: weight [out, in], bias [out]; call: [T, in] -> [T, out].
    """

    __slots__ = ("_num_outputs", "_product", "_sizes")

    def __init__(self, product: Linear, num_outputs: int, sizes: tuple[int, ...]) -> None:
        self._product = product
        self._num_outputs = num_outputs
        self._sizes = sizes

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts, first = [], 0
        for size in tile_sizes(len(x), self._sizes):
            tile = x[first : first + size]
            first += size
            if len(tile) == size:
                parts.append(self._product(tile))
            else:
                parts.append(self._product(functional.pad(tile, (0, 0, 0, size - len(tile))))[: len(tile)])
        if not parts:
            return x.new_empty(0, self._num_outputs)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class BatchInvariantLinearFactory:
    """Make the batch-invariant layers of one model; each weight shape is probed once.

    A call raises ModelFolderError if this machine cannot multiply a weight of that shape invariantly.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int, torch.dtype, bool], tuple[int, ...]] = {}

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> BatchInvariantLinear:
        num_outputs, num_inputs = weight.shape
        product = packed_linear(weight, bias)
        if product is None:
            raise ModelFolderError(
                f"deterministic: oneDNN has no product for a weight of {num_outputs} x {num_inputs} {weight.dtype} "
                "numbers on this machine"
            )
        key = (num_outputs, num_inputs, weight.dtype, bias is not None)
        if key not in self._sizes:
            self._sizes[key] = find_invariant_sizes(*key)
        return BatchInvariantLinear(product, num_outputs, self._sizes[key])


def tile_sizes(num_rows: int, sizes: tuple[int, ...]) -> Iterator[int]:
    """Yield tile sizes that cover `num_rows` with few tiles and little padding.

    `sizes` are the allowed sizes, ascending.
    """
    while num_rows > 0:
        above = next((size for size in sizes if num_rows <= size), 0)
        below = max((size for size in sizes if size <= num_rows), default=0)
        size = above if above and (above < 2 * num_rows or not below) else below
        yield size
        num_rows -= size


def find_invariant_sizes(num_outputs: int, num_inputs: int, dtype: torch.dtype, has_bias: bool) -> tuple[int, ...]:
    """Return the tile sizes whose products equal those of `REFERENCE_ROWS` rows on one thread.

    The sizes are in ascending order. Raises: ModelFolderError if there is none.
    """
    weight, rows = make_probes(num_outputs, num_inputs, dtype)
    product = packed_linear(weight, rows[0, :1].repeat(num_outputs) if has_bias else None)
    if product is None:
        raise ModelFolderError(
            f"deterministic: oneDNN cannot multiply a weight of {num_outputs} x {num_inputs} {dtype}"
        )
    threads = torch.get_num_threads()
    found = []
    try:
        torch.set_num_threads(1)
        reference = _multiply_each_row(product, rows, REFERENCE_ROWS)
        for size in TILE_SIZES:
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


def make_probes(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a weight and rows whose products reveal the order of summation.

    Most products cancel exactly, so the sums consist of rounding errors, which differ visibly even in bfloat16. Two
    rows hold ordinary numbers, one very small and one very large numbers. Shapes: [out, in], [8, in].
    """
    noise = torch.Generator().manual_seed(num_outputs * 31 + num_inputs)
    half, distinct = num_inputs // 2, min(num_outputs, 512)
    shuffled = torch.randperm(num_inputs, generator=noise)
    pairs = torch.randn(distinct, half, generator=noise)
    odd = torch.zeros(max(distinct, NUM_PROBES), num_inputs - 2 * half)
    weight = torch.cat((pairs, -pairs, odd[:distinct]), dim=1)[:, shuffled].to(dtype)
    weight = weight.repeat(-(-num_outputs // distinct), 1)[:num_outputs].contiguous()
    mirrored = torch.randn(NUM_PROBES, half, generator=noise)
    rows = torch.cat((mirrored, mirrored, odd[:NUM_PROBES]), dim=1)[:, shuffled]
    rows[4:6] = torch.randn(2, num_inputs, generator=noise)
    rows[6] *= 2.0**-120
    rows[7] *= 2.0**90
    return weight, rows.to(dtype)


def _multiply_each_row(product: Linear, rows: Tensor, size: int) -> Tensor:
    """Multiply each row as the first row of its own zero-padded tile."""
    return torch.cat([product(functional.pad(row[None], (0, 0, 0, size - 1)))[:1].clone() for row in rows])


def _agrees(product: Linear, rows: Tensor, size: int, num_threads: int, reference: Tensor) -> bool:
    """Return whether tiles of `size` rows give every row its reference bits.

    Each row is tried at several positions of the tile, among other rows and alone.
    """
    torch.set_num_threads(num_threads)
    positions = torch.arange(size)
    for shift in range(NUM_PROBES if size < NUM_PROBES else 2):
        number = (positions + 3 * shift) % NUM_PROBES
        if not _same_bits(product(rows[number]), reference[number]):
            return False
    num_alone = NUM_PROBES if size <= REFERENCE_ROWS else 1
    return _same_bits(_multiply_each_row(product, rows[:num_alone], size), reference[:num_alone])


class TritonLinear:
    """Linear layer that multiplies rows on a GPU in tiles of equal bits.

    `tiles`: the allowed tiles, smallest first. Shapes: weight [out, in], bias [out]; call: [T, in] -> [T, out].
    """

    __slots__ = ("_bias", "_multiprocessors", "_weight", "tiles")

    def __init__(self, weight: Tensor, bias: Tensor | None, tiles: Sequence[Tile]) -> None:
        from chatcache_kernels.triton.configs import get_chip

        self._weight, self._bias, self.tiles = weight, bias, tiles
        self._multiprocessors = get_chip(weight.device).multiprocessors

    def __call__(self, x: Tensor) -> Tensor:
        from chatcache_kernels.triton.invariant_matmul import choose_tile, multiply

        tile = choose_tile(self.tiles, len(x), len(self._weight), self._multiprocessors)
        return multiply(x, self._weight, self._bias, tile)


class TritonLinearFactory:
    """Make the batch-invariant layers of one model on a GPU; each width is probed once.

    A call raises ModelFolderError if products of that width depend on the batch.
    """

    def __init__(self) -> None:
        self._tiles: dict[tuple[int, int, torch.dtype, bool], tuple[Tile, ...]] = {}

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> TritonLinear:
        num_outputs, num_inputs = weight.shape
        num_probed = min(num_outputs, MAX_PROBE_OUTPUTS + num_outputs % MAX_PROBE_OUTPUTS)
        key = (num_probed, num_inputs, weight.dtype, bias is not None)
        if key not in self._tiles:
            self._tiles[key] = find_invariant_tiles(*key, weight.device)
        return TritonLinear(weight.contiguous(), bias, self._tiles[key])


def find_invariant_tiles(
    num_outputs: int, num_inputs: int, dtype: torch.dtype, has_bias: bool, device: torch.device
) -> tuple[Tile, ...]:
    """Return the tiles whose products have the bits that the first tile gives each row alone.

    The probe also compiles them, so that no later step has to.
    Raises: ModelFolderError if the first tile is not among them.
    """
    from chatcache_kernels.triton.invariant_matmul import multiply, tiles_for

    weight, rows = (each.to(device) for each in make_probes(num_outputs, num_inputs, dtype))
    bias = rows[0, :1].repeat(num_outputs) if has_bias else None
    tiles = tiles_for(dtype)
    alone = torch.cat([multiply(row[None], weight, bias, tiles[0]) for row in rows])

    def agrees(tile: Tile) -> bool:
        positions = torch.arange(tile.rows + NUM_PROBES // 2, device=device)
        numbers = [(positions + shift) % NUM_PROBES for shift in range(NUM_PROBES)]
        return all(_same_bits(multiply(rows[each], weight, bias, tile), alone[each]) for each in numbers)

    found = tuple(tile for tile in tiles if agrees(tile))
    if tiles[0] not in found:
        raise ModelFolderError(
            f"deterministic: on {device} products with a weight of {num_outputs} x {num_inputs} {dtype} numbers depend "
            "on the batch"
        )
    log.info("products of %d numbers: %d of %d tiles have equal bits", num_inputs, len(found), len(tiles))
    return found


def _same_bits(one: Tensor, other: Tensor) -> bool:
    kind = torch.int32 if one.dtype == torch.float32 else torch.int16
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


class TokenByToken:
    """A `Network` that runs another network on one token at a time.

    The wrapped network's own operations always see the same shapes, so their results cannot depend on the batch;
    attention uses the batch-invariant kernels. Slow for prompts: every token is a pass over all weights.

    `idle_bytes`: of weights that a token does not read.
    """

    def __init__(self, network: Network, idle_bytes: int = 0) -> None:
        self._network = network
        self.idle_bytes = idle_bytes

    @property
    def geometry(self) -> Geometry:
        """Return the geometry of the wrapped network."""
        return self._network.geometry

    def forward(self, tokens: Tensor, positions: Tensor, step: AttentionStep, drawn: Tensor | None) -> Tensor:
        """Return logits, one forward pass per token; arguments as in `Network.forward`."""
        drawn = torch.arange(len(tokens)) if drawn is None else drawn
        geometry = self.geometry
        logits = torch.empty(len(drawn), geometry.vocab_size, dtype=geometry.dtype, device=geometry.device)
        wanted: dict[int, list[int]] = {}
        for place, token in enumerate(drawn.tolist()):
            wanted.setdefault(token, []).append(place)
        zero, nothing = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        for token, single in enumerate(_single_tokens(step)):
            one = slice(token, token + 1)
            indices = wanted.get(token)
            out = self._network.forward(tokens[one], positions[one], single, zero if indices else nothing)
            for place in indices or ():
                logits[place] = out[0]
        return logits

    def hidden_states(self, tokens: Tensor, positions: Tensor, step: AttentionStep, wanted: Tensor) -> Tensor:
        """Return final hidden states, one forward pass per token; arguments as in `Network.hidden_states`."""
        zero = torch.zeros(1, dtype=torch.int64)
        found = []
        for token, single in enumerate(_single_tokens(step)):
            one = slice(token, token + 1)
            found.append(self._network.hidden_states(tokens[one], positions[one], single, zero))
        return torch.cat(found)[wanted]

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits of final hidden states, [N, V], computed one by one."""
        return torch.cat([self._network.logits(each) for each in torch.split(hidden_states, 1)])


def _single_tokens(step: AttentionStep) -> Iterator[AttentionStep]:
    """Yield a step for each new token, in order."""
    states = step.states
    if states is not None:
        states.is_changed = True
    rows = np.repeat(np.arange(len(step.batch.num_tokens)), step.batch.num_tokens.numpy()).tolist()
    for row, batches in zip(rows, zip(*map(_single_batches, step.batches), strict=True), strict=True):
        state = replace(states, slots=states.slots[row : row + 1]) if states is not None else None
        yield replace(step, batches=batches, states=state)


def _single_batches(batch: AttentionBatch) -> Iterator[AttentionBatch]:
    """Yield each new token as its own batch, in order."""
    token = 0
    for row, (start, count) in enumerate(zip(batch.start.tolist(), batch.num_tokens.tolist(), strict=True)):
        for position in range(start, start + count):
            ends = torch.tensor([position, 1, 0, 1], dtype=torch.int32)
            tables, slots = batch.tables[row : row + 1], batch.slots[token : token + 1]
            yield AttentionBatch(tables, ends[:1], ends[1:2], ends[2:], slots, 1, position + 1)
            token += 1


def check_determinism(network: Network, kernels: AttentionBackend, page_size: int, max_model_len: int) -> None:
    """Check that two prompts get the same logits alone and together, whole and in chunks.

    The check allocates a few KV pages of its own.
    Raises: ModelFolderError if any bits differ, or if the kernels do not support the model's shapes.
    """
    trial = _DeterminismProbe(network, kernels, page_size, min(CHECKED_TOKENS, max_model_len))
    expected: dict[tuple[int, int], Tensor] = {}
    try:
        for sizes, delay, backwards in ARRANGEMENTS:
            for grants in trial.schedule(sizes, delay, backwards=backwards):
                for cell, bits in trial.run(grants).items():
                    if not torch.equal(bits, expected.setdefault(cell, bits)):
                        raise ModelFolderError(
                            "deterministic: this model's logits depend on the batch on this machine; run it without"
                        )
    except ValueError as error:
        raise ModelFolderError(f"deterministic: the exact kernels do not fit this model: {error}") from error


class _DeterminismProbe:
    """Two random prompts and the KV pages to compute them in."""

    def __init__(self, network: Network, kernels: AttentionBackend, page_size: int, num_tokens: int) -> None:
        self._network = network
        self._kernels = kernels
        each = -(-num_tokens // page_size)
        geometry = network.geometry
        self._stores = allocate_stores(kernels, geometry, 1 + 2 * each, page_size)
        self._states = make_states(geometry.state_shapes, 3, 0, geometry.device)
        self._tables = PageTables(2, each, page_size, kernels.prepare, geometry.forms)
        self._tables.rows[:] = np.arange(1, 1 + 2 * each, dtype=np.int32).reshape(2, each)
        noise = np.random.default_rng(0)
        self._tokens = noise.integers(0, network.geometry.vocab_size, (2, num_tokens)).astype(np.int32)

    def schedule(self, sizes: Sequence[Sequence[int]], delay: int, *, backwards: bool) -> list[list[Chunk]]:
        """Return the chunks that each step computes; the second prompt starts `delay` steps later.

        `sizes`: chunk lengths of the two prompts. `backwards`: reverse the order of the chunks in a step.
        """
        steps: list[list[Chunk]] = [[] for _ in range(delay + max(map(len, sizes)))]
        for prompt, chunks in enumerate(sizes):
            first = 0
            for number, size in enumerate(chunks):
                end = min(first + size, self._tokens.shape[1])
                if end > first:
                    steps[number + delay * prompt].append((prompt, first, end))
                first = end
        return [step[::-1] if backwards else step for step in steps if step]

    def run(self, grants: Sequence[Chunk]) -> Mapping[tuple[int, int], Tensor]:
        """Compute the chunks of one step; return the bits of the logits of each (prompt, position)."""
        tokens = np.concatenate([self._tokens[prompt, first:end] for prompt, first, end in grants])
        table = np.array(grants, np.int32)
        states = self._states
        rows = Rows(table[:, 0], table[:, 1], table[:, 2] - table[:, 1], tokens, 1 + table[:, 0])
        if states is not None:  # a prompt starts from the zero state
            begins = rows.state[rows.start == 0]
            states.copy(np.stack((np.zeros_like(begins), begins), 1))
        device = self._network.geometry.device
        place = self._tables.step_layout(rows)
        batches, positions = place.to(device)
        state_step = states.step(rows.state) if states is not None else None
        step = AttentionStep(self._kernels, self._stores, batches, self._network.geometry.places, state_step)
        ids = to_device(tokens.astype(np.int64), device)
        with torch.inference_mode():
            logits = self._network.forward(ids, positions, step, torch.arange(len(tokens), device=device))
        kind = torch.int32 if logits.dtype == torch.float32 else torch.int16
        cells = [(prompt, position) for prompt, first, end in grants for position in range(first, end)]
        return dict(zip(cells, logits.contiguous().view(kind), strict=True))
