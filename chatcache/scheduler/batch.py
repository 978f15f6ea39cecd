"""One step: the rows granted to branches, collected and frozen into a step plan.

rows of the plan    [ branches granted tokens one by one | branches of the decode batch, one token each ]
draws of the plan   [ draws of those of them that sample | one draw each                                ]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from chatcache.kv_cache.copy_on_write import PageCopy
from chatcache.kv_cache.manager import KVCache
from chatcache.scheduler.decode_batch import DecodeBatch, DecodeRows, pack_draws
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.scheduler.snapshots import is_snapshot_position
from chatcache.types.actions import RANKED, Candidates, DrawSpec
from chatcache.types.plan import I32, Draws, Pools, Rows, Scores, StepPlan

Swaps = tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]
"""Page copies of a step: [(page, host page)] to the host and [(host page, page)] from it."""

NO_TARGET = -1
_EMPTY = {columns: np.zeros((0, columns), np.int32) for columns in (2, 3)}


class ScoredRow(NamedTuple):
    """A row of the plan that scores prompt tokens.

    Row `row` scores `num_tokens` prompt tokens of `request` from position `start` on.
    """

    request: LiveRequest
    row: int
    start: int
    num_tokens: int


class PooledRow(NamedTuple):
    """A row of the plan whose last `num_tokens` tokens, of `branch`, are pooled."""

    branch: Branch
    row: int
    num_tokens: int


class DrawnBranch(NamedTuple):
    """A branch that is ready for its strategy, and its draws in the plan: `num_draws` from `first_draw` on."""

    branch: Branch
    first_draw: int
    num_draws: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step plan and the branches and requests that its rows, draws and scores belong to.

    `granted` is parallel to the plan's first rows: (branch, its new tokens as int32 bytes). `drawn` lists those of them
    that are sampled, or whose prompt is pooled. The last rows and draws of the plan belong to `decode_rows`, one each.
    `faults`: requests whose strategy raised when asked what to draw. `scored`, `pooled`: the rows of the plan's prompt
    scores and of its pools, in the same order.
    `saved`: branches of the decode batch of which a snapshot is taken.
    `kept_draws`: the draws of the launched step that are left in this one; None for all.
    """

    plan: StepPlan
    granted: list[tuple[Branch, bytes]]
    drawn: list[DrawnBranch]
    decode_rows: DecodeRows
    faults: list[tuple[LiveRequest, Exception]]
    scored: list[ScoredRow]
    pooled: list[PooledRow]
    saved: Sequence[Branch] = ()
    kept_draws: I32 | None = None

    def without_ended_rows(self, decode_rows: I32) -> Step:
        """Return a copy with only these rows of the decode batch, and those granted rows whose branch has pages."""
        plan, num_granted = self.plan, len(self.granted)
        kept = np.zeros(len(plan.rows.slot), bool)
        kept[:num_granted] = [branch.table is not None for branch, _ in self.granted]
        kept[num_granted + decode_rows] = True
        kept_draws = np.flatnonzero(kept[plan.draws.row]).astype(np.int32)
        tokens = plan.rows.tokens[np.repeat(kept, plan.rows.num_tokens)]
        states = plan.rows.state[kept] if len(plan.rows.state) else plan.rows.state
        rows = Rows(plan.rows.slot[kept], plan.rows.start[kept], plan.rows.num_tokens[kept], tokens, states)
        draws = plan.draws.select(kept_draws)
        draws = replace(draws, row=(np.cumsum(kept, dtype=np.int32) - 1)[draws.row])
        drawn: list[DrawnBranch] = []
        for branch, _, count in self.drawn:
            if branch.table is not None:
                drawn.append(DrawnBranch(branch, drawn[-1].first_draw + drawn[-1].num_draws if drawn else 0, count))
        decoding = self.decode_rows
        fields = [decoding.rows.slot, decoding.rows.start, decoding.rows.num_tokens, decoding.rows.tokens]
        fields += [decoding.rows.state] if len(decoding.rows.state) else []
        return replace(
            self,
            plan=replace(plan, rows=rows, draws=draws),
            granted=[row for row, is_kept in zip(self.granted, kept.tolist(), strict=False) if is_kept],
            drawn=drawn,
            decode_rows=DecodeRows(
                [decoding.branches[row] for row in decode_rows.tolist()],
                Rows(*(field[decode_rows] for field in fields)),
                decoding.draws.select(decode_rows),
            ),
            kept_draws=kept_draws,
        )

    @property
    def has_swaps(self) -> bool:
        """Whether the step copies pages to or from the host."""
        plan = self.plan
        return any(map(len, (plan.swaps_out, plan.swaps_in, plan.state_swaps_out, plan.state_swaps_in)))

    def branches(self) -> list[Branch]:
        """Return the branch of each row."""
        return [*(branch for branch, _ in self.granted), *self.decode_rows.branches]

    def requests(self) -> list[LiveRequest]:
        """Return the requests with a row in this step, each once."""
        return list(dict.fromkeys(branch.request for branch in self.branches()))

    def request_of_draw(self, draw: int) -> LiveRequest:
        first = self.first_decode_draw
        if draw >= first:
            return self.decode_rows.branches[draw - first].request
        return next(row.branch.request for row in reversed(self.drawn) if row.first_draw <= draw)

    def candidates_by_request(
        self, candidates: Sequence[Candidates], faulty: Collection[LiveRequest] = ()
    ) -> dict[LiveRequest, dict[int, tuple[Candidates, ...]]]:
        """Group the candidates of the draws by request and branch id, leaving out `faulty` requests."""
        answers: dict[LiveRequest, dict[int, tuple[Candidates, ...]]] = {}
        for branch, first, count in self.drawn:
            answers.setdefault(branch.request, {})[branch.id] = tuple(candidates[first : first + count])
        first = self.first_decode_draw if self.drawn else 0
        for branch, candidate in zip(self.decode_rows.branches, candidates[first:], strict=True):
            request = branch.request
            if candidate is RANKED:
                continue
            if request in answers:
                answers[request][branch.id] = (candidate,)
            else:
                answers[request] = {branch.id: (candidate,)}
        for request in faulty:
            answers.pop(request, None)
        return answers

    @property
    def first_decode_draw(self) -> int:
        return self.drawn[-1].first_draw + self.drawn[-1].num_draws if self.drawn else 0


