"""Traces, plans and metrics of open-loop load, against brute force."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest

from loadtest.lengths import GammaLengths, RequestLengths
from loadtest.open_loop.generator import RequestResult
from loadtest.open_loop.report import LatencyLimits, load_runs, median_curve, run_notes, runs_table, summarise
from loadtest.open_loop.traces import TraceRequest, read_trace
from loadtest.open_loop.workload import LengthLimits, Plan, PromptTokens, Turns, plan_poisson, plan_trace, scale_to_rate

LENGTHS = GammaLengths(60, 1.0, 20, 1.0)
NUM_UNITS = 1 << 40  # no two random tokens are equal


def prompts_of(plan: Plan) -> list[list[int]]:
    tokens = PromptTokens(plan, NUM_UNITS)
    return [tokens.draw(conversation.turns[0], n, 0) for n, conversation in enumerate(plan.conversations)]


# -- traces -------------------------------------------------------------------------------------------------------


def test_read_trace_of_azure_has_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:51.0000000,396,0\n2023-11-17 00:00:00.5,7,8\n"
    )
    trace = read_trace(path)
    assert [(turn.num_prompt_tokens, turn.num_output_tokens) for (turn,) in trace] == [(374, 44), (396, 109), (7, 8)]
    assert [turn.at_s for (turn,) in trace] == pytest.approx([0, 4.314579, 20653.81941])


def test_read_trace_of_blocks_has_hash_ids_and_sessions(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [4, 5]},
        {"timestamp": 1000, "input_length": 9, "output_length": 6, "session_id": "a"},
        {"input_length": 7, "output_length": 8, "session_id": "a", "delay": 2500},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert read_trace(path) == [
        [TraceRequest(0.0, 9, 6, session="a"), TraceRequest(0.0, 7, 8, session="a", think_s=2.5)],
        [TraceRequest(2.0, 600, 5, (4, 5))],
    ]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n"])
def test_read_trace_of_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"trace\.csv"):
        read_trace(path)


# -- plans --------------------------------------------------------------------------------------------------------


def test_plan_poisson_depends_on_the_seed_only() -> None:
    plans = [plan_poisson(20, 10, LENGTHS, LengthLimits(), Turns(), seed) for seed in ("a", "a", "b")]
    assert plans[0] == plans[1] != plans[2]
    assert prompts_of(plans[0]) == prompts_of(plans[1])
    assert [len(prompt) for prompt in prompts_of(plans[0])] == [
        conversation.turns[0].num_prompt_tokens for conversation in plans[0].conversations
    ]


@pytest.mark.parametrize("num_turns", [1, 4])
def test_plan_poisson_has_exponential_gaps_and_the_planned_rate(num_turns: int) -> None:
    plan = plan_poisson(50, 400, LENGTHS, LengthLimits(), Turns(num_turns, 2.0), "seed")
    times = [conversation.at_s for conversation in plan.conversations]
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times) and times[-1] < 400
    assert plan.rate == pytest.approx(50, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.05), (
        "as in an exponential distribution"
    )
    thinks = [turn.think_s for conversation in plan.conversations for turn in conversation.turns[1:]]
    assert len(thinks) == len(times) * (num_turns - 1)
    assert not thinks or statistics.fmean(thinks) == pytest.approx(2.0, rel=0.05)
    assert all(conversation.turns[0].think_s == 0 for conversation in plan.conversations)


def test_limits_scale_lengths_and_count_those_cut() -> None:
    limits = LengthLimits(0.5, 40, 30)
    assert [limits.fit(*each) for each in ((60, 60), (100, 10), (1, 1), (10, 99))] == [
        (30, 30),
        (40, 5),
        (1, 1),
        (5, 30),
    ]
    assert [limits.cuts(*each) for each in ((60, 60), (100, 10), (1, 1), (10, 99))] == [False, True, False, True]

    class Listed:
        def sample(self, rng: random.Random) -> RequestLengths:
            return RequestLengths(rng.choice((60, 100)), 10)

    plan = plan_poisson(50, 10, Listed(), limits, Turns(), "seed")
    sizes = [turn.num_prompt_tokens for conversation in plan.conversations for turn in conversation.turns]
    assert set(sizes) == {30, 40} and plan.num_cut == sizes.count(40)


def test_plan_trace_scales_times_and_keeps_those_in_the_window() -> None:
    trace = [[TraceRequest(float(second), 10, 5)] for second in range(101)]
    plan = plan_trace(trace, 0.25, 10, LengthLimits(), "seed")
    assert [conversation.at_s for conversation in plan.conversations] == [n / 4 for n in range(40)]
    assert plan.rate == 4.0


@pytest.mark.parametrize("rate", [0.1, 1.0, 3.3, 10.1])
def test_scale_to_rate_fits_the_first_requests_into_the_window(rate: float) -> None:
    """The arrivals are uneven: the first rate x window requests count, not the mean of the trace."""
    rng = random.Random(4)
    times = [0.0, *sorted(rng.uniform(5, 1000) ** 1.3 for _ in range(100))]
    trace = [[TraceRequest(at_s, 10, 5)] for at_s in times]
    plan = plan_trace(trace, scale_to_rate(trace, rate, 10.0), 10.0, LengthLimits(), "seed")
    assert plan.num_requests == round(10 * rate)
    factor = plan.conversations[1].at_s / times[1] if plan.num_requests > 1 else 1.0
    planned = [each.at_s for each in plan.conversations]
    assert planned == pytest.approx([at_s * factor for at_s in times[: plan.num_requests]])


def test_scale_to_rate_of_a_short_trace_is_refused() -> None:
    trace = [[TraceRequest(float(second), 10, 5)] for second in range(7)]
    with pytest.raises(ValueError, match="3 requests too few"):
        scale_to_rate(trace, 1.0, 10.0)


def random_block_trace(rng: random.Random) -> list[list[TraceRequest]]:
    """Prompts that extend or truncate earlier ones. Ids name the content of a block and all before it."""
    paths: list[tuple[int, ...]] = [()]
    trace = []
    for number in range(40):
        known = rng.choice(paths)[: rng.randrange(6)]
        ids = (*known, *(1000 * number + k for k in range(rng.randrange(1, 4))))
        last = rng.randrange(1, 513)
        paths.append(ids if last == 512 else ids[:-1])  # a partial block is not continued
        trace.append([TraceRequest(float(number), 512 * (len(ids) - 1) + last, 3, ids)])
    return trace


@pytest.mark.parametrize("limits", [LengthLimits(), LengthLimits(1 / 16), LengthLimits(1 / 32, max_prompt=70)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_ideal_hits_of_a_block_trace_equal_the_longest_common_prefixes(limits: LengthLimits, seed: int) -> None:
    plan = plan_trace(random_block_trace(random.Random(seed)), 1.0, 1e9, limits, "seed")
    prompts, num_hits = prompts_of(plan), 0
    for number, (prompt, conversation) in enumerate(zip(prompts, plan.conversations, strict=True)):
        (turn,) = conversation.turns
        assert len(prompt) == turn.num_prompt_tokens
        longest = 0
        for earlier in prompts[:number]:
            common = next((k for k, (a, b) in enumerate(zip(prompt, earlier, strict=False)) if a != b), None)
            longest = max(longest, min(len(prompt), len(earlier)) if common is None else common)
        assert turn.num_ideal_cached == min(longest, len(prompt) - 1)
        num_hits += bool(longest)
    assert num_hits > 5


def test_prompts_of_different_runs_share_no_block() -> None:
    trace = random_block_trace(random.Random(1))
    one, other = (plan_trace(trace, 1.0, 1e9, LengthLimits(), seed) for seed in ("1/0.5/0", "1/1/0"))
    assert all(a[0] != b[0] for a, b in zip(prompts_of(one), prompts_of(other), strict=True))


# -- metrics ------------------------------------------------------------------------------------------------------


def random_results(rng: random.Random) -> list[RequestResult]:
    results = []
    for number in range(50):
        num_tokens = rng.randrange(1, 20)
        gaps_s = [rng.random() / 5 for _ in range(num_tokens - 1)]
        ttft_s = rng.random()
        result = RequestResult(number, 0, float(number), 100, num_tokens, 30, rng.random() / 100)
        result.ttft_s, result.gaps_s, result.latency_s = ttft_s, gaps_s, ttft_s + sum(gaps_s)
        result.num_received_tokens, result.num_reported_prompt_tokens, result.num_cached = num_tokens, 100, 20
        if rng.random() < 0.2:
            result.error, result.detail = rng.choice(("timeout", "HTTP 429")), "text"
        results.append(result)
    return results


@pytest.mark.parametrize("seed", range(3))
def test_summary_equals_a_count_by_hand(seed: int) -> None:
    results = random_results(random.Random(seed))
    summary = summarise(results, 25.0, 40.0, LatencyLimits(0.6, 0.1), 1.0)
    good = [each for each in results if each.error == ""]
    latencies = [each.latency_s / each.num_received_tokens for each in good]
    assert summary["normalized_latency_s"] == pytest.approx(sum(latencies) / len(latencies), abs=1e-5)
    in_time = 0
    for each in good:
        assert each.ttft_s is not None
        slow = len(each.gaps_s) > 0 and statistics.fmean(each.gaps_s) > 0.1
        in_time += each.ttft_s <= 0.6 and not slow
    assert 0 < in_time < len(good) and summary["goodput"] == in_time / 25
    assert summary["offered_rate"] == 2.0 and summary["completed_rate"] == len(good) / 40
    assert summary["cached_share"] == 0.2 and summary["ideal_cached_share"] == 0.3
    gaps = sorted(gap for each in good for gap in each.gaps_s)
    assert summary["itl_s"]["p50"] == pytest.approx(statistics.median(gaps), abs=1e-4)
    counts = {name: sum(each.error == name for each in results) for name in ("timeout", "HTTP 429")}
    assert {name: each["count"] for name, each in summary["failures"].items()} == counts
    assert sum(counts.values()) == summary["failed"] == 50 - len(good)


def test_summary_warns_of_a_late_generator() -> None:
    results = random_results(random.Random(0))
    run = {"server": "a", "rate": 1.0, **summarise(results, 50.0, 50.0, LatencyLimits(), lag_limit_s=1.0)}
    assert not run["is_late"] and run["goodput"] is None
    for each in results[:2]:
        each.lag_s = 2.5
    run |= summarise(results, 50.0, 50.0, LatencyLimits(), lag_limit_s=1.0)
    assert run["is_late"] and any("sent late" in note for note in run_notes(run))
    assert "sent late" in runs_table([run]) and "x timeout: text" in runs_table([run])


def test_summary_without_a_completed_request_has_no_latency() -> None:
    result = RequestResult(0, 0, 0.0, 5, 5, error="no connection")
    run = {"server": "a", "rate": 1.0, **summarise([result], 1.0, 1.0, LatencyLimits(1.0), 1.0)}
    assert run["normalized_latency_s"] is None and run["goodput"] == 0
    assert "1 x no connection" in runs_table([run])


def test_median_curve_merges_repeated_runs_of_a_rate() -> None:
    runs = [{"rate": rate, "x": x} for rate, x in ((2.0, 5.0), (1.0, 1.0), (2.0, 9.0), (2.0, 6.0), (3.0, None))]
    assert median_curve(runs, lambda run: run["x"]) == [(1.0, 1.0), (2.0, 6.0)]


def test_load_runs_of_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="no runs"):
        load_runs([path])
