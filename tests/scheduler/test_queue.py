"""The waiting queue: protection of a request from repeated preemption."""

from __future__ import annotations

import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.scheduler import queue
from chatcache.types.events import Finished
from chatcache.types.request import GenerateRequest, SamplingParams
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

pytestmark = pytest.mark.slow

VOCAB = 64


def ask(name: str, num_prompt: int, max_tokens: int, priority: int) -> GenerateRequest:
    first = sum(map(ord, name)) % VOCAB
    prompt = tuple((first + 7 * i) % VOCAB for i in range(num_prompt))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt=prompt, params=params, priority=priority)


def times_preempted(num_host_pages: int) -> int:
    """Send urgent short requests continuously; return how often a low-priority request is preempted."""
    # Pages of one token; about four urgent requests run at once, and leave a varying number of pages.
    runner = FakeRunner(fake_capacity(120, 1, 32, 512, num_host_pages), VOCAB)
    preemption = "swap" if num_host_pages else "recompute"
    config = EngineConfig(scheduling_policy="priority", preemption_mode=preemption, strict=True)
    engine = Engine(runner, fake_model_info(VOCAB), config)
    engine.add(ask("patient", 5, 100, priority=9))
    (patient,) = engine.scheduler.waiting
    finished = set[str]()
    for step in range(900):
        if step % 8 == 0 and step < 400:
            engine.add(ask(f"urgent{step}", 8, 30, priority=0))
        finished |= {event.request_id for event in engine.step() if isinstance(event, Finished)}
        engine.cache.check()
    assert len(finished) == 51 and not engine.has_work()
    return patient.num_preemptions


@pytest.mark.parametrize("num_host_pages", [0, 100])
def test_urgent_requests_preempt_a_low_priority_one_at_most_five_times(
    num_host_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 3 <= times_preempted(num_host_pages) <= 5
    monkeypatch.setattr(queue, "PREEMPTIONS_BEFORE_PROTECTION", 10**6)
    assert 3 <= times_preempted(num_host_pages) <= 5, "the bound does not depend on the protection"
    monkeypatch.setattr(queue, "MAX_PREEMPTIONS", 10**6)
    assert times_preempted(num_host_pages) > 5, "more without the bound"
