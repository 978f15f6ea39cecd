"""Step an engine and keep the times; prompts are random token ids, so nothing hits the cache by accident."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from chatcache.errors import EngineFault
from chatcache.types.events import Failed, Finished, Started, Tokens
from chatcache.types.model import ModelFacts
from chatcache.types.params import Params
from chatcache.types.request import GenerateRequest

if TYPE_CHECKING:
    from chatcache.engine.engine import Engine

Prompt = tuple[int, ...]


@dataclass(slots=True)
class Run:
    """Times of one batch from submit to end. `decode_s` are the steps after every prompt was computed.

    `first_token_s` by request, from submit; `num_decoded` counts the tokens told in `decode_s`.
    """

    total_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    num_decoded: int = 0
    num_output_tokens: int = 0
    peak_pages: int = 0

    @property
    def prefill_s(self) -> float:
        """Until the last prompt was computed."""
        return max(self.first_token_s)

    @property
    def step_s(self) -> float:
        """Median decode step."""
        return float(np.median(self.decode_s))

    @property
    def decode_tokens_per_s(self) -> float:
        return self.num_decoded / sum(self.decode_s)


class Driver:
    """Runs batches through an idle engine."""

    def __init__(self, engine: Engine, facts: ModelFacts, seed: int = 0) -> None:
        self.engine = engine
        self.facts = facts
        self._random = np.random.default_rng(seed)
        self._numbers = itertools.count()

    def prompt(self, num_tokens: int) -> Prompt:
        """A prompt nobody has seen."""
        return tuple(self._random.integers(0, self.facts.vocab_size, num_tokens).tolist())

    def run(self, prompts: list[Prompt], params: Params) -> Run:
        """Submit all at once and step to the end.

        Raises: EngineFault if a request failed.
        """
        run = Run()
        waiting: set[str] = set()
        start = time.perf_counter()
        for prompt in prompts:
            request = GenerateRequest(request_id=f"bench-{next(self._numbers)}", prompt=prompt, params=params)
            self.engine.add(request)
            waiting.add(request.request_id)
        while self.engine.has_work():
            self._step(run, waiting, start)
        run.total_s = time.perf_counter() - start
        return run

    def _step(self, run: Run, waiting: set[str], start: float) -> None:
        decoding, begin = not waiting, time.perf_counter()
        events = self.engine.step()
        now = time.perf_counter()
        num_tokens = sum(len(event.token_ids) for event in events if isinstance(event, Tokens))
        if decoding:
            run.decode_s.append(now - begin)
            run.num_decoded += num_tokens
        run.peak_pages = max(run.peak_pages, self.engine.health().num_pages_in_use)
        for event in events:
            if isinstance(event, Started):
                waiting.discard(event.request_id)
                run.first_token_s.append(now - start)
                run.num_cached.append(event.num_cached_tokens)
            elif isinstance(event, Finished):
                run.num_output_tokens += event.num_output_tokens
            elif isinstance(event, Failed):
                raise EngineFault(event.message, code=event.code)
