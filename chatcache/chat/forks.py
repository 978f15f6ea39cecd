"""Forks inside a reply: cut at a token, or as far as a reply goes that is still being generated.

    user --- reply R ............... (still growing, or finished)
        `--- R cut --- user ---      the cut is stored as a message of its own: what was said later is no part of it
        `--- R cut + something else  without input the reply itself goes on, as one more candidate beside R

The tokens up to the cut are R's own, so their pages are too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from chatcache.chat.ids import new_id
from chatcache.chat.reading import Speech
from chatcache.chat.tree import FORKED, INCOMPLETE, ConversationTree, Item, ReplyParts, Turn
from chatcache.errors import InvalidRequest
from chatcache.text.stream import TextStream

_MAX_BYTES_OF_CHARACTER = 4
_TAIL_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ReplyStart:
    """The beginning of candidate `index` of `turn`: its `ids` after `prompt`, and their text.

    `shown` of it is its message's text, `parts` what else there is.
    """

    turn: Turn
    index: int
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    shown: str
    parts: ReplyParts

    def item(self) -> Item:
        """A message of its own, beside the reply it was cut from."""
        return Item(
            id=new_id("msg"),
            parent_id=self.turn.parent_id,
            role="assistant",
            text=self.shown,
            token_ids=self.ids,
            response_id=self.turn.id,
            index=self.index,
            status=INCOMPLETE,
            finish_reason=FORKED,
            created_at=time.time(),
            parts=self.parts,
        )


def cut(speech: Speech, tree: ConversationTree, item: Item, num_tokens: int) -> ReplyStart:
    """The first `num_tokens` of a stored reply. Raises: InvalidRequest naming `fork_at`."""
    turn, sequence = tree.turn_of(item), tree.sequence(item)
    if turn is None or not item.token_ids or not sequence:
        raise InvalidRequest("fork_at is for messages that this server generated", param="fork_at")
    check_fork_at(num_tokens, len(item.token_ids))
    prompt = sequence[: -len(item.token_ids)]
    ids, text = whole_characters(speech, prompt, item.token_ids[:num_tokens], skip_special_tokens=True)
    if not (item.parts.raw or item.text).startswith(text):  # it was generated with its special tokens shown
        ids, text = whole_characters(speech, prompt, item.token_ids[:num_tokens], skip_special_tokens=False)
    if not item.parts.raw:
        return ReplyStart(turn, item.index, prompt, ids, text, text, ReplyParts())
    reading = speech.reading(prompt, [call.call_id for call in item.parts.tool_calls])
    reading.push(text)
    reading.finish()
    return ReplyStart(turn, item.index, prompt, ids, text, reading.text, reading.parts(text))


def check_fork_at(fork_at: int, num_tokens: int) -> None:
    """Raises: InvalidRequest unless a reply of `num_tokens` has a token `fork_at`."""
    if fork_at > num_tokens:
        raise InvalidRequest(
            f"fork_at must be at most {num_tokens}, the message's tokens, got {fork_at}", param="fork_at"
        )


def whole_characters(
    speech: Speech, prompt: Sequence[int], ids: Sequence[int], *, skip_special_tokens: bool
) -> tuple[tuple[int, ...], str]:
    """Drop the last tokens if they are the beginning of a character; return what is left, and its text."""

    def decode(some: Sequence[int]) -> str:
        stream = TextStream(
            speech.tokenizer,
            skip_special_tokens=skip_special_tokens,
            prompt_ids_tail=tuple(prompt[-_TAIL_TOKENS:]),
            stop_token_ids=(),
            visible_ids=speech.mark_ids,
        )
        return stream.push(some) + stream.finish()

    for num_dropped in range(min(_MAX_BYTES_OF_CHARACTER, len(ids))):
        kept = tuple(ids[: len(ids) - num_dropped])
        text = decode(kept)
        if not text.endswith("\ufffd"):
            return kept, text
    return tuple(ids), decode(ids)
