"""`python -m loadtest.attacks`: a short complete run of each attack. The figures are printed, not checked."""

from __future__ import annotations

import pytest

from loadtest.attacks.__main__ import ATTACKS, main
from loadtest.attacks.harness import VictimTimes, latency_figures

pytestmark = pytest.mark.linux  # reads /proc


def test_victim_times_report_percentiles_in_milliseconds() -> None:
    times = VictimTimes(responses_s=[0.001] * 50 + [1.0] * 50)
    assert times.p99_ms() == {"response": 1000.0}


def times(response_s: float, cpu: float) -> VictimTimes:
    return VictimTimes(responses_s=[response_s] * 100, gateway_cpu=cpu)


def test_latency_figures_compare_with_idle_times() -> None:
    response, cpu = latency_figures("a", times(0.01, 0.25), None, times(0.021, 0.5))
    assert response.name == "a: p99 of a response (100)" and response.limit_name == "idle"
    assert response.ratio == pytest.approx(2.1) and response.met is False
    assert cpu.ratio == pytest.approx(2.0) and cpu.met is None


def test_times_before_and_after_an_attack_are_one_baseline() -> None:
    idle = times(0.01, 0.25) + times(0.03, 0.75)
    assert idle.p99_ms() == {"response": pytest.approx(30.0)} and len(idle.responses_s) == 200
    assert idle.gateway_cpu == 0.5


def test_latency_figures_of_an_attack_with_a_load_also_compare_with_the_same_load() -> None:
    idle, same, cpu = latency_figures("a", times(0.01, 0.25), times(0.02, 0.4), times(0.03, 0.5))
    assert (idle.limit_name, idle.met) == ("idle", False) and idle.ratio == pytest.approx(3.0)
    assert (same.limit_name, same.met) == ("same load", True) and same.ratio == pytest.approx(1.5)
    assert cpu.ratio == pytest.approx(1.25)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_attack_measures_latency_and_memory(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", name, "--seconds", "1", "--settle", "0.5"]) in (0, 1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{name}: ")]
    names = [line.removeprefix(f"{name}: ").split(" (")[0].split(":")[0] for line in lines]
    assert list(dict.fromkeys(names)) == [
        "p99 of a response",
        "p99 of a token gap",
        "p99 of a read",
        "processors used by the gateway",
        "memory growth",
    ]
    assert len(names) == (8 if ATTACKS[name].run_load else 5)
