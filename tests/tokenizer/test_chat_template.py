"""Rendering equal to transformers' `apply_chat_template`, in a sandbox that holds."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer

from chatcache.errors import InvalidRequestError, ModelFolderError
from chatcache.tokenizer.chat_template import ChatTemplate
from chatcache.tokenizer.tokenizer import read_tokenizer
from tests.tokenizer.tokenizers import TEMPLATES, write_folder

TOOLS = [
    {"type": "function", "function": {"name": "wéather", "description": "<b>'&\"", "parameters": {"x": [1, None]}}}
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi there 👩‍👧 <b>&amp;'\""}],
    "turns": [
        {"role": "user", "content": "  spaced \n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nWell."},
        {"role": "user", "content": "more {{ 7 * 7 }} {% raw %}"},
    ],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "calls": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "wéather", "arguments": {"in": "Zürich"}}}],
        },
        {"role": "tool", "content": "sunny"},
    ],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("templates")
    return {name: write_folder(root / name, template=source) for name, source in TEMPLATES.items()}


@pytest.mark.parametrize("variables", [{}, {"tools": TOOLS}, {"enable_thinking": False}], ids=["", "tools", "quiet"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(
    folders: dict[str, Path], name: str, chat: str, prompt: bool, variables: dict[str, Any]
) -> None:
    theirs = AutoTokenizer.from_pretrained(str(folders[name]))
    ours = read_tokenizer(folders[name])
    if name == "instruct" and chat in {"system", "calls"}:
        with pytest.raises(jinja2.TemplateError, match="must alternate"):
            theirs.apply_chat_template(CHATS[chat], tokenize=False)
        with pytest.raises(InvalidRequestError, match="must alternate"):
            ours.render(CHATS[chat], prompt, **variables)
        return
    want = theirs.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=prompt, **variables)
    assert ours.render(CHATS[chat], prompt, **variables) == want
    ids = theirs.apply_chat_template(CHATS[chat], add_generation_prompt=prompt, return_dict=False, **variables)
    assert ours.render_ids(CHATS[chat], prompt, **variables) == ids


@pytest.mark.parametrize("name", ["chatml", "headers", "thinking"])
def test_continuing_the_final_message_equals_transformers(folders: dict[str, Path], name: str) -> None:
    chat = [CHATS["one"][0], {"role": "assistant", "content": "Well, I"}]
    theirs = AutoTokenizer.from_pretrained(str(folders[name]))
    want = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    got = read_tokenizer(folders[name]).render(chat, continue_final_message=True)
    assert got == want and got.endswith("Well, I")


def template(source: str, **variables: str) -> ChatTemplate:
    return ChatTemplate(source, origin="here", variables=variables)


def test_continuing_keeps_trailing_space_and_list_content() -> None:
    text = template("{{ messages[-1].content | trim }}<end>")
    assert text.render([{"role": "assistant", "content": " so "}], continue_final_message=True) == "so "
    parts = template("{{ messages[-1].content[-1].text }}<end>")
    chat = [{"role": "assistant", "content": [{"type": "text", "text": "so"}]}]
    assert parts.render(chat, continue_final_message=True) == "so"
    assert chat[0]["content"] == [{"type": "text", "text": "so"}]  # the caller's messages are untouched


@pytest.mark.parametrize("chat", [[], [{"role": "user"}], [{"role": "user", "content": []}]])
def test_nothing_to_continue(chat: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequestError, match="no text to continue"):
        template("x").render(chat, continue_final_message=True)


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequestError, match="cannot continue"):
        template("x").render([{"role": "user", "content": "a"}], continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[7].content }}",
        "{{ messages + 3 }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 3 %}",
        "{{ namespace(_x=1) }}",
        "{{ range(10 ** 9) | list }}",
        "{{ ().__class__.__base__.__subclasses__()[0] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_refusals_are_the_messages_fault_and_the_sandbox_holds(source: str) -> None:
    chat = [{"role": "user", "content": "a"}]
    with pytest.raises(InvalidRequestError) as caught:
        template(source).render(chat)
    assert caught.value.param == "messages"
    assert chat == [{"role": "user", "content": "a"}]


def test_a_refusal_says_why() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").render([])


def test_variables_reach_the_template() -> None:
    text = template("{{ bos_token }}|{{ tools is none }}|{{ mood }}|{{ unset is defined }}", bos_token="<s>")
    assert text.render([], mood="calm") == "<s>|True|calm|False"


def test_a_template_that_does_not_compile_is_the_folders_fault() -> None:
    with pytest.raises(ModelFolderError, match=r"here: .*line 2"):
        template("fine\n{% for %}")


def test_large_values_that_are_no_trick_are_written_and_compared() -> None:
    """Two thousand messages as JSON, by themselves, and looked for among each other."""
    source = (
        "{{ messages|tojson|length }} {{ messages|string|length }} {{ messages == messages|list }} "
        "{% for m in messages %}{{ m in messages }}{{ m == messages[-1] }}{% endfor %}"
        "{% set ns = namespace(all=messages) %}{{ ns.all|length }} {{ {'a': 1}['a'] }} {{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}"
    )
    messages = [{"role": "user", "content": f"{number} " * 20} for number in range(2000)]
    text = ChatTemplate(source, origin="test", variables={}).render(messages, add_generation_prompt=False)
    error = f"{len(json.dumps(messages))} {len(str(messages))} True " + "TrueFalse" * 1999 + "TrueTrue"
    assert text == error + "2000 1 TrueFalse"


def test_rendering_leaves_no_reference_cycles() -> None:
    """A cycle would keep the messages of each request, which can be megabytes, until a full garbage collection."""
    shown = template(
        "{% macro show(m) %}{{ m.content }}{{ messages | length }}{% endmacro %}"
        "{% macro twice(m) %}{{ show(m) }}{{ show(m) }}{% endmacro %}"
        "{% for m in messages %}{{ twice(m) }}{% endfor %}"
    )
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert shown.render([{"role": "user", "content": "Hi"}]) == "Hi1Hi1"
        gc.collect()
        kept = [found for found in gc.garbage if isinstance(found, dict) and "messages" in found]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not kept
