"""Offset tables.

Where each message ends in the prompt's tokens, and which characters each reply token shows.

    tokens    |<think>| hm|</think>| Go|  to|od|.|          raw text: all that the model wrote
    visible      none  none   none   |Go|  to|od|.|         message text: neither reasoning nor calls

A character whose bytes span tokens belongs to the last of them; the earlier ones get an empty range at its position.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from chatcache.conversations.prompt import MAX_RENDERED_CHARS, NO_VARIABLES, Message, Prompt
from chatcache.conversations.replies.parser import CandidateParser, ParsedDelta, ReplyContext
from chatcache.conversations.tree import Item
from chatcache.tokenizer.chat_template import unescape
from chatcache.tokenizer.tokenizer import Tokenizer


def message_token_offsets(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    prompt: Prompt,
    variables: Mapping[str, Any] = NO_VARIABLES,
) -> tuple[int, ...] | None:
    """Return for each message the number of tokens from the start of the prompt to its end.

    What the template writes after a message counts as part of it. A token that spans two messages belongs to the later
    one. None if unknown: for templates that rewrite history, and for prompts too long for the quadratic rendering of
    every prefix of the messages.
    """
    if len(messages) * len(prompt.text) > MAX_RENDERED_CHARS:
        return None
    num_bytes = _ends_of_tokens(tokenizer, prompt.token_ids)
    num_text_bytes = len(unescape(prompt.text).encode("utf-8", "replace"))
    ends: list[int] = []
    for index in range(len(messages)):
        head = tokenizer.render(messages[: index + 1], add_generation_prompt=False, **variables)
        if not prompt.text.startswith(head):
            return None
        at = len(unescape(head).encode("utf-8", "replace"))
        if prompt.base_message is not None and index >= prompt.base_message:
            at += num_bytes[-1] - num_text_bytes  # a reused reply may hold white space that its text does not
        count = bisect_left(num_bytes, at)
        exact = count < len(num_bytes) and num_bytes[count] == at
        ends.append(min(count + exact, len(num_bytes)))
    return tuple(ends)


def _ends_of_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return the end of each token in the text, in bytes."""
    pieces = [tokenizer.token_bytes[token] for token in ids]
    lengths = [len(piece) for piece in pieces]
    first = next((position for position, piece in enumerate(pieces) if piece), None)
    if first is not None:
        lengths[first] = sum(tokenizer.leading_space.hidden(pieces[first]))
    return list(accumulate(lengths))


Span = tuple[int, int] | None
"""[start, end) in code points of the visible text; None for a token that shows nothing."""


def token_char_offsets(context: ReplyContext, prompt: Sequence[int], item: Item) -> list[Span]:
    """Return the range of characters that each token of a stored reply has in its message text.

    None for a token without visible characters. `prompt`: the token ids before the reply. Slow for long replies: run it
    on a thread.
    """
    raw = item.parts.raw or item.text
    pieces, incomplete = _pieces(context, prompt, item.token_ids, skip_special_tokens=True)
    if "".join(pieces) != raw:  # it was generated with special tokens visible
        others, others_incomplete = _pieces(context, prompt, item.token_ids, skip_special_tokens=False)
        if "".join(others) == raw:
            pieces, incomplete = others, others_incomplete
    written = "".join(pieces)
    if item.parts.raw:
        shown = _visible_positions(
            context.new_parser(prompt, [call.call_id for call in item.parts.tool_calls]), written
        )
    else:
        shown = [position if position < len(raw) else None for position in range(len(written))]
    spans: list[Span] = []
    end = 0
    for piece, is_open in zip(pieces, incomplete, strict=True):
        start, end = end, end + len(piece)
        positions = [position for position in shown[start:end] if position is not None]
        if not piece and is_open and end < len(shown):
            next_position = shown[end]
            spans.append((next_position, next_position) if next_position is not None else None)
        else:
            spans.append((positions[0], positions[-1] + 1) if positions else None)
    return spans


def _pieces(
    context: ReplyContext, prompt: Sequence[int], ids: Sequence[int], *, skip_special_tokens: bool
) -> tuple[list[str], list[bool]]:
    """Return the characters that each token completes, and whether it ends within a character."""
    stream = context.text_stream(prompt, skip_special_tokens=skip_special_tokens)
    hidden = context.tokenizer.special_ids - context.mark_ids if skip_special_tokens else frozenset()
    pieces: list[str] = []
    incomplete: list[bool] = []
    for token in ids:
        pieces.append(stream.push((token,)))
        incomplete.append(stream.has_incomplete_char and token not in hidden)
    rest = stream.finish()
    if rest and pieces:
        pieces[-1] += rest
    return pieces, incomplete


def _visible_positions(parser: CandidateParser, written: str) -> list[int | None]:
    """Return the position in the visible text of each character that the model wrote, or None.

    The parser is fed one character at a time, so that its latest output belongs to the latest character.
    """
    positions = _VisibleTextLocator(written)
    for end, char in enumerate(written, start=1):
        positions.add(parser.push(char), end)
    positions.add(parser.finish(), len(written))
    positions.end_run()
    return positions.shown


class _VisibleTextLocator:
    """Locates in the raw output the visible text, which the parser emits in order and in pieces."""

    def __init__(self, written: str) -> None:
        self._written = written
        self._num_shown = 0
        self._end = 0  # end of the last run
        self._run: list[str] = []
        self._run_end = 0
        self.shown: list[int | None] = [None] * len(written)

    def add(self, delta: ParsedDelta, end: int) -> None:
        """Add the parser's output for the first `end` characters."""
        if delta.reasoning:
            self.end_run()
        if delta.text:
            self._run.append(delta.text)
            self._run_end = end
        if delta.calls:
            self.end_run()

    def end_run(self) -> None:
        """Locate the collected run of visible text in the raw output.

        The last occurrence counts, since short texts may also occur in the markup before it.
        """
        text, self._run = "".join(self._run), []
        if text.startswith("\n") and text not in self._written[self._end : self._run_end]:
            text = text[1:]  # the parser wrote this line break, to separate the text from an earlier one
            self._num_shown += 1
        is_first = not self._num_shown and self._written.startswith(text)
        start = 0 if is_first else self._written.rfind(text, self._end, self._run_end)
        if text and start >= 0:
            self._end = start + len(text)
            self.shown[start : self._end] = range(self._num_shown, self._num_shown + len(text))
        self._num_shown += len(text)
