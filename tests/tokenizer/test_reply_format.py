"""Format detection from the chat template; special tokens that the parsers need."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from chatcache.tokenizer.detokenizer import IncrementalDetokenizer
from chatcache.tokenizer.reasoning import THINK, ReasoningSyntax
from chatcache.tokenizer.reply_format import REASONING, ReplyFormat, ReplyParser, decode_prompt_end, detect_format
from chatcache.tokenizer.tokenizer import Tokenizer, read_tokenizer
from chatcache.tokenizer.tool_formats import HERMES, LFM2, LLAMA3, MISTRAL, NEMOTRON, PHI4, QWEN3_CODER, ToolCallSyntax
from tests.gateway.serving import tiny_tokenizer
from tests.tokenizer.families import FAMILIES, TOKENS, backend_with, tokenizer_of
from tests.tokenizer.tokenizers import write_folder

TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object"}}}]
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "look it up",
        "tool_calls": [
            {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {"in": "Zürich"}}}
        ],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "abcdefgh1", "name": "f"},
]
EXPECTED = {
    "hermes": ReplyFormat(HERMES, THINK, supports_tools=True),
    "qwen3": ReplyFormat(HERMES, THINK, supports_tools=True),
    "opened": ReplyFormat(HERMES, THINK, supports_tools=True),
    "llama3": ReplyFormat(LLAMA3, supports_tools=True),
    "mistral": ReplyFormat(replace(MISTRAL, name_end=""), supports_tools=True),
    "mistral named": ReplyFormat(
        ToolCallSyntax(call_open="[TOOL_CALLS]", is_object=False, name_end="[ARGS]", id_chars=9), supports_tools=True
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_detect_format_from_chat_template(name: str) -> None:
    assert detect_format(tokenizer_of(name)) == EXPECTED[name]


def test_functions_are_rendered_by_a_template_that_names_them_xml_tools() -> None:
    """As SmolLM3's does, which renders no calls: their syntax is recognised by its description."""
    described = "{%- if xml_tools or python_tools -%}{%- for tool in xml_tools[:] -%}{{ tool | string }}{%- endfor -%}"
    described += '{{ \'Answer within <tool_call></tool_call>: {"name": <name>, "arguments": <args>}\' }}{%- endif -%}'
    source = described + "{%- for message in messages -%}{{ message.content }}{%- endfor -%}"
    tokenizer = _with(source)
    assert detect_format(tokenizer) == ReplyFormat(HERMES, supports_tools=True)
    user = [{"role": "user", "content": "Hi"}]
    assert "'name': 'f'" in tokenizer.render(user, tools=TOOLS) and "tool_call" not in tokenizer.render(user)
    both = _with("{{ tools }}" + source)
    assert both.render(user, tools=TOOLS).count("'name': 'f'") == 1


def test_plain_templates_have_none_and_flags_overrule() -> None:
    assert detect_format(tiny_tokenizer()) == ReplyFormat()
    assert detect_format(tokenizer_of("hermes"), "none", "none") == ReplyFormat(supports_tools=True)
    assert detect_format(tokenizer_of("hermes"), "mistral", "deepseek_r1").syntax == MISTRAL
    xml = tokenizer_of("hermes").template_source.replace('{"name": "', "<function=")
    syntax = detect_format(_with(xml)).syntax
    assert syntax is not None and (syntax.call_open, syntax.name_end) == ("<tool_call>\n<function=", '", "arguments": ')


def _with(template: str) -> Tokenizer:
    from chatcache.tokenizer.chat_template import ChatTemplate

    return Tokenizer(backend_with(FAMILIES["hermes"]), template=ChatTemplate(template, origin="x", variables=TOKENS))


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("Answer with <tool_call>{...}</tool_call>", HERMES),
        ("Answer with <tool_call><function=name>", QWEN3_CODER),
        ("Answer with <|tool_call_start|>[name()]<|tool_call_end|>", LFM2),
        ("Answer with <|tool_call|>", PHI4),
        ("Answer with <TOOLCALL>", NEMOTRON),
        ("Answer with <|python_tag|>", LLAMA3),
        ("Answer with JSON", None),
    ],
)
def test_templates_that_do_not_render_calls_are_detected_by_their_markers(
    hint: str, expected: ToolCallSyntax | None
) -> None:
    source = "{{ tools | tojson if tools }}HINT{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    assert detect_format(_with(source.replace("HINT", hint))) == ReplyFormat(expected, supports_tools=True)


