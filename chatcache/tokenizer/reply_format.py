"""Detect how a model writes reasoning and tool calls, and parse its replies accordingly."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from chatcache.tokenizer.reasoning import THINK, ReasoningDelta, ReasoningParser, ReasoningSyntax
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.tokenizer.tool_formats import HERMES, LLAMA3, MISTRAL, ToolCallSyntax
from chatcache.tokenizer.tool_parser import ToolCallDelta, ToolCallParser

AUTO, NONE = "auto", "none"
TOOL_CALLS: Mapping[str, ToolCallSyntax] = {"hermes": HERMES, "llama3_json": LLAMA3, "mistral": MISTRAL}
REASONING: Mapping[str, ReasoningSyntax] = {"qwen3": THINK, "deepseek_r1": replace(THINK, always_open=True)}
_KNOWN_REASONING = (
    THINK,
    ReasoningSyntax("[THINK]", "[/THINK]"),
    ReasoningSyntax("<|channel>thought", "<channel|>"),
    ReasoningSyntax("<seed:think>", "</seed:think>"),
    ReasoningSyntax("Here is my thought process:", "Here is my response:"),
)
_TOOLS = re.compile(r"\btools\b")
_TAIL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """Reasoning and tool-call format of a model.

    `reasoning`: the markers between which the model thinks; None if it does not think.
    `supports_tools`: the chat template renders function definitions. `named_calls`: the model writes the function name
    before the arguments object instead of inside it.
    """

    tool_calls: str = NONE
    reasoning: ReasoningSyntax | None = None
    supports_tools: bool = False
    named_calls: bool = False

    @property
    def syntax(self) -> ToolCallSyntax | None:
        """Syntax of the tool calls; None if the model has none."""
        return TOOL_CALLS.get(self.tool_calls)

    def starts_in_reasoning(self, prompt_end: str) -> bool:
        """Return True if the reply to a prompt that ends with this text starts with reasoning."""
        syntax, end = self.reasoning, prompt_end.rstrip()
        if syntax is None or end.endswith(syntax.closing):
            return False
        return syntax.always_open or end.endswith(syntax.opening)

    def marks(self, *, tools: bool) -> tuple[str, ...]:
        """Return the markers that the parsers need in the text, even if they are special tokens.

        `tools`: include those of tool calls.
        """
        thoughts = (self.reasoning.opening, self.reasoning.closing) if self.reasoning is not None else ()
        return thoughts + (self.syntax.marks if tools and self.syntax is not None else ())


def detect_format(tokenizer: Tokenizer, tool_calls: str = AUTO, reasoning: str = AUTO) -> ReplyFormat:
    """Return the format in which the model writes reasoning and tool calls.

    A format that is "auto" is detected from the chat template and the vocabulary.
    """
    source, tokens = tokenizer.template_source, tokenizer.added_tokens
    thinking = REASONING.get(reasoning) if reasoning != AUTO else _detect_reasoning(source)
    shows_tools = _TOOLS.search(source) is not None
    if tool_calls == AUTO:
        tool_calls = _detect_tool_calls(source, tokens) if shows_tools else NONE
    return ReplyFormat(tool_calls, thinking, shows_tools, "[ARGS]" in source)


def _detect_reasoning(source: str) -> ReasoningSyntax | None:
    return next((syntax for syntax in _KNOWN_REASONING if syntax.closing in source), None)


def _detect_tool_calls(source: str, tokens: Collection[str]) -> str:
    if MISTRAL.marker in source:
        return "mistral"
    if HERMES.marker in source:
        return NONE if "<function=" in source else "hermes"  # same markers around another notation
    if LLAMA3.marker in source or (LLAMA3.marker in tokens and '"parameters"' in source):
        return "llama3_json"
    return "mistral" if MISTRAL.marker in tokens else NONE


@dataclass(frozen=True, slots=True)
class ParsedText:
    """Text, reasoning and calls that a chunk of the stream added."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class ReplyParser:
    """Splits the output of one candidate into text, reasoning and tool calls.

    `prompt_end`: the end of the prompt, which may open the reasoning block. `names`: callable functions (None: calls
    stay text).
    """

    def __init__(self, form: ReplyFormat, prompt_end: str, names: Collection[str] | None) -> None:
        inside = form.starts_in_reasoning(prompt_end)
        syntax = form.reasoning
        self._thoughts = ReasoningParser(syntax, begins_inside=inside) if syntax is not None else None
        self._calls = ToolCallParser(form.syntax, names) if form.syntax is not None and names is not None else None

    @property
    def is_thinking(self) -> bool:
        """True while the candidate is inside its reasoning block."""
        return self._thoughts is not None and self._thoughts.is_thinking

    @property
    def reasoning_finished(self) -> bool:
        """True if no more reasoning can follow."""
        return self._thoughts is None

    def push(self, text: str) -> ParsedText:
        """Parse a chunk; return the parts that are now final."""
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

    def finish(self) -> ParsedText:
        """End the stream; return the text that was held back."""
        thought = self._thoughts.finish() if self._thoughts is not None else ReasoningDelta()
        if self._calls is None:
            return ParsedText(thought.text, thought.reasoning)
        last, rest = self._calls.push(thought.text), self._calls.finish()
        return ParsedText(last.text + rest.text, thought.reasoning, last.calls + rest.calls)


def decode_prompt_end(tokenizer: Tokenizer, prompt: Collection[int]) -> str:
    """Decode the end of a prompt, special tokens included."""
    return tokenizer.decode(tuple(prompt)[-_TAIL_TOKENS:], skip_special_tokens=False)
