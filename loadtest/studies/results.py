"""Results of a study as data: rows of the table, an answer in words, and panels to draw."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from loadtest.studies.cost import OPT_13B, StepCost

SIMULATED = "simulated"
REAL = "real"

Published = float | tuple[float, float] | None
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Row:
    """One value and the published one: a number, a (lowest, highest) range, or None."""

    figure: str
    quantity: str
    ours: float
    published: Published
    unit: str
    kind: str

    @property
    def ratio(self) -> float | None:
        """Ours / published; of a range, the nearest bound, and 1 within it."""
        if self.published is None:
            return None
        low, high = self.published if isinstance(self.published, tuple) else (self.published, self.published)
        return self.ours / min(max(self.ours, low), high) if min(max(self.ours, low), high) else None


@dataclass(frozen=True, slots=True)
class Series:
    """A line, points, or one bar per category. `is_published`: values of the paper, drawn as such."""

    label: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]
    is_published: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Axes with their series. `kind`: lines | bars | stack. `limit`: a horizontal line and its label.

    `x_ticks`: labels of the places 1, 2, 3, ... on the x axis.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    kind: str = "lines"
    log_x: bool = False
    log_y: bool = False
    y_min: float | None = None
    y_max: float | None = None
    limit: tuple[float, str] | None = None
    x_ticks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """What a study found. `question`: what it answers; `answer`: the answer in words."""

    name: str
    title: str
    question: str
    answer: str
    rows: tuple[Row, ...]
    panels: tuple[Panel, ...]


@dataclass(slots=True)
class Context:
    """Settings of a run, processes for simulations, and models that stay loaded for several studies.

    `shape`: the model of the real studies, a key of `chatcache.bench.drivers.SHAPES`; "" for that of the device.
    `advance`: receives the share of the present study that was completed by a piece of work.
    """

    quick: bool = False
    cost: StepCost = OPT_13B
    trace: Path | None = None
    device: str = "cpu"
    shape: str = ""
    num_processes: int = 1
    advance: Callable[[float], None] = lambda share: None
    seed: int = 1
    _pool: ProcessPoolExecutor | None = None
    _kept: dict[Hashable, Any] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def shape_name(self) -> str:
        return self.shape or ("qwen3-0.6b" if self.device.startswith("cuda") else "smollm2-135m")

    def pick(self, full: T, quick: T) -> T:
        """Return the value for a quick or a full run."""
        return quick if self.quick else full

    def map(self, function: Callable[[T], R], items: Sequence[T], share: float = 1.0) -> list[R]:
        """Return the function of each item, in order. In several processes if there are more than one.

        `share`: of the study's work.
        """
        if self._pool is None:
            found = []
            for item in items:
                found.append(function(item))
                self.advance(share / len(items))
            return found
        futures = [self._pool.submit(function, item) for item in items]
        for _ in as_completed(futures):
            self.advance(share / len(items))
        return [future.result() for future in futures]

    def keep(self, key: Hashable, build: Callable[[], AbstractContextManager[T]]) -> T:
        """Return what `build` opened when it was first called for this key; it is closed when the run ends."""
        if key not in self._kept:
            self._kept[key] = self._stack.enter_context(build())
        found: T = self._kept[key]
        return found

    @contextmanager
    def resources(self) -> Iterator[None]:
        """Run simulations in `num_processes` processes, and close at the end what was kept."""
        with self._stack:
            if self.num_processes > 1:
                self._pool = ProcessPoolExecutor(self.num_processes, mp_context=get_context("spawn"))
                self._stack.callback(self._pool.shutdown, cancel_futures=True)
            yield
        self._pool = None
        self._kept.clear()


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
