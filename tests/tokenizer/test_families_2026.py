"""Twelve families: what their templates render is what the parser reads, at every split point of the stream.

The syntax is derived from each template (`template_probes`); only gpt-oss has a parser of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import jsonschema
import pytest

from chatcache.tokenizer.chat_template import RawJson, parse_arguments
from chatcache.tokenizer.harmony import HarmonyParser
from chatcache.tokenizer.reply_format import ReplyFormat, ReplyParser, detect_format
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.tokenizer.tool_formats import (
    HARMONY,
    JsonArguments,
    LiteralArguments,
    TaggedArguments,
)
from chatcache.tokenizer.tool_grammar import CallableFunction, ToolChoice
from chatcache.tokenizer.tool_parser import ParsedText
from chatcache.types.json_schema import relax_schema
from tests.tokenizer.families_2026 import NAMES, family_of, tokenizer_of
from tests.tokenizer.grammar_walk import draw, new_matcher, walk

PLACE = {
    "type": "object",
    "properties": {"lat": {"type": "number"}, "name": {"type": "string"}, "open": {"type": "boolean"}},
    "required": ["lat", "name"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/place"},
        "ratio": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": PLACE},
}
ANY: dict[str, Any] = {"type": "object"}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "f-2": NOTHING, "look.up": ANY}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in FUNCTIONS.items()
]
CALLABLE = tuple(CallableFunction(name, json.dumps(schema)) for name, schema in FUNCTIONS.items())
PIECES = [*"\"'\\{}[],:=()<>&x0 \n\t\u2028", "Zürich", "é🎉", "</b>", "\\n", "<think", "call", "```", "1.5", "null"]
USER = {"role": "user", "content": "Weather?"}


class Sample(NamedTuple):
    message: dict[str, Any]
    reply: str  # what a model writes for it

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(call["function"]["name"], call["function"]["arguments"]) for call in self.message["tool_calls"]]


def text_value(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(8)))


def arguments_of(rng: random.Random, name: str) -> dict[str, Any]:
    if name == "f-2":
        return {}
    if name == "look.up":
        return {key: f"w {text_value(rng)}" for key in rng.sample(["a", "b_1", "zz"], rng.randrange(4))}
    values: dict[str, Any] = {
        "city": text_value(rng),
        "days": rng.choice([0, -3, 10**20, 7]),
        "exact": rng.random() < 0.5,
        "note": rng.choice([None, f"n {text_value(rng)}"]),
        "place": {"lat": rng.choice([1.5, -0.25, 3]), "name": text_value(rng), "open": True},
        "ratio": rng.choice([0.1, 2, -1e-7, 1e22]),
        "tags": [text_value(rng) for _ in range(rng.randrange(3))],
        "unit": rng.choice(["C", "F"]),
    }
    chosen = {"city", *rng.sample(sorted(values), rng.randrange(len(values)))}
    return {key: value for key, value in values.items() if key in chosen}


def sample(name: str, rng: random.Random) -> Sample:
    """Draw an assistant's message with calls, and render the reply of the model."""
    family, tokenizer = family_of(name), tokenizer_of(name)
    num_calls = rng.randrange(1, 4) if family.several else 1
    calls = []
    for _ in range(num_calls):
        function = rng.choice(sorted(FUNCTIONS))
        call_id = "".join(rng.choices("abcDEF0123456789", k=9))
        calls.append({"id": call_id, "type": "function", "function": {"name": function}})
        calls[-1]["function"] = {"name": function, "arguments": arguments_of(rng, function)}
    content = rng.choice(["", "I will look. é🎉 [x] <b>{", "Two\n\nlines: 1 < 2"]) if family.texts_before else ""
    message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": calls}
    if family.thought is not None and rng.random() < 0.5:
        message["reasoning_content"] = 'Hm.\n\nLook {"a": [1]} up <x>'
    return Sample(message, reply_of(tokenizer, message))


