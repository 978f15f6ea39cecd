"""Incremental readers of arguments that are not JSON; they return the arguments as JSON text.

    <parameter=city>\\nOslo\\n</parameter>\\n<parameter=days>\\n3\\n</parameter>   ->   {"city": "Oslo", "days": 3}
    city='Oslo', exact=True                                                  ->   {"city": "Oslo", "exact": true}

A reader has the interface of `CallObjectReader`: `read` consumes what is complete, `drain` returns the JSON text so
far. Strings are returned while they are generated. If the notation is violated, the reader ends (`is_finished`) and the
JSON text stays incomplete (`is_complete`), as that of a reply that was cut off.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

from chatcache.tokenizer.tool_formats import WHITESPACE, LiteralArguments, TaggedArguments, overlap

MAX_KEY_CHARS = 512
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_REFS = 8


def pointer_step(text: str) -> str:
    """Return a step of a JSON pointer as a key."""
    return text.replace("~1", "/").replace("~0", "~")


def resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a local `$ref` of `schema` refers to; {} for no schema."""
    for _ in range(_MAX_REFS):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        found: Any = root
        for step in schema["$ref"].removeprefix("#").strip("/").split("/"):
            found = found.get(pointer_step(step)) if isinstance(found, Mapping) else None
        schema = found if schema["$ref"] != "#" else root
    return schema if isinstance(schema, Mapping) and "$ref" not in schema else {}


def property_schema(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the schema of one argument; {} if there is none."""
    resolved = resolve(schema, schema)
    properties = resolved.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return resolve(properties[key], schema)
    return resolve(resolved.get("additionalProperties"), schema)


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; all of them if it does not restrict the type."""
    return _types_of(schema, root, _MAX_REFS, {})


def _types_of(
    schema: Any, root: Mapping[str, Any], depth: int, known: dict[tuple[int, int], frozenset[str]]
) -> frozenset[str]:
    """Return the types of a schema. `known`: by id and depth, since a schema may refer to itself many times."""
    schema = resolve(schema, root)
    if depth == 0 or not schema:
        return _TYPES
    key = id(schema), depth
    if key not in known:
        known[key] = _types_of_keywords(schema, lambda each: _types_of(each, root, depth - 1, known))
    return known[key]


def _types_of_keywords(schema: Mapping[str, Any], types_of_part: Callable[[Any], frozenset[str]]) -> frozenset[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind}) & _TYPES
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str)) & _TYPES
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]]
        return frozenset(_type_of(value) for value in values)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            return frozenset().union(*map(types_of_part, schema[word]))
    if isinstance(schema.get("allOf"), list) and schema["allOf"]:
        return _TYPES.intersection(*map(types_of_part, schema["allOf"]))
    return _TYPES


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "number"
        case list():
            return "array"
        case _:
            return "object"


