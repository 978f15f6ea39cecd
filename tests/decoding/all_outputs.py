"""Every output of a toy model, perturbed from the top down: what distinct n-best finds without looking at them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from chatcache.decoding.stopping import StopRules
from chatcache.decoding.strategy import make_strategy
from chatcache.decoding.unique import DistinctStrategy, child_seed
from chatcache.types.actions import DrawSpec
from chatcache.types.plan import F32
from chatcache.types.request import GenerateRequest, SamplingParams
from chatcache.types.stats import ModelInfo
from tests.decoding.decode_driver import Logits, Run, draw, log_softmax, run
from tests.decoding.dense_beams import num_common
from tests.decoding.toy_grammar import ToyConstraint, ToyGrammar

PROMPT = (1, 0, 1)
BYTES = tuple(bytes([0x61 + i]) for i in range(26))
Output = tuple[int, ...]


def distinct_run(
    params: SamplingParams,
    logits: Logits,
    *,
    vocab_size: int,
    eos: Output,
    max_tokens: int,
    grammar: ToyGrammar | None = None,
) -> Run:
    """Run the strategy on a toy model."""
    model_info = ModelInfo(name="toy", digest="00", vocab_size=vocab_size, max_model_len=1000, eos_token_ids=eos)
    if grammar is not None:
        rules = StopRules.of(params, model_info, max_tokens=max_tokens, token_bytes=BYTES)
        constraint = cast(Any, ToyConstraint(grammar, params.min_tokens))
        shape = {"seed": params.seed or 0, "prompt": PROMPT, "vocab_size": vocab_size, "constraint": constraint}
        return run(DistinctStrategy(params, rules, **shape), PROMPT, logits)
    request = GenerateRequest(request_id="r", prompt=PROMPT, params=params)
    seed = params.seed or 0
    return run(make_strategy(request, model_info, seed=seed, max_tokens=max_tokens, token_bytes=BYTES), PROMPT, logits)


@dataclass(frozen=True)
class Perturbed:
    """A prefix, its log-probability, and its perturbed value given its parent's."""

    output: Output
    score: float
    value: float
    seed: int
    reason: str


class Everything:
    """All prefixes of a model, perturbed top down with the noise the strategy would draw; nothing is pruned."""

    def __init__(
        self,
        params: SamplingParams,
        logits: Logits,
        *,
        vocab_size: int,
        eos: Output,
        max_tokens: int,
        grammar: ToyGrammar | None = None,
    ) -> None:
        self.params, self.logits, self.vocab_size = params, logits, vocab_size
        self.eos, self.max_tokens, self.grammar = eos, max_tokens, grammar
        self.levels = [[Perturbed((), 0.0, 0.0, params.seed or 0, "")]]
        for _ in range(max_tokens):
            grown = [child for prefix in self.levels[-1] for child in self.children(prefix)]
            self.levels.append(sorted(grown, key=lambda prefix: -prefix.value))

    def children(self, prefix: Perturbed) -> Iterator[Perturbed]:
        if prefix.reason:
            yield prefix  # finished: it stays in the running as it is
            return
        logprobs = self.logprobs(prefix.output)
        spec = DrawSpec(width=self.vocab_size, seed=prefix.seed, temperature=1.0)
        drawn = draw(logprobs, spec, len(PROMPT) + len(prefix.output))
        perturbed = np.array(drawn.perturbed, np.longdouble) + np.longdouble(prefix.score)
        parent = np.longdouble(prefix.value)
        values = -np.log(np.exp(-parent) - np.exp(-perturbed.max()) + np.exp(-perturbed))
        for token, value in zip(drawn.tokens, values.tolist(), strict=True):
            output = (*prefix.output, token)
            score, seed = prefix.score + float(logprobs[token]), child_seed(prefix.seed, token)
            yield Perturbed(output, score, value, seed, self.end(output))

    def logprobs(self, output: Output) -> F32:
        """The distribution drawn from: edited, then divided by the temperature."""
        params, logits = self.params, self.logits(PROMPT + output).copy()
        for token in range(self.vocab_size):
            if token in PROMPT + output:
                scale = params.repetition_penalty
                logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
            count = output.count(token)
            logits[token] += (params.logit_bias or {}).get(token, 0.0)
            logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
            if self.grammar is not None and token not in self.grammar.allowed(output, params.min_tokens):
                logits[token] = -np.inf
            if self.grammar is None and len(output) < params.min_tokens and token in self.eos:
                logits[token] = -np.inf
        return log_softmax((logits / np.float32(params.temperature)).astype(np.float32))

    def end(self, output: Output) -> str:
        text = "".join(chr(0x61 + token) for token in output)
        stopped = len(output) >= self.params.min_tokens and any(text.endswith(stop) for stop in self.params.stop)
        stopped |= output[-1] in self.eos or (self.grammar is not None and self.grammar.over(output))
        return "stop" if stopped else "length" if len(output) == self.max_tokens else ""

    def emitted(self, length: int) -> list[int]:
        """How many tokens of each candidate are final after `length` steps: all of those at the top that are finished
        and of the first live one, what all have in common of the others."""
        best = self.levels[length][: self.params.n]
        first_live = next((i for i, prefix in enumerate(best) if not prefix.reason), len(best))
        shared = num_common([prefix.output for prefix in best])
        return [len(prefix.output) if i <= first_live else shared for i, prefix in enumerate(best)]


def check(
    params: SamplingParams,
    logits: Logits,
    *,
    vocab_size: int,
    eos: Output,
    max_tokens: int,
    grammar: ToyGrammar | None = None,
) -> None:
    """Compare candidates, scores, and what is emitted in each step, with all outputs."""
    shape: dict[str, Any] = {"vocab_size": vocab_size, "eos": eos, "max_tokens": max_tokens, "grammar": grammar}
    everything = Everything(params, logits, **shape)
    want = everything.levels[-1][: params.n]
    got = distinct_run(params, logits, **shape)
    outcomes = list(got.outcomes.values())
    assert list(got.outcomes) == list(range(params.n))
    assert [tuple(outcome.tokens) for outcome in outcomes[: len(want)]] == [prefix.output for prefix in want]
    for outcome, prefix in zip(outcomes, want, strict=False):
        assert outcome.done is not None
        assert outcome.done.score == pytest.approx(prefix.score, abs=1e-4)
        assert outcome.done.finish_reason == prefix.reason
    assert all(outcome.done and outcome.done.score == -1e9 for outcome in outcomes[len(want) :])
    for step, pieces in enumerate(got.pieces[:-1], start=1):
        assert [pieces.get(i, 0) for i in range(len(everything.emitted(step)))] == everything.emitted(step)
