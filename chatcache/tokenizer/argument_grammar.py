"""Grammar rules for arguments that are not JSON, from the JSON schema of a function.

Required arguments are always written, optional ones may be left out; both are in the order of the schema. A function
without a schema of its arguments takes any keys.

Strings in tagged notation have no end mark but the closing tag, so they are lazy lexemes. They are held to `enum`,
`const`, `minLength`, `maxLength` and `pattern`; other values to their whole schema, in which booleans and null may also
be the words of Python. Values in literal notation are held to types, `enum`, `const`, `items`, `properties` and the
alternatives of `anyOf`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from chatcache.tokenizer.argument_readers import pointer_step, resolve, types_of
from chatcache.tokenizer.tool_formats import WHITESPACE, LiteralArguments, TaggedArguments
from chatcache.types.json_schema import DEFAULT_OPTIONS, OPTIONS

_DEFINITIONS = ("$defs", "definitions")
_KEY = r"/[A-Za-z0-9_.\-]+/"
MAX_ENUM_VALUES = 256
_REGEX_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_NUMBERS = {"integer": r"/-?(0|[1-9][0-9]*)/", "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?/"}


def json_rule(schema: str) -> str:
    return "%json " + json.dumps({OPTIONS: DEFAULT_OPTIONS, **json.loads(schema)}, ensure_ascii=False)


def quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


class MarkRules:
    """Writes delimiters as grammar terms: token references for special tokens, strings for the text between them."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        tokens = sorted(special, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, tokens))) if tokens else None

    def is_token(self, text: str) -> bool:
        """Return True if the text starts with a special token."""
        return self._tokens is not None and self._tokens.match(text) is not None

    def __call__(self, text: str) -> str:
        terms: list[str] = []
        at = 0
        for found in self._tokens.finditer(text) if self._tokens is not None else ():
            terms += [quoted(text[at : found.start()]), f"<[{self._special[found[0]]}]>"]
            at = found.end()
        return " ".join(term for term in (*terms, quoted(text[at:])) if term)

    def until(self, name: str, text: str) -> list[str]:
        """Return the rules named `name` for any text up to and including the marker `text`."""
        if self.is_token(text):
            return [f"{name}: ANY_{name.upper()}? {self(text)}", f"ANY_{name.upper()}: /(?s:.+)/"]
        if self._tokens is not None and (found := self._tokens.search(text)) is not None:
            before, rest = text[: found.start()], text[found.start() :]
            return [f"{name}: ANY_{name.upper()} {self(rest)}", f"ANY_{name.upper()}: /(?s:.*){pattern(before)}/"]
        return [f"{name}[lazy]: /(?s:.*){pattern(text)}/"]


