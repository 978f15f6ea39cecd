"""Prompt log-probabilities are exact with any cached prefix, chunking and preemption."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.errors import InvalidRequestError
from chatcache.types.events import EngineEvent, Failed, Started, TokenLogprob, Tokens
from chatcache.types.plan import StepPlan, StepResult
from chatcache.types.request import BeamSearchParams, ForkPoint, GenerateRequest, Params, SamplingParams
from chatcache.types.stats import ExplainQuery
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info, history_of
from tests.support.fake_sampling import log_softmax, top_candidates

VOCAB, PAGE = 64, 4
PROMPT = tuple(np.random.default_rng(5).integers(1, VOCAB, 30).tolist())


def runner(num_pages: int = 100, num_host_pages: int = 0) -> FakeRunner:
    return FakeRunner(fake_capacity(num_pages, PAGE, 32, 512, num_host_pages), VOCAB)


def engine(fake: FakeRunner | None = None, **settings: Any) -> Engine:
    return Engine(fake or runner(), fake_model_info(VOCAB), EngineConfig(**({"strict": True} | settings)))


def ask(name: str = "a", prompt: tuple[int, ...] = PROMPT, num_top: int | None = 2, **fields: Any) -> GenerateRequest:
    params: Params = SamplingParams(max_tokens=6, seed=1, prompt_logprobs=num_top, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt=prompt, params=fields.pop("params", params), **fields)


def run(eng: Engine) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while eng.has_work():
        events += eng.step()
        eng.cache.check()
    return events


def started(events: list[EngineEvent], name: str = "a") -> Started:
    return next(event for event in events if isinstance(event, Started) and event.request_id == name)


def expected(prompt: tuple[int, ...], num_top: int) -> tuple[TokenLogprob | None, ...]:
    scores: list[TokenLogprob | None] = [None]
    for position in range(1, len(prompt)):
        logprobs = log_softmax(runner().logits(history_of(prompt[:position])))
        ids, values = top_candidates(logprobs, num_top)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        scores.append(TokenLogprob(float(logprobs[prompt[position]]), top))
    return tuple(scores)


@pytest.mark.parametrize("num_cached", [0, 15, 30])
@pytest.mark.parametrize("budget", [4, 7, 512])
@pytest.mark.parametrize("num_top", [0, 3])
def test_prompt_logprobs_with_any_cached_prefix_and_chunks_are_exact(
    num_cached: int, budget: int, num_top: int
) -> None:
    eng = engine(max_num_batched_tokens=budget)
    if num_cached:
        eng.add(ask("before", PROMPT[:num_cached], None))
        run(eng)
    eng.add(ask(num_top=num_top))
    seen = started(run(eng))
    assert seen.prompt_logprobs == expected(PROMPT, num_top)
    assert seen.num_cached_tokens == 0, "a token that is not computed has no score"
    eng.add(ask("after", num_top=None))
    after = started(run(eng), "after")
    assert after.num_cached_tokens == 29 and after.prompt_logprobs == ()


@pytest.mark.parametrize(("start", "num_cached"), [(1, 0), (2, 1), (13, 12), (29, 28), (30, 29)])
@pytest.mark.parametrize("budget", [4, 512])
def test_prompt_logprobs_from_a_start_use_the_cache_before_it(start: int, num_cached: int, budget: int) -> None:
    eng = engine(max_num_batched_tokens=budget)
    eng.add(ask("before", num_top=None))
    run(eng)
    eng.add(ask(prompt_logprobs_start=start))
    seen = started(run(eng))
    assert seen.prompt_logprobs == expected(PROMPT, 2)[start:]
    assert seen.num_cached_tokens == num_cached
    with pytest.raises(InvalidRequestError, match="prompt_logprobs_start must be between 0 and"):
        eng.add(ask("refused", prompt_logprobs_start=31))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=3, max_tokens=6, seed=1, prompt_logprobs=2),
        SamplingParams(n=2, best_of=4, max_tokens=6, seed=1, prompt_logprobs=2),
        BeamSearchParams(beam_width=3, max_tokens=6, prompt_logprobs=2),
    ],
    ids=["n", "best_of", "beams"],
)
def test_prompt_logprobs_of_several_branches_are_computed_once(params: Params) -> None:
    eng = engine(max_num_batched_tokens=8)
    eng.add(ask(params=params))
    assert started(run(eng)).prompt_logprobs == expected(PROMPT, 2)


def test_prompt_logprobs_of_one_token_are_empty() -> None:
    eng = engine()
    eng.add(ask(prompt=(5,)))
    assert started(run(eng)).prompt_logprobs == (None,)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_prompt_logprobs_after_a_preemption_score_no_token_twice(preemption: str) -> None:
    """An urgent request grows until the other one is preempted within its prompt."""
    fake = runner(num_pages=17, num_host_pages=50)
    num_scored: list[int] = []
    execute = fake.execute

    def watched(plan: StepPlan) -> StepResult:
        if plan.scores is not None:
            num_scored.append(int((plan.scores.targets >= 0).sum()))
        return execute(plan)

    fake.execute = watched  # type: ignore[method-assign]
    eng = engine(fake, preemption_mode=preemption, scheduling_policy="priority", max_num_batched_tokens=4)
    long = SamplingParams(max_tokens=40, seed=2, ignore_eos=True)
    eng.add(ask("urgent", (9, 9, 9), None, params=long, priority=-1))
    for _ in range(20):
        eng.step()
    eng.add(ask())
    events = run(eng)
    assert eng.health().num_preemptions >= 1
    assert started(events).prompt_logprobs == expected(PROMPT, 2)
    assert sum(num_scored) == len(PROMPT) - 1


def test_prompt_logprobs_requests_neither_wait_for_equal_ones_nor_fork() -> None:
    eng = engine(max_num_batched_tokens=32)
    eng.add(ask("twin", num_top=None))
    eng.step()
    eng.add(ask(fork_of=ForkPoint("twin")))
    seen = started(run(eng))
    assert seen.num_cached_tokens == 0 and seen.prompt_logprobs == expected(PROMPT, 2)


def test_prompt_logprobs_with_a_nan_fail_their_request_only() -> None:
    class CorruptingRunner(FakeRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            if plan.scores is not None and result.scores is not None:
                first = int(plan.scores.row[0])
                result.scores[: int(plan.rows.num_tokens[first])] = np.nan
            return result

    eng = engine(CorruptingRunner(fake_capacity(100, PAGE), VOCAB))
    eng.add(ask("bad"))
    eng.add(ask("good", PROMPT[::-1]))
    events = run(eng)
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.request_id for event in failed] == ["bad"] and "not numbers" in failed[0].message
    assert started(events, "good").prompt_logprobs == expected(PROMPT[::-1], 2)
    assert eng.cache.explain(ExplainQuery(PROMPT)).num_cached_tokens == 0


@pytest.mark.parametrize("num_top", [None, 2])
def test_history_is_found_after_eviction_of_equal_pages(num_top: int | None) -> None:
    """A request for prompt log-probabilities computes pages that exist; those may be evicted before its own."""
    eng = engine(runner(64))
    eng.add(ask("first", num_top=None))
    run(eng)
    params = SamplingParams(max_tokens=60, ignore_eos=True, prompt_logprobs=num_top)
    eng.add(ask("again", params=params))
    events = [event for _ in range(5) for event in eng.step()]
    for number in range(3):
        eng.add(ask(f"other{number}", tuple((number * 17 + i * 5) % VOCAB for i in range(80)), num_top=None))
    events += run(eng)
    tokens = [
        token
        for event in events
        if isinstance(event, Tokens) and event.request_id == "again"
        for token in event.token_ids
    ]
    assert eng.health().num_evictions > 20
    explanation = eng.cache.explain(ExplainQuery((*PROMPT, *tokens, 1)))
    assert explanation.num_cached_tokens == len(PROMPT) + 59, explanation.reason
