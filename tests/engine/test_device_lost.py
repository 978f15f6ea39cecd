"""A lost device fails every request once, with the reason, and ends the engine."""

from __future__ import annotations

import pytest

from chatcache.engine.engine import Engine
from chatcache.engine.protocols import StepHandle
from chatcache.errors import DeviceLostError, OverloadedError
from chatcache.types.events import EngineEvent, Failed, Finished
from chatcache.types.plan import StepPlan, StepResult
from chatcache.types.request import GenerateRequest, SamplingParams
from tests.engine.driver import VOCAB, engine, output, request
from tests.support.fake_runner import FakeRunner, fake_capacity

REASON = "the device is lost: an illegal memory access"
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


class LosingRunner(FakeRunner):
    """Loses its device in step `last`; with `at_launch`, the launch raises."""

    def __init__(self, last: int, *, has_async_launch: bool, lazy: bool = False, at_launch: bool = False) -> None:
        super().__init__(fake_capacity(has_async_launch=has_async_launch), VOCAB, lazy=lazy)
        self.last = last
        self.at_launch = at_launch
        self.num_asked_in_vain = 0

    def launch(self, plan: StepPlan) -> StepHandle:
        if self.at_launch and plan.step >= self.last:
            self._fail()
        return super().launch(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step >= self.last:
            self._fail()
        return super().execute(plan)

    def _fail(self) -> None:
        self.num_asked_in_vain += 1
        raise DeviceLostError(REASON)


WAYS = {
    "one step at a time": LosingRunner(6, has_async_launch=False),
    "two steps on it": LosingRunner(6, has_async_launch=True),
    "found out late": LosingRunner(6, has_async_launch=True, lazy=True),
    "while one is launched after another": LosingRunner(6, has_async_launch=True, lazy=True, at_launch=True),
    "before anything": LosingRunner(1, has_async_launch=True),
}


def requests() -> list[GenerateRequest]:
    """Return two requests that run together, and one that waits."""
    return [
        request("a", params=LONG),
        request("b", prompt=tuple(range(30, 50)), params=SamplingParams(n=3, max_tokens=40, seed=3, ignore_eos=True)),
        request("waiting", num_tokens=9, params=SamplingParams(n=2, max_tokens=5)),
    ]


def lose(eng: Engine) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    for _ in range(100):
        assert eng.has_work()
        try:
            events += eng.step()
        except DeviceLostError:
            return events
    raise AssertionError("the engine does not say that it is lost")


@pytest.mark.parametrize("way", WAYS)
def test_device_loss_fails_every_request_once_and_then_raises(way: str) -> None:
    runner = WAYS[way]
    eng = engine(runner, max_num_seqs=5)
    for one in requests():
        eng.add(one)
    events = lose(eng)
    ends = [event for event in events if isinstance(event, Failed | Finished)]
    assert sorted(end.request_id for end in ends) == ["a", "b", "waiting"]
    for end in ends:
        assert isinstance(end, Failed) and (end.code, end.message) == ("device_lost", REASON)
        assert end.seq == sum(event.request_id == end.request_id for event in events)
    clean = engine()
    for one in requests():
        clean.add(one)
    expected = [event for _ in range(40) for event in clean.step()]
    assert len(output(events)) == max(runner.last - 1, 0)
    assert output(events) == output(expected)[: len(output(events))], "all results that had come are there"
    assert runner.num_asked_in_vain <= 2 and not runner.device.num_refused


def test_device_loss_makes_add_raise_and_health_report_the_reason() -> None:
    eng = engine(LosingRunner(3, has_async_launch=True))
    eng.add(request("a", params=LONG))
    lose(eng)
    with pytest.raises(OverloadedError, match="illegal memory access") as caught:
        eng.add(request("b"))
    assert (caught.value.code, caught.value.status) == ("engine_unavailable", 503)
    health = eng.health()
    assert (health.ready, health.detail) == (False, REASON)
    assert (health.num_running, health.num_pages_in_use) == (0, 0)
    eng.cache.check()
    eng.abort("a")
    assert eng.cache.page_accounts().num_pages_in_use == 0
    with pytest.raises(DeviceLostError):
        eng.step()
    eng.close()


def test_close_after_device_loss_returns() -> None:
    eng = engine(LosingRunner(5, has_async_launch=True, lazy=True))
    eng.add(request("a", params=LONG))
    for _ in range(3):
        eng.step()
    assert eng._pipeline
    eng._pipeline._runner.last = 1  # type: ignore[attr-defined]
    eng.close()
