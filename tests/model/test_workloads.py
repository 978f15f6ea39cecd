"""Random workloads on a real model equal each request alone, to the bit, in deterministic mode.

As `tests/engine/test_property.py`, with the kernels and the sampler in place of the fake runner: sampling, beams and
random forks, on pools of few pages, with swapping, cancelled requests and forks of running ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from chatcache.config import EngineConfig
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import LaunchedStep, Runner
from chatcache.types.plan import KVCapacity, StepPlan, StepResult
from chatcache.types.request import GenerateRequest
from tests.engine.generated_workloads import until_it_fails, workloads
from tests.engine.oracle import Answer
from tests.engine.workloads import Arrival, Workload, assert_equal, play
from tests.model.determinism import save_shape
from tests.model.families import Sample

pytestmark = pytest.mark.slow

PAGE = 8
NUM_SLOTS = 32
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
TIGHT = settings(QUICK, max_examples=10)


@dataclass(frozen=True)
class Part:
    """An `engine.ModelRunner` that reports the capacity of a workload, which is a part of its runner's."""

    runner: Runner
    workload: Workload

    def capacity(self) -> KVCapacity:
        whole, part = self.runner.capacity(), self.workload
        assert part.num_pages <= whole.num_pages and part.num_host_pages <= whole.num_host_pages
        assert part.num_states <= whole.num_states and part.num_host_states <= whole.num_host_states
        return replace(
            whole,
            num_pages=part.num_pages,
            num_slots=part.num_slots,
            num_host_pages=part.num_host_pages,
            num_states=part.num_states,
            num_host_states=part.num_host_states,
            max_model_len=256,
        )

    def check_device(self) -> None:
        self.runner.check_device()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return self.runner.launch(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.runner.execute(plan)


class WithoutCopies(Part):
    """Forgets the page copies of every step."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return super().launch(replace(plan, copies=plan.copies[:0]))


def load(folder: Path) -> Runner:
    return load_model(
        EngineConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            attention_backend="cpu",
            page_size=PAGE,
            max_num_seqs=NUM_SLOTS,
            kv_memory_bytes=8 << 20,
            swap_space_bytes=4 << 20,
            deterministic=True,
        )
    )


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return load(save_shape("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def hybrid_runner(sample_of: Callable[[str], Sample]) -> Runner:
    return load(sample_of("qwen3-5").folder)


def assert_equals_alone(runner: Runner, workload: Workload, part: type[Part] = Part) -> None:
    """Run the workload on a part and compare every answer with the request in an engine of its own, without a cache."""
    workload = replace(workload, crashes=frozenset(), swap_crashes=frozenset(), ahead="")
    whole = runner.capacity()
    solo = Workload((), whole.num_pages, PAGE, NUM_SLOTS, 512, caching=False, num_states=whole.num_states)

    @cache
    def answer_alone(request: GenerateRequest) -> Answer:
        own = replace(solo, arrivals=(Arrival(request, 0, None),))
        return run(runner, own)[request.request_id]

    assert_equal(workload, run(runner, workload, part), answer_alone)


def run(runner: Runner, workload: Workload, part: type[Part] = Part) -> dict[str, Answer]:
    engine = workload.engine_of(part(runner, workload), runner.model_info)
    return play(workload, engine, lambda: None)


@QUICK
@given(workload=workloads(page_sizes=[PAGE]))
def test_random_workloads_equal_each_request_alone(runner: Runner, workload: Workload) -> None:
    assert_equals_alone(runner, workload)


@TIGHT
@given(workload=workloads(tight=True, page_sizes=[PAGE]))
def test_random_workloads_on_a_tight_pool_equal_each_request_alone(runner: Runner, workload: Workload) -> None:
    assert_equals_alone(runner, workload)


@TIGHT
@given(workload=workloads(tight=True, hybrid=True, page_sizes=[PAGE]))
def test_random_workloads_of_a_hybrid_model_equal_each_request_alone(hybrid_runner: Runner, workload: Workload) -> None:
    assert_equals_alone(hybrid_runner, workload)


def test_forgotten_page_copies_change_an_answer(runner: Runner) -> None:
    @until_it_fails(30)
    @given(workload=workloads(tight=True, page_sizes=[PAGE]))
    def check(workload: Workload) -> None:
        assert_equals_alone(runner, workload, WithoutCopies)

    with pytest.raises(AssertionError):
        check()
