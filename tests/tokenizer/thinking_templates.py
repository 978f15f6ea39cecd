"""Chat templates whose reasoning is controlled in the ways of 2026 model families, reduced to that."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken

from chatcache.tokenizer.chat_template import ChatTemplate
from chatcache.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.tokenizers import backend_of

_CHAT = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{{- HEAD }}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and m.reasoning_content and (KEEPS or loop.index0 > ns.last) %}
        {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- OPENS %}{%- endif %}"""


def _chat(head: str = "''", keeps: str = "false", opens: str = "if false %}{%- endif") -> str:
    return _CHAT.replace("HEAD", head).replace("KEEPS", keeps).replace("OPENS", opens)


_CLOSED = "{{- '<think>\\n\\n</think>\\n\\n' }}"
TEMPLATES = {
    "qwen3": _chat(opens=f"if enable_thinking is defined and enable_thinking is false %}}{_CLOSED}{{%- endif"),
    "qwen3.6": _chat(
        keeps="(preserve_thinking is defined and preserve_thinking)",
        opens=f"if enable_thinking is defined and enable_thinking is false %}}{_CLOSED}"
        "{%- else %}{{- '<think>\\n' }}{%- endif",
    ),
    "deepseek": _chat(opens="if thinking %}{{- '<think>' }}{%- else %}{{- '</think>' }}{%- endif"),
    "r1": _chat(opens="if true %}{{- '<think>\\n' }}{%- endif"),
    "graded": _chat(
        head="'<think> level ' + (reasoning_effort if reasoning_effort is defined else 'medium') + '</think>'",
        opens="if true %}{{- '<think>' }}{%- endif",
    ),
    "strict": _chat(
        head="raise_exception('level') if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] "
        "else ('</think>' if reasoning_effort is defined and reasoning_effort == 'high' else '')"
    ),
    "unmarked": "{%- for m in messages %}{{- m.content }}{%- endfor %}{{- reasoning_effort | default('medium') }}",
    "plain": "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor %}"
    "{{ date_string }}",
}


@cache
def thinking_tokenizer(name: str) -> Tokenizer:
    backend = backend_of("bytelevel")
    backend.add_tokens([AddedToken(each, normalized=False) for each in ("<tool_call>", "</tool_call>")])
    end = backend.token_to_id("<|im_end|>")
    template = ChatTemplate(TEMPLATES[name], origin=name, variables={"eos_token": "<|im_end|>"})
    return Tokenizer(backend, eos_token_ids=[end or 0], template=template)
