"""Any workload on any pool equals each request alone with endless memory."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.engine.workloads import Workload, assert_equals_alone, workloads

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(workloads())
def test_any_workload_equals_each_request_alone(workload: Workload) -> None:
    assert_equals_alone(workload)


@QUICK
@given(workloads(tight=True))
def test_any_workload_on_a_tight_pool_equals_each_request_alone(workload: Workload) -> None:
    assert_equals_alone(workload)
