"""The granted rows of one step, collected branch by branch and turned into a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chatcache.decode.actions import DrawSpec
from chatcache.kv.cache import PageCopy
from chatcache.sched.draws import DrawArrays
from chatcache.sched.plan import Rows, StepPlan
from chatcache.sched.request import Branch, LiveRequest


class Drawn(NamedTuple):
    """`branch` is drawn in draws first_draw .. first_draw + num_draws - 1 of the plan."""

    branch: Branch
    first_draw: int
    num_draws: int


@dataclass(frozen=True, slots=True)
class Step:
    """A plan and whom it serves. `granted` is parallel to the plan's rows: (branch, its new tokens as int32 bytes).

    `faults`: requests whose strategy failed to say what to draw.
    """

    plan: StepPlan
    granted: list[tuple[Branch, bytes]]
    drawn: list[Drawn]
    faults: list[tuple[LiveRequest, Exception]]

    def requests(self) -> list[LiveRequest]:
        """List the requests with a row in this step, each once."""
        return list(dict.fromkeys(branch.request for branch, _ in self.granted))


class Batch:
    """One step in the making. `budget` tokens may still be granted."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.granted: list[tuple[Branch, bytes]] = []
        self._slot: list[int] = []
        self._start: list[int] = []
        self._num_tokens: list[int] = []
        self._updates: list[tuple[int, int, int]] = []
        self._copies: list[PageCopy] = []
        self._ready: list[tuple[Branch, int]] = []  # (branch, row): drawn in this step

    def add_copies(self, copies: Iterable[PageCopy]) -> None:
        self._copies += copies

    def add(self, branch: Branch, num_tokens: int) -> None:
        """Grant the branch its next `num_tokens` tokens; room for them has been reserved."""
        table, slot = branch.table, branch.slot
        if table is None:
            raise ValueError(f"branch {branch.id} of {branch.request.request_id} has no pages")
        start = table.num_tokens
        stop = start + num_tokens
        if stop == branch.num_tokens:
            self._ready.append((branch, len(self.granted)))
        self.granted.append((branch, branch.span(start, stop)))
        self._slot.append(slot)
        self._start.append(start)
        self._num_tokens.append(num_tokens)
        self.budget -= num_tokens
        if table.changed_from < table.num_base_pages + len(table.own):
            first, pages = table.take_changes()
            self._updates += [(slot, first + i, page) for i, page in enumerate(pages)]

    def finish(self, step: int, forks: list[tuple[int, int, int]], arrays: DrawArrays) -> Step:
        """Freeze the batch. Asks each drawn branch's strategy what to draw."""
        drawn: list[Drawn] = []
        specs: list[DrawSpec] = []
        rows: list[int] = []
        positions: list[int] = []
        faults: list[tuple[LiveRequest, Exception]] = []
        for branch, row in self._ready:
            try:
                wanted = branch.request.strategy.draws(branch.id)
                if not wanted:
                    raise ValueError(f"nothing to draw from branch {branch.id}")
            except Exception as error:
                faults.append((branch.request, error))
                continue
            drawn.append(Drawn(branch, len(specs), len(wanted)))
            for spec in wanted:
                specs.append(spec)
                rows.append(row)
                positions.append(branch.num_tokens)
        plan = StepPlan(
            step=step,
            forks=_table(forks),
            updates=_table(self._updates),
            copies=_table(self._copies, columns=2),
            rows=Rows(
                slot=np.array(self._slot, np.int32),
                start=np.array(self._start, np.int32),
                num_tokens=np.array(self._num_tokens, np.int32),
                tokens=np.frombuffer(b"".join([tokens for _, tokens in self.granted]), "<i4").astype(np.int32),
            ),
            draws=arrays.of(specs, rows, positions),
        )
        return Step(plan, self.granted, drawn, faults)


def _table(rows: Sequence[Sequence[int]], columns: int = 3) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(rows, np.int32).reshape(-1, columns)
