"""Derive the syntax of tool calls and reasoning from a chat template.

The template renders an assistant's message with known names, keys and values, and what it writes around them is the
syntax. Renderings that differ in one thing separate adjacent delimiters:

    one call        <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>
    no arguments    <tool_call>\\n<function=NAME>\\n</function>\\n</tool_call>     -> where the arguments begin and end
    numbers         ...<parameter=KEY>\\n71345\\n</parameter>...                  -> strings have no quotes: tagged
    two calls       ...</tool_call>\\n<tool_call>...                             -> what belongs to one call
    plain text      ...                                                         -> where the reply begins and ends

A template that does not render calls gives None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chatcache.tokenizer.chat_template import RawJson
from chatcache.tokenizer.reasoning import ReasoningSyntax
from chatcache.tokenizer.tool_formats import JSON, LiteralArguments, TaggedArguments, ToolCallSyntax

Render = Callable[..., str | None]
"""(messages, tools=...) -> the rendering, None if the template refuses the messages."""

_NAMES = ("probe_one", "probe_two")
PROBE_NAME = _NAMES[0]
_KEYS = ("key_a", "key_b")
_TEXTS = {"key_a": "textaa", "key_b": "textbb"}
_NUMBERS = {"key_a": 71345, "key_b": 71346}
_NESTED = {"key_a": {"key_c": 71345, "key_d": [71346, 71347]}}
_IDS = ("abcdefgh1", "abcdefgh2")
_LONG_IDS = ("call_0123456789abcdefghij", "call_0123456789abcdefghik")
_CONTENT, _REASONING = "¤content¤", "¤reason¤"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MARK = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])\s*$")
MAX_MARK_CHARS, MAX_DELIMITER_CHARS = 80, 160
ID_SLOT = "\0"  # stands for a call id in the delimiters of an object
PROBE_TOOLS: Sequence[Mapping[str, Any]] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "probe",
            "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in _KEYS}, "required": []},
        },
    }
    for name in _NAMES
)
_USER: Mapping[str, Any] = {"role": "user", "content": "¤user¤"}


def derive_tool_calls(render: Render, stops: Sequence[str]) -> ToolCallSyntax | None:
    """Return the syntax of tool calls; None if the template does not show it. `stops`: texts that end a reply."""
    probe = _Probe(render, stops)
    single = probe.reply(_TEXTS)
    if single is None or single.find(_NAMES[0]) < 0:
        return None
    syntax = _derive_object(probe, single) or _derive_named(probe, single) or _derive_keyed(probe, single)
    texts = syntax.delimiters if syntax is not None else ()
    foreign = (*stops, '"function":')  # the latter: the message as data, not as the model writes it
    if syntax is None or any(
        len(text) > MAX_DELIMITER_CHARS or any(each in text for each in foreign) for text in texts
    ):
        return None
    return syntax if probe.takes_long_ids() else replace(syntax, id_chars=len(_IDS[0]))


def derive_reasoning(render: Render, stops: Sequence[str]) -> ReasoningSyntax | None:
    """Return the markers around reasoning; None if the template does not show them."""
    plain = render([_USER, {"role": "assistant", "content": _CONTENT}])
    if plain is None:
        return None
    for message in _reasoning_messages():
        text = render([_USER, message])
        if text is None or (at := text.find(_REASONING)) < 0:
            continue
        end = text.find(_CONTENT, at)
        if end < 0:
            continue
        opening = text[len(_common_start(plain, text[:at])) : at].strip()
        if not opening:
            found = _MARK.search(text[:at])
            opening = found[1] if found is not None else ""
        closing = text[at + len(_REASONING) : end].strip()
        fits = 0 < len(opening) <= MAX_MARK_CHARS and 0 < len(closing) <= MAX_MARK_CHARS
        fits = fits and not any(word in opening + closing for word in ("'type'", '"type"'))  # the parts as data
        if fits and not any(stop in opening + closing for stop in stops):
            return ReasoningSyntax(opening, closing)
    return None


def _reasoning_messages() -> list[dict[str, Any]]:
    parts = [{"type": "thinking", "thinking": _REASONING}, {"type": "text", "text": _CONTENT}]
    named = [{"role": "assistant", "content": _CONTENT, key: _REASONING} for key in _REASONING_KEYS]
    return [*named, {"role": "assistant", "content": parts}]


@dataclass(frozen=True, slots=True)
class _Probe:
    """Renders calls and returns what the model would have written."""

    render: Render
    stops: Sequence[str]

    def reply(self, *arguments: Mapping[str, Any], ids: Sequence[str] = _IDS) -> str | None:
        """Return the reply that calls one function per given arguments; None if it cannot be rendered."""
        calls = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": RawJson(dict(each), json.dumps(each))},
            }
            for name, each, call_id in zip(_NAMES, arguments, ids, strict=False)
        ]
        plain = self.render([_USER, {"role": "assistant", "content": _CONTENT}], tools=list(PROBE_TOOLS))
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        text = self.render([_USER, message], tools=list(PROBE_TOOLS))
        if text is None or plain is None:
            return None
        text = text[len(_common_start(plain, text)) :]
        last = max(text.rfind(name) for name in _NAMES)
        end = len(text) - len(_common_end(plain, text[last:])) if last >= 0 else len(text)
        return text[: min([end, *(at for stop in self.stops if (at := text.find(stop, max(last, 0))) >= 0)])]

    def takes_long_ids(self) -> bool:
        return self.reply(_TEXTS, ids=_LONG_IDS) is not None


def _common_prefix(one: str, other: str) -> str:
    length = next((k for k, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[: min(len(one), len(other)) if length is None else length]


def _common_start(one: str, other: str) -> str:
    """Return the common beginning of two texts, without the beginning of a tag."""
    return _whole_tags_before(_common_prefix(one, other), "<[")


def _common_end(one: str, other: str) -> str:
    """Return the common end of two texts, without the end of a tag."""
    common = _common_prefix(one[::-1], other[::-1])[::-1]
    closed, opened = common.find(">"), common.find("<")
    return common[closed + 1 :] if closed >= 0 and (opened < 0 or closed < opened) else common


def _whole_tags_before(text: str, brackets: str = "<") -> str:
    """Return the text up to a tag that is not closed in it."""
    for opening, closing in ("<>", "[]"):
        at = text.rfind(opening)
        if opening in brackets and at > text.rfind(closing):
            text = text[:at]
    return text


def _split_calls(syntax: ToolCallSyntax, opening: str, between: str | None, closing: str) -> ToolCallSyntax:
    """Divide the texts before, between and after calls into those of a call and those of the section."""
    if between is None:  # one call at a time
        section_open, call_open, separator, call_close, section_close = "", opening, "", closing, ""
    else:
        call_open = _common_end(opening, between)
        rest = between[: len(between) - len(call_open)]
        call_close = _whole_tags_before(_common_prefix(rest, closing))
        section_open, separator = opening[: len(opening) - len(call_open)], rest[len(call_close) :]
        section_close = closing[len(call_close) :]
    if not section_open.strip():
        call_open, section_open = section_open + call_open, ""
        call_close, section_close = call_close + section_close, ""
    bare = not (section_open + call_open).strip().strip("[")
    return replace(
        syntax,
        section_open=section_open,
        call_open=call_open,
        separator=separator if between is not None or not bare else "; ",
        call_close=call_close,
        section_close=section_close,
        allows_bare=bare,
    )


def _decode(text: str, at: int) -> tuple[Any, int]:
    """Decode the JSON value at an offset. Returns (None, at) if there is none."""
    try:
        value: tuple[Any, int] = json.JSONDecoder().raw_decode(text, at)
        return value
    except (ValueError, RecursionError):
        return None, at


def _find_json(text: str, start: int, value: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return where a JSON object with this value begins and ends."""
    at = text.find("{", start)
    while at >= 0:
        found, end = _decode(text, at)
        if found == value:
            return at, end
        at = text.find("{", at + 1)
    return None


