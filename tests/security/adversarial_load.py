"""Eight canaries amid a crowd of hostile requests: each must say, to the bit, what it says alone.

So a mask, a seed, a penalty or a page that reaches the wrong row shows, whoever it came from.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from chatcache.engine.engine import Engine
from chatcache.errors import InvalidRequestError
from chatcache.types.events import CandidateDone, EngineEvent, Failed, Finished, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams, StructuredOutputs
from tests.security.adversarial_requests import Adversary

NUM_CANARIES = 8
MAX_WAITING = 30
NO_TOKEN = "no token is allowed"  # of a vocabulary that consists of stop tokens

Heard = list[tuple[object, ...]]


@dataclass
class Crowd:
    """How a run went: refusals and failures by code, and how often a canary came to its end."""

    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    num_finished: int = 0
    num_canaries: int = 0


def canaries() -> list[GenerateRequest]:
    kinds: list[Params] = [
        SamplingParams(max_tokens=24, seed=4, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=0.0, frequency_penalty=0.5, ignore_eos=True),
        SamplingParams(n=3, max_tokens=20, seed=5, top_p=0.8, ignore_eos=True),
        BeamSearchParams(beam_width=3, max_tokens=20, logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=12, seed=6, logit_bias={7: 5.0, 9: -100.0}, prompt_logprobs=1),
        SamplingParams(n=2, max_tokens=12, seed=7, distinct=True, logprobs=0),
        SamplingParams(max_tokens=20, seed=8, repetition_penalty=1.3, presence_penalty=0.5, min_p=0.05),
        SamplingParams(max_tokens=12, seed=9, structured_outputs=StructuredOutputs(regex="[a-z]{1,9}!")),
    ]
    return [
        GenerateRequest(request_id=f"canary{i}", prompt=tuple(range(i + 1, i + 30)), params=kind, namespace="canary")
        for i, kind in enumerate(kinds)
    ]


def heard(events: list[EngineEvent]) -> Heard:
    """All that a request was told, but for what depends on what is cached."""
    tokens: Heard = [(e.index, e.token_ids, e.logprobs) for e in events if isinstance(e, Tokens)]
    ends: Heard = [(e.index, e.finish_reason, e.stop_reason, e.score) for e in events if isinstance(e, CandidateDone)]
    return tokens + ends + [(type(events[-1]).__name__,)]


def alone(engine: Engine) -> dict[str, Heard]:
    """Run every canary by itself."""
    said: dict[str, Heard] = {}
    for canary in canaries():
        events: list[EngineEvent] = []
        engine.add(canary)
        while engine.has_work():
            events += engine.step()
        said[canary.request_id] = heard(events)
        assert isinstance(events[-1], Finished), events[-1]
    return said


class Run:
    """One engine, a crowd of `num_requests`, and canaries as long as there is one."""

    def __init__(self, engine: Engine, adversary: Adversary, num_requests: int) -> None:
        self._engine = engine
        self._adversary = adversary
        self._num_left = num_requests
        self._expected = alone(engine)
        self._lives: dict[str, list[EngineEvent]] = {}
        self._open: set[str] = set()
        self.crowd = Crowd()

    def play(self) -> Crowd:
        """Run it. Raises: AssertionError for a canary that was disturbed or a request that ended twice or never."""
        while self._num_left or self._engine.has_work():
            self._let_in()
            for event in self._engine.step():
                self._take(event)
        assert not self._open and not self._lives, "a request never ended"
        assert self._engine.health().num_pages_in_use == 0
        self._engine.cache.check()
        assert self.crowd.num_canaries >= NUM_CANARIES
        return self.crowd

    def _let_in(self) -> None:
        for canary in canaries():
            if self._num_left and canary.request_id not in self._lives:
                self._engine.add(canary)
                self._lives[canary.request_id] = []
        while self._num_left and self._engine.health().num_waiting < MAX_WAITING:
            self._num_left -= 1
            request = self._adversary.request()
            try:
                self._engine.add(request)
            except InvalidRequestError as error:
                self.crowd.refused[error.code] += 1
            else:
                self._open.add(request.request_id)

    def _take(self, event: EngineEvent) -> None:
        name, is_end = event.request_id, isinstance(event, Finished | Failed)
        if name in self._lives:
            self._lives[name].append(event)
            if is_end:
                told = heard(self._lives.pop(name))
                assert told == self._expected[name], f"{name} was disturbed: {told} is not {self._expected[name]}"
                self.crowd.num_canaries += 1
        elif is_end:
            assert name in self._open, f"{name} ended twice"
            self._open.remove(name)
            if isinstance(event, Failed):
                assert event.status < 500 or event.message == NO_TOKEN, event
                self.crowd.failed[event.code] += 1
            else:
                self.crowd.num_finished += 1
