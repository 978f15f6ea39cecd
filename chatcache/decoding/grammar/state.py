"""Keep candidates within a grammar: which tokens a branch may draw, and when it has to end.

A branch's state is a `GrammarState`: forked with the branch, advanced by its tokens. Preemption does not touch it.

- EOS, and stop ids that are no text (special tokens), may be drawn exactly where the grammar may stop.
- A candidate ends (finish reason "stop") when nothing may follow; no EOS is drawn for that. So it does under
  `ignore_eos`, where EOS is never drawn.
- `min_tokens` takes away EOS and stop ids until then, unless nothing else is left: the grammar wins.
- Stop strings, stop ids that are text and `max_tokens` end a candidate wherever it is, its text then being a beginning
  of what the grammar allows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from chatcache.decoding.grammar.compiler import PARAM, Compiled, GrammarFuture, bits_of, one_line
from chatcache.decoding.stopping import Ended, StopRules, Trail
from chatcache.errors import EngineError, InvalidRequestError
from chatcache.types.events import FINISH_LENGTH, FINISH_STOP
from chatcache.types.plan import U32

# What a request's walk through its grammar may take: a start, and so much more for every token.
START_CPU_S = 0.25
TOKEN_CPU_S = 0.002
MAX_GROWTH_BYTES = 256 << 20
MAX_REBUILD_S = 0.1


class GrammarDeadEndError(InvalidRequestError):
    """The grammar goes on, but with text that no token of the vocabulary begins with."""

    code = "constraint_dead_end"


class _GrammarError(Exception):
    """A matcher is of no use any more: it, or a copy of it elsewhere, has hit a limit."""


@dataclass(frozen=True, slots=True)
class _Path:
    """The tokens a guide has taken."""

    token: int
    before: _Path | None


class GrammarState:
    """Where one branch is in the grammar. `words`: the tokens that may follow; `accepting`: it may stop."""

    __slots__ = ("_compiled", "_constraint", "_matcher", "_path", "accepting", "words")

    def __init__(self, constraint: Constraint, compiled: Compiled, matcher: Any) -> None:
        self._constraint = constraint
        self._compiled = compiled
        self._matcher = matcher
        self._path: _Path | None = None
        self.words: U32 = compiled.words
        self.accepting = compiled.accepting

    def fork(self) -> GrammarState:
        """Return a guide that goes its own way from here."""
        twin = GrammarState(self._constraint, self._compiled, self._matcher.deep_copy())
        twin._path, twin.words, twin.accepting = self._path, self.words, self.accepting
        return twin

    def consume(self, token: int) -> bool:
        """Take a token; say whether anything may follow it.

        Raises: GrammarDeadEndError; InvalidRequestError for a grammar that takes too much time or memory.
        """
        self._path = _Path(token, self._path)
        try:
            self._constraint.spend(self._compiled, lambda: self._step([token]))
        except _GrammarError as broken:
            self._start_over(str(broken))
        if not self.words.any() and not self.accepting:
            raise GrammarDeadEndError(
                f"{PARAM}: no token of this model continues the text that was generated", param=PARAM
            )
        return bool(self.words.any())

    def _step(self, tokens: list[int]) -> None:
        matcher = self._matcher
        consumed = matcher.consume_tokens(tokens)
        accepting = consumed and matcher.is_accepting()
        words = self._constraint.look(matcher) if consumed else None
        if words is None:
            raise _GrammarError(matcher.get_error())
        self.words, self.accepting = words, accepting

    def _start_over(self, reason: str) -> None:
        """Walk the path again in a matcher that shares nothing with others, once."""
        constraint = self._constraint
        compiled = constraint.rebuilt(self._compiled, reason)
        self._compiled, self._matcher = compiled, compiled.matcher.deep_copy()
        tokens: list[int] = []
        step = self._path
        while step is not None:
            tokens.append(step.token)
            step = step.before
        try:
            constraint.spend(compiled, lambda: self._step(tokens[::-1]))
        except _GrammarError as broken:
            raise _too_complex(str(broken)) from None


class Constraint:
    """The grammar of one request, and what all its branches together have spent on it."""

    def __init__(self, ticket: GrammarFuture, rules: StopRules) -> None:
        self._ticket = ticket
        self._rules = rules
        ordinary = ticket.grammars.ordinary
        self._terminal = bits_of(rules.terminal_ids, 32 * len(ordinary))
        self._ending: U32 = self._terminal & ~ordinary
        self._compiled: Compiled | None = None
        self._rebuilt = False
        self._cpu_s = 0.0
        self._growth_bytes = 0
        self._num_steps = 0

    def fork(self, guide: GrammarState | None) -> GrammarState:
        """Return a guide that goes on from where `guide` is, from the start if that is None.

        From here on the ticket must be ready, and no failure.
        """
        return guide.fork() if guide is not None else GrammarState(self, self._begin, self._begin.matcher.deep_copy())

    def mask(self, guide: GrammarState | None, num_tokens: int) -> U32:
        """Return what a branch, `num_tokens` long, may draw next, as the words of a `LogitMask`."""
        here = self._begin if guide is None else guide
        words: U32 = here.words | self._ending if here.accepting else here.words
        if num_tokens < self._rules.min_tokens:
            fewer: U32 = words & ~self._terminal
            words = fewer if fewer.any() else words
        return words

    @property
    def _begin(self) -> Compiled:
        if self._compiled is None:
            self._compiled = self._ticket.future.result()
        return self._compiled

    def look(self, matcher: Any) -> U32 | None:
        return self._ticket.grammars.look(matcher)

    def spend(self, compiled: Compiled, walk: Any) -> None:
        """Run a walk through the grammar and charge the request for it.

        Raises: InvalidRequestError once that is too much; EngineError if the library breaks.
        """
        memory = self._ticket.grammars.resident_bytes
        began, before = time.thread_time(), memory()
        try:
            walk()
        except (_GrammarError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise EngineError(f"{PARAM}: the grammar could not be followed") from error
        finally:
            self._num_steps += 1
            self._cpu_s += time.thread_time() - began
            grown = max(memory() - before, 0)
            if grown:
                self._growth_bytes += grown
                self._ticket.grammars.grown(self._ticket.grammar, compiled, grown)
        self._check_spending()

    def _check_spending(self) -> None:
        if self._cpu_s > START_CPU_S + TOKEN_CPU_S * self._num_steps:
            raise _too_complex(f"{self._cpu_s:.1f} s of computing for {self._num_steps} tokens")
        if self._growth_bytes > MAX_GROWTH_BYTES:
            raise _too_complex(f"{self._growth_bytes >> 20} MiB of memory")

    def rebuilt(self, broken: Compiled, reason: str) -> Compiled:
        """Return a fresh compilation in place of one that broke.

        Raises: InvalidRequestError if this has been tried, or would hold up others for long.
        """
        self._ticket.grammars.retire(self._ticket.grammar, broken)
        if self._begin is broken:
            if self._rebuilt or broken.compile_s > MAX_REBUILD_S:
                raise _too_complex(reason)
            self._rebuilt = True
            self._compiled = self._ticket.grammars.compile(self._ticket.grammar)
        return self._begin


def follow(rules: StopRules, trail: Trail, token: int, guide: GrammarState | None) -> tuple[Trail, Ended | None]:
    """Let stop rules and grammar, if there is one, take a token: the trail after it, and why the candidate ends.

    Raises: what `GrammarState.consume` raises.
    """
    trail, ended = rules.follow(trail, token)
    stopped = ended is not None and ended.finish_reason != FINISH_LENGTH
    if guide is not None and not stopped and not guide.consume(token):
        ended = Ended(FINISH_STOP)
    return trail, ended


def _too_complex(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{PARAM}: following the grammar took too much: {one_line(reason)}",
        param=PARAM,
        code="constraint_too_complex",
    )
