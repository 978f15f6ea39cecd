"""Tool calls and reasoning from the stream: however it is cut, what a whole-text parser finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chatcache.tokenizer.reasoning import ReasoningParser
from chatcache.tokenizer.tool_formats import HERMES, LFM2, LLAMA3, MISTRAL, PYTHONIC, QWEN3_CODER, ToolCallSyntax
from chatcache.tokenizer.tool_parser import ParsedText, ToolCallDelta, ToolCallParser
from tests.tokenizer import oracles as oracle
from tests.tokenizer.oracles import Call

FUNCTIONS: dict[str, dict[str, Any]] = {"f": {}, "get_weather": {}}
NAMES = frozenset(FUNCTIONS)
FORMATS: dict[str, tuple[ToolCallSyntax, Callable[[str], tuple[str, list[Call]]]]] = {
    "hermes": (HERMES, oracle.hermes),
    "llama3": (LLAMA3, lambda text: oracle.llama3(text, NAMES)),
    "mistral": (MISTRAL, oracle.mistral),
}
# What models write, and what they write wrongly, in pieces that hypothesis puts together.
PIECES = [
    *(
        '{"name": "f", "arguments": {"a": [1, "}<\\""]}}',
        '{"name":"get_weather","parameters":{}}',
        '{"name": "other"}',
        "{{",
        '"parameters": {{"a": ',
        "}}",
    ),
    *('{"arguments": {"x": null}, "name": "f"}', '{"name": "f"', '"arguments": {"b": "\\u00e9 ', '{"a": 1}', "{}"),
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_call>\n",
        "\n</tool_call>",
        "<tool",
        "<|python_tag|>",
        "<|py",
        "[TOOL_CALLS]",
    ),
    *("[ARGS]", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS][", "[TOOL", "[AR", "f", "]", ",", ";", "{", "}", '"', ":", "\\"),
    *(" ", "\n", "  \n", "Let me see.", "é🎉", "<think>", "</think>", "1", '"name": 5', '"name": "', "<", "["),
]
written = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(ends)]


def joined(parts: Sequence[ParsedText]) -> tuple[str, list[Call]]:
    """Text and calls as a client adds them up; every call begins with its name, in order."""
    calls: list[Call] = []
    for part in (call for parsed in parts for call in parsed.calls):
        if part.name:
            assert part.number == len(calls)
            calls.append(Call(part.name, ""))
        assert part.number == len(calls) - 1
        calls[-1] = Call(calls[-1].name, calls[-1].arguments + part.arguments)
    return "".join(parsed.text for parsed in parts), calls


def parse(syntax: ToolCallSyntax, deltas: Sequence[str]) -> tuple[str, list[Call]]:
    parser = ToolCallParser(syntax, FUNCTIONS)
    return joined([*(parser.push(delta) for delta in deltas), parser.finish()])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=400, deadline=None)
@given(text=written, places=st.lists(st.integers(0, 500), max_size=12))
@example(text='<tool_call>{"name":"f","arguments":{"a":1}</tool_call>', places=list(range(60)))
@example(text='<tool_call>{"name":"f","arguments":{"a":1</tool_call> so', places=list(range(60)))
@example(text='[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}', places=list(range(60)))
@example(text='{"name": "f", "parameters": {}} ; {"name": "other"', places=list(range(60)))
@example(text='<tool_call>{"name": "f", "arguments": {"a": 1}}}\n} </tool_call> so', places=list(range(60)))
@example(text='{"name": "f"}\n{"name": "f"},{"name": "f"}{"name": "other"} {"name": "f"}', places=list(range(80)))
@example(text='{"name": "f"}; <|python_tag|>{"name": "other"}; <|python_tag|>no', places=list(range(60)))
@example(text='{"name": "f"};<|python_tag|> <|python_tag|>{{"name": "f"}}', places=list(range(60)))
@example(text='<|python_tag|>{"name": "f"}{"name": "other"}\n{"a": 1}', places=list(range(60)))
@pytest.mark.slow
def test_any_cutting_gives_what_the_whole_text_holds(name: str, text: str, places: list[int]) -> None:
    syntax, whole = FORMATS[name]
    expected = whole(text)
    assert parse(syntax, [text]) == expected
    assert parse(syntax, cut(text, places)) == expected
    assert parse(syntax, list(text)) == expected


# Calls in notations other than JSON, whole and in parts.
OTHER_PIECES = [
    *("[f(a=.5, b=[0x1F, 1_000]), f()]", "[f(", "f(", "a='", '"""', "a=5.", "1e999", ", ", ")", "]", "\\x4"),
    *("<|tool_call_start|>", "<|tool_call_end|>"),
    *("<function=f>\n", "<parameter=a>\n", "\n</parameter>\n", "</function>"),
]