def _with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Return a part of a schema as a schema of its own, with the definitions that it refers to."""
    whole: dict[str, Any] = {OPTIONS: root[OPTIONS]} if OPTIONS in root else {}
    parts: list[Any] = [schema]
    while parts:
        part = parts.pop()
        parts += part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
        if not isinstance(part, Mapping) or not isinstance(part.get("$ref"), str):
            continue
        _, word, name, *_ = (*map(pointer_step, part["$ref"].split("/")), "", "")
        known = root.get(word) if word in _DEFINITIONS else None
        if not isinstance(known, Mapping) or name not in known:
            return json.dumps({**{key: root[key] for key in (*_DEFINITIONS, OPTIONS) if key in root}, **schema})
        if name not in whole.setdefault(word, {}):
            whole[word][name] = known[name]
            parts.append(known[name])
    return json.dumps({**whole, **schema})


def _properties(root: Mapping[str, Any]) -> list[tuple[str, Any, bool]] | None:
    """Return (name, schema, is required) of each property of an object; None if it has none."""
    schema = resolve(root, root)
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or (not properties and schema.get("additionalProperties") is not False):
        return None
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return [(name, each, name in names) for name, each in properties.items()]


def _enumerated(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and len(values) <= MAX_ENUM_VALUES else None


Entry = tuple[Callable[[str], str], bool]
"""(text before -> expression of an argument, is required)"""


def _sequence(name: str, entries: Sequence[Entry], separator: str) -> tuple[str, list[str]]:
    """Return an expression for entries in order, of which those that are not required may be left out, and its rules.

    The separator and the key of an argument are one lexeme: the lexer does not go back if a longer one fails.
    """
    if not separator:
        return " ".join(f"({entry('')})" + ("" if is_required else "?") for entry, is_required in entries) or '""', []
    options: list[str] = []
    for at, (entry, is_required) in enumerate(entries):
        options.append(f"({entry('')}) {name}_rest{at + 1}")
        if is_required:
            break
    else:
        options.append('""')
    rules = [f'{name}_rest{len(entries)}: ""']
    for at, (entry, is_required) in enumerate(entries[1:], start=1):
        rules.append(f"{name}_rest{at}: ({entry(separator)})" + ("" if is_required else "?") + f" {name}_rest{at + 1}")
    return " | ".join(options), rules if entries else []


class TaggedRules:
    """Rules of tagged arguments."""

    def __init__(self, form: TaggedArguments, mark: MarkRules) -> None:
        self._form = form
        self._mark = mark
        self._named: dict[str, str] = {}  # rules of values that are not strings, by their expressions

    def lines(self, name: str, root: Mapping[str, Any]) -> list[str]:
        """Return the rules of all arguments of a function, under the given name."""
        mark, form = self._mark, self._form
        properties = _properties(root)
        if properties is None:
            first, more = mark(form.opening), mark(form.separator + form.opening)
            entry = f"{_KEY} {mark(form.middle)} {name}_text"
            return [f"{name}: ({first} {entry} ({more} {entry})*)?", *self._text_rules(f"{name}_text", "")]
        entries: list[Entry] = []
        rules: list[str] = []
        for at, (key, schema, is_required) in enumerate(properties):
            kinds, added = self._values(f"{name}_{at}", schema, root)
            entries.append((partial(self._entry, key, kinds), is_required))
            rules += added
        sequence, rest = _sequence(name, entries, form.separator)
        return [f"{name}: {sequence}", *rest, *rules]

    def _entry(self, key: str, kinds: Mapping[str, str], before: str) -> str:
        opening = f"{before}{self._form.opening}{key}"
        return " | ".join(f"{self._mark(opening + middle)} {rule}" for rule, middle in kinds.items())

    def _values(self, name: str, schema: Any, root: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
        """Return the rules of a value and the delimiter after it: {name: middle}, and the rules themselves."""
        mark, form = self._mark, self._form
        resolved = resolve(schema, root)
        types = types_of(resolved, root)
        kinds: dict[str, str] = {}
        rules: list[str] = []
        if "string" in types:
            kinds[f"{name}_text"] = form.middle
            values = _enumerated(resolved)
            if values is not None:
                texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
                rules.append(f"{name}_text: {' | '.join(mark(text + form.closing) for text in texts)}")
            else:
                rules += self._text_rules(f"{name}_text", _text_pattern(resolved))
        if types != {"string"} and (form.json_middle or "string" not in types):
            kinds[f"{name}_json"] = form.json_middle or form.middle
            value = json_rule(_with_definitions(_without_string(resolved, types), root))
            words = "".join(f' | "{word}"' for word in _python_words(resolved, types))
            body = f"{value}{words}"
            if body not in self._named:
                self._named[body] = f"{name}_value"
                rules.append(f"{name}_value: {body}")
            rules.append(f"{name}_json: {self._named[body]} {mark(form.closing)}")
        return kinds, rules

    def _text_rules(self, name: str, shape: str) -> list[str]:
        """Return the rules of a string and the delimiter after it. `shape`: a pattern of the string, or ""."""
        closing = self._form.closing
        core = closing.rstrip(WHITESPACE)
        tail = self._mark(closing[len(core) :])
        inner = core.lstrip(WHITESPACE)
        is_token = self._mark.is_token(inner)
        if shape and is_token:
            return [f"{name}: {name.upper()}? {self._mark(closing)}", f"{name.upper()}: /{shape}/"]
        if (shape or inner != core) and not is_token:  # the parser ends a value at the tag alone
            text = f"/({shape or '(?s:.*)'}){pattern(core)}/ & ~/(?s:.*){pattern(inner)}(?s:.+)/"
            return [f"{name}: {name.upper()} {tail}", f"{name.upper()}: {text}"]
        if not tail:
            return self._mark.until(name, core)
        return [f"{name}: {name}_end {tail}", *self._mark.until(f"{name}_end", core)]


def _text_pattern(schema: Mapping[str, Any]) -> str:
    """Return a pattern of the strings that a schema allows; "" for any string."""
    shape = schema.get("pattern")
    if isinstance(shape, str):
        return "|".join(_unanchored(parts) for parts in _split_regex(shape))
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int) or isinstance(most, int):
        return f"(?s:.{{{least if isinstance(least, int) else 0},{most if isinstance(most, int) else ''}}})"
    return ""


def _split_regex(regex: str) -> list[list[str]]:
    """Split a regular expression at its outermost `|`, and each alternative into escapes, classes and characters."""
    found: list[list[str]] = [[]]
    depth = 0
    for part in _REGEX_PARTS.findall(regex):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            found.append([])
        else:
            found[-1].append(part)
    return found


def _unanchored(parts: Sequence[str]) -> str:
    """Return a regular expression that is searched for as one of the whole text, with escaped slashes."""
    head = 1 if parts[:1] == ["^"] else 0
    tail = len(parts) - 1 if parts[head:] and parts[-1] == "$" else len(parts)
    inner = re.sub(
        r"\\.|/", lambda found: found[0] if len(found[0]) > 1 else r"\/", "".join(parts[head:tail]), flags=re.S
    )
    return f"{'' if head else '(?s:.*)'}({inner}){'' if tail < len(parts) else '(?s:.*)'}"


def _python_words(schema: Mapping[str, Any], types: frozenset[str]) -> list[str]:
    """Return the words of Python that a schema allows; some templates write values with `| string` (Qwen3-Coder)."""
    values = _enumerated(schema)
    if values is not None:
        return [str(value) for value in values if value is None or isinstance(value, bool)]
    return ["True", "False"] * ("boolean" in types) + ["None"] * ("null" in types)


def _without_string(schema: Mapping[str, Any], types: frozenset[str]) -> Mapping[str, Any]:
    if "string" not in types:
        return schema
    others = sorted(types - {"string"})
    return {"allOf": [schema, {"type": others}]} if len(others) < 6 else {"type": others}


class LiteralRules:
    """Rules of arguments as literals. Each part of the schema is one rule, which may refer to itself."""

    def __init__(self, form: LiteralArguments, mark: MarkRules) -> None:
        self._form = form
        self._mark = mark
        self._named: dict[int, str] = {}  # rules of the parts of one schema, by their ids
        self._waiting: list[tuple[str, Mapping[str, Any]]] = []  # parts whose rules are not written yet
        self._rules: list[str] = []
        self._numbers = count()

    def lines(self, name: str, root: Mapping[str, Any]) -> list[str]:
        """Return the rules of all arguments of a function, under the given name."""
        self._named, self._rules = {}, []
        body = self._object(name, name, root, root, self._form.assign, self._form.separator, "")
        while self._waiting:
            rule, schema = self._waiting.pop()
            kinds = [kind for each in _alternatives(schema, root) for kind in self._kinds(name, each, root)]
            self._rules.append(f"{rule}: {' | '.join(dict.fromkeys(kinds)) or f'{name}_any'}")
        return [f"{name}: {body}", *self._rules, *self._extra(name)]

    def _extra(self, name: str) -> Iterator[str]:
        form, mark = self._form, self._mark
        colon, comma = mark(form.colon), mark(form.comma)
        text, key = f"{name}_text", f"{mark(form.key_quote)} {_KEY} {mark(form.key_quote)}".strip()
        if form.has_escapes:
            one = r"[^\x00-\x1f\\Q]|\\[\\nrtbfQ]|\\u[0-9a-f]{4}"
            quotes = ("'", '"')
            shapes = " | ".join(f"{name.upper()}_TEXT{k}" for k in range(2))
            yield f"{text}: {shapes}"
            for k, quote in enumerate(quotes):
                yield f"{name.upper()}_TEXT{k}: /{quote}({one.replace('Q', quote)})*{quote}/"
        else:
            yield f"{text}: {mark(form.quote)} {text}_rest"
            yield from mark.until(f"{text}_rest", form.quote)
        yield f"{name}_number: {_NUMBERS['number']}"
        yield f"{name}_integer: {_NUMBERS['integer']}"
        yield f'{name}_boolean: "true" | "false" | "True" | "False"'
        yield f'{name}_null: "null" | "None"'
        yield f'{name}_array: "[" ({name}_any ({comma} {name}_any)*)? "]"'
        yield f'{name}_object: "{{" ({key} {colon} {name}_any ({comma} {key} {colon} {name}_any)*)? "}}"'
        kinds = ("text", "number", "boolean", "null", "array", "object")
        yield f"{name}_any: {' | '.join(f'{name}_{kind}' for kind in kinds)}"

    def _object(
        self, name: str, rule: str, schema: Any, root: Mapping[str, Any], colon: str, comma: str, key_quote: str
    ) -> str:
        """Return the expression of the entries of an object. `rule`: the beginning of the names of its own rules."""
        mark = self._mark
        properties = _properties(resolve(schema, root))
        if properties is None:
            key = f"{mark(key_quote)} {_KEY} {mark(key_quote)} {mark(colon)} {name}_any"
            return f"({key} ({mark(comma)} {key})*)?"

        def entry(key: str, value: str, before: str) -> str:
            return f"{mark(before + key_quote + key + key_quote + colon)} ({value})"

        entries: list[Entry] = [
            (partial(entry, key, self._value(name, each, root)), is_required) for key, each, is_required in properties
        ]
        sequence, rest = _sequence(rule, entries, comma)
        self._rules += rest
        return f"({sequence})"

    def _value(self, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        """Return the name of the rule of a value."""
        resolved = resolve(schema, root)
        if not resolved:
            return f"{name}_any"
        rule = self._named.get(id(resolved))
        if rule is None:
            rule = self._named[id(resolved)] = f"{name}_value{next(self._numbers)}"
            self._waiting.append((rule, resolved))
        return rule

    def _kinds(self, name: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[str]:
        """Return the expressions of the values that a schema without alternatives allows."""
        values = _enumerated(schema)
        if values is not None:
            return [self._constant(value) for value in values]
        types = types_of(schema, root)
        if len(types) > 5:
            return [f"{name}_any"]
        return [self._typed(name, kind, schema, root) for kind in sorted(types)]

    def _typed(self, name: str, kind: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        form = self._form
        if kind == "string":
            return f"{name}_text"
        if kind == "object" and isinstance(schema.get("properties"), Mapping):
            rule = f"{name}_object{next(self._numbers)}"
            return f'"{{" {self._object(name, rule, schema, root, form.colon, form.comma, form.key_quote)} "}}"'
        if kind == "array" and isinstance(schema.get("items"), Mapping):
            item = self._value(name, schema["items"], root)
            return f'"[" ({item} ({self._mark(form.comma)} {item})*)? "]"'
        return f"{name}_{kind}"

    def _constant(self, value: Any) -> str:
        form, mark = self._form, self._mark
        match value:
            case str():
                inside = json.dumps(value, ensure_ascii=False)[1:-1] if form.has_escapes else value
                if form.quote == "'":
                    inside = inside.replace('\\"', '"').replace("'", "\\'")
                return mark(f"{form.quote}{inside}{form.quote}")
            case bool():
                return f'"{str(value).lower()}" | "{value}"'
            case None:
                return '"null" | "None"'
            case list():
                items = f" {mark(form.comma)} ".join(f"({self._constant(each)})" for each in value)
                return f'"[" {items} "]"'
            case dict():
                items = f" {mark(form.comma)} ".join(
                    f"{mark(form.key_quote + key + form.key_quote + form.colon)} ({self._constant(each)})"
                    for key, each in value.items()
                )
                return f'"{{" {items} "}}"'
            case _:
                return quoted(json.dumps(value))


def _alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas of which a value fits one, each once; the schema itself if it has no `anyOf` or `oneOf`."""
    seen: set[int] = set()
    stack = [schema]
    while stack:
        schema = stack.pop()
        if schema and id(schema) in seen:
            continue
        seen.add(id(schema))
        words = [schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list) and schema[word]]
        if not words or _enumerated(schema) is not None:
            yield schema
        else:
            stack += [resolve(each, root) for each in reversed(words[0])]
