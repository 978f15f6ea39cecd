"""The expected answer of a request, computed from plain lists without a scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chatcache.decoding.strategy import make_strategy
from chatcache.types.actions import (
    Advance,
    BranchAction,
    Candidates,
    DrawSpec,
    DroppedCandidate,
    Emit,
    Extend,
    Finish,
    Fork,
    Output,
    Release,
    expand_actions,
    pack_draws,
)
from chatcache.types.actions import Strategy as DecodeStrategy
from chatcache.types.events import CandidateDone, TokenLogprob, Tokens
from chatcache.types.plan import StepResult
from chatcache.types.request import GenerateRequest
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info, history_of
from tests.support.fake_sampling import log_softmax, top_candidates

VOCAB = 32
MODEL_INFO = fake_model_info(vocab_size=VOCAB)
WANDER = "wander"  # a namespace prefix that asks for the wandering strategy
NARROW = "wander narrow"  # for the one that draws a single token each time, and does not always take it


class RandomForks:
    """Strategy that forks and releases up to 7 branches as the sampled tokens decide.

    Children of released parents occur, too. A branch's id encodes its ancestors in base 4, so ids are unique and do not
    depend on the order of the draws.
    """

    max_branches = 7
    lockstep = False
    has_fixed_draws = True

    def __init__(self, seed: int, max_tokens: int, width: int = 3) -> None:
        self._width = width
        self._seed = seed
        self._max_tokens = max_tokens
        self._outputs: dict[int, tuple[int, ...]] = {0: ()}
        self._parents: set[int] = set()

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        return (DrawSpec(width=self._width, seed=self._seed),)

    def drop(self, index: int) -> DroppedCandidate | None:
        if index not in self._outputs:
            return None
        if len(self._outputs) == 1:
            return DroppedCandidate(is_last=True)
        del self._outputs[index]
        return DroppedCandidate(index)

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        actions: list[BranchAction] = []
        outputs: list[Output] = []
        for branch, (candidates,) in drawn.items():
            tokens = candidates.tokens
            if self._width == 1:
                tokens = tuple((tokens[0] * step + step // 2) % VOCAB for step in (1 + tokens[0] % 5 // 4, 3, 5))
            self._advance(branch, tokens, actions, outputs)
        return Advance(tuple(actions), tuple(outputs), finished=not self._outputs)

    def _advance(
        self, branch: int, tokens: tuple[int, ...], actions: list[BranchAction], outputs: list[Output]
    ) -> None:
        before = self._outputs[branch]
        whim = (sum(tokens) + len(before) + self._seed) % 8
        last = len(before) + 1 >= self._max_tokens
        grown = not last and branch < 4 and branch not in self._parents  # two generations, each branch forks once
        if grown and whim <= 2:
            self._parents.add(branch)
            for number in range(1, 3):
                child = branch * 4 + number
                actions.append(Fork(branch, child, tokens[number]))
                self._outputs[child] = (*before, tokens[number])
        if last or (grown and whim == 2) or whim == 7:
            actions.append(Release(branch))
            del self._outputs[branch]
            outputs += [Emit(branch, (*before, tokens[0])), Finish(branch, "stop")]
        else:
            actions.append(Extend(branch, tokens[0]))
            self._outputs[branch] = (*before, tokens[0])


def strategy_for(request: GenerateRequest, model_info: Any, **settings: Any) -> DecodeStrategy:
    """Create the strategy of a request; `wander` namespaces use RandomForks."""
    if request.namespace.startswith(WANDER):
        return RandomForks(settings["seed"], settings["max_tokens"], 1 if request.namespace == NARROW else 3)
    return make_strategy(request, model_info, **settings)


@dataclass
class Answer:
    """The output of one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    done: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    prompt: tuple[Any, ...] = ()
    failed: bool = False
    cancelled: bool = False

    def take(self, output: Output | Tokens | CandidateDone) -> None:
        if isinstance(output, Emit | Tokens):
            self.tokens.setdefault(output.index, []).extend(output.token_ids)
            self.logprobs.setdefault(output.index, []).extend(output.logprobs)
        elif isinstance(output, Finish | CandidateDone):
            self.done[output.index] = (output.finish_reason, output.stop_reason, output.score)

    def of(self, index: int) -> tuple[object, ...]:
        return self.tokens.get(index), self.logprobs.get(index), self.done[index]

    def begins_with(self, other: Answer) -> bool:
        """Whether `other` is a prefix of this answer."""
        return all(self.tokens.get(i, [])[: len(tokens)] == tokens for i, tokens in other.tokens.items())


def prompt_scores(request: GenerateRequest, runner: FakeRunner, *, hybrid: bool) -> tuple[TokenLogprob | None, ...]:
    """Compute the log-probability of every prompt token without pages."""
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return ()
    scores: list[TokenLogprob | None] = [None]
    for position, token in enumerate(request.prompt[1:], 1):
        logprobs = log_softmax(runner.logits(history_of(request.prompt[:position], hybrid=hybrid)))
        ids, values = top_candidates(logprobs, num_top)
        scores.append(TokenLogprob(float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))))
    return tuple(scores)


def expected_answer(request: GenerateRequest, *, seed: int = 0, hybrid: bool = False) -> Answer:
    """Compute the answer from plain lists of tokens: no pages, no states, no scheduler, no other requests."""
    runner = FakeRunner(fake_capacity(2), VOCAB)
    max_tokens = request.params.max_tokens or 16
    seed = getattr(request.params, "seed", None) or seed
    strategy = strategy_for(request, MODEL_INFO, seed=seed, max_tokens=max_tokens, token_bytes=None)
    branches = {0: list(request.prompt)}
    answer, finished = Answer(prompt=prompt_scores(request, runner, hybrid=hybrid)), False
    while not finished:
        drawn: dict[int, tuple[Candidates, ...]] = {}
        for branch, tokens in branches.items():
            specs = list(strategy.draws(branch))
            draws = pack_draws(specs, [0] * len(specs), [len(tokens)] * len(specs))
            result = runner.draw(draws, [history_of(tokens, hybrid=hybrid)], tokens[-1:])
            drawn[branch] = tuple(_candidates(result, draw, spec) for draw, spec in enumerate(specs))
        advance = strategy.advance(drawn)
        finished = advance.finished
        for action in expand_actions(advance.actions):
            if isinstance(action, Fork):
                branches[action.child] = [*branches[action.parent], action.token]
            elif isinstance(action, Extend):
                branches[action.branch].append(action.token)
            else:
                del branches[action.branch]
        for output in advance.outputs:
            answer.take(output)
    return answer


def _candidates(result: StepResult, draw: int, spec: DrawSpec) -> Candidates:
    """Return the cells of one draw of a result."""
    ids = [token for token in result.tokens[draw].tolist()[: spec.width] if token >= 0]
    top = zip(result.top_tokens[draw].tolist(), result.top_logprobs[draw].tolist(), strict=True)
    distinct = spec.width > 1 and spec.temperature > 0
    noisy = result.perturbed[draw].tolist() if distinct and result.perturbed is not None else []
    logprobs = result.logprobs[draw].tolist()[: len(ids)]
    raw = result.raw_logprobs[draw].tolist() if distinct and result.raw_logprobs is not None else []
    alternatives = tuple(top)[: spec.num_top]
    return Candidates(tuple(ids), tuple(logprobs), alternatives, tuple(noisy[: len(ids)]), tuple(raw[: len(ids)]))