@pytest.mark.parametrize("syntax", [PYTHONIC, LFM2, QWEN3_CODER], ids=["pythonic", "lfm2", "qwen3_coder"])
@settings(max_examples=400, deadline=None)
@given(
    text=st.lists(st.sampled_from(PIECES + OTHER_PIECES) | st.text(max_size=3), max_size=12).map("".join),
    places=st.lists(st.integers(0, 500), max_size=12),
)
@example(text="[f(a=.5, b=[0x1F, 1_000])]", places=[5, 7, 12, 14, 18])
@example(text=f"[f(a={'1' * 600})]", places=list(range(600)))
@pytest.mark.slow
def test_any_cutting_gives_what_one_piece_gives(syntax: ToolCallSyntax, text: str, places: list[int]) -> None:
    expected = parse(syntax, [text])
    assert parse(syntax, cut(text, places)) == expected
    assert parse(syntax, list(text)) == expected


GOOD = {
    "hermes": "Let me see.\n<tool_call>\n%s\n</tool_call>\n<tool_call>\n%s\n</tool_call>",
    "llama3": "%s; %s",
    "mistral": "Let me see. [TOOL_CALLS][%s, %s]",
}


@pytest.mark.parametrize("name", FORMATS)
def test_what_models_write_when_all_is_well(name: str) -> None:
    one = '{"name": "get_weather", "arguments": {"in":  "Z\\u00fcrich <tool_call>"}}'
    two = '{"arguments": {"deep": {"x": [1, 2]}}, "name": "f"}'
    calls = [Call("get_weather", '{"in":  "Z\\u00fcrich <tool_call>"}'), Call("f", '{"deep": {"x": [1, 2]}}')]
    text = "" if name == "llama3" else "Let me see."
    assert parse(FORMATS[name][0], list(GOOD[name] % (one, two))) == (text, calls)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Let me look.%sDone.", "Let me look.\nDone."),
        ("Let me look. %s\n\n%s  Done.\n%s Bye", "Let me look.\nDone.\nBye"),
        ("\n%sDone.", "Done."),
        ("Let me look.%s\n", "Let me look."),
        ("Let me look.%s<tool_call>no", "Let me look.\n<tool_call>no"),
    ],
)
def test_text_around_calls_is_separated_by_a_line_break(text: str, shown: str) -> None:
    text = text.replace("%s", '<tool_call>{"name": "f"}</tool_call>')
    for deltas in ([text], list(text)):
        assert parse(HERMES, deltas)[0] == shown


@pytest.mark.parametrize("opening", ["", "<|python_tag|>"])
@pytest.mark.parametrize("separator", ["; ", ", ", "\n", "\n\n", ";\n", ""])
def test_llama3_calls_with_any_separator_are_calls(opening: str, separator: str) -> None:
    text = opening + separator.join(f'{{"name": "f", "parameters": {{"a": {n}}}}}' for n in range(3))
    for deltas in ([text], list(text)):
        assert parse(LLAMA3, deltas) == ("", [Call("f", f'{{"a": {n}}}') for n in range(3)])


@pytest.mark.parametrize("separator", [";", "; ", ",", "\n;\n", ""])
@pytest.mark.parametrize("opening", ["", "<|python_tag|>", "So. <|python_tag|>"])
def test_llama3_marker_after_a_separator_starts_the_next_call(opening: str, separator: str) -> None:
    call = '{"name": "f", "parameters": {"a": 1}}'
    text = f"{opening}{call}{separator}<|python_tag|>{call}{separator} <|python_tag|>{call}"
    for deltas in ([text], list(text)):
        assert parse(LLAMA3, deltas) == (opening.split("<")[0].rstrip(), [Call("f", '{"a": 1}')] * 3)


