"""All runs of the comparison, in several processes, and their means over seeds."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from loadtest.scale.cluster import Cluster, Outcome, simulate
from loadtest.scale.policies import CONTROLS, OURS, POLICIES
from loadtest.scale.traffic import SCENARIOS, TRACE, Scenario

NUM_GATEWAYS = 4
LARGE = 1000
RESTART_CONTROLS = ("no incarnations",)
BASE_CONTROLS = ("each gateway alone", "load not counted", "no discount")


@dataclass(frozen=True, slots=True)
class Run:
    """One rule under one scenario. `rule`: a name in POLICIES or CONTROLS."""

    scenario: Scenario
    rule: str
    num_gateways: int
    seed: int

    @property
    def weight(self) -> float:
        """Relative duration, for the progress bar."""
        ours = 4.0 if self.rule == OURS or self.rule in CONTROLS else 1.0
        return ours * self.scenario.num_workers * self.scenario.rate * self.scenario.duration_s


@dataclass(frozen=True, slots=True)
class Row:
    """Means over the seeds of one rule under one scenario; `spread`: standard deviation of the mean TTFT, seconds."""

    scenario: str
    num_workers: int
    rule: str
    num_gateways: int
    num_seeds: int
    spread: float
    outcome: Outcome


def plan(
    scenarios: Sequence[str], num_workers: Sequence[int], num_seeds: int, quick: bool, trace: Path | None
) -> list[Run]:
    """Return the runs: every rule under every scenario, ours with 1 and 8 gateways, and the controls.

    With LARGE or more workers there is one seed. The time stays the same: conversations last minutes, and before as
    many end as begin the cluster is almost idle, where any rule may leave workers unused.
    """
    runs: list[Run] = []
    chosen = [SCENARIOS[name] for name in scenarios]
    if trace is not None:
        chosen.append(replace(TRACE, trace=trace))
    for count in num_workers:
        for scenario in chosen:
            if scenario.name == "two workers":
                if count != num_workers[0]:
                    continue
                sized = replace(scenario, duration_s=scenario.duration_s / (4 if quick else 1))
            else:
                sized = replace(scenario, num_workers=count, duration_s=scenario.duration_s / (4 if quick else 1))
            seeds = range(1, 1 + (1 if count >= LARGE or scenario.trace is not None else num_seeds))
            rules = [(rule, NUM_GATEWAYS) for rule in POLICIES]
            if scenario.name == "base":
                rules += [(OURS, 1), (OURS, 8), *((rule, NUM_GATEWAYS) for rule in BASE_CONTROLS)]
            if scenario.name == "two workers":
                rules += [("no discount", NUM_GATEWAYS), ("load not counted", NUM_GATEWAYS)]
            if scenario.name == "restarts":
                rules += [(rule, NUM_GATEWAYS) for rule in RESTART_CONTROLS]
            runs += [Run(sized, rule, gateways, seed) for rule, gateways in rules for seed in seeds]
    return runs


def run_one(run: Run) -> Outcome:
    """Simulate one run."""
    cluster = Cluster(run.scenario, run.seed)
    build = {**POLICIES, **CONTROLS}[run.rule]
    return simulate(run.scenario, build(cluster, run.num_gateways, run.seed), cluster, run.num_gateways, run.seed)


def run_all(runs: Sequence[Run], num_processes: int, advance: Callable[[Run], None]) -> list[Row]:
    """Simulate all runs, longest first, and return the means in the order of the runs."""
    outcomes: dict[Run, Outcome] = {}
    if num_processes == 1:
        for run in runs:
            outcomes[run] = run_one(run)
            advance(run)
    else:
        with ProcessPoolExecutor(num_processes) as pool:
            futures = {pool.submit(run_one, run): run for run in sorted(runs, key=lambda run: -run.weight)}
            for future in as_completed(futures):
                outcomes[futures[future]] = future.result()
                advance(futures[future])
    return list(_means(runs, outcomes))


def _means(runs: Sequence[Run], outcomes: dict[Run, Outcome]) -> Iterator[Row]:
    groups: dict[tuple[Scenario, str, int], list[Outcome]] = {}
    for run in runs:
        groups.setdefault((run.scenario, run.rule, run.num_gateways), []).append(outcomes[run])
    for (scenario, rule, gateways), found in groups.items():
        means = {each.name: statistics.fmean(getattr(one, each.name) for one in found) for each in fields(Outcome)}
        spread = statistics.pstdev(one.mean_ttft_s for one in found)
        outcome = Outcome(**{**means, "num_requests": round(means["num_requests"])})  # type: ignore[arg-type]
        yield Row(scenario.name, scenario.num_workers, rule, gateways, len(found), spread, outcome)


def to_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the rows as JSON data with few digits."""
    found = []
    for row in rows:
        data = asdict(row)
        outcome = {name: round(value, 6) for name, value in data.pop("outcome").items()}
        found.append({**data, "spread": round(row.spread, 6), **outcome})
    return found


def num_cores() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0))