class BatchBuilder:
    """Collects the rows of the step being planned.

    Each branch of the decode batch has one token in the step; `budget` is the number of tokens left for other branches.
    """

    def __init__(self, kv: KVCache, max_num_tokens: int, decode_batch: DecodeBatch) -> None:
        self._kv = kv
        self.granted: list[tuple[Branch, bytes]] = []
        self._num_left = max_num_tokens
        self._decode_batch = decode_batch
        self._slots: list[int] = []
        self._starts: list[int] = []
        self._num_tokens: list[int] = []
        self._updates: list[tuple[int, int, int]] = []
        self._copies: list[PageCopy] = []
        self._ready: list[tuple[Branch, int]] = []  # (branch, row) of the branches that are sampled in this step
        self._scored: list[ScoredRow] = []
        self._pooled: list[PooledRow] = []

    @property
    def budget(self) -> int:
        return self._num_left - self._decode_batch.num_branches

    def add_copies(self, copies: Iterable[PageCopy], updates: Iterable[tuple[int, int, int]] = ()) -> None:
        """Add page copies, and updates of the runner's page tables."""
        self._copies += copies
        self._updates += updates

    def add(self, branch: Branch, num_tokens: int) -> None:
        """Grant the branch its next `num_tokens` tokens, for which pages are reserved."""
        table, slot = branch.table, branch.slot
        if table is None:
            raise ValueError(f"branch {branch.id} of {branch.request.request_id} has no pages")
        start = table.num_tokens
        stop = start + num_tokens
        if stop == branch.num_tokens:
            self._ready.append((branch, len(self.granted)))
        request = branch.request
        if request.has_unscored_tokens:
            self._scored.append(ScoredRow(request, len(self.granted), start, num_tokens))
        if request.pooler is not None and (num_pooled := request.pooler.num_pooled_tokens(start, stop)):
            self._pooled.append(PooledRow(branch, len(self.granted), num_pooled))
        if (states := self._kv.states) is not None:
            table.num_state_tokens = stop
            if self._kv.enable_prefix_caching and is_snapshot_position(states, branch, stop, self._kv.page_size):
                states.save(table, stop)
        self.granted.append((branch, branch.span(start, stop)))
        self._slots.append(slot)
        self._starts.append(start)
        self._num_tokens.append(num_tokens)
        self._num_left -= num_tokens
        if table.changed_from < table.num_prefix_pages + len(table.own_pages):
            first, pages = table.pop_changes()
            self._updates += [(slot, first + i, page) for i, page in enumerate(pages)]

    def build(self, step: int, forks: list[tuple[int, int, int]], decode_updates: I32, swaps: Swaps = ((), ())) -> Step:
        """Build the step from the granted rows and the rows of the decode batch.

        Asks the strategies what to draw, as far as this may have changed. `decode_updates` are the page table updates
        of the decode batch, `swaps` the page copies to and from the host.
        """
        faults: list[tuple[LiveRequest, Exception]] = []
        decode_rows = self._decode_batch.plan_rows(faults)
        swaps_out = _to_array(swaps[0], columns=2) if swaps[0] else _EMPTY[2]
        swaps_in = _to_array(swaps[1], columns=2) if swaps[1] else _EMPTY[2]
        # A request that was preempted in this plan leaves its copies; their target may have been allocated again.
        copies = _EMPTY[2]
        if self._copies:
            copies = _to_array(list({copy.dst: copy for copy in self._copies}.values()), columns=2)
        fork_rows = _to_array(forks) if forks else _EMPTY[3]
        saved: Sequence[Branch] = ()
        state_copies = state_saves = states_out = states_in = _EMPTY[2]
        if (states := self._kv.states) is not None:
            saved = self._decode_batch.save_states(states) if self._kv.enable_prefix_caching else ()
            state_copies, state_saves = (_to_array(pairs, columns=2) for pairs in states.pending_copies())
            states_out, states_in = (_to_array(pairs, columns=2) for pairs in states.pending_swaps())
        updates = _concat(self._updates, decode_updates) if self._updates else decode_updates
        drawn: list[DrawnBranch] = []
        rows, draws = decode_rows.rows, decode_rows.draws
        if self.granted:
            drawn, granted_draws = self._draws(faults)
            rows, draws = self._rows(rows), self._append_decode_draws(granted_draws, draws)
        plan = StepPlan(
            *(step, fork_rows, updates, copies, rows, draws, swaps_out, swaps_in),
            scores=_scores(self._scored) if self._scored else None,
            pools=_pools(self._pooled) if self._pooled else None,
            state_copies=state_copies,
            state_saves=state_saves,
            state_swaps_out=states_out,
            state_swaps_in=states_in,
        )
        return Step(plan, self.granted, drawn, decode_rows, faults, self._scored, self._pooled, saved)

    def _draws(self, faults: list[tuple[LiveRequest, Exception]]) -> tuple[list[DrawnBranch], Draws | None]:
        drawn: list[DrawnBranch] = []
        specs: list[DrawSpec] = []
        rows: list[int] = []
        positions: list[int] = []
        for branch, row in self._ready:
            try:
                wanted = branch.request.strategy.draws(branch.id)
                if not wanted and branch.request.pooler is None:
                    raise ValueError(f"nothing to draw from branch {branch.id}")
            except Exception as error:
                faults.append((branch.request, error))
                continue
            drawn.append(DrawnBranch(branch, len(specs), len(wanted)))
            for spec in wanted:
                specs.append(spec)
                rows.append(row)
                positions.append(branch.num_tokens)
        return drawn, pack_draws(specs, rows, positions) if specs else None

    def _rows(self, decode_rows: Rows) -> Rows:
        """Concatenate the rows granted one by one and those of the decode batch."""
        tokens = np.frombuffer(b"".join([tokens for _, tokens in self.granted]), "<i4").astype(np.int32)
        return Rows(
            slot=_concat(self._slots, decode_rows.slot),
            start=_concat(self._starts, decode_rows.start),
            num_tokens=_concat(self._num_tokens, decode_rows.num_tokens),
            tokens=_concat(tokens, decode_rows.tokens),
            state=decode_rows.state if self._kv.states is None else _concat(self._states(), decode_rows.state),
        )

    def _states(self) -> list[int]:
        return [branch.table.state for branch, _ in self.granted if branch.table is not None]

    def _append_decode_draws(self, draws: Draws | None, decode_draws: Draws) -> Draws:
        """Append the draws of the decode batch, whose rows come after the granted ones."""
        decode_draws = replace(decode_draws, row=decode_draws.row + len(self.granted))
        return decode_draws if draws is None else draws.concat(decode_draws)