@pytest.mark.parametrize("name", FORMATS)
def test_call_in_doubled_braces_is_a_call(name: str) -> None:
    arguments = '{ "a": {"b": "}}"}, "c": {}}'
    one = f'{{{{"name": "f", "arguments": {arguments}}}}}'
    two = '{ {"arguments": {{ "a": {{"b": "}}"}}, "c": {{}}}}, "name": "get_weather"} }'
    text = GOOD[name] % (one, two)
    calls = [Call("f", arguments), Call("get_weather", arguments)]
    for deltas in ([text], list(text)):
        assert parse(FORMATS[name][0], deltas) == ("" if name == "llama3" else "Let me see.", calls)


@pytest.mark.parametrize("text", ["{{name}}", "{{", '{{"name": "other"}}', "{{}}", '{"a": {{"name": "f"}}}'])
def test_llama3_doubled_braces_without_a_call_are_text(text: str) -> None:
    for deltas in ([text], list(text)):
        assert parse(LLAMA3, deltas) == (text, [])


def test_id_of_a_rejected_call_is_not_that_of_the_next_one() -> None:
    syntax = replace(MISTRAL, id_open="[CALL_ID]")
    parser = ToolCallParser(syntax, FUNCTIONS)
    parsed = parser.push('[TOOL_CALLS]f[CALL_ID]abc no [TOOL_CALLS][{"name": "f", "arguments": {}}]')
    assert parsed.text == "[TOOL_CALLS]f[CALL_ID]abc no" and parsed.calls[0] == ToolCallDelta(0, "f")


@pytest.mark.parametrize(
    "rest", [', {"x": 1}', '{"name": "other"}', ", and so on", "; done", "; <|python_tag|>no", "; <|py"]
)
def test_llama3_text_after_a_call_that_is_no_call_is_text(rest: str) -> None:
    for deltas in ([f'{{"name": "f"}}{rest}'], list(f'{{"name": "f"}}{rest}')):
        assert parse(LLAMA3, deltas) == (rest, [Call("f", "{}")])


@pytest.mark.parametrize("surplus", ["}", "}\n}", "\n}}"])
@pytest.mark.parametrize("name", FORMATS)
def test_surplus_braces_after_a_call_in_json_are_not_text(name: str, surplus: str) -> None:
    one = '{"name": "f", "arguments": {"a": {}}}'
    text = GOOD[name] % (one + surplus, one + surplus)
    for deltas in ([text], list(text)):
        assert parse(FORMATS[name][0], deltas) == parse(FORMATS[name][0], [GOOD[name] % (one, one)])


def test_the_name_comes_as_soon_as_it_is_complete_and_arguments_as_they_come() -> None:
    parser = ToolCallParser(HERMES)
    seen = [parser.push(piece) for piece in ('Hm <tool_call>{"name": "f', '", "argu', 'ments": {"a"', ": 1", "2}", "}")]
    assert [parsed.text for parsed in seen] == ["Hm", "", "", "", "", ""]
    assert [[(call.name, call.arguments) for call in parsed.calls] for parsed in seen] == [
        *([], [("f", "")], [("", '{"a"')], [("", ": 1")], [("", "2}")], []),
    ]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", "Wait <tool_c", ("Wait <tool_c", [])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a', ("", [Call("f", '{"a')])),
        ("hermes", '<tool_call>{"name": "', ('<tool_call>{"name": "', [])),
        ("hermes", "<tool_call>no</tool_call>", ("<tool_call>no</tool_call>", [])),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [Call("f", "{}")])),
        ("hermes", '<tool_call>{"name": "f"}\n<', ("", [Call("f", "{}")])),
        ("hermes", 'Hm <tool_call>{"name": "f"}\n</tool_call', ("Hm", [Call("f", "{}")])),
        ("llama3", '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
        ("llama3", '<|python_tag|>{"name": "Bob", "parameters": 3}', ("", [Call("Bob", "3")])),
        ("llama3", 'So {"name": "f"}', ('So {"name": "f"}', [])),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1', ("", [Call("f", '{"a": 1')])),
        ("mistral", "[TOOL_CALLS] f[AR", ("[TOOL_CALLS] f[AR", [])),
        ("hermes", '<tool_call>{"name": "\\ud800"}', ('<tool_call>{"name": "\\ud800"}', [])),
    ],
)
def test_what_is_cut_off_or_no_call(name: str, text: str, expected: tuple[str, list[Call]]) -> None:
    assert parse(FORMATS[name][0], [text]) == expected


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> so'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}'),
        ("llama3", '{"name": "f", "parameters": {"a": 1}} ; '),
    ],
)
def test_call_is_open_from_its_name_to_the_end_of_its_object(name: str, whole: str) -> None:
    opened = whole.index('f"') + 2 if '"f"' in whole else whole.index("{")
    closed = whole.rindex("}") + 1
    for length in range(len(whole) + 1):
        parser = ToolCallParser(FORMATS[name][0], FUNCTIONS)
        calls = joined([parser.push(whole[:length]), parser.finish()])[1]
        assert parser.has_open_call is (bool(calls) and length < closed)
        assert bool(calls) is (length >= opened)


