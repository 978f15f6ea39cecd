"""Syntax of tool calls by model family.

Hermes, Qwen   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated for each call
Llama 3        {"name": ..., "parameters": {...}}, alone or after <|python_tag|>; calls are separated by semicolons
Mistral        [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], in newer models [TOOL_CALLS]name[ARGS]{...} per
call;
               its templates accept only call ids of nine letters or digits
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WHITESPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ToolCallSyntax:
    """How a model family writes tool calls.

    `marker` starts a call; with `allows_bare_object` a brace at the start of a reply does, too. An object with name and
    arguments follows. `separators`: texts that may follow the object, and whether another object follows them (True) or
    the call ends (False). `allows_list`: the marker may be followed by a JSON list of objects. `name_separator`: if
    set, a call may be written as name, separator, arguments. `id_chars`: required length of call ids (0: any).
    """

    marker: str
    allows_bare_object: bool = False
    separators: Mapping[str, bool] = field(default_factory=dict)
    allows_list: bool = False
    name_separator: str = ""
    id_chars: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        """Markers that may be special tokens but must reach the parser."""
        return tuple(mark for mark in (self.marker, self.name_separator, *self.separators) if len(mark) > 1)


LIST_SEPARATORS: Mapping[str, bool] = {",": True, "]": False}


def partial_marker_length(text: str, marker: str) -> int:
    """Return the number of characters at the end of `text` that may be the start of `marker`.

    White space before the marker counts as part of it.
    """
    begun = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    return len(text) - len(text[: len(text) - begun].rstrip(WHITESPACE))


HERMES = ToolCallSyntax(marker="<tool_call>", separators={"</tool_call>": False})


LLAMA3 = ToolCallSyntax(marker="<|python_tag|>", allows_bare_object=True, separators={";": True})


MISTRAL = ToolCallSyntax(marker="[TOOL_CALLS]", allows_list=True, name_separator="[ARGS]", id_chars=9)
