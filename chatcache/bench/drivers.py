"""Run batches through an engine or through transformers, and keep the times.

Prompts are random token ids, so no prompt finds another one's pages in the cache by accident.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from chatcache.errors import EngineError
from chatcache.types.events import EngineEvent, Failed, Finished, Started, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params
from chatcache.types.stats import ModelInfo

if TYPE_CHECKING:
    from chatcache.engine.engine import Engine

Prompt = tuple[int, ...]


@dataclass(slots=True)
class RunTimes:
    """Times of one batch from submission to end.

    `decode_s` are the steps after all prompts were computed.

    `first_token_s` has one time per request, from submission; `num_decoded` counts the tokens of `decode_s`.
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
        """Seconds until the last prompt was computed."""
        return max(self.first_token_s)

    @property
    def step_s(self) -> float:
        """Median decode step."""
        return float(np.median(self.decode_s))

    @property
    def decode_tokens_per_s(self) -> float:
        return self.num_decoded / sum(self.decode_s)


class Driver(Protocol):
    """What a benchmark needs of an engine."""

    @property
    def facts(self) -> ModelInfo: ...

    def prompt(self, num_tokens: int) -> Prompt:
        """Return a prompt that was not used before."""
        ...

    def run(self, prompts: list[Prompt], params: Params) -> RunTimes:
        """Run one batch to its end."""
        ...


class EngineDriver:
    """Runs batches through an idle engine."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self.facts: ModelInfo = engine.model_info
        self._random = np.random.default_rng(seed)
        self._numbers = itertools.count()

    def prompt(self, num_tokens: int) -> Prompt:
        """Return a prompt that was not used before."""
        return tuple(self._random.integers(0, self.facts.vocab_size, num_tokens).tolist())

    def run(self, prompts: list[Prompt], params: Params) -> RunTimes:
        """Submit all prompts at once and step to the end.

        Raises: EngineError if a request failed.
        """
        run = RunTimes()
        start = time.perf_counter()
        waiting = set(self.submit(prompts, params))
        while self.engine.has_work():
            decoding, begin = not waiting, time.perf_counter()
            events = self.step()
            now = time.perf_counter()
            if decoding:
                run.decode_s.append(now - begin)
                run.num_decoded += sum(len(event.token_ids) for event in events if isinstance(event, Tokens))
            run.peak_pages = max(run.peak_pages, self.engine.health().num_pages_in_use)
            for event in events:
                if isinstance(event, Started):
                    waiting.discard(event.request_id)
                    run.first_token_s.append(now - start)
                    run.num_cached.append(event.num_cached_tokens)
                elif isinstance(event, Finished):
                    run.num_output_tokens += event.num_output_tokens
        run.total_s = time.perf_counter() - start
        return run

    def submit(self, prompts: Sequence[Prompt], params: Params) -> list[str]:
        """Submit one request for each prompt and return their ids."""
        requests = [
            GenerateRequest(request_id=f"bench-{next(self._numbers)}", prompt=prompt, params=params)
            for prompt in prompts
        ]
        for request in requests:
            self.engine.add(request)
        return [request.request_id for request in requests]

    def step(self) -> Sequence[EngineEvent]:
        """Run one step.

        Raises: EngineError if a request failed.
        """
        events = self.engine.step()
        for event in events:
            if isinstance(event, Failed):
                raise EngineError(event.message, code=event.code)
        return events

    def start_decoding(self, prompts: Sequence[Prompt], params: Params) -> list[str]:
        """Submit the prompts and step until all of them are computed; return the request ids."""
        request_ids = self.submit(prompts, params)
        num_waiting = len(prompts)
        while num_waiting:
            num_waiting -= sum(isinstance(event, Started) for event in self.step())
        self.step()
        return request_ids

    def abort(self, request_ids: Sequence[str]) -> None:
        """Cancel the requests and step until the engine is idle."""
        for request_id in request_ids:
            self.engine.abort(request_id)
        while self.engine.has_work():
            self.step()

    def step_times_s(self, prompts: Sequence[Prompt], params: Params) -> list[float]:
        """Return the seconds of steps in which all branches decode, then cancel the requests."""
        request_ids = self.start_decoding(prompts, params)
        times, before = [], time.perf_counter()
        for _ in range(max((params.max_tokens or 1) - 4, 1)):
            self.step()
            times.append((now := time.perf_counter()) - before)
            before = now
        self.abort(request_ids)
        return times


class TransformersDriver:
    """Runs batches through transformers' `generate`.

    It has no pages (`peak_pages` stays 0), caches nothing between calls, and pads shorter prompts on the left.
    """

    def __init__(self, folder: Path, facts: ModelInfo, seed: int = 1) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()

        self.facts = facts
        dtype = getattr(torch, facts.dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self._model.to(facts.device).eval()
        self._random = np.random.default_rng(seed)

    def prompt(self, num_tokens: int) -> Prompt:
        """Return a prompt that was not used before."""
        return tuple(self._random.integers(0, self.facts.vocab_size, num_tokens).tolist())

    def run(self, prompts: list[Prompt], params: Params) -> RunTimes:
        """Generate for all prompts as one batch."""
        run, marks = RunTimes(), []
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        device = self.facts.device
        ids = torch.tensor([(0,) * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)], device=device)
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding], device=device)

        def mark(ids: torch.Tensor, scores: object, **rest: object) -> torch.Tensor:
            if ids.device.type == "cuda":
                torch.cuda.synchronize(ids.device)
            marks.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                stopping_criteria=[mark],
                pad_token_id=0,
                eos_token_id=None,
                **_generate_options(params),
            )
        run.total_s = time.perf_counter() - start
        num_steps, num_rows = out.shape[1] - longest, out.shape[0]
        run.first_token_s = [marks[0] - start] * len(prompts)
        run.num_cached = [0] * len(prompts)
        run.decode_s = np.diff(marks).tolist()
        run.num_decoded, run.num_output_tokens = num_rows * (num_steps - 1), num_rows * num_steps
        return run


def _generate_options(params: Params) -> dict[str, Any]:
    count = params.max_tokens
    length = {"max_new_tokens": count, "min_new_tokens": count}
    if isinstance(params, BeamSearchParams):
        width = params.beam_width
        return {**length, "num_beams": width, "num_return_sequences": width, "do_sample": False}
    if params.temperature == 0.0:
        return {**length, "do_sample": False}
    return {**length, "do_sample": True, "top_k": 0, "num_return_sequences": params.n}
