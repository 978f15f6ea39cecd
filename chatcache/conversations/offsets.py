"""Where each message of a prompt ends, in tokens: for people who ask what of which message was computed before.

Which characters of a stored reply's text each of its tokens shows.

    tokens    |<think>| hm|</think>| Go|  to|od|.|          raw text   all that the model wrote
    shown        none  none   none   |Go|  to|od|.|          of it, what is text: neither thought nor call

A character whose bytes span tokens belongs to the last of them; those before it stand where it will be, empty.
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
    """Count the tokens up to the end of each message, what a template writes behind it included.

    A token that spans two messages belongs to the later one. None where there is no saying: templates that rewrite
    history, and prompts too long to look at so closely: every message is rendered with all before it.
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
    """Where each token ends in the text, in bytes."""
    pieces = [tokenizer.token_bytes[token] for token in ids]
    lengths = [len(piece) for piece in pieces]
    first = next((place for place, piece in enumerate(pieces) if piece), None)
    if first is not None:
        lengths[first] = sum(tokenizer.leading_space.hidden(pieces[first]))
    return list(accumulate(lengths))


Span = tuple[int, int] | None
"""[start, end) in characters (code points) of the shown text; None for a token that shows nothing."""


def token_char_offsets(context: ReplyContext, prompt: Sequence[int], item: Item) -> list[Span]:
    """One span per token of a reply to `prompt`. Takes a while for long ones: for a thread beside the event loop."""
    raw = item.parts.raw or item.text
    pieces, torn = _pieces(context, prompt, item.token_ids, skip_special_tokens=True)
    if "".join(pieces) != raw:  # it was generated with its special tokens shown
        others, others_torn = _pieces(context, prompt, item.token_ids, skip_special_tokens=False)
        if "".join(others) == raw:
            pieces, torn = others, others_torn
    written = "".join(pieces)
    if item.parts.raw:
        shown = _shown_places(context.new_parser(prompt, [call.call_id for call in item.parts.tool_calls]), written)
    else:
        shown = [place if place < len(raw) else None for place in range(len(written))]
    spans: list[Span] = []
    end = 0
    for piece, has_incomplete_char in zip(pieces, torn, strict=True):
        start, end = end, end + len(piece)
        places = [place for place in shown[start:end] if place is not None]
        if not piece and has_incomplete_char and end < len(shown):
            places_of_next = shown[end]
            spans.append((places_of_next, places_of_next) if places_of_next is not None else None)
        else:
            spans.append((places[0], places[-1] + 1) if places else None)
    return spans


def _pieces(
    context: ReplyContext, prompt: Sequence[int], ids: Sequence[int], *, skip_special_tokens: bool
) -> tuple[list[str], list[bool]]:
    """The characters that each token completes, and whether it leaves one that it has begun, or gone on with."""
    stream = context.text_stream(prompt, skip_special_tokens=skip_special_tokens)
    hidden = context.tokenizer.special_ids - context.mark_ids if skip_special_tokens else frozenset()
    pieces: list[str] = []
    torn: list[bool] = []
    for token in ids:
        pieces.append(stream.push((token,)))
        torn.append(stream.has_incomplete_char and token not in hidden)
    rest = stream.finish()
    if rest and pieces:
        pieces[-1] += rest
    return pieces, torn


def _shown_places(reading: CandidateParser, written: str) -> list[int | None]:
    """Where each character of all that the model wrote is shown. Read one by one: what is told is what came last."""
    places = _VisibleTextLocator(written)
    for end, char in enumerate(written, start=1):
        places.add(reading.push(char), end)
    places.add(reading.finish(), len(written))
    places.end_run()
    return places.shown


class _VisibleTextLocator:
    """Finds runs of text, told in order and piece by piece, in all that was written."""

    def __init__(self, written: str) -> None:
        self._written = written
        self._num_shown = 0
        self._end = 0  # behind the last run
        self._run: list[str] = []
        self._run_end = 0
        self.shown: list[int | None] = [None] * len(written)

    def add(self, heard: ParsedDelta, end: int) -> None:
        """Something was told when the first `end` characters were read."""
        if heard.reasoning:
            self.end_run()
        if heard.text:
            self._run.append(heard.text)
            self._run_end = end
        if heard.calls:
            self.end_run()

    def end_run(self) -> None:
        """Place the text so far: what comes is not right behind it. Short ones occur in marks: the last is meant."""
        text, self._run = "".join(self._run), []
        is_first = not self._num_shown and self._written.startswith(text)
        start = 0 if is_first else self._written.rfind(text, self._end, self._run_end)
        if text and start >= 0:
            self._end = start + len(text)
            self.shown[start : self._end] = range(self._num_shown, self._num_shown + len(text))
        self._num_shown += len(text)
