"""The event queue splits long outputs into several events."""

from __future__ import annotations

import pytest

from chatcache.config import EngineConfig
from chatcache.engine import engine as outbox
from chatcache.engine.engine import Engine
from chatcache.types.events import EngineEvent, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest
from tests.support.fake_runner import FakeRunner, fake_model_info


def events() -> list[EngineEvent]:
    engine = Engine(FakeRunner(), fake_model_info(), EngineConfig())
    params = BeamSearchParams(beam_width=3, max_tokens=50, logprobs=2, ignore_eos=True)
    engine.add(GenerateRequest(request_id="r", prompt=(1, 2, 3), params=params))
    found: list[EngineEvent] = []
    while engine.has_work():
        found += engine.step()
    assert [event.seq for event in found] == list(range(1, len(found) + 1))
    return found


def test_event_queue_splits_a_long_emission(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(found: list[EngineEvent]) -> dict[int, tuple[tuple[int, ...], int]]:
        whole: dict[int, tuple[tuple[int, ...], int]] = {}
        for event in found:
            if isinstance(event, Tokens):
                ids, num_logprobs = whole.get(event.index, ((), 0))
                whole[event.index] = (ids + event.token_ids, num_logprobs + len(event.logprobs))
        return whole

    whole = events()
    longest = max(len(event.token_ids) for event in whole if isinstance(event, Tokens))
    monkeypatch.setattr(outbox, "MAX_TOKENS_PER_EVENT", 2)
    parts = events()
    assert joined(parts) == joined(whole)
    assert max(len(event.token_ids) for event in parts if isinstance(event, Tokens)) == 2 < longest
    assert {count for _, count in joined(parts).values()} == {50}
