"""Grammar that constrains a reply to valid tool calls, in llguidance's Lark notation.

    start: lead? body            body: calls                  if a call is required
                                       calls | answer         if the answer has a JSON schema
                                       text calls | text      otherwise

Text ends where the marker of a call begins. If the marker is a special token, text cannot contain it; any other marker
is matched by a lazy lexeme, which ends at the first match. Arguments that are not JSON: `argument_grammar`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from chatcache.tokenizer.argument_grammar import LiteralRules, MarkRules, TaggedRules, json_rule, pattern, quoted
from chatcache.tokenizer.harmony import HARMONY_REASONING
from chatcache.tokenizer.reply_format import ReplyFormat
from chatcache.tokenizer.template_probes import ID_SLOT
from chatcache.tokenizer.tool_formats import WHITESPACE, LiteralArguments, TaggedArguments, ToolCallSyntax
from chatcache.types.json_schema import is_relaxed_schema, relax_schema, simplify_schema

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
    functions = tuple(replace(callee, schema=_simplified(callee.schema)) for callee in choice.functions)
    choice = replace(choice, functions=functions, answer=_simplified(choice.answer))
    if form.is_harmony:
        return "\n".join(_harmony_rules(choice, form, MarkRules(special), prompt_end))
    thought = _reasoning_rules(form, MarkRules(special), prompt_end)
    start = [f"start: {'lead ' if thought else ''}body", *thought]
    if not choice.functions:
        return "\n".join([*start, f"body: {json_rule(choice.answer or _ANY_OBJECT)}"])
    if form.syntax is None:
        raise ValueError("the format has no calls")
    return "\n".join([*start, *_CallRules(choice, form.syntax, MarkRules(special)).lines()])


def _simplified(schema: str) -> str:
    if not schema:
        return ""
    parsed = json.loads(schema)
    simplify_schema(parsed)
    return json.dumps(parsed, ensure_ascii=False)


def _reasoning_rules(form: ReplyFormat, mark: MarkRules, prompt_end: str) -> list[str]:
    """Return the grammar rules of the reasoning block."""
    syntax = form.reasoning
    if syntax is None or prompt_end.rstrip().endswith(syntax.closing):
        return []
    inside = form.starts_in_reasoning(prompt_end)
    # some templates write a newline before the marker (GLM-4.6)
    lead = "thought BLANK?" if inside else f"(BLANK? {mark(syntax.opening)} thought BLANK?)?"
    return [f"lead: {lead}", *mark.until("thought", syntax.closing), r"BLANK: /[ \t\r\n]+/"]


def _harmony_rules(choice: ToolChoice, form: ReplyFormat, mark: MarkRules, prompt_end: str) -> list[str]:
    """Return the grammar of a reply in channels: reasoning, a preamble, and one call or the final text."""
    next_message = mark("<|end|><|start|>assistant")
    thought = f"TEXT {next_message}"
    lead = f"({mark(HARMONY_REASONING.opening)} {thought})*"
    if form.starts_in_reasoning(prompt_end):
        lead = f"{thought} {lead}"
    callees = range(len(choice.functions))
    bodies = [f"call{k}" for k in callees]
    final = mark("<|channel|>final<|message|>")
    if choice.answer or not choice.functions:
        final = f"{final} answer"
    else:
        final = f"{final} TEXT?"
    if not choice.required or not choice.functions:
        bodies.append(final)
    preamble = f"({mark('<|channel|>commentary<|message|>')} {thought})?" if choice.functions else ""
    rules = [f"start: {lead} {preamble} ({' | '.join(bodies)})", "TEXT: /(?s:.+)/"]
    if choice.answer or not choice.functions:
        rules.append(f"answer: {json_rule(choice.answer or _ANY_OBJECT)}")
    for k, callee in enumerate(choice.functions):
        rest = f'{mark("<|constrain|>")}? "json" {mark("<|message|>")} arguments{k}'
        channel = mark("<|channel|>")
        rules += [
            f"call{k}: {channel} {quoted(f'commentary to=functions.{callee.name} ')} {rest}"
            f' | {quoted(f" to=functions.{callee.name}")} {channel} "commentary " {rest}',
            f"arguments{k}: {json_rule(callee.schema or _ANY_OBJECT)}",
        ]
    return rules


class _CallRules:
    """Grammar rules of calls and of the text around them."""

    def __init__(self, choice: ToolChoice, syntax: ToolCallSyntax, mark: MarkRules) -> None:
        self._choice = choice
        self._syntax = syntax
        self._mark = mark
        whole = syntax.section_open + syntax.call_open
        opening = whole.lstrip(WHITESPACE)
        self._blank = whole[: len(whole) - len(opening)]
        self._marker = syntax.marker
        self._rest = opening[len(self._marker) :] if opening.startswith(self._marker) else opening

    def lines(self) -> list[str]:
        return [*self._body(), f"opened: {self._opened()}", *self._callees()]

    def _body(self) -> list[str]:
        marker, bare = self._marker, self._syntax.allows_bare
        calls = f"{self._mark(marker)} opened" if marker else "opened"
        if bare:
            calls = f"opened | {calls}" if self._mark.is_token(marker) else "opened"
        if self._choice.required:
            return [f"body: ({quoted(self._blank)})? {calls}" if self._blank else f"body: {calls}"]
        if self._choice.answer and bare and self._syntax.is_object:
            return [f"body: {self._either()}"]
        if self._choice.answer:
            return [f"body: {calls} | answer", f"answer: {json_rule(self._choice.answer)}"]
        if bare:
            plain = r"/(?s:[ \t\r\n]*[^BRACKET \t\r\n].*)/".replace("BRACKET", r"\[" if self._syntax.is_list else "{")
            without = f" & ~/(?s:.*){pattern(marker)}(?s:.*)/" if marker and not self._mark.is_token(marker) else ""
            return [f"body: PLAIN? | {calls}", f"PLAIN: {plain}{without}"]
        if self._mark.is_token(marker):
            return ["body: (ANY? | ANY? " + calls + ")", "ANY: /(?s:.+)/"]
        text = f"/(?s:.+)/ & ~/(?s:.*){pattern(marker)}(?s:.*)/"
        return ["body: TEXT? | head opened", f"TEXT: {text}", *self._mark.until("head", marker)]

    def _either(self) -> str:
        """Return a rule for one call without a marker, or the answer.

        Both are JSON objects and start with a brace, so they are alternatives of one schema.
        """
        key = json.loads(self._syntax.object_middle.strip(", :"))
        arguments = [json.loads(callee.schema or _ANY_OBJECT) for callee in self._choice.functions]
        answer = json.loads(self._choice.answer)
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": callee.name}, key: schema},
                "required": ["name", key],
                "additionalProperties": False,
            }
            for callee, schema in zip(self._choice.functions, arguments, strict=True)
        ]
        either: dict[str, object] = {"anyOf": [*calls, answer]}
        if any(map(is_relaxed_schema, (*arguments, answer))):
            either = relax_schema(either)
        return json_rule(json.dumps(either))

    def _opened(self) -> str:
        """Return the grammar expression for the calls, after the marker of the first one."""
        syntax, mark = self._syntax, self._mark
        opening = "" if syntax.allows_bare and not syntax.is_list else self._rest
        close, end = mark(syntax.call_close), mark(syntax.section_close)
        more = ""
        if self._choice.parallel:
            call_open = "" if syntax.allows_bare else syntax.call_open
            more = f"({mark(syntax.separator + call_open)} callee {close})*"
        return f"{mark(opening)} callee {close} {more} {end}"

    def _callees(self) -> Sequence[str]:
        syntax, mark = self._syntax, self._mark
        rules = [f"callee: {' | '.join(f'callee{k}' for k in range(len(self._choice.functions)))}"]
        rules.append("CALL_ID: /[A-Za-z0-9]{9}/")
        tagged = TaggedRules(syntax.arguments, mark) if isinstance(syntax.arguments, TaggedArguments) else None
        literal = LiteralRules(syntax.arguments, mark) if isinstance(syntax.arguments, LiteralArguments) else None
        for k, callee in enumerate(self._choice.functions):
            schema = callee.schema or _ANY_OBJECT
            if syntax.is_object:
                head = f"{syntax.object_head}{json.dumps(callee.name)}{syntax.object_middle}"
                rules.append(f"callee{k}: {self._with_id(head)} arguments{k} {self._with_id(syntax.object_tail)}")
            else:
                call_id = f"{mark(syntax.id_open)} CALL_ID" if syntax.id_open else ""
                rules.append(f"callee{k}: {quoted(callee.name)} {call_id} {mark(syntax.name_end)} arguments{k}")
            if tagged is not None:
                rules += tagged.lines(f"arguments{k}", json.loads(schema))
            elif literal is not None:
                rules += literal.lines(f"arguments{k}", json.loads(schema))
            else:
                rules.append(f"arguments{k}: {json_rule(schema)}")
        return rules

    def _with_id(self, text: str) -> str:
        return " CALL_ID ".join(self._mark(part) for part in text.split(ID_SLOT))
