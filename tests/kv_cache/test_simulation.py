"""Pool, cache and host cache compared with a model of plain lists under random operations.

In a few simulations hypothesis makes every choice, so that it can shrink a failing one; in many others it only chooses
the seed.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.kv_cache.simulation import OPERATION_WEIGHTS, CacheSimulation, run_simulation

RANDOMS = st.randoms(use_true_random=False)  # hypothesis makes every choice
NUM_STEPS = 400  # per simulation; each has a pool of another size


def run(num_runs: int) -> None:
    num_steps = 0

    # A seed cannot be shrunk: a failure reports the step and the operations before it.
    @settings(max_examples=num_runs, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(st.integers(0, 2**63))
    def run_seed(seed: int) -> None:
        nonlocal num_steps
        num_steps += run_simulation(seed, NUM_STEPS).num_steps

    run_seed()
    print(f"{num_steps} steps")
    assert num_steps >= num_runs * NUM_STEPS


@pytest.mark.slow
def test_simulation_of_10_000_steps_keeps_every_invariant() -> None:
    run(25)


@pytest.mark.slow
def test_simulation_of_100_000_steps_keeps_every_invariant() -> None:
    run(250)


@pytest.mark.long
def test_simulation_of_1_000_000_steps_keeps_every_invariant() -> None:
    run(2500)


class ChosenOperations(RuleBasedStateMachine):
    """A simulation whose every choice hypothesis makes. Every step verifies every invariant."""

    @initialize(rng=RANDOMS)
    def begin(self, rng: random.Random) -> None:
        self.simulation = CacheSimulation(rng)

    @rule(name=st.sampled_from(list(OPERATION_WEIGHTS)), rng=RANDOMS)
    def run_operation(self, name: str, rng: random.Random) -> None:
        self.simulation.rng = rng
        self.simulation.run_operation(name)


TestChosenOperations = ChosenOperations.TestCase
TestChosenOperations.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
