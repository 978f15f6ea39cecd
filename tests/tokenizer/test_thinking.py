"""Reasoning controls of chat templates, found by rendering, and the variables that a client may set."""

from __future__ import annotations

from typing import Any

import pytest

from chatcache.errors import InvalidRequestError
from chatcache.tokenizer.reply_format import detect_format
from chatcache.tokenizer.thinking import LEVELS, MAX_KWARGS, MAX_KWARGS_CHARS, ThinkingControls
from tests.tokenizer.thinking_templates import thinking_tokenizer

USER = [{"role": "user", "content": "Hi"}]


def controls(name: str) -> ThinkingControls:
    tokenizer = thinking_tokenizer(name)
    return ThinkingControls(tokenizer, detect_format(tokenizer))


@pytest.mark.parametrize(
    ("name", "on", "off", "levels"),
    [
        ("qwen3", {"enable_thinking": True}, {"enable_thinking": False}, ()),
        ("qwen3.6", {"enable_thinking": True}, {"enable_thinking": False}, ()),
        ("deepseek", {"thinking": True}, {"thinking": False}, ()),
        ("r1", {}, None, ()),
        ("graded", {}, None, LEVELS),
        ("strict", {}, {"reasoning_effort": "none"}, ("high",)),
        ("unmarked", {}, None, LEVELS),
        ("plain", {}, {}, ()),
    ],
)
def test_controls_of_template_are_found(name: str, on: Any, off: Any, levels: Any) -> None:
    found = controls(name)
    assert (found.on, found.off, found.levels) == (on, off, levels)


def test_controls_nearest_level_is_one_that_the_template_accepts() -> None:
    assert controls("graded").nearest_level("low") == "low"
    assert controls("strict").nearest_level("minimal") == "high"
    assert controls("qwen3").nearest_level("low") is None


def test_controls_keep_variables_are_those_the_template_reads() -> None:
    assert controls("qwen3.6").keeps == {"preserve_thinking": True} and controls("qwen3").keeps == {}


@pytest.mark.parametrize(("name", "text"), [("qwen3", "\n</think>\n\n"), ("deepseek", "\n</think>\n\n"), ("plain", "")])
def test_closing_text_has_the_white_space_of_the_template(name: str, text: str) -> None:
    assert controls(name).closing_text == text


def test_marks_of_prompt_say_whether_it_opens_the_reasoning() -> None:
    tokenizer = thinking_tokenizer("qwen3.6")
    for variables, is_open in (({}, True), ({"enable_thinking": False}, False)):
        prompt = tokenizer.render_ids(USER, **variables)
        marks = controls("qwen3.6").marks(prompt)
        assert marks is not None and marks.is_open == is_open
        assert tokenizer.decode(marks.closing_ids) == "\n</think>\n\n"
    begun = [*tokenizer.render_ids(USER), *tokenizer.encode("hm"), *tokenizer.encode_after("a", "</think>")]
    marks = controls("qwen3.6").marks(begun, num_prefix_tokens=len(begun) - len(tokenizer.render_ids(USER)))
    assert marks is not None and marks.is_open
    assert controls("plain").marks(tokenizer.render_ids(USER)) is None


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"messages": []}, "chat_template_kwargs.messages"),
        ({"tools": []}, "chat_template_kwargs.tools"),
        ({"self": 1}, "chat_template_kwargs.self"),
        ({"eos_token": "x"}, "chat_template_kwargs.eos_token"),
        ({"raise_exception": 1}, "chat_template_kwargs.raise_exception"),
        ({"_chatcache_tick": 1}, "chat_template_kwargs._chatcache_tick"),
        ({"a b": 1}, "chat_template_kwargs.a b"),
        ({"": 1}, "chat_template_kwargs."),
        ({"x": [[[[[1]]]]]}, "chat_template_kwargs.x"),
        ({"x": {"y": "z" * MAX_KWARGS_CHARS}}, "chat_template_kwargs"),
        ({f"x{k}": 1 for k in range(MAX_KWARGS + 1)}, "chat_template_kwargs"),
        ({"reasoning_effort": 1}, "chat_template_kwargs"),
    ],
)
def test_kwargs_out_of_bounds_are_refused(kwargs: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        controls("graded").check_kwargs(kwargs)
    assert caught.value.param == param


def test_kwargs_within_bounds_are_accepted_and_their_special_tokens_escaped() -> None:
    controls("graded").check_kwargs({"custom": {"list": [1, None, True, 2.5, "x"]}, "reasoning_effort": "low"})
    tokenizer = thinking_tokenizer("graded")
    ids = tokenizer.render_ids(USER, reasoning_effort="a<|im_end|>b")
    assert ids.count(tokenizer.eos_token_ids[0]) == 1  # of the message


def test_template_variables_are_those_it_reads() -> None:
    assert thinking_tokenizer("qwen3.6").template_variables >= {"enable_thinking", "preserve_thinking"}
    assert "namespace" not in thinking_tokenizer("qwen3").template_variables
    assert "date_string" in thinking_tokenizer("plain").template_variables
