"""An engine killed in the middle of an answer gives the same answer as without it."""

from __future__ import annotations

import os
import signal

import pytest

from chatcache.config import EngineConfig
from chatcache.engine_process.process import EngineProcess, RestartPolicy
from chatcache.factory import BUILD_ENGINE, load_tokenizer
from chatcache.types.events import CandidateDone, Finished, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, SamplingParams
from tests.engine_process.crashing_engine import RequestGroup, check_same, wait_for_search_steps

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(attention_backend="cpu", kv_memory_bytes=4 << 20, deterministic=True)
PROMPT = "<|user|>Tell me a story about a dragon and a very small dog.<|assistant|>"


async def read(engine: EngineProcess, name: str, kill_after: int = -1) -> list[list[int]]:
    """The tokens of both candidates; the engine is killed once so many have come."""
    said: list[list[int]] = [[], []]
    num_seen = num_done = 0
    async for event in engine.events(name):
        num_seen += 1
        assert event.seq == num_seen
        if isinstance(event, Tokens):
            said[event.index] += event.token_ids
            if sum(map(len, said)) == kill_after:
                os.kill(engine.pid or 0, signal.SIGKILL)
        num_done += isinstance(event, CandidateDone)
    assert isinstance(event, Finished) and num_done == 2
    return said


async def test_the_text_of_a_killed_engine_is_that_of_an_undisturbed_one() -> None:
    tokenizer = load_tokenizer(CONFIG)
    params = SamplingParams(
        n=2, seed=5, temperature=0.9, max_tokens=150, ignore_eos=True, repetition_penalty=1.1, logprobs=0
    )
    prompt = tuple(tokenizer.encode(PROMPT))
    async with EngineProcess(CONFIG, BUILD_ENGINE, policy=RestartPolicy(first_delay_s=0.01)) as engine:
        await engine.wait_loaded()
        await engine.submit(GenerateRequest(request_id="a", prompt=prompt, params=params))
        undisturbed = await read(engine, "a")
        await engine.submit(GenerateRequest(request_id="b", prompt=prompt, params=params))
        killed = await read(engine, "b", kill_after=50)
        assert engine.num_restarts == 1
    assert [tokenizer.decode(ids) for ids in killed] == [tokenizer.decode(ids) for ids in undisturbed]
    assert killed == undisturbed and len(set(map(tuple, killed))) == 2


SEARCHES: dict[str, BeamSearchParams | SamplingParams] = {
    "beams": BeamSearchParams(beam_width=5, max_tokens=80, ignore_eos=True, logprobs=1, stream_beams=True),
    "diverse beams": BeamSearchParams(
        beam_width=4, num_beam_groups=2, diversity_penalty=0.5, max_tokens=80, ignore_eos=True, n=2
    ),
    "best_of": SamplingParams(n=2, best_of=4, max_tokens=80, seed=2, ignore_eos=True, presence_penalty=0.2),
    "distinct": SamplingParams(n=4, distinct=True, max_tokens=80, seed=3, ignore_eos=True),
}


@pytest.mark.parametrize("kind", SEARCHES)
async def test_a_search_of_a_killed_engine_is_that_of_an_undisturbed_one(kind: str) -> None:
    prompt = tuple(load_tokenizer(CONFIG).encode(PROMPT))
    requests = [
        GenerateRequest(request_id=f"{kind} {number}", prompt=prompt, params=SEARCHES[kind]) for number in range(4)
    ]
    async with EngineProcess(CONFIG, BUILD_ENGINE, policy=RestartPolicy(first_delay_s=0.01)) as engine:
        await engine.wait_loaded()
        group = RequestGroup(engine, requests[:1])
        await group.begin()
        await group.end()
        (expected,) = group.events.values()
        for number, num_steps in enumerate((1, 12, 24), 1):
            group = RequestGroup(engine, requests[number : number + 1])
            await group.begin()
            await wait_for_search_steps(engine, 1, num_steps)
            os.kill(engine.pid or 0, signal.SIGKILL)
            await group.end()
            assert engine.num_restarts == number
            check_same(group.events[requests[number].request_id], expected)
