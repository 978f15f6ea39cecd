"""The routing simulator: its caches, equal traffic for all rules, injected bugs that it must show, and its report."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.scale.__main__ import main
from loadtest.scale.cluster import Cluster, Outcome, simulate
from loadtest.scale.policies import CONTROLS, HASH, OURS, POLICIES, prompt_boundaries
from loadtest.scale.report import check_goals
from loadtest.scale.runs import Row, Run, plan, run_all, run_one
from loadtest.scale.traffic import SCENARIOS, TRACE, Chain, Node, Scenario, draw_conversations

SMALL = replace(SCENARIOS["base"], num_workers=10, duration_s=60.0, num_groups=4)


def outcome(scenario: Scenario, rule: str, num_gateways: int = 2, seed: int = 1) -> Outcome:
    return run_one(Run(scenario, rule, num_gateways, seed))


def test_cluster_caches_agree_with_a_search_of_every_worker_and_respect_their_size() -> None:
    rng = random.Random(3)
    cluster = Cluster(replace(SMALL, cache_tokens=600, num_workers=4), 1)
    for _ in range(400):
        chain: Chain = tuple((("n", *path), 40 + 10 * len(path)) for path in _paths(rng))
        worker = rng.choice(cluster.workers)
        if rng.random() < 0.02:
            cluster.restart(worker)
        else:
            cluster.insert(worker, chain)
        assert worker.num_cached == sum(worker.cache.values()) <= worker.capacity
        expected = {each.number: cluster.cached_tokens(each, chain) for each in cluster.workers}
        assert cluster.cached_everywhere(chain) == {number: tokens for number, tokens in expected.items() if tokens}


def _paths(rng: random.Random) -> list[Node]:
    choices = [rng.randrange(2) for _ in range(rng.randint(1, 5))]
    return [tuple(choices[: depth + 1]) for depth in range(len(choices))]


def test_every_rule_gets_the_same_conversations_and_repeats_exactly() -> None:
    tiny = replace(SMALL, duration_s=40.0)
    assert draw_conversations(tiny, 1) == draw_conversations(tiny, 1) != draw_conversations(tiny, 2)
    for rule in (*POLICIES, *CONTROLS):
        first, second = (replace(outcome(tiny, rule), decision_us=0.0) for _ in range(2))
        assert first == second, rule
        assert 0 <= first.hit_rate < 1 and first.num_requests > 10


def test_ours_finds_more_and_answers_sooner_than_rules_without_an_index() -> None:
    ours = outcome(SMALL, OURS)
    for rule in ("round robin", HASH):
        other = outcome(SMALL, rule)
        assert ours.hit_rate > other.hit_rate and ours.mean_ttft_s < other.mean_ttft_s


def test_injected_bug_load_not_counted_before_dispatch_shows_as_imbalance() -> None:
    hot = replace(SMALL, num_groups=1, rate=1.5, duration_s=100.0)
    assert outcome(hot, OURS).cov < 0.3 < 0.6 < outcome(hot, "load not counted").cov


def test_injected_bug_without_discount_uses_one_of_two_idle_workers() -> None:
    quiet = replace(SCENARIOS["two workers"], duration_s=12_000.0)
    assert outcome(quiet, "no discount").cov == 1.0
    assert outcome(quiet, OURS).cov < 0.2


def test_injected_bug_places_without_incarnations_predict_worse_after_restarts() -> None:
    scenario = replace(SMALL, restart_share=0.5)
    assert outcome(scenario, "no incarnations").belief_error > 2 * outcome(scenario, OURS).belief_error


def test_injected_bug_an_index_per_gateway_loses_hits() -> None:
    assert outcome(SMALL, "each gateway alone", 4).hit_rate < outcome(SMALL, OURS, 4).hit_rate - 0.1


def test_boundaries_of_a_later_turn_contain_those_of_the_turn_before() -> None:
    cluster = Cluster(SMALL, 1)
    seen: dict[Node, set[object]] = {}

    class Checking(type(POLICIES[OURS](cluster, 1, 1))):  # type: ignore[misc]
        def prepare(self, request, now_s):  # type: ignore[no-untyped-def]
            super().prepare(request, now_s)
            keys = {boundary.key for boundary in prompt_boundaries(request)}
            if request.turn and len(request.conversation.key) == 1:
                assert keys & seen[request.conversation.key], "the reply of the turn before is not found"

        def finished(self, request, now_s):  # type: ignore[no-untyped-def]
            super().finished(request, now_s)
            seen[request.conversation.key] = {prompt_boundaries(request)[-1].key}

    simulate(replace(SMALL, duration_s=30.0), Checking(cluster, 1, 1), cluster, 1, 1)
    assert seen


def test_recorded_trace_replays_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 500 * n, "input_length": 1200, "output_length": 20, "hash_ids": [0, n % 3, 10 + n]}
        for n in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scenario = replace(TRACE, trace=path, num_workers=2)
    first = draw_conversations(scenario, 1)[0]
    assert [length for _, length in first.start] == [512, 512, 176]
    found = outcome(scenario, OURS)
    assert found.num_requests == 45 and 0.5 < found.hit_rate < 0.9


def test_goals_of_a_missed_limit_are_shown_as_missed() -> None:
    good = Outcome(100, 0.95, 0.04, 0.03, 0.4, 0.1, 5.0, 20.0)
    rows = [
        Row("base", 100, rule, 4, 1, 0.0, good if rule == OURS else replace(good, mean_ttft_s=0.1)) for rule in POLICIES
    ]
    assert {goal[-1] for goal in check_goals(rows)} == {"yes"}
    bad = [replace(row, outcome=replace(good, cov=0.9)) if row.rule == OURS else row for row in rows]
    assert [goal[0] for goal in check_goals(bad) if goal[-1] == "NO"] == ["imbalance"]


def test_means_over_seeds_do_not_depend_on_processes() -> None:
    runs = [run for run in plan(["sparse"], [10], 2, quick=True, trace=None) if run.rule == HASH]
    rows = run_all(runs, 1, lambda run: None)
    assert [row.num_seeds for row in rows] == [2] and rows[0].spread > 0


def test_trace_without_block_hashes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n")
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "--trace", str(path)])
    assert "has no block hashes" in capsys.readouterr().err


@pytest.mark.slow
def test_quick_simulation_writes_report_data_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["simulate", "--quick", "--only", "sparse,two workers", "--out", str(tmp_path), "--processes", "2"]) == 0
    )
    assert OURS in capsys.readouterr().out
    text = (tmp_path / "scale.md").read_text()
    assert "Routing, simulated" in text and "--quick" in text and str(tmp_path) not in text
    document = json.loads((tmp_path / "scale.json").read_text())
    assert {row["rule"] for row in document["rows"]} >= set(POLICIES)
    assert (tmp_path / "scale.png").stat().st_size > 10_000
