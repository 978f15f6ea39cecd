"""Embeddings are those of the whole prompt with any cached prefix, chunking, preemption and neighbours."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.engine_process.recovery import RequestJournal
from chatcache.errors import ContextLengthError, InvalidRequestError, UnsupportedParameterError
from chatcache.types.events import Embedding, EngineEvent, Failed, Finished, Tokens
from chatcache.types.plan import F32, StepPlan, StepResult
from chatcache.types.request import ForkPoint, GenerateRequest, PoolingParams, SamplingParams
from chatcache.types.stats import ExplainQuery
from tests.support.fake_runner import (
    FAKE_HIDDEN,
    FakeRunner,
    fake_capacity,
    fake_model_info,
    fake_states,
    history_of,
)

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
VOCAB, PAGE, MAX_LEN = 64, 4, 512
PROMPT = tuple(np.random.default_rng(5).integers(1, VOCAB, 30).tolist())
POOLINGS = pytest.mark.parametrize("pooling", ["last", "mean"])


def runner(num_pages: int = 100, num_host_pages: int = 0, **more: Any) -> FakeRunner:
    return FakeRunner(fake_capacity(num_pages, PAGE, 32, MAX_LEN, num_host_pages, **more), VOCAB)


def engine(pooling: str = "last", fake: FakeRunner | None = None, **settings: Any) -> Engine:
    info = fake_model_info(VOCAB, pooling=pooling)
    return Engine(fake or runner(), info, EngineConfig(**({"strict": True} | settings)))


def ask(name: str = "a", prompt: tuple[int, ...] = PROMPT, **fields: Any) -> GenerateRequest:
    dimensions = fields.pop("dimensions", None)
    return GenerateRequest(request_id=name, prompt=prompt, pooling=PoolingParams(dimensions=dimensions), **fields)


def generate(name: str = "b", prompt: tuple[int, ...] = PROMPT, **fields: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 6), seed=1, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt=prompt, params=params, **fields)


def run(eng: Engine) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while eng.has_work():
        events += eng.step()
        eng.cache.check()
    return events


def of(events: list[EngineEvent], name: str = "a") -> list[EngineEvent]:
    return [event for event in events if event.request_id == name]


def vector(events: list[EngineEvent], name: str = "a") -> F32:
    """Return the embedding of a request that had these events only: `Embedding`, `Finished`."""
    embedding, finished = of(events, name)
    assert isinstance(embedding, Embedding) and isinstance(finished, Finished) and not finished.cancelled
    assert (embedding.seq, finished.seq, finished.num_output_tokens) == (1, 2, 0)
    return np.frombuffer(embedding.values, "<f4")


def num_cached(events: list[EngineEvent], name: str = "a") -> int:
    finished = of(events, name)[-1]
    assert isinstance(finished, Finished)
    return finished.num_cached_tokens


def expected(prompt: tuple[int, ...], pooling: str, dimensions: int | None = None) -> F32:
    first = 1 if pooling == "mean" else len(prompt)
    histories = np.array([history_of(prompt[:end]) for end in range(first, len(prompt) + 1)], np.uint64)
    pooled: F32 = fake_states(histories).mean(axis=0)[:dimensions]
    return pooled / np.float32(np.linalg.norm(pooled))


def close(got: F32, want: F32) -> None:
    np.testing.assert_allclose(got, want, atol=1e-5)


@POOLINGS
@pytest.mark.parametrize("num_before", [0, 15, 30])
@pytest.mark.parametrize("budget", [4, 7, 512])
def test_embedding_with_any_cached_prefix_and_chunks_is_exact(pooling: str, num_before: int, budget: int) -> None:
    eng = engine(pooling, max_num_batched_tokens=budget)
    if num_before:
        eng.add(generate("before", PROMPT[:num_before], max_tokens=1))
        run(eng)
    eng.add(ask())
    events = run(eng)
    close(vector(events), expected(PROMPT, pooling))
    assert num_cached(events) == (0 if pooling == "mean" else min(num_before, 29)), "mean pooling computes every token"
    eng.add(generate("after", (*PROMPT, 1)))
    assert num_cached(run(eng), "after") == 30, "the pages of the embedded prompt are found again"


@POOLINGS
def test_embeddings_among_generations_change_no_token(pooling: str) -> None:
    noise = np.random.default_rng(SEED)
    prompts = [tuple(noise.integers(1, VOCAB, int(noise.integers(1, 40))).tolist()) for _ in range(12)]
    alone = engine()
    for number, prompt in enumerate(prompts):
        alone.add(generate(f"g{number}", prompt))
    want = [event for event in run(alone) if isinstance(event, Tokens)]
    for ahead in (False, True):
        eng = engine(pooling, runner(has_async_launch=ahead), max_num_batched_tokens=24)
        for number, prompt in enumerate(prompts):
            eng.add(generate(f"g{number}", prompt))
            eng.add(ask(f"e{number}", prompt))
        events = run(eng)
        for number, prompt in enumerate(prompts):
            close(vector(events, f"e{number}"), expected(prompt, pooling))
            name = f"g{number}"
            got = [event.token_ids for event in of(events, name) if isinstance(event, Tokens)]
            assert got == [event.token_ids for event in want if event.request_id == name], f"seed {SEED}"


@POOLINGS
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_embedding_after_a_preemption_pools_no_token_twice(pooling: str, preemption: str) -> None:
    """Urgent requests grow until the other one is preempted within its prompt."""
    fake = runner(num_pages=20, num_host_pages=50)
    num_pooled: list[int] = []
    execute = fake.execute

    def watched(plan: StepPlan) -> StepResult:
        if plan.pools is not None:
            num_pooled.append(int(plan.pools.num_tokens.sum()))
        return execute(plan)

    fake.execute = watched  # type: ignore[method-assign]
    eng = engine(pooling, fake, preemption_mode=preemption, scheduling_policy="priority", max_num_batched_tokens=4)
    for name in ("urgent", "urgent too"):
        eng.add(generate(name, (9, 9, len(name)), max_tokens=34, priority=-1))
    for _ in range(10):
        eng.step()
    eng.add(ask())
    events = run(eng)
    assert eng.health().num_preemptions >= 1
    close(vector(events), expected(PROMPT, pooling))
    assert sum(num_pooled) == (len(PROMPT) if pooling == "mean" else 1)


def test_mean_embedding_neither_waits_for_an_equal_prompt_nor_forks() -> None:
    eng = engine("mean", max_num_batched_tokens=32)
    eng.add(generate("twin"))
    eng.step()
    eng.add(ask(fork_of=ForkPoint("twin")))
    events = run(eng)
    assert num_cached(events) == 0
    close(vector(events), expected(PROMPT, "mean"))


@POOLINGS
def test_dimensions_keep_the_first_values_and_normalise_again(pooling: str) -> None:
    eng = engine(pooling)
    eng.add(ask(dimensions=4))
    got = vector(run(eng))
    assert got.shape == (4,)
    close(got, expected(PROMPT, pooling, 4))


@pytest.mark.parametrize("dimensions", [0, -1, FAKE_HIDDEN + 1, True, 10**30])
def test_invalid_dimensions_are_refused(dimensions: int) -> None:
    with pytest.raises(InvalidRequestError, match="dimensions must be an integer between 1 and 6") as caught:
        engine().add(ask(dimensions=dimensions))
    assert caught.value.param == "dimensions"


def test_prompt_of_the_whole_context_is_embedded_and_a_longer_one_refused() -> None:
    whole = tuple(index % VOCAB for index in range(MAX_LEN))
    eng = engine(fake=runner(1 + MAX_LEN // PAGE))
    eng.add(ask(prompt=whole))
    close(vector(run(eng)), expected(whole, "last"))
    with pytest.raises(
        ContextLengthError, match="the input has 513 tokens; this model's maximum context length is 512"
    ):
        eng.add(ask(prompt=(*whole, 1)))
    with pytest.raises(ContextLengthError, match="the KV memory has 127 pages of 4 tokens"):
        engine(fake=runner(MAX_LEN // PAGE)).add(ask(prompt=whole))
    with pytest.raises(InvalidRequestError, match="token ids must be between 0 and 63, got 64"):
        eng.add(ask(prompt=(64,)))
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        eng.add(ask(prompt=()))


def test_model_without_hidden_states_refuses_embeddings() -> None:
    from msgspec.structs import replace

    eng = Engine(runner(), replace(fake_model_info(VOCAB), hidden_size=0), EngineConfig(strict=True))
    with pytest.raises(InvalidRequestError, match="has no embeddings"):
        eng.add(ask())


@POOLINGS
def test_cancelled_embedding_frees_its_pages(pooling: str) -> None:
    eng = engine(pooling, max_num_batched_tokens=8)
    eng.add(ask())
    eng.step()
    with pytest.raises(UnsupportedParameterError):
        eng.cancel_candidate("a", 0)
    eng.abort("a")
    (end,) = run(eng)
    assert isinstance(end, Finished) and end.cancelled and end.seq == 1
    assert not eng.health().num_pages_in_use


@POOLINGS
def test_hidden_states_with_a_nan_fail_their_request_only(pooling: str) -> None:
    class CorruptingRunner(FakeRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            if result.pooled is not None:
                result.pooled[0, 1] = np.nan
            return result

    eng = engine(pooling, CorruptingRunner(fake_capacity(100, PAGE), VOCAB))
    eng.add(ask("bad"))
    eng.add(ask("good", PROMPT[::-1]))
    events = run(eng)
    (failed,) = of(events, "bad")
    assert isinstance(failed, Failed) and "hidden states are not numbers" in failed.message
    close(vector(events, "good"), expected(PROMPT[::-1], pooling))
    assert eng.cache.explain(ExplainQuery(PROMPT)).num_cached_tokens == 0


def test_missing_hidden_states_fail_the_step() -> None:
    class SilentRunner(FakeRunner):
        def _pool(self, *_: Any) -> F32:
            return np.zeros((0, FAKE_HIDDEN), np.float32)

    eng = engine(fake=SilentRunner(fake_capacity(100, PAGE), VOCAB))
    eng.add(ask())
    (failed,) = run(eng)
    assert isinstance(failed, Failed)


@POOLINGS
@pytest.mark.parametrize("num_sent", [0, 1])
def test_embedding_is_computed_again_by_another_engine(pooling: str, num_sent: int) -> None:
    """The first engine ended before or after it sent the embedding."""
    first = engine(pooling)
    first.add(ask())
    whole = run(first)
    journal = RequestJournal(ask())
    for event in whole[:num_sent]:
        journal.record(event)
    assert journal.is_resumable
    second = engine(pooling)
    second.add(journal.resumed_request())
    events = run(second)
    assert [event.seq for event in events] == [num_sent + 1, num_sent + 2]
    assert isinstance(events[0], Embedding) and isinstance(whole[0], Embedding)
    assert events[0].values == whole[0].values
