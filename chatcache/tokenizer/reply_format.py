"""Detect how a model writes reasoning and tool calls, and parse its replies accordingly."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chatcache.errors import InvalidRequestError
from chatcache.tokenizer.harmony import HARMONY_REASONING, HarmonyParser
from chatcache.tokenizer.reasoning import THINK, ReasoningDelta, ReasoningParser, ReasoningSyntax
from chatcache.tokenizer.template_probes import PROBE_NAME, PROBE_TOOLS, derive_reasoning, derive_tool_calls
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.tokenizer.tool_formats import (
    HARMONY,
    HERMES,
    LFM2,
    LLAMA3,
    MISTRAL,
    NEMOTRON,
    PHI4,
    PYTHONIC,
    QWEN3_CODER,
    Functions,
    ToolCallSyntax,
)
from chatcache.tokenizer.tool_parser import ParsedText, ToolCallParser

AUTO, NONE = "auto", "none"
TOOL_CALLS: Mapping[str, ToolCallSyntax] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3_json": LLAMA3,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
}
REASONING: Mapping[str, ReasoningSyntax] = {"qwen3": THINK, "deepseek_r1": replace(THINK, always_open=True)}
_KNOWN_REASONING = (
    THINK,
    ReasoningSyntax("[THINK]", "[/THINK]"),
    ReasoningSyntax("<|channel>thought", "<channel|>"),
    ReasoningSyntax("Here is my thought process:", "Here is my response:"),
)
_TOOLS = re.compile(r"\btools\b")
_MARK = re.compile(r"(?=(<[^<>\s]+>|\[/?[A-Z_]+\]|｜[^｜<>\s]+｜))")
_TAIL_TOKENS = 16
MAX_PROBE_S = 5.0  # after which no more renderings are made to derive a format; together they take about 0.05 s
MAX_PROBE_CHARS = 50_000  # of one rendering


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """Reasoning and tool-call format of a model.

    `syntax`: how it writes tool calls; None if that is not known. `reasoning`: the markers between which the model
    thinks; None if it does not think. `supports_tools`: the chat template renders function definitions.
    """

    syntax: ToolCallSyntax | None = None
    reasoning: ReasoningSyntax | None = None
    supports_tools: bool = False

    def starts_in_reasoning(self, prompt_end: str) -> bool:
        """Return True if the reply to a prompt that ends with this text starts with reasoning."""
        syntax, end = self.reasoning, prompt_end.rstrip()
        if syntax is None or end.endswith(syntax.closing):
            return False
        return syntax.always_open or end.endswith(syntax.opening)

    @property
    def is_harmony(self) -> bool:
        """True if every part of a reply is written in a channel."""
        return self.syntax == HARMONY

    def marks(self, *, tools: bool) -> tuple[str, ...]:
        """Return the markers that the parsers need in the text, even if they are special tokens.

        `tools`: include those of tool calls.
        """
        texts: list[str] = []
        if self.reasoning is not None:
            texts += [self.reasoning.opening, self.reasoning.closing]
        if (tools or self.is_harmony) and self.syntax is not None:
            texts += [self.syntax.marker, *self.syntax.delimiters]
        found = [text for text in texts if len(text.strip()) > 1]
        return tuple(dict.fromkeys([*found, *(mark for text in texts for mark in _MARK.findall(text))]))


def detect_format(tokenizer: Tokenizer, tool_calls: str = AUTO, reasoning: str = AUTO) -> ReplyFormat:
    """Return the format in which the model writes reasoning and tool calls.

    A format that is "auto" is derived from what the chat template renders, else detected from its source and the
    vocabulary. A format that is named replaces a derived one that starts with another marker.
    """
    source, deadline = tokenizer.template_source, time.monotonic() + MAX_PROBE_S
    is_harmony = "<|channel|>" in source and "<|message|>" in source

    def render(messages: Sequence[Mapping[str, Any]], **variables: Any) -> str | None:
        if time.monotonic() > deadline:
            return None
        try:
            text = tokenizer.render(messages, add_generation_prompt=False, **variables)
        except InvalidRequestError:
            return None
        return text if len(text) <= MAX_PROBE_CHARS else None

    if reasoning != AUTO:
        thinking = REASONING.get(reasoning)
    elif is_harmony:
        thinking = HARMONY_REASONING
    else:
        thinking = derive_reasoning(render, tokenizer.eos_texts) or _detect_reasoning(source)
    prompt = render([{"role": "user", "content": "Hi"}], tools=list(PROBE_TOOLS))
    shows_tools = PROBE_NAME in prompt if prompt is not None else _TOOLS.search(source) is not None
    syntax = TOOL_CALLS.get(tool_calls)
    if is_harmony and tool_calls in (AUTO, NONE):
        syntax = HARMONY  # its channels are needed for replies without calls, too
    elif shows_tools and tool_calls != NONE:
        derived = derive_tool_calls(render, tokenizer.eos_texts)
        if syntax is None or (derived is not None and derived.marker == syntax.marker):
            syntax = derived
        if tool_calls == AUTO:
            syntax = _with_known(syntax, source, tokenizer.added_tokens)
    return ReplyFormat(syntax, thinking, shows_tools)


def _detect_reasoning(source: str) -> ReasoningSyntax | None:
    return next((syntax for syntax in _KNOWN_REASONING if syntax.closing in source), None)


def _with_known(derived: ToolCallSyntax | None, source: str, tokens: Collection[str]) -> ToolCallSyntax | None:
    """Complete a derived syntax, or return a known one whose markers the template or the vocabulary has."""
    if derived is not None:
        if derived.allows_bare and not derived.is_list and (LLAMA3.marker in source or LLAMA3.marker in tokens):
            return replace(derived, call_open=LLAMA3.call_open)
        if derived.marker == MISTRAL.marker:  # some of its templates check the ids only in other messages
            return replace(derived, id_chars=MISTRAL.id_chars)
        return derived
    if QWEN3_CODER.marker in source and "<function=" in source:
        return QWEN3_CODER
    for syntax in (HERMES, LFM2, PHI4, NEMOTRON, MISTRAL):
        if syntax.marker in source:
            return syntax
    if LLAMA3.marker in source or (LLAMA3.marker in tokens and '"parameters"' in source):
        return LLAMA3
    return next((syntax for syntax in (MISTRAL, LFM2, PHI4) if syntax.marker in tokens), None)


class ReplyParser:
    """Splits the output of one candidate into text, reasoning and tool calls.

    `prompt_end`: the end of the prompt, which may open the reasoning block. `functions`: callable functions
    (None: calls stay text).
    """

    def __init__(self, form: ReplyFormat, prompt_end: str, functions: Functions | None) -> None:
        self._channels = HarmonyParser(functions, prompt_end) if form.is_harmony else None
        inside = form.starts_in_reasoning(prompt_end)
        syntax = form.reasoning if self._channels is None else None
        self._thoughts = ReasoningParser(syntax, begins_inside=inside) if syntax is not None else None
        self._calls: ToolCallParser | None = None
        if form.syntax is not None and functions is not None:
            self._calls = ToolCallParser(form.syntax, functions)

    @property
    def is_thinking(self) -> bool:
        """True while the candidate is inside its reasoning block."""
        if self._channels is not None:
            return self._channels.is_thinking
        return self._thoughts is not None and self._thoughts.is_thinking

    @property
    def reasoning_finished(self) -> bool:
        """True if no more reasoning can follow."""
        return self._thoughts is None and self._channels is None

    @property
    def has_open_call(self) -> bool:
        """True while the arguments of a call are not complete."""
        calls = self._channels if self._channels is not None else self._calls
        return calls is not None and calls.has_open_call

    def push(self, text: str) -> ParsedText:
        """Parse a chunk; return the parts that are now final."""
        if self._channels is not None:
            return self._channels.push(text)
        reasoning = ""
        if self._thoughts is not None:
            thought = self._thoughts.push(text)
            text, reasoning = thought.text, thought.reasoning
            if self._thoughts.is_finished:
                self._thoughts = None
        if self._calls is None:
            return ParsedText(text, reasoning)
        parsed = self._calls.push(text)
        return ParsedText(parsed.text, reasoning, parsed.calls)

    def finish(self, end: str = "") -> ParsedText:
        """End the stream; return the text that was held back. `end`: the token that ended it, if one did."""
        if self._channels is not None:
            return self._channels.finish(end)
        thought = self._thoughts.finish() if self._thoughts is not None else ReasoningDelta()
        if self._calls is None:
            return ParsedText(thought.text, thought.reasoning)
        last, rest = self._calls.push(thought.text), self._calls.finish()
        return ParsedText(last.text + rest.text, thought.reasoning, last.calls + rest.calls)


def decode_prompt_end(tokenizer: Tokenizer, prompt: Collection[int]) -> str:
    """Decode the end of a prompt, special tokens included."""
    return tokenizer.decode(tuple(prompt)[-_TAIL_TOKENS:], skip_special_tokens=False)
