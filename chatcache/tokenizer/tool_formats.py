"""Syntax of tool calls, as data: delimiters around the name and the arguments of a call.

    section_open  call_open NAME name_end ARGUMENTS call_close  separator  call_open ... call_close  section_close
                  call_open {"name": NAME, "arguments": ARGUMENTS} call_close                        if `is_object`

Arguments are written in one of three notations:

    JSON       {"city": "Oslo", "days": 3}                                          Qwen3, Llama 3, Mistral, DeepSeek
    tagged     <parameter=city>Oslo</parameter><parameter=days>3</parameter>        Qwen3-Coder, Qwen3.5, GLM
    literals   city="Oslo", days=3                                                  Llama 4, LFM2, Gemma 4

`template_probes` derives the syntax of a model from its chat template. The named instances are for templates that do
not render calls, and for `--tool-call-parser`. White space around delimiters is optional in what a model writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WHITESPACE = " \t\r\n"

Functions = Mapping[str, Mapping[str, Any]]
"""Callable functions: name -> JSON schema of the arguments."""


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """The arguments are one JSON object."""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Each argument is written as `opening` KEY `middle` VALUE `closing`; `separator` is between two of them.

    Strings are written as they are, other values as JSON; the schema of the function distinguishes them, or
    `json_middle`, which replaces `middle` before values that are not strings.
    """

    opening: str
    middle: str
    closing: str
    separator: str = ""
    json_middle: str = ""


@dataclass(frozen=True, slots=True)
class LiteralArguments:
    """Arguments as KEY `assign` VALUE, values as literals; strings are between two `quote`s.

    `key_quote`: around the keys of objects within a value. `colon` and `comma`: within a value.
    """

    assign: str = "="
    separator: str = ", "
    quote: str = '"'
    key_quote: str = '"'
    colon: str = ": "
    comma: str = ", "

    @property
    def has_escapes(self) -> bool:
        """True if strings have backslash escapes; a quote of several characters needs none."""
        return len(self.quote) == 1


JSON = JsonArguments()


@dataclass(frozen=True, slots=True)
class ToolCallSyntax:
    """How a model writes tool calls.

    `is_object`: a call is a JSON object with the keys `name_key` and `arguments_key`; `name_end`, if set, allows the
    other form, too. `name_gap`: what the model writes between the two in such an object. `allows_bare`: an object (or
    list) at the start of a reply is a call if it names one of the functions. `id_open`: text before the call id, which
    is then between the name and `name_end`. `id_chars`: required length of call ids (0: any).
    """

    call_open: str = ""
    call_close: str = ""
    section_open: str = ""
    section_close: str = ""
    separator: str = ""
    is_object: bool = True
    name_end: str = ""
    arguments: JsonArguments | TaggedArguments | LiteralArguments = JSON
    object_head: str = '{"name": '
    object_middle: str = ', "arguments": '
    object_tail: str = "}"
    allows_bare: bool = False
    id_open: str = ""
    id_chars: int = 0

    @property
    def is_list(self) -> bool:
        """True if the calls are the entries of a list in brackets."""
        return self.section_open.rstrip().endswith("[")

    @property
    def section_lexemes(self) -> tuple[str, ...]:
        """The words of `section_open`, without the bracket of a list."""
        opening = self.section_open.rstrip()
        return tuple((opening[:-1] if self.is_list else opening).split())

    @property
    def call_lexemes(self) -> tuple[str, ...]:
        """The words of `call_open`."""
        return tuple(self.call_open.split())

    @property
    def marker(self) -> str:
        """The word that starts the calls of a reply; "" if there is none."""
        return (*self.section_lexemes, *self.call_lexemes, "")[0]

    @property
    def delimiters(self) -> tuple[str, ...]:
        """Every text that the model writes around names and values."""
        inner: tuple[str, ...] = ()
        if isinstance(self.arguments, TaggedArguments):
            form = self.arguments
            inner = (form.opening, form.middle, form.json_middle, form.closing, form.separator)
        elif isinstance(self.arguments, LiteralArguments):
            inner = (self.arguments.quote, self.arguments.assign, self.arguments.separator)
        outer = (self.section_open, self.section_close, self.call_open, self.call_close, self.separator)
        return tuple(text for text in (*outer, self.id_open, self.name_end, *inner) if text)


def partial_marker_length(text: str, marker: str) -> int:
    """Return the number of characters at the end of `text` that may be the start of `marker`.

    White space before the marker counts as part of it.
    """
    begun = overlap(text, marker)
    return len(text) - len(text[: len(text) - begun].rstrip(WHITESPACE))


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is the start of `marker`, but not all of it."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


HERMES = ToolCallSyntax(call_open="<tool_call>\n", call_close="\n</tool_call>", separator="\n")
LLAMA3 = ToolCallSyntax(call_open="<|python_tag|>", separator="; ", object_middle=', "parameters": ', allows_bare=True)
MISTRAL = ToolCallSyntax(section_open="[TOOL_CALLS][", section_close="]", separator=", ", name_end="[ARGS]", id_chars=9)
PHI4 = ToolCallSyntax(section_open="<|tool_call|>[", section_close="]<|/tool_call|>", separator=", ")
NEMOTRON = ToolCallSyntax(section_open="<TOOLCALL>[", section_close="]</TOOLCALL>", separator=", ")
PYTHONIC = ToolCallSyntax(
    section_open="[",
    section_close="]",
    call_close=")",
    separator=", ",
    is_object=False,
    name_end="(",
    arguments=LiteralArguments(),
    allows_bare=True,
)
LFM2 = ToolCallSyntax(
    section_open="<|tool_call_start|>[",
    section_close="]<|tool_call_end|>",
    call_close=")",
    separator=", ",
    is_object=False,
    name_end="(",
    arguments=LiteralArguments(),
)
QWEN3_CODER = ToolCallSyntax(
    call_open="<tool_call>\n<function=",
    call_close="</function>\n</tool_call>",
    separator="\n",
    is_object=False,
    name_end=">\n",
    arguments=TaggedArguments("<parameter=", ">\n", "\n</parameter>\n"),
)
HARMONY = ToolCallSyntax(  # gpt-oss; read by `harmony.HarmonyParser`
    section_open="<|start|>assistant",
    call_open="<|channel|>commentary to=functions.",
    call_close="<|call|>",
    is_object=False,
    name_end=" <|constrain|>json<|message|>",
)
