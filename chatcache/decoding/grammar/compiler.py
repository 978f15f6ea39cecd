"""Compiled grammars of one engine: made beside the engine's loop, checked before, remembered a while.

A grammar is first tried in the checker's child process, where time, memory and stack are bounded; then compiled in this
process in a thread of its own, without the interpreter's lock. Until that is done its request waits for it, nobody
else does. llguidance is imported when somebody asks for it.

llguidance shares what it learns of a grammar (its lexer's states) among all copies of a matcher, and shares its
failures too. So a compiled grammar that failed, or has grown large, is not given to new requests.

Compiles wait here: one thread for them all, and those who ask take turns.

What a caller asks of the output, as one grammar in llguidance's Lark notation. Nothing is compiled here.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import numpy as np

from chatcache.decoding.grammar.sandbox import GrammarChecker
from chatcache.errors import InvalidRequestError
from chatcache.types.plan import U32
from chatcache.types.request import StructuredOutputs
from chatcache.types.stats import ModelInfo

Result = TypeVar("Result")


class TurnQueue(Generic[Result]):
    """Runs work in a thread of its own, one piece at a time.

    Owners take turns, whatever each has queued; an owner's own work goes first come, first served. So nobody's queue
    holds up another owner for longer than a piece of work of each.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Result], Callable[[], Result]]]] = OrderedDict()

    def submit(self, owner: str, work: Callable[[], Result]) -> Future[Result]:
        """Queue work; its future can be cancelled until it begins."""
        future: Future[Result] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append((future, work))
        self._executor.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._lock:
            owner, queue = self._waiting.popitem(last=False)
            future, work = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind everybody else
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:  # a panic of the library is no Exception; the future tells it
            future.set_exception(error)
        else:
            future.set_result(result)


MAX_SCHEMA_BYTES = 256 << 10
MAX_REGEX_BYTES = 16 << 10
MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 10_000
MAX_CHOICE_BYTES = 256 << 10
JSON_WHITESPACE = " "  # once or not at all: a model that likes new lines would go on with them for ever

PARAM = "structured_outputs"
_FIELDS = ("json", "json_object", "regex", "choice", "grammar")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/', re.DOTALL)  # strings, comments, regexes
# Every tokenisation of the allowed text is allowed; the model chooses, not a tokenizer that the engine lacks.
_OPTIONS = '%llguidance {"no_forcing": true}'


def check_structured_outputs(outputs: object) -> None:
    """Verify kinds and sizes. Raises: InvalidRequestError naming the field and the limit."""
    if not isinstance(outputs, StructuredOutputs):
        raise InvalidRequestError(
            f"{PARAM} must be a chatcache.StructuredOutputs, got {type(outputs).__name__}", param=PARAM
        )
    if not isinstance(outputs.json_object, bool):
        raise InvalidRequestError(f"{PARAM}.json_object must be true or false", param=PARAM)
    given = [name for name in _FIELDS if getattr(outputs, name) not in (None, False, ())]
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise InvalidRequestError(f"{PARAM} needs exactly one of {', '.join(_FIELDS)}; got {found}", param=PARAM)
    _text("json", outputs.json, MAX_SCHEMA_BYTES)
    _text("regex", outputs.regex, MAX_REGEX_BYTES)
    _text("grammar", outputs.grammar, MAX_GRAMMAR_BYTES)
    _choices(outputs.choice)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in outputs.special_token_ids):
        raise InvalidRequestError(f"{PARAM}.special_token_ids must be token ids", param=PARAM)


def lark_of(outputs: StructuredOutputs) -> str:
    """Return the grammar of outputs that `check_structured_outputs` has accepted.

    Raises: InvalidRequestError for a schema that is not JSON, or not a schema at all; for a grammar that names tokens.
    """
    if outputs.grammar is not None:
        _refuse_tokens(outputs.grammar, outputs.special_token_ids)
        return f"{outputs.grammar}\n{_OPTIONS}\n"
    if outputs.json is not None:
        start = _schema(outputs.json)
    elif outputs.json_object:
        start = _inline({"type": "object"})
    elif outputs.regex is not None:
        start = f"/{_slashed(outputs.regex)}/"
    else:
        return f"start: CHOICE\nCHOICE: {' | '.join(map(_quoted, outputs.choice))}\n{_OPTIONS}\n"
    return f"start: {start}\n{_OPTIONS}\n"


