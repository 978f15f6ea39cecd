"""Chat templates of our own that write calls and reasoning in the published formats of the families of 2026."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from tokenizers import AddedToken

from chatcache.tokenizer.chat_template import ChatTemplate
from chatcache.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.tokenizers import backend_of

_CHAT = """\
{%- macro literal(value) -%}LITERAL{%- endmacro -%}
{%- for tool in tools or [] -%}{{ 'TOOL' + (tool | tojson) + '\\n' }}{%- endfor -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{{ 'USER' + message.content + 'END' }}
    {%- elif message.role == 'tool' -%}{{ 'USER' + message.content + 'END' }}
    {%- elif message.role == 'assistant' -%}
        {{- 'REPLY' -}}
        THOUGHT
        {{- message.content -}}
        {%- if message.tool_calls -%}CALLS{%- endif -%}
        {{- 'STOP' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'REPLY' }}{%- endif -%}"""
_EACH = "{%- for call in message.tool_calls -%}{%- set f = call.function -%}ONE{%- endfor -%}"
_ARGUMENTS = "{%- for key, value in f.arguments.items() -%}ONE{%- endfor -%}"
_PLAIN = "{{ value if value is string else value | tojson }}"
_JSON_OBJECT = """{{ '{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}' }}"""


def _each(one: str) -> str:
    return _EACH.replace("ONE", one)


def _pythonic(text: str) -> str:
    """Calls as `name(key=value, ...)`; `text`: how a string is written."""
    one = "{{ key + '=' + literal(value) }}{%- if not loop.last -%}{{ ', ' }}{%- endif -%}"
    call = "{{ f.name + '(' }}" + _ARGUMENTS.replace("ONE", one) + "{{ ')' }}"
    return _each(call + "{%- if not loop.last -%}{{ ', ' }}{%- endif -%}")


_PYTHON_LITERAL = """\
{%- if value is string or value is mapping -%}{{ value | tojson }}
{%- elif value is sequence -%}
    [{%- for each in value -%}{{ literal(each) }}{%- if not loop.last -%}{{ ', ' }}{%- endif -%}{%- endfor -%}]
{%- else -%}{{ value | string }}{%- endif -%}"""
_GEMMA_LITERAL = """\
{%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is mapping -%}
    {{- '{' }}
    {%- for key, each in value.items() -%}
        {{ key + ':' + literal(each) }}{%- if not loop.last -%}{{ ',' }}{%- endif -%}
    {%- endfor -%}{{ '}' }}
{%- elif value is sequence and value is not string -%}
    {{- '[' }}
    {%- for each in value -%}{{ literal(each) }}{%- if not loop.last -%}{{ ',' }}{%- endif -%}{%- endfor -%}
    {{ ']' }}
{%- else -%}{{ value | tojson }}{%- endif -%}"""


class Turns(NamedTuple):
    """Texts around messages; `stop` is the token that ends a reply."""

    user: str = "<|im_start|>user\\n"
    reply: str = "<|im_start|>assistant\\n"
    end: str = "<|im_end|>\\n"
    stop: str = "<|im_end|>"


class Family2026(NamedTuple):
    """`calls`: the template's part for the calls of a message. `thought`: the markers around reasoning.

    `special`: special tokens; those of `added` are ordinary added tokens. `texts_before`: text may precede calls.
    `nests`: values within a value keep their types. `stop`: what ends a reply.
    """

    calls: str
    thought: tuple[str, str] | None = None
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    literal: str = ""
    turns: Turns = Turns()
    several: bool = True
    texts_before: bool = True
    ids: int = 0
    harmony: bool = False

    @property
    def template(self) -> str:
        thought = ""
        if self.thought is not None:
            opening, closing = self.thought
            thought = (
                f"{{%- if message.reasoning_content -%}}{{{{ '{opening}' + message.reasoning_content + '{closing}' }}}}"
                "{%- endif -%}"
            )
        pieces = {"LITERAL": self.literal, "USER": self.turns.user, "REPLY": self.turns.reply, "END": self.turns.end}
        source = _CHAT.replace("THOUGHT", thought).replace("CALLS", self.calls)
        for word, text in pieces.items():
            source = source.replace(word, text)
        return source.replace("STOP", self.turns.stop)


_THINK = ("<think>\\n", "\\n</think>\\n\\n")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_DEEPSEEK = tuple(f"<｜tool▁{word}｜>" for word in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
_DEEPSEEK_TURNS = Turns("<｜User｜>", "<｜Assistant｜>", "", "<｜end▁of▁sentence｜>")
_XML = (
    "{{ '\\n<tool_call>\\n<function=' + f.name + '>\\n' }}"
    + _ARGUMENTS.replace("ONE", "{{ '<parameter=' + key + '>\\n' }}" + _PLAIN + "{{ '\\n</parameter>\\n' }}")
    + "{{ '</function>\\n</tool_call>' }}"
)
_AS_PYTHON = "{{ value | tojson if value is mapping or value is sequence and value is not string else value | string }}"
_HERMES = "{{ '\\n<tool_call>\\n' }}" + _JSON_OBJECT + "{{ '\\n</tool_call>' }}"
_LIST = _each(_JSON_OBJECT + "{%- if not loop.last -%}{{ ', ' }}{%- endif -%}")
_DSML = (
    "{{ '\\n<｜DSML｜invoke name=\"' + f.name + '\">\\n' }}"
    + _ARGUMENTS.replace(
        "ONE",
        "{%- if not loop.first -%}{{ '\\n' }}{%- endif -%}"
        "{{ '<｜DSML｜parameter name=\"' + key + '\" string=\"' + ('true' if value is string else 'false') + '\">' }}"
        + _PLAIN
        + "{{ '</｜DSML｜parameter>' }}",
    )
    + "{{ '\\n</｜DSML｜invoke>' }}"
)
_GLM_ARGUMENT = "{{ '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}" + _PLAIN + "{{ '</arg_value>\\n' }}"
_GLM = "{{ '\\n<tool_call>' + f.name + '\\n' }}" + _ARGUMENTS.replace("ONE", _GLM_ARGUMENT) + "{{ '</tool_call>' }}"
_GEMMA = (
    "{{ '<|tool_call>call:' + f.name + '{' }}"
    + _ARGUMENTS.replace("ONE", "{{ key + ':' + literal(value) }}{%- if not loop.last -%}{{ ',' }}{%- endif -%}")
    + "{{ '}<tool_call|>' }}"
)
_DEEPSEEK_V3 = (
    "{{ '<｜tool▁calls▁begin｜>' }}"
    + _each(
        "{%- if not loop.first -%}{{ '\\n' }}{%- endif -%}"
        "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\\n```json\\n' + f.arguments }}"
        "{{ '\\n```<｜tool▁call▁end｜>' }}"
    )
    + "{{ '<｜tool▁calls▁end｜>' }}"
)
_DEEPSEEK_V31 = (
    "{{ '<｜tool▁calls▁begin｜>' }}"
    + _each("{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments | tojson + '<｜tool▁call▁end｜>' }}")
    + "{{ '<｜tool▁calls▁end｜>' }}"
)
_NINE = "{%- if call.id | length != 9 -%}{{ raise_exception('ids have nine characters') }}{%- endif -%}"
_MISTRAL_OLD = (
    "{{ '[TOOL_CALLS][' }}"
    + _each(
        _NINE
        + """{{ '{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) }}"""
        + """{{ ', "id": "' + call.id + '"}' }}"""
        "{%- if not loop.last -%}{{ ', ' }}{%- endif -%}"
    )
    + "{{ ']' }}"
)
_MISTRAL = Turns("[INST]", "", "[/INST]", "</s>")
_LLAMA = Turns("<|header|>user<|/header|>\\n\\n", "<|header|>assistant<|/header|>\\n\\n", "<|eot|>", "<|eot|>")
FAMILIES_2026: dict[str, Family2026] = {
    "qwen3": Family2026(_each(_HERMES), _THINK, added=(*_TOOL_CALL, "<think>", "</think>")),
    "qwen3.5": Family2026(_each(_XML), _THINK, added=(*_TOOL_CALL, "<think>", "</think>")),
    "qwen3 coder": Family2026(_each(_XML.replace(_PLAIN, _AS_PYTHON)), added=_TOOL_CALL),
    "llama3": Family2026(
        "{%- if message.tool_calls | length > 1 -%}{{ raise_exception('one call') }}{%- endif -%}"
        + _each(_JSON_OBJECT.replace('arguments": ', 'parameters": ')),
        special=("<|python_tag|>",),
        several=False,
        texts_before=False,
        turns=_LLAMA,
    ),
    "llama4": Family2026(
        "{{ '[' }}" + _pythonic("") + "{{ ']' }}", literal=_PYTHON_LITERAL, texts_before=False, turns=_LLAMA
    ),
    "gemma3": Family2026(
        "{{ '[' }}" + _pythonic("") + "{{ ']' }}",
        literal=_PYTHON_LITERAL,
        texts_before=False,
        turns=Turns("<start_of_turn>user\\n", "<start_of_turn>model\\n", "<end_of_turn>\\n", "<end_of_turn>"),
    ),
    "gemma4": Family2026(
        _each(_GEMMA),
        ("<|channel>thought\\n", "<channel|>"),
        special=("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
        literal=_GEMMA_LITERAL,
        turns=Turns("<|turn>user\\n", "<|turn>model\\n", "<turn|>\\n", "<turn|>"),
    ),
    "mistral old": Family2026(_MISTRAL_OLD, special=("[TOOL_CALLS]", "[INST]", "[/INST]"), ids=9, turns=_MISTRAL),
    "mistral args": Family2026(
        _each("{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}"),
        ("[THINK]", "[/THINK]"),
        special=("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]", "[THINK]", "[/THINK]"),
        turns=_MISTRAL,
    ),
    "mistral ids": Family2026(
        _each(_NINE + "{{ '[TOOL_CALLS]' + f.name + '[CALL_ID]' + call.id + '[ARGS]' + f.arguments | tojson }}"),
        special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[INST]", "[/INST]"),
        ids=9,
        turns=_MISTRAL,
    ),
    "deepseek v3": Family2026(_DEEPSEEK_V3, special=_DEEPSEEK, turns=_DEEPSEEK_TURNS),
    "deepseek v3.1": Family2026(_DEEPSEEK_V31, ("<think>", "</think>"), special=_DEEPSEEK, turns=_DEEPSEEK_TURNS),
    "deepseek v3.2": Family2026(
        "{{ '\\n\\n<｜DSML｜function_calls>' }}" + _each(_DSML) + "{{ '\\n</｜DSML｜function_calls>' }}",
        ("<think>", "</think>"),
        added=("｜DSML｜",),
        turns=_DEEPSEEK_TURNS,
    ),
    "glm4": Family2026(
        _each(_GLM),
        ("<think>", "</think>\\n"),
        added=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *_TOOL_CALL),
        turns=Turns("<|user|>\\n", "<|assistant|>\\n", "", "<|end|>"),
    ),
    "glm4.6": Family2026(
        _each(_GLM),
        ("\\n<think>", "</think>\\n"),
        added=("<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *_TOOL_CALL),
        turns=Turns("<|user|>\\n", "<|assistant|>", "", "<|end|>"),
    ),
    "granite4": Family2026(_each(_HERMES), added=_TOOL_CALL),
    "phi4": Family2026(
        "{{ '<|tool_call|>[' }}" + _LIST + "{{ ']<|/tool_call|>' }}",
        special=("<|tool_call|>", "<|/tool_call|>"),
        turns=Turns("<|user|>", "<|assistant|>", "<|end|>", "<|end|>"),
    ),
    "smollm3": Family2026(_each("{{ '<tool_call>' }}" + _JSON_OBJECT + "{{ '</tool_call>' }}"), _THINK),
    "lfm2": Family2026(
        "{{ '<|tool_call_start|>[' }}" + _pythonic("") + "{{ ']<|tool_call_end|>' }}",
        ("<think>", "</think>"),
        special=("<|tool_call_start|>", "<|tool_call_end|>"),
        literal=_PYTHON_LITERAL,
    ),
    "nemotron": Family2026("{{ '<TOOLCALL>[' }}" + _LIST + "{{ ']</TOOLCALL>' }}", _THINK),
    "nemotron3": Family2026(_each(_XML), _THINK),
}
HARMONY_TEMPLATE = """\
{%- for tool in tools or [] -%}{{ 'type ' + tool.function.name + '\\n' }}{%- endfor -%}
{%- for message in messages -%}
    {%- if message.role != 'assistant' -%}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- else -%}
        {%- if message.reasoning_content -%}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' -}}
        {%- endif -%}
        {%- if message.tool_calls -%}
            {%- set f = message.tool_calls[0].function -%}
            {%- if message.content -%}
                {{- '<|start|>assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' -}}
            {%- endif -%}
            {{- '<|start|>assistantCALL<|call|>' -}}
        {%- else -%}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' -}}
        {%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"""
HARMONY_CALLS = {
    "gpt-oss": "' + '<|channel|>commentary to=functions.' + f.name + ' <|constrain|>json<|message|>' "
    "+ (f.arguments | tojson) + '",
    "gpt-oss role": " to=functions.' + f.name + '<|channel|>commentary json<|message|>' + (f.arguments | tojson) + '",
}
_HARMONY_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
NAMES = (*FAMILIES_2026, *HARMONY_CALLS)


def family_of(name: str) -> Family2026:
    if name in HARMONY_CALLS:
        return Family2026("", ("", ""), several=False, harmony=True)
    return FAMILIES_2026[name]


@cache
def tokenizer_of(name: str) -> Tokenizer:
    backend = backend_of("bytelevel")
    if name in HARMONY_CALLS:
        special: tuple[str, ...]
        added: tuple[str, ...]
        template, special, added = HARMONY_TEMPLATE.replace("CALL<", HARMONY_CALLS[name] + "<"), _HARMONY_TOKENS, ()
        stops: tuple[str, ...] = ("<|call|>", "<|return|>")
    else:
        family = FAMILIES_2026[name]
        template, special, added, stops = family.template, family.special, family.added, (family.turns.stop,)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in (*special, *stops)])
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    ends = [backend.token_to_id(stop) for stop in stops]
    source = ChatTemplate(template, origin=name, variables={"bos_token": "<s>", "eos_token": stops[0]})
    return Tokenizer(backend, eos_token_ids=[end for end in ends if end is not None], template=source)
