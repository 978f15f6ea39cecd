"""Generation cases that are run on one attention backend and compared with another.

Each case defines its requests and what must happen.

A case is a function from an idle engine to its answers; it also asserts that what it is about did happen (a hit, a
preemption, a swap), so that no case can pass by not being one. The same cases run on a GPU, compiled, and on CPUs under
Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from bench.check.model import SynchronousRunner
from chatcache_kernels import triton, work_list
from torch import Tensor

from chatcache.bench.drivers import RandomWeights, Shape, write_config
from chatcache.config import EngineConfig
from chatcache.decoding.grammar.state import Constraint
from chatcache.decoding.sampling import SamplingStrategy
from chatcache.decoding.stopping import StopRules
from chatcache.decoding.strategy import make_strategy
from chatcache.engine.engine import Engine
from chatcache.model.cuda_graphs import FilledStep, StepGraphs
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import AsyncLaunch, LaunchedStep, Runner
from chatcache.types.actions import Strategy
from chatcache.types.events import CandidateDone, EngineEvent, Failed, Finished, Started, Tokens
from chatcache.types.plan import U32, StepPlan
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from chatcache.types.stats import ModelInfo
from tests.model.drive import short_warm_up

SEED = 20  # weights and prompts that every device has seen
VOCAB = 128
PAGE = 8
TINY = Shape(64, 96, 2, 4, 2, 16, VOCAB, 4096, False, 10_000.0, qk_norm=True)
PAGE_BYTES = 2 * TINY.num_layers * PAGE * TINY.num_kv_heads * TINY.head_dim * 4
LOGPROB_TOLERANCE = 1e-4

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """The result of one candidate."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str
    score: float


Answers = dict[tuple[str, int], Answer]


def build(
    folder: Path,
    attention: str,
    device: str = "cpu",
    *,
    share: work_list.SharingMode = "auto",
    graphs: AsyncLaunch | None = None,
    in_order: bool = False,
    **settings: Any,
) -> Engine:
    """Load the random model into a strict engine, in float32 unless `settings` say otherwise.

    `share`: which prefixes Triton's work lists read together. `graphs`: how the runner gets ahead of the device, if not
    as it does by itself; `in_order`: whatever it could, every step ends before the next is planned.
    """
    write_config(TINY, folder)
    is_interpreted = attention == "triton" and device == "cpu"
    common = {"kv_memory_bytes": 256 * PAGE_BYTES, "page_size": PAGE, "max_num_batched_tokens": 256, "max_num_seqs": 16}
    config = EngineConfig(
        model=str(folder),
        device=device,
        attention_backend=attention,
        strict=True,
        **{"dtype": "float32", **common, **settings},
    )
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(triton, "prepare", partial(work_list.plan_work, share=share)))
        if is_interpreted:
            patches.enter_context(short_warm_up())
        runner = load_model(config, weights=RandomWeights(TINY, device, seed=SEED, std=0.2), async_launch=graphs)
    used = SynchronousRunner(runner) if in_order else runner
    return Engine(used, runner.model_info, config, make_strategy=even_tokens_strategy)


