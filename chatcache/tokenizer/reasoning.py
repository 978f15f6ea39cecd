"""Streaming parser for reasoning: a block between two markers, such as <think>...</think>, at the start of a reply.

The stream may be split at any character. White space around the markers belongs to neither part, and neither does a
part of the closing marker at the end of the stream. Many chat templates write the opening marker in the generation
prompt, so that the reply starts inside the block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chatcache.tokenizer.tool_formats import WHITESPACE, overlap, partial_marker_length


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """Markers around the reasoning of a model, without the white space around them.

    A reply that has written `opening` (or whose prompt ends with it) is thinking until it writes `closing`; writing
    `closing` ends the thought. `always_open`: every reply begins inside the reasoning, although no prompt shows it.
    """

    opening: str = "<think>"
    closing: str = "</think>"
    always_open: bool = False


THINK = ReasoningSyntax()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Reasoning and text that a chunk of the stream added."""

    reasoning: str = ""
    text: str = ""


class ReasoningParser:
    """Separates the reasoning block of one candidate from its text while it is generated.

    `begins_inside`: the block is open from the start, and an opening marker is optional.
    """

    def __init__(self, syntax: ReasoningSyntax = THINK, *, begins_inside: bool = False) -> None:
        self._opening, self._closing = syntax.opening, syntax.closing
        self._begins_inside = begins_inside
        self._state: Callable[[str, bool], str] = self._at_start
        self._held = ""
        self._trims = True
        self._reasoning: list[str] = []
        self._text: list[str] = []

    @property
    def is_thinking(self) -> bool:
        """True while the parser is inside the reasoning block."""
        return self._state == self._inside or (self._begins_inside and self._state == self._at_start)

    @property
    def is_finished(self) -> bool:
        """True if all further input is text."""
        return self._state == self._after and not self._trims

    def push(self, text: str) -> ReasoningDelta:
        """Parse a chunk; return the parts that are now final."""
        return self._run(text, last=False)

    def finish(self) -> ReasoningDelta:
        """End the stream; return the text that was held back."""
        return self._run("", last=True)

    def _run(self, text: str, *, last: bool) -> ReasoningDelta:
        rest, self._held = self._held + text, ""
        while rest:
            rest = self._state(rest, last)
        thought = ReasoningDelta("".join(self._reasoning), "".join(self._text))
        self._reasoning.clear()
        self._text.clear()
        return thought

    def _at_start(self, text: str, last: bool) -> str:
        first = text.lstrip(WHITESPACE)
        if first.startswith(self._opening):
            self._state = self._inside
            return first[len(self._opening) :]
        if not last and self._opening.startswith(first):
            return self._hold(text)
        self._state = self._inside if self._begins_inside else self._after
        self._trims = self._begins_inside
        return text

    def _inside(self, text: str, last: bool) -> str:
        if self._trims:
            text = text.lstrip(WHITESPACE)
            self._trims = not text
        at = text.find(self._closing)
        if at >= 0:
            self._reasoning.append(text[:at].rstrip(WHITESPACE))
            self._state, self._trims = self._after, True
            return text[at + len(self._closing) :]
        is_whole = last and not overlap(text, self._closing)
        end = len(text) if is_whole else len(text) - partial_marker_length(text, self._closing)
        self._reasoning.append(text[:end])
        return self._hold(text[end:])

    def _after(self, text: str, last: bool) -> str:
        if self._trims:
            text = text.lstrip(WHITESPACE)
            self._trims = not text
        self._text.append(text)
        return ""

    def _hold(self, text: str) -> str:
        self._held = text
        return ""
