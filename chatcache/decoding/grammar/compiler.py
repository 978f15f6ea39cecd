"""Compile structured-output requests to grammars; cache the compiled grammars of an engine.

A request becomes a grammar in llguidance's Lark notation. It is first compiled in the sandbox process, where time,
memory and stack are limited, then in this process on a separate thread that does not hold the GIL. Until then its
request waits; other requests continue. llguidance is imported on first use.

llguidance shares lexer states among all copies of a matcher, including failures. So a compiled grammar that has failed
or grown large is not given to new requests.

The sandbox is a child process (`sandbox_process`) with limits on time, memory and stack. The library's own limits are
not sufficient: within them, a schema of 19 KB (500 patternProperties) compiled for 69 s,
100 intersected regexes even longer, and 4,000 chained rules overflowed the stack of the whole process. One child runs
at a time and is reused; if a grammar kills it, the exit status shows which limit was exceeded.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from chatcache.decoding.grammar import sandbox_process as constraint_child
from chatcache.errors import EngineError, InvalidRequestError
from chatcache.types.json_schema import DEFAULT_OPTIONS, OPTIONS, simplify_schema
from chatcache.types.plan import U32
from chatcache.types.request import StructuredOutputs
from chatcache.types.stats import ModelInfo

_NAMED = re.compile(r"<\[(\d+)\]>")
COMPILE_CPU_S = 1.0
CLOSE_S = 0.2  # for a child to exit by itself
COMPILE_WALL_S = 10.0  # generous, for loaded machines
COMPILE_MEMORY_BYTES = 1 << 30
COMPILE_STACK_BYTES = 2 << 20  # smaller than the stacks of the engine's threads
_VOLUNTARY_EXITS = (0, -int(getattr(signal, "SIGALRM", 0)))  # normal exits: too much memory in use, or idle for long


class GrammarChecker:
    """Checks grammars by compiling them in the child. Not thread-safe."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: weakref.finalize[..., GrammarChecker] | None = None

    def check(self, grammar: str) -> str:
        """Return "" if the grammar compiles within the limits, else the reason.

        Raises: EngineError if no child can be started.
        """
        grammar = _rename_tokens(grammar)
        for _ in range(2):
            answer, status, late = self._ask(grammar)
            if answer is not None:
                return answer
            if late or status not in _VOLUNTARY_EXITS:
                break
        return _exit_reason(status, late=late)

    def _ask(self, grammar: str) -> tuple[str | None, int, bool]:
        """Return (answer or None, exit status without an answer, whether it timed out).

        Raises: EngineError.
        """
        status = 0
        for _ in range(2):  # the child may have exited (idle timeout, memory)
            try:
                process = self._child()
                constraint_child.write_frame(_pipe(process.stdin), grammar)
                break
            except OSError:
                status = self.close()
        else:
            raise EngineError(f"the grammar checker did not start (exit status {status})")
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(COMPILE_WALL_S, give_up)
        timer.start()
        try:
            answer = constraint_child.read_frame(_pipe(process.stdout))
        finally:
            timer.cancel()
        return answer, 0 if answer is not None else self.close(), late.is_set()

    def close(self) -> int:
        """Stop the child if it runs; return its exit status."""
        ending, self._ending, self._process = self._ending, None, None
        return 0 if ending is None else int(ending() or 0)

    def _child(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            spec = {
                "cpu_s": COMPILE_CPU_S,
                "memory_bytes": COMPILE_MEMORY_BYTES,
                "stack_bytes": COMPILE_STACK_BYTES,
                "limits": self._limits,
            }
            command = [sys.executable, "-P", str(Path(constraint_child.__file__)), json.dumps(spec)]
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            except OSError as error:
                raise EngineError(f"the grammar checker did not start: {error}") from error
            self._process = process
            self._ending = weakref.finalize(self, _close_process, process)  # also when the engine is garbage-collected
            if constraint_child.read_frame(_pipe(process.stdout)) != "ready":
                raise BrokenPipeError("the grammar checker left before it was ready")
        return self._process


def _rename_tokens(grammar: str) -> str:
    """Replace the model's special token ids by those of the child's vocabulary."""
    ids: dict[str, int] = {}

    def name(match: re.Match[str]) -> str:
        token = ids.setdefault(match[1], len(ids) % constraint_child.NUM_NAMED)
        return f"<[{constraint_child.FIRST_NAMED + token}]>"

    return _NAMED.sub(name, grammar)


def _close_process(process: subprocess.Popen[bytes]) -> int:
    """Close the pipes, wait for the child or kill it; return its exit status."""
    if process.stdin is not None and not process.stdin.closed:
        try:
            process.stdin.close()
        except OSError:
            pass
    if process.stdout is not None:
        process.stdout.close()
    try:
        return process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _exit_reason(status: int, *, late: bool) -> str:
    if late:
        return f"it takes more than {COMPILE_WALL_S:g} s to compile"
    if status == -getattr(signal, "SIGPROF", 0):
        return f"it takes more than {COMPILE_CPU_S:g} s of computing to compile"
    if status in (-signal.SIGSEGV, -getattr(signal, "SIGBUS", 0)):
        return "it is nested too deeply"
    return f"it takes more than {COMPILE_MEMORY_BYTES >> 20} MiB to compile"


def _pipe(stream: Any) -> Any:
    if stream is None:
        raise EngineError("the grammar checker has no pipe")
    return stream


Result = TypeVar("Result")


class RoundRobinQueue(Generic[Result]):
    """Runs tasks on one thread, round-robin over the owners, FIFO within an owner.

    So an owner waits for at most one task of every other owner.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Result], Callable[[], Result]]]] = OrderedDict()

    def submit(self, owner: str, work: Callable[[], Result]) -> Future[Result]:
        """Queue a task; its future can be cancelled until the task starts."""
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
                self._waiting[owner] = queue  # after all other owners
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:  # a panic of the Rust library is a BaseException
            future.set_exception(error)
        else:
            future.set_result(result)


MAX_SCHEMA_BYTES = 256 << 10
MAX_REGEX_BYTES = 16 << 10
MAX_GRAMMAR_BYTES = 512 << 10  # of all functions that a reply may call, with their schemas
MAX_CHOICES = 10_000
MAX_CHOICE_BYTES = 256 << 10

PARAM = "structured_outputs"
_FIELDS = ("json", "json_object", "regex", "choice", "grammar")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/', re.DOTALL)  # strings, comments, regexes
# Allow every tokenization of the allowed text: the engine has no tokenizer to force the canonical one.
_OPTIONS = '%llguidance {"no_forcing": true}'


def check_structured_outputs(outputs: object) -> None:
    """Check types and sizes. Raises: InvalidRequestError with the field and the limit."""
    if not isinstance(outputs, StructuredOutputs):
        raise InvalidRequestError(
            f"{PARAM} must be a chatcache.StructuredOutputs or a dict, got {type(outputs).__name__}", param=PARAM
        )
    if not isinstance(outputs.json_object, bool):
        raise InvalidRequestError(f"{PARAM}.json_object must be true or false", param=PARAM)
    given = [name for name in _FIELDS if getattr(outputs, name) not in (None, False, ())]
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise InvalidRequestError(f"{PARAM} needs exactly one of {', '.join(_FIELDS)}; got {found}", param=PARAM)
    _check_text("json", outputs.json, MAX_SCHEMA_BYTES)
    _check_text("regex", outputs.regex, MAX_REGEX_BYTES)
    _check_text("grammar", outputs.grammar, MAX_GRAMMAR_BYTES)
    _check_choices(outputs.choice)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in outputs.special_token_ids):
        raise InvalidRequestError(f"{PARAM}.special_token_ids must be token ids", param=PARAM)


def to_lark(outputs: StructuredOutputs) -> str:
    """Convert outputs that `check_structured_outputs` has accepted to a grammar.

    Raises: InvalidRequestError for an invalid JSON schema, or a grammar that references tokens.
    """
    if outputs.grammar is not None:
        _refuse_tokens(outputs.grammar, outputs.special_token_ids)
        return f"{outputs.grammar}\n{_OPTIONS}\n"
    if outputs.json is not None:
        start = _schema_symbol(outputs.json)
    elif outputs.json_object:
        start = _json_symbol({"type": "object"})
    elif outputs.regex is not None:
        start = f"/{_escape_slashes(outputs.regex)}/"
    else:
        return f"start: CHOICE\nCHOICE: {' | '.join(map(_quote, outputs.choice))}\n{_OPTIONS}\n"
    return f"start: {start}\n{_OPTIONS}\n"


def _refuse_tokens(grammar: str, allowed: Collection[int]) -> None:
    """Reject `<name>` and `<[id]>` (references to single tokens) except for the allowed ids."""
    symbols = {f"<[{token}]>" for token in allowed}
    for named in re.finditer(r"<[^<>\s]+>", _QUOTED.sub(" ", grammar)):
        if named[0] in symbols:
            continue
        raise InvalidRequestError(f"{PARAM}.grammar names the token {named[0]:.40}; it must describe text", param=PARAM)


def _check_text(name: str, value: object, limit: int) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidRequestError(f"{PARAM}.{name} must be text, got {type(value).__name__}", param=PARAM)
    size = _num_bytes(name, value)
    if not 1 <= size <= limit:
        raise InvalidRequestError(f"{PARAM}.{name} must have 1 to {limit} bytes, got {size}", param=PARAM)


def _check_choices(value: object) -> None:
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


def _schema_symbol(text: str) -> str:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
        simplify_schema(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{PARAM}.json is not JSON: {error!s:.200}", param=PARAM) from None
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{PARAM}.json must be a JSON schema: an object, true or false", param=PARAM)
    return _json_symbol(schema)


def _json_symbol(schema: dict[str, object]) -> str:
    """Return a schema as a grammar symbol.

    Without its own `x-guidance`, JSON is written on one line.
    """
    text = json.dumps({OPTIONS: DEFAULT_OPTIONS, **schema}, ensure_ascii=False)
    _num_bytes("json", text)
    return f"%json {text}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _escape_slashes(regex: str) -> str:
    """Escape the slashes of a regular expression."""
    escaped = re.sub(r"\\.|[/\\]", lambda match: "\\/" if match[0] == "/" else match[0], regex, flags=re.DOTALL)
    if re.sub(r"\\.", "", regex, flags=re.DOTALL).endswith("\\"):
        raise InvalidRequestError(f"{PARAM}.regex ends in a backslash that escapes nothing", param=PARAM)
    return escaped


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# Limits of one step (14,000 units of fuel are about 1 ms) and of a whole grammar.
LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
MAX_GRAMMARS = 64
MAX_GROWTH_BYTES = 256 << 20  # of all cached grammars together
MAX_REASON_CHARS = 300
NO_EXTENSION = "NoExtension"  # prefix of the library's message if no token matches
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
HUGE_PAGE_BYTES = 2 << 20
_STATE = re.compile(r"<(?:non-verbose/|backtrace|state)>")
_LISTING = re.compile(r"\s*(\d+ \||\^+\s*$)")  # a line of the grammar, or the caret under it


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A compiled grammar in its initial state. `matcher` is only copied, never advanced."""

    matcher: Any
    allowed_words: U32
    is_accepting: bool
    compile_s: float
    growth_bytes: int = 0


class GrammarCompiler:
    """Compiles grammars on its own thread and caches them. Called from the engine's thread only.

    `token_bytes[id]`: bytes that a token adds to the text; `special_ids` are not part of the text.
    """

    def __init__(
        self, token_bytes: Sequence[bytes] | None, model_info: ModelInfo, special_ids: Collection[int] = ()
    ) -> None:
        self._token_bytes = token_bytes
        self._model_info = model_info
        self._special_ids = frozenset(special_ids) | frozenset(model_info.eos_token_ids)
        self._cache: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._growth_bytes = 0
        self._library: Any = None
        self._tokenizer: Any = None
        self._queue: RoundRobinQueue[CompiledGrammar] | None = None
        self._checker = GrammarChecker(LIMITS)
        self._statm = _open_statm()
        if self._statm >= 0:
            weakref.finalize(self, os.close, self._statm)
        self._compile_finished = threading.Event()  # set when a compilation has finished

    @cached_property
    def text_tokens(self) -> U32:
        """Bit mask of the tokens with text."""
        pieces = enumerate(self._token_bytes or ())
        text_ids = [token for token, piece in pieces if piece and token not in self._special_ids]
        return to_bitmask(text_ids, self._model_info.vocab_size)

    @cached_property
    def allowed_tokens(self) -> U32:
        """Bit mask of all tokens a grammar can allow: text, and special tokens except EOS."""
        ends = set(self._model_info.eos_token_ids)
        named = to_bitmask([token for token in self._special_ids if token not in ends], self._model_info.vocab_size)
        return self.text_tokens | named

    def start(self, outputs: StructuredOutputs, namespace: str = "") -> GrammarFuture:
        """Start to compile, or return the cached grammar. Namespaces are served round-robin.

        Raises: InvalidRequestError if the outputs are invalid, or llguidance or a tokenizer is missing.
        """
        grammar = to_lark(outputs)
        if self._token_bytes is None:
            raise InvalidRequestError(f"{PARAM} need a model with a tokenizer", param=PARAM)
        if not self._has_library():
            raise InvalidRequestError(
                f"{PARAM} need the package llguidance, which is not installed on this server", param=PARAM
            )
        future = self._cache.get(grammar)
        if future is None or (future.done() and future.exception() is not None):
            self._queue = self._queue or RoundRobinQueue("chatcache-grammar")
            future = self._queue.submit(namespace, partial(self._check_and_compile, grammar))
            news = self._compile_finished  # not self: the cached future must not keep the compiler alive
            future.add_done_callback(lambda _: news.set())
            self._cache[grammar] = future
        self._cache.move_to_end(grammar)
        while len(self._cache) > MAX_GRAMMARS:
            self._drop(next(iter(self._cache)))
        return GrammarFuture(self, grammar, future)

    def load_vocabulary(self) -> None:
        """Build the library's tokenizer at start, if a tokenizer and the library are present.

        Doing this on the first constrained request would hold the GIL for up to a second and stall decoding.
        """
        if self._token_bytes is not None and self._has_library():
            self._build_tokenizer()

    def wait(self, timeout_s: float) -> None:
        """Wait until a compilation finishes (at once if one has since the last call)."""
        self._compile_finished.wait(timeout_s)
        self._compile_finished.clear()

    def compile(self, grammar: str) -> CompiledGrammar:
        """Compile a grammar that passed the sandbox.

        Raises: InvalidRequestError with the reason of the library.
        """
        began = time.perf_counter()
        limits = self._library.LLParserLimits(**LIMITS)
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _grammar_error(matcher.get_error())
        first = matcher.deep_copy()
        words, accepting = self.allowed_words(first), matcher.is_accepting()
        if words is None:
            raise _grammar_error(first.get_error())
        if not words.any():
            what = (
                "nothing but the empty text matches" if accepting else "no token of this model begins a text that does"
            )
            raise InvalidRequestError(f"{PARAM}: {what}", param=PARAM)
        return CompiledGrammar(matcher, words, accepting, time.perf_counter() - began)

    def allowed_words(self, matcher: Any) -> U32 | None:
        """Return the mask of the tokens that `matcher` allows next; None if the matcher has failed."""
        words = np.zeros(-(-self._tokenizer.vocab_size // 32), np.uint32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            return words[: len(self.text_tokens)] * 0 if matcher.get_error().startswith(NO_EXTENSION) else None
        return words[: len(self.text_tokens)] & self.allowed_tokens

    def resident_bytes(self) -> int:
        """Return the resident memory of this process in bytes; 0 if unknown."""
        return int(os.pread(self._statm, 128, 0).split()[1]) * PAGE_BYTES if self._statm >= 0 else 0

    def faulted_bytes(self) -> int:
        """Return the most memory that the calling thread can have begun to use so far; 0 if unknown.

        Memory is counted for a process, not for a thread; but a thread causes a page fault for all memory that it is
        the first to write, and each fault adds a huge page at most.
        """
        if self._statm < 0:
            return 0
        import resource  # not on Windows

        usage = resource.getrusage(resource.RUSAGE_THREAD)
        return (usage.ru_minflt + usage.ru_majflt) * HUGE_PAGE_BYTES

    def record_growth(self, grammar: str, compiled: CompiledGrammar, num_bytes: int) -> None:
        """Add to the memory use of a grammar; drop the oldest grammars beyond MAX_GROWTH_BYTES."""
        compiled.growth_bytes += num_bytes
        self._growth_bytes += num_bytes
        while self._growth_bytes > MAX_GROWTH_BYTES and self._cache:
            self._drop(next(iter(self._cache)))
        if not self._cache:
            self._growth_bytes = 0

    def discard(self, grammar: str, compiled: CompiledGrammar) -> None:
        """Remove a failed grammar from the cache; requests that use it keep it."""
        future = self._cache.get(grammar)
        if future is not None and future.done() and future.exception() is None and future.result() is compiled:
            self._drop(grammar)

    def cancel(self, grammar: str, future: Future[CompiledGrammar]) -> None:
        """Remove a grammar from the queue unless its compilation has started."""
        if future.cancel() and self._cache.get(grammar) is future:
            del self._cache[grammar]

    def _drop(self, grammar: str) -> None:
        future = self._cache.pop(grammar)
        if future.done() and future.exception() is None:
            self._growth_bytes -= min(future.result().growth_bytes, self._growth_bytes)

    def _check_and_compile(self, grammar: str) -> CompiledGrammar:
        reason = self._checker.check(grammar)
        if reason:
            raise _grammar_error(reason)
        if self._tokenizer is None:
            self._build_tokenizer()
        return self.compile(grammar)

    def _build_tokenizer(self) -> None:
        vocabulary = _Vocabulary(self._token_bytes or (), self._model_info, self._special_ids)
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
    """A grammar that is being compiled, or has been."""

    compiler: GrammarCompiler
    grammar: str
    future: Future[CompiledGrammar]

    @property
    def is_ready(self) -> bool:
        """True if compilation has finished, with or without success."""
        return self.future.done()

    def cancel(self) -> None:
        """Cancel the compilation; called when no request waits for the grammar any more."""
        self.compiler.cancel(self.grammar, self.future)

    def failure(self) -> BaseException | None:
        """Return why there will be no grammar; None if there is one. Only when ready."""
        return self.future.exception()


class _Vocabulary:
    """What llguidance asks of a tokenizer.

    The token table need not be as long as the model's logits.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, token_bytes: Sequence[bytes], model_info: ModelInfo, special_ids: Collection[int]) -> None:
        size = model_info.vocab_size
        blank = [b""] * max(size - len(token_bytes), 0)
        # An end of its own, beyond the model's ids: when a candidate may end is said by `is_accepting`.
        self.tokens = [*token_bytes[:size], *blank, b"<end>"]
        self.eos_token_id = size
        self.special_token_ids = [size, *sorted(token for token in special_ids if token < size)]

    def __call__(self, text: bytes | str) -> list[int]:
        return []  # asked for forced tokens only, and nothing is forced


def to_bitmask(ids: Collection[int], vocab_size: int) -> U32:
    """Return a mask's words with these bits set; ids beyond the vocabulary have none."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[[token for token in ids if 0 <= token < vocab_size]] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def _grammar_error(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{PARAM} cannot be used: {shorten_reason(reason)}", param=PARAM, code="invalid_constraint"
    )


def shorten_reason(text: str) -> str:
    """Shorten a library's message: no listing of the grammar, no line ends, bounded."""
    lines = _STATE.split(text)[0].splitlines()
    short = " ".join(" ".join(line for line in lines if not _LISTING.match(line)).split())
    return short if len(short) <= MAX_REASON_CHARS else short[: MAX_REASON_CHARS - 3] + "..."


def _open_statm() -> int:
    try:
        return os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:  # not Linux: memory is then bounded by the library's limits alone
        return -1
