"""Grammar-constrained decoding: the tokens that a branch may draw, and when it has to end.

The state of a branch is a `GrammarState`, forked with the branch and advanced by its tokens; preemption keeps it.

- EOS, and stop ids without text (special tokens), may be drawn exactly where the grammar may end.
- A candidate ends with finish reason "stop" when no token may follow; no EOS is needed. The same holds under
  `ignore_eos`, where EOS is never drawn.
- `min_tokens` excludes EOS and stop ids until then, unless nothing else is allowed: the grammar has priority.
- Stop strings, stop ids with text and `max_tokens` end a candidate anywhere; its text is then a prefix of a valid one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from chatcache.decoding.grammar.compiler import PARAM, CompiledGrammar, GrammarFuture, shorten_reason, to_bitmask
from chatcache.decoding.stopping import DEAD_END, StopProgress, StopResult, StopRules
from chatcache.errors import EngineError, InvalidRequestError
from chatcache.types.events import FINISH_LENGTH, FINISH_STOP
from chatcache.types.plan import NOTHING_LEFT, U32

# CPU and memory budget of a request's grammar: a base amount and an amount per token. The slowest step is free: the
# library limits the work of one step, and a pause of a virtual machine counts as CPU time of the thread that ran.
START_CPU_S = 0.25
TOKEN_CPU_S = 0.002
MAX_GROWTH_BYTES = 256 << 20
MAX_REBUILD_S = 0.1


class GrammarDeadEndError(InvalidRequestError):
    """The grammar requires more text, but no token of the vocabulary matches it, or (`is_banned`) all are banned."""

    code = "constraint_dead_end"

    def __init__(self, *, is_banned: bool = False) -> None:
        if is_banned:
            super().__init__(NOTHING_LEFT)
        else:
            super().__init__(f"{PARAM}: no token of this model continues the text that was generated", param=PARAM)


class _GrammarError(Exception):
    """The matcher is unusable because it, or a copy that shares its lexer, exceeded a limit."""


@dataclass(frozen=True, slots=True)
class _TokenPath:
    """Tokens consumed by a grammar state, as a linked list shared between forks."""

    token: int
    before: _TokenPath | None


class GrammarState:
    """State of one branch.

    `allowed_words`: bit mask of the next tokens; `is_accepting`: the text may end.
    """

    __slots__ = ("_compiled", "_constraint", "_matcher", "_path", "allowed_words", "is_accepting")

    def __init__(self, constraint: Constraint, compiled: CompiledGrammar, matcher: Any) -> None:
        self._constraint = constraint
        self._compiled = compiled
        self._matcher = matcher
        self._path: _TokenPath | None = None
        self.allowed_words: U32 = compiled.allowed_words
        self.is_accepting = compiled.is_accepting

    def fork(self) -> GrammarState:
        """Return an independent copy for a forked branch."""
        copied = GrammarState(self._constraint, self._compiled, self._matcher.deep_copy())
        copied._path, copied.allowed_words, copied.is_accepting = self._path, self.allowed_words, self.is_accepting
        return copied

    def consume(self, token: int) -> bool:
        """Advance by a token; return whether any token may follow.

        Raises: GrammarDeadEndError; InvalidRequestError for a grammar that takes too much time or memory.
        """
        self._path = _TokenPath(token, self._path)
        try:
            self._constraint.run_within_budget(self._compiled, lambda: self._step([token]))
        except _GrammarError as broken:
            self._rebuild(str(broken))
        if not self.allowed_words.any() and not self.is_accepting:
            raise GrammarDeadEndError
        return bool(self.allowed_words.any())

    def _step(self, tokens: list[int]) -> None:
        matcher = self._matcher
        consumed = matcher.consume_tokens(tokens)
        accepting = consumed and matcher.is_accepting()
        words = self._constraint.allowed_words(matcher) if consumed else None
        if words is None:
            raise _GrammarError(matcher.get_error())
        self.allowed_words, self.is_accepting = words, accepting

    def _rebuild(self, reason: str) -> None:
        """Repeat the consumed tokens in a freshly compiled matcher, at most once per request."""
        constraint = self._constraint
        compiled = constraint.recompile(self._compiled, reason)
        self._compiled, self._matcher = compiled, compiled.matcher.deep_copy()
        tokens: list[int] = []
        step = self._path
        while step is not None:
            tokens.append(step.token)
            step = step.before
        try:
            constraint.run_within_budget(compiled, lambda: self._step(tokens[::-1]))
        except _GrammarError as broken:
            raise _too_complex(str(broken)) from None


class Constraint:
    """Grammar of one request and the resources that its branches have used."""

    def __init__(self, grammar_future: GrammarFuture, rules: StopRules) -> None:
        self._future = grammar_future
        self._rules = rules
        ordinary = grammar_future.compiler.text_tokens
        self._terminal = to_bitmask(rules.terminal_ids, 32 * len(ordinary))
        self._ending: U32 = self._terminal & ~ordinary
        self._compiled: CompiledGrammar | None = None
        self._rebuilt = False
        self._cpu_s = 0.0
        self._slowest_step_s = 0.0
        self._growth_bytes = 0
        self._num_steps = 0

    def fork(self, grammar_state: GrammarState | None) -> GrammarState:
        """Return a copy of `grammar_state`, or the initial state if it is None.

        The grammar must have been compiled successfully.
        """
        return (
            grammar_state.fork()
            if grammar_state is not None
            else GrammarState(self, self._initial, self._initial.matcher.deep_copy())
        )

    def mask(self, grammar_state: GrammarState | None, num_tokens: int) -> U32:
        """Return the mask words of the tokens that may follow `num_tokens` tokens of a branch."""
        here = self._initial if grammar_state is None else grammar_state
        words: U32 = here.allowed_words | self._ending if here.is_accepting else here.allowed_words
        if num_tokens < self._rules.min_tokens:
            fewer: U32 = words & ~self._terminal
            words = fewer if fewer.any() else words
        return words

    @property
    def _initial(self) -> CompiledGrammar:
        if self._compiled is None:
            self._compiled = self._future.future.result()
        return self._compiled

    def allowed_words(self, matcher: Any) -> U32 | None:
        """Return the tokens that `matcher` allows next; None if it has failed."""
        return self._future.compiler.allowed_words(matcher)

    def run_within_budget(self, compiled: CompiledGrammar, walk: Any) -> None:
        """Run grammar work and charge its CPU time and memory to the request.

        The memory is the growth of the process, as far as this thread can have caused it.
        Raises: InvalidRequestError if the budget is exceeded; EngineError if the library fails.
        """
        compiler = self._future.compiler
        began, resident, faulted = time.thread_time(), compiler.resident_bytes(), compiler.faulted_bytes()
        try:
            walk()
        except (_GrammarError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the Rust library is a BaseException
            raise EngineError(f"{PARAM}: the grammar could not be followed") from error
        finally:
            self._num_steps += 1
            step_s = time.thread_time() - began
            self._cpu_s += step_s
            self._slowest_step_s = max(self._slowest_step_s, step_s)
            grown = min(compiler.resident_bytes() - resident, compiler.faulted_bytes() - faulted)
            if grown > 0:
                self._growth_bytes += grown
                compiler.record_growth(self._future.grammar, compiled, grown)
        self._check_budget()

    def _check_budget(self) -> None:
        charged_s = self._cpu_s - self._slowest_step_s
        if charged_s > START_CPU_S + TOKEN_CPU_S * self._num_steps:
            raise _too_complex(f"{charged_s:.1f} s of computing for {self._num_steps} tokens")
        if self._growth_bytes > MAX_GROWTH_BYTES:
            raise _too_complex(f"{self._growth_bytes >> 20} MiB of memory")

    def recompile(self, broken: CompiledGrammar, reason: str) -> CompiledGrammar:
        """Compile the grammar again after its matcher failed.

        Raises: InvalidRequestError if it was compiled again before, or if compiling takes too long.
        """
        self._future.compiler.discard(self._future.grammar, broken)
        if self._initial is broken:
            if self._rebuilt or broken.compile_s > MAX_REBUILD_S:
                raise _too_complex(reason)
            self._rebuilt = True
            self._compiled = self._future.compiler.compile(self._future.grammar)
        return self._initial


def advance_candidate(
    rules: StopRules, progress: StopProgress, token: int, grammar_state: GrammarState | None
) -> tuple[StopProgress, StopResult | None]:
    """Advance stop rules and grammar by a token.

    Return the new state and, at the end, the reason: DEAD_END where the grammar cannot be continued.

    Raises: the errors of `GrammarState.consume`, except dead ends.
    """
    progress, ended = rules.advance(progress, token)
    stopped = ended is not None and ended.finish_reason != FINISH_LENGTH
    if grammar_state is not None and not stopped:
        try:
            ended = ended if grammar_state.consume(token) else StopResult(FINISH_STOP)
        except GrammarDeadEndError:
            ended = DEAD_END
    return progress, ended


def _too_complex(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{PARAM}: following the grammar took too much: {shorten_reason(reason)}",
        param=PARAM,
        code="constraint_too_complex",
    )
