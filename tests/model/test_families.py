"""Every family in every situation of a server gives the tokens that `transformers.generate` gives, in float32.

Situations: cold; with every prefix cached, also of a second turn; after preemption by swap; after a fork inside an
answer; in one batch with other requests. Greedy search over 64 tokens and 4 beams over 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_struct

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.model.runner import Runner
from chatcache.types.events import CandidateDone, Failed, Started, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from tests.model.families import FAMILIES, RECURRENT, Sample

pytestmark = pytest.mark.slow

NUM_NEW = 64
PAGE = 8
SNAPSHOT_INTERVAL = 32  # tokens; the end of a prompt gets a snapshot, too, if it is half as many after the others
NUM_BEAMS = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
NUM_BEAM_TOKENS = 32
BEAMS = BeamSearchParams(beam_width=NUM_BEAMS, n=1, max_tokens=NUM_BEAM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=NUM_NEW, ignore_eos=True, n=3, seed=11, logprobs=0)

Get = Callable[[str], Sample]
Load = Callable[..., Runner]
Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """The result of one request: tokens and log-probabilities of its candidates, and how many tokens were cached."""

    tokens: dict[int, Prompt]
    logprobs: dict[int, tuple[float, ...]]
    num_cached: int


class Server:
    """A runner behind a strict engine that answers lists of requests, one batch each."""

    def __init__(self, runner: Runner, **settings: Any) -> None:
        config = EngineConfig(page_size=PAGE, max_num_batched_tokens=48, max_num_seqs=16, strict=True, **settings)
        self.engine = Engine(runner, runner.model_info, config)
        if (states := self.engine.scheduler.kv.states) is not None:
            states.interval = SNAPSHOT_INTERVAL
        self._count = 0

    def answer(self, *requests: tuple[Prompt, Params]) -> list[Outcome]:
        """Run requests in one batch to their ends."""
        names = []
        for prompt, params in requests:
            self._count += 1
            names.append(f"r{self._count}")
            self.engine.add(GenerateRequest(request_id=names[-1], prompt=prompt, params=params))
        events = []
        while self.engine.has_work():
            events += self.engine.step()
            self.engine.cache.check()
        assert not [event for event in events if isinstance(event, Failed)]
        outcomes = []
        for name in names:
            own = [event for event in events if isinstance(event, Tokens) and event.request_id == name]
            ends = [event for event in events if isinstance(event, CandidateDone) and event.request_id == name]
            started = next(event for event in events if isinstance(event, Started) and event.request_id == name)
            by_index = {end.index: [part for part in own if part.index == end.index] for end in ends}
            outcomes.append(
                Outcome(
                    {index: tuple(t for part in parts for t in part.token_ids) for index, parts in by_index.items()},
                    {
                        index: tuple(entry.logprob for part in parts for entry in part.logprobs)
                        for index, parts in by_index.items()
                    },
                    started.num_cached_tokens,
                )
            )
        return outcomes


class Oracle:
    """Answers of transformers, each computed once."""

    def __init__(self, sample: Sample) -> None:
        self._model = sample.oracle
        self._known: dict[tuple[Prompt, int, int], Prompt] = {}

    def greedy(self, prompt: Prompt) -> Prompt:
        return self._generate(prompt, 1, NUM_NEW)

    def beams(self, prompt: Prompt, num_new: int = NUM_BEAM_TOKENS) -> Prompt:
        return self._generate(prompt, NUM_BEAMS, num_new)

    def logprobs(self, prompt: Prompt, answer: Prompt) -> torch.Tensor:
        """Return the log-probability of each token of an answer."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)[range(len(answer)), list(answer)]

    def _generate(self, prompt: Prompt, num_beams: int, num_new: int) -> Prompt:
        key = prompt, num_beams, num_new
        if key not in self._known:
            ids = torch.tensor([prompt])
            options = {"max_new_tokens": num_new, "do_sample": False, "num_beams": num_beams, "pad_token_id": 0}
            with torch.inference_mode():
                out = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            self._known[key] = tuple(out[0, len(prompt) :].tolist())
        return self._known[key]


@dataclass(frozen=True)
class Case:
    """A family's model: how to load it, its prompts, and transformers' answers."""

    load: Callable[..., Runner]
    oracle: Oracle
    short: Prompt
    long: Prompt