def _object_around(text: str, number: int) -> tuple[int, int] | None:
    """Return where the innermost JSON object with the name and the arguments of a call begins and ends."""
    at = text.find(_NAMES[number])
    while (at := text.rfind("{", 0, max(at, 0))) >= 0:
        found, end = _decode(text, at)
        if isinstance(found, dict) and found.get("name") == _NAMES[number]:
            return (at, end) if _TEXTS in (found.get("arguments"), found.get("parameters")) else None
    return None


def _derive_object(probe: _Probe, single: str) -> ToolCallSyntax | None:
    """Derive calls that are JSON objects."""
    where = _object_around(single, 0)
    if where is None:
        return None
    start, end = where
    name = single.find(f'"{_NAMES[0]}"', start)
    arguments = _find_json(single, name, _TEXTS) if name >= 0 else None
    if arguments is None:
        return None
    head, middle, tail = (
        text.replace(_IDS[0], ID_SLOT)
        for text in (
            single[start:name],
            single[name + len(_NAMES[0]) + 2 : arguments[0]],
            single[arguments[1] : end],
        )
    )
    syntax = ToolCallSyntax(object_head=head, object_middle=middle, object_tail=tail)
    between, double = None, probe.reply(_TEXTS, _TEXTS)
    if double is not None and (first := _object_around(double, 0)) and (second := _object_around(double, 1)):
        between = double[first[1] : second[0]]
    return _split_calls(syntax, single[:start], between, single[end:])


