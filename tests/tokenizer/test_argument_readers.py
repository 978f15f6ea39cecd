"""Arguments as literals: what Python and JSON read in them, at every split point."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import time
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chatcache.tokenizer.argument_readers import LiteralReader, TaggedReader, types_of
from chatcache.tokenizer.tool_formats import LiteralArguments, TaggedArguments

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def read(text: str, size: int) -> str:
    """Read arguments in chunks; return them as JSON text."""
    reader = LiteralReader(LiteralArguments(), "f", ")")
    found, held = "", ""
    for start in range(0, len(text), size):
        held += text[start : start + size]
        held = held[reader.read(held) :]
        found += reader.drain()
    reader.read(held, last=True)
    assert reader.is_finished
    return found + reader.drain()


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.from_regex("[a-z_]{1,5}", fullmatch=True), VALUES, max_size=3), st.integers(1, 9))
def test_arguments_written_by_python_or_as_json_are_read(arguments: dict[str, object], size: int) -> None:
    python = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    as_json = ",".join(f"{key} = {json.dumps(value)}" for key, value in arguments.items())
    assert json.loads(read(f"{python})", size)) == arguments
    assert json.loads(read(f"{as_json} )", size)) == arguments


@settings(max_examples=500, deadline=None)
@given(st.text("01789_.eExXobaf+-j", min_size=1, max_size=8), st.integers(1, 9))
@example(".5", 1)
@example("5.", 1)
@example("-0x1F", 2)
@example("1_000", 2)
@example("0o17", 9)
@example("007", 1)
@example("1e999", 1)
@example("1_0e999", 1)
@example("9" * 400, 9)
@example("inf", 1)
@example("-nan", 1)
@example("\N{ARABIC-INDIC DIGIT THREE}", 1)
def test_number_literals_of_json_or_python_are_numbers_and_other_words_strings(word: str, size: int) -> None:
    expected: object = word
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(word)
        if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
            expected = value
    with contextlib.suppress(ValueError):
        expected = json.loads(word)
    found = json.loads(read(f"a={word}, b=[{word}])", size))
    assert found == {"a": expected, "b": [expected]}
    assert type(found["a"]) is type(expected)


@pytest.mark.parametrize("size", [1, 511, 513, 9_999])
def test_too_long_words_end_the_arguments(size: int) -> None:
    assert read(f"a={'1' * 512})", size) == f'{{"a": {"1" * 512}}}'
    assert read(f"a={'1' * 513})", size) == '{"a": '


@pytest.mark.parametrize("escape", [r"\x41", r"\u00e9", r"\U0001F600", r"\n", r"\\", r"\'", r"\"", r"\q", r"\0", r"\a"])
def test_escapes_are_those_of_python(escape: str) -> None:
    expected = ast.literal_eval(f'"{escape}"') if escape != r"\q" else "\\q"
    for size in (1, 3, 99):
        assert json.loads(read(f'a="{escape}")', size)) == {"a": expected}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a="""x\n"y" z""")', {"a": 'x\n"y" z'}),
        ("a='''it's''', b='''''')", {"a": "it's", "b": ""}),
        ("a=\"\", b='' , c=[\"\", ''])", {"a": "", "b": "", "c": ["", ""]}),
        ("a=1,)", {"a": 1}),
        ("a=(1,), b=[2, ], c={'d': 3,})", {"a": [1], "b": [2], "c": {"d": 3}}),
    ],
)
def test_texts_of_several_lines_and_last_commas_are_those_of_python(text: str, expected: dict[str, object]) -> None:
    for size in (1, 2, 3, 99):
        assert json.loads(read(text, size)) == expected


@pytest.mark.parametrize(
    "text", ["a=)", "a=,)", "a=1,,)", "a=[,])", "a=[1)", "=1)", "a b)", "a=1 2)", "a={1: 2]", "a=(", 'a="x']
)
def test_broken_literals_end_without_a_closing_brace(text: str) -> None:
    reader = LiteralReader(LiteralArguments(), "f", ")")
    reader.read(text, last=True)
    assert not reader.is_complete
    with pytest.raises(ValueError):
        json.loads(reader.drain())


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"$ref": "#/$defs/a"}, {"integer", "null"}),
        ({"anyOf": [{"const": "x"}, {"enum": [1.5, None]}]}, {"string", "number", "null"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"$ref": "#/$defs/loop"}, {"string", "integer", "number", "boolean", "null", "array", "object"}),
    ],
)
def test_types_of_a_schema(schema: dict[str, object], types: set[str]) -> None:
    root = {"$defs": {"a": {"type": ["integer", "null"]}, "loop": {"$ref": "#/$defs/loop"}}}
    assert types_of(schema, root) == types


def test_types_of_a_schema_with_many_references_to_itself_are_found_at_once() -> None:
    loop = {"anyOf": [*({"$ref": "#/$defs/loop"} for _ in range(100)), {"type": "string"}]}
    assert "string" in types_of({"$ref": "#/$defs/loop"}, {"$defs": {"loop": loop}})


@pytest.mark.parametrize("size", [4, 1_000])
def test_white_space_around_the_name_of_an_argument_takes_no_time(size: int) -> None:
    """The limit is a thousand times what it takes."""
    reader, held = TaggedReader(TaggedArguments("<parameter=", ">\n", "\n</parameter>\n"), "f", {}), ""
    text = f"<parameter={' ' * 240}a{' ' * 240}>\nb\n</parameter>\n</function>"
    started_s = time.process_time()
    for start in range(0, len(text), size):
        held += text[start : start + size]
        held = held[reader.read(held) :]
    assert time.process_time() - started_s < 1
    assert reader.is_finished and json.loads(reader.drain()) == {"a": "b"}
