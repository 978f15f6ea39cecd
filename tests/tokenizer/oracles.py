"""What a whole reply holds, read in one go: the slow and obvious way, as the oracle of the streaming parsers."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from typing import NamedTuple

SPACE = " \t\r\n"


class Call(NamedTuple):
    name: str
    arguments: str


class NoCallError(Exception):
    """`args[0]`: where that was found out."""


def skip(text: str, at: int, chars: str = SPACE) -> int:
    while at < len(text) and text[at] in chars:
        at += 1
    return at


def end_of_string(text: str, at: int) -> int | None:
    """Behind the closing quote of the string that opens at `at`."""
    found = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL).match(text, at)
    return found.end() if found else None


def end_of_value(text: str, at: int) -> tuple[int, str]:
    """Where a value ends, and how: "whole", "cut" by the end of the text, or "bad"."""
    if at == len(text):
        return at, "cut"
    if text[at] == '"':
        end = end_of_string(text, at)
        return (len(text), "cut") if end is None else (end, "whole")
    if text[at] in "{[":
        depth = 0
        while at < len(text):
            if text[at] == '"':
                end = end_of_string(text, at)
                if end is None:
                    return len(text), "cut"
                at = end
                continue
            if text[at] == "<":
                return at, "bad"
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(text[at], 0)
            at += 1
            if depth == 0:
                return at, "whole"
        return at, "cut"
    word = re.compile(r"[A-Za-z0-9+.\-]+").match(text, at)
    if word is None:
        return at, "bad"
    return word.end(), "whole" if word.end() < len(text) else "cut"


def decoded(quoted: str) -> str | None:
    try:
        value = json.loads(quoted, strict=False)
        value.encode()
    except ValueError:
        return None
    return str(value)


def halved(text: str) -> str:
    """The text without every second brace outside of strings."""
    shown, at, num_braces = "", 0, 0
    while at < len(text):
        end = (end_of_string(text, at) or len(text)) if text[at] == '"' else at + 1
        if text[at] in "{}":
            num_braces += 1
        if text[at] not in "{}" or num_braces % 2:
            shown += text[at:end]
        at = end
    return shown


def read_object(text: str, at: int) -> tuple[Call, int]:
    """(the call, where it ends). Raises: NoCallError."""
    name, arguments = None, None
    first = True

    def stop(where: int, cut: bool) -> tuple[Call, int]:
        if name is None:
            raise NoCallError(where)
        if not cut and not arguments:
            return Call(name, "{}"), where
        return Call(name, arguments or ""), where

    opened = at
    at = skip(text, at, SPACE + "{")
    is_doubled = text.count("{", opened, at) > 1
    while True:
        at = skip(text, at)
        if at == len(text):
            return stop(at, True)
        if text[at] == "}" and first:
            return stop(at + 1, False)
        if text[at] != '"':
            return stop(at, False)
        end = end_of_string(text, at)
        if end is None:
            return stop(len(text), True)
        key = decoded(text[at:end])
        at = skip(text, end)
        if at == len(text):
            return stop(at, True)
        if text[at] != ":":
            return stop(at, False)
        at = skip(text, at + 1)
        end, how = end_of_value(text, at)
        if key in ("arguments", "parameters") and arguments is None and (how != "bad" or end > at):
            arguments = halved(text[at:end]) if is_doubled and text.startswith("{{", at) else text[at:end]
        if how == "whole" and key == "name" and name is None:
            said = decoded(text[at:end]) if text[at] == '"' else None
            if not said or len(said) > 256:
                raise NoCallError(end)
            name = said
        if how != "whole":
            return stop(end, how == "cut")
        at = skip(text, end)
        if at == len(text):
            return stop(at, True)
        if text[at] == "}":
            return stop(at + 1, False)
        if text[at] != ",":
            return stop(at, False)
        at += 1
        first = False


class Found(NamedTuple):
    """`end`: behind the calls and what joins them; up to `plain_until` stands text in which no call may begin."""

    calls: list[Call]
    end: int
    plain_until: int


def hermes(text: str) -> tuple[str, list[Call]]:
    return _with_line_breaks(*_split(text, "<tool_call>", _hermes_call, 0))


def llama3(text: str, names: frozenset[str]) -> tuple[str, list[Call]]:
    marker, start = "<|python_tag|>", skip(text, 0)
    if text[start : start + 1] != "{":
        return _with_line_breaks(*_split(text, marker, _llama_calls, 0))
    try:
        found = _joined(text, start, (";", ",", ""), names, marker)
    except NoCallError as no:
        keep = _without_space(text, 0, no.args[0])
        (shown, *others), more = _split(text, marker, _llama_calls, keep)
        return _with_line_breaks([text[:keep] + shown, *others], more)
    texts, more = _go_on(text, marker, _llama_calls, found)
    return _with_line_breaks(texts, found.calls + more)


def mistral(text: str) -> tuple[str, list[Call]]:
    return _with_line_breaks(*_split(text, "[TOOL_CALLS]", _mistral_calls, 0))


def _with_line_breaks(texts: list[str], calls: list[Call]) -> tuple[str, list[Call]]:
    return "\n".join(text for text in texts if text), calls


def _split(text: str, marker: str, calls_at: Callable[[str, int], Found], at: int) -> tuple[list[str], list[Call]]:
    """Cut `text[at:]` at markers that open calls. Returns the texts between calls, and the calls."""
    opened = text.find(marker, at)
    if opened < 0:
        return [text[at:]], []
    try:
        found = calls_at(text, opened + len(marker))
    except NoCallError as no:
        keep = _without_space(text, at, no.args[0])
        (shown, *others), calls = _split(text, marker, calls_at, keep)
        return [text[at:keep] + shown, *others], calls
    texts, calls = _go_on(text, marker, calls_at, found)
    return [text[at:opened].rstrip(SPACE), *texts], found.calls + calls


def _go_on(text: str, marker: str, calls_at: Callable[[str, int], Found], found: Found) -> tuple[list[str], list[Call]]:
    at = skip(text, found.end)
    if found.plain_until <= at:
        return _split(text, marker, calls_at, at)
    keep = _without_space(text, at, found.plain_until)
    (shown, *others), calls = _split(text, marker, calls_at, keep)
    return [text[at:keep] + shown, *others], calls


def _without_space(text: str, start: int, end: int) -> int:
    """`end`, before the white space that stands there; that at the very end of the text stays."""
    return end if end == len(text) else start + len(text[start:end].rstrip(SPACE))


def _object_at(text: str, at: int) -> tuple[Call, int]:
    at = skip(text, at)
    if text[at : at + 1] != "{":
        raise NoCallError(at)
    return read_object(text, at)


def _hermes_call(text: str, at: int) -> Found:
    call, at = _object_at(text, at)
    behind = skip(text, at, SPACE + "}")
    end = behind + len("</tool_call>") if text.startswith("</tool_call>", behind) else behind
    if "</tool_call>".startswith(text[behind:]):
        end = len(text)
    return Found([call], end, end)


def _joined(
    text: str, at: int, joints: tuple[str, ...], names: frozenset[str] | None = None, marker: str = ""
) -> Found:
    calls: list[Call] = []
    end = at
    while True:
        while marker and text.startswith(marker, skip(text, at)):
            at, names = skip(text, at) + len(marker), None
        try:
            call, after = _object_at(text, at)
            if names is not None and call.name not in names:
                raise NoCallError(_behind_name(text, at))
        except NoCallError as no:
            if not calls:
                raise
            return Found(calls, end, no.args[0])
        calls.append(call)
        end = skip(text, after, SPACE + "}")
        joint = next((each for each in joints if text.startswith(each or "{", end)), None)
        if joint is None:
            return Found(calls, end, end)
        at = end + len(joint)


def _behind_name(text: str, at: int) -> int:
    """The shortest beginning of the object that has its name."""
    for end in range(at, len(text)):
        with contextlib.suppress(NoCallError):
            _object_at(text[:end], at)
            return end
    return len(text)


def _llama_calls(text: str, at: int) -> Found:
    return _joined(text, at, (";", ",", ""), marker="<|python_tag|>")


def _mistral_calls(text: str, at: int) -> Found:
    at = skip(text, at)
    if text[at : at + 1] == "[":
        found = _joined(text, at + 1, (",",))
        behind = skip(text, found.end)
        closed = found.plain_until == found.end and text.startswith("]", behind)
        return Found(found.calls, behind + 1, behind + 1) if closed else found
    name = re.compile(r"[A-Za-z0-9_.\-]+").match(text, at)
    if name is None:
        call, end = _object_at(text, at)
        end = skip(text, end, SPACE + "}")
        return Found([call], end, end)
    at = name.end()
    if len(name[0]) > 256 or not (text.startswith("[ARGS]", at) or text.startswith("{", at)):
        raise NoCallError(at)
    at += len("[ARGS]") if text[at] == "[" else 0
    value = skip(text, at)
    end, how = end_of_value(text, value)
    after = skip(text, end, SPACE + "}")
    return Found([Call(name[0], text[value:end] or ("" if how == "cut" else "{}"))], after, after)


def reasoning(text: str, inside: bool) -> tuple[str, str]:
    """(what was thought, the rest)."""
    start = text.lstrip(SPACE)
    if start.startswith("<think>"):
        body = start[len("<think>") :]
    elif inside:
        body = text
    else:
        return "", text
    thought, closed, rest = body.partition("</think>")
    if closed:
        return thought.strip(SPACE), rest.lstrip(SPACE)
    for length in range(len("</think>") - 1, 0, -1):
        if thought.endswith("</think>"[:length]):
            return thought[:-length].strip(SPACE), ""
    return thought.lstrip(SPACE), ""
