"""Chat templates that call tools, in the shape that each family's have, and tokenizers with their marks."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from chatcache.tokenizer.chat_template import ChatTemplate
from chatcache.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.tokenizers import backend_of

_QWEN_HEAD = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "You may call these functions:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
"""
_QWEN_TURNS = """\
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- REASONING %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nOPENS' }}{%- endif %}"""
_KEEPS_LATEST = (
    "if message.reasoning_content and loop.index0 > ns.last %}"
    "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif"
)
_KEEPS_ALL = _KEEPS_LATEST.replace(" and loop.index0 > ns.last", "")


def _qwen(reasoning: str, opens: str = "") -> str:
    return _QWEN_HEAD + _QWEN_TURNS.replace("{%- REASONING %}", "{%- " + reasoning + " %}").replace("OPENS", opens)


LLAMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|header|>system<|/header|>\\n\\n' + system }}
{%- if tools is not none %}
    {{- 'Answer with {"name": function name, "parameters": its arguments}. Functions:\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- '<|eot|>' }}
{%- for message in messages %}
    {%- if message.role in ['tool', 'ipython'] %}
        {{- '<|header|>ipython<|/header|>\\n\\n' + (message.content | tojson) + '<|eot|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|header|>assistant<|/header|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot|>' }}
    {%- else %}
        {{- '<|header|>' + message.role + '<|/header|>\\n\\n' + message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|/header|>\\n\\n' }}{%- endif %}"""

_MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.last %}{{- '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT]' + message.content + '[/RESULT]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content }}
        {%- if message.tool_calls %}CALLS{%- endif %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}"""
_LISTED = """
            {{- '[TOOL_CALLS][' }}
            {%- for call in message.tool_calls %}
                {%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('nine') }}{%- endif %}
                {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
                {%- if not loop.last %}{{- ', ' }}{%- endif %}
            {%- endfor %}
            {{- ']' }}
        """
_NAMED = """
            {%- for call in message.tool_calls %}
                {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
            {%- endfor %}
        """


class Family(NamedTuple):
    template: str
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {
    "hermes": Family(_qwen(_KEEPS_ALL), special=("<tool_call>", "</tool_call>")),
    "qwen3": Family(_qwen(_KEEPS_LATEST), added=("<tool_call>", "</tool_call>")),
    "opened": Family(_qwen(_KEEPS_ALL, opens="<think>\\n"), added=("<tool_call>", "</tool_call>")),
    "llama3": Family(LLAMA, special=("<|python_tag|>", "<|header|>", "<|/header|>", "<|eot|>")),
    "mistral": Family(_MISTRAL.replace("CALLS", _LISTED), special=("[TOOL_CALLS]", "[INST]", "[/INST]")),
    "mistral named": Family(_MISTRAL.replace("CALLS", _NAMED), special=("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]")),
}
TOKENS = {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def backend_with(family: Family) -> Backend:
    backend = backend_of("bytelevel")
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in family.special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in family.added])
    return backend


@cache
def tokenizer_of(name: str) -> Tokenizer:
    backend = backend_with(FAMILIES[name])
    ends = [backend.token_to_id(token) for token in ("<|im_end|>", "<|eot|>")]
    template = ChatTemplate(FAMILIES[name].template, origin=name, variables=TOKENS)
    return Tokenizer(backend, eos_token_ids=[end for end in ends if end is not None], template=template)
