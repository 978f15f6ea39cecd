"""Forks inside a reply: cut at a token, or as far as a reply goes that is still being generated.

    user --- reply R ............... (still growing, or finished)
        `--- R cut --- user ---      the cut is stored as a message of its own: what was said later is no part of it
        |--- R cut + something else  without input the reply itself goes on, as one more candidate beside R
        `--- R cut + token + ...     with a token that was chosen for it

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

_MAX_BYTES_OF_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class ReplyStart:
    """The beginning of candidate `index` of `turn`: its `ids` after `prompt`, and their text.

    `shown` of it is its message's text, `parts` what else there is. The last `num_open` ids begin a character, which is
    no part of the text yet.
    """

    turn: Turn
    index: int
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    shown: str
    parts: ReplyParts
    num_open: int = 0

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


def cut(
    speech: Speech, tree: ConversationTree, item: Item, num_tokens: int, fork_with: int | None = None
) -> ReplyStart:
    """The first `num_tokens` of a stored reply, in whole characters; or these and the token `fork_with`.

    Raises: InvalidRequest naming `fork_at` or `fork_with`.
    """
    turn, prompt = generated(tree, item, "fork_at")
    check_fork_at(num_tokens, len(item.token_ids))
    ids = forked_ids(speech, item.token_ids[:num_tokens], fork_with)
    some = item.token_ids[: num_tokens or None]
    _, hidden = whole_characters(speech, prompt, some, skip_special_tokens=True)
    skips = (item.parts.raw or item.text).startswith(hidden)  # else it was generated with its special tokens shown
    call_ids = [call.call_id for call in item.parts.tool_calls]
    return begun(speech, turn, item.index, prompt, ids, call_ids, skips=skips, is_exact=fork_with is not None)


def begun(
    speech: Speech,
    turn: Turn,
    index: int,
    prompt: tuple[int, ...],
    ids: tuple[int, ...],
    call_ids: Sequence[str],
    *,
    skips: bool,
    is_exact: bool,
) -> ReplyStart:
    """Read the beginning of a reply; the beginning of a character at its end is dropped, or kept open if `is_exact`.

    `skips`: special tokens are no text. `call_ids`: ids that its calls have already.
    """
    whole, text = whole_characters(speech, prompt, ids, skip_special_tokens=skips)
    reading = speech.reading(prompt, call_ids)
    reading.push(text)
    reading.finish()
    num_open = len(ids) - len(whole) if is_exact else 0
    kept = ids if is_exact else whole
    return ReplyStart(turn, index, prompt, kept, text, reading.text, reading.parts(text), num_open)


def forked_ids(speech: Speech, ids: tuple[int, ...], fork_with: int | None) -> tuple[int, ...]:
    """The tokens that a fork begins with. Raises: InvalidRequest for a token that nothing can follow."""
    if fork_with is None:
        return ids
    num_ids = speech.tokenizer.vocab_size
    if not 0 <= fork_with < num_ids:
        raise InvalidRequest(f"fork_with must be a token id between 0 and {num_ids - 1}", param="fork_with")
    if fork_with in speech.tokenizer.eos_token_ids:
        raise InvalidRequest("fork_with: that token ends the reply, nothing goes on behind it", param="fork_with")
    return (*ids, fork_with)


def generated(tree: ConversationTree, item: Item, param: str) -> tuple[Turn, tuple[int, ...]]:
    """The response that made a message, and the exact prompt it was generated from.

    Raises: InvalidRequest naming `param` where that, or the message's tokens, are not known.
    """
    turn, sequence = tree.turn_of(item), tree.sequence(item)
    if turn is None or not item.token_ids or not sequence:
        raise InvalidRequest(f"{param} is for messages that this server generated", param=param)
    return turn, sequence[: -len(item.token_ids)]


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
        stream = speech.retold(prompt, skip_special_tokens=skip_special_tokens)
        return stream.push(some) + stream.finish()

    for num_dropped in range(min(_MAX_BYTES_OF_CHARACTER, len(ids))):
        kept = tuple(ids[: len(ids) - num_dropped])
        text = decode(kept)
        if not text.endswith("\ufffd"):
            return kept, text
    return tuple(ids), decode(ids)
