"""Apply a plan to the pages and the model, in the order `sched.plan` documents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from chatcache_kernels.types import KVPages
from numpy.typing import NDArray

from chatcache.model.attention import AttentionBackend, AttentionStep, Network
from chatcache.model.sampler import Sampler
from chatcache.model.scores import ScoreSheet, fill_all, part_sizes, scored_tokens
from chatcache.model.swaps import Swaps
from chatcache.model.tables import PageTables
from chatcache.model.transfer import to_device
from chatcache.sched.plan import I64, KVCapacity, Rows, Scores, StepPlan, StepResult
from chatcache.types import ModelFacts


@dataclass(frozen=True, slots=True)
class Done:
    """A step that is over. Satisfies `engine.Launched`."""

    outcome: StepResult

    def result(self) -> StepResult:
        """Return what was drawn."""
        return self.outcome


class Runner:
    """Executes plans on one device. Satisfies `engine.ModelRunner`; not thread-safe, one thread drives it."""

    def __init__(
        self, network: Network, kernels: AttentionBackend, pages: KVPages, capacity: KVCapacity, facts: ModelFacts
    ) -> None:
        self.facts = facts
        self._network = network
        self._kernels = kernels
        self._pages = pages
        self._capacity = capacity
        self._device = network.geometry.device
        max_pages = -(-capacity.max_model_len // capacity.page_size)
        self._tables = PageTables(
            capacity.num_slots, max_pages, capacity.page_size, kernels.prepare, network.geometry.group
        )
        self._sampler = Sampler(network.geometry.vocab_size, self._device)
        self._swaps = Swaps(kernels, pages, capacity.num_host_pages)

    def capacity(self) -> KVCapacity:
        """Return what the scheduler may plan with."""
        return self._capacity

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step.

        Raises: ValueError for a plan that contradicts itself; whatever torch raises. The step has then failed whole,
        and its rows must be computed again.
        """
        self._tables.apply(plan.forks, plan.updates)
        with torch.inference_mode():
            self._swaps.apply(plan.swaps_out, plan.swaps_in)
            if len(plan.copies):
                self._kernels.copy_pages(self._pages, to_device(plan.copies, self._device))
            if not len(plan.rows.slot):
                return _nothing()
            if plan.scores is not None:
                return self._execute_scored(plan, plan.scores)
            rows, index = np.unique(plan.draws.row, return_inverse=True)
            logits = self._forward(plan.rows, rows)
            return self._sampler.sample(logits, index, plan.draws) if len(index) else _nothing()

    def launch(self, plan: StepPlan) -> Done:
        """Run one step to its end."""
        return Done(self.execute(plan))

    def warm_up(self) -> None:
        """Run one prompt and one decode step on page 1, so that kernels compile before anyone waits for them, and
        measure how long a swapped page takes."""
        num_tokens = min(self._capacity.page_size, self._capacity.max_model_len)
        placed = self._tables.rows[0, 0]
        self._tables.rows[0, 0] = 1
        for start, count in ((0, num_tokens), (num_tokens - 1, 1)):
            slot, first, counts = (np.array([value], np.int32) for value in (0, start, count))
            with torch.inference_mode():
                self._forward(Rows(slot, first, counts, np.zeros(count, np.int32)), np.zeros(1, np.int64))
        self._sampler.warm_up()
        self._tables.rows[0, 0] = placed
        self._capacity = replace(self._capacity, swap_page_s=self._swaps.measure_page_s())

    def close(self) -> None:
        """Let go of weights and pages."""
        del self._network, self._pages, self._sampler, self._swaps

    def _execute_scored(self, plan: StepPlan, scores: Scores) -> StepResult:
        """Run the rows, draw, and score the prompts that asked for it, never holding all their logits at once."""
        rows, index = np.unique(plan.draws.row, return_inverse=True)
        geometry = self._network.geometry
        arrays, step, last = self._place(plan.rows)
        wanted = np.concatenate((last[rows], scored_tokens(plan.rows, scores)))
        sizes = part_sizes(len(rows), len(wanted), geometry.vocab_size * geometry.dtype.itemsize)
        tokens = torch.split(to_device(wanted, self._device), sizes)
        parts = self._network.forward_parts(*arrays, step, tokens)
        sheet = ScoreSheet(plan.rows, scores, geometry.vocab_size)
        logits = next(parts)
        result = self._sampler.sample(logits[: len(rows)], index, plan.draws) if len(index) else _nothing()
        sheet.fill(logits[len(rows) :])
        del logits
        fill_all(sheet, parts)
        return replace(result, scores=sheet.values, score_tokens=sheet.top_tokens, score_logprobs=sheet.top_logprobs)

    def _forward(self, rows: Rows, drawn: NDArray[np.integer[Any]]) -> torch.Tensor:
        """Return logits [U, V] of the last token of each row in `drawn` [U]; pages gain the new tokens' K and V."""
        arrays, step, last = self._place(rows)
        return self._network.forward(*arrays, step, to_device(last[drawn], self._device))

    def _place(self, rows: Rows) -> tuple[tuple[torch.Tensor, torch.Tensor], AttentionStep, I64]:
        """Return the rows' (tokens, positions) [T], their attention, and where each row's last token is, [R]."""
        place = self._tables.place(rows, self._device)
        step = AttentionStep(self._kernels, self._pages, place.batch)
        tokens, positions = rows.tokens.astype(np.int64), place.positions
        return (to_device(tokens, self._device), to_device(positions, self._device)), step, place.last


def _nothing() -> StepResult:
    ids, logprobs = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
    return StepResult(ids, logprobs, ids, logprobs)
