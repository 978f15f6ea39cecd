"""How a model writes what is not plain answer: what it thinks, and the functions it calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from chatcache.tokenizer.reasoning import CLOSING, OPENING, ReasoningParser, Thought
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.tokenizer.tool_formats import HERMES, LLAMA3, MISTRAL, Syntax
from chatcache.tokenizer.tool_parser import CallParser, CallPart

AUTO, NONE = "auto", "none"
TOOL_CALLS: Mapping[str, Syntax] = {"hermes": HERMES, "llama3_json": LLAMA3, "mistral": MISTRAL}
REASONING = ("qwen3", "deepseek_r1")
_TOOLS = re.compile(r"\btools\b")
_TAIL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """Names as vLLM's parsers have them. `shows_tools`: the chat template has a place for function definitions.

    `named_calls`: of the forms of a call that the syntax knows, the model writes the one with its name outside.
    """

    tool_calls: str = NONE
    reasoning: str = NONE
    shows_tools: bool = False
    named_calls: bool = False

    @property
    def syntax(self) -> Syntax | None:
        return TOOL_CALLS.get(self.tool_calls)

    def begins_inside(self, prompt_end: str) -> bool:
        """Whether a reply to a prompt that ends so begins inside its reasoning."""
        end = prompt_end.rstrip()
        if self.reasoning == NONE or end.endswith(CLOSING):
            return False
        return self.reasoning == "deepseek_r1" or end.endswith(OPENING)

    def marks(self, *, tools: bool) -> tuple[str, ...]:
        """Texts that the parsers must see even where they are special tokens."""
        thoughts = (OPENING, CLOSING) if self.reasoning != NONE else ()
        return thoughts + (self.syntax.marks if tools and self.syntax is not None else ())


def format_of(tokenizer: Tokenizer, tool_calls: str = AUTO, reasoning: str = AUTO) -> ReplyFormat:
    """What is asked for, or what the chat template and the vocabulary tell where that is "auto"."""
    source, tokens = tokenizer.template_source, tokenizer.added_tokens
    if reasoning == AUTO:
        reasoning = "qwen3" if CLOSING in source else NONE
    shows_tools = _TOOLS.search(source) is not None
    if tool_calls == AUTO:
        tool_calls = _detected(source, tokens) if shows_tools else NONE
    return ReplyFormat(tool_calls, reasoning, shows_tools, "[ARGS]" in source)


def _detected(source: str, tokens: Collection[str]) -> str:
    if MISTRAL.marker in source:
        return "mistral"
    if HERMES.marker in source:
        return NONE if "<function=" in source else "hermes"  # the same marks with something else between them
    if LLAMA3.marker in source or (LLAMA3.marker in tokens and '"parameters"' in source):
        return "llama3_json"
    return "mistral" if MISTRAL.marker in tokens else NONE


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What a piece of the stream added."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()


class ReplyParser:
    """One candidate's text, reasoning and calls. `names`: the functions it may call (None: calls are text)."""

    def __init__(self, form: ReplyFormat, prompt_end: str, names: Collection[str] | None) -> None:
        inside = form.begins_inside(prompt_end)
        self._thoughts = ReasoningParser(begins_inside=inside) if form.reasoning != NONE else None
        self._calls = CallParser(form.syntax, names) if form.syntax is not None and names is not None else None

    @property
    def is_thinking(self) -> bool:
        return self._thoughts is not None and self._thoughts.is_thinking

    @property
    def is_past_thought(self) -> bool:
        return self._thoughts is None

    def push(self, text: str) -> ParsedText:
        """Read on; return what is now certain."""
        reasoning = ""
        if self._thoughts is not None:
            thought = self._thoughts.push(text)
            text, reasoning = thought.text, thought.reasoning
            if self._thoughts.is_over:
                self._thoughts = None
        if self._calls is None:
            return ParsedText(text, reasoning)
        parsed = self._calls.push(text)
        return ParsedText(parsed.text, reasoning, parsed.calls)

    def finish(self) -> ParsedText:
        """The stream is over: return what was held back."""
        thought = self._thoughts.finish() if self._thoughts is not None else Thought()
        if self._calls is None:
            return ParsedText(thought.text, thought.reasoning)
        last, rest = self._calls.push(thought.text), self._calls.finish()
        return ParsedText(last.text + rest.text, thought.reasoning, last.calls + rest.calls)


def prompt_end(tokenizer: Tokenizer, prompt: Collection[int]) -> str:
    """The text at the end of a prompt, control tokens included."""
    return tokenizer.decode(tuple(prompt)[-_TAIL_TOKENS:], skip_special_tokens=False)
