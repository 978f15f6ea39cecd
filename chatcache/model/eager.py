"""Eager execution of any step, operation by operation.

If the device runs out of memory, the step is split into two smaller ones with the same results. Rows are independent of
each other within a step, so the first half of the rows may run before the second. A single row is split between its
tokens: the first half only fills pages, and the draws belong to the second. A step that has updated states of recurrent
layers is not split, because running its rows again would update them twice; it fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from chatcache_kernels.types import PageStore
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.attention import AttentionBackend, AttentionStep, Network
from chatcache.model.device_errors import is_out_of_memory
from chatcache.model.page_tables import DeviceSlots, PageTables, StepLayout, TableChanges
from chatcache.model.sampling.sampler import TokenSampler, part_sizes, score_parts, scored_token_indices
from chatcache.model.states import StateStep, StateStore
from chatcache.model.streams import to_device, upload
from chatcache.types.plan import F32, I32, Draws, Pools, Rows, Scores, StepPlan, StepResult

Index = NDArray[np.intp]

Finish = Callable[[], StepResult]
"""Waits for the device and returns the result of a step."""
log = logging.getLogger(__name__)


class EagerRunner:
    """Runs steps operation by operation.

    `slots`: the device's mirror of the page tables and last tokens, if it keeps one.
    """

    def __init__(
        self,
        network: Network,
        kernels: AttentionBackend,
        stores: tuple[PageStore, ...],
        tables: PageTables,
        slots: DeviceSlots | None,
        sampler: TokenSampler,
        states: StateStore | None = None,
    ) -> None:
        self._network = network
        self._kernels = kernels
        self._stores = stores
        self._tables = tables
        self._slots = slots
        self._sampler = sampler
        self._states = states
        self._last_states: StateStep | None = None  # of the pass over the layers that began last
        self._device = network.geometry.device
        self._has_warned = False

    def run(self, plan: StepPlan, changes: TableChanges, layout: StepLayout | None) -> Finish:
        """Enqueue a step and return the function that reads its result.

        `layout` is None for a step without rows.
        Raises: any error of torch; out of memory only if a single token does not fit.
        """
        self.apply_changes(changes)
        self.copy_pages(plan.copies)
        if self._states is not None:
            self._states.copy(plan.state_copies)
        finish: Finish = empty_result
        if layout is not None:
            whole = StepPart.whole(plan)
            finish = _join(whole, self._attempt(whole, layout, self._tokens(plan.rows)))
        if self._states is not None:
            self._states.copy(plan.state_saves)
        return finish

    def draw(self, plan: StepPlan, logits: Tensor) -> Finish:
        """Enqueue the draws of a step that has computed the logits [R, V] of all its rows."""
        whole = StepPart.whole(plan)
        index = plan.draws.row.astype(np.intp)
        return _join(whole, self._attempt_draws(whole, logits, index)) if len(index) else empty_result

    def apply_changes(self, changes: TableChanges) -> None:
        """Apply changes of the page tables to the device's mirror, if it has one."""
        if self._slots is not None:
            self._slots.apply(changes)

    def copy_pages(self, copies: I32) -> None:
        """Enqueue a plan's page copies. Shapes: copies [C, 2]."""
        if len(copies):
            moved = to_device(copies, self._device)
            for store in self._stores:
                self._kernels.copy_pages(store, moved)

    def forward(self, rows: Rows, drawn: Index) -> Tensor:
        """Return logits [U, V] of the last token of each row in `drawn` [U].

        The keys and values of the new tokens are written to their pages.
        """
        return self._forward(self._tables.step_layout(rows), rows, self._tokens(rows), drawn)

    def _attempt(self, part: StepPart, layout: StepLayout | None, tokens: Tensor) -> list[tuple[StepPart, Finish]]:
        """Run a part of a step; if it does not fit in memory, run its halves one after the other."""
        self._last_states = None
        try:
            return self._run(part, layout or self._tables.step_layout(part.rows), tokens)
        except RuntimeError as error:
            has_changed_states = self._last_states is not None and self._last_states.is_changed
            halves = split_step(part) if is_out_of_memory(error) and not has_changed_states else None
            if halves is None:
                raise
        # outside of `except` the error is released, and with it the tensors that its frames hold
        self._free_cached_memory(part)
        return [done for half in halves for done in self._attempt(half, None, tokens)]

    def _attempt_draws(self, part: StepPart, logits: Tensor, index: Index) -> list[tuple[StepPart, Finish]]:
        """Enqueue the draws of a part; if they do not fit in memory, one half after the other.

        `index`: the line of `logits` of each draw.
        """
        draws, count = part.draws, len(part.draws.row)
        try:
            return [(part, self._draw(logits, index, draws, part.rows))]
        except RuntimeError as error:
            if count == 1 or not is_out_of_memory(error):
                raise
        self._free_cached_memory(part)
        halves = np.array_split(np.arange(count), 2)
        parts = [replace(part, draws=_draws(draws, half, 0), drawn=part.drawn[half]) for half in halves]
        cut = [index[half] for half in halves]
        return [done for half, at in zip(parts, cut, strict=True) for done in self._attempt_draws(half, logits, at)]

    def _free_cached_memory(self, part: StepPart) -> None:
        """Release torch's cached memory; log a warning the first time."""
        if not self._has_warned:
            shape = len(part.rows.slot), len(part.rows.tokens)
            log.warning("no memory for a step of %d rows and %d tokens: such steps run in halves, slower", *shape)
            self._has_warned = True
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, part: StepPart, layout: StepLayout, tokens: Tensor) -> list[tuple[StepPart, Finish]]:
        rows, draws = part.rows, part.draws
        own = tokens
        if len(rows.tokens) < len(tokens):
            own = tokens[part.first_token : part.first_token + len(rows.tokens)]
        drawn: Index = np.arange(len(rows.slot))
        index = drawn
        if len(draws.row) != len(drawn) or (draws.row != drawn).any():  # not every row is drawn once
            rows_drawn, index = np.unique(draws.row, return_inverse=True)
            drawn = rows_drawn.astype(np.intp)
        if part.pools is not None or part.scores is not None:
            return [(part, self._run_head_apart(part, layout, own, drawn, index))]
        logits = self._forward(layout, rows, own, drawn)
        if not len(index):
            return [(part, empty_result)]
        if self._states is not None:  # the rows cannot run again if only the draws do not fit
            return self._attempt_draws(part, logits, index)
        return [(part, self._draw(logits, index, draws, rows))]

    def _draw(self, logits: Tensor, index: Index, draws: Draws, rows: Rows) -> Finish:
        if self._slots is None:
            return self._sampler.enqueue(logits, index, draws).result
        once = (draws.width == 1) & (np.bincount(draws.row, minlength=len(rows.slot)) == 1)[draws.row]
        slots = np.where(once, rows.slot[draws.row], np.int32(-1))
        return self._sampler.enqueue(logits, index, draws, slots, self._slots.last_token).result

    def _run_head_apart(self, part: StepPart, layout: StepLayout, tokens: Tensor, drawn: Index, index: Index) -> Finish:
        """Run the rows of a part with scores or pools once, and the output head afterwards, on a few tokens at a time.

        Hidden states of: pooled tokens | drawn tokens | scored tokens.
        """
        geometry = self._network.geometry
        pools, scores = part.pools, part.scores
        no_tokens: Index = np.zeros(0, np.intp)
        pooled = pooled_token_indices(layout, pools) if pools is not None else no_tokens
        scored = scored_token_indices(part.rows, scores) if scores is not None else no_tokens
        wanted = np.concatenate((layout.last[drawn], scored))
        sizes = part_sizes(len(drawn), len(wanted), geometry.vocab_size * geometry.dtype.itemsize)
        step, positions = self._step(layout, part.rows)
        logits: Iterator[Tensor]
        sums = None
        if geometry.hidden_size:
            at = to_device(np.concatenate((pooled, wanted)), self._device)
            hidden = self._network.hidden_states(tokens, positions, step, at)
            sums = self._sum_pools(hidden[: len(pooled)], pools) if pools is not None else None
            logits = (self._network.logits(each) for each in torch.split(hidden[len(pooled) :], sizes))
        elif pools is not None:
            raise ValueError("this model returns no hidden states")
        else:  # one pass over the layers for each part writes the same keys and values again
            parts = torch.split(to_device(wanted, self._device), sizes)
            logits = (self._network.forward(tokens, positions, step, each) for each in parts)
        read_draws = self._draw_and_score(part, logits, drawn, index) if len(wanted) else empty_result
        return read_draws if sums is None else lambda: replace(read_draws(), pooled=sums.cpu().numpy())

    def _draw_and_score(self, part: StepPart, logits: Iterator[Tensor], drawn: Index, index: Index) -> Finish:
        """Sample, and score prompt tokens.

        `logits`: those of the drawn tokens, all of them in the first part, then those of the scored tokens.
        """
        first = next(logits)
        read_draws: Finish = empty_result
        if len(index):
            read_draws = self._draw(first[: len(drawn)], index, part.draws, part.rows)
        if part.scores is None:
            return read_draws
        scorer = self._sampler.prompt_scorer(part.rows, part.scores)
        scorer.fill(first[len(drawn) :])
        del first
        score_parts(scorer, logits)
        return lambda: scorer.add_to(read_draws())

    def _sum_pools(self, hidden: Tensor, pools: Pools) -> Tensor:
        """Return the sum of the hidden states of each pool, [P, hidden]."""
        lengths = to_device(pools.num_tokens.astype(np.int64), self._device)
        return torch.segment_reduce(hidden.float(), "sum", lengths=lengths, axis=0)

    def _forward(self, layout: StepLayout, rows: Rows, tokens: Tensor, drawn: Index) -> Tensor:
        step, positions = self._step(layout, rows)
        return self._network.forward(tokens, positions, step, to_device(layout.last[drawn], self._device))

    def _step(self, layout: StepLayout, rows: Rows) -> tuple[AttentionStep, Tensor]:
        """Return the inputs of the layers: the arguments of attention, and the positions of the new tokens, [T]."""
        batches, positions = layout.to(self._device, self._slots)
        self._last_states = self._states.step(rows.state) if self._states is not None else None
        places = self._network.geometry.places
        return AttentionStep(self._kernels, self._stores, batches, places, self._last_states), positions

    def _tokens(self, rows: Rows) -> Tensor:
        """Return the token ids of the rows, [T].

        A negative id stands for the token drawn last in the row's slot, which the host may not have received yet.
        """
        tokens = to_device(rows.tokens.astype(np.int64), self._device)
        at = np.flatnonzero(rows.tokens < 0)
        if not len(at):
            return tokens
        if self._slots is None:
            raise ValueError(f"token {at[0]} of the step is a placeholder, and this runner does not keep drawn tokens")
        row = np.searchsorted(np.cumsum(rows.num_tokens), at, side="right")
        places, slots = upload((at, rows.slot[row].astype(np.int64)), self._device)
        return tokens.index_copy(0, places, self._slots.last_token.index_select(0, slots).long())


