"""Thinking budgets in the engine: asynchronous launch, preemption and other requests change nothing."""

from __future__ import annotations

import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.types.events import EngineEvent, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams, ThinkingMarks
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

VOCAB, BUDGET = 256, 20
BYTES = tuple(bytes([byte]) for byte in range(VOCAB))
CLOSING = (10, ord(">"), 10)
MARKS = ThinkingMarks(opening="<", closing=">", closing_ids=CLOSING, is_open=True)
THOUGHT = {"thinking_token_budget": BUDGET, "thinking_marks": MARKS, "logit_bias": {ord(">"): -100.0}}
REQUESTS: dict[str, Params] = {
    "limited": SamplingParams(n=4, seed=1, max_tokens=40, **THOUGHT),  # type: ignore[arg-type]
    "distinct": SamplingParams(n=3, seed=2, distinct=True, max_tokens=40, **THOUGHT),  # type: ignore[arg-type]
    "beams": BeamSearchParams(beam_width=3, max_tokens=40, **THOUGHT),  # type: ignore[arg-type]
    "plain": SamplingParams(n=2, seed=3, max_tokens=60),
    "greedy": SamplingParams(temperature=0.0, max_tokens=60),
}


def run(num_pages: int, *, ahead: bool, names: tuple[str, ...] = tuple(REQUESTS)) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of each candidate."""
    capacity = fake_capacity(num_pages, 4, 64, 1024, has_async_launch=ahead)
    engine = Engine(FakeRunner(capacity, VOCAB, None, lazy=ahead), fake_model_info(VOCAB, ()),
                    EngineConfig(strict=True), BYTES)  # fmt: skip
    for name in names:
        engine.add(GenerateRequest(request_id=name, prompt=tuple(range(40, 59)), params=REQUESTS[name]))
    events: list[EngineEvent] = []
    while engine.has_work():
        events += engine.step()
        engine.cache.check()
    found: dict[tuple[str, int], list[int]] = {}
    for event in events:
        if isinstance(event, Tokens):
            found.setdefault((event.request_id, event.index), []).extend(event.token_ids)
    return found


@pytest.mark.parametrize("num_pages", [256, 60], ids=["", "preempted"])
def test_thinking_budget_with_asynchronous_launch_draws_the_same_tokens(num_pages: int) -> None:
    found = run(256, ahead=False)
    assert run(num_pages, ahead=True) == run(num_pages, ahead=False) == found
    for name, index in found:
        if name in ("limited", "distinct", "beams"):
            tokens = found[name, index]
            end = tokens.index(ord(">"))
            assert tuple(tokens[end - 1 : end + 2]) == CLOSING and BUDGET - 17 <= end <= BUDGET + 1
    for name in ("plain", "greedy"):  # requests without a budget are as if alone
        alone = run(256, ahead=True, names=(name,))
        assert all(found[each] == tokens for each, tokens in alone.items())


def test_thinking_budget_far_from_its_end_lets_the_next_step_be_launched_ahead() -> None:
    """Steps are launched ahead except where the next token may be forced."""
    capacity = fake_capacity(256, 4, 64, 1024, has_async_launch=True)
    runner = FakeRunner(capacity, VOCAB, None, lazy=True)
    engine = Engine(runner, fake_model_info(VOCAB, ()), EngineConfig(strict=True), BYTES)
    params = SamplingParams(seed=1, max_tokens=200, thinking_token_budget=100, thinking_marks=MARKS,
                            logit_bias={ord(">"): -100.0})  # fmt: skip
    engine.add(GenerateRequest(request_id="a", prompt=(1, 2, 3), params=params))
    ahead: set[int] = set()  # numbers of the tokens that steps launched ahead have drawn
    num_tokens = num_ahead = 0
    while engine.has_work():
        num_tokens += sum(len(event.token_ids) for event in engine.step() if isinstance(event, Tokens))
        if engine.health().num_steps_ahead > num_ahead:
            num_ahead = engine.health().num_steps_ahead
            ahead.add(num_tokens)
    assert set(range(10, 75)) | set(range(110, 190)) <= ahead and not ahead & set(range(86, 100))
