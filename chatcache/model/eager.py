"""Run any step: place its rows, compute them, draw. Where memory is short, in halves."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from chatcache_kernels.types import KVPages
from torch import Tensor

from chatcache.model.attention import AttentionBackend, AttentionStep, Network
from chatcache.model.device_errors import is_out_of_memory
from chatcache.model.filters import Index
from chatcache.model.halving import Part, halve, join
from chatcache.model.sampler import AnySampler
from chatcache.model.scores import fill_all, part_sizes, scored_tokens
from chatcache.model.tables import Changes, DeviceSlots, PageTables, Placement
from chatcache.model.transfer import to_device, upload
from chatcache.sched.plan import I32, Draws, Rows, Scores, StepPlan, StepResult

Finish = Callable[[], StepResult]
"""Returns what was drawn, once the device is done."""

log = logging.getLogger(__name__)


class EagerSteps:
    """Runs steps operation by operation. `slots`: the device's, where it keeps any."""

    def __init__(
        self,
        network: Network,
        kernels: AttentionBackend,
        pages: KVPages,
        tables: PageTables,
        slots: DeviceSlots | None,
        sampler: AnySampler,
    ) -> None:
        self._network = network
        self._kernels = kernels
        self._pages = pages
        self._tables = tables
        self._slots = slots
        self._sampler = sampler
        self._device = network.geometry.device
        self._was_short = False

    def run(self, plan: StepPlan, changes: Changes, placement: Placement | None) -> Finish:
        """Enqueue a step whose rows go where `placement` says; None if it has none.

        Raises: whatever torch raises, for lack of memory only if a single token does not fit.
        """
        self.change(changes)
        self.copy(plan.copies)
        if placement is None:
            return nothing
        whole = Part.whole(plan)
        done = self._attempt(whole, placement, self._tokens(plan.rows))
        if len(done) == 1:
            return done[0][1]
        return lambda: join(whole, [(part, finish()) for part, finish in done])

    def change(self, changes: Changes) -> None:
        """Bring changes of the page tables to the device, if it keeps any."""
        if self._slots is not None:
            self._slots.apply(changes)

    def copy(self, copies: I32) -> None:
        """Enqueue a plan's copies. Shapes: copies [C, 2]."""
        if len(copies):
            self._kernels.copy_pages(self._pages, to_device(copies, self._device))

    def forward(self, rows: Rows, drawn: Index) -> Tensor:
        """Return logits [U, V] of the last token of each row in `drawn` [U]; pages gain the new tokens' K and V."""
        return self._forward(self._tables.place(rows), self._tokens(rows), drawn)

    def _attempt(self, part: Part, placement: Placement | None, tokens: Tensor) -> list[tuple[Part, Finish]]:
        """Run a part of a step, or its halves one after the other if there is no memory to run it whole."""
        try:
            return [(part, self._run(part, placement or self._tables.place(part.rows), tokens))]
        except RuntimeError as error:
            halves = halve(part) if is_out_of_memory(error) else None
            if halves is None:
                raise
        # here the error, and with it the tensors of its frames, is gone
        self._make_room(part)
        return [done for half in halves for done in self._attempt(half, None, tokens)]

    def _make_room(self, part: Part) -> None:
        if not self._was_short:
            shape = len(part.rows.slot), len(part.rows.tokens)
            log.warning("no memory for a step of %d rows and %d tokens: such steps run in halves, slower", *shape)
            self._was_short = True
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, part: Part, placement: Placement, tokens: Tensor) -> Finish:
        rows, draws = part.rows, part.draws
        own = tokens[part.first_token : part.first_token + len(rows.tokens)]
        rows_drawn, index = np.unique(draws.row, return_inverse=True)
        drawn: Index = rows_drawn.astype(np.intp)
        if part.scores is not None:
            return self._scored(part, part.scores, placement, own, drawn, index)
        logits = self._forward(placement, own, drawn)
        return self._draw(logits, index, draws, rows) if len(index) else nothing

    def _draw(self, logits: Tensor, index: Index, draws: Draws, rows: Rows) -> Finish:
        if self._slots is None:
            return self._sampler.enqueue(logits, index, draws).result
        once = (draws.width == 1) & (np.bincount(draws.row, minlength=len(rows.slot)) == 1)[draws.row]
        slots = np.where(once, rows.slot[draws.row], np.int32(-1))
        return self._sampler.enqueue(logits, index, draws, slots, self._slots.last_token).result

    def _scored(
        self, part: Part, scores: Scores, placement: Placement, tokens: Tensor, drawn: Index, index: Index
    ) -> Finish:
        """Run the rows, draw, and score the prompts that asked for it, never holding all their logits at once."""
        geometry = self._network.geometry
        wanted = np.concatenate((placement.last[drawn], scored_tokens(part.rows, scores)))
        sizes = part_sizes(len(drawn), len(wanted), geometry.vocab_size * geometry.dtype.itemsize)
        step, positions = self._step(placement)
        parts = self._network.forward_parts(
            tokens, positions, step, torch.split(to_device(wanted, self._device), sizes)
        )
        sheet = self._sampler.sheet(part.rows, scores)
        logits = next(parts)
        drawing: Finish = nothing
        if len(index):
            drawing = self._draw(logits[: len(drawn)], index, part.draws, part.rows)
        sheet.fill(logits[len(drawn) :])
        del logits
        fill_all(sheet, parts)
        return lambda: sheet.add_to(drawing())

    def _forward(self, placement: Placement, tokens: Tensor, drawn: Index) -> Tensor:
        step, positions = self._step(placement)
        return self._network.forward(tokens, positions, step, to_device(placement.last[drawn], self._device))

    def _step(self, placement: Placement) -> tuple[AttentionStep, Tensor]:
        """Return the rows' attention and positions [T]."""
        batch, positions = placement.to(self._device, self._slots)
        return AttentionStep(self._kernels, self._pages, batch), positions

    def _tokens(self, rows: Rows) -> Tensor:
        """Return the rows' tokens [T], those that the host has not seen yet as they were drawn."""
        tokens = to_device(rows.tokens.astype(np.int64), self._device)
        at = np.flatnonzero(rows.tokens < 0)
        if not len(at):
            return tokens
        if self._slots is None:
            raise ValueError(f"token {at[0]} of the step is not known, and this runner keeps none")
        row = np.searchsorted(np.cumsum(rows.num_tokens), at, side="right")
        places, slots = upload((at, rows.slot[row].astype(np.int64)), self._device)
        return tokens.index_copy(0, places, self._slots.last_token.index_select(0, slots).long())


def nothing() -> StepResult:
    """Return the result of a step that draws nothing."""
    ids, logprobs = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
    return StepResult(ids, logprobs, ids, logprobs)