def _derive_named(probe: _Probe, single: str) -> ToolCallSyntax | None:
    """Derive calls that are a name and a JSON object."""
    name = single.index(_NAMES[0])
    arguments = _find_json(single, name, _TEXTS)
    if arguments is None:
        return None
    name_end, id_open = single[name + len(_NAMES[0]) : arguments[0]], ""
    if _IDS[0] in name_end:
        id_open, _, name_end = name_end.partition(_IDS[0])
    between, double = None, probe.reply(_TEXTS, _TEXTS)
    if double is not None and _NAMES[0] in double and (second := double.find(_NAMES[1])) >= 0:
        first = _find_json(double, double.index(_NAMES[0]), _TEXTS)
        between = double[first[1] : second] if first is not None and first[1] <= second else None
    syntax = ToolCallSyntax(is_object=False, name_end=name_end, id_open=id_open, arguments=JSON)
    return _split_calls(syntax, single[:name], between, single[arguments[1] :])


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The texts around the keys and values of a call with two arguments, after its name."""

    first: str
    middle: str
    between: str
    last: str

    @classmethod
    def cut(cls, text: str, arguments: Mapping[str, Any]) -> _Pieces | None:
        found: list[str] = []
        at = text.index(_NAMES[0]) + len(_NAMES[0])
        for piece in (_KEYS[0], str(arguments[_KEYS[0]]), _KEYS[1], str(arguments[_KEYS[1]])):
            start = text.find(piece, at)
            if start < 0:
                return None
            found.append(text[at:start])
            at = start + len(piece)
        return cls(found[0], found[1], found[2], text[at:])


def _derive_keyed(probe: _Probe, single: str) -> ToolCallSyntax | None:
    """Derive calls with a delimiter around each key and value."""
    texts, numeric, empty = _Pieces.cut(single, _TEXTS), probe.reply(_NUMBERS), probe.reply({})
    numbers = _Pieces.cut(numeric, _NUMBERS) if numeric is not None and _NAMES[0] in numeric else None
    if texts is None or numbers is None or empty is None or _NAMES[0] not in empty:
        return None
    bare = empty[empty.index(_NAMES[0]) + len(_NAMES[0]) :]
    name_end = _end_of_name(numbers, bare)
    if name_end is None:
        return None
    opening, closing = numbers.first[len(name_end) :], bare[len(name_end) :]
    value_end = numbers.last[: len(numbers.last) - len(closing)]
    if opening and not numbers.between.endswith(opening):
        return None
    separator = numbers.between[: len(numbers.between) - len(opening)]
    value_end = _common_prefix(value_end, separator)
    separator = separator[len(value_end) :]
    form = _argument_form(probe, texts, numbers, opening, value_end, separator)
    between, double = None, probe.reply(_NUMBERS, _NUMBERS)
    last = str(_NUMBERS["key_b"])
    if double is not None and last in double and (second := double.find(_NAMES[1])) >= 0:
        between = double[double.index(last) + len(last) + len(value_end) : second]
    syntax = ToolCallSyntax(is_object=False, name_end=name_end, arguments=form)
    return _split_calls(syntax, single[: single.index(_NAMES[0])], between, closing)


def _end_of_name(pieces: _Pieces, bare: str) -> str | None:
    """Return the text between a name and its arguments. `bare`: what follows the name without arguments."""
    for length in range(len(_common_prefix(pieces.first, bare)), -1, -1):
        name_end = bare[:length]
        if _whole_tags_before(name_end) == name_end and pieces.last.endswith(bare[length:]):
            return name_end
    return None


def _argument_form(
    probe: _Probe, texts: _Pieces, numbers: _Pieces, opening: str, value_end: str, separator: str
) -> TaggedArguments | LiteralArguments:
    middle = numbers.middle
    quote = texts.middle.removeprefix(middle)
    if quote != texts.middle and quote and texts.between == quote + numbers.between:
        return replace(_nested_form(probe), assign=middle, separator=separator, quote=quote)
    if middle[-1:] in ("'", '"') and value_end == middle[-1]:  # every value is in quotes
        return LiteralArguments(assign=middle[:-1], separator=separator, quote=middle[-1])
    json_middle = middle if middle != texts.middle else ""
    return TaggedArguments(opening, texts.middle, value_end, separator, json_middle)


def _nested_form(probe: _Probe) -> LiteralArguments:
    """Derive how objects within a value are written."""
    text = probe.reply(_NESTED) or ""
    found = re.search(r"\{([^{}\[\]]*?)key_c(.+?)71345(.+?)key_d", text, re.DOTALL)
    if found is None:
        return LiteralArguments()
    quote = found[1]
    return LiteralArguments(
        key_quote=quote, colon=found[2].removeprefix(quote), comma=found[3][: len(found[3]) - len(quote)]
    )
