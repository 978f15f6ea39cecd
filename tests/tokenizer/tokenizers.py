"""Tiny tokenizers of each kind, trained on the spot, and chat templates in the styles model authors write."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

CORPUS = [
    "Hello, how are you? I am well, thank you. The year is 2024; 12 + 34 = 46.",
    "How  much   wood would    a woodchuck chuck?\n\n\tif it could: def chuck(wood): return wood\n",
    "Übergrößenträger, naïve café, 你好世界 中文 日本語テスト, 👩‍👩‍👧 🏳️‍🌈 🎉 é ñ",
    "<think> the user asks </think> {\"name\": \"f\"} don't can't it's they'll",
] * 20
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
KINDS = ("bytelevel", "llama", "gemma", "metaspace")


@cache
def _serialised(kind: str) -> str:
    if kind == "bytelevel":
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet, extra = pre_tokenizers.ByteLevel.alphabet(), []
    else:
        backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        alphabet, extra = list("▁abcdefghijklmnopqrstuvwxyz"), ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        replace = decoders.Replace("▁", " ")
        if kind == "metaspace":
            backend.pre_tokenizer = pre_tokenizers.Metaspace()
            backend.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
        elif kind == "llama":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            backend.decoder = decoders.Sequence(
                [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            )
        else:
            backend.normalizer = normalizers.Replace(" ", "▁")
            backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=700 if kind == "bytelevel" else 500,
        initial_alphabet=alphabet,
        special_tokens=[*extra, *SPECIALS],
        show_progress=False,
        max_token_length=12,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    backend.add_tokens([AddedToken("<|中文|>" if kind == "metaspace" else "<|中 文|>", normalized=False)])
    state: str = backend.to_str()
    if extra:  # byte tokens are ordinary vocabulary in real models, not special added tokens
        parsed = json.loads(state)
        parsed["added_tokens"] = [token for token in parsed["added_tokens"] if not token["content"].startswith("<0x")]
        state = json.dumps(parsed)
    return state


def backend_of(kind: str) -> Backend:
    backend = Backend.from_str(_serialised(kind))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def write_folder(folder: Path, kind: str = "bytelevel", template: str | None = None, **config: Any) -> Path:
    """Write a model folder as far as text cares."""
    folder.mkdir(parents=True, exist_ok=True)
    backend_of(kind).save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {
            "__type": "AddedToken",
            "content": "</s>",
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
        },
        "chat_template": template,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return folder


CHATML = """\
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}
{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

HEADERS = """\
{% set ns = namespace(system='', first=true) %}
{% if messages[0]['role'] == 'system' %}
    {% set ns.system = messages[0]['content'] | trim %}
    {% set messages = messages[1:] %}
{% endif %}
{{ bos_token }}<|header|>system<|/header|>

Today: {{ strftime_now('%Y') is string }}
{{ ns.system }}<|eot|>
{% for message in messages %}
{% if message.role not in ['user', 'assistant'] %}{% continue %}{% endif %}
<|header|>{{ message['role'] }}<|/header|>

{{ message['content'] | trim }}<|eot|>
{% endfor %}
{% if add_generation_prompt %}<|header|>assistant<|/header|>

{% endif %}"""

INSTRUCT = """\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant!') }}\
{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}\
{% endfor %}"""

THINKING = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}{%- set ns.last = messages | length - loop.index %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set answer = content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last %}{%- set answer = content %}{%- endif %}
        {{- '<|im_start|>assistant\\n' + answer }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<call>' + call.function.name + ' ' + (call.function.arguments | tojson(indent=2)) + '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<response>' + content + '</response><|im_end|>\\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "instruct": INSTRUCT, "thinking": THINKING}
