"""What a model thinks before it answers: <think>...</think> at the beginning of a reply, from a stream cut anywhere.

White space at the borders is part of neither. Many templates open the block in the generation prompt, so that the
reply begins inside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chatcache.tokenizer.tool_formats import BLANK, open_tail

OPENING, CLOSING = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Thought:
    """What a piece of the stream added."""

    reasoning: str = ""
    text: str = ""


class ReasoningParser:
    """One candidate's. `begins_inside`: the block is open from the start, whether its opening is written or not."""

    def __init__(self, *, begins_inside: bool = False) -> None:
        self._begins_inside = begins_inside
        self._state: Callable[[str, bool], str] = self._at_start
        self._held = ""
        self._trims = True
        self._reasoning: list[str] = []
        self._text: list[str] = []

    @property
    def is_thinking(self) -> bool:
        return self._state == self._inside or (self._begins_inside and self._state == self._at_start)

    @property
    def is_over(self) -> bool:
        """Whether all that comes is text."""
        return self._state == self._behind and not self._trims

    def push(self, text: str) -> Thought:
        """Read on; return what is now certain."""
        return self._run(text, last=False)

    def finish(self) -> Thought:
        """The stream is over: return what was held back."""
        return self._run("", last=True)

    def _run(self, text: str, *, last: bool) -> Thought:
        rest, self._held = self._held + text, ""
        while rest:
            rest = self._state(rest, last)
        thought = Thought("".join(self._reasoning), "".join(self._text))
        self._reasoning.clear()
        self._text.clear()
        return thought

    def _at_start(self, text: str, last: bool) -> str:
        first = text.lstrip(BLANK)
        if first.startswith(OPENING):
            self._state = self._inside
            return first[len(OPENING) :]
        if not last and OPENING.startswith(first):
            return self._hold(text)
        self._state = self._inside if self._begins_inside else self._behind
        self._trims = self._begins_inside
        return text

    def _inside(self, text: str, last: bool) -> str:
        if self._trims:
            text = text.lstrip(BLANK)
            self._trims = not text
        at = text.find(CLOSING)
        if at >= 0:
            self._reasoning.append(text[:at].rstrip(BLANK))
            self._state, self._trims = self._behind, True
            return text[at + len(CLOSING) :]
        end = len(text) if last else len(text) - open_tail(text, CLOSING)
        self._reasoning.append(text[:end])
        return self._hold(text[end:])

    def _behind(self, text: str, last: bool) -> str:
        if self._trims:
            text = text.lstrip(BLANK)
            self._trims = not text
        self._text.append(text)
        return ""

    def _hold(self, text: str) -> str:
        self._held = text
        return ""
