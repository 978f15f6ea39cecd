"""Where each message of a prompt ends, in tokens: for people who ask what of which message was computed before."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from chatcache.chat.prompt import MAX_RENDERED_CHARS, NO_VARIABLES, Message, Prompt
from chatcache.text.quoting import unquote
from chatcache.text.tokenizer import Tokenizer


def message_ends(
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
    num_text_bytes = len(unquote(prompt.text).encode("utf-8", "replace"))
    ends: list[int] = []
    for index in range(len(messages)):
        head = tokenizer.render(messages[: index + 1], add_generation_prompt=False, **variables)
        if not prompt.text.startswith(head):
            return None
        at = len(unquote(head).encode("utf-8", "replace"))
        if prompt.base is not None and index >= prompt.base:
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
        lengths[first] = sum(tokenizer.lead.hidden(pieces[first]))
    return list(accumulate(lengths))
