"""What tells the formats of tool calls apart.

Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as many as it takes.

Llama 3: {"name": ..., "parameters": {...}}, alone or behind <|python_tag|>; several are joined by semicolons.

Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], later [TOOL_CALLS]name[ARGS]{...}, once per call.

Its templates refuse ids of calls that are not nine letters or digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BLANK = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Syntax:
    """`marker` opens a call in text; `bare`: so does a brace at the very start of a reply.

    Behind the marker stands an object with a name and arguments. Behind that may stand one of `joints`, white space
    between them aside: True, another object follows; False, the end. `listed`: objects may stand in a list instead,
    joined by commas. `between`: a name, this and the arguments alone may stand instead of an object ("": not so).
    `id_chars`: how long the ids of calls are to be (0: any).
    """

    marker: str
    bare: bool = False
    joints: Mapping[str, bool] = field(default_factory=dict)
    listed: bool = False
    between: str = ""
    id_chars: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens, and must be seen all the same."""
        return tuple(mark for mark in (self.marker, self.between, *self.joints) if len(mark) > 1)


LIST_JOINTS: Mapping[str, bool] = {",": True, "]": False}


def open_tail(text: str, marker: str) -> int:
    """How many characters at the end of `text` could become the beginning of `marker`, or of white space before it."""
    begun = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    return len(text) - len(text[: len(text) - begun].rstrip(BLANK))


HERMES = Syntax(marker="<tool_call>", joints={"</tool_call>": False})


LLAMA3 = Syntax(marker="<|python_tag|>", bare=True, joints={";": True})


MISTRAL = Syntax(marker="[TOOL_CALLS]", listed=True, between="[ARGS]", id_chars=9)
