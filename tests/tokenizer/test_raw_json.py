"""JSON that templates write as it was written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chatcache.tokenizer.chat_template import ChatTemplate, RawJson, parse_arguments

DEEP = '{"a":' * 300 + "1" + "}" * 300
SOURCE = '{"a":  1.0,"b": "\\u00e9"}'


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, origin="here", variables=variables).render([{"role": "user", "content": ""}])


@pytest.mark.parametrize("options", ["", "(indent=2)", "(ensure_ascii=true)"])
def test_tojson_writes_the_source_wherever_it_stands(options: str) -> None:
    call = {"name": "é", "arguments": parse_arguments(SOURCE), "more": [parse_arguments('{"z":2}'), "\udcfe"]}
    text = render("{{ call | tojson" + options + " }}", call=call)
    assert SOURCE in text and '{"z":2}' in text
    plain = {"name": "é", "arguments": json.loads(SOURCE), "more": [{"z": 2}, "\udcfe"]}
    assert json.loads(text) == plain
    assert render("{{ call | tojson" + options + " }}", call=plain) != text


def test_templates_read_it_as_the_object_it_is() -> None:
    text = render(
        "{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}{{ a is mapping }}", a=parse_arguments(SOURCE)
    )
    assert text == "a=1.0;b=é;True"


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '"x"', "[" * 5000, DEEP, '{"a": "\\udcff"}'])
def test_what_is_no_object_is_text(text: str) -> None:
    assert parse_arguments(text) == text and not isinstance(parse_arguments(text), RawJson)
