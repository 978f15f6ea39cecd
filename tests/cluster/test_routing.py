"""Routing: the cost against a token-by-token sum, reservations, fan-out discount, incarnations, hashing."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.cluster.placement import MAX_CONTINUATIONS, Boundary, MemoryPlacementIndex, Place
from chatcache.cluster.routing import (
    DEFAULT_SECONDS,
    MIN_DISCOUNT,
    Decision,
    Reservation,
    RoutedPrompt,
    Router,
    RouteReason,
    RoutingWeights,
    WorkerLoad,
    WorkerLoads,
    discount,
    missing_tokens,
    update_prices,
)


def worker(name: str, incarnation: int = 1, **fields: float) -> WorkerLoad:
    """Return an idle worker of 4,000 tokens/s with a large cache."""
    load = WorkerLoad(name, incarnation, 1 / 4000, 0.0015, free_tokens=1_000_000)
    for field, value in fields.items():
        setattr(load, field, value)
    return load


def chat(number: int, system_tokens: int = 1500, user_tokens: int = 100) -> RoutedPrompt:
    """Return the first turn of a conversation with a system prompt that all share."""
    boundaries = (Boundary("system", system_tokens, number), Boundary(number, system_tokens + user_tokens))
    return RoutedPrompt(system_tokens + user_tokens, boundaries, str(number).encode())


def choose(router: Router, prompt: RoutedPrompt, places: Sequence[Place | None] | None, loads: WorkerLoads) -> Decision:
    decision = router.choose(prompt, places, loads)
    assert decision is not None
    return decision


def cost_by_token(
    prompt: RoutedPrompt, places: list[Place | None], load: WorkerLoad, weights: RoutingWeights
) -> tuple[int, float]:
    """Return the believed tokens and the cost of a worker, from the definitions, one token at a time."""
    pairs = list(zip(prompt.boundaries, places, strict=True))
    cached = max(
        (
            boundary.num_tokens
            for boundary, place in pairs
            if place is not None and place.holders.get(load.name) == load.incarnation
        ),
        default=0,
    )
    lacking = 0.0
    for token in range(cached, prompt.num_tokens):
        after = [place for boundary, place in pairs if place and boundary.num_tokens > token]
        shares = [max(weights.min_discount, 1 / (1 + max(0, len(place.continuations) - 1) / 2)) for place in after]
        second_copy = any(len(place.continuations) == MAX_CONTINUATIONS and len(place.holders) == 1 for place in after)
        share = 0.0 if second_copy else min(shares, default=1.0)
        lacking += min(share, weights.min_discount) if token < prompt.num_public_tokens else share
    c, n = load.seconds_per_token, load.num_branches
    evicted = max(0.0, min(lacking, lacking - load.free_tokens))
    cost = (load.queued_tokens + lacking) * c + weights.decode * n * load.seconds_per_branch * weights.decode_horizon
    return cached, cost + weights.interference * n * lacking * c + weights.eviction * evicted * c


NAMES = [f"w{number}" for number in range(6)]


@st.composite
def situations(draw: st.DrawFn) -> tuple[RoutedPrompt, list[Place | None], list[WorkerLoad]]:
    ends = sorted(draw(st.sets(st.integers(1, 100), max_size=5)))
    num_tokens = (ends[-1] if ends else 0) + draw(st.integers(1, 30))
    prompt = RoutedPrompt(
        num_tokens, tuple(Boundary(end, end) for end in ends), b"c", num_public_tokens=draw(st.integers(0, num_tokens))
    )
    places = [
        draw(
            st.none()
            | st.builds(
                Place,
                st.dictionaries(st.sampled_from(NAMES), st.integers(1, 2), max_size=4),
                st.sets(st.integers(0, 30), max_size=MAX_CONTINUATIONS),
            )
        )
        for _ in ends
    ]
    workers = [
        worker(
            name,
            draw(st.integers(1, 2)),
            seconds_per_token=draw(st.sampled_from([1 / 4000, 1 / 1600])),
            queued_tokens=draw(st.integers(0, 150)),
            num_branches=draw(st.integers(0, 20)),
            free_tokens=draw(st.integers(-10, 130)),
            last_choice=number,
        )
        for number, name in enumerate(NAMES[: draw(st.integers(1, 6))])
    ]
    return prompt, places, workers


@settings(max_examples=30)
@given(situations())
def test_choose_matches_the_cheapest_worker_of_the_sum_over_tokens(
    situation: tuple[RoutedPrompt, list[Place | None], list[WorkerLoad]],
) -> None:
    prompt, places, workers = situation
    router = Router()
    decision = choose(router, prompt, places, WorkerLoads(workers))
    expected = {load.name: cost_by_token(prompt, places, load, router.weights) for load in workers}
    cached, cost = expected[decision.worker]
    assert decision.num_cached_tokens == min(cached, prompt.num_tokens - 1)
    assert decision.cost_s == pytest.approx(cost)
    assert cost == pytest.approx(min(cost for _, cost in expected.values()))
    assert decision.reason is (RouteReason.PREFIX if cached else RouteReason.LOAD)


@settings(max_examples=30)
@given(situations(), st.integers(0, 9))
def test_choose_with_samples_is_never_worse_than_a_believed_holder(
    situation: tuple[RoutedPrompt, list[Place | None], list[WorkerLoad]], seed: int
) -> None:
    prompt, places, workers = situation
    router = Router(RoutingWeights(num_samples=1), seed)
    decision = choose(router, prompt, places, WorkerLoads(workers))
    for load in workers:
        cached, cost = cost_by_token(prompt, places, load, router.weights)
        assert not cached or decision.cost_s <= cost + 1e-9


def test_discount_follows_the_number_of_continuations() -> None:
    found = [discount(number) for number in (0, 1, 5, MAX_CONTINUATIONS, 1000)]
    assert found == pytest.approx([1.0, 1.0, 1 / 3, 1 / 9, 1 / 9])


def test_missing_tokens_before_a_shared_boundary_count_less() -> None:
    boundaries = (Boundary("half", 500), Boundary("system", 1000), Boundary("turn", 1200))
    places = [Place({"a": 1}, {1}), Place({"a": 1, "b": 1}, set(range(MAX_CONTINUATIONS))), Place()]
    prompt = RoutedPrompt(1300, boundaries, b"")
    assert missing_tokens(prompt, places) == pytest.approx([1000 / 9 + 300, 500 / 9 + 300, 300, 100])
    places[1] = Place({"a": 1}, set(range(MAX_CONTINUATIONS)))
    assert missing_tokens(prompt, places) == pytest.approx([300, 300, 300, 100])  # the second copy is free


def serve_one_after_another(min_discount: float, num_chats: int = 100) -> Counter[str]:
    """Route chats that never overlap to two equal workers; each finishes before the next arrives."""
    loads, index = WorkerLoads([worker("a"), worker("b")]), MemoryPlacementIndex()
    router, counts = Router(RoutingWeights(min_discount=min_discount)), Counter({"a": 0, "b": 0})
    for number in range(num_chats):
        prompt = chat(number)
        decision = choose(router, prompt, index.lookup(prompt.boundaries, 0.0), loads)
        reservation = loads.reserve(decision, prompt)
        loads.finish_prefill(reservation)
        loads.finish(reservation)
        load = loads.get(decision.worker)
        assert load is not None
        load.free_tokens = 0 if counts[load.name] >= 20 else 30_000
        counts[decision.worker] += 1
        index.record(prompt.boundaries, decision.worker, load.incarnation, 0.0)
    return counts


def test_two_idle_workers_share_chats_that_never_overlap() -> None:
    counts = serve_one_after_another(min_discount=MIN_DISCOUNT)
    assert min(counts.values()) >= 30


def test_constant_full_cost_of_a_shared_prefix_sends_every_idle_chat_to_one_worker() -> None:
    assert min(serve_one_after_another(min_discount=1.0).values()) == 0


def route_burst(num_requests: int, num_workers: int, *, counted: bool) -> Counter[str]:
    """Route requests for a prefix that one worker holds; none of them finishes meanwhile."""
    loads = WorkerLoads(worker(f"w{number}") for number in range(num_workers))
    router, counts = Router(), Counter[str]()
    place = Place({"w0": 1, "gone": 1}, set(range(MAX_CONTINUATIONS)))
    for number in range(num_requests):
        prompt = chat(number)
        decision = choose(router, prompt, [place, None], loads)
        counts[decision.worker] += 1
        if counted:
            loads.reserve(decision, prompt)
    return counts


def test_burst_on_a_hot_prefix_is_spread_because_load_counts_before_dispatch() -> None:
    counts = route_burst(400, 20, counted=True)
    assert min(counts[f"w{number}"] for number in range(20)) >= 10
    assert counts["w0"] == max(counts.values()) < 150  # the holder may get more: its chats cost a quarter


def test_burst_goes_to_one_worker_when_load_is_not_counted() -> None:
    assert route_burst(400, 20, counted=False) == {"w0": 400}


def test_slower_worker_gets_less_of_a_burst() -> None:
    loads = WorkerLoads([worker("fast"), worker("slow", seconds_per_token=1 / 1000, seconds_per_branch=0.006)])
    router, counts = Router(), Counter[str]()
    for number in range(200):
        prompt = chat(number)
        decision = choose(router, prompt, [None, None], loads)
        loads.reserve(decision, prompt)
        counts[decision.worker] += 1
    assert 3 <= counts["fast"] / counts["slow"] <= 5


def test_place_of_an_earlier_incarnation_is_not_believed() -> None:
    loads = WorkerLoads([worker("a", incarnation=1), worker("b")])
    prompt, places = chat(1), [Place({"a": 1}), Place({"a": 1})]
    assert choose(Router(), prompt, places, loads).num_cached_tokens == prompt.num_tokens - 1
    loads.add(worker("a", incarnation=2))
    assert choose(Router(), prompt, places, loads).num_cached_tokens == 0


def test_fork_goes_to_the_worker_of_the_running_reply_unless_it_is_dead() -> None:
    loads = WorkerLoads([worker("busy", queued_tokens=90_000), worker("idle")])
    prompt = RoutedPrompt(100, (), b"c", required_worker="busy")
    decision = choose(Router(), prompt, [], loads)
    assert (decision.worker, decision.reason) == ("busy", RouteReason.FORK)
    loads.remove("busy")
    assert choose(Router(), prompt, [], loads).worker == "idle"
    loads.remove("idle")
    assert Router().choose(prompt, [], loads) is None and Router().choose(prompt, None, loads) is None


def test_equal_workers_are_chosen_in_turns() -> None:
    loads = WorkerLoads(worker(f"w{number}") for number in range(4))
    chosen = []
    for number in range(8):
        decision = choose(Router(), chat(number), [None, None], loads)
        reservation = loads.reserve(decision, chat(number))
        loads.finish_prefill(reservation)
        loads.finish(reservation)
        chosen.append(decision.worker)
    assert chosen == ["w0", "w1", "w2", "w3"] * 2


def test_hash_without_an_index_is_stable_balanced_and_moves_only_keys_of_a_removed_worker() -> None:
    loads = WorkerLoads(worker(f"w{number}") for number in range(10))
    router = Router()

    def owners() -> dict[int, str]:
        return {number: choose(router, chat(number), None, loads).worker for number in range(2000)}

    before = owners()
    assert before == owners()
    counts = Counter(before.values())
    assert min(counts.values()) >= 130 and max(counts.values()) <= 270
    loads.remove("w3")
    after = owners()
    assert all(after[number] == before[number] for number in before if before[number] != "w3")
    assert len({after[number] for number in before if before[number] == "w3"}) == 9


@given(st.lists(st.tuples(st.sampled_from(["reserve", "start", "finish", "restart"]), st.integers(0, 99)), max_size=60))
def test_loads_are_sums_over_open_reservations_of_the_incarnation(steps: list[tuple[str, int]]) -> None:
    loads = WorkerLoads([worker("a", 0), worker("b", 0)])
    waiting: list[Reservation] = []
    running: list[Reservation] = []
    incarnations = {"a": 0, "b": 0}
    for step, number in steps:
        name = "ab"[number % 2]
        if step == "reserve":
            prompt = RoutedPrompt(number + 1, (), b"", num_branches=1 + number % 3)
            waiting.append(loads.reserve(Decision(name, number // 2, 0.0, RouteReason.LOAD), prompt))
        elif step == "start" and waiting:
            running.append(waiting.pop(number % len(waiting)))
            loads.finish_prefill(running[-1])
        elif step == "finish" and running:
            loads.finish(running.pop(number % len(running)))
        elif step == "restart":
            incarnations[name] += 1
            loads.add(worker(name, incarnations[name]))
        for each in loads.all():
            mine = [r for r in (*waiting, *running) if (r.worker, r.incarnation) == (each.name, each.incarnation)]
            assert each.num_branches == sum(r.num_branches for r in mine)
            owed = [r for r in waiting if (r.worker, r.incarnation) == (each.name, each.incarnation)]
            assert each.queued_tokens == sum(r.num_tokens for r in owed)


def test_load_of_other_gateways_replaces_what_was_reported_before() -> None:
    loads = WorkerLoads([worker("a"), worker("b")])
    reservation = loads.reserve(Decision("a", 0, 0.0, RouteReason.LOAD), RoutedPrompt(100, (), b"c"))
    loads.update_others("a", 5000, 3)
    loads.update_others("a", 700, 2)
    loads.update_others("gone", 1, 1)
    (load, other) = loads.all()
    assert (load.queued_tokens, load.num_branches) == (800, 3) and other.queued_tokens == 0
    loads.finish_prefill(reservation)
    loads.finish(reservation)
    loads.update_others("a", 0, 0)
    assert (load.queued_tokens, load.num_branches) == (0, 0)


def test_prices_ignore_noise_and_find_slower_workers() -> None:
    """The second worker is 2.5 times slower, the third has measured nothing; the times per branch are noise."""
    times = random.Random(1)
    loads = [worker(name, seconds_per_token=0.0) for name in "abc"]
    for _ in range(20):
        slow = times.uniform(0.5, 2)
        update_prices([(loads[0], 0.01, 0.1), (loads[1], 0.025 * slow, 0.3), (loads[2], 0.0, 0.2)], 0.2)
        assert {(load.seconds_per_token, load.seconds_per_branch) for load in loads} == {(0.01, 0.2)}
    for _ in range(3000):
        noise = [math.exp(times.gauss(0, 0.5)) for _ in range(3)]
        update_prices([(loads[0], 0.01 * noise[0], 0.1), (loads[1], 0.025 * noise[1], 0.3), (loads[2], 0.0, 0.2)], 0.2)
    assert loads[2].slowness == 1.0
    ratio = loads[1].seconds_per_token / loads[0].seconds_per_token
    assert ratio == pytest.approx(2.5, rel=0.2)
    assert loads[1].seconds_per_branch / loads[0].seconds_per_branch == pytest.approx(ratio)


def test_prices_before_any_measurement_are_equal() -> None:
    loads = [worker(name, seconds_per_token=0.0) for name in "ab"]
    update_prices([(load, 0.0, 0.0) for load in loads], 1.0)
    assert {(load.seconds_per_token, load.seconds_per_branch) for load in loads} == {(DEFAULT_SECONDS, DEFAULT_SECONDS)}
    update_prices([], 1.0)


def test_is_overloaded_when_every_worker_owes_more_than_the_limit() -> None:
    loads = WorkerLoads([worker("a", queued_tokens=8001), worker("b", queued_tokens=8001)])
    assert loads.is_overloaded(2.0)
    loads.add(worker("c"))
    assert not loads.is_overloaded(2.0)
