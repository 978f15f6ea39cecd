"""Helpers that drive an engine over the fake runner."""

from __future__ import annotations

from typing import Any

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.types.events import EngineEvent, Tokens
from chatcache.types.request import GenerateRequest, Params, SamplingParams
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

VOCAB = 64


def engine(runner: FakeRunner | None = None, **settings: Any) -> Engine:
    factory = settings.pop("make_strategy", None)
    runner = runner or FakeRunner(fake_capacity(), VOCAB)
    extra = {"make_strategy": factory} if factory else {}
    return Engine(runner, fake_model_info(VOCAB), EngineConfig(**({"strict": True} | settings)), **extra)


def request(
    request_id: str = "a", num_tokens: int = 20, params: Params | None = None, **fields: Any
) -> GenerateRequest:
    prompt = fields.pop("prompt", tuple(i % (VOCAB - 1) + 1 for i in range(num_tokens)))
    params = params or SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=request_id, prompt=prompt, params=params, **fields)


def drain(engine: Engine) -> list[EngineEvent]:
    """Step until the engine is idle. Steps next to a compilation do not count: on a busy machine it takes many."""
    events: list[EngineEvent] = []
    num_steps = 0
    while engine.has_work():
        events += engine.step()
        engine.cache.check()
        num_steps += not any(map(engine.is_compiling_grammar, engine._requests))
        assert num_steps < 5000, "the engine stalls"
    return events


def output(events: list[EngineEvent], request_id: str = "a", index: int = 0) -> list[int]:
    parts = [e for e in events if isinstance(e, Tokens) and (e.request_id, e.index) == (request_id, index)]
    return [token for part in parts for token in part.token_ids]