class EvenTokens:
    """Grammar of even token ids, which needs no grammar library."""

    words = np.full(VOCAB // 32, 0x55555555, np.uint32)

    def fork(self, state: EvenTokens | None) -> EvenTokens:
        return EvenTokens()

    def mask(self, state: EvenTokens | None, num_tokens: int) -> U32:
        return self.words

    def consume(self, token: int) -> bool:
        return True


def even_tokens_strategy(request: GenerateRequest, model_info: ModelInfo, **resolved: Any) -> Strategy:
    """Build the strategy of a request; a request of the namespace "even" may draw even tokens only."""
    params = request.params
    if request.namespace != EVEN or not isinstance(params, SamplingParams):
        return make_strategy(request, model_info, **resolved)
    rules = StopRules.of(params, model_info, max_tokens=resolved["max_tokens"], token_bytes=None)
    grammar = cast("Constraint", EvenTokens())
    return SamplingStrategy(params, rules, seed=resolved["seed"], prompt=request.prompt, constraint=grammar)


def prompt_of(num_tokens: int, number: int = 0) -> Prompt:
    """Return a prompt that differs from those of other numbers from the first token on."""
    tokens = np.random.default_rng((SEED, number)).integers(0, VOCAB, num_tokens)
    return (number % VOCAB, *tokens[1:].tolist())


def greedy(num_tokens: int = 5, **more: Any) -> SamplingParams:
    """Request tokens and their log-probabilities only, so that captured steps are used."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, "logprobs": 0, **more})


def sampled(n: int, num_tokens: int = 5, **more: Any) -> SamplingParams:
    return greedy(num_tokens, **{"temperature": 1.0, "n": n, "seed": 5, **more})


def submit(engine: Engine, *requests: tuple[Prompt, Params]) -> None:
    for prompt, params in requests:
        name = f"r{len(engine.scheduler.waiting) + len(engine.scheduler.running)}-{len(prompt)}"
        engine.add(GenerateRequest(request_id=name, prompt=prompt, params=params))


EVEN = "even"


def drain(engine: Engine) -> list[EngineEvent]:
    """Step to the end, verifying the books after every step."""
    events: list[EngineEvent] = []
    for _ in range(2000):
        if not engine.has_work():
            return events
        events += engine.step()
        engine.cache.check()
    raise AssertionError("the engine stalls")


def collect(events: Sequence[EngineEvent]) -> Answers:
    """Put the events of finished requests together."""
    failed = [event for event in events if isinstance(event, Failed)]
    assert not failed, failed
    parts = [event for event in events if isinstance(event, Tokens)]
    answers: Answers = {}
    for done in events:
        if isinstance(done, CandidateDone):
            key = done.request_id, done.index
            own = [part for part in parts if (part.request_id, part.index) == key]
            tokens = tuple(token for part in own for token in part.token_ids)
            logprobs = tuple(entry.logprob for part in own for entry in part.logprobs)
            assert len(tokens) == len(logprobs) > 0
            answers[key] = Answer(tokens, logprobs, done.finish_reason, done.score)
    return answers


def answer(engine: Engine, *requests: tuple[Prompt, Params]) -> Answers:
    submit(engine, *requests)
    return collect(drain(engine))


def assert_same(found: Answers, expected: Answers) -> None:
    """Compare tokens exactly, log-probabilities and scores within float32 rounding."""
    assert found.keys() == expected.keys() and found
    for key, one in expected.items():
        other = found[key]
        assert (other.tokens, other.reason) == (one.tokens, one.reason), f"seed {SEED}: {key}"
        np.testing.assert_allclose(other.logprobs, one.logprobs, atol=LOGPROB_TOLERANCE, err_msg=f"seed {SEED}: {key}")
        np.testing.assert_allclose(other.score, one.score, atol=len(one.tokens) * LOGPROB_TOLERANCE)


def count_replays(monkeypatch: pytest.MonkeyPatch, *, only_decode: bool = False) -> list[int]:
    """Return a list that gets the number of rows of every captured step that is run, or of decode steps only."""
    replayed: list[int] = []
    run = StepGraphs.run

    def counted(steps: StepGraphs, ready: FilledStep) -> Tensor:
        if ready.size.is_decode or not only_decode:
            replayed.append(ready.num_rows)
        return run(steps, ready)

    monkeypatch.setattr(StepGraphs, "run", counted)
    return replayed


def count_decode_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of every step, captured or not, in which all rows decode."""
    found: list[int] = []
    launch = Runner.launch

    def counted(runner: Runner, plan: StepPlan) -> LaunchedStep:
        if len(plan.rows.slot) and (plan.rows.num_tokens == 1).all():
            found.append(len(plan.rows.slot))
        return launch(runner, plan)

    monkeypatch.setattr(Runner, "launch", counted)
    return found


# -- cases --------------------------------------------------------------------------------------------------------


def mixed(engine: Engine) -> Answers:
    """Run greedy and sampled requests in one batch, with every filter and penalty."""
    return answer(
        engine,
        (prompt_of(5, 1), greedy()),
        (prompt_of(16, 2), greedy(9)),  # alone at last, and plain
        (prompt_of(12, 24), greedy(3, logprobs=2)),
        (prompt_of(41, 3), sampled(1, top_k=20, min_p=0.02)),
        (prompt_of(23, 4), sampled(1, top_p=0.8, temperature=0.7, repetition_penalty=1.2, logit_bias={3: 2.0})),
    )


def every_mode(engine: Engine) -> Answers:
    """A request with penalties, with alternatives, with a grammar and with beams, between plain ones."""
    submit(
        engine,
        (prompt_of(9, 25), greedy(7)),
        (prompt_of(11, 26), sampled(1, 7, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.3)),
        (prompt_of(13, 27), greedy(7, logprobs=3)),
        (prompt_of(10, 28), BeamSearchParams(beam_width=2, max_tokens=7, logprobs=1, ignore_eos=True)),
        (prompt_of(12, 29), sampled(1, 7)),
    )
    engine.add(GenerateRequest(request_id=EVEN, namespace=EVEN, prompt=prompt_of(14, 30), params=greedy(7)))
    answers = collect(drain(engine))
    assert len(answers) == 7 and all(token % 2 == 0 for token in answers[EVEN, 0].tokens)
    return answers


def n_best(engine: Engine) -> Answers:
    """Run four branches that share a prompt's pages and copy its partial page on write."""
    answers = answer(engine, (prompt_of(53, 5), sampled(4)), (prompt_of(9, 6), greedy()))
    assert engine.health().num_page_copies >= 3
    assert len({one.tokens for one in answers.values()}) == 5
    return answers


def long(engine: Engine) -> Answers:
    """Branches over a prompt whose keys are cut into several pieces, next to one that is not."""
    return answer(engine, (prompt_of(531, 22), sampled(3, 3)), (prompt_of(9, 23), greedy(4)))


def beams(engine: Engine) -> Answers:
    """Four beams next to a sampled request: forks, copies and retirements in every step."""
    params = BeamSearchParams(beam_width=4, max_tokens=5, logprobs=1, ignore_eos=True)
    return answer(engine, (prompt_of(30, 7), params), (prompt_of(12, 8), sampled(2)))


def chunked(engine: Engine) -> Answers:
    """A prompt of many chunks next to branches that decode."""
    submit(engine, (prompt_of(10, 9), greedy(6)), (prompt_of(17, 10), sampled(2, 5)))
    events = engine.step()
    submit(engine, (prompt_of(55, 11), greedy(2)))
    before = engine.health().num_steps
    events += drain(engine)
    assert engine.health().num_steps - before > 4
    return collect(events)


def cached(engine: Engine) -> Answers:
    """A prompt again, and one that begins like it: all but the new tokens come from pages."""
    first = answer(engine, (prompt_of(45, 12), greedy(2)))
    submit(engine, (prompt_of(45, 12), greedy(4)), (prompt_of(45, 12)[:37] + prompt_of(20, 13), sampled(2, 4)))
    events = drain(engine)
    hits = [event.num_cached_tokens for event in events if isinstance(event, Started)]
    assert len(hits) == 2 and min(hits) >= 32, hits
    again = collect(events)
    assert len(first) == 1 and len(again) == 3
    return again


def preempted(engine: Engine) -> Answers:
    """More branches than pages: someone gives way and comes back."""
    answers = answer(engine, *((prompt_of(12 + number, 14 + number), sampled(2, 7)) for number in range(2)))
    assert engine.health().num_preemptions > 0
    return answers


def swapped(engine: Engine) -> Answers:
    """As `preempted`, through host memory."""
    answers = preempted(engine)
    assert engine.health().num_swap_preemptions > 0 and engine.health().num_pages_swapped_in > 0
    return answers


def cancelled(engine: Engine) -> Answers:
    """A request that is given up frees its pages at once; the one next to it is not disturbed."""
    submit(engine, (prompt_of(40, 20), sampled(3, 200)), (prompt_of(21, 21), greedy(7)))
    events = [event for _ in range(3) for event in engine.step()]
    held, before = engine.cache.num_pages_held("r0-40"), engine.health().num_pages_in_use
    engine.abort("r0-40")
    engine.cache.check()
    assert held >= 6 and engine.health().num_pages_in_use == before - held
    events += drain(engine)
    ended = [event for event in events if isinstance(event, Finished) and event.cancelled]
    assert [event.num_pages_freed for event in ended] == [held] and not engine.health().num_pages_in_use
    return collect(events)


@dataclass(frozen=True)
class Case:
    """What to do, with which engine."""

    run: Callable[[Engine], Answers]
    settings: dict[str, Any]


SCARCE = {"kv_memory_bytes": 8 * PAGE_BYTES, "max_model_len": 32}
CASES = {
    "mixed": Case(mixed, {}),
    "every_mode": Case(every_mode, {}),
    "n_best": Case(n_best, {}),
    "long": Case(long, {"max_num_batched_tokens": 1024}),
    "beams": Case(beams, {}),
    "chunked": Case(chunked, {"max_num_batched_tokens": 16}),
    "cached": Case(cached, {}),
    "recomputed": Case(preempted, {**SCARCE, "preemption_mode": "recompute"}),
    "swapped": Case(swapped, {**SCARCE, "preemption_mode": "swap", "swap_space_bytes": 64 * PAGE_BYTES}),
    "cancelled": Case(cancelled, {}),
}


def outcome(case: str, folder: Path, attention: str, device: str = "cpu", **settings: Any) -> Answers:
    """Run one case on an engine of its own; `settings` as for `build`."""
    one = CASES[case]
    return one.run(build(folder, attention, device, **{**one.settings, **settings}))
