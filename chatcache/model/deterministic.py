"""Determinism, level 2: logits that do not depend, to the bit, on batch, order, chunks, cache or preemption.

Chosen when a model is loaded, nowhere else: the native decoder gets `invariant.InvariantLinears` and the kernels of
`chatcache_kernels.cpu.invariant`, a transformers model is run by `TokenByToken`. Then `check_determinism` computes the
same tokens in several arrangements, and a model whose bits differ is refused: the promise is never silently false.

Bits may still differ between machines, releases of torch, numba or transformers, and dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from chatcache_kernels.types import AttentionBatch
from torch import Tensor

from chatcache.errors import ModelFolderError
from chatcache.model.attention import AttentionBackend, AttentionStep, Geometry, Network, allocate
from chatcache.model.tables import PageTables
from chatcache.model.transfer import to_device
from chatcache.sched.plan import Rows

Grant = tuple[int, int, int]  # (prompt, first token, end)

CHECKED_TOKENS = 21
ARRANGEMENTS: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], int, bool], ...] = (
    (((21,), (21,)), 1, False),  # each alone
    (((21,), (21,)), 0, True),  # together, the other way round
    (((5, 1, 1, 1, 13), (3, 1, 1, 1, 15)), 1, False),  # chunks and single tokens beside each other
)
"""Chunk sizes of both prompts, how many steps later the second begins, and whether it comes first in a batch."""


class TokenByToken:
    """Runs a network on one token at a time. Satisfies `attention.Network`.

    The network's own operations always see the very same shapes then, so whatever they do with shapes they do to every
    token; attention is ours. Slow for prompts: a pass over all weights for each token.
    """

    def __init__(self, network: Network) -> None:
        self._network = network

    @property
    def geometry(self) -> Geometry:
        """Return the network's."""
        return self._network.geometry

    def forward(self, tokens: Tensor, positions: Tensor, step: AttentionStep, drawn: Tensor | None) -> Tensor:
        """Return logits [U, V] of the tokens at `drawn`, of all if None. Shapes: tokens, positions [T]; drawn [U]."""
        drawn = torch.arange(len(tokens)) if drawn is None else drawn
        geometry = self.geometry
        logits = torch.empty(len(drawn), geometry.vocab_size, dtype=geometry.dtype, device=geometry.device)
        wanted: dict[int, list[int]] = {}
        for place, token in enumerate(drawn.tolist()):
            wanted.setdefault(token, []).append(place)
        zero, nothing = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        for token, batch in enumerate(_single_tokens(step.batch)):
            one = slice(token, token + 1)
            places = wanted.get(token)
            single = replace(step, batch=batch)
            out = self._network.forward(tokens[one], positions[one], single, zero if places else nothing)
            for place in places or ():
                logits[place] = out[0]
        return logits

    def forward_parts(
        self, tokens: Tensor, positions: Tensor, step: AttentionStep, parts: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Yield the logits of each part in turn, a pass over all tokens for each."""
        for part in parts:
            yield self.forward(tokens, positions, step, part)


def _single_tokens(batch: AttentionBatch) -> Iterator[AttentionBatch]:
    """Yield each new token as a batch of its own, in order."""
    token = 0
    for row, (start, count) in enumerate(zip(batch.start.tolist(), batch.num_tokens.tolist(), strict=True)):
        for position in range(start, start + count):
            ends = torch.tensor([position, 1, 0, 1], dtype=torch.int32)
            tables, slots = batch.tables[row : row + 1], batch.slots[token : token + 1]
            yield AttentionBatch(tables, ends[:1], ends[1:2], ends[2:], slots, 1, position + 1)
            token += 1


def check_determinism(network: Network, kernels: AttentionBackend, page_size: int, max_model_len: int) -> None:
    """Compute two prompts alone and together, in one chunk and in several, on a few pages of their own, and compare
    all logits. Raises: ModelFolderError if bits differ, or if the kernels refuse a shape.
    """
    trial = _Trial(network, kernels, page_size, min(CHECKED_TOKENS, max_model_len))
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


class _Trial:
    """Two prompts and pages for both."""

    def __init__(self, network: Network, kernels: AttentionBackend, page_size: int, num_tokens: int) -> None:
        self._network = network
        self._kernels = kernels
        each = -(-num_tokens // page_size)
        self._pages = allocate(kernels, network.geometry, 1 + 2 * each, page_size)
        self._tables = PageTables(2, each, page_size)
        self._tables.rows[:] = np.arange(1, 1 + 2 * each, dtype=np.int32).reshape(2, each)
        noise = np.random.default_rng(0)
        self._tokens = noise.integers(0, network.geometry.vocab_size, (2, num_tokens)).astype(np.int32)

    def schedule(self, sizes: Sequence[Sequence[int]], delay: int, *, backwards: bool) -> list[list[Grant]]:
        """Return the steps that grant each prompt its chunks, the second prompt's `delay` steps later."""
        steps: list[list[Grant]] = [[] for _ in range(delay + max(map(len, sizes)))]
        for prompt, chunks in enumerate(sizes):
            first = 0
            for number, size in enumerate(chunks):
                end = min(first + size, self._tokens.shape[1])
                if end > first:
                    steps[number + delay * prompt].append((prompt, first, end))
                first = end
        return [step[::-1] if backwards else step for step in steps if step]

    def run(self, grants: Sequence[Grant]) -> Mapping[tuple[int, int], Tensor]:
        """Compute one step; return the bits of each (prompt, position)'s logits."""
        tokens = np.concatenate([self._tokens[prompt, first:end] for prompt, first, end in grants])
        table = np.array(grants, np.int32)
        rows = Rows(table[:, 0], table[:, 1], table[:, 2] - table[:, 1], tokens)
        device = self._network.geometry.device
        place = self._tables.place(rows)
        batch, positions = place.to(device)
        step = AttentionStep(self._kernels, self._pages, batch)
        ids = to_device(tokens.astype(np.int64), device)
        with torch.inference_mode():
            logits = self._network.forward(ids, positions, step, torch.arange(len(tokens), device=device))
        kind = torch.int32 if logits.dtype == torch.float32 else torch.int16
        cells = [(prompt, position) for prompt, first, end in grants for position in range(first, end)]
        return dict(zip(cells, logits.contiguous().view(kind), strict=True))
