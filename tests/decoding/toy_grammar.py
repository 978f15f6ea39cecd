"""A grammar small enough to enumerate: a random automaton over token ids, and the constraint that keeps to it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from chatcache.types.plan import U32

Output = tuple[int, ...]


@dataclass(frozen=True)
class ToyGrammar:
    """Ordinary tokens lead from state to state; `eos` may be drawn in accepting states. No state is a dead end."""

    vocab_size: int
    eos: Output
    seed: int
    num_states: int = 6
    _next: list[dict[int, int]] = field(default_factory=list)
    _accepting: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        ordinary = [token for token in range(self.vocab_size) if token not in self.eos]
        for state in range(self.num_states):
            tokens = rng.sample(
                ordinary, rng.choice([0, 0, 1, 2, len(ordinary), len(ordinary)]) if state else len(ordinary)
            )
            self._next.append({token: rng.randrange(self.num_states) for token in tokens})
            if not tokens or rng.random() < 0.3:
                self._accepting.add(state)

    def state(self, output: Output) -> int:
        state = 0
        for token in output:
            state = self._next[state][token]
        return state

    def allowed(self, output: Output, min_tokens: int) -> set[int]:
        """The tokens that may follow: EOS only from `min_tokens` on, unless nothing else is left."""
        state = self.state(output)
        every = set(self._next[state]) | (set(self.eos) if state in self._accepting else set())
        return (every - set(self.eos)) or every if len(output) < min_tokens else every

    def over(self, output: Output) -> bool:
        """Whether nothing may follow an output without EOS."""
        return not self._next[self.state(output)]


class ToyGuide:
    def __init__(self, grammar: ToyGrammar, output: Output = ()) -> None:
        self.grammar = grammar
        self.output = output

    def consume(self, token: int) -> bool:
        self.output = (*self.output, token)
        return not self.grammar.over(self.output)


class ToyConstraint:
    """Stands in for `decode.constraint.Constraint`; shares no state between branches but by `fork`."""

    def __init__(self, grammar: ToyGrammar, min_tokens: int) -> None:
        self.grammar = grammar
        self.min_tokens = min_tokens

    def fork(self, guide: ToyGuide | None) -> ToyGuide:
        return ToyGuide(self.grammar, guide.output if guide is not None else ())

    def mask(self, guide: ToyGuide | None, num_tokens: int) -> U32:
        output = guide.output if guide is not None else ()
        assert len(output) == num_tokens
        words = np.zeros(-(-self.grammar.vocab_size // 32), np.uint32)
        for token in self.grammar.allowed(output, self.min_tokens):
            words[token // 32] |= np.uint32(1 << token % 32)
        return words
