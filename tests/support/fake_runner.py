"""A runner without a model: hashes instead of logits, but exact about pages.

Each cell of its simulated pages holds a hash of the token, its position and the cell before it; the next token's
logits are a hash of *all* cells read through the page table. So the tokens differ if a page was freed too early,
shared when it should have been copied, or matched before it was written. The engine's property tests rest on that:
any workload on any pool must equal each request alone with unlimited memory.

A capacity with states makes it a hybrid model: each row also reads and updates a state in place, a hash chain over all
consumed tokens, and the logits depend on it. So the tokens also differ if a state was not copied, is stale, or was
named after other tokens than those that it consumed.

It follows `types.plan` exactly where a real runner may be lenient: all rows read their history before any row writes,
and cells that were never written hold a poison value of their own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from chatcache.engine.protocols import StepHandle
from chatcache.types.plan import F32, I32, NOTHING_LEFT, U64, Draws, KVCapacity, Pools, Scores, StepPlan, StepResult
from chatcache.types.stats import ModelInfo
from tests.support.fake_device import FakeDevice, InvalidPlanError
from tests.support.fake_sampling import (
    allowed_logits,
    draw_greedily_or_not,
    draw_without_replacement,
    log_softmax,
    mix,
    mix_one,
    top_candidates,
)

POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
_POSITION = np.uint64(0x9E37_79B9_7F4A_7C15)
_TOKEN = np.uint64(0xC2B2_AE3D_27D4_EB4F)


FAKE_HIDDEN = 6


def fake_states(histories: U64) -> F32:
    """Return the hidden states of tokens with these history hashes, [N, FAKE_HIDDEN]."""
    salts = np.arange(1, FAKE_HIDDEN + 1, dtype=np.uint64) * _TOKEN
    return (mix(histories[:, None] * salts) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)


def fake_capacity(
    num_pages: int = 512,
    page_size: int = 16,
    num_slots: int = 256,
    max_model_len: int = 4096,
    num_host_pages: int = 0,
    swap_page_s: float = 1e-6,
    has_async_launch: bool = False,
    num_states: int = 0,
    num_host_states: int = 0,
) -> KVCapacity:
    kv_bytes = num_pages * page_size * 8
    return KVCapacity(
        *(num_pages, page_size, num_slots, max_model_len, kv_bytes, num_host_pages, swap_page_s, has_async_launch),
        num_states=num_states,
        state_bytes=8 if num_states else 0,
        num_host_states=num_host_states,
    )


def fake_model_info(
    vocab_size: int = 64, eos: tuple[int, ...] = (0,), max_model_len: int = 4096, pooling: str = "last"
) -> ModelInfo:
    return ModelInfo(
        name="fake",
        digest="00" * 32,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos,
        pooling=pooling,
        hidden_size=FAKE_HIDDEN,
        device="fake",  # so that no limit depends on the measured time
    )


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was complete when it was launched. Satisfies `StepHandle`."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


class FakeRunner:
    """Executes plans on hashes. Satisfies `ModelRunner`.

    `eos` becomes the most likely token about once in `eos_every` positions (0: never on purpose). Every step sleeps
    `delay_s`. A row whose last token is `faulty_token` gets NaN logits, as an error. With a capacity that has
    asynchronous launch, steps are queued in a `FakeDevice`, which `lazy` configures.
    """

    def __init__(
        self,
        capacity: KVCapacity | None = None,
        vocab_size: int = 64,
        eos: int | None = 0,
        *,
        eos_every: int = 24,
        delay_s: float = 0.0,
        faulty_token: int | None = None,
        lazy: bool = False,
    ) -> None:
        self._capacity = capacity or fake_capacity()
        self._eos = eos
        self._eos_every = eos_every
        self.delay_s = delay_s
        self.num_steps = 0
        self._faulty_token = faulty_token
        self.device = FakeDevice(self.execute, lazy=lazy)
        num_entries = -(-self._capacity.max_model_len // self._capacity.page_size)
        self.cells: U64 = np.full((self._capacity.num_pages, self._capacity.page_size), POISON, np.uint64)
        self.host_cells: U64 = np.full((self._capacity.num_host_pages, self._capacity.page_size), POISON, np.uint64)
        self.states: U64 = np.full(self._capacity.num_states, POISON, np.uint64)
        self.states[:1] = 0
        self.host_states: U64 = np.full(self._capacity.num_host_states, POISON, np.uint64)
        self.simulated_s = 0.0
        self._tables: I32 = np.zeros((self._capacity.num_slots, num_entries), np.int32)
        self._ids: U64 = np.arange(vocab_size, dtype=np.uint64)

    def capacity(self) -> KVCapacity:
        return self._capacity

    def check_device(self) -> None:
        """Do nothing."""

    def clock(self) -> float:
        """Return a time that steps advance by their rows and tokens: for engines that decide alike on any machine."""
        return self.simulated_s

    def launch(self, plan: StepPlan) -> StepHandle:
        return self.device.launch(plan) if self._capacity.has_async_launch else Done(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        if self.delay_s:
            time.sleep(self.delay_s)
        self.simulated_s += 1e-4 + 3e-5 * len(plan.rows.slot) + 1e-5 * len(plan.rows.tokens)
        for src, dst, num_pages in plan.forks.tolist():
            self._tables[dst, :num_pages] = self._tables[src, :num_pages]
        for slot, index, page in plan.updates.tolist():
            self._tables[slot, index] = page
        for page, host_page in plan.swaps_out.tolist():
            self.host_cells[host_page] = self.cells[page]
        self.host_states[plan.state_swaps_out[:, 1]] = self.states[plan.state_swaps_out[:, 0]]
        for host_page, page in plan.swaps_in.tolist():
            self.cells[page] = self.host_cells[host_page]
        self.states[plan.state_swaps_in[:, 1]] = self.host_states[plan.state_swaps_in[:, 0]]
        for src, dst in plan.copies.tolist():
            self.cells[dst] = self.cells[src]
        self._copy_states(plan.state_copies)
        histories = self._compute(plan)
        if self._capacity.num_states:
            self._recur(plan, histories)
            self._copy_states(plan.state_saves)
        last_tokens = plan.rows.tokens[np.cumsum(plan.rows.num_tokens) - 1].tolist()
        result = self.draw(plan.draws, [history[-1] for history in histories], last_tokens)
        if plan.pools is not None:
            result = replace(result, pooled=self._pool(plan.pools, histories))
        if plan.scores is None:
            return result
        scores, score_tokens, score_logprobs = self._score(plan.scores, histories)
        return replace(result, scores=scores, score_tokens=score_tokens, score_logprobs=score_logprobs)

    def _compute(self, plan: StepPlan) -> list[U64]:
        """Write the new cells; return each row's history hash after each new token.

        All rows read before any row writes.
        """
        rows = plan.rows
        spans = list(zip(rows.slot.tolist(), rows.start.tolist(), rows.num_tokens.tolist(), strict=True))
        before = [self._read(slot, start) for slot, start, _ in spans]
        histories: list[U64] = []
        offset = 0
        for (slot, start, count), (history, last_cell) in zip(spans, before, strict=True):
            positions = np.arange(start, start + count)
            tokens = rows.tokens[offset : offset + count].astype(np.uint64)
            offset += count
            cells = _cells(tokens, start) + last_cell
            pages = self._tables[slot, positions // self._capacity.page_size]
            self.cells[pages, positions % self._capacity.page_size] = cells
            histories.append(np.cumsum(_digests(cells, start), dtype=np.uint64) + history)
        return histories

    def _copy_states(self, pairs: I32) -> None:
        """Copy states; like a device, in any order: no target may be a source or the zero state."""
        sources, targets = set(pairs[:, 0].tolist()), pairs[:, 1].tolist()
        if sources.intersection(targets) or 0 in targets or len(set(targets)) != len(targets):
            raise InvalidPlanError(f"states are copied in an order that matters: {pairs.tolist()}")
        self.states[pairs[:, 1]] = self.states[pairs[:, 0]]

    def _recur(self, plan: StepPlan, histories: Sequence[U64]) -> None:
        """Update the state of each row, and add it to the row's history after each new token."""
        rows, offset, states = plan.rows, 0, plan.rows.state.tolist()
        if len(states) != len(rows.slot) or len(set(states)) != len(states) or 0 in states:
            raise InvalidPlanError(f"{len(rows.slot)} rows update the states {states}")
        for state, history in zip(states, histories, strict=True):
            chain = _state_chain(int(self.states[state]), rows.tokens[offset : offset + len(history)].tolist())
            self.states[state] = chain[-1]
            history += chain
            offset += len(history)

    def _pool(self, pools: Pools, histories: Sequence[U64]) -> F32:
        """Sum hidden states, which are hashes of the history, with values between 0 and 1. Shape [P, FAKE_HIDDEN]."""
        return np.stack(
            [
                fake_states(histories[row][-count:]).sum(axis=0)
                for row, count in zip(pools.row.tolist(), pools.num_tokens.tolist(), strict=True)
            ]
        )

    def _read(self, slot: int, num_tokens: int) -> tuple[np.uint64, np.uint64]:
        """Read a branch's first cells through its page table: (hash of all of them, last one)."""
        pages = self._tables[slot, : -(-num_tokens // self._capacity.page_size)]
        cells = self.cells[pages].reshape(-1)[:num_tokens]
        return _digests(cells, 0).sum(dtype=np.uint64), (cells[-1] if num_tokens else np.uint64(0))

    def logits(self, history: np.uint64) -> F32:
        """Hash a history into logits between 0 and 8. Shape [V]."""
        logits = (mix(self._ids * _TOKEN + history) >> np.uint64(40)).astype(np.float32) * np.float32(8 / 2**24)
        if self._eos is not None and self._eos_every and mix_one(int(history)) % self._eos_every == 0:
            logits[self._eos] = 12.0
        return logits

    def draw(self, draws: Draws, histories: Sequence[np.uint64], last_tokens: Sequence[int]) -> StepResult:
        """Sample from rows with these histories and last tokens."""
        num_draws = len(draws.row)
        width, num_top = int(draws.width.max(initial=1)), int(draws.num_top.max(initial=0))
        tokens, logprobs = _blank(num_draws, width)
        top_tokens, top_logprobs = _blank(num_draws, num_top)
        distinct = (draws.width > 1) & (draws.temperature > 0)
        _, perturbed = _blank(num_draws, width if distinct.any() else 0)
        _, raw_logprobs = _blank(num_draws, width if distinct.any() or draws.edits else 0)
        faults: list[tuple[int, str]] = []
        edits = {edit.draw: edit for edit in draws.edits}
        masks = {mask.draw: mask for mask in draws.masks}
        for draw, row in enumerate(draws.row.tolist()):
            if last_tokens[row] == self._faulty_token:
                faults.append((draw, "the logits are not finite"))
                continue
            raw = self.logits(histories[row])
            logits = allowed_logits(raw, edits.get(draw), masks.get(draw))
            if logits.max() == -np.inf:
                faults.append((draw, NOTHING_LEFT))
            elif distinct[draw]:
                ids, values, noisy = draw_without_replacement(logits, draws, draw, int(draws.width[draw]))
                tokens[draw, : len(ids)], logprobs[draw, : len(ids)], perturbed[draw, : len(ids)] = ids, values, noisy
                raw_logprobs[draw, : len(ids)] = log_softmax(raw)[ids]
            elif draws.width[draw] > 1:
                every = allowed_logits(log_softmax(raw), edits.get(draw), None)  # neither edits nor masks renormalise
                ids, values = top_candidates(np.where(logits > -np.inf, every, -np.inf), int(draws.width[draw]))
                count = int((values > -np.inf).sum())
                tokens[draw, :count], logprobs[draw, :count] = ids[:count], values[:count]
                if draw in edits:
                    raw_logprobs[draw, :count] = log_softmax(raw)[ids[:count]]
            else:
                tokens[draw, 0] = draw_greedily_or_not(logits, draws, draw)
                logprobs[draw, 0] = log_softmax(raw)[tokens[draw, 0]]
            if draws.num_top[draw]:
                ids, values = top_candidates(log_softmax(raw), int(draws.num_top[draw]))
                top_tokens[draw, : len(ids)], top_logprobs[draw, : len(ids)] = ids, values
        return StepResult(tokens, logprobs, top_tokens, top_logprobs, tuple(faults), perturbed, raw_logprobs)

    def _score(self, scores: Scores, histories: Sequence[U64]) -> tuple[F32, I32, F32]:
        """Return the log-probability of each token's successor and the top alternatives."""
        every = [(history, int(num_top)) for row, num_top in zip(scores.row, scores.num_top, strict=True)
                 for history in histories[row]]  # fmt: skip
        values = np.full(len(every), np.nan, np.float32)
        top_tokens, top_logprobs = _blank(len(every), int(scores.num_top.max(initial=0)))
        for i, ((history, num_top), target) in enumerate(zip(every, scores.targets.tolist(), strict=True)):
            if target < 0:
                continue
            logprobs = log_softmax(self.logits(history))
            values[i] = logprobs[target]
            if num_top:
                ids, tops = top_candidates(logprobs, num_top)
                top_tokens[i, : len(ids)], top_logprobs[i, : len(ids)] = ids, tops
        return values, top_tokens, top_logprobs


def history_of(tokens: Sequence[int], *, hybrid: bool = False) -> np.uint64:
    """Hash a whole history without pages: the expected value of a row with these tokens.

    `hybrid`: for a model with states.
    """
    history = _digests(_cells(np.array(tokens, np.uint64), 0), 0)
    last = _state_chain(0, tokens)[-1:] if hybrid else history[:0]
    total: np.uint64 = np.concatenate([history, last]).sum(dtype=np.uint64)
    return total


def state_of(tokens: Sequence[int]) -> int:
    """Return the state after `tokens`, of a model with states."""
    return int(_state_chain(0, tokens)[-1])


def _state_chain(state: int, tokens: Sequence[int]) -> U64:
    """Return the state after each of `tokens`."""
    chain = []
    for token in tokens:
        state = mix_one((state * 3 + (token + 1) * int(_TOKEN)) % 2**64)
        chain.append(state)
    return np.array(chain, np.uint64)


def _cells(tokens: U64, start: int) -> U64:
    """Return the cells of tokens at positions start, start + 1, ..., given the cell before them."""
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    return np.cumsum(mix(tokens * _TOKEN + positions * _POSITION), dtype=np.uint64)


def _digests(cells: U64, start: int) -> U64:
    """Hash each cell with its position, as rows read it."""
    return mix(cells + np.arange(start, start + len(cells), dtype=np.uint64) * _POSITION)


def _blank(num_draws: int, width: int) -> tuple[I32, F32]:
    return np.full((num_draws, width), -1, np.int32), np.full((num_draws, width), -np.inf, np.float32)
