"""Run a `Runner` with manually built plans.

Pages are allocated as needed and not shared. For tests below the engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
import torch

from chatcache.model.runner import Runner
from chatcache.types.plan import Draws, LogitEdit, LogitMask, Pools, Rows, Scores, StepPlan, StepResult

CPU = torch.device("cpu")
KERNELS = CPU if os.environ.get("TRITON_INTERPRET") == "1" else torch.device("cuda", 0)  # as the root conftest decides

DEFAULTS: dict[str, tuple[Any, type]] = {
    "row": (0, np.int32),
    "width": (1, np.int32),
    "seed": (0, np.uint64),
    "lane": (0, np.int32),
    "position": (0, np.int32),
    "temperature": (0.0, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1.0, np.float32),
    "min_p": (0.0, np.float32),
    "num_top": (0, np.int32),
}


def make_draws(
    specs: Sequence[Mapping[str, Any]], edits: Sequence[LogitEdit] = (), masks: Sequence[LogitMask] = ()
) -> Draws:
    """Build `Draws` from one mapping per draw; fields that are missing are greedy defaults."""
    columns: dict[str, Any] = {
        name: np.array([spec.get(name, default) for spec in specs], kind) for name, (default, kind) in DEFAULTS.items()
    }
    return Draws(**columns, edits=tuple(edits), masks=tuple(masks))


def short_warm_up() -> AbstractContextManager[Any]:
    """Let runners warm up with short steps, since interpreted kernels do not compile; see `test_triton_warm`."""
    return mock.patch.multiple("chatcache.model.runner", WARMUP_PROMPT_TOKENS=(1, 2), WARMUP_CONTEXT_TOKENS=8)


def no_warm_up() -> AbstractContextManager[Any]:
    """Let runners start without warm-up, which is for compiled kernels and captured steps."""
    return mock.patch.object(Runner, "warm_up", return_value=None)


class Driver:
    """Keeps each slot's tokens and pages, and its state if the model has any; `feed` is one step."""

    def __init__(self, runner: Runner, first_page: int = 1) -> None:
        self.runner = runner
        self.page_size = runner.capacity().page_size
        self.has_states = runner.capacity().num_states > 0
        self.next_page = first_page
        self.length: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        self.steps = 0
        self._updates: list[tuple[int, int, int]] = []
        self._copies: list[tuple[int, int]] = []
        self._forks: list[tuple[int, int, int]] = []
        self._state_copies: list[tuple[int, int]] = []

    def fork(self, source: int, target: int) -> None:
        """Share the source's full pages and copy its partial tail page, with the next step."""
        full, tail = divmod(self.length[source], self.page_size)
        self._forks.append((source, target, full + bool(tail)))
        self.pages[target] = self.pages[source][: full + bool(tail)]
        self.length[target] = self.length[source]
        self._state_copies.append((source + 1, target + 1))
        if tail:
            self._copies.append((self.pages[source][full], self.next_page))
            self._updates.append((target, full, self.next_page))
            self.pages[target][full] = self.next_page
            self.next_page += 1

    def feed(
        self,
        grants: Mapping[int, Sequence[int]],
        draws: Draws | None = None,
        scores: Scores | None = None,
        pools: Pools | None = None,
    ) -> StepResult:
        """Give each slot its new tokens; draw greedily from every row by default."""
        starts = []
        for slot, tokens in grants.items():
            start = self.length.setdefault(slot, 0)
            if not start:
                self._state_copies.append((0, slot + 1))
            pages = self.pages.setdefault(slot, [])
            while len(pages) * self.page_size < start + len(tokens):
                self._updates.append((slot, len(pages), self.next_page))
                pages.append(self.next_page)
                self.next_page += 1
            starts.append(start)
            self.length[slot] = start + len(tokens)
        counts = [len(tokens) for tokens in grants.values()]
        rows = Rows(
            slot=np.array(list(grants), np.int32),
            start=np.array(starts, np.int32),
            num_tokens=np.array(counts, np.int32),
            tokens=np.array([token for tokens in grants.values() for token in tokens], np.int32),
            state=np.array([slot + 1 for slot in grants] if self.has_states else [], np.int32),
        )
        plan = StepPlan(
            step=self.steps,
            forks=np.array(self._forks, np.int32).reshape(-1, 3),
            updates=np.array(self._updates, np.int32).reshape(-1, 3),
            copies=np.array(self._copies, np.int32).reshape(-1, 2),
            rows=rows,
            draws=make_draws([{"row": row} for row in range(len(grants))]) if draws is None else draws,
            scores=scores,
            pools=pools,
            state_copies=np.array(self._state_copies if self.has_states else [], np.int32).reshape(-1, 2),
        )
        self._forks, self._updates, self._copies, self.steps = [], [], [], self.steps + 1
        self._state_copies = []
        return self.runner.execute(plan)


def greedy(runner: Runner, prompts: Sequence[Sequence[int]], num_new: int, chunk: int | None = None) -> list[list[int]]:
    """Continue all prompts in one batch, prefilling `chunk` tokens per step."""
    driver = Driver(runner)
    outputs: list[list[int]] = [[] for _ in prompts]
    left = [list(prompt) for prompt in prompts]
    while any(len(output) < num_new for output in outputs):
        active = [slot for slot, output in enumerate(outputs) if len(output) < num_new]
        grants = {slot: left[slot][:chunk] for slot in active}
        left = [tokens[len(grants.get(slot, ())) :] for slot, tokens in enumerate(left)]
        ready = [row for row, slot in enumerate(active) if not left[slot]]
        result = driver.feed(grants, make_draws([{"row": row} for row in ready]))
        assert not result.faults
        for draw, row in enumerate(ready):
            token = int(result.tokens[draw, 0])
            outputs[active[row]].append(token)
            left[active[row]] = [token]
    return outputs
