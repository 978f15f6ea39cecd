"""A request that fails leaves the pages and candidates of others alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.scheduler.scheduler import Scheduler
from chatcache.types.events import CandidateDone, EngineEvent, Failed, Finished, Started
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams, StructuredOutputs
from chatcache.types.stats import ExplainQuery
from tests.engine.driver import VOCAB, drain, output
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

LETTERS = [b"", *(bytes([97 + letter]) for letter in range(26)), *([b""] * 37)]  # no digits
SYSTEM = tuple((number * 7) % 60 + 1 for number in range(160))  # ten pages, public
DEAD_END = StructuredOutputs(regex="[a-z]{2}[0-9]")
SOME_DEAD_ENDS = StructuredOutputs(regex="([a-f][0-9]|[g-z][a-z])[a-z]{3}")


def engine(runner: FakeRunner | None = None, **settings: Any) -> Engine:
    runner = runner or FakeRunner(fake_capacity(512), VOCAB, eos=0, eos_every=0)
    config = EngineConfig(**({"strict": True} | settings))
    return Engine(runner, fake_model_info(VOCAB, (0,)), config, LETTERS, special_ids=[0])


def request(name: str, prompt: Sequence[int], params: Params | None = None, **fields: Any) -> GenerateRequest:
    params = params or SamplingParams(max_tokens=2)
    return GenerateRequest(request_id=name, prompt=tuple(prompt), params=params, **fields)


def num_cached(eng: Engine, name: str, prompt: Sequence[int], **fields: Any) -> int:
    eng.add(request(name, prompt, **fields))
    return next(event.num_cached_tokens for event in drain(eng) if isinstance(event, Started))


def failure(events: Sequence[EngineEvent]) -> Failed:
    (failed,) = (event for event in events if isinstance(event, Failed))
    return failed


def test_a_dead_end_keeps_the_public_pages_for_other_tenants() -> None:
    eng = engine()
    public: dict[str, Any] = {"num_public_tokens": 160}
    num_cached(eng, "warm", (*SYSTEM, 1, 2), namespace="a", **public)
    assert num_cached(eng, "before", (*SYSTEM, 5, 6, 7), namespace="b", **public) == 160
    params = SamplingParams(max_tokens=8, structured_outputs=DEAD_END)
    eng.add(request("hostile", (*SYSTEM, 9), params, namespace="hostile", **public))
    assert failure(drain(eng)).code == "constraint_dead_end"
    assert num_cached(eng, "after", (*SYSTEM, 8, 6, 7), namespace="b", **public) == 160


def test_a_too_complex_grammar_keeps_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    eng = engine()
    num_cached(eng, "warm", (*SYSTEM, 1, 2))
    monkeypatch.setattr("chatcache.decoding.grammar.state.START_CPU_S", -1.0)
    params = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputs(regex="[a-z]{8}"))
    eng.add(request("hostile", (*SYSTEM, 9), params))
    assert failure(drain(eng)).code == "constraint_too_complex"
    assert num_cached(eng, "after", (*SYSTEM, 8, 6, 7)) == 160


def test_a_dead_end_keeps_the_history_of_another_running_request() -> None:
    eng = engine()
    history = tuple((number * 11) % 60 + 1 for number in range(320))
    eng.add(request("chat", (*history, 3), SamplingParams(max_tokens=40, ignore_eos=True)))
    events = [event for _ in range(5) for event in eng.step()]
    eng.add(request("bad", (*history, 4), SamplingParams(max_tokens=8, structured_outputs=DEAD_END)))
    events += drain(eng)
    assert failure(events).request_id == "bad"
    explanation = eng.cache.explain(ExplainQuery((*history, 3, *output(events, "chat")[:30], 1)))
    assert (explanation.num_cached_tokens, explanation.reason) == (351, "")


def test_pages_of_a_request_that_failed_while_decoding_are_found_again() -> None:
    eng = engine()
    eng.add(request("bad", SYSTEM, SamplingParams(max_tokens=8, structured_outputs=DEAD_END)))
    failure(drain(eng))
    explanation = eng.cache.explain(ExplainQuery((*SYSTEM, 63)))
    assert (explanation.num_cached_tokens, explanation.reason) == (160, ""), "its prompt was computed correctly"


@pytest.mark.parametrize("num_host_pages", [0, 64])
def test_an_invalid_result_unpublishes_only_what_the_request_computed(num_host_pages: int) -> None:
    capacity = fake_capacity(512, num_host_pages=num_host_pages)
    eng = engine(FakeRunner(capacity, VOCAB, eos=0, eos_every=0, faulty_token=63))
    num_cached(eng, "warm", (*SYSTEM, 1, 2))
    eng.add(request("bad", (*SYSTEM, *range(1, 40), 63)))
    assert failure(drain(eng)).message == "the logits are not finite"
    explanation = eng.cache.explain(ExplainQuery((*SYSTEM, *range(1, 40), 62)))
    assert explanation.num_cached_tokens == 162, "the prompt of `warm`, and nothing that the request computed"
    assert num_cached(eng, "after", (*SYSTEM, 8, 6, 7)) == 160


def test_an_invalid_result_after_a_preemption_unpublishes_what_the_request_computed_before() -> None:
    """Pages that it computed, released, and matched when it started again, are not those of another request."""
    eng = engine(FakeRunner(fake_capacity(512), VOCAB, eos=0, eos_every=0, faulty_token=63), max_num_batched_tokens=64)
    num_cached(eng, "warm", SYSTEM[:33])
    bad = (*SYSTEM, *range(1, 40), *range(1, 40), *range(1, 40), 63)
    eng.add(request("bad", bad))
    for _ in range(2):
        eng.step()
    scheduler: Scheduler = eng.scheduler
    (live,) = scheduler.running
    scheduler._preempt(live)
    eng.step()
    assert live.leader.table is not None and live.leader.table.num_tokens > 160, "it matched its own pages"
    failure(drain(eng))
    assert eng.cache.explain(ExplainQuery((*bad[:-1], 62))).num_cached_tokens == 33, "only what `warm` computed is left"


def test_bans_of_every_token_that_a_grammar_allows_fail_the_request_as_invalid() -> None:
    eng = engine()
    params = SamplingParams(allowed_token_ids=(27,), structured_outputs=StructuredOutputs(regex="[a-z]{3}"))
    eng.add(request("bad", (3, 4, 5), params))
    failed = failure(drain(eng))
    assert (failed.status, failed.message) == (400, "no token is left to draw: every one is banned")


BANNED_SECOND: dict[str, Any] = {
    "structured_outputs": StructuredOutputs(regex="[a-m]|[n-y]z"),
    "allowed_token_ids": tuple(range(1, 26)),  # all letters except z
}


@pytest.mark.parametrize(
    "kind", ["n", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("best_of", "distinct", "beams"))]
)
def test_bans_of_every_token_end_one_candidate_only(kind: str) -> None:
    sampled: dict[str, Any] = {"n": {"n": 4}, "best_of": {"n": 3, "best_of": 4}, "distinct": {"n": 4, "distinct": True}}
    num_dead = num_failed = 0
    for seed in range(12):
        eng = engine()
        params: Params = (
            BeamSearchParams(beam_width=4, max_tokens=8, **BANNED_SECOND)
            if kind == "beams"
            else SamplingParams(seed=seed, max_tokens=8, **sampled[kind], **BANNED_SECOND)
        )
        eng.add(request("r", (3, 4, 5 + seed), params))
        events = drain(eng)
        ends = [event for event in events if isinstance(event, CandidateDone)]
        dead = [event.stop_reason == "constraint_dead_end" for event in ends]
        num_dead += sum(dead)
        if isinstance(events[-1], Failed):
            num_failed += 1
            assert all(dead) and (events[-1].code, events[-1].status) == ("constraint_dead_end", 400)
            assert events[-1].message == "no token is left to draw: every one is banned"
            continue
        assert isinstance(events[-1], Finished) and not all(dead)
        for end in ends:
            text = b"".join(LETTERS[token] for token in output(events, "r", end.index)).decode()
            if kind == "beams" and end.score == -1e9:
                continue  # fewer than four beams have a result
            assert len(text) == 1 and (text in "abcdefghijklm") == (end.finish_reason == "stop"), text
    assert (num_dead or kind == "beams") and num_failed < 6


class CrashingRunner(FakeRunner):
    crash_at = 0

    def execute(self, plan: Any) -> Any:
        if plan.step == self.crash_at:
            raise RuntimeError("injected")
        return super().execute(plan)


def test_a_failed_step_keeps_matched_pages() -> None:
    runner = CrashingRunner(fake_capacity(512), VOCAB, eos=0, eos_every=0)
    eng = engine(runner)
    num_cached(eng, "warm", (*SYSTEM, 1, 2))
    eng.add(request("bad", (*SYSTEM, *range(9, 49)), SamplingParams(max_tokens=8)))
    eng.step()
    runner.crash_at = eng.scheduler.num_steps + 1
    failure(drain(eng))
    assert eng.cache.explain(ExplainQuery((*SYSTEM, *range(9, 49), 1))).num_cached_tokens == 160


@pytest.mark.parametrize("kind", ["n", "best_of", "distinct"])
def test_a_dead_end_ends_one_candidate_only(kind: str) -> None:
    eng = engine()
    num_dead = num_failed = 0
    for seed in range(25):
        fields: dict[str, Any] = {"n": {"n": 4}, "best_of": {"n": 3, "best_of": 4}, "distinct": {"n": 4}}[kind]
        params = SamplingParams(
            seed=seed, max_tokens=8, distinct=kind == "distinct", structured_outputs=SOME_DEAD_ENDS, **fields
        )
        eng.add(request(f"r{seed}", (3, 4, 5), params))
        events = drain(eng)
        ends = [event for event in events if isinstance(event, CandidateDone)]
        dead = [(event.finish_reason, event.stop_reason) == ("length", "constraint_dead_end") for event in ends]
        num_dead += sum(dead)
        if isinstance(events[-1], Failed):
            num_failed += 1
            assert all(dead) and events[-1].code == "constraint_dead_end", "fails only if no candidate is left"
            continue
        assert isinstance(events[-1], Finished) and len(ends) == params.n and not all(dead)
        for end in ends:
            text = b"".join(LETTERS[token] for token in output(events, f"r{seed}", end.index)).decode()
            is_whole = len(text) == 5 and text[0] in "ghijklmnopqrstuvwxyz"
            assert is_whole == (end.finish_reason == "stop"), text
        if kind == "best_of":
            assert dead == sorted(dead), "candidates in dead ends come last"
    assert num_dead and num_failed < 10


def test_a_dead_end_of_every_candidate_fails_the_request() -> None:
    for params in (
        SamplingParams(n=3, max_tokens=8, structured_outputs=DEAD_END),
        SamplingParams(n=2, best_of=3, max_tokens=8, structured_outputs=DEAD_END),
        SamplingParams(n=3, distinct=True, max_tokens=8, structured_outputs=DEAD_END),
        BeamSearchParams(beam_width=3, max_tokens=8, structured_outputs=DEAD_END),
    ):
        eng = engine()
        eng.add(request("bad", (3, 4, 5), params))
        assert failure(drain(eng)).code == "constraint_dead_end"