def _refuse_tokens(grammar: str, allowed: Collection[int]) -> None:
    """Refuse `<name>` and `<[id]>`, the notation's symbols for single tokens, but for those ids that may be named."""
    symbols = {f"<[{token}]>" for token in allowed}
    for named in re.finditer(r"<[^<>\s]+>", _QUOTED.sub(" ", grammar)):
        if named[0] in symbols:
            continue
        raise InvalidRequestError(f"{PARAM}.grammar names the token {named[0]:.40}; it must describe text", param=PARAM)


def _text(name: str, value: object, limit: int) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidRequestError(f"{PARAM}.{name} must be text, got {type(value).__name__}", param=PARAM)
    size = _num_bytes(name, value)
    if not 1 <= size <= limit:
        raise InvalidRequestError(f"{PARAM}.{name} must have 1 to {limit} bytes, got {size}", param=PARAM)


def _choices(value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(text, str) and text for text in value):
        raise InvalidRequestError(f"{PARAM}.choice must be a list of texts that are not empty", param=PARAM)
    if len(value) > MAX_CHOICES:
        raise InvalidRequestError(
            f"{PARAM}.choice must have at most {MAX_CHOICES} texts, got {len(value)}", param=PARAM
        )
    size = sum(_num_bytes("choice", text) for text in value)
    if size > MAX_CHOICE_BYTES:
        raise InvalidRequestError(f"{PARAM}.choice must have at most {MAX_CHOICE_BYTES} bytes, got {size}", param=PARAM)


def _num_bytes(name: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{PARAM}.{name} must be valid Unicode (a lone surrogate was found)", param=PARAM
        ) from None


def _schema(text: str) -> str:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{PARAM}.json is not JSON: {error!s:.200}", param=PARAM) from None
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{PARAM}.json must be a JSON schema: an object, true or false", param=PARAM)
    return _inline(schema)


def _inline(schema: dict[str, object]) -> str:
    """Write a schema as a grammar symbol; it is laid out as its `x-guidance` says, else on one line."""
    text = json.dumps({"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **schema}, ensure_ascii=False)
    _num_bytes("json", text)
    return f"%json {text}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _slashed(regex: str) -> str:
    """Make a regular expression fit between slashes."""
    escaped = re.sub(r"\\.|[/\\]", lambda match: "\\/" if match[0] == "/" else match[0], regex, flags=re.DOTALL)
    if re.sub(r"\\.", "", regex, flags=re.DOTALL).endswith("\\"):
        raise InvalidRequestError(f"{PARAM}.regex ends in a backslash that escapes nothing", param=PARAM)
    return escaped


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


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


class GrammarCompiler:
    """Compiles and remembers. Used from the engine's thread; the thread within is its own affair.

    `token_bytes[id]` is what a token adds to the text; `special_ids` are never part of it.
    """

    def __init__(
        self, token_bytes: Sequence[bytes] | None, facts: ModelInfo, special_ids: Collection[int] = ()
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

    def start(self, outputs: StructuredOutputs, namespace: str = "") -> GrammarFuture:
        """Begin to compile, or find it done. Namespaces take turns.

        Raises: InvalidRequestError for what can be told at once, or where llguidance or a tokenizer is missing.
        """
        grammar = lark_of(outputs)
        if self._token_bytes is None:
            raise InvalidRequestError(f"{PARAM} need a model with a tokenizer", param=PARAM)
        if not self._has_library():
            raise InvalidRequestError(
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
        return GrammarFuture(self, grammar, future)

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

        Raises: InvalidRequestError with the library's reason.
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
            raise InvalidRequestError(f"{PARAM}: {what}", param=PARAM)
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
class GrammarFuture:
    """A grammar on its way."""

    grammars: GrammarCompiler
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

    def __init__(self, token_bytes: Sequence[bytes], facts: ModelInfo, special_ids: Collection[int]) -> None:
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


def _refusal(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM} cannot be used: {one_line(reason)}", param=PARAM, code="invalid_constraint")


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
