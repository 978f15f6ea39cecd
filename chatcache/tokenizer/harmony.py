"""Streaming parser for gpt-oss's harmony format, in which a reply is a sequence of messages in channels.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>

The recipient (`to=`) may also precede the channel. The prompt ends with `<|start|>assistant`, or within a message.
"""

from __future__ import annotations

import re

from chatcache.tokenizer.reasoning import ReasoningSyntax
from chatcache.tokenizer.tool_formats import WHITESPACE, Functions, overlap
from chatcache.tokenizer.tool_parser import MAX_NAME_CHARS, ParsedText, ToolCallDelta

HARMONY_REASONING = ReasoningSyntax("<|channel|>analysis<|message|>", "<|end|>")
_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.\-]+)")
_HEADER_STARTS = ("<|", "to=", "assistant")
MAX_HEADER_CHARS = 4 * MAX_NAME_CHARS


class HarmonyParser:
    """Splits the output of one candidate into text, reasoning and tool calls.

    `functions`: callable functions (None: calls stay text).
    """

    def __init__(self, functions: Functions | None, prompt_end: str = "") -> None:
        self._functions = functions
        self._held = ""
        self._channel: str | None = None  # of the current message; None in a header
        self._number = -1
        self._is_empty_call = False
        self._joins = {"text": "", "reasoning": ""}  # what separates the next message from an earlier one
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        head = prompt_end.rpartition(_START)[2]
        if _MESSAGE in head:
            self._begin(head.partition(_MESSAGE)[0])

    @property
    def is_thinking(self) -> bool:
        """True in a message of the analysis channel."""
        return self._channel == "reasoning"

    @property
    def has_open_call(self) -> bool:
        """True in a message that is a call."""
        return self._channel == "call"

    def push(self, text: str, *, last: bool = False) -> ParsedText:
        """Parse a chunk; return the parts that are now final."""
        rest, self._held = self._held + text, ""
        while rest:
            rest = self._in_header(rest, last) if self._channel is None else self._in_message(rest, last)
        parsed = ParsedText("".join(self._text), "".join(self._reasoning), tuple(self._calls))
        for each in (self._text, self._reasoning, self._calls):
            each.clear()
        return parsed

    def finish(self, end: str = "") -> ParsedText:
        """End the stream; return the text that was held back. `end`: the token that ended it, which ends a message."""
        return self.push(end if end in _ENDS else "", last=True)

    def _in_header(self, text: str, last: bool) -> str:
        start = text.lstrip(WHITESPACE)
        if any(start.startswith(word) or word.startswith(start) for word in _HEADER_STARTS):
            end = text.find(_MESSAGE, 0, MAX_HEADER_CHARS)
            if end >= 0:
                self._begin(text[:end])
                return text[end + len(_MESSAGE) :]
            if len(text) <= MAX_HEADER_CHARS:
                if not last:
                    self._held = text
                return ""
        self._channel = "text"
        return text

    def _begin(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and self._functions is not None and len(recipient[1]) <= MAX_NAME_CHARS:
            self._channel = "call"
            self._is_empty_call = True
            self._number += 1
            self._calls.append(ToolCallDelta(self._number, recipient[1]))
            return
        self._channel = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
        target = self._reasoning if self.is_thinking else self._text
        if self._joins[self._channel]:
            target.append(self._joins[self._channel])
            self._joins[self._channel] = ""

    def _in_message(self, text: str, last: bool) -> str:
        places = [(at, word) for word in _ENDS if (at := text.find(word)) >= 0]
        if places:
            at, word = min(places)
            self._append(text[:at] or ("{}" if self._channel == "call" and self._is_empty_call else ""))
            self._channel = None
            return text[at + len(word) :] if word not in (_START, "<|channel|>") else text[at:]
        end = len(text) if last else len(text) - max(overlap(text, word) for word in _ENDS)
        self._append(text[:end])
        self._held = text[end:]
        return ""

    def _append(self, text: str) -> None:
        if not text:
            return
        match self._channel:
            case "reasoning":
                self._reasoning.append(text)
                self._joins["reasoning"] = "\n"
            case "call":
                self._is_empty_call = False
                self._calls.append(ToolCallDelta(self._number, arguments=text))
            case _:
                self._text.append(text)
                self._joins["text"] = "\n"
