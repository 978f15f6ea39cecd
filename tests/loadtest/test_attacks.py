"""`python -m loadtest.attacks`: a short complete run of each attack. The figures are printed, not checked."""

from __future__ import annotations

import pytest

from loadtest.attacks.__main__ import ATTACKS, main
from loadtest.attacks.harness import VictimTimes

pytestmark = pytest.mark.linux  # reads /proc


def test_victim_times_report_percentiles_in_milliseconds() -> None:
    times = VictimTimes(responses_s=[0.001] * 50 + [1.0] * 50)
    assert times.p99_ms() == {"response": 1000.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_attack_measures_latency_and_memory(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", name, "--seconds", "1", "--settle", "0.5"]) in (0, 1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{name}: ")]
    assert [line.removeprefix(f"{name}: ").split(" (")[0].split(":")[0] for line in lines] == [
        "p99 of a response",
        "p99 of a token gap",
        "memory growth",
    ]
