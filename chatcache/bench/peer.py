"""transformers' `generate` behind the same few methods as our driver: the same measures then time both.

What it cannot do it does its own way: no pages (`peak_pages` stays 0), nothing cached between calls, and prompts of
different lengths padded on the left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chatcache.bench.driver import Prompt, Run
from chatcache.bench.report import Figure, compared
from chatcache.types.model import ModelFacts
from chatcache.types.params import BeamSearchParams, Params

PEERS = ("transformers",)
COMPARABLE = ("latency", "throughput", "beam")  # the measures that need nothing but `prompt`, `run` and `facts`


class TransformersDriver:
    """One model of transformers on the CPU threads torch has. Satisfies `measures.Driving`."""

    def __init__(self, folder: Path, facts: ModelFacts, seed: int = 1) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()

        self.facts = facts
        dtype = getattr(torch, facts.dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self._model.to(facts.device).eval()
        self._random = np.random.default_rng(seed)

    def prompt(self, num_tokens: int) -> Prompt:
        """A prompt nobody has seen."""
        return tuple(self._random.integers(0, self.facts.vocab_size, num_tokens).tolist())

    def run(self, prompts: list[Prompt], params: Params) -> Run:
        """Generate for all prompts as one batch."""
        run, marks = Run(), []
        most = max(map(len, prompts))
        ids = torch.tensor([(0,) * (most - len(each)) + each for each in prompts], device=self.facts.device)
        mask = torch.tensor([[0] * (most - len(each)) + [1] * len(each) for each in prompts], device=self.facts.device)

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
                **_options(params),
            )
        run.total_s = time.perf_counter() - start
        num_steps, num_rows = out.shape[1] - most, out.shape[0]
        run.first_token_s = [marks[0] - start] * len(prompts)
        run.num_cached = [0] * len(prompts)
        run.decode_s = np.diff(marks).tolist()
        run.num_decoded, run.num_output_tokens = num_rows * (num_steps - 1), num_rows * num_steps
        return run


def beside(ours: Sequence[Figure], theirs: Sequence[Figure], name: str) -> list[Figure]:
    """Return our figures over the peer's, for those that the peer has too: more than 1 is faster where speed is meant,
    slower where time is."""
    other = {figure.name: figure for figure in theirs if figure.unit != "pages"}
    return [
        compared(each.name, each.value, each.unit, other[each.name].value, _said(each, name))
        for each in ours
        if each.name in other
    ]


def _said(figure: Figure, name: str) -> str:
    return name if figure.unit.endswith("/s") else f"{name} (less is better)"


def _options(params: Params) -> dict[str, Any]:
    count = params.max_tokens
    length = {"max_new_tokens": count, "min_new_tokens": count}
    if isinstance(params, BeamSearchParams):
        width = params.beam_width
        return {**length, "num_beams": width, "num_return_sequences": width, "do_sample": False}
    if params.temperature == 0.0:
        return {**length, "do_sample": False}
    return {**length, "do_sample": True, "top_k": 0, "num_return_sequences": params.n}
