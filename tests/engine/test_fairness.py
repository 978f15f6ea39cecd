"""Fairness between namespaces and priority, as seen by clients.

Bound of Sheng et al. (OSDI 2024): while two namespaces both have requests waiting, the weighted tokens they are served
differ by at most 2 * max(w_p * longest prompt, w_q * M), M the tokens that the pool holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.errors import InvalidRequestError
from chatcache.scheduler.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT, VirtualTokenCounter
from chatcache.scheduler.queue import MAX_EXAMINED
from chatcache.types.events import Finished, Started, Tokens
from chatcache.types.request import GenerateRequest, SamplingParams
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

VOCAB = 64
PAGES, PAGE = 24, 8
LONGEST = 40
BOUND = 2 * max(INPUT_WEIGHT * LONGEST, OUTPUT_WEIGHT * PAGES * PAGE)


class ServiceMeter:
    """An engine, and the weighted tokens that each namespace was served."""

    def __init__(self, policy: str = "fair", num_pages: int = PAGES) -> None:
        runner = FakeRunner(fake_capacity(num_pages, PAGE), VOCAB)
        config = EngineConfig(
            scheduling_policy=policy, max_num_batched_tokens=64, max_queued_requests=10_000, strict=True
        )
        self.engine = Engine(runner, fake_model_info(VOCAB), config, clock=runner.clock)
        self.served: Counter[str] = Counter()
        self.started: list[str] = []
        self.finished: list[str] = []
        self.num_steps = 0
        self._namespaces: dict[str, str] = {}

    def ask(
        self, namespace: str, num_prompt: int, max_tokens: int, *, priority: int = 0, prompt_seed: int | None = None
    ) -> str:
        """Add a request with a prompt of its own, or that of `prompt_seed`."""
        number = len(self._namespaces)
        name = f"{namespace}.{number}"
        rng = np.random.default_rng(number if prompt_seed is None else prompt_seed)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        prompt = tuple(rng.integers(1, VOCAB, num_prompt).tolist())
        self._namespaces[name] = namespace
        self.engine.add(
            GenerateRequest(request_id=name, prompt=prompt, params=params, namespace=namespace, priority=priority)
        )
        return name

    def step(self) -> None:
        self.num_steps += 1
        for event in self.engine.step():
            namespace = self._namespaces[event.request_id]
            if isinstance(event, Started):
                self.started.append(event.request_id)
                self.served[namespace] += INPUT_WEIGHT * (event.num_prompt_tokens - event.num_cached_tokens)
            elif isinstance(event, Tokens):
                self.served[namespace] += OUTPUT_WEIGHT * len(event.token_ids)
            elif isinstance(event, Finished):
                self.finished.append(event.request_id)

    def drain(self) -> None:
        while self.engine.has_work():
            self.step()

    def waiting(self) -> set[str]:
        return {request.namespace for request in self.engine.scheduler.waiting}


def widest_gap(house: ServiceMeter, a: str, b: str, others: Collection[str] = ()) -> int:
    """Run until `a` or `b` has nothing waiting; return the largest difference of their service."""
    gaps = [0]
    start = house.served[a] - house.served[b]
    while {a, b} <= house.waiting():
        house.step()
        gaps.append(house.served[a] - house.served[b] - start)
    return max(gaps) - min(gaps)


def backlog(house: ServiceMeter, sizes: Sequence[tuple[str, int, int, int]]) -> None:
    for namespace, count, num_prompt, max_tokens in sizes:
        for _ in range(count):
            house.ask(namespace, num_prompt, max_tokens)


def test_two_backlogged_namespaces_are_served_equally() -> None:
    """One namespace wants long answers, the other has long prompts and arrives later."""
    gaps = {}
    for policy in ("fair", "fcfs"):
        house = ServiceMeter(policy)
        backlog(house, [("heavy", 60, 8, 40), ("light", 60, LONGEST, 4)])
        gaps[policy] = widest_gap(house, "heavy", "light")
    assert gaps["fair"] <= BOUND < gaps["fcfs"] / 3


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, LONGEST), st.integers(1, 40)), min_size=3, max_size=3),
    st.permutations(["a", "b", "c"]),
    st.integers(PAGES // 2, PAGES * 2),
)
def test_the_fairness_bound_holds_for_three_random_namespaces(
    sizes: list[tuple[int, int]], names: list[str], num_pages: int
) -> None:
    house = ServiceMeter(num_pages=num_pages)
    backlog(house, [(name, 25, *size) for name, size in zip(names, sizes, strict=True)])
    bound = 2 * max(INPUT_WEIGHT * LONGEST, OUTPUT_WEIGHT * num_pages * PAGE)
    assert widest_gap(house, "a", "b") <= bound


def test_a_heavy_tenant_does_not_delay_a_light_one() -> None:
    delays = {}
    for policy in ("fair", "fcfs"):
        house = ServiceMeter(policy)
        backlog(house, [("heavy", 80, 16, 20)])
        for _ in range(30):
            house.step()
        num_started = len(house.started)
        name = house.ask("light", 16, 20)
        while name not in house.started:
            house.step()
        delays[policy] = len(house.started) - 1 - num_started
    assert delays["fair"] <= 3 and delays["fcfs"] > 50, "requests of the heavy one that went first"


def idle_then_return(house: ServiceMeter) -> int:
    """`rested` is idle while `busy` is served; then both have requests waiting."""
    backlog(house, [("rested", 2, 8, 4)])
    house.drain()
    backlog(house, [("busy", 150, 16, 30)])
    for _ in range(400):
        house.step()
    backlog(house, [("rested", 60, 16, 30)])
    return widest_gap(house, "rested", "busy")


@pytest.mark.slow
def test_an_idle_namespace_gains_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert idle_then_return(ServiceMeter()) <= BOUND
    monkeypatch.setattr(VirtualTokenCounter, "on_namespace_queued", lambda self, namespace, waiting: None)
    assert idle_then_return(ServiceMeter()) > BOUND, "without the lift it would have"


def charge_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualTokenCounter, "charge_output", lambda self, namespace, num_tokens: None)


def charge_every_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    original = VirtualTokenCounter.charge_output
    monkeypatch.setattr(
        VirtualTokenCounter, "charge_output", lambda self, _, num_tokens: original(self, "", num_tokens)
    )


@pytest.mark.parametrize("bug", [charge_nothing, charge_every_namespace])
def test_wrong_charges_violate_the_fairness_bound(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    house = ServiceMeter()
    backlog(house, [("heavy", 60, 8, 40), ("light", 300, 8, 2)])
    assert widest_gap(house, "heavy", "light") > BOUND


def test_a_single_namespace_takes_as_many_steps_as_first_come_first_served() -> None:
    """Fairness does not reduce the throughput of a single namespace."""
    steps = {}
    for policy in ("fair", "fcfs"):
        house = ServiceMeter(policy)
        backlog(house, [("only", 30, 16, 20)])
        house.drain()
        steps[policy] = house.num_steps
    assert steps["fair"] == steps["fcfs"]


def test_within_a_namespace_requests_are_first_come_first_served() -> None:
    house = ServiceMeter()
    names = [house.ask("one", 16, 10) for _ in range(20)]
    backlog(house, [("two", 20, 16, 10)])
    house.drain()
    assert [name for name in house.started if name in names] == names


def test_many_equal_requests_in_front_do_not_hide_the_others() -> None:
    """A namespace sends more equal requests than the queue scan covers; all wait for one prompt."""
    house = ServiceMeter(num_pages=400)
    house.ask("twins", 300, 2, prompt_seed=7)
    house.step()
    for _ in range(2 * MAX_EXAMINED):
        house.ask("twins", 300, 2, prompt_seed=7)
    other = house.ask("other", 8, 2)
    house.step()
    assert house.started == [other], "its 8 tokens fit its share of the step"
    for _ in range(3):
        house.step()
    assert house.started == [other, "twins.0"]
    house.drain()
    assert len(house.finished) == 2 * MAX_EXAMINED + 2


def test_priority_policy_runs_urgent_first_and_preempts_the_least_urgent() -> None:
    house = ServiceMeter("priority", num_pages=12)
    late = [house.ask("t", 16, 30, priority=3) for _ in range(3)]
    for _ in range(3):
        house.step()
    urgent = [house.ask("t", 16, 30, priority=-1) for _ in range(3)]
    usual = house.ask("t", 16, 30)
    scheduler, before, num_preempted = house.engine.scheduler, dict[str, int](), 0
    while house.engine.has_work():
        house.step()
        for request in scheduler.waiting:
            if request.num_preemptions > before.get(request.request_id, 0):
                before[request.request_id] = request.num_preemptions
                num_preempted += request.request_id in late
                assert all(other.service_order < request.service_order for other in scheduler.running), (
                    "it was not the last in turn"
                )
    assert num_preempted
    assert [name for name in house.started if name not in late] == [*urgent, usual]
    assert [name for name in house.finished if name not in late] == [*urgent, usual]


def test_priority_under_another_policy_is_ignored() -> None:
    house = ServiceMeter("fcfs")
    names = [house.ask("t", 40, 30, priority=-number) for number in range(12)]
    house.drain()
    assert house.started == names


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scheduling_policy": "fifo"}, "scheduling_policy must be one of fcfs, priority, fair, got 'fifo'"),
        ({"preemption_mode": "swop"}, "preemption_mode must be one of auto, swap, recompute, got 'swop'"),
        ({"preemption_mode": "swap"}, "needs host memory"),
    ],
)
def test_an_unknown_policy_raises(settings: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refusal:
        Engine(FakeRunner(fake_capacity()), fake_model_info(), EngineConfig(**settings))  # type: ignore[arg-type]
    assert refusal.value.param == next(iter(settings))


def test_a_priority_out_of_range_raises() -> None:
    with pytest.raises(InvalidRequestError, match="priority must be between -2047 and 2047, got 9999"):
        ServiceMeter().ask("t", 4, 4, priority=9999)
