"""Diverse beam search as it is written down: whole vocabularies, outputs copied at each step, nothing shared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from chatcache.decoding.beam_search import BeamStrategy
from chatcache.decoding.stopping import StopRules
from chatcache.decoding.strategy import make_strategy
from chatcache.types.request import BeamSearchParams, GenerateRequest
from chatcache.types.stats import ModelInfo
from tests.decoding.decode_driver import Logits, Run, log_softmax, run
from tests.decoding.toy_grammar import ToyConstraint, ToyGrammar

PROMPT = (4, 2)
BYTES = tuple(bytes([0x61 + i]) for i in range(26))
Output = tuple[int, ...]


def beam_run(
    params: BeamSearchParams,
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
        return run(
            BeamStrategy(params, rules, prompt=PROMPT, vocab_size=vocab_size, constraint=constraint), PROMPT, logits
        )
    request = GenerateRequest(request_id="r", prompt=PROMPT, params=params)
    return run(make_strategy(request, model_info, seed=0, max_tokens=max_tokens, token_bytes=BYTES), PROMPT, logits)


@dataclass
class DenseGroup:
    beams: list[tuple[np.float32, Output]] = field(default_factory=lambda: [(np.float32(0), ())])
    kept: list[tuple[float, Output, str]] = field(default_factory=list)


class DenseBeams:
    """For each group all continuations, penalised, sorted, cut.

    `agreed`: after each step, how many leading tokens all live beams and all hypotheses that may be returned share.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        logits: Logits,
        *,
        vocab_size: int,
        eos: Output,
        max_tokens: int,
        grammar: ToyGrammar | None = None,
    ) -> None:
        self.params, self.logits, self.vocab_size = params, logits, vocab_size
        self.eos, self.max_tokens, self.grammar = eos, max_tokens, grammar
        self.width = params.beam_width // params.num_beam_groups
        self.groups = [DenseGroup() for _ in range(params.num_beam_groups)]
        self.agreed: list[int] = []

    def run(self) -> list[tuple[float, Output, str]]:
        for length in range(1, self.max_tokens + 1):
            crowd: Counter[int] = Counter()
            for group in self.groups:
                if group.beams:
                    crowd += self.step(group, length, crowd)
            live = [output for group in self.groups for _, output in group.beams]
            if not live:
                break
            self.agreed.append(num_common([*live, *(output for _, output, _ in self.best())]))
        return self.best()

    def best(self) -> list[tuple[float, Output, str]]:
        kept = [entry for group in self.groups for entry in group.kept]
        return sorted(kept, key=lambda entry: -entry[0])[: self.params.n or self.params.beam_width]

    def step(self, group: DenseGroup, length: int, crowd: Counter[int]) -> Counter[int]:
        lost = np.array([self.params.diversity_penalty * crowd[t] for t in range(self.vocab_size)], np.float32)
        grown: list[tuple[np.float32, Output]] = []
        for total, output in group.beams:
            raw = log_softmax(self.logits(PROMPT + output))
            for token in np.argsort(-raw, kind="stable").tolist():  # equal sums: the more likely token first
                if self.may_follow(output, token):
                    grown.append((np.float32(np.float32(raw[token] - lost[token]) + total), (*output, token)))
        grown.sort(key=lambda pair: -pair[0])
        grown = grown[: max(2, 1 + len(self.eos)) * self.width]
        ends = [self.end(output, length) for _, output in grown]
        found = list(zip(grown, ends, strict=True))[: self.width]
        group.kept += [(self.score(t, length), o, end) for (t, o), end in found if end]
        group.kept = sorted(group.kept, key=lambda entry: -entry[0])[: self.width]
        group.beams = [pair for pair, end in zip(grown, ends, strict=True) if not end][: self.width]
        chosen = Counter([o[-1] for _, o in group.beams] + [o[-1] for (_, o), end in found if end == "length"])
        if group.beams and self.over(group, length):
            group.beams = []
        return chosen

    def may_follow(self, output: Output, token: int) -> bool:
        if self.grammar is not None:
            return token in self.grammar.allowed(output, self.params.min_tokens)
        return len(output) >= self.params.min_tokens or token not in self.eos

    def end(self, output: Output, length: int) -> str:
        text = "".join(chr(0x61 + token) for token in output)
        stopped = length >= self.params.min_tokens and any(text.endswith(stop) for stop in self.params.stop)
        stopped |= output[-1] in self.eos or (self.grammar is not None and self.grammar.over(output))
        return "stop" if stopped else "length" if length == self.max_tokens else ""

    def over(self, group: DenseGroup, length: int) -> bool:
        if len(group.kept) < self.width:
            return False
        never = self.params.early_stopping == "never" and self.params.length_penalty > 0
        best = self.score(group.beams[0][0], self.max_tokens if never else length)
        return self.params.early_stopping is True or best <= group.kept[-1][0]

    def score(self, total: np.float32, length: int) -> float:
        return float(np.float32(float(total) / length**self.params.length_penalty))


def num_common(outputs: list[Output]) -> int:
    """Count the leading tokens that all outputs share."""
    return next((i for i, tokens in enumerate(zip(*outputs)) if len(set(tokens)) > 1), min(map(len, outputs)))  # noqa: B905


def check(
    params: BeamSearchParams,
    logits: Logits,
    *,
    vocab_size: int,
    eos: Output,
    max_tokens: int,
    grammar: ToyGrammar | None = None,
) -> Run:
    """Compare our search with the dense one, to the bit; return ours."""
    shape: dict[str, Any] = {"vocab_size": vocab_size, "eos": eos, "max_tokens": max_tokens, "grammar": grammar}
    want, got = DenseBeams(params, logits, **shape).run(), beam_run(params, logits, **shape)
    outcomes = list(got.outcomes.values())[: len(want)]
    ends = [outcome.done for outcome in outcomes]
    assert [tuple(outcome.tokens) for outcome in outcomes] == [output for _, output, _ in want]
    assert [end and end.score for end in ends] == [score for score, _, _ in want]
    assert [end and end.finish_reason for end in ends] == [reason for _, _, reason in want]
    for outcome in list(got.outcomes.values())[len(want) :]:  # there are no more outputs
        assert outcome.done and outcome.done.score == -1e9
        assert all(tuple(outcome.tokens) == output[: len(outcome.tokens)] for _, output, _ in want)
    return got
