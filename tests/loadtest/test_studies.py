"""The studies: reservations, the simulation's own laws, published values, and injected bugs that must be found."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from chatcache.kv_cache.pool import PagePool
from loadtest.lengths import ALPACA, SHAREGPT
from loadtest.studies import memory, recorded, report, results, tails
from loadtest.studies.__main__ import STUDIES, main
from loadtest.studies.cost import OPT_13B, open_cost
from loadtest.studies.published import FIG2, FIG13_SHAREGPT, SYSTEMS
from loadtest.studies.reservations import BuddyAllocator, ContiguousReservation, next_power_of_two
from loadtest.studies.results import REAL, SIMULATED, Context, Row
from loadtest.studies.simulate import (
    Outcome,
    SimulationError,
    System,
    check_littles_law,
    poisson_trace,
    simulate,
    sustained_rate,
)


def largest_aligned_hole(used: set[int], num_units: int, size: int) -> int | None:
    """Return the first free aligned chunk of this size, by looking at every unit."""
    starts = range(0, num_units - size + 1, size)
    return next((first for first in starts if used.isdisjoint(range(first, first + size))), None)


@pytest.mark.parametrize("num_units", [64, 61])
def test_buddy_allocator_finds_a_chunk_exactly_when_brute_force_does(num_units: int) -> None:
    rng, buddy = random.Random(num_units), BuddyAllocator(num_units, 16)
    chunks: dict[int, int] = {}
    for _ in range(3_000):
        if chunks and rng.random() < 0.5:
            first = rng.choice(list(chunks))
            del chunks[first]
            buddy.free(first)
        else:
            size = next_power_of_two(rng.randint(1, 16))
            used = {unit for first, length in chunks.items() for unit in range(first, first + length)}
            chunk = buddy.allocate(size)
            assert (chunk is None) == (largest_aligned_hole(used, num_units, size) is None)
            if chunk is not None:
                assert used.isdisjoint(range(chunk, chunk + size)) and chunk + size <= num_units
                chunks[chunk] = size
        assert buddy.num_free == num_units - sum(chunks.values())


@pytest.mark.parametrize("num_slots", [4096, 8191, 981 * 16])
def test_max_reservation_batches_as_many_requests_as_chunks_fit(num_slots: int) -> None:
    system = System(memory="max", num_slots=num_slots, seconds=20, warm_up_s=10, drain=False)
    outcome = simulate([replace(each, time_s=0.0) for each in poisson_trace(SHAREGPT, 4, 20, 1)], system)
    assert outcome.mean_running == pytest.approx(num_slots // 2048, abs=0.3)


@pytest.mark.parametrize("system", ["max", "oracle", "pages", "static"])
def test_simulation_obeys_littles_law_and_finishes_every_request(system: str) -> None:
    base = System(memory="max", static_batch=5) if system == "static" else System(memory=system)
    arrivals = poisson_trace(ALPACA, 2, 20, 3, num_sequences=2)
    outcome = simulate(arrivals, base)
    assert len(outcome.finishes) == len(arrivals) and not outcome.num_unfinished
    check_littles_law(outcome)
    outcome.finishes.pop()
    with pytest.raises(SimulationError, match="Little"):
        check_littles_law(outcome)


def test_sustained_rate_interpolates_at_the_limit() -> None:
    assert sustained_rate([(1.0, 0.1), (2.0, 0.4), (3.0, 0.625)]) == pytest.approx(2.5)
    assert sustained_rate([(1.0, 0.6)]) is None and sustained_rate([(1.0, 0.1), (2.0, 0.2)]) == 2.0


def test_row_ratio_of_a_range_is_one_within_it() -> None:
    ratios = [Row("1", "", ours, (2.0, 4.0), "", SIMULATED).ratio for ours in (1.0, 3.0, 8.0)]
    assert ratios == [0.5, 1.0, 2.0]


def test_open_cost_file_with_other_keys_raises(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"name": "x"}))
    with pytest.raises(ValueError, match="keys"):
        open_cost(str(path))
    assert open_cost("opt13b-a100") is OPT_13B
    assert OPT_13B.base == pytest.approx(0.0255, abs=1e-4) and OPT_13B.per_context_token == pytest.approx(
        0.63e-6, rel=0.01
    )


def test_reservation_never_released_stops_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContiguousReservation, "release", lambda self, request: None)
    with pytest.raises(SimulationError, match="no step can be planned"):
        simulate(poisson_trace(ALPACA, 4, 20, 1), System(memory="max"))


def test_pages_counted_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    num_in_use = PagePool.num_in_use.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(PagePool, "num_in_use", property(lambda self: 2 * num_in_use(self)))
    with pytest.raises(SimulationError, match="slots are in use"):
        simulate(poisson_trace(SHAREGPT, 4, 60, 1), System(seconds=60))


def _tokens_and_batch(name: str) -> tuple[float, float]:
    """Return the percent of slots with tokens at 4 requests/s, and the batch at 2 requests/s, at 600 s."""
    base = System(warm_up_s=300, seconds=600, drain=False)
    found: list[Outcome] = [memory.measure(name, SHAREGPT, rate, base, seed) for rate in (4, 2) for seed in (1, 2, 3)]
    tokens = sum(100 * outcome.memory_mean().tokens for outcome in found[:3]) / 3
    return tokens, sum(outcome.mean_running for outcome in found[3:]) / 3


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", SYSTEMS)
def test_figures_2_and_13_are_within_10_percent_of_the_published_values(name: str) -> None:
    """Repeat what the quick run checks with six simulations for each system."""
    tokens, batch = _tokens_and_batch(name)
    assert tokens == pytest.approx(FIG2[name][0], rel=0.1)
    assert batch == pytest.approx(FIG13_SHAREGPT[name], rel=0.1)


@pytest.mark.parametrize("q", [0.05, 0.3])
def test_page_fill_is_the_mean_of_simulated_pages(q: float) -> None:
    rng, fills = random.Random(5), []
    for _ in range(20_000):
        fill = 1
        while fill < 16 and rng.random() >= q:
            fill += 1
        fills.append(fill)
    assert tails.page_fill(q) == pytest.approx(sum(fills) / len(fills), rel=0.02)


@pytest.mark.parametrize("q", [0.1, 0.5])
def test_repeated_forks_take_the_pages_of_the_formula(q: float) -> None:
    copies, trial = tails.trial_of_repeated_forks(q, 3_000, False, 1)
    fresh, _ = tails.trial_of_repeated_forks(q, 3_000, True, 1)
    assert copies == -(-3_000 // tails.PAGE)
    assert fresh / copies == pytest.approx(tails.PAGE / tails.page_fill(q), rel=0.1)
    assert trial.num_copies / trial.num_forks == pytest.approx(tails.copy_share(), abs=0.03)


@pytest.mark.parametrize("num_branches", [2, 6])
def test_one_fork_takes_the_pages_of_the_formula(num_branches: int) -> None:
    fresh, copied = (
        sum(tails.trial_of_one_fork(num_branches, is_fresh, rng) for _ in range(600)) / 600
        for is_fresh, rng in ((True, random.Random(3)), (False, random.Random(3)))
    )
    assert fresh - copied == pytest.approx(tails.extra_pages(num_branches), abs=0.3)


def write_block_trace(path: Path) -> None:
    """Write 40 requests: half of the prompts share their first block, and the last is the second turn of a chat."""
    lines = [
        {
            "timestamp": 500 * number,
            "input_length": 700,
            "output_length": 90,
            "hash_ids": [number % 2 * 1000 + number, number],
        }
        for number in range(39)
    ]
    for line in lines[1::2]:
        line["hash_ids"] = [7, line["timestamp"]]
    lines[0]["session_id"] = "chat"
    lines.append({"delay": 2000, "input_length": 30, "output_length": 9, "session_id": "chat"})
    path.write_text("\n".join(map(json.dumps, lines)))


def test_trace_load_keeps_reuse_and_turns_of_a_block_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_block_trace(path)
    load = recorded.TraceLoad(path, 20.0, recorded.fitting_scale(recorded.read_once(path)))
    arrivals, on_finish = load.arrivals(2.0)
    outcome = simulate(arrivals, System(prefix_caching=True, num_slots=2**17), on_finish)
    assert len(outcome.finishes) == len(arrivals) + 1 == 40
    planned = [turn for each in load.plan(2.0).conversations for turn in each.turns]
    ideal = sum(turn.num_ideal_cached for turn in planned) + 700 + 90  # of the second turn
    assert 0.9 * ideal <= outcome.num_cached_tokens <= ideal


def test_fitting_scale_fits_95_percent_of_the_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{number % 60:02}.5,{100 * number},10" for number in range(1, 101)]
    path.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    trace = recorded.read_once(path)
    scale = recorded.fitting_scale(trace)
    assert sum(scale * (turns[0].num_prompt_tokens + 10) < 2048 for turns in trace) == 95
    load = recorded.TraceLoad(path, 50.0, scale)
    assert all(len(each.prompt) + each.output < 2048 for each in load.arrivals(1.0)[0])


def test_every_study_has_a_topic_of_the_report() -> None:
    assert [name for names in report.TOPICS.values() for name in names] == list(STUDIES)


def test_main_trace_without_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "trace"])
    assert "needs --trace" in capsys.readouterr().err


@pytest.mark.slow
def test_buddy_that_never_merges_is_found_by_figure_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(self: BuddyAllocator, first: int) -> None:
        self._free[self._sizes.pop(first)].add(first)

    monkeypatch.setattr(BuddyAllocator, "free", free)
    try:
        tokens, _ = _tokens_and_batch("oracle")
    except SimulationError:
        return
    assert tokens != pytest.approx(FIG2["oracle"][0], rel=0.1)


QUICK_GROUPS = (
    ("fig2", "fig13", "fig15"),
    ("paging_or_scheduling", "lengths_apart", "fig18a", "chunks", "local_user", "fig18b", "fig19", "tails", "trace"),
    ("fig12", "fig14", "fig16", "fig17"),
)
QuickRun = Callable[[str], Path]


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> QuickRun:
    """Return a function that runs a study, with its group, and returns the folder of the report.

    Together the groups run what `make studies ARGS=--quick` runs, and a trace; the real studies use a tiny model.
    """

    @cache
    def run(group: tuple[str, ...]) -> Path:
        out = tmp_path_factory.mktemp("studies")
        write_block_trace(out / "trace.jsonl")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(results.Context, "shape_name", "tiny")
            patch.setattr(recorded, "QUICK_S", 15.0)
            command = ["--quick", "--only", ",".join(group), "--out", str(out), "--trace", str(out / "trace.jsonl")]
            assert main(command) == 0
        return out

    return lambda name: run(next(group for group in QUICK_GROUPS if name in group))


def rows_of(folder: Path, name: str) -> list[Row]:
    (found,) = report.load_all(folder, [name])
    return list(found[1].rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fig2", "fig13"])
def test_quick_figures_2_and_13_are_within_10_percent_of_the_published_values(quick_run: QuickRun, name: str) -> None:
    rows = [row for row in rows_of(quick_run(name), name) if row.published]
    assert len(rows) >= 7
    assert {row.quantity: row.ratio for row in rows} == {row.quantity: pytest.approx(1.0, abs=0.1) for row in rows}


@pytest.mark.slow
def test_quick_figure_15_is_within_5_points_of_the_published_values(quick_run: QuickRun) -> None:
    found = [row for row in rows_of(quick_run("fig15"), "fig15") if "Alpaca" in row.quantity]
    rows = [row for row in found if row.kind == SIMULATED]
    assert len(rows) == 6
    assert {row.quantity: row.ours for row in rows} == {
        row.quantity: pytest.approx(row.published, abs=5) for row in rows
    }
    demo = [row.ours for row in found if row.kind == REAL]  # a small model, whose beams fork more often
    assert len(demo) == 3 and 25 < demo[0] < demo[1] < demo[2] < 80


REAL_STUDIES = {"fig15", "fig18a", "fig18b", "fig19", "paging_or_scheduling", "local_user", "chunks", "tails"}


@pytest.mark.slow
@pytest.mark.parametrize("group", QUICK_GROUPS, ids=lambda group: group[0])
def test_quick_run_fills_every_row_and_draws_every_study(quick_run: QuickRun, group: tuple[str, ...]) -> None:
    out = quick_run(group[0])
    text = (out / "studies.md").read_text()
    for name in group:
        rows = rows_of(out, name)
        assert rows and all(math.isfinite(row.ours) for row in rows), name
        assert any(row.kind == REAL for row in rows) == (name in REAL_STUDIES), name
        assert f"--only {name}" in text and f"({name}.png)" in text
        assert (out / f"{name}.svg").exists() and (out / f"{name}.png").stat().st_size < 200_000
    assert "two fitted constants" in text.lower() and "quick" in text


def test_quick_groups_are_all_studies() -> None:
    assert sorted(name for group in QUICK_GROUPS for name in group) == sorted(STUDIES)


@pytest.mark.slow
def test_quick_local_user_finds_earlier_turns_in_the_cache(quick_run: QuickRun) -> None:
    rows = {row.quantity: row.ours for row in rows_of(quick_run("local_user"), "local_user")}
    on, off = (rows[f"prompt tokens computed, cache {name}, tiny shape on CPU"] for name in ("on", "off"))
    assert on < 0.3 * off


def test_context_pick_returns_the_value_of_the_mode() -> None:
    assert Context(quick=True).pick(1, 2) == 2 and Context().pick(1, 2) == 1