def reply_of(tokenizer: Tokenizer, message: dict[str, Any]) -> str:
    head = tokenizer.render([USER], tools=TOOLS)
    calls = [
        {**call, "function": {**call["function"], "arguments": raw_json(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    text = tokenizer.render([USER, {**message, "tool_calls": calls}], add_generation_prompt=False, tools=TOOLS)
    assert text.startswith(head)
    reply = text[len(head) :]
    stops = [stop for stop in tokenizer.eos_texts if reply.endswith(stop)]
    return reply.removesuffix(stops[0]) if stops else reply


def raw_json(arguments: dict[str, Any]) -> RawJson | str:
    """Return arguments as the server gives them to templates."""
    return parse_arguments(json.dumps(arguments, ensure_ascii=False))


def joined(parts: Sequence[ParsedText]) -> tuple[str, str, list[tuple[str, Any]], list[str]]:
    """Return text, reasoning, calls and call ids as a client adds them up."""
    names: list[str] = []
    ids: list[str] = []
    arguments: list[str] = []
    for part in (call for parsed in parts for call in parsed.calls):
        if part.name:
            assert part.number == len(names)
            names.append(part.name)
            ids.append(part.call_id)
            arguments.append("")
        arguments[part.number] += part.arguments
    calls = [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]
    text = "".join(parsed.text for parsed in parts)
    return text, "".join(parsed.reasoning for parsed in parts), calls, ids


def parse(form: ReplyFormat, chunks: Sequence[str]) -> tuple[str, str, list[tuple[str, Any]], list[str]]:
    parser = ReplyParser(form, "", FUNCTIONS)
    return joined([*(parser.push(chunk) for chunk in chunks), parser.finish()])


def check(name: str, drawn: Sample, splits: Iterator[list[int]]) -> None:
    form = detect_format(tokenizer_of(name))
    for places in splits:
        ends = sorted({0, len(drawn.reply), *places})
        chunks = [drawn.reply[start:end] for start, end in pairwise(ends)]
        text, reasoning, calls, ids = parse(form, chunks)
        assert calls == drawn.calls, drawn.reply
        assert text.strip() == drawn.message["content"] and reasoning == drawn.message.get("reasoning_content", "")
        if name == "mistral ids":
            assert ids == [call["id"] for call in drawn.message["tool_calls"]]


@pytest.mark.parametrize("name", NAMES)
def test_syntax_is_derived_from_the_template_of_each_family(name: str) -> None:
    tokenizer = tokenizer_of(name)
    form = detect_format(tokenizer)
    tagged = ("qwen3.5", "qwen3 coder", "nemotron3", "glm4", "glm4.6", "deepseek v3.2")
    kinds: dict[str, type[object]] = dict.fromkeys(tagged, TaggedArguments)
    kinds |= dict.fromkeys(("llama4", "gemma3", "gemma4", "lfm2"), LiteralArguments)
    assert form.supports_tools and form.syntax is not None
    assert isinstance(form.syntax.arguments, kinds.get(name, JsonArguments))
    assert (form.syntax == HARMONY) is family_of(name).harmony
    thought = family_of(name).thought
    if thought is not None and not family_of(name).harmony:
        assert form.reasoning is not None
        marks = form.reasoning.opening, form.reasoning.closing
        assert marks == tuple(text.replace("\\n", "") for text in thought)


@pytest.mark.parametrize("name", NAMES)
def test_calls_as_rendered_are_parsed_at_every_split_point(name: str) -> None:
    rng = random.Random(name)
    for _ in range(4):
        drawn = sample(name, rng)
        length = len(drawn.reply)
        check(name, drawn, iter([[], list(range(length)), *([rng.randrange(length + 1)] for _ in range(3))]))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_200_generated_call_sets_are_parsed_at_every_split_point(name: str) -> None:
    rng = random.Random(f"200 {name}")
    for number in range(200):
        drawn = sample(name, rng)
        length = len(drawn.reply)
        cuts = [[at] for at in range(length + 1)] if number < 20 else [[rng.randrange(length + 1)] for _ in range(10)]
        several = [rng.sample(range(length + 1), min(length, rng.randrange(1, 9))) for _ in range(10)]
        check(name, drawn, iter([[], list(range(length)), *cuts, *several]))


def grammar_accepts(name: str, rng: random.Random, count: int) -> None:
    tokenizer = tokenizer_of(name)
    form = detect_format(tokenizer)
    for _ in range(count):
        drawn = sample(name, rng)
        required = not drawn.message["content"] or form.syntax == HARMONY
        matcher = new_matcher(tokenizer, ToolChoice(CALLABLE, required=required), form)
        assert walk(tokenizer, matcher, drawn.reply) == "whole", drawn.reply


@pytest.mark.parametrize("name", NAMES)
def test_grammar_accepts_calls_as_rendered(name: str) -> None:
    grammar_accepts(name, random.Random(f"few {name}"), 3)


@pytest.mark.parametrize("name", NAMES)
def test_grammar_of_a_relaxed_schema_accepts_calls_as_rendered(name: str) -> None:
    words = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"words": words, "n": {"type": "string", "pattern": "(?!x)"}}}
    message = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {"words": ["a"], "n": "b"}}}
    ]}  # fmt: skip
    tokenizer = tokenizer_of(name)
    choice = ToolChoice((CallableFunction("f", json.dumps(relax_schema(schema))),), required=True)
    assert (
        walk(tokenizer, new_matcher(tokenizer, choice, detect_format(tokenizer)), reply_of(tokenizer, message))
        == "whole"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_grammar_accepts_200_generated_call_sets(name: str) -> None:
    grammar_accepts(name, random.Random(f"accepts {name}"), 200)


def check_draws(name: str, rng: random.Random, count: int) -> int:
    """Check that calls drawn from the grammar are parsed and valid; return how many were complete."""
    tokenizer = tokenizer_of(name)
    form = replace(detect_format(tokenizer), reasoning=None)
    num_complete = 0
    for _ in range(count):
        matcher = new_matcher(tokenizer, ToolChoice(CALLABLE, required=True, parallel=rng.random() < 0.5), form)
        reply = draw(tokenizer, matcher, form, rng, 250)
        if reply is None:
            continue
        num_complete += 1
        text, _, calls, _ = parse(form, list(reply))
        assert calls, reply
        assert form.syntax == HARMONY or not text.strip(), reply
        for name_of_call, arguments in calls:
            jsonschema.validate(arguments, FUNCTIONS[name_of_call])
    return num_complete


@pytest.mark.parametrize("name", NAMES)
def test_calls_drawn_from_the_grammar_are_parsed(name: str) -> None:
    assert check_draws(name, random.Random(f"draws {name}"), 6) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_200_calls_drawn_from_the_grammar_are_parsed(name: str) -> None:
    assert check_draws(name, random.Random(f"200 draws {name}"), 200) > 60


def junk(name: str, rng: random.Random) -> str:
    """Draw text with delimiters in any order, as a confused model might write it."""
    form = detect_format(tokenizer_of(name))
    assert form.syntax is not None
    thought = [form.reasoning.opening, form.reasoning.closing] if form.reasoning is not None else []
    pieces = [
        *form.syntax.delimiters,
        form.syntax.marker,
        *thought,
        *PIECES,
        "get_weather",
        "city",
        '"city": "x"',
        "[(",
    ]
    drawn = [rng.choice(pieces) for _ in range(rng.randrange(12))]
    if rng.random() < 0.7:  # a reply of which a part is missing
        reply = sample(name, rng).reply
        at = rng.randrange(len(reply) + 1)
        drawn.insert(rng.randrange(len(drawn) + 1), reply[:at] + reply[at + rng.randrange(9) :])
    return "".join(drawn)


def check_junk(name: str, rng: random.Random, count: int) -> None:
    form = detect_format(tokenizer_of(name))

    def raw(chunks: Sequence[str]) -> tuple[str, str, list[tuple[str, str]]]:
        parser = ReplyParser(form, "", FUNCTIONS)
        parts = [*(parser.push(chunk) for chunk in chunks), parser.finish()]
        calls: list[tuple[str, str]] = []
        for part in (call for parsed in parts for call in parsed.calls):
            if part.name:
                calls.append((part.name, ""))
            calls[part.number] = calls[part.number][0], calls[part.number][1] + part.arguments
        return "".join(part.text for part in parts), "".join(part.reasoning for part in parts), calls

    for _ in range(count):
        text = junk(name, rng)
        expected = raw([text])
        places = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(4))})
        assert raw(list(text)) == expected, text
        assert raw([text[start:end] for start, end in pairwise(places)]) == expected, text