@pytest.mark.parametrize(
    ("syntax", "broken"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": <b>}}</tool_call>'),
        (PYTHONIC, "[f(a=g(1))]"),
        (QWEN3_CODER, f"<tool_call><function=f><parameter={'a' * 600}></tool_call>"),
    ],
)
def test_call_whose_arguments_violate_their_notation_stays_open(syntax: ToolCallSyntax, broken: str) -> None:
    parser = ToolCallParser(syntax, FUNCTIONS)
    assert [call.name for call in joined([parser.push(broken), parser.finish()])[1]] == ["f"]
    assert parser.has_open_call


def test_plain_text_is_held_back_no_longer_than_it_must() -> None:
    parser = ToolCallParser(HERMES)
    assert [parser.push(piece).text for piece in ("a", " ", "b <", "i> c", "\n", "<tool_", "bar")] == [
        *("a", "", " b", " <i> c", "", "", "\n<tool_bar"),
    ]


@settings(max_examples=400, deadline=None)
@given(text=written, places=st.lists(st.integers(0, 500), max_size=12), inside=st.booleans())
@pytest.mark.slow
def test_reasoning_is_what_the_whole_text_holds(text: str, places: list[int], inside: bool) -> None:
    for deltas in ([text], cut(text, places), list(text)):
        parser = ReasoningParser(begins_inside=inside)
        parts = [*(parser.push(delta) for delta in deltas), parser.finish()]
        assert (
            "".join(part.reasoning for part in parts),
            "".join(part.text for part in parts),
        ) == oracle.reasoning(text, inside)


@pytest.mark.parametrize("text", ["so", "so <", "so\n</think"])
def test_reasoning_does_not_end_with_a_part_of_its_closing_marker(text: str) -> None:
    parser = ReasoningParser(begins_inside=True)
    assert parser.push(text).reasoning + parser.finish().reasoning == "so"


def test_what_is_thought_comes_as_it_is_thought() -> None:
    parser = ReasoningParser()
    parts = [
        parser.push(piece) for piece in ("<th", "ink>\n", "so", " it", " is\n</th", "ink>\n\n", "Yes", " </think>")
    ]
    assert [part.reasoning for part in parts] == ["", "", "so", " it", " is", "", "", ""]
    assert [part.text for part in parts] == ["", "", "", "", "", "", "Yes", " </think>"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_long_reply_costs_no_more_than_its_length(name: str) -> None:
    """Beginnings of calls one in another are read once: counted in states, not in seconds."""
    syntax = FORMATS[name][0]
    text = (syntax.marker + '{"a": "') * 2_000
    parser, num_states = ToolCallParser(syntax, FUNCTIONS), 0
    inner = ToolCallParser._in_call

    def counted(self: ToolCallParser, text: str, last: bool) -> str:
        nonlocal num_states
        num_states += 1
        return inner(self, text, last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToolCallParser, "_in_call", counted)
        found = joined([parser.push(text), parser.finish()])
    assert found == (text, []) and num_states <= 4_000
