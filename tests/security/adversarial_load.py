"""LoadRun eight reference requests among adversarial requests and compare their results bit by bit.

The reference requests first run alone. A mask, seed, penalty or page that reaches the wrong row changes their results.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from chatcache.engine.engine import Engine
from chatcache.errors import InvalidRequestError
from chatcache.types.events import CandidateDone, EngineEvent, Failed, Finished, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams, StructuredOutputs
from tests.security.adversarial_requests import Adversary

NUM_REFERENCES = 8
MAX_WAITING = 30

Result = list[tuple[object, ...]]


@dataclass
class LoadResult:
    """Counts of a run: refusals and failures by code, and completed reference requests."""

    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    num_finished: int = 0
    num_references: int = 0


def reference_requests() -> list[GenerateRequest]:
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
        GenerateRequest(
            request_id=f"reference{i}", prompt=tuple(range(i + 1, i + 30)), params=kind, namespace="reference"
        )
        for i, kind in enumerate(kinds)
    ]


def result_of(events: list[EngineEvent]) -> Result:
    """Return the result of a request by candidate, without what depends on the state of the cache and on the load."""
    # A step may have no room for all candidates.
    ordered = sorted((e for e in events if isinstance(e, Tokens | CandidateDone)), key=lambda e: e.index)
    tokens: Result = [(e.index, e.token_ids, e.logprobs) for e in ordered if isinstance(e, Tokens)]
    ends: Result = [(e.index, e.finish_reason, e.stop_reason, e.score) for e in ordered if isinstance(e, CandidateDone)]
    return tokens + ends + [(type(events[-1]).__name__,)]


def run_alone(engine: Engine) -> dict[str, Result]:
    """LoadRun every reference request alone and return the results."""
    results: dict[str, Result] = {}
    for reference in reference_requests():
        events: list[EngineEvent] = []
        engine.add(reference)
        while engine.has_work():
            events += engine.step()
        results[reference.request_id] = result_of(events)
        assert isinstance(events[-1], Finished), events[-1]
    return results


class LoadRun:
    """One engine, `num_requests` adversarial requests, and reference requests as long as there are any."""

    def __init__(self, engine: Engine, adversary: Adversary, num_requests: int) -> None:
        self._engine = engine
        self._adversary = adversary
        self._num_left = num_requests
        self._expected = run_alone(engine)
        self._events: dict[str, list[EngineEvent]] = {}
        self._open: set[str] = set()
        self.result = LoadResult()

    def run(self) -> LoadResult:
        """Run all requests. Raises: AssertionError if a reference result differs or a request ends twice or never."""
        while self._num_left or self._engine.has_work():
            self._submit()
            for event in self._engine.step():
                self._handle(event)
        assert not self._open and not self._events, "a request never ended"
        assert self._engine.health().num_pages_in_use == 0
        self._engine.cache.check()
        assert self.result.num_references >= NUM_REFERENCES
        return self.result

    def _submit(self) -> None:
        for reference in reference_requests():
            if self._num_left and reference.request_id not in self._events:
                self._engine.add(reference)
                self._events[reference.request_id] = []
        while self._num_left and self._engine.health().num_waiting < MAX_WAITING:
            self._num_left -= 1
            request = self._adversary.request()
            try:
                self._engine.add(request)
            except InvalidRequestError as error:
                self.result.refused[error.code] += 1
            else:
                self._open.add(request.request_id)

    def _handle(self, event: EngineEvent) -> None:
        name, is_end = event.request_id, isinstance(event, Finished | Failed)
        if name in self._events:
            self._events[name].append(event)
            if is_end:
                result = result_of(self._events.pop(name))
                assert result == self._expected[name], f"{name} differs: {result} is not {self._expected[name]}"
                self.result.num_references += 1
        elif is_end:
            assert name in self._open, f"{name} ended twice"
            self._open.remove(name)
            if isinstance(event, Failed):
                assert event.status < 500, event
                self.result.failed[event.code] += 1
            else:
                self.result.num_finished += 1
