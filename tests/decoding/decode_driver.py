"""A runner and a scheduler in fifty lines: what drives a strategy in these tests.

It keeps branches as plain token lists, copies where the engine would fork pages, and refuses any action the contract
in `types/actions.py` does not allow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chatcache.types.actions import (
    BeamUpdate,
    BranchAction,
    Candidates,
    DrawSpec,
    Embed,
    Emit,
    Extend,
    Finish,
    Fork,
    Strategy,
    expand_actions,
)
from chatcache.types.events import TokenLogprob
from chatcache.types.plan import F32

Bools = NDArray[np.bool_]
Logits = Callable[[tuple[int, ...]], F32]


class TableModel:
    """Next-token logits that are a fixed random function of the tokens before."""

    def __init__(self, vocab_size: int, seed: int = 0, sharpness: float = 2.0) -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self._sharpness = sharpness
        self._known: dict[tuple[int, ...], F32] = {}

    def __call__(self, tokens: tuple[int, ...]) -> F32:
        if tokens not in self._known:
            noise = np.random.default_rng([self._seed, len(tokens), *tokens])
            self._known[tokens] = (noise.standard_normal(self.vocab_size) * self._sharpness).astype(np.float32)
        return self._known[tokens]


def log_softmax(logits: F32) -> F32:
    shifted = logits - logits.max()
    result: F32 = shifted - np.log(np.exp(shifted).sum(dtype=np.float32))
    return result


def edited(logits: F32, spec: DrawSpec) -> F32:
    """Apply a draw's edit as `sched.plan.LogitEdit` says."""
    if spec.edit is None:
        return logits
    ids, scale, add = spec.edit["ids"], spec.edit["scale"], spec.edit["add"]
    assert len(np.unique(ids)) == len(ids)
    result = logits.copy()
    result[ids] = np.where(result[ids] > 0, result[ids] / scale, result[ids] * scale) + add
    return result


def allowed(size: int, spec: DrawSpec) -> Bools:
    """Say which tokens a draw's mask leaves."""
    if spec.mask is None:
        return np.ones(size, bool)
    return np.unpackbits(spec.mask.astype("<u4").view(np.uint8), bitorder="little")[:size].astype(bool)


def gumbel(seed: int, lane: int, position: int, size: int) -> F32:
    return np.random.default_rng([seed, lane, position]).gumbel(size=size).astype(np.float32)


def top_alternatives(logits: F32, num_top: int) -> tuple[tuple[int, float], ...]:
    raw = log_softmax(logits)
    return tuple((int(t), float(raw[t])) for t in np.argsort(-raw, kind="stable")[:num_top])


def draw(logits: F32, spec: DrawSpec, position: int) -> Candidates:
    """Draw as `sched.plan.Draws` says (top_k, top_p and min_p are the runner's and not simulated)."""
    if spec.width > 1 and spec.temperature > 0:
        left = np.where(allowed(len(logits), spec), edited(logits, spec), np.float32(-np.inf))
        scores = log_softmax((left / np.float32(spec.temperature)).astype(np.float32))
        perturbed = scores + gumbel(spec.seed, spec.lane, position, len(scores))
        order = [t for t in np.argsort(-perturbed, kind="stable")[: spec.width].tolist() if scores[t] > -np.inf]
        top = top_alternatives(logits, spec.num_top)
        raw = log_softmax(logits)
        lists = (scores[order].tolist(), perturbed[order].tolist(), raw[order].tolist())
        return Candidates(tuple(order), tuple(lists[0]), top, tuple(lists[1]), tuple(lists[2]))
    raw, top = log_softmax(logits), top_alternatives(logits, spec.num_top)
    changed = edited(logits, spec)
    if spec.width > 1:
        scores = edited(raw, spec)
        may = allowed(len(logits), spec)
        best = [token for token in np.argsort(-scores, kind="stable").tolist() if may[token]][: spec.width]
        best = [token for token in best if scores[token] > -np.inf]
        raw_scores = () if spec.edit is None else tuple(raw[best].tolist())
        return Candidates(tuple(best), tuple(scores[best].tolist()), top, raw_logprobs=raw_scores)
    changed = np.where(allowed(len(logits), spec), changed, np.float32(-np.inf))
    assert changed.max() > -np.inf
    if spec.temperature == 0:
        token = int(changed.argmax())
    else:
        noise = gumbel(spec.seed, spec.lane, position, len(changed))
        token = int((changed / spec.temperature + noise).argmax())
    return Candidates((token,), (float(raw[token]),), top)


@dataclass
class Outcome:
    """One candidate as the caller saw it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    done: Finish | None = None


@dataclass
class Run:
    """`pieces`: how many tokens of each candidate had been emitted after each step."""

    outcomes: dict[int, Outcome]
    num_steps: int
    most_alive: int
    grown: list[BeamUpdate]
    pieces: list[dict[int, int]]


def run(strategy: Strategy, prompt: Sequence[int], logits: Logits, *, shuffle: random.Random | None = None) -> Run:
    """Drive a strategy to its end. `shuffle` lets branches progress unevenly where the strategy allows it."""
    branches: dict[int, tuple[int, ...]] = {0: tuple(prompt)}
    outcomes: dict[int, Outcome] = {}
    grown: list[BeamUpdate] = []
    pieces: list[dict[int, int]] = []
    num_steps, most_alive, finished = 0, 1, False
    while not finished:
        num_steps += 1
        assert num_steps < 10_000
        picked = list(branches)
        if shuffle is not None and not strategy.lockstep:
            picked = shuffle.sample(picked, shuffle.randint(1, len(picked)))
        drawn = {}
        for branch in picked:
            specs = strategy.draws(branch)
            assert repr(specs) == repr(strategy.draws(branch))  # a query
            tokens = branches[branch]
            drawn[branch] = tuple(draw(logits(tokens), spec, len(tokens)) for spec in specs)
        advance = strategy.advance(drawn)
        most_alive = max(most_alive, _apply(branches, set(picked), advance.actions, strategy.max_branches))
        for output in advance.outputs:
            assert not isinstance(output, Embed)
            if isinstance(output, BeamUpdate):
                grown.append(output)
                continue
            outcome = outcomes.setdefault(output.index, Outcome())
            assert outcome.done is None
            if isinstance(output, Emit):
                outcome.tokens += output.token_ids
                outcome.logprobs += output.logprobs
            else:
                outcome.done = output
        finished = advance.finished
        pieces.append({index: len(outcome.tokens) for index, outcome in outcomes.items()})
    assert not branches
    assert all(outcome.done is not None for outcome in outcomes.values())
    return Run(outcomes, num_steps, most_alive, grown, pieces)


def _apply(
    branches: dict[int, tuple[int, ...]],
    drawn: set[int],
    actions: Sequence[BranchAction],
    max_branches: int,
) -> int:
    """Apply actions to token lists and check the contract; return the most branches alive at any moment."""
    settled: set[int] = set()
    most_alive = 0
    for action in expand_actions(actions):
        if isinstance(action, Fork):
            assert action.parent in drawn and action.parent not in settled
            assert action.child not in branches
            branches[action.child] = (*branches[action.parent], action.token)
        else:
            assert action.branch in drawn and action.branch not in settled
            settled.add(action.branch)
            if isinstance(action, Extend):
                branches[action.branch] = (*branches[action.branch], action.token)
            else:
                del branches[action.branch]
        most_alive = max(most_alive, len(branches))
    assert settled == drawn  # every drawn branch gets exactly one action
    assert most_alive <= max_branches
    return most_alive