def _join(whole: StepPart, done: list[tuple[StepPart, Finish]]) -> Finish:
    if len(done) == 1:
        return done[0][1]
    return lambda: join_results(whole, [(part, finish()) for part, finish in done])


def pooled_token_indices(layout: StepLayout, pools: Pools) -> Index:
    """Return the indices of the pooled tokens among the tokens of a step, pool after pool."""
    counts = pools.num_tokens
    ends = layout.last[pools.row] + 1
    starts = np.repeat(ends - np.cumsum(counts), counts)
    return (starts + np.arange(counts.sum())).astype(np.intp)


def empty_result() -> StepResult:
    """Return the result of a step without draws."""
    ids, logprobs = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
    return StepResult(ids, logprobs, ids, logprobs)


@dataclass(frozen=True, slots=True)
class StepPart:
    """Some rows of a step, or some tokens of one row, with their draws and scores.

    `first_token`: index of the part's first token among the step's tokens; `drawn`, `scored`, `pooled`: indices of the
    part's draws, score targets and pools among those of the step.
    """

    rows: Rows
    draws: Draws
    scores: Scores | None
    pools: Pools | None
    first_token: int
    drawn: Index
    scored: Index
    pooled: Index

    @classmethod
    def whole(cls, plan: StepPlan) -> StepPart:
        """Return the part that holds all rows of a step."""
        targets = len(plan.scores.targets) if plan.scores is not None else 0
        pools = len(plan.pools.row) if plan.pools is not None else 0
        indices = np.arange(len(plan.draws.row)), np.arange(targets), np.arange(pools)
        return cls(plan.rows, plan.draws, plan.scores, plan.pools, 0, *indices)


