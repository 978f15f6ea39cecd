"""Response times do not depend on what other tenants have computed, only on the own tenant.

`test_isolation` counts pages and is the gate; this test observes from outside. Two samples of times are compared with
the Kolmogorov-Smirnov test; its p-value is the limit distribution with Stephens' correction (JRSS B 32, 1970).
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from chatcache.config import ServerConfig
from chatcache.types.plan import StepPlan, StepResult
from tests.gateway.keyed import Held, give
from tests.gateway.serving import PAGE_SIZE, Server
from tests.support.fake_runner import FakeRunner

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
PAGE_S = 0.001  # what computing a page takes
NUM_WORDS = 12


class Slow(FakeRunner):
    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(len(plan.rows.tokens) // PAGE_SIZE * PAGE_S)
        return super().execute(plan)


def same_p(one: list[float], other: list[float]) -> float:
    """Return the p-value of the hypothesis that both samples have one distribution."""
    a, b = np.sort(one), np.sort(other)
    at = np.concatenate([a, b])
    gap = np.abs(np.searchsorted(a, at, "right") / len(a) - np.searchsorted(b, at, "right") / len(b)).max()
    root = np.sqrt(len(a) * len(b) / (len(a) + len(b)))
    scaled = (root + 0.12 + 0.11 / root) * gap
    terms = np.arange(1, 101)
    return float(np.clip(2 * np.sum((-1.0) ** (terms - 1) * np.exp(-2 * (terms * scaled) ** 2)), 0, 1))


def sampled(server: Server, victim: Held, prober: Held, draw: random.Random, num_pairs: int) -> float:
    """Time cached and new prompts of a victim in turns; return the p-value of the difference."""

    def ask(who: Held, text: str) -> float:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        began = time.perf_counter()
        status, _, answer = server.request("POST", "/v1/chat/completions", body, who.bearer)
        assert status == 200, answer
        return time.perf_counter() - began

    def text() -> str:
        return " ".join(f"{draw.randrange(10**6):06}" for _ in range(NUM_WORDS))

    said: list[float] = []
    unsaid: list[float] = []
    for _ in range(num_pairs):
        secret = text()
        ask(victim, secret)
        for times, probe in draw.sample([(said, secret), (unsaid, text())], 2):
            times.append(ask(prober, probe))
    return same_p(said, unsaid)


@pytest.mark.long
def test_response_times_do_not_reveal_cached_text_of_other_tenants(tmp_path: Path) -> None:
    """Goal G19, second part: 250 + 250 probes, three runs, and a positive control."""
    config = ServerConfig(db=str(tmp_path / "c.db"))
    ann, bob, other = give(config, "a", "ann"), give(config, "a", "bob"), give(config, "b")
    draw = random.Random(SEED)
    with Server(config, num_pages=100_000, runner_class=Slow) as server:
        server.wait_ready()
        apart = [sampled(server, ann, other, draw, 250) for _ in range(3)]
        control = sampled(server, ann, bob, draw, 250)
    print(f"G19: across tenants p = {apart}, within one p = {control:.2g}")
    assert max(apart) >= 0.01
    assert control < 1e-8