def _scores(scored: Sequence[ScoredRow]) -> Scores:
    """Return the scores to compute: all prompt tokens that these rows predict, if not scored."""
    return Scores(
        row=np.array([one.row for one in scored], np.int32),
        num_top=np.array([one.request.num_prompt_top for one in scored], np.int32),
        targets=np.array([target for one in scored for target in _targets(one)], np.int32),
    )


def _pools(pooled: Sequence[PooledRow]) -> Pools:
    return Pools(*(np.array(column, np.int32) for column in list(zip(*pooled, strict=True))[1:]))


def _targets(scored: ScoredRow) -> Iterator[int]:
    """Yield the next prompt token for each token of the row, NO_TARGET if it has a score."""
    request = scored.request
    first, last = request.num_before_scores, request.num_prompt_tokens - 1
    for position in range(scored.start, scored.start + scored.num_tokens):
        yield request.prompt[position + 1] if first <= position < last else NO_TARGET


def _to_array(rows: Sequence[Sequence[int]], columns: int = 3) -> I32:
    if not len(rows):
        return _EMPTY[columns]
    return np.array(rows, np.int32).reshape(-1, columns)


def _concat(first: Sequence[object] | I32, second: I32) -> I32:
    """Concatenate as int32; `second` itself if `first` is empty."""
    if not len(first):
        return second
    return np.concatenate((np.asarray(first, np.int32), second))