NAMES = [
    pytest.param(name, marks=pytest.mark.long if name.startswith(("llama-", "qwen2-window", "phimoe")) else ())
    for name in (*FAMILIES, *RECURRENT)
]


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, sample_of: Get, load: Load) -> Case:
    sample = sample_of(request.param)

    def load_sample(**options: Any) -> Runner:
        return load(sample.folder, max_num_seqs=16, attention_backend="auto", **options)

    return Case(load_sample, Oracle(sample), sample.prompts[1], sample.prompts[2])


def check_sampled(case: Case, prompt: Prompt, found: Outcome) -> None:
    """Check that each candidate's log-probabilities are those of its own tokens."""
    assert len(found.tokens) == SAMPLED.n and len(set(found.tokens.values())) == SAMPLED.n
    for index, answer in found.tokens.items():
        torch.testing.assert_close(
            torch.tensor(found.logprobs[index]), case.oracle.logprobs(prompt, answer), atol=1e-3, rtol=1e-3
        )


def test_families_cold_and_cached_answers_equal_transformers(case: Case) -> None:
    server = Server(case.load())
    (cold,) = server.answer((case.long, GREEDY))
    (searched,) = server.answer((case.short, BEAMS))
    assert cold.num_cached == searched.num_cached == 0
    assert cold.tokens[0] == case.oracle.greedy(case.long)
    assert searched.tokens[0] == case.oracle.beams(case.short)
    for prompt, params, expected in (
        (case.long, GREEDY, case.oracle.greedy(case.long)),
        (case.short, BEAMS, case.oracle.beams(case.short)),
        (case.long, BEAMS, case.oracle.beams(case.long)),
    ):
        (found,) = server.answer((prompt, params))
        assert found.num_cached >= (len(prompt) - 1) // PAGE * PAGE
        assert found.tokens[0] == expected
    turn = case.long + cold.tokens[0] + (5, 6, 7)
    (second,) = server.answer((turn, GREEDY))
    assert second.num_cached >= len(turn) - 4 - PAGE, "the second turn computes little more than its new tokens"
    assert second.tokens[0] == case.oracle.greedy(turn)


def test_families_answers_after_a_swap_equal_transformers(case: Case) -> None:
    runner = case.load(preemption_mode="swap", swap_space_bytes=1 << 20)
    # fewer pages than the requests need together, whatever the states take of the memory
    runner._capacity = replace(runner.capacity(), num_pages=17, max_model_len=128)
    server = Server(runner, preemption_mode="swap")
    short_search = replace_struct(BEAMS, max_tokens=24)
    first, second, third = server.answer((case.long, GREEDY), (case.short, GREEDY), (case.short[:9], short_search))
    assert first.tokens[0] == case.oracle.greedy(case.long)
    assert second.tokens[0] == case.oracle.greedy(case.short)
    assert third.tokens[0] == case.oracle.beams(case.short[:9], 24)
    assert server.engine.health().num_swap_preemptions > 0


def test_families_forks_inside_an_answer_equal_transformers(case: Case) -> None:
    server = Server(case.load())
    (whole,) = server.answer((case.short, GREEDY))
    forks = [case.short + whole.tokens[0][:length] + (9,) for length in (1, 10, 29)]
    for fork, found in zip(forks, server.answer(*((fork, GREEDY) for fork in forks)), strict=True):
        assert found.num_cached >= len(case.short) // PAGE * PAGE
        assert found.tokens[0] == case.oracle.greedy(fork)
    (candidates,) = server.answer((forks[1], SAMPLED))
    check_sampled(case, forks[1], candidates)
    (searched,) = server.answer((forks[1], BEAMS))
    assert searched.tokens[0] == case.oracle.beams(forks[1])


def test_families_answers_in_a_mixed_batch_equal_transformers(case: Case) -> None:
    server = Server(case.load())
    penalised = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True, seed=3, repetition_penalty=1.3)
    first, second, third, _, alike = server.answer(
        (case.long, GREEDY),
        (case.short, BEAMS),
        (case.short[:11], SAMPLED),
        (case.long[:7], penalised),
        ((*case.long[:20], 3, 4), GREEDY),
    )
    assert first.tokens[0] == case.oracle.greedy(case.long)
    assert second.tokens[0] == case.oracle.beams(case.short)
    assert alike.tokens[0] == case.oracle.greedy((*case.long[:20], 3, 4))
    check_sampled(case, case.short[:11], third)