@pytest.mark.parametrize("name", NAMES)
def test_broken_replies_are_read_alike_at_every_split_point(name: str) -> None:
    check_junk(name, random.Random(f"few junk {name}"), 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_300_broken_replies_are_read_alike_at_every_split_point(name: str) -> None:
    check_junk(name, random.Random(f"junk {name}"), 300)


@pytest.mark.parametrize("name", NAMES)
def test_replies_that_are_cut_off_keep_their_calls_so_far_and_no_half_marker(name: str) -> None:
    drawn = sample(name, random.Random(f"cut {name}"))
    form = detect_format(tokenizer_of(name))
    for length in range(len(drawn.reply)):
        parser = ReplyParser(form, "", FUNCTIONS)
        parts = [parser.push(drawn.reply[:length]), parser.finish()]
        names = [call.name for part in parts for call in part.calls if call.name]
        assert names == [call for call, _ in drawn.calls][: len(names)]
        if names and not parser.has_open_call:
            last = [call.arguments for part in parts for call in part.calls if call.number == len(names) - 1]
            assert json.loads("".join(last)) == drawn.calls[len(names) - 1][1]
        if len(names) == len(drawn.calls):
            assert "".join(part.text for part in parts).strip() == drawn.message["content"], drawn.reply[:length]


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("qwen3.5", "<tool_call>\n<function=get_weather>\n<parameter=city>\n"),
        ("glm4", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"),
        ("deepseek v3.2", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
         '<｜DSML｜parameter name="city" string="true">'),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>'),
        ("lfm2", "<|tool_call_start|>[get_weather(city='"),
        ("llama4", '[get_weather(city="'),
    ],
)  # fmt: skip
def test_strings_are_streamed_as_json_while_they_are_generated(name: str, opening: str) -> None:
    parser = ReplyParser(detect_format(tokenizer_of(name)), "", FUNCTIONS)
    first = parser.push(opening)
    assert [call.name for call in first.calls if call.name] == ["get_weather"]
    seen = ["".join(call.arguments for call in parser.push(piece).calls) for piece in ("Zü", "ri\u2028", "ch & 9")]
    start = "".join(call.arguments for call in first.calls)
    assert start == '{"city": "' and seen == ["Zü", "ri\u2028", "ch & 9"]


