"""Random workloads on any pool equal each request alone with unlimited memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.generated_workloads import workloads
from tests.engine.workloads import Workload, assert_equals_alone

pytestmark = pytest.mark.slow

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
TIGHT = settings(QUICK, max_examples=60)


@QUICK
@given(workloads())
def test_random_workloads_equal_each_request_alone(workload: Workload) -> None:
    assert_equals_alone(workload)


@TIGHT
@given(workloads(tight=True))
def test_random_workloads_on_a_tight_pool_equal_each_request_alone(workload: Workload) -> None:
    assert_equals_alone(workload)


@QUICK
@given(workloads(hybrid=True))
def test_random_workloads_of_a_hybrid_model_equal_each_request_alone(workload: Workload) -> None:
    assert_equals_alone(workload)


@TIGHT
@given(workloads(tight=True, hybrid=True))
def test_random_workloads_of_a_hybrid_model_on_a_tight_pool_equal_each_request_alone(workload: Workload) -> None:
    assert_equals_alone(workload)


@TIGHT
@given(st.one_of(workloads(), workloads(tight=True), workloads(tight=True, hybrid=True)))
def test_random_workloads_whose_branches_rest_equal_each_request_alone(workload: Workload) -> None:
    assert_equals_alone(replace(workload, rests=True, policy="fair"))


@pytest.mark.long
@settings(QUICK, max_examples=10_000)
@given(workloads(tight=True))
def test_ten_thousand_tight_workloads_equal_each_request_alone(workload: Workload) -> None:
    """At most 1,000 steps and five preemptions each; the oldest is never preempted."""
    assert_equals_alone(workload)