def split_step(part: StepPart) -> tuple[StepPart, StepPart] | None:
    """Split a part of a step into two halves to run in this order; None for a single token."""
    num_rows = len(part.rows.slot)
    if num_rows > 1:
        middle = num_rows // 2
        return _rows(part, 0, middle), _rows(part, middle, num_rows)
    if len(part.rows.tokens) > 1:
        return _tokens(part, len(part.rows.tokens) // 2)
    return None


def join_results(whole: StepPart, parts: Sequence[tuple[StepPart, StepResult]]) -> StepResult:
    """Return the result of a whole step from the results of its parts."""
    num_draws = len(whole.draws.row)
    results = [result for _, result in parts]
    places = [part.drawn for part, _ in parts]
    faults = sorted((int(part.drawn[draw]), text) for part, result in parts for draw, text in result.faults)

    def gather(arrays: Sequence[NDArray[Any] | None], at: Sequence[Index], count: int, blank: float) -> NDArray[Any]:
        known = [(array, where) for array, where in zip(arrays, at, strict=True) if array is not None and len(where)]
        kind = known[0][0].dtype if known else np.dtype(np.int32 if blank == -1 else np.float32)
        out = np.full((count, max((array.shape[1] for array, _ in known), default=0)), blank, kind)
        for array, where in known:
            out[where, : array.shape[1]] = array
        return out

    joined = StepResult(
        gather([one.tokens for one in results], places, num_draws, -1),
        gather([one.logprobs for one in results], places, num_draws, -np.inf),
        gather([one.top_tokens for one in results], places, num_draws, -1),
        gather([one.top_logprobs for one in results], places, num_draws, -np.inf),
        tuple(faults),
        gather([one.perturbed for one in results], places, num_draws, -np.inf),
        gather([one.raw_logprobs for one in results], places, num_draws, -np.inf),
    )
    if whole.pools is not None:
        joined = replace(joined, pooled=_join_pools(parts, len(whole.pools.row)))
    if whole.scores is None:
        return joined
    cells, count = [part.scored for part, _ in parts], len(whole.scores.targets)
    columns = [one.scores[:, None] if one.scores is not None else None for one in results]
    scores = np.full(count, np.nan, np.float32)
    if count:
        scores = gather(columns, cells, count, np.nan)[:, 0]
    return replace(
        joined,
        scores=scores,
        score_tokens=gather([one.score_tokens for one in results], cells, count, -1),
        score_logprobs=gather([one.score_logprobs for one in results], cells, count, -np.inf),
    )


def _join_pools(parts: Sequence[tuple[StepPart, StepResult]], num_pools: int) -> F32:
    """Add up the sums of the parts; a pool whose row was split is in several."""
    sums = [(part.pooled, result.pooled) for part, result in parts if result.pooled is not None]
    joined = np.zeros((num_pools, sums[0][1].shape[1]), np.float32)
    for pooled, values in sums:
        joined[pooled] += values
    return joined


def _rows(part: StepPart, first: int, last: int) -> StepPart:
    """Return rows first .. last - 1 as a part."""
    rows = part.rows
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(rows.num_tokens)))
    begin, end = int(ends[first]), int(ends[last])
    cut = Rows(
        rows.slot[first:last],
        rows.start[first:last],
        rows.num_tokens[first:last],
        rows.tokens[begin:end],
        rows.state[first:last],
    )
    which = np.flatnonzero((part.draws.row >= first) & (part.draws.row < last))
    scores, scored = _scores_of_rows(part, first, last)
    pools, pooled = _pools_of_rows(part, first, last)
    draws = _draws(part.draws, which, first)
    return StepPart(cut, draws, scores, pools, part.first_token + begin, part.drawn[which], scored, pooled)


