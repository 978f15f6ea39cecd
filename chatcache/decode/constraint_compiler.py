"""Compiled grammars of one engine: made beside the engine's loop, checked before, remembered a while.

A grammar is first tried in the checker's child process, where time, memory and stack are bounded; then compiled in this
process in a thread of its own, without the interpreter's lock. Until that is done its request waits for it, nobody
else does. llguidance is imported when somebody asks for it.

llguidance shares what it learns of a grammar (its lexer's states) among all copies of a matcher, and shares its
failures too. So a compiled grammar that failed, or has grown large, is not given to new requests.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from chatcache.decode.constraint_checker import GrammarChecker
from chatcache.decode.constraint_grammar import PARAM, lark_of
from chatcache.decode.constraint_queue import TurnQueue
from chatcache.errors import InvalidRequest
from chatcache.sched.plan import U32
from chatcache.types.model import ModelFacts
from chatcache.types.params import StructuredOutputs

# What one step through a grammar may cost (14,000 units of fuel a ms), and a whole grammar.
LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
MAX_GRAMMARS = 64
MAX_GROWTH_BYTES = 256 << 20  # of all remembered grammars together, while they are used
MAX_REASON_CHARS = 300
DEAD_END = "NoExtension"  # how the library's message begins where no token fits
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_STATE = re.compile(r"<(?:non-verbose/|backtrace|state)>")
_LISTING = re.compile(r"\s*(\d+ \||\^+\s*$)")  # a line of the grammar, or the mark under one


@dataclass(slots=True, eq=False)
class Compiled:
    """A grammar at its start. `matcher` is only ever copied; `words` are the tokens it allows first."""

    matcher: Any
    words: U32
    accepting: bool
    compile_s: float
    growth_bytes: int = 0


class Grammars:
    """Compiles and remembers. Used from the engine's thread; the thread within is its own affair.

    `token_bytes[id]` is what a token adds to the text; `special_ids` are never part of it.
    """

    def __init__(
        self, token_bytes: Sequence[bytes] | None, facts: ModelFacts, special_ids: Collection[int] = ()
    ) -> None:
        self._token_bytes = token_bytes
        self._facts = facts
        self._special_ids = frozenset(special_ids) | frozenset(facts.eos_token_ids)
        self._cache: OrderedDict[str, Future[Compiled]] = OrderedDict()
        self._growth_bytes = 0
        self._library: Any = None
        self._tokenizer: Any = None
        self._queue: TurnQueue[Compiled] | None = None
        self._checker = GrammarChecker(LIMITS)
        self._statm = _open_statm()
        if self._statm >= 0:
            weakref.finalize(self, os.close, self._statm)
        self._news = threading.Event()  # set whenever a compile is over

    @cached_property
    def ordinary(self) -> U32:
        """The tokens that are text, as a mask's words."""
        pieces = enumerate(self._token_bytes or ())
        text_ids = [token for token, piece in pieces if piece and token not in self._special_ids]
        return bits_of(text_ids, self._facts.vocab_size)

    @cached_property
    def allowed(self) -> U32:
        """All that a grammar can ever allow: text, and special tokens that it names."""
        ends = set(self._facts.eos_token_ids)
        named = bits_of([token for token in self._special_ids if token not in ends], self._facts.vocab_size)
        return self.ordinary | named

    def start(self, outputs: StructuredOutputs, namespace: str = "") -> Ticket:
        """Begin to compile, or find it done. Namespaces take turns.

        Raises: InvalidRequest for what can be told at once, or where llguidance or a tokenizer is missing.
        """
        grammar = lark_of(outputs)
        if self._token_bytes is None:
            raise InvalidRequest(f"{PARAM} need a model with a tokenizer", param=PARAM)
        if not self._has_library():
            raise InvalidRequest(
                f"{PARAM} need the package llguidance, which is not installed on this server", param=PARAM
            )
        future = self._cache.get(grammar)
        if future is None or (future.done() and future.exception() is not None):
            self._queue = self._queue or TurnQueue("chatcache-grammar")
            future = self._queue.submit(namespace, partial(self._check_and_compile, grammar))
            news = self._news  # not self: what is remembered must not hold who remembers
            future.add_done_callback(lambda _: news.set())
            self._cache[grammar] = future
        self._cache.move_to_end(grammar)
        while len(self._cache) > MAX_GRAMMARS:
            self._drop(next(iter(self._cache)))
        return Ticket(self, grammar, future)

    def prepare(self) -> None:
        """Learn the vocabulary now, if that is possible: it takes the interpreter's lock for up to a second, which
        would hold up whoever decodes while the first constrained request comes in."""
        if self._token_bytes is not None and self._has_library():
            self._learn_vocabulary()

    def wait(self, timeout_s: float) -> None:
        """Wait until a compile is over, or was since the last call."""
        self._news.wait(timeout_s)
        self._news.clear()

    def compile(self, grammar: str) -> Compiled:
        """Compile a grammar that was found harmless.

        Raises: InvalidRequest with the library's reason.
        """
        began = time.perf_counter()
        limits = self._library.LLParserLimits(**LIMITS)
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        first = matcher.deep_copy()
        words, accepting = self.look(first), matcher.is_accepting()
        if words is None:
            raise _refusal(first.get_error())
        if not words.any():
            what = (
                "nothing but the empty text matches" if accepting else "no token of this model begins a text that does"
            )
            raise InvalidRequest(f"{PARAM}: {what}", param=PARAM)
        return Compiled(matcher, words, accepting, time.perf_counter() - began)

    def look(self, matcher: Any) -> U32 | None:
        """Return the tokens that `matcher` allows next (none at a dead end), None if it has failed."""
        words = np.zeros(-(-self._tokenizer.vocab_size // 32), np.uint32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            return words[: len(self.ordinary)] * 0 if matcher.get_error().startswith(DEAD_END) else None
        return words[: len(self.ordinary)] & self.allowed

    def resident_bytes(self) -> int:
        """Return what memory this process has now; always 0 where the system does not say."""
        return int(os.pread(self._statm, 128, 0).split()[1]) * PAGE_BYTES if self._statm >= 0 else 0

    def grown(self, grammar: str, compiled: Compiled, num_bytes: int) -> None:
        """Note that a grammar took more memory in use; the oldest are forgotten when it is too much."""
        compiled.growth_bytes += num_bytes
        self._growth_bytes += num_bytes
        while self._growth_bytes > MAX_GROWTH_BYTES and self._cache:
            self._drop(next(iter(self._cache)))
        if not self._cache:
            self._growth_bytes = 0

    def retire(self, grammar: str, compiled: Compiled) -> None:
        """Forget a grammar that failed; whoever holds it keeps it."""
        future = self._cache.get(grammar)
        if future is not None and future.done() and future.exception() is None and future.result() is compiled:
            self._drop(grammar)

    def abandon(self, grammar: str, future: Future[Compiled]) -> None:
        """Take a grammar that nobody waits for out of the queue; one that is being compiled stays."""
        if future.cancel() and self._cache.get(grammar) is future:
            del self._cache[grammar]

    def _drop(self, grammar: str) -> None:
        future = self._cache.pop(grammar)
        if future.done() and future.exception() is None:
            self._growth_bytes -= min(future.result().growth_bytes, self._growth_bytes)

    def _check_and_compile(self, grammar: str) -> Compiled:
        reason = self._checker.check(grammar)
        if reason:
            raise _refusal(reason)
        if self._tokenizer is None:
            self._learn_vocabulary()
        return self.compile(grammar)

    def _learn_vocabulary(self) -> None:
        vocabulary = _Vocabulary(self._token_bytes or (), self._facts, self._special_ids)
        self._tokenizer = self._library.LLTokenizer(vocabulary, eos_token=[vocabulary.eos_token_id])

    def _has_library(self) -> bool:
        if self._library is None:
            try:
                self._library = importlib.import_module("llguidance")
            except ImportError:
                return False
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A grammar on its way."""

    grammars: Grammars
    grammar: str
    future: Future[Compiled]

    @property
    def ready(self) -> bool:
        return self.future.done()

    def abandon(self) -> None:
        """Say that nobody waits for this grammar any more, with this ticket or another."""
        self.grammars.abandon(self.grammar, self.future)

    def failure(self) -> BaseException | None:
        """Return why there will be no grammar; None if there is one. Only when ready."""
        return self.future.exception()


class _Vocabulary:
    """What llguidance asks of a tokenizer. The token table need not be as long as the model's logits."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, token_bytes: Sequence[bytes], facts: ModelFacts, special_ids: Collection[int]) -> None:
        size = facts.vocab_size
        blank = [b""] * max(size - len(token_bytes), 0)
        # An end of its own, beyond the model's ids: when a candidate may end is said by `is_accepting`.
        self.tokens = [*token_bytes[:size], *blank, b"<end>"]
        self.eos_token_id = size
        self.special_token_ids = [size, *sorted(token for token in special_ids if token < size)]

    def __call__(self, text: bytes | str) -> list[int]:
        return []  # asked for forced tokens only, and nothing is forced


def bits_of(ids: Collection[int], vocab_size: int) -> U32:
    """Return a mask's words with these bits set; ids beyond the vocabulary have none."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[[token for token in ids if 0 <= token < vocab_size]] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(f"{PARAM} cannot be used: {one_line(reason)}", param=PARAM, code="invalid_constraint")


def one_line(text: str) -> str:
    """Shorten a library's message: no listing of the grammar, no line ends, bounded."""
    lines = _STATE.split(text)[0].splitlines()
    short = " ".join(" ".join(line for line in lines if not _LISTING.match(line)).split())
    return short if len(short) <= MAX_REASON_CHARS else short[: MAX_REASON_CHARS - 3] + "..."


def _open_statm() -> int:
    try:
        return os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:  # not Linux: memory is then bounded by the library's limits alone
        return -1
