"""What tells the formats of tool calls apart."""

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