def escaped(text: str) -> str:
    """Return text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def value_to_json(text: str, types: frozenset[str]) -> str:
    """Return a value without quotes as JSON: as one of the types, if it can be read so, else as a string."""
    stripped = text.strip(WHITESPACE)
    written = _WORDS.get(stripped, stripped)
    try:
        kind = _type_of(json.loads(written, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if kind == "string":
        return json.dumps(text, ensure_ascii=False) if "string" in types else written
    fits = kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return written if fits else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> float:
    raise ValueError(constant)


class TaggedReader:
    """Reads tagged arguments of the function `name`, whose arguments have the JSON schema `schema`."""

    def __init__(self, form: TaggedArguments, name: str, schema: Mapping[str, Any]) -> None:
        self.name = name
        self.is_finished = self.is_complete = False
        self._schema = schema
        self._opening, self._separator = form.opening.strip(WHITESPACE), form.separator.strip(WHITESPACE)
        json_middle = f"|(?P<json>{_flexible(form.json_middle)})" if form.json_middle else ""
        self._middle = re.compile(f"(?P<text>{_flexible(form.middle)}){json_middle}")
        self._is_typed = bool(form.json_middle)
        self._middle_tail = form.middle[len(form.middle.rstrip(WHITESPACE)) :]
        self._closing = form.closing.strip(WHITESPACE)
        self._margin = form.closing[: len(form.closing) - len(form.closing.lstrip(WHITESPACE))]
        self._key: str | None = None
        self._types: frozenset[str] = _TYPES
        self._value: list[str] = []
        self._num = 0
        self._pending: list[str] = []

    def drain(self) -> str:
        text = "".join(self._pending)
        self._pending.clear()
        return text

    def read(self, text: str, last: bool = False) -> int:
        """Read `text`; return how much of it was consumed. `last`: no further text follows."""
        at = 0
        while not self.is_finished and at < len(text):
            end = self._in_value(text, at, last) if self._key is not None else self._between(text, at, last)
            if end == at and not self.is_finished:
                break
            at = end
        return at

    def _between(self, text: str, at: int, last: bool) -> int:
        """Read the start of the next argument, up to its value."""
        rest = text[at:].lstrip(WHITESPACE)
        at = len(text) - len(rest)
        if self._num and self._separator and rest.startswith(self._separator):
            return at + len(self._separator)
        if not rest.startswith(self._opening):
            if not self._opening.startswith(rest):
                self.is_finished = self.is_complete = True
                self._pending.append("}" if self._num else "{}")
            return at
        found = self._middle.search(rest, len(self._opening))
        key = rest[len(self._opening) : found.start()].strip() if found is not None else ""
        is_cut = found is not None and found.end() == len(rest) and not rest.endswith(self._middle_tail)
        if found is None or "\n" in key or (is_cut and not last):
            self.is_finished = len(rest) > MAX_KEY_CHARS or last
            return at
        self._begin(key, is_text=found["text"] is not None)
        return at + found.end()

    def _begin(self, key: str, *, is_text: bool) -> None:
        self._key = key
        types = types_of(property_schema(self._schema, key), self._schema)
        if self._is_typed:
            types = frozenset({"string"}) if is_text else (types - {"string"} or _TYPES - {"string"})
        self._types = types
        self._pending.append(f"{', ' if self._num else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._num += 1
        if self._is_string:
            self._pending.append('"')

    @property
    def _is_string(self) -> bool:
        return self._types == {"string"}

    def _in_value(self, text: str, at: int, last: bool) -> int:
        end = text.find(self._closing, at)
        if end < 0:
            length = len(text) - at
            if not last:
                length -= max(overlap(text[at:], self._margin + self._closing), overlap(text[at:], self._closing))
            self._append(text[at : at + length])
            return at + length
        value_end = end
        if self._margin and text.endswith(self._margin, at, end):
            value_end -= len(self._margin)
        self._append(text[at:value_end])
        if self._is_string:
            self._pending.append('"')
        else:
            self._pending.append(value_to_json("".join(self._value), self._types))
        self._value.clear()
        self._key = None
        return end + len(self._closing)

    def _append(self, text: str) -> None:
        if self._is_string:
            self._pending.append(escaped(text))
        else:
            self._value.append(text)


def _flexible(text: str) -> str:
    """Return a pattern of a delimiter with optional white space within it and at its end."""
    core = text.strip(WHITESPACE)
    tail = text[len(text.rstrip(WHITESPACE)) :]
    return r"\s*".join(map(re.escape, core.split())) + (f"(?:{re.escape(tail)})?" if tail else "")


class _Expects(Enum):
    KEY = auto()
    ASSIGN = auto()
    VALUE = auto()
    NEXT = auto()


_WORD = re.compile(r"[^\s\"'()\[\]{},:=<]+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")  # of JSON
_INTEGER = re.compile(r"[+-]?(?:0[xXoObB]\w+|[\d_]+)")  # of Python, possibly with misplaced digits
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def _number_to_json(word: str) -> str | None:
    """Return a number literal as JSON: one of JSON as it is, a finite one of Python converted; None for other words."""
    if not word.isascii():
        return None
    if _NUMBER.fullmatch(word):
        return word
    try:
        value = int(word, 0) if _INTEGER.fullmatch(word) else float(word)
    except ValueError:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return json.dumps(value)


class LiteralReader:
    """Reads arguments that are written as literals, as in Python, of the function `name`.

    `end`: the bracket after the last argument, which is not consumed.
    """

    def __init__(self, form: LiteralArguments, name: str, end: str) -> None:
        self.name = name
        self.is_finished = self.is_complete = False
        self._quotes = (form.quote,) if not form.has_escapes else ("'", '"')
        self._has_escapes = form.has_escapes
        self._end = end
        self._stack: list[str] = []  # closing brackets of the containers around the current place
        self._expects = _Expects.KEY
        self._is_empty = True  # nothing in this container yet
        self._has_comma = False  # before the current place; it may be the last one of a container
        self._quote = ""
        self._is_fresh = False  # nothing after the quote yet
        self._pending: list[str] = []
        self._has_begun = False

    def drain(self) -> str:
        text = "".join(self._pending)
        self._pending.clear()
        return text

    def read(self, text: str, last: bool = False) -> int:
        """Read `text`; return how much of it was consumed. `last`: no further text follows."""
        at = 0
        while not self.is_finished and at < len(text):
            end = self._in_string(text, at, last) if self._quote else self._step(text, at, last)
            if end == at:
                break
            at = end
        return at

    def _step(self, text: str, at: int, last: bool) -> int:
        char = text[at]
        if char in WHITESPACE:
            return at + 1
        for quote in self._quotes:
            if text.startswith(quote, at):
                return at + len(quote) if self._open_string(quote) else at
            if len(text) - at < len(quote) and quote.startswith(text[at:]) and not last:
                return at
        if char in ")]}":
            return self._close(char, at)
        if char in ",:=([{":
            return at + 1 if self._punctuation(char) else at
        found = _WORD.match(text, at)
        if found is None or found.end() - at > MAX_KEY_CHARS:
            return self._break(at)
        if found.end() == len(text) and not last:
            return at
        return found.end() if self._word(found[0]) else at

    def _break(self, at: int) -> int:
        self.is_finished = True
        return at

    def _emit(self, text: str) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._pending.append("{")
        self._pending.append(text)

    def _begin_entry(self) -> bool:
        """Write the comma before a key or value; return False if neither may follow."""
        if self._expects not in (_Expects.KEY, _Expects.VALUE):
            self.is_finished = True
            return False
        self._is_empty = False
        if self._has_comma:
            self._emit(", ")
        self._has_comma = False
        return True

    def _open_string(self, quote: str) -> bool:
        if not self._begin_entry():
            return False
        self._emit('"')
        self._quote, self._is_fresh = quote, True
        return True

    def _word(self, word: str) -> bool:
        if not self._begin_entry():
            return False
        if self._expects is _Expects.KEY:
            self._emit(json.dumps(word, ensure_ascii=False))
            self._expects = _Expects.ASSIGN
            return True
        word = _WORDS.get(word, word)
        value = word if word in ("true", "false", "null") else _number_to_json(word)
        self._emit(value or json.dumps(word, ensure_ascii=False))
        self._expects = _Expects.NEXT
        return True

    def _punctuation(self, char: str) -> bool:
        match self._expects, char:
            case _Expects.ASSIGN, ":" | "=":
                self._emit(": ")
                self._expects = _Expects.VALUE
            case _Expects.NEXT, ",":
                self._has_comma = True
                self._expects = _Expects.KEY if self._in_object else _Expects.VALUE
            case _Expects.VALUE, "(" | "[" | "{":
                self._begin_entry()
                self._emit("{" if char == "{" else "[")
                self._stack.append(_CLOSING[char])
                self._expects = _Expects.KEY if char == "{" else _Expects.VALUE
                self._is_empty = True
            case _:
                self.is_finished = True
                return False
        return True

    @property
    def _in_object(self) -> bool:
        return not self._stack or self._stack[-1] == "}"

    def _close(self, char: str, at: int) -> int:
        if self._expects is not _Expects.NEXT and not self._is_empty and not self._has_comma:
            return self._break(at)
        self._has_comma = False
        if not self._stack:
            if char == self._end:
                self._emit("}")
                self.is_complete = True
            return self._break(at)
        if char != self._stack.pop():
            return self._break(at)
        self._emit("}" if char == "}" else "]")
        self._expects = _Expects.NEXT
        self._is_empty = False
        return at + 1

    def _in_string(self, text: str, at: int, last: bool) -> int:
        if self._is_fresh and self._has_escapes:
            start = text[at : at + 2]
            if start == self._quote and not last:
                return at
            self._is_fresh = False
            if start == 2 * self._quote:  # three quotes begin a text of several lines
                self._quote *= 3
                return at + 2
        stops = (self._quote, "\\") if self._has_escapes else (self._quote,)
        end = min((found for stop in stops if (found := text.find(stop, at)) >= 0), default=-1)
        if end < 0:
            end = len(text) if last else len(text) - overlap(text[at:], self._quote)
            self._emit(escaped(text[at:end]))
            return end
        self._emit(escaped(text[at:end]))
        if not text.startswith(self._quote, end):
            return self._escape(text, end, last)
        self._emit('"')
        end += len(self._quote)
        self._quote = ""
        self._expects = _Expects.ASSIGN if self._expects is _Expects.KEY else _Expects.NEXT
        return end

    def _escape(self, text: str, at: int, last: bool) -> int:
        """Read the escape at `at`. Returns `at` if it is not complete."""
        if at + 1 == len(text):
            return at if not last else len(text)
        kind = text[at + 1]
        if kind not in _HEX:
            self._emit(escaped(_ESCAPES.get(kind, kind if kind in "\\'\"/" else f"\\{kind}")))
            return at + 2
        end = at + 2 + _HEX[kind]
        digits = text[at + 2 : end]
        if re.fullmatch(r"[0-9A-Fa-f]*", digits) is None or (len(digits) < _HEX[kind] and last):
            self._emit(escaped(f"\\{kind}"))
            return at + 2
        if len(digits) < _HEX[kind]:
            return at
        code = int(digits, 16)
        self._emit(f"\\u{code:04x}" if code < 0x10000 else escaped(chr(code) if code < 0x110000 else "\ufffd"))
        return end
