"""The grammars of calls, walked token by token: what they allow is what the parser finds, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from chatcache.decoding.grammar.compiler import check_structured_outputs
from chatcache.tokenizer.reasoning import THINK
from chatcache.tokenizer.reply_format import ReplyFormat, ReplyParser, detect_format
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.tokenizer.tool_formats import HERMES, PYTHONIC, QWEN3_CODER, TaggedArguments, ToolCallSyntax
from chatcache.tokenizer.tool_grammar import CallableFunction, ToolChoice, build_tool_grammar
from chatcache.types.json_schema import relax_schema
from chatcache.types.request import StructuredOutputs
from tests.tokenizer.families import FAMILIES, tokenizer_of
from tests.tokenizer.grammar_walk import new_matcher, walk

SCHEMA = json.dumps(
    {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
)
HELD = ToolChoice((CallableFunction("f", SCHEMA), CallableFunction("g")))
REQUIRED = replace(HELD, required=True)
ONE = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "llama3": '{"name": "%s", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "%s", "arguments": %s}]',
    "mistral named": "[TOOL_CALLS]%s[ARGS]%s",
}
ONE["qwen3"] = ONE["opened"] = ONE["hermes"]
TWO = {
    "hermes": ONE["hermes"] + "\n" + ONE["hermes"],
    "llama3": ONE["llama3"] + "; " + ONE["llama3"],
    "mistral": '[TOOL_CALLS][{"name": "%s", "arguments": %s}, {"name": "%s", "arguments": %s}]',
    "mistral named": ONE["mistral named"] * 2,
}
TWO["qwen3"] = TWO["opened"] = TWO["hermes"]


def form_of(tokenizer: Tokenizer) -> ReplyFormat:
    return replace(detect_format(tokenizer), reasoning=None)


def accepted(name: str, choice: ToolChoice, text: str, *, form: ReplyFormat | None = None, prompt_end: str = "") -> str:
    """ "whole", "open" (more must follow) or "refused"."""
    tokenizer = tokenizer_of(name)
    form = form if form is not None else form_of(tokenizer)
    return walk(tokenizer, new_matcher(tokenizer, choice, form, prompt_end), text)


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_held_to_their_schemas(name: str) -> None:
    one, two = ONE[name], TWO[name]
    for choice in (HELD, REQUIRED):
        assert accepted(name, choice, one % ("f", '{"n": 1}')) == "whole"
        assert accepted(name, choice, one % ("g", '{"any": ["thing"]}')) == "whole"
        assert accepted(name, choice, two % ("f", '{"n": -3}', "g", "{}")) == "whole"
        assert accepted(name, choice, one % ("f", '{"n": "1"}')) == "refused"
        assert accepted(name, choice, one % ("f", "{}")) == "refused"
        assert accepted(name, choice, one % ("h", "{}")) == "refused"
        single = replace(choice, parallel=False)
        assert accepted(name, single, one % ("f", '{"n": 1}')) == "whole"
        assert accepted(name, single, two % ("f", '{"n": 1}', "g", "{}")) == "refused"


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_and_answers_have_the_listed_keys_only(name: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    for more, expected in (({}, "refused"), ({"additionalProperties": True}, "whole")):
        text = json.dumps({**schema, **more})
        held = ToolChoice((CallableFunction("f", text),))
        assert accepted(name, held, ONE[name] % ("f", '{"n": 1}')) == "whole"
        assert accepted(name, held, ONE[name] % ("f", '{"n": 1, "m": 2}')) == expected
        assert accepted(name, ToolChoice((), answer=text), '{"n": 1, "m": 2}') == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_relaxed_arguments_are_held_to_the_rest_of_their_schema(name: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "array", "uniqueItems": True}}, "required": ["n"]}
    held = ToolChoice((CallableFunction("f", json.dumps(relax_schema(schema))),), required=True)
    for choice in (held, replace(held, required=False, answer=SCHEMA)):
        assert accepted(name, choice, ONE[name] % ("f", '{"n": [1]}')) == "whole"
        assert accepted(name, choice, ONE[name] % ("f", '{"n": 1}')) == "refused"
    with pytest.raises(AssertionError, match="uniqueItems"):
        accepted(name, replace(held, functions=(CallableFunction("f", json.dumps(schema)),)), "")


@pytest.mark.parametrize("name", FAMILIES)
def test_text_stands_where_no_call_is_required(name: str) -> None:
    assert accepted(name, HELD, "Hello [TOOL] <tool_ca {}") == "whole"
    assert accepted(name, HELD, "") == "whole"
    assert accepted(name, REQUIRED, "Hello") == "refused"
    assert accepted(name, REQUIRED, "") == "open"
    call = ONE[name] % ("f", '{"n": 1}')
    if name != "llama3":
        assert accepted(name, HELD, f"Let me see.\n{call}") == "whole"
        assert accepted(name, HELD, f"Let me see.\n{ONE[name] % ('f', '{}')}") == "refused"
    if name == "llama3":
        assert accepted(name, HELD, f"<|python_tag|>{call}") == "whole"


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_may_have_a_form_of_its_own(name: str) -> None:
    choice = ToolChoice(
        (CallableFunction("f"),),
        answer='{"type": "object", "properties": {"yes": {"const": true}}, '
        '"required": ["yes"], "additionalProperties": false}',
    )
    assert accepted(name, choice, '{"yes": true}') == "whole"
    assert accepted(name, choice, ONE[name] % ("f", "{}")) == "whole"
    assert accepted(name, choice, "Yes") == "refused"


@pytest.mark.parametrize(
    ("end", "text", "expected"),
    [
        ("<|im_start|>assistant\n", "<think>so <tool_call> {</think>\n\nCALL", "whole"),
        ("<|im_start|>assistant\n", "CALL", "whole"),
        ("<|im_start|>assistant\n", "<think>CALL", "open"),
        ("<|im_start|>assistant\n<think>\n", "so</think>CALL", "whole"),
        ("<|im_start|>assistant\n<think>\n", "CALL", "open"),
        ("<think>\n\n</think>\n\n", "CALL", "whole"),
        ("<think>\n\n</think>\n\n", "<think>", "refused"),
    ],
)
def test_a_model_may_think_first(end: str, text: str, expected: str) -> None:
    form = ReplyFormat(HERMES, THINK)
    call = ONE["qwen3"] % ("f", '{"n": 1}')
    written = text.replace("CALL", call)
    assert accepted("qwen3", REQUIRED, written, form=form, prompt_end=end) == expected
    parser = ReplyParser(form, end, {"f": {}})
    said, rest = parser.push(written), parser.finish()
    found = [part.name for part in (*said.calls, *rest.calls) if part.name]
    assert (found == ["f"]) is (expected == "whole")


TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/tree"}, "right": {"$ref": "#/$defs/tree"}, "n": {"type": "integer"}},
    "required": ["n"],
}
LISTS = {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]}


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (TREE, '{"left": {"right": {"n": 3}, "n": 2}, "n": 1}', "whole"),
        (TREE, '{"left": {"right": {"n": 3}, "n": "2"}, "n": 1}', "refused"),
        (TREE, '{"left": {"right": {"n": 3}}, "n": 1}', "refused"),
        (LISTS, "[[], [[]]]", "whole"),
        (LISTS, "[1]", "refused"),
    ],
)
def test_literals_are_held_to_schemas_that_refer_to_themselves(
    schema: dict[str, Any], value: str, expected: str
) -> None:
    root = {"properties": {"t": {"$ref": "#/$defs/tree"}}, "required": ["t"], "$defs": {"tree": schema}}
    choice = ToolChoice((CallableFunction("f", json.dumps({"type": "object", **root})),), required=True)
    form = ReplyFormat(PYTHONIC, None)
    assert len(build_tool_grammar(choice, form, {}, "")) < 2_000
    assert accepted("hermes", choice, f"[f(t={value})]", form=form) == expected


GLM = replace(QWEN3_CODER, arguments=TaggedArguments("<k>", "</k><v>", "</v>\n"))
TEXTS = ("", "a", "abc", "/x/y", "x foo y", "5$", "5$ more", "a\nb\n", "a<b></param", "12")


@pytest.mark.parametrize(
    ("syntax", "before", "after"),
    [(QWEN3_CODER, "<parameter=t>\n", "\n</parameter>\n"), (GLM, "<k>t</k><v>", "</v>\n")],
)
@pytest.mark.parametrize(
    "shape",
    [
        *({"minLength": 1}, {"maxLength": 3}, {"minLength": 2, "maxLength": 4}),
        *(
            {"pattern": each}
            for each in ("foo", r"\S", "^a", "c$", "^(a|abc)$", "^a$|^x", "^$|5", r"^[^/]*$", "^[$/|]x")
        ),
        *({"pattern": each} for each in (r"^\/x\/y$", r"5\$", r"^5\$$", r"^\d+$", r"[|^$\]]", "(a|5)")),
    ],
    ids=str,
)
def test_texts_between_tags_are_held_to_length_and_pattern(
    syntax: ToolCallSyntax, before: str, after: str, shape: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"t": {"type": "string", **shape}}, "required": ["t"]}
    choice = ToolChoice((CallableFunction("f", json.dumps(schema)),), required=True)
    form = ReplyFormat(syntax, None)
    for text in TEXTS:
        fits = shape.get("minLength", 0) <= len(text) <= shape.get("maxLength", 99)
        fits = fits and re.search(shape.get("pattern", ""), text) is not None
        call = f"<tool_call>\n<function=f>\n{before}{text}{after}</function>\n</tool_call>"
        assert accepted("hermes", choice, call, form=form) == ("whole" if fits else "refused"), text


@pytest.mark.parametrize(
    "syntax", [PYTHONIC, replace(QWEN3_CODER, arguments=TaggedArguments("<k>", "<v>", "</v>", "\n"))]
)
def test_grammar_of_many_optional_arguments_is_as_long_as_their_schema(syntax: ToolCallSyntax) -> None:
    schema = json.dumps({"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(500)}})
    choice = ToolChoice((CallableFunction("f", schema),), required=True)
    assert len(build_tool_grammar(choice, ReplyFormat(syntax, None), {}, "")) < 10 * len(schema)


@pytest.mark.parametrize(
    ("syntax", "form"),
    [
        (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=p7>\n%s\n</parameter>\n</function>\n</tool_call>"),
        (PYTHONIC, "[f(p7=%s)]"),
    ],
)
def test_schema_with_many_definitions_has_a_grammar_within_the_limit(syntax: ToolCallSyntax, form: str) -> None:
    """Each property uses 4 of 200 definitions."""
    defs: dict[str, Any] = {
        f"D{at}": {
            "type": "object",
            "description": "Any.",
            "properties": {
                "tag": {"const": f"t{at}"},
                "next": {"$ref": f"#/$defs/D{at // 4 * 4 + (at + 1) % 4}"},
            },
            "required": ["tag"],
        }
        for at in range(200)
    }
    properties = {f"p{at}": {"$ref": f"#/$defs/D{at * 4}"} for at in range(50)}
    schema = json.dumps({"type": "object", "properties": properties, "$defs": defs})
    choice = ToolChoice((CallableFunction("f", schema),), required=True)
    reply_format = ReplyFormat(syntax, None)
    grammar = build_tool_grammar(choice, reply_format, {}, "")
    check_structured_outputs(StructuredOutputs(grammar=grammar))
    for value, expected in (
        ('{"tag": "t28", "next": {"tag": "t29"}}', "whole"),
        ('{"tag": "t28", "next": {"tag": "t30"}}', "refused"),
    ):
        assert accepted("hermes", choice, form % value, form=reply_format) == expected


@pytest.mark.parametrize("word", ["properties", "anyOf"])
@pytest.mark.parametrize("syntax", [QWEN3_CODER, PYTHONIC], ids=["tagged", "literals"])
def test_schema_with_a_long_chain_of_references_has_a_grammar(syntax: ToolCallSyntax, word: str) -> None:
    defs: dict[str, Any] = {"D1500": {"type": "integer"}}
    for at in range(1500):
        after = {"$ref": f"#/$defs/D{at + 1}"}
        more = {"type": "object", "properties": {"next": after}}
        defs[f"D{at}"] = more if word == "properties" else {"anyOf": [{"const": at}, after]}
    schema = json.dumps({"type": "object", "properties": {"a": {"$ref": "#/$defs/D0"}}, "$defs": defs})
    choice = ToolChoice((CallableFunction("f", schema),), required=True)
    assert build_tool_grammar(choice, ReplyFormat(syntax, None), {}, "")


def test_equal_values_of_tagged_arguments_are_one_rule() -> None:
    properties = {f"p{at}": {"$ref": "#/$defs/D"} for at in range(50)}
    parts = {f"k{at}": {"enum": [f"x{at}", f"y{at}"]} for at in range(100)}
    schema = {"type": "object", "properties": properties, "$defs": {"D": {"type": "object", "properties": parts}}}
    choice = ToolChoice((CallableFunction("f", json.dumps(schema)), CallableFunction("g", json.dumps(schema))), True)
    assert build_tool_grammar(choice, ReplyFormat(QWEN3_CODER, None), {}, "").count("%json") == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_grammar_of_many_described_functions_is_within_the_limit(name: str) -> None:
    """All functions of a request may have 256 KiB."""
    one = {"type": "string", "description": "What it means. " * 20}
    schema = json.dumps({"type": "object", "properties": {f"argument_{at}": one for at in range(20)}})
    choice = ToolChoice(tuple(CallableFunction(f"f{at}", schema) for at in range(40)), required=True)
    tokenizer = tokenizer_of(name)
    form = form_of(tokenizer)
    grammar = build_tool_grammar(choice, form, tokenizer.special_ids_of(form.marks(tools=True)), "")
    check_structured_outputs(StructuredOutputs(grammar=grammar))
    assert len(grammar) < len(schema) * 40 / 4


def test_a_free_choice_needs_no_grammar() -> None:
    assert ToolChoice((CallableFunction("f"),)).is_unconstrained
    for choice in (HELD, REQUIRED, ToolChoice((CallableFunction("f"),), parallel=False), ToolChoice((), answer="{}")):
        assert not choice.is_unconstrained
