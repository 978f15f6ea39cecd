"""Invalid results fail one request only: NaN rows, invalid ids, wrong shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.errors import InvalidRequestError
from chatcache.types.events import EngineEvent, Failed, Finished, Started, Tokens
from chatcache.types.plan import Draws, StepPlan, StepResult
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

VOCAB = 64


class Saboteur(FakeRunner):
    """Corrupts draws of rows whose last token is `trigger`, in the way `how` names."""

    def __init__(self, how: str, trigger: int = 63) -> None:
        super().__init__(fake_capacity(), VOCAB)
        self.how = how
        self.trigger = trigger

    def draw(self, draws: Draws, histories: Sequence[np.uint64], last_tokens: Sequence[int]) -> StepResult:
        result = super().draw(draws, histories, last_tokens)
        hit = [draw for draw, row in enumerate(draws.row.tolist()) if last_tokens[row] == self.trigger]
        match self.how:
            case "fault":
                return replace(result, faults=tuple((draw, "the logits are not finite") for draw in hit))
            case "nan":
                result.logprobs[hit, 0] = np.nan
            case "id beyond the vocabulary":
                result.tokens[hit, 0] = VOCAB
            case "id below zero":
                result.tokens[hit, 0] = -7
            case "no token":
                result.tokens[hit] = -1
            case "unknown alternative":
                result.top_tokens[hit, 0] = 2**31 - 1
        return result


def engine(runner: FakeRunner, **settings: Any) -> Engine:
    return Engine(runner, fake_model_info(VOCAB), EngineConfig(strict=True, **settings))


def drain(eng: Engine) -> dict[str, list[EngineEvent]]:
    events: dict[str, list[EngineEvent]] = {}
    for _ in range(2000):
        if not eng.has_work():
            return events
        for event in eng.step():
            events.setdefault(event.request_id, []).append(event)
    raise AssertionError("the engine stalls")


def outputs(events: list[EngineEvent]) -> list[tuple[int, tuple[int, ...], tuple[Any, ...]]]:
    return [(event.index, event.token_ids, event.logprobs) for event in events if isinstance(event, Tokens)]


def simple(name: str, prompt: tuple[int, ...], params: Params | None = None) -> GenerateRequest:
    params = params or SamplingParams(max_tokens=6, temperature=0.8, seed=len(prompt), logprobs=2, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt=prompt, params=params)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("fault", "not finite"),
        ("nan", "not numbers"),
        ("id beyond the vocabulary", "token id 64; its vocabulary ends at 63"),
        ("id below zero", "token id -7"),
        ("no token", "no token was drawn"),
        ("unknown alternative", "token id 2147483647"),
    ],
)
@pytest.mark.parametrize("params", [None, BeamSearchParams(beam_width=3, max_tokens=6, logprobs=2)], ids=["n", "beam"])
def test_a_corrupted_row_fails_its_request_only(how: str, words: str, params: Params | None) -> None:
    eng = engine(Saboteur(how))
    eng.add(simple("good", tuple(range(1, 30))))
    eng.add(simple("bad", (*range(20, 40), 63), params))
    events = drain(eng)
    (failed,) = events["bad"]
    assert isinstance(failed, Failed) and words in failed.message and failed.code == "engine_error"
    clean = engine(FakeRunner(fake_capacity(), VOCAB))
    clean.add(simple("good", tuple(range(1, 30))))
    assert outputs(events["good"]) == outputs(drain(clean)["good"])
    eng.add(simple("again", (*range(20, 40), 5)))
    started = drain(eng)["again"][0]
    assert isinstance(started, Started) and started.num_cached_tokens == 0, "the spoilt pages are not matched"


Spoiler = Callable[[StepResult], StepResult]
SHAPES: dict[str, Spoiler] = {
    "too few draws": lambda r: replace(r, tokens=r.tokens[1:], logprobs=r.logprobs[1:]),
    "too narrow": lambda r: replace(r, tokens=r.tokens[:, :0], logprobs=r.logprobs[:, :0]),
    "flat": lambda r: replace(r, tokens=r.tokens[:, 0]),
    "logprobs elsewhere": lambda r: replace(r, logprobs=r.logprobs[:, :0]),
    "no alternatives": lambda r: replace(r, top_tokens=r.top_tokens[:, :0], top_logprobs=r.top_logprobs[:, :0]),
    "floats": lambda r: replace(r, tokens=r.tokens.astype(np.float32)),
    "nothing": lambda r: replace(r, tokens=None),  # type: ignore[arg-type]
    "fault of an unknown draw": lambda r: replace(r, faults=((99, "?"),)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_result_of_the_wrong_shape_fails_the_requests_of_its_step(name: str) -> None:
    class Misshapen(FakeRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            return SHAPES[name](result) if plan.step == 3 else result

    eng = engine(Misshapen(fake_capacity(), VOCAB), max_num_batched_tokens=16)
    eng.add(simple("in", tuple(range(1, 30))))
    eng.add(simple("out", tuple(range(20, 60))))
    events = drain(eng)
    assert isinstance(events["in"][-1], Failed)
    assert {type(seen[-1]) for seen in events.values()} <= {Failed, Finished}
    assert eng.health().num_pages_in_use == 0
    eng.add(simple("in", tuple(range(1, 30))))
    clean = engine(FakeRunner(fake_capacity(), VOCAB))
    clean.add(simple("in", tuple(range(1, 30))))
    assert outputs(drain(eng)["in"]) == outputs(drain(clean)["in"])


class OneRow(FakeRunner):
    """Reports one random row of every step as not finite; `victim` is its slot."""

    victim = -1

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        draw = int(np.random.default_rng(plan.step).integers(len(plan.draws.row)))
        self.victim = int(plan.rows.slot[plan.draws.row[draw]])
        for cells in (result.tokens, result.top_tokens):
            cells[draw] = 7
        return replace(result, faults=((draw, "the logits are not finite"),))


@pytest.mark.slow
def test_one_corrupted_row_of_thirty_two_fails_that_request_only() -> None:
    """1,000 trials: only that request fails, the others are bit-equal, its pages are not cached."""
    bare = {str(i): simple(str(i), (i, *range(20, 40))) for i in range(1, 33)}  # no page in common
    requests = {
        name: GenerateRequest(
            request_id=name,
            prompt=request.prompt,
            params=SamplingParams(max_tokens=300, temperature=0.9, seed=int(name), logprobs=0, ignore_eos=True),
        )
        for name, request in bare.items()
    }
    clean = engine(FakeRunner(fake_capacity(2048), VOCAB))
    for request in requests.values():
        clean.add(request)
    expected = {name: outputs(events) for name, events in drain(clean).items()}

    runner = OneRow(fake_capacity(2048), VOCAB)
    eng = engine(runner)
    for request in requests.values():
        eng.add(request)
    life: dict[str, list[EngineEvent]] = {name: [] for name in requests}
    owners: dict[int, str] = {}
    for trial in range(1000):
        failed: list[str] = []
        for event in eng.step():
            life[event.request_id].append(event)
            if isinstance(event, Failed):
                failed.append(event.request_id)
        assert len(failed) == 1
        assert owners.get(runner.victim, failed[0]) == failed[0]
        for name in failed:
            *events, _ = life[name]
            life[name] = []
            assert outputs(events) == expected[name][: len(outputs(events))]
            assert not events or events[0] == Started(name, 1, 21, 0), "what it computed before is not found again"
            eng.add(requests[name])
        owners = {branch.slot: r.request_id for r in eng.scheduler.running for branch in r.branches.values()}
        if trial % 50 == 0:
            eng.cache.check()
    for name, events in life.items():
        assert outputs(events) == expected[name][: len(outputs(events))]


def fuzzed(rng: np.random.Generator, number: int) -> GenerateRequest:
    """Draw a request that the schema admits, with edge cases and odd combinations."""

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    shared = {
        "max_tokens": pick(1, 2, 3, 5),
        "min_tokens": pick(0, 0, 1, 2, 5),
        "stop_token_ids": pick((), (0,), (5, 6), tuple(range(VOCAB)), (VOCAB - 1,)),
        "ignore_eos": pick(True, False),
        "logprobs": pick(None, 0, 3, 20),
    }
    params: Params
    if rng.random() < 0.2:
        params = BeamSearchParams(
            beam_width=pick(1, 2, 5, 16),
            n=pick(None, 1, 2),
            length_penalty=pick(-2.0, 0.0, 1.0, 1e6),
            early_stopping=pick(True, False, "never"),
            **shared,
        )
    else:
        params = SamplingParams(
            n=pick(1, 1, 1, 2, 7),
            temperature=pick(0.0, 1e-6, 0.7, 2.0),
            top_p=pick(1e-9, 0.5, 1.0),
            top_k=pick(-1, 0, 1, 7, 10**9),
            min_p=pick(0.0, 0.3, 1.0),
            repetition_penalty=pick(1.0, 1e-6, 2.0, 1e9),
            presence_penalty=pick(0.0, -2.0, 2.0),
            frequency_penalty=pick(0.0, -2.0, 2.0),
            logit_bias=pick(None, {}, {0: 100.0}, {63: -100.0, 5: 100.0}, dict.fromkeys(range(VOCAB), -100.0)),
            seed=pick(None, 0, -1, 2**63 - 1),
            **shared,
        )
    prompt = rng.integers(0, VOCAB, int(pick(1, 2, 15, 16, 17, 40))).tolist()
    return GenerateRequest(
        request_id=f"fuzz{number}",
        prompt=tuple(prompt),
        params=params,
        namespace=pick("", "t", "\x00", "t" * 300),
        priority=pick(0, -(2**31), 2**31),
    )


def reference_requests() -> list[GenerateRequest]:
    kinds: list[Params] = [
        SamplingParams(max_tokens=40, seed=4, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=0.0, frequency_penalty=0.5, ignore_eos=True),
        SamplingParams(n=3, max_tokens=30, seed=5, top_p=0.8, ignore_eos=True),
        BeamSearchParams(beam_width=3, max_tokens=30, logprobs=1, ignore_eos=True),
    ]
    return [simple(f"canary{i}", tuple(range(i + 1, i + 30)), kinds[i % 4]) for i in range(8)]


@pytest.mark.slow
def test_fuzzed_requests_do_not_change_the_reference_requests() -> None:
    """10,000 random valid requests run with 8 reference requests, which answer as they do alone."""
    solo: dict[str, Any] = {}
    for reference_request in reference_requests():
        alone = engine(FakeRunner(fake_capacity(), VOCAB))
        alone.add(reference_request)
        solo[reference_request.request_id] = outputs(drain(alone)[reference_request.request_id])
    eng, rng = (
        engine(FakeRunner(fake_capacity(num_pages=400), VOCAB), max_num_batched_tokens=512),
        np.random.default_rng(16),
    )
    events: dict[str, list[EngineEvent]] = {}
    num_refused = number = num_rounds = 0
    while number < 10_000 or eng.has_work():
        for reference_request in reference_requests():
            done = events.get(reference_request.request_id)
            if number < 10_000 and (done is None or isinstance(done[-1], Finished | Failed)):
                if done is not None:
                    assert isinstance(done[-1], Finished)
                    assert outputs(done) == solo[reference_request.request_id]
                    num_rounds += 1
                events[reference_request.request_id] = []
                eng.add(reference_request)
        for _ in range(min(40 - len(eng.scheduler.waiting), 10_000 - number)):
            try:
                eng.add(fuzzed(rng, number))
            except InvalidRequestError:
                num_refused += 1
            number += 1
        for event in eng.step():
            events.setdefault(event.request_id, []).append(event)
    ends = [seen[-1] for name, seen in events.items() if name.startswith("fuzz")]
    assert len(ends) + num_refused == 10_000 and num_rounds > 50
    assert all(isinstance(end, Finished | Failed) for end in ends)
    assert not [end for end in ends if isinstance(end, Failed) and "computed" in end.message]
    eng.cache.check()