def _scores_of_rows(part: StepPart, first: int, last: int) -> tuple[Scores | None, Index]:
    scores = part.scores
    if scores is None:
        return None, part.scored
    inside = (scores.row >= first) & (scores.row < last)
    if not inside.any():
        return None, part.scored[:0]
    cells = np.repeat(inside, part.rows.num_tokens[scores.row])
    cut = Scores(scores.row[inside] - np.int32(first), scores.num_top[inside], scores.targets[cells])
    return cut, part.scored[cells]


def _pools_of_rows(part: StepPart, first: int, last: int) -> tuple[Pools | None, Index]:
    if part.pools is None:
        return None, part.pooled
    row, num_tokens = part.pools.row, part.pools.num_tokens
    inside = (row >= first) & (row < last)
    cut = Pools(row[inside] - np.int32(first), num_tokens[inside]) if inside.any() else None
    return cut, part.pooled[inside]


def _tokens(part: StepPart, middle: int) -> tuple[StepPart, StepPart]:
    """Split the only row before its token `middle`."""
    rows, scores = part.rows, part.scores
    before, after = np.array([middle], np.int32), (rows.num_tokens - middle).astype(np.int32)
    head = Rows(rows.slot, rows.start, before, rows.tokens[:middle], rows.state)
    tail = Rows(rows.slot, rows.start + np.int32(middle), after, rows.tokens[middle:], rows.state)
    first = second = scores
    if scores is not None:
        first, second = (replace(scores, targets=cut) for cut in (scores.targets[:middle], scores.targets[middle:]))
    none = part.drawn[:0]
    head_pools = tail_pools = part.pools
    if part.pools is not None:
        num_in_tail = np.minimum(part.pools.num_tokens, after)
        num_in_head = part.pools.num_tokens - num_in_tail
        tail_pools = Pools(part.pools.row, num_in_tail)
        head_pools = Pools(part.pools.row, num_in_head) if num_in_head.any() else None
    head_draws, pooled = _draws(part.draws, none, 0), part.pooled if head_pools is not None else part.pooled[:0]
    first_token, scored = part.first_token, part.scored
    return (
        StepPart(head, head_draws, first, head_pools, first_token, none, scored[:middle], pooled),
        StepPart(tail, part.draws, second, tail_pools, first_token + middle, part.drawn, scored[middle:], part.pooled),
    )


def _draws(draws: Draws, which: Index, first_row: int) -> Draws:
    """Return some of the draws, with row numbers counted from `first_row`."""
    cut = draws.select(which)
    place = {int(draw): new for new, draw in enumerate(which)}
    return replace(
        cut,
        row=cut.row - np.int32(first_row),
        edits=tuple(structs.replace(edit, draw=place[edit.draw]) for edit in draws.edits if edit.draw in place),
        masks=tuple(structs.replace(mask, draw=place[mask.draw]) for mask in draws.masks if mask.draw in place),
    )
