"""Grammar that constrains a reply to valid tool calls, in llguidance's Lark notation.

    start: thought? body         body: calls                  if a call is required
                                       calls | answer         if the answer has a JSON schema
                                       text calls | text      otherwise

Text ends where the marker of a call begins. If the marker is a special token, text cannot contain it; any other marker
is matched by a lazy lexeme, which ends at the first match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chatcache.tokenizer.reply_format import ReplyFormat
from chatcache.tokenizer.tool_formats import ToolCallSyntax

_SINGLE_SPACE = {"whitespace_pattern": " "}  # at most one space: otherwise some models emit newlines without end
_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function that the model may call.

    `schema`: JSON schema of its arguments ("": any object).
    """

    name: str
    schema: str = ""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Functions that the model may call.

    At least one if `required`, at most one unless `parallel`.

    `answer`: JSON schema of a reply without calls ("": any text).
    """

    functions: tuple[CallableFunction, ...]
    required: bool = False
    parallel: bool = True
    answer: str = ""

    @property
    def is_unconstrained(self) -> bool:
        """True if every reply is allowed, so that no grammar is needed."""
        held = any(callee.schema for callee in self.functions)
        return not (held or self.required or self.answer) and self.parallel


def build_tool_grammar(choice: ToolChoice, form: ReplyFormat, special: Mapping[str, int], prompt_end: str) -> str:
    """Build the grammar of a reply.

    `special`: ids of those markers that are special tokens.
    Raises: ValueError if the format has no tool calls.
    """
    thought = _ReasoningRules(form, special).lines(prompt_end)
    start = [f"start: {'lead ' if thought else ''}body", *thought]
    if not choice.functions:
        return "\n".join([*start, f"body: {_json_rule(choice.answer or _ANY_OBJECT)}"])
    if form.syntax is None:
        raise ValueError(f"no calls in the format {form.tool_calls!r}")
    return "\n".join([*start, *_CallRules(choice, form, form.syntax, special).lines()])


class _MarkRules:
    """Writes markers as grammar terms: a token reference for special tokens, else a string."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special

    def is_token(self, text: str) -> bool:
        return text in self._special

    def __call__(self, text: str) -> str:
        return f"<[{self._special[text]}]>" if text in self._special else _quoted(text)

    def until(self, name: str, text: str) -> list[str]:
        """Return the rules named `name` for any text up to and including the marker `text`."""
        if self.is_token(text):
            return [f"{name}: ANY_{name.upper()}? {self(text)}", f"ANY_{name.upper()}: /(?s:.+)/"]
        return [f"{name}[lazy]: /(?s:.*){_pattern(text)}/"]


class _ReasoningRules:
    """Grammar rules of the reasoning block."""

    def __init__(self, form: ReplyFormat, special: Mapping[str, int]) -> None:
        self._form = form
        self._mark = _MarkRules(special)

    def lines(self, prompt_end: str) -> list[str]:
        syntax = self._form.reasoning
        if syntax is None or prompt_end.rstrip().endswith(syntax.closing):
            return []
        inside = self._form.starts_in_reasoning(prompt_end)
        lead = "thought BLANK?" if inside else f"({self._mark(syntax.opening)} thought BLANK?)?"
        return [f"lead: {lead}", *self._mark.until("thought", syntax.closing), r"BLANK: /[ \t\r\n]+/"]


class _CallRules:
    """Grammar rules of calls and of the text around them."""

    def __init__(
        self, choice: ToolChoice, form: ReplyFormat, syntax: ToolCallSyntax, special: Mapping[str, int]
    ) -> None:
        self._choice = choice
        self._form = form
        self._syntax = syntax
        self._mark = _MarkRules(special)

    def lines(self) -> list[str]:
        return [
            *self._body(),
            f"opened: {self._opened()}",
            f"more: {self._mark(self._syntax.marker)} opened",
            *self._objects(),
        ]

    def _body(self) -> list[str]:
        marker, bare = self._syntax.marker, self._syntax.allows_bare_object
        calls = f"{self._mark(marker)} opened"
        if bare:
            calls = f"opened | {calls}" if self._mark.is_token(marker) else "opened"
        if self._choice.required:
            return [f"body: {calls}"]
        if self._choice.answer and bare:
            return [f"body: {self._either()}"]
        if self._choice.answer:
            return [f"body: {calls} | answer", f"answer: {_json_rule(self._choice.answer)}"]
        if bare:
            plain = r"/(?s:[ \t\r\n]*[^{ \t\r\n].*)/"
            without = "" if self._mark.is_token(marker) else f" & ~/(?s:.*){_pattern(marker)}(?s:.*)/"
            return [f"body: PLAIN? | {calls}", f"PLAIN: {plain}{without}"]
        if self._mark.is_token(marker):
            return ["body: (ANY? | ANY? " + calls + ")", "ANY: /(?s:.+)/"]
        text = f"/(?s:.+)/ & ~/(?s:.*){_pattern(marker)}(?s:.*)/"
        return ["body: TEXT? | head opened", f"TEXT: {text}", *self._mark.until("head", marker)]

    def _either(self) -> str:
        """Return a rule for one call without a marker, or the answer.

        Both are JSON objects and start with a brace, so they are alternatives of one schema.
        """
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": callee.name}, "parameters": json.loads(callee.schema or _ANY_OBJECT)},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for callee in self._choice.functions
        ]
        return _json_rule(json.dumps({"anyOf": [*calls, json.loads(self._choice.answer)]}))

    def _opened(self) -> str:
        """Return the grammar expression for the first call, after its opening marker, and any further calls."""
        syntax, many = self._syntax, self._choice.parallel
        if syntax.allows_bare_object:
            return 'object ("; " object)*' if many else "object"
        if syntax.allows_list and self._form.named_calls:
            return "named more?" if many else "named"
        if syntax.allows_list:
            return '"[" object (", " object)* "]"' if many else '"[" object "]"'
        closing = self._mark(next(iter(syntax.separators)))
        return f'"\\n" object "\\n" {closing}' + (' ("\\n" more)?' if many else "")

    def _objects(self) -> Sequence[str]:
        key = "parameters" if self._syntax.allows_bare_object else "arguments"
        callees = range(len(self._choice.functions))
        rules = [f"object: {' | '.join(f'object{k}' for k in callees)}"]
        if self._syntax.name_separator:
            rules.append(f"named: {' | '.join(f'named{k}' for k in callees)}")
        for k, callee in enumerate(self._choice.functions):
            opening = f'{{"name": {json.dumps(callee.name)}, "{key}": '
            rules.append(f'object{k}: {_quoted(opening)} arguments{k} "}}"')
            rules.append(f"arguments{k}: {_json_rule(callee.schema or _ANY_OBJECT)}")
            if self._syntax.name_separator:
                rules.append(f"named{k}: {_quoted(callee.name)} {self._mark(self._syntax.name_separator)} arguments{k}")
        return rules


def _json_rule(schema: str) -> str:
    return "%json " + json.dumps({"x-guidance": _SINGLE_SPACE, **json.loads(schema)}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
