"""`python -m loadtest` against the real gateway, checked against the engine's counters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatcache.config import ServerConfig
from loadtest.__main__ import main
from loadtest.chats import Scenario
from loadtest.client import Turn
from loadtest.report import summarise, summary_text
from tests.gateway.serving import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = ServerConfig(db=str(tmp_path_factory.mktemp("db") / "chats.db"))
    with Server(config) as running:
        yield running.wait_ready()


@pytest.mark.slow
def test_main_reports_the_counters_of_the_engine(server: Server, tmp_path: Path) -> None:
    arguments = ["--url", server.url, "--users", "3", "--turns", "3", "--max-tokens", "12", "--system-words", "40"]
    before = server.call(server.engine.health())
    assert main([*arguments, "--seed", "1", "--out", str(tmp_path)]) == 0
    after = server.call(server.engine.health())

    (written,) = tmp_path.glob("*.json")
    document = json.loads(written.read_text())
    summary = document["summary"]
    assert (summary["turns"], summary["failed"]) == (9, 0)
    assert summary["prompt_tokens"] == after.num_prompt_tokens - before.num_prompt_tokens
    assert summary["output_tokens"] == after.num_output_tokens - before.num_output_tokens
    cached = sum(turn["cached_tokens"] for turn in document["turns"])
    assert cached == after.num_cached_tokens - before.num_cached_tokens
    assert summary["cached_share_after_first_turn"] > 0.5  # the system prompt and the history are in the cache
    assert summary["ttft_ms"]["p50"] > 0
    assert written.with_suffix(".png").stat().st_size > 5_000


def test_main_counts_failed_turns_and_returns_one(server: Server, tmp_path: Path) -> None:
    arguments = ["--url", server.url, "--users", "2", "--turns", "2", "--system-words", "5000", "--out", str(tmp_path)]
    assert main(arguments) == 1
    (written,) = tmp_path.glob("*.json")
    summary = json.loads(written.read_text())["summary"]
    assert summary["failed"] == 2
    assert "400" in summary["errors"][0]


def test_main_without_server_returns_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 2
    assert "does not answer" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--users", "0"], ["--turns", "1001"], ["--max-tokens", "0"]])
def test_arguments_out_of_bounds_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)


def test_scenario_users_share_only_the_system_prompt() -> None:
    scenario = Scenario(users=2, turns=4, max_tokens=8, system_words=50, seed=3)
    assert scenario.system_prompt() == scenario.system_prompt()
    assert len(scenario.system_prompt().split()) == 50
    assert scenario.questions(0) == scenario.questions(0)
    assert scenario.questions(0) != scenario.questions(1)


def test_summarise_reports_percentiles_rates_and_errors() -> None:
    turns = [
        Turn(user=0, turn=k, started_s=0.0, ttft_s=0.1 * (k + 1), total_s=1.0, prompt_tokens=100, completion_tokens=10)
        for k in range(3)
    ]
    turns[2].cached_tokens = 80
    summary = summarise([*turns, Turn(user=1, turn=0, started_s=0.0, error="gone")], wall_s=2.0)
    assert summary["ttft_ms"]["p50"] == pytest.approx(200.0)
    assert summary["output_tokens_per_s"] == 15.0
    assert (summary["failed"], summary["errors"]) == (1, ["gone"])
    assert summary["cached_share"] == pytest.approx(80 / 300, abs=1e-4)
    assert turns[0].tpot_s == pytest.approx(0.1)
    rows = summary_text(summary).splitlines()
    assert rows[1].split() == ["TTFT", "ms", "200.0", "280.0", "298.0"]
    assert "26.7% of 300 prompt tokens from cache" in rows[-2] and rows[-1] == "gone"
