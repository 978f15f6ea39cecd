"""After a search, the next turn finds all tokens of a candidate except the last cached."""

from __future__ import annotations

import random

import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.types.events import Started, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

VOCAB = 64
BYTES = [bytes([0x30 + token]) for token in range(VOCAB)]


def engine(page_size: int) -> Engine:
    runner = FakeRunner(fake_capacity(num_pages=4096, page_size=page_size), VOCAB, eos_every=20)
    return Engine(runner, fake_model_info(VOCAB), EngineConfig(page_size=page_size), token_bytes=BYTES)


def outputs(eng: Engine, prompt: tuple[int, ...], params: Params) -> tuple[list[tuple[int, ...]], int]:
    """Run one request; return its candidates and the number of steps."""
    eng.add(GenerateRequest(request_id="search", prompt=prompt, params=params))
    tokens: dict[int, list[int]] = {}
    num_steps = 0
    while eng.has_work():
        num_steps += 1
        for event in eng.step():
            if isinstance(event, Tokens):
                tokens.setdefault(event.index, []).extend(event.token_ids)
    return [tuple(tokens[index]) for index in sorted(tokens)], num_steps


def num_cached(eng: Engine, history: tuple[int, ...]) -> int:
    """Continue a history by a new turn; return how many of its tokens were cached."""
    eng.add(GenerateRequest(request_id="turn", prompt=(*history, 1, 2, 3), params=SamplingParams(max_tokens=1)))
    started = [event for event in eng.step() if isinstance(event, Started)]
    while eng.has_work():
        started += [event for event in eng.step() if isinstance(event, Started)]
    return started[0].num_cached_tokens


SEARCHES: dict[str, Params] = {
    "4": BeamSearchParams(beam_width=4, max_tokens=40, length_penalty=0.0),
    "8": BeamSearchParams(beam_width=8, max_tokens=40, length_penalty=0.0),
    "8-never": BeamSearchParams(beam_width=8, n=3, max_tokens=40, early_stopping="never", length_penalty=0.0),
    "16-stop": BeamSearchParams(beam_width=16, n=4, max_tokens=40, length_penalty=0.0, stop=("5", "A", "xy")),
    "8-groups": BeamSearchParams(beam_width=8, max_tokens=40, num_beam_groups=4, diversity_penalty=0.3, stop=("A",)),
    "distinct": SamplingParams(n=8, max_tokens=40, distinct=True, stop=("A",)),
}


@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize("name", SEARCHES)
def test_next_turn_after_a_beam_search_finds_every_candidate_cached(name: str, page_size: int) -> None:
    num_early = 0
    for seed in range(4):
        eng, rng = engine(page_size), random.Random(seed)
        prompt = tuple(rng.randrange(1, VOCAB) for _ in range(37))
        candidates, num_steps = outputs(eng, prompt, SEARCHES[name])
        for candidate in dict.fromkeys(candidates):  # groups may find one twice
            history = prompt + candidate
            assert num_cached(eng, history) == len(history) - 1
            num_early += len(candidate) <= num_steps - 4
    assert num_early, "some ended several steps before the search, and their branches were long gone"


def test_beam_search_leaves_no_cached_tails_of_released_branches() -> None:
    """Of the released branches, only candidates leave a partly filled page in the cache."""
    eng = engine(16)
    prompt = tuple(range(1, 33))
    candidates, _ = outputs(eng, prompt, BeamSearchParams(beam_width=8, max_tokens=15, ignore_eos=True))
    assert len(candidates) == 8
    assert eng.health().num_pages_idle <= 2 + 8
