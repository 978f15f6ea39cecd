"""The audit of state slots detects a slot that is not released, wherever a branch or a step may end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chatcache.engine.engine import Engine
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.pool import InvariantError
from chatcache.kv_cache.states import HostStates, StatePool
from chatcache.scheduler.branches import BranchManager
from chatcache.scheduler.preemption import SwapTracker
from chatcache.scheduler.scheduler import Scheduler
from chatcache.types.request import BeamSearchParams, SamplingParams
from tests.engine.driver import VOCAB, drain, engine, request
from tests.engine.workloads import Crashing
from tests.support.fake_runner import fake_capacity

PROMPT = tuple(range(1, 20))
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


def hybrid(num_pages: int = 256, crashes: frozenset[int] = frozenset(), **settings: Any) -> Engine:
    num_host_pages = 200 if settings else 0
    capacity = fake_capacity(num_pages, 4, num_host_pages=num_host_pages, num_states=17, num_host_states=16)
    runner = Crashing(capacity, VOCAB, eos=None)
    runner.crashes = crashes
    eng = engine(runner, **settings)
    assert eng.scheduler.kv.states is not None
    eng.scheduler.kv.states.interval = 32  # a snapshot at the last page boundary of PROMPT
    return eng


def steps(eng: Engine, count: int) -> None:
    for _ in range(count):
        eng.step()
        eng.cache.check()


def finish() -> None:
    eng = hybrid()
    eng.add(request("a", prompt=PROMPT))
    drain(eng)


def abort() -> None:
    eng = hybrid()
    eng.add(request("a", prompt=PROMPT, params=LONG))
    steps(eng, 5)
    eng.abort("a")
    eng.cache.check()
    drain(eng)


def cancel_candidate() -> None:
    eng = hybrid()
    eng.add(request("a", prompt=PROMPT, params=SamplingParams(n=3, max_tokens=20, ignore_eos=True)))
    steps(eng, 6)
    eng.cancel_candidate("a", 1)
    drain(eng)


def end_beams() -> None:
    eng = hybrid()
    eng.add(request("a", prompt=PROMPT, params=BeamSearchParams(beam_width=4, max_tokens=12)))
    drain(eng)


def preempt(*, swap: bool = False) -> Engine:
    settings: dict[str, Any] = {"preemption_mode": "swap", "enable_prefix_caching": False} if swap else {}
    eng = hybrid(num_pages=32, **settings)
    for number in range(20, 23):
        eng.add(request(f"r{number}", prompt=(number, *PROMPT), params=LONG))
    for _ in range(1000):
        steps(eng, 1)
        if eng.health().num_swap_preemptions if swap else eng.health().num_preemptions:
            return eng
    raise AssertionError("nothing was preempted")


def preempt_and_recompute() -> None:
    drain(preempt())


def swap_and_return() -> None:
    drain(preempt(swap=True))


def abort_while_swapped_out() -> None:
    eng = preempt(swap=True)
    for swapped in [each for each in eng.scheduler.requests() if each.host_states]:
        eng.abort(swapped.request_id)
    drain(eng)


def fail_step() -> None:
    eng = hybrid(crashes=frozenset({4}))
    params = SamplingParams(n=3, max_tokens=20, ignore_eos=True)
    eng.add(request("a", prompt=PROMPT, params=params))
    eng.add(request("b", prompt=PROMPT[:7], params=params))
    drain(eng)


def fork_into_a_reply() -> None:
    eng = hybrid()
    eng.add(request("a", prompt=PROMPT, params=LONG))
    steps(eng, 12)
    eng.add(request("b", prompt=(*PROMPT, 60, 61)))
    drain(eng)


LEAKS: list[tuple[Callable[[], object], type, str, type]] = [
    (finish, BranchManager, "apply", StatePool),
    (finish, StatePool, "complete_step", StatePool),
    (abort, Scheduler, "finish", StatePool),
    (cancel_candidate, BranchManager, "drop", StatePool),
    (end_beams, BranchManager, "apply", StatePool),
    (preempt_and_recompute, Scheduler, "_preempt", StatePool),
    (swap_and_return, Scheduler, "_preempt", StatePool),
    (swap_and_return, SwapTracker, "release_returned", HostStates),
    (swap_and_return, HostStates, "end_step", HostStates),
    (abort_while_swapped_out, Scheduler, "finish", HostStates),
    (fail_step, Scheduler, "abort_steps", StatePool),
    (fail_step, StatePool, "abort_step", StatePool),
    (fork_into_a_reply, KVCache, "close", StatePool),
]


@pytest.mark.parametrize(
    ("scenario", "owner", "function", "pool"),
    LEAKS,
    ids=[f"{case[0].__name__}-{case[1].__name__}.{case[2]}-{case[3].__name__}" for case in LEAKS],
)
def test_slot_that_is_not_released_is_detected(
    scenario: Callable[[], object], owner: type, function: str, pool: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario()
    real = getattr(owner, function)

    def leak(self: object, *args: Any, **options: Any) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(pool, "release", lambda self, released: None)
            return real(self, *args, **options)

    monkeypatch.setattr(owner, function, leak)
    with pytest.raises(InvariantError, match="state"):
        scenario()
