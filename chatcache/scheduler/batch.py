"""One step: the rows granted to branches, collected and frozen into a step plan.

rows of the plan    [ branches granted tokens one by one | branches of the decode batch, one token each ]
draws of the plan   [ draws of those of them that sample | one draw each                                ]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from chatcache.kv_cache.copy_on_write import PageCopy
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import TOKEN_BYTES
from chatcache.scheduler.decode_batch import DecodeBatch
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.scheduler.snapshots import is_snapshot_position
from chatcache.types.actions import RANKED, Candidates, DrawSpec, pack_draws
from chatcache.types.plan import I32, Draws, Pools, Rows, Scores, StepPlan

NO_TARGET = -1
_NO_PAIRS = np.zeros((0, 2), np.int32)
_NO_MOVES = {
    "forks": np.zeros((0, 3), np.int32),
    **dict.fromkeys(("copies", "swaps_out", "swaps_in"), _NO_PAIRS),
    **dict.fromkeys(("state_copies", "state_saves", "state_swaps_out", "state_swaps_in"), _NO_PAIRS),
}


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
    """A branch that is ready for its strategy, and the number of its draws in the plan."""

    branch: Branch
    num_draws: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step plan and the branches and requests that its rows, draws and scores belong to.

    `granted` is parallel to the plan's first rows: (branch, its new tokens as int32 bytes). `drawn` lists those of them
    that are sampled, or whose prompt is pooled, in the order of their draws. The last rows and draws of the plan belong
    to `decode_branches`, one each. `faults`: requests whose strategy raised when asked what to draw. `scored`,
    `pooled`: the rows of the plan's prompt scores and of its pools, in the same order.
    `saved`: branches of the decode batch of which a snapshot is taken.
    `kept_draws`: the draws of the launched step that are left in this one; None for all.
    """

    plan: StepPlan
    granted: list[tuple[Branch, bytes]]
    drawn: list[DrawnBranch]
    decode_branches: list[Branch]
    faults: list[tuple[LiveRequest, Exception]]
    scored: list[ScoredRow]
    pooled: list[PooledRow]
    saved: Sequence[Branch] = ()
    kept_draws: I32 | None = None

    def without_ended_rows(self, decode_rows: I32) -> Step:
        """Return a copy with only these rows of the decode batch, and those granted rows whose branch has pages."""
        plan = self.plan
        granted = [row for row, (branch, _) in enumerate(self.granted) if branch.table is not None]
        which = np.concatenate((np.array(granted, np.int32), decode_rows + len(self.granted)))
        row_after = np.full(len(plan.rows.slot), -1, np.int32)
        row_after[which] = np.arange(len(which), dtype=np.int32)
        kept_draws = np.flatnonzero(row_after[plan.draws.row] >= 0).astype(np.int32)
        draws = plan.draws.select(kept_draws)
        return replace(
            self,
            plan=replace(plan, rows=plan.rows.select(which), draws=replace(draws, row=row_after[draws.row])),
            granted=[self.granted[row] for row in granted],
            drawn=[drawn for drawn in self.drawn if drawn.branch.table is not None],
            decode_branches=[self.decode_branches[row] for row in decode_rows.tolist()],
            kept_draws=kept_draws,
        )

    @property
    def has_swaps(self) -> bool:
        """Whether the step copies pages to or from the host."""
        plan = self.plan
        return any(map(len, (plan.swaps_out, plan.swaps_in, plan.state_swaps_out, plan.state_swaps_in)))

    def branches(self) -> list[Branch]:
        """Return the branch of each row."""
        return [*(branch for branch, _ in self.granted), *self.decode_branches]

    def requests(self) -> list[LiveRequest]:
        """Return the requests with a row in this step, each once."""
        return list(dict.fromkeys(branch.request for branch in self.branches()))

    def request_of_draw(self, draw: int) -> LiveRequest:
        return self.branches()[int(self.plan.draws.row[draw])].request

    def candidates_by_request(
        self, candidates: Sequence[Candidates], faulty: Collection[LiveRequest] = ()
    ) -> dict[LiveRequest, dict[int, tuple[Candidates, ...]]]:
        """Group the candidates of the draws by request and branch id, leaving out `faulty` requests."""
        answers: dict[LiveRequest, dict[int, tuple[Candidates, ...]]] = {}
        rest = iter(candidates)
        for branch, num_draws in self.drawn:
            answers.setdefault(branch.request, {})[branch.id] = tuple(islice(rest, num_draws))
        for branch, candidate in zip(self.decode_branches, rest, strict=True):
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
        return len(self.plan.draws.row) - len(self.decode_branches)


