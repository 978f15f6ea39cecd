"""Virtual token counters: charges, namespaces that return, and deleted counters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chatcache.scheduler import fairness
from chatcache.scheduler.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT, VirtualTokenCounter


def test_charges_are_weighted_by_kind_of_token() -> None:
    counters = VirtualTokenCounter()
    counters.charge_input("a", 100)
    counters.charge_output("a", 7)
    assert counters["a"] == 100 * INPUT_WEIGHT + 7 * OUTPUT_WEIGHT and counters["b"] == 0


def test_namespace_that_returns_is_raised_to_the_smallest_waiting_counter() -> None:
    counters = VirtualTokenCounter()
    for name, amount in (("a", 500), ("b", 300), ("c", 900)):
        counters.charge_input(name, amount)
    counters.on_namespace_queued("d", {"a", "b", "c"})
    assert counters["d"] == 300
    counters.on_namespace_queued("c", {"a", "b"})
    assert counters["c"] == 900, "never lowered"


def test_first_namespace_in_an_empty_queue_gets_the_counter_of_the_last() -> None:
    counters = VirtualTokenCounter()
    counters.charge_input("a", 500)
    counters.charge_input("b", 300)
    counters.on_namespace_drained("b")
    counters.on_namespace_drained("a")
    counters.charge_output("a", 10)  # its running request continues
    counters.on_namespace_queued("c", ())
    assert counters["c"] == 500 + 10 * OUTPUT_WEIGHT


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3), st.integers(1, 50)), max_size=120))
def test_deleting_absent_counters_changes_no_order(operations: list[tuple[str, int, int]]) -> None:
    complete, trimmed = VirtualTokenCounter(), VirtualTokenCounter()
    trimmed._max_counters = 1
    fairness_limit, fairness.MAX_REMEMBERED = fairness.MAX_REMEMBERED, 1
    try:
        waiting: dict[str, None] = {}
        for name, operation, amount in operations:
            for counters in (complete, trimmed):
                if operation == 0 and name not in waiting:
                    counters.on_namespace_queued(name, waiting)
                elif operation == 1 and name in waiting and len(waiting) > 1:
                    counters.on_namespace_drained(name)
                elif operation >= 2 and name in waiting:
                    counters.charge_output(name, amount)
            if operation == 0:
                waiting[name] = None
            elif operation == 1 and len(waiting) > 1:
                waiting.pop(name, None)
            assert all(complete[name] == trimmed[name] for name in waiting)
    finally:
        fairness.MAX_REMEMBERED = fairness_limit