@pytest.mark.parametrize("name", ["qwen3.5", "glm4"])
def test_values_between_tags_have_the_type_of_the_schema(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "either": {"type": ["string", "integer"]},
            "flag": {"type": "boolean"},
        },
    }
    form = detect_format(tokenizer_of(name))
    arguments = {"text": "12", "count": 12, "either": 7, "flag": True, "unknown": 3, "other": "a b"}
    message = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    ]}  # fmt: skip
    reply = reply_of(tokenizer_of(name), message)
    for written, expected in ((reply, arguments), (reply.replace("true", "True"), arguments)):
        parser = ReplyParser(form, "", {"f": schema})
        assert joined([parser.push(written), parser.finish()])[2] == [("f", expected)]
    bad = reply.replace("12", "many")
    parser = ReplyParser(form, "", {"f": schema})
    assert joined([parser.push(bad), parser.finish()])[2] == [("f", {**arguments, "text": "many", "count": "many"})]


def test_harmony_call_that_ends_without_arguments_has_an_empty_object() -> None:
    for end, rest, arguments in (("<|call|>", "", "{}"), ("", "<|call|>", "{}"), ("", "", "")):
        parser = HarmonyParser({"f": {}})
        first = parser.push("<|channel|>commentary to=functions.f <|constrain|>json<|message|>" + rest)
        calls = (*first.calls, *parser.finish(end).calls)
        assert [call.name for call in calls if call.name] == ["f"]
        assert "".join(call.arguments for call in calls) == arguments
        assert parser.has_open_call is not bool(arguments)