class BatchBuilder:
    """Collects the rows of the step being planned.

    Each branch of the decode batch has one token in the step; `budget` is the number of tokens left for other branches.
    """

    def __init__(self, kv: KVCache, max_num_tokens: int, decode_batch: DecodeBatch) -> None:
        self._kv = kv
        self.granted: list[tuple[Branch, bytes]] = []
        self._num_left = max_num_tokens
        self._decode_batch = decode_batch
        self._starts: list[int] = []
        self._updates: list[tuple[int, int, int]] = []
        self._copies: list[PageCopy] = []
        self._scored: list[ScoredRow] = []
        self._pooled: list[PooledRow] = []

    @property
    def budget(self) -> int:
        return self._num_left - self._decode_batch.num_branches

    def add_copies(self, copies: Iterable[PageCopy], updates: Iterable[tuple[int, int, int]] = ()) -> None:
        """Add page copies, and updates of the runner's page tables."""
        self._copies += copies
        self._updates += updates

    def drop_unused_copies(self) -> None:
        """Drop the copies for branches that were closed in this plan, so that no page is held for them."""
        if self._copies:
            self._copies = self._kv.held_copies(self._copies)

    def add(self, branch: Branch, num_tokens: int) -> None:
        """Grant the branch its next `num_tokens` tokens, for which pages are reserved."""
        request, table, row = branch.request, branch.table, len(self.granted)
        if table is None:
            raise ValueError(f"branch {branch.id} of {request.request_id} has no pages")
        start, stop = table.num_tokens, table.num_tokens + num_tokens
        if request.has_unscored_tokens:
            self._scored.append(ScoredRow(request, row, start, num_tokens))
        if request.pooler is not None and (num_pooled := request.pooler.num_pooled_tokens(start, stop)):
            self._pooled.append(PooledRow(branch, row, num_pooled))
        if (states := self._kv.states) is not None:
            table.num_state_tokens = stop
            if self._kv.enable_prefix_caching and is_snapshot_position(states, branch, stop, self._kv.page_size):
                states.save(table, stop)
        self.granted.append((branch, branch.span(start, stop)))
        self._starts.append(start)
        self._num_left -= num_tokens
        if table.changed_from < table.num_pages:
            first, pages = table.pop_changes()
            self._updates += [(branch.slot, index, page) for index, page in enumerate(pages, first)]

    def build(self, step: int, forks: list[tuple[int, int, int]], decode_updates: I32) -> Step:
        """Build the step from the granted rows and the rows of the decode batch.

        Asks the strategies what to draw, as far as this may have changed. `decode_updates` are the page table updates
        of the decode batch.
        """
        faults: list[tuple[LiveRequest, Exception]] = []
        decode = self._decode_batch.plan_rows(faults)
        moves: dict[str, Sequence[Sequence[int]]] = {}
        if forks:
            moves["forks"] = forks
        if self._copies:
            moves["copies"] = self._copies
        if self._kv.host is not None:
            moves["swaps_out"], moves["swaps_in"] = self._kv.host.pending_copies()
        saved: Sequence[Branch] = ()
        if (states := self._kv.states) is not None:
            saved = self._decode_batch.save_states(states) if self._kv.enable_prefix_caching else ()
            moves["state_copies"], moves["state_saves"] = states.pending_copies()
            moves["state_swaps_out"], moves["state_swaps_in"] = states.pending_swaps()
        drawn: list[DrawnBranch] = []
        rows, draws = decode.rows, decode.draws
        if self.granted:
            drawn, granted_draws = self._draws(faults)
            rows = self._rows().concat(rows)
            draws = granted_draws.concat(replace(draws, row=draws.row + len(self.granted)))
        if self._updates:
            decode_updates = np.concatenate((_rows_of(self._updates), decode_updates))
        arrays = _NO_MOVES
        if moves:
            arrays = arrays | {name: _rows_of(move) for name, move in moves.items() if move}
        plan = StepPlan(
            step=step,
            updates=decode_updates,
            rows=rows,
            draws=draws,
            scores=_scores(self._scored) if self._scored else None,
            pools=_pools(self._pooled) if self._pooled else None,
            **arrays,
        )
        return Step(plan, self.granted, drawn, decode.branches, faults, self._scored, self._pooled, saved)

    def _draws(self, faults: list[tuple[LiveRequest, Exception]]) -> tuple[list[DrawnBranch], Draws]:
        """Ask what to draw from the granted branches of which no token is left to compute."""
        drawn: list[DrawnBranch] = []
        specs: list[DrawSpec] = []
        rows: list[int] = []
        positions: list[int] = []
        for row, (branch, tokens) in enumerate(self.granted):
            if self._starts[row] + len(tokens) // TOKEN_BYTES < branch.num_tokens:
                continue
            try:
                wanted = branch.request.strategy.draws(branch.id)
                if not wanted and branch.request.pooler is None:
                    raise ValueError(f"nothing to draw from branch {branch.id}")
            except Exception as error:
                faults.append((branch.request, error))
                continue
            drawn.append(DrawnBranch(branch, len(wanted)))
            specs += wanted
            rows += [row] * len(wanted)
            positions += [branch.num_tokens] * len(wanted)
        return drawn, pack_draws(specs, rows, positions)

    def _rows(self) -> Rows:
        """Return the rows granted one by one."""
        tables = [branch.table for branch, _ in self.granted] if self._kv.states is not None else []
        return Rows(
            slot=np.array([branch.slot for branch, _ in self.granted], np.int32),
            start=np.array(self._starts, np.int32),
            num_tokens=np.array([len(tokens) // TOKEN_BYTES for _, tokens in self.granted], np.int32),
            tokens=np.frombuffer(b"".join([tokens for _, tokens in self.granted]), "<i4"),
            state=np.array([table.state for table in tables if table is not None], np.int32),
        )


def _rows_of(tuples: Sequence[Sequence[int]]) -> I32:
    """Return tuples of equal length as the rows of an array; a third of the time of `np.array` for named tuples."""
    return np.fromiter(chain.from_iterable(tuples), np.int32).reshape(len(tuples), -1)


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
