"""Engines over hybrid models: cached prefixes, forks, candidates and beams give what transformers computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.model.runner import Runner
from chatcache.types.events import CandidateDone, EngineEvent, Failed, Started, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from tests.engine.driver import drain
from tests.model.families import NUM_NEW, RECURRENT, Sample
from tests.support.fake_runner import fake_model_info

FAST = ("qwen3-5",)
PARAMS = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT]
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=PARAMS)
def sample(request: pytest.FixtureRequest, sample_of: Callable[[str], Sample]) -> Sample:
    return sample_of(request.param)


def build(sample: Sample, load: Callable[..., Runner], **settings: object) -> Engine:
    runner = load(sample.folder, max_num_seqs=8)
    info = fake_model_info(runner.model_info.vocab_size, eos=())
    return Engine(runner, info, EngineConfig(strict=True, max_num_seqs=8, **settings))  # type: ignore[arg-type]


def run(engine: Engine, requests: dict[str, tuple[tuple[int, ...], Params]]) -> list[EngineEvent]:
    for name, (prompt, params) in requests.items():
        engine.add(GenerateRequest(request_id=name, prompt=prompt, params=params))
    events = drain(engine)
    assert not [event for event in events if isinstance(event, Failed)]
    return events


def tokens_of(events: list[EngineEvent], name: str, index: int = 0) -> tuple[int, ...]:
    parts = [e for e in events if isinstance(e, Tokens) and (e.request_id, e.index) == (name, index)]
    return tuple(token for part in parts for token in part.token_ids)


def cached(events: list[EngineEvent]) -> dict[str, int]:
    return {event.request_id: event.num_cached_tokens for event in events if isinstance(event, Started)}


def test_prompts_and_second_turns_equal_transformers_cold_and_cached(
    sample: Sample, load: Callable[..., Runner]
) -> None:
    engine = build(sample, load, max_num_batched_tokens=16)
    prompts = {str(number): prompt for number, prompt in enumerate(sample.prompts)}
    for _ in range(2):
        events = run(engine, {name: (prompt, GREEDY) for name, prompt in prompts.items()})
        assert tuple(tokens_of(events, name) for name in prompts) == sample.answers
    cut = NUM_NEW // 2
    turns = {name: (*prompt, *sample.answers[int(name)][:cut]) for name, prompt in prompts.items()}
    whole = {name: (*prompt, *sample.answers[int(name)]) for name, prompt in prompts.items()}
    events = run(engine, {name: (prompt, GREEDY) for name, prompt in whole.items()})
    assert all(cached(events)[name] == len(prompt) - 1 for name, prompt in whole.items())
    events = run(engine, {name: (prompt, GREEDY) for name, prompt in turns.items()})
    assert all(tokens_of(events, n)[: NUM_NEW - cut] == sample.answers[int(n)][cut:] for n in turns)
    assert engine.health().num_states_in_use == 0


def test_beams_and_candidates_are_the_same_after_cached_and_recomputed_prefixes(
    sample: Sample, load: Callable[..., Runner]
) -> None:
    prompt = sample.prompts[2]
    beams = BeamSearchParams(beam_width=4, max_tokens=12)
    several = SamplingParams(n=4, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    answers = []
    for caching in (True, False):
        engine = build(sample, load, enable_prefix_caching=caching)
        for _ in range(2):
            events = run(engine, {"beams": (prompt, beams), "several": (prompt, several)})
            ends = [(e.request_id, e.index) for e in events if isinstance(e, CandidateDone)]
            answers.append({end: tokens_of(events, *end) for end in ends})
    assert all(answer == answers[0] for answer in answers)
    with torch.inference_mode():
        best = sample.oracle.generate(torch.tensor([prompt]), num_beams=4, max_new_tokens=12, do_sample=False)
    assert answers[0]["beams", 0] == tuple(best[0, len(prompt) :].tolist())


def test_pages_after_a_snapshot_are_not_written_by_requests_that_start_on_it(
    sample: Sample, load: Callable[..., Runner]
) -> None:
    """They are filled with NaN: the tokens after the snapshot are computed into other pages, and read from there."""
    runner = load(sample.folder, max_num_seqs=8)
    engine = build(sample, lambda *_, **__: runner)
    kv, prompt = engine.scheduler.kv, sample.prompts[3]
    run(engine, {"a": (prompt, SamplingParams(max_tokens=1))})
    other = (*prompt[:48], *prompt[:5])
    pages = kv._match_pages(kv.hash_pages(other)).pages
    assert len(pages) * kv.page_size >= 48
    tensors = [tensor for store in runner._eager._stores for tensor in store.tensors]
    for tensor in tensors:
        tensor[:, pages] = torch.nan
    events = run(engine, {"b": (other, GREEDY)})
    assert cached(events) == {"b": 0}
    assert all(tensor[:, pages].isnan().all() for tensor in tensors)
    cold = run(build(sample, load, enable_prefix_caching=False), {"b": (other, GREEDY)})
    assert tokens_of(events, "b") == tokens_of(cold, "b")