def test_unknown_templates_are_derived() -> None:
    """A syntax of no family: a section, names in quotes, and arguments between brackets."""
    calls = (
        "{% if m.tool_calls %}<<use>>{% for c in m.tool_calls %}run '{{ c.function.name }}' with"
        "{% for k, v in c.function.arguments.items() %}"
        " (({{ k }} is {{ v if v is string else v | tojson }})){% endfor %}"
        " now;{% endfor %}<</use>>{% endif %}"
    )
    message = "|{{ m.role }}|{{ m.content }}" + calls
    source = "{{ tools | tojson if tools }}{% for m in messages %}" + message + "{% endfor %}"
    tokenizer = _with(source)
    form = detect_format(tokenizer)
    arguments = {"in": "Zürich (x) y", "n": [1, "a"]}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    text = tokenizer.render(
        [{"role": "assistant", "content": "Look. ", "tool_calls": [call, call]}], add_generation_prompt=False
    )
    parser = ReplyParser(form, "", {"f": {"properties": {"in": {"type": "string"}}}})
    parts = [*(parser.push(character) for character in text.removeprefix("|assistant|")), parser.finish()]
    found = "".join(part.arguments for parsed in parts for part in parsed.calls if part.number == 1)
    assert json.loads(found) == arguments
    assert "".join(parsed.text for parsed in parts) == "Look."


@pytest.mark.parametrize(
    "call",
    [
        # two calls lose the arguments of one
        "<c>{{ c.function.name }}{% if m.tool_calls | length == 1 %}{% for k, v in c.function.arguments.items() %}"
        "<k>{{ k }}</k><v>{{ v }}</v>{% endfor %}{% endif %}</c>",
        # the name only as an escape
        r'{"name": "probe\u005fone", "arguments": {{ c.function.arguments | tojson }} } {{ c.function.name }}',
        "{{ '{\"a\":1,' * 200000 }}{{ c.function.name }}",  # over a minute to parse, if it were
        "{% for i in range(90000) %}{{ '{' * 300 }}{% endfor %}{{ c.function.name }}",
    ],
)
def test_odd_templates_are_derived_in_a_short_time(call: str) -> None:
    source = (
        "{{ tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
    )
    start = time.process_time()
    assert detect_format(_with(source.replace("CALL", call))).supports_tools
    assert time.process_time() - start < 5


def test_slow_templates_are_rendered_until_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _with("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    times: list[float] = []
    render = tokenizer.render

    def delayed(*args: Any, **variables: Any) -> str:
        times.append(4.0)
        return render(*args, **variables)

    monkeypatch.setattr(tokenizer, "render", delayed)
    monkeypatch.setattr("chatcache.tokenizer.reply_format.time.monotonic", lambda: sum(times))
    detect_format(tokenizer)
    assert len(times) == 2


def test_reasoning_in_parts_of_the_content_is_derived() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{{ '((mull))' + part.thinking + '((/mull))' if part.type == 'thinking' else part.text }}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    assert detect_format(_with(source)).reasoning == ReasoningSyntax("((mull))", "((/mull))")


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_render_as_with_transformers(tmp_path: Path, name: str, tools: Any) -> None:
    folder = write_folder(tmp_path / "model", template=FAMILIES[name].template, **TOKENS)
    backend_with(FAMILIES[name]).save(str(folder / "tokenizer.json"))
    theirs, ours = AutoTokenizer.from_pretrained(str(folder)), read_tokenizer(folder)
    for length in (1, 2, 3):
        want = theirs.apply_chat_template(CHAT[:length], tokenize=False, add_generation_prompt=True, tools=tools)
        assert ours.render(CHAT[:length], tools=tools) == want
        ids = theirs.apply_chat_template(CHAT[:length], add_generation_prompt=True, tools=tools, return_dict=False)
        assert ours.render_ids(CHAT[:length], tools=tools) == ids


@pytest.mark.parametrize(
    ("reasoning", "end", "inside"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<|im_start|>assistant\n", True),
        ("deepseek_r1", "<think>\n\n</think>\n\n", False),
        ("none", "<think>\n", False),
    ],
)
def test_where_a_reply_begins(reasoning: str, end: str, inside: bool) -> None:
    form = ReplyFormat(reasoning=REASONING.get(reasoning))
    assert form.starts_in_reasoning(end) is inside
    assert ReplyParser(form, end, None).is_thinking is inside


def test_special_tokens_reach_the_parser_though_people_do_not_see_them() -> None:
    tokenizer = tokenizer_of("mistral")
    form = detect_format(tokenizer)
    marks = tokenizer.special_ids_of(form.marks(tools=True))
    assert set(marks) == {"[TOOL_CALLS]"}
    ids = [marks["[TOOL_CALLS]"], *tokenizer.encode('[{"name": "f", "arguments": {}}]')]
    assert IncrementalDetokenizer(tokenizer).push(ids) == '[{"name": "f", "arguments": {}}]'
    seen = IncrementalDetokenizer(tokenizer, visible_ids=marks.values()).push(ids)
    parser = ReplyParser(form, decode_prompt_end(tokenizer, ids), {"f": {}})
    said, rest = parser.push(seen), parser.finish()
    assert (said.text + rest.text, [call.name for call in said.calls if call.name]) == ("", ["f"])
    assert form.marks(tools=False) == ()


def test_calls_are_text_where_no_function_may_be_called() -> None:
    parser = ReplyParser(ReplyFormat(HERMES, THINK), "", None)
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert parser.push(f"<think>hm</think>\n{call}").text == call
