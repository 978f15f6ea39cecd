"""Invalid, large, slow or deep grammars end with an error and do not affect other requests."""

from __future__ import annotations

import importlib
import json
import mmap
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatcache.decoding.grammar import compiler as constraint_checker
from chatcache.decoding.grammar import compiler as constraint_compiler
from chatcache.decoding.grammar import state as constraint
from chatcache.decoding.grammar.compiler import (
    LIMITS,
    MAX_GRAMMARS,
    GrammarChecker,
    GrammarCompiler,
    check_structured_outputs,
    to_lark,
)
from chatcache.decoding.grammar.state import Constraint, GrammarDeadEndError, GrammarState
from chatcache.decoding.stopping import StopRules
from chatcache.errors import ChatcacheError, EngineError, InvalidRequestError
from chatcache.types.request import BeamSearchParams, SamplingParams, StructuredOutputs
from tests.decoding.decode_driver import TableModel, run
from tests.decoding.toy_vocab import (
    EOS,
    MODEL_INFO,
    PIECES,
    PROMPT,
    VOCAB_SIZE,
    compiled,
    model_info_of,
    strategy_of,
    text_of,
)

RULES = StopRules(max_tokens=99, eos_ids=(EOS,))


@pytest.fixture
def own() -> GrammarCompiler:
    """Compiled grammars that a test may spoil."""
    return GrammarCompiler(PIECES, MODEL_INFO, (EOS,))


def slow_schema(count: int = 500) -> str:
    """19 KB that take a minute: every pattern is held against every other."""
    patterns = {f"^a{i}x{{0,{i + 1}}}$": {"type": "integer"} for i in range(count)}
    return json.dumps({"type": "object", "patternProperties": patterns})


def deep_grammar(depth: int) -> str:
    """Rules that name each other in a long chain."""
    chain = "\n".join(f"r{i}: r{i + 1}" for i in range(depth))
    return to_lark(StructuredOutputs(grammar=f'start: r0\n{chain}\nr{depth}: "y"'))


GOOD = [
    StructuredOutputs(json="{}"),
    StructuredOutputs(json="true"),
    StructuredOutputs(json=json.dumps({"enum": ["x" * 26_000] * 10})),
    StructuredOutputs(json_object=True),
    StructuredOutputs(regex="a" * (16 << 10)),
    StructuredOutputs(choice=("a",) * 10_000),
    StructuredOutputs(grammar="start: A\nA: /[<>]/ // <b>"),
]
BAD: list[tuple[Any, str]] = [
    (["{}"], "must be a chatcache.StructuredOutputs or a dict, got list"),
    (StructuredOutputs(), "exactly one of json, json_object, regex, choice, grammar; got none"),
    (StructuredOutputs(json="{}", regex="a"), "exactly one of .*; got json, regex"),
    (StructuredOutputs(json_object=1), r"structured_outputs.json_object must be true or false"),  # type: ignore[arg-type]
    (StructuredOutputs(json=[]), r"structured_outputs.json must be text, got list"),  # type: ignore[arg-type]
    (StructuredOutputs(json="x" * 262_145), "structured_outputs.json must have 1 to 262144 bytes, got 262145"),
    (StructuredOutputs(regex="é" * 8193), "structured_outputs.regex must have 1 to 16384 bytes, got 16386"),
    (StructuredOutputs(regex=""), "structured_outputs.regex must have 1 to 16384 bytes, got 0"),
    (StructuredOutputs(grammar="x" * 524_289), "structured_outputs.grammar must have 1 to 524288 bytes, got 524289"),
    (StructuredOutputs(grammar="\ud800"), "structured_outputs.grammar must be valid Unicode"),
    (StructuredOutputs(choice=("a", "")), "structured_outputs.choice must be a list of texts that are not empty"),
    (StructuredOutputs(choice=("a", 3)), "structured_outputs.choice must be a list of texts"),  # type: ignore[arg-type]
    (StructuredOutputs(choice=("a",) * 10_001), "structured_outputs.choice must have at most 10000 texts, got 10001"),
    (StructuredOutputs(choice=("a" * 200_000,) * 2), "choice must have at most 262144 bytes, got 400000"),
    (StructuredOutputs(json="{"), "structured_outputs.json is not JSON: "),
    (StructuredOutputs(json="[" * 100_000), "structured_outputs.json is not JSON: "),
    (StructuredOutputs(json='{"minimum": NaN}'), "NaN is not a JSON value"),
    (StructuredOutputs(json="[1]"), "must be a JSON schema: an object, true or false"),
    (StructuredOutputs(json='{"const": "\\ud800"}'), "valid Unicode"),
    (StructuredOutputs(regex="a\\"), "ends in a backslash"),
    (StructuredOutputs(regex="(a"), r"unclosed group"),
    (StructuredOutputs(regex="a(?=b)"), "look-around"),
    (StructuredOutputs(regex="(){3}"), "nothing but the empty text matches"),
    (StructuredOutputs(json='{"type": "nope"}'), "Invalid type: nope"),
    (StructuredOutputs(json='{"not": {}}'), "Unimplemented keys"),
    (StructuredOutputs(json="false"), "Unsatisfiable schema"),
    (StructuredOutputs(grammar="start: foo"), 'unknown name: "foo"'),
    (StructuredOutputs(grammar="start: <|im_end|>"), "names the token <"),
    (StructuredOutputs(grammar='start: ""'), "nothing but the empty text matches"),
    (StructuredOutputs(grammar="hello"), "Expected token ':'"),
]


