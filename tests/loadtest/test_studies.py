"""The studies: reservations, the simulation's own laws, published values, and injected bugs that must be found."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from chatcache.kv_cache.pool import PagePool
from loadtest.lengths import ALPACA, SHAREGPT
from loadtest.studies import batching, memory, sharing
from loadtest.studies.__main__ import main
from loadtest.studies.cost import OPT_13B, open_cost
from loadtest.studies.published import FIG2, FIG13_SHAREGPT, SYSTEMS
from loadtest.studies.reservations import BuddyAllocator, ContiguousReservation, next_power_of_two
from loadtest.studies.results import SIMULATED, Context, Row
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
    assert OPT_13B.base == pytest.approx(0.027, abs=1e-4) and OPT_13B.per_context_token == pytest.approx(
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
@pytest.mark.parametrize("name", SYSTEMS)
def test_figures_2_and_13_are_within_10_percent_of_the_published_values(name: str) -> None:
    tokens, batch = _tokens_and_batch(name)
    assert tokens == pytest.approx(FIG2[name][0], rel=0.1)
    assert batch == pytest.approx(FIG13_SHAREGPT[name], rel=0.1)


@pytest.mark.slow
def test_figure_15_parallel_sampling_is_within_5_points_of_the_published_values() -> None:
    rows = sharing.run_fig15(Context(quick=True)).rows[:3]
    assert [row.ours for row in rows] == pytest.approx([row.published for row in rows], abs=5)


@pytest.mark.parametrize("q", [0.05, 0.3])
def test_page_fill_is_the_mean_of_simulated_pages(q: float) -> None:
    rng, fills = random.Random(5), []
    for _ in range(20_000):
        fill = 1
        while fill < 16 and rng.random() >= q:
            fill += 1
        fills.append(fill)
    assert sharing.page_fill(q) == pytest.approx(sum(fills) / len(fills), rel=0.02)


def test_local_user_finds_earlier_turns_in_the_cache() -> None:
    computed, first_on, first_off = (row.ours for row in batching.run_local_user(Context(quick=True)).rows)
    assert computed < 0.3 and first_on < first_off


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


@pytest.mark.slow
def test_quick_run_writes_report_drawings_and_data(tmp_path: Path) -> None:
    assert main(["--quick", "--only", "fig2", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "studies.md").read_text()
    assert "two fitted constants" in text.lower() and "make studies ARGS='--only fig2 --quick'" in text
    assert json.loads((tmp_path / "fig2.json").read_text())["run"]["quick"] is True
    assert (tmp_path / "fig2.svg").exists() and (tmp_path / "fig2.png").stat().st_size < 150_000


def test_context_pick_returns_the_value_of_the_mode() -> None:
    assert Context(quick=True).pick(1, 2) == 2 and Context().pick(1, 2) == 1
