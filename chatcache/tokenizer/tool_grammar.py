"""What a reply may be, as a grammar in llguidance's Lark notation: calls of the right form, and text where it may be.

    start: thought? body         body: calls                  a call is required
                                       calls | answer         the answer has a form of its own
                                       text calls | text      otherwise

Text ends where a call's marker begins. A marker that is a special token no text can hold; any other is found by a lazy
lexeme, which ends as soon as it can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chatcache.tokenizer.reasoning import CLOSING, OPENING
from chatcache.tokenizer.reply_format import ReplyFormat
from chatcache.tokenizer.tool_formats import Syntax

_BLANK = {"whitespace_pattern": " "}  # once or not at all: a model that likes new lines would go on with them for ever
_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class Callee:
    """A function that may be called. `schema`: the JSON schema that its arguments are held to ("": any object)."""

    name: str
    schema: str = ""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What may be called now: at least one if `required`, at most one unless `parallel`.

    `answer`: the JSON schema of a reply that calls nothing ("": any text).
    """

    callees: tuple[Callee, ...]
    required: bool = False
    parallel: bool = True
    answer: str = ""

    @property
    def is_free(self) -> bool:
        """Whether the model may write what it likes, so that no grammar is needed."""
        held = any(callee.schema for callee in self.callees)
        return not (held or self.required or self.answer) and self.parallel


def call_grammar(choice: ToolChoice, form: ReplyFormat, special: Mapping[str, int], prompt_end: str) -> str:
    """`special`: ids of the marks that are special tokens. Raises: ValueError for a format without calls."""
    thought = _Thought(form, special).lines(prompt_end)
    start = [f"start: {'lead ' if thought else ''}body", *thought]
    if not choice.callees:
        return "\n".join([*start, f"body: {_json(choice.answer or _ANY_OBJECT)}"])
    if form.syntax is None:
        raise ValueError(f"no calls in the format {form.tool_calls!r}")
    return "\n".join([*start, *_Calls(choice, form, form.syntax, special).lines()])


class _Marks:
    """How marks are written: as their token, or as text."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special

    def is_token(self, text: str) -> bool:
        return text in self._special

    def __call__(self, text: str) -> str:
        return f"<[{self._special[text]}]>" if text in self._special else _quoted(text)

    def until(self, name: str, text: str) -> list[str]:
        """The rule of anything that ends with a mark."""
        if self.is_token(text):
            return [f"{name}: ANY_{name.upper()}? {self(text)}", f"ANY_{name.upper()}: /(?s:.+)/"]
        return [f"{name}[lazy]: /(?s:.*){_pattern(text)}/"]


class _Thought:
    """Rules of what the model may think first."""

    def __init__(self, form: ReplyFormat, special: Mapping[str, int]) -> None:
        self._form = form
        self._mark = _Marks(special)

    def lines(self, prompt_end: str) -> list[str]:
        if self._form.reasoning == "none" or prompt_end.rstrip().endswith(CLOSING):
            return []
        inside = self._form.begins_inside(prompt_end)
        lead = "thought BLANK?" if inside else f"({self._mark(OPENING)} thought BLANK?)?"
        return [f"lead: {lead}", *self._mark.until("thought", CLOSING), r"BLANK: /[ \t\r\n]+/"]


class _Calls:
    """Rules of calls, and of text where it may be."""

    def __init__(self, choice: ToolChoice, form: ReplyFormat, syntax: Syntax, special: Mapping[str, int]) -> None:
        self._choice = choice
        self._form = form
        self._syntax = syntax
        self._mark = _Marks(special)

    def lines(self) -> list[str]:
        return [
            *self._body(),
            f"opened: {self._opened()}",
            f"more: {self._mark(self._syntax.marker)} opened",
            *self._objects(),
        ]

    def _body(self) -> list[str]:
        marker, bare = self._syntax.marker, self._syntax.bare
        calls = f"{self._mark(marker)} opened"
        if bare:
            calls = f"opened | {calls}" if self._mark.is_token(marker) else "opened"
        if self._choice.required:
            return [f"body: {calls}"]
        if self._choice.answer and bare:
            return [f"body: {self._either()}"]
        if self._choice.answer:
            return [f"body: {calls} | answer", f"answer: {_json(self._choice.answer)}"]
        if bare:
            plain = r"/(?s:[ \t\r\n]*[^{ \t\r\n].*)/"
            without = "" if self._mark.is_token(marker) else f" & ~/(?s:.*){_pattern(marker)}(?s:.*)/"
            return [f"body: PLAIN? | {calls}", f"PLAIN: {plain}{without}"]
        if self._mark.is_token(marker):
            return ["body: (ANY? | ANY? " + calls + ")", "ANY: /(?s:.+)/"]
        text = f"/(?s:.+)/ & ~/(?s:.*){_pattern(marker)}(?s:.*)/"
        return ["body: TEXT? | head opened", f"TEXT: {text}", *self._mark.until("head", marker)]

    def _either(self) -> str:
        """One call or the answer, where both begin with a brace: told apart as the alternatives of one schema."""
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": callee.name}, "parameters": json.loads(callee.schema or _ANY_OBJECT)},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for callee in self._choice.callees
        ]
        return _json(json.dumps({"anyOf": [*calls, json.loads(self._choice.answer)]}))

    def _opened(self) -> str:
        """All calls behind the first one's marker."""
        syntax, many = self._syntax, self._choice.parallel
        if syntax.bare:
            return 'object ("; " object)*' if many else "object"
        if syntax.listed and self._form.named_calls:
            return "named more?" if many else "named"
        if syntax.listed:
            return '"[" object (", " object)* "]"' if many else '"[" object "]"'
        closing = self._mark(next(iter(syntax.joints)))
        return f'"\\n" object "\\n" {closing}' + (' ("\\n" more)?' if many else "")

    def _objects(self) -> Sequence[str]:
        key = "parameters" if self._syntax.bare else "arguments"
        callees = range(len(self._choice.callees))
        rules = [f"object: {' | '.join(f'object{k}' for k in callees)}"]
        if self._syntax.between:
            rules.append(f"named: {' | '.join(f'named{k}' for k in callees)}")
        for k, callee in enumerate(self._choice.callees):
            opening = f'{{"name": {json.dumps(callee.name)}, "{key}": '
            rules.append(f'object{k}: {_quoted(opening)} arguments{k} "}}"')
            rules.append(f"arguments{k}: {_json(callee.schema or _ANY_OBJECT)}")
            if self._syntax.between:
                rules.append(f"named{k}: {_quoted(callee.name)} {self._mark(self._syntax.between)} arguments{k}")
        return rules


def _json(schema: str) -> str:
    return "%json " + json.dumps({"x-guidance": _BLANK, **json.loads(schema)}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