@pytest.mark.parametrize("outputs", GOOD, ids=lambda outputs: repr(outputs)[:40])
def test_the_bounds_are_accepted(outputs: StructuredOutputs) -> None:
    check_structured_outputs(outputs)
    to_lark(outputs)


@pytest.mark.parametrize(("outputs", "message"), BAD, ids=lambda value: repr(value)[:40])
def test_what_is_wrong_is_refused_in_one_line(outputs: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:  # noqa: PT012 - either may find it
        check_structured_outputs(outputs)
        compiled(outputs)
    assert caught.value.param == "structured_outputs"
    assert len(caught.value.message) < 400 and "\n" not in caught.value.message


def test_ten_thousand_choices() -> None:
    outputs = StructuredOutputs(choice=tuple(f"choice {i}" for i in range(10_000)))
    strategy = strategy_of(SamplingParams(structured_outputs=outputs), max_tokens=30)
    (outcome,) = run(strategy, PROMPT, TableModel(VOCAB_SIZE)).outcomes.values()
    assert text_of(outcome.tokens).decode() in outputs.choice


def test_without_the_library_a_constraint_is_refused(own: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(InvalidRequestError, match="need the package llguidance, which is not installed") as caught:
        own.start(StructuredOutputs(regex="a"))
    assert caught.value.param == "structured_outputs"
    own.load_vocabulary()  # nothing to do, nothing to say


def test_what_is_prepared_is_not_done_again(own: GrammarCompiler) -> None:
    own.load_vocabulary()
    tokenizer = own._tokenizer
    compiled(StructuredOutputs(regex="a"), own)
    assert tokenizer is not None and own._tokenizer is tokenizer
    GrammarCompiler(None, MODEL_INFO).load_vocabulary()


def test_without_a_tokenizer_a_constraint_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="need a model with a tokenizer"):
        GrammarCompiler(None, MODEL_INFO).start(StructuredOutputs(regex="a"))


@pytest.mark.parametrize("vocab_size", [260, 288])
@pytest.mark.parametrize("eos", [(), (EOS,), (EOS, 999), (65,)])
def test_tables_of_any_length(vocab_size: int, eos: tuple[int, ...]) -> None:
    """Logits wider or narrower than the tokenizer, EOS beyond them, EOS that is text, no EOS at all."""
    model_info = model_info_of(vocab_size, eos)
    params = SamplingParams(n=6, structured_outputs=StructuredOutputs(regex="[AB]{1,3}"))
    strategy = strategy_of(params, within=GrammarCompiler(PIECES, model_info), model_info=model_info)
    for outcome in run(strategy, PROMPT, TableModel(vocab_size)).outcomes.values():
        body = outcome.tokens[:-1] if outcome.tokens[-1] in eos else outcome.tokens
        assert 1 <= len(text_of(body)) <= 3 and set(text_of(body)) <= (set(b"B") if 65 in eos else set(b"AB"))


# -- the checker -------------------------------------------------------------------------------------------------------


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(LIMITS)
    yield checker
    checker.close()


def test_a_compile_that_takes_too_long_is_stopped(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_checker, "COMPILE_CPU_S", 0.25)
    slow = to_lark(StructuredOutputs(json=slow_schema()))
    assert checker.check(slow) == "it takes more than 0.25 s of computing to compile"
    assert checker.check(to_lark(StructuredOutputs(regex="a+"))) == "", "the next one finds a child again"


def test_a_compile_that_never_gets_the_cpu_is_stopped_too(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint_checker, "COMPILE_WALL_S", 0.2)
    monkeypatch.setattr(constraint_checker, "COMPILE_CPU_S", 60.0)
    assert checker.check(to_lark(StructuredOutputs(json=slow_schema()))) == "it takes more than 0.2 s to compile"


def test_a_grammar_that_is_too_deep_is_refused(checker: GrammarChecker) -> None:
    assert checker.check(deep_grammar(100)) == ""
    assert checker.check(deep_grammar(5000)) == "it is nested too deeply"


@pytest.mark.linux  # memory is bounded on Linux only
def test_a_compile_that_takes_too_much_memory_is_stopped(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint_checker, "COMPILE_MEMORY_BYTES", 32 << 20)
    monkeypatch.setattr(constraint_checker, "COMPILE_CPU_S", 20.0)
    monkeypatch.setattr(constraint_checker, "COMPILE_WALL_S", 120.0)
    chain = "\n".join(f'T{i}: T{i + 1}{{0,3}} "x"' for i in range(1500))
    grammar = to_lark(StructuredOutputs(grammar=f'start: T0\n{chain}\nT1500: "y"'))
    assert checker.check(grammar) == "it takes more than 32 MiB to compile"


def test_a_child_that_has_left_is_replaced(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_checker, "CLOSE_S", 60.0)
    grammar = to_lark(StructuredOutputs(regex="a"))
    assert checker.check(grammar) == ""
    process = checker._process
    assert process is not None
    process.send_signal(signal.SIGALRM)  # what ends an idle one
    process.wait()
    assert checker.check(grammar) == ""
    assert checker._process is not process
    assert checker.close() == 0 and checker.close() == 0


@pytest.mark.parametrize("leaving", ["exit", "kill -ALRM $$"])
def test_a_child_that_leaves_as_it_is_asked_is_replaced(checker: GrammarChecker, leaving: str) -> None:
    """The child accepts the grammar and sends no answer: that is no result."""
    grammar = to_lark(StructuredOutputs(regex="a"))
    script = f"head -c 4 > /dev/null; {leaving}"
    process = subprocess.Popen(["bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    checker._process = process
    checker._ending = weakref.finalize(checker, constraint_checker._close_process, process)
    assert checker.check(grammar) == ""


def test_a_child_that_cannot_start_is_the_servers_fault(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(EngineError, match="the grammar checker did not start"):
        checker.check("start: a")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(EngineError, match="the grammar checker did not start"):
        checker.check("start: a")


def test_a_child_that_is_killed_while_it_starts_is_started_again(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "python"
    once = tmp_path / "once"
    script.write_text(f'#!/bin/sh\n[ -e {once} ] && exec {sys.executable} "$@"\ntouch {once}\nkill -9 $$\n')
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    assert checker.check(to_lark(StructuredOutputs(regex="a+"))) == "" and once.exists()


# -- walking -----------------------------------------------------------------------------------------------------------


def walk(guide: GrammarState, text: bytes) -> bool:
    return all(guide.consume(byte) for byte in text)


def test_a_walk_that_takes_too_long_ends_its_request(own: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Constraint(compiled(StructuredOutputs(regex="a+"), own), RULES).fork(None)
    assert walk(guide, b"aaa")
    monkeypatch.setattr(constraint, "START_CPU_S", 0.0)
    monkeypatch.setattr(constraint, "TOKEN_CPU_S", 0.0)
    with pytest.raises(InvalidRequestError, match=r"took too much: 0.0 s of computing for 4 tokens") as caught:
        walk(guide, b"a")
    assert caught.value.code == "constraint_too_complex" and caught.value.param == "structured_outputs"


def test_one_pause_of_the_machine_does_not_end_a_request(own: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of a virtual machine counts as CPU time of the thread that ran."""
    times = iter((0.0, 2.0, 2.0, 2.01, 2.01, 2.21, 2.21, 2.41))  # steps of 2 s, 10 ms, 200 ms and 200 ms
    guide = Constraint(compiled(StructuredOutputs(regex="a+"), own), RULES).fork(None)
    monkeypatch.setattr("chatcache.decoding.grammar.state.time.thread_time", lambda: next(times))
    assert walk(guide, b"aaa")
    with pytest.raises(InvalidRequestError, match=r"took too much: 0.4 s of computing for 4 tokens"):
        walk(guide, b"a")


def test_a_walk_that_takes_too_much_memory_ends_its_request(
    own: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = Constraint(compiled(StructuredOutputs(regex="a+"), own), RULES).fork(None)
    sizes = iter((10 << 20, 300 << 20))
    faulted = iter((0, 400 << 20))
    monkeypatch.setattr(own, "resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(own, "faulted_bytes", lambda: next(faulted))
    with pytest.raises(InvalidRequestError, match="took too much: 290 MiB of memory"):
        walk(guide, b"a")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is measured on Linux only")
@pytest.mark.parametrize("in_other_thread", [True, False])
def test_a_walk_is_not_charged_with_memory_of_other_threads(
    own: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, in_other_thread: bool
) -> None:
    monkeypatch.setattr(constraint, "MAX_GROWTH_BYTES", 96 << 20)
    monkeypatch.setattr(constraint, "START_CPU_S", 60.0)
    guide = Constraint(compiled(StructuredOutputs(regex="a+"), own), RULES).fork(None)
    blocks: list[mmap.mmap] = []
    step = GrammarState._step

    def grow() -> None:
        blocks.append(mmap.mmap(-1, 128 << 20))  # not from the heap, which may reuse freed memory
        np.frombuffer(blocks[-1], np.uint8).fill(1)

    def growing_step(self: GrammarState, tokens: list[int]) -> None:
        if in_other_thread:
            other.submit(grow).result()
        else:
            grow()
        step(self, tokens)

    monkeypatch.setattr(GrammarState, "_step", growing_step)
    with ThreadPoolExecutor(1) as other:
        other.submit(int).result()  # start the thread
        if in_other_thread:
            assert walk(guide, b"a")
        else:
            with pytest.raises(InvalidRequestError, match="MiB of memory"):
                walk(guide, b"a")


HUNGRY = r"[\p{L}\s]{1,500}"


def test_a_grammar_used_up_by_one_request_still_serves_the_others(
    own: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance shares a lexer, and its failures, among all copies of a matcher."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 600)
    outputs = StructuredOutputs(regex=HUNGRY)
    first, second = (Constraint(compiled(outputs, own), RULES) for _ in range(2))
    hog, other = first.fork(None), second.fork(None)
    assert walk(other, b"abc")
    with pytest.raises(InvalidRequestError, match=r"took too much: .*too many states"):
        walk(hog, "日本 é".encode() * 40)
    assert not own._cache, "nobody else is given what is used up"
    copied = other.fork()
    assert walk(other, b"def") and walk(copied, b"xyz"), "both begin anew, behind the scenes"
    newcomer = Constraint(compiled(outputs, own), RULES).fork(None)
    assert walk(newcomer, b"abc")


def test_a_library_that_panics_ends_the_request(own: GrammarCompiler) -> None:
    class Panic(BaseException):
        """What a panic of the library's looks like: no `Exception`."""

    class Broken:
        def consume_tokens(self, tokens: list[int]) -> bool:
            raise Panic("at the disco")

    guide = Constraint(compiled(StructuredOutputs(regex="a+"), own), RULES).fork(None)
    guide._matcher = Broken()
    with pytest.raises(EngineError, match="the grammar could not be followed"):
        guide.consume(97)


def few_words() -> GrammarCompiler:
    """A vocabulary without "c"."""
    return GrammarCompiler([piece if piece in (b"a", b"b", b"ab") else b"" for piece in PIECES], MODEL_INFO)


def test_a_dead_end_ends_a_sample_and_drops_a_beam() -> None:
    stuck = SamplingParams(structured_outputs=StructuredOutputs(regex="ac"))
    with pytest.raises(GrammarDeadEndError, match="no token of this model continues") as caught:
        run(strategy_of(stuck, within=few_words()), PROMPT, TableModel(VOCAB_SIZE))
    assert caught.value.code == "constraint_dead_end"
    beams = BeamSearchParams(beam_width=6, structured_outputs=StructuredOutputs(regex="ac|ab|b|aac"))
    found = run(strategy_of(beams, within=few_words()), PROMPT, TableModel(VOCAB_SIZE))
    assert {text_of(outcome.tokens) for outcome in found.outcomes.values() if outcome.tokens} == {b"ab", b"b"}
    nothing = BeamSearchParams(beam_width=2, structured_outputs=StructuredOutputs(regex="ac"))
    with pytest.raises(GrammarDeadEndError):
        run(strategy_of(nothing, within=few_words()), PROMPT, TableModel(VOCAB_SIZE))
    with pytest.raises(InvalidRequestError, match="no token of this model begins a text that does"):
        compiled(StructuredOutputs(regex="c"), few_words())


# -- what is remembered ------------------------------------------------------------------------------------------------


def test_a_grammar_is_compiled_once(own: GrammarCompiler) -> None:
    first, second = (own.start(StructuredOutputs(regex="a+")) for _ in range(2))
    assert first.future is second.future and first.future is not own.start(StructuredOutputs(regex="b+")).future


def test_a_failure_is_not_remembered(own: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarChecker, "check", lambda *_: "it had a bad day")
    with pytest.raises(InvalidRequestError, match="it had a bad day"):
        compiled(StructuredOutputs(regex="a+"), own)
    monkeypatch.undo()
    assert compiled(StructuredOutputs(regex="a+"), own).failure() is None


def resident_mib() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def many_schemas(own: GrammarCompiler, first: int, count: int) -> None:
    for number in range(first, first + count):
        properties = {f"p{number}_{i}": {"type": "string", "maxLength": number % 97} for i in range(8)}
        grammar_future = compiled(StructuredOutputs(json=json.dumps({"type": "object", "properties": properties})), own)
        walk(Constraint(grammar_future, RULES).fork(None), b'{"p')


@pytest.mark.linux  # reads /proc
@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.slow
def test_endless_new_schemas_take_no_more_memory(own: GrammarCompiler, count: int) -> None:
    many_schemas(own, 0, 2 * MAX_GRAMMARS)
    before = resident_mib()
    many_schemas(own, 2 * MAX_GRAMMARS, count)
    assert len(own._cache) == MAX_GRAMMARS
    assert resident_mib() - before < 24


def test_grammars_that_grow_are_forgotten_oldest_first(own: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_compiler, "MAX_GROWTH_BYTES", 100)
    tickets = [compiled(StructuredOutputs(regex=f"a{i}"), own) for i in range(3)]
    for grammar_future in tickets:
        own.record_growth(grammar_future.grammar, grammar_future.future.result(), 40)
    assert list(own._cache) == [grammar_future.grammar for grammar_future in tickets[1:]]
    own.record_growth(tickets[0].grammar, tickets[0].future.result(), 40)  # forgotten, but still in use
    assert len(own._cache) == 1


def test_errors_are_catalogued() -> None:
    assert issubclass(GrammarDeadEndError, ChatcacheError) and GrammarDeadEndError.status == 400
