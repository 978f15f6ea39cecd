"""Prompt assembly: messages -> token ids without tokenising twice what is already tokens.

    rendering   <|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>And you?<|end|><|assistant|>
                `----------- head -----------'`text-'`------------- new -----------------'
    ids         [ ids known for head + reply       ][ encode_after(new)                       ]

The cut is right behind a known reply. It exists only where the template is append-only: the rendering of the whole
conversation must begin with what that reply was generated from, followed by the reply's text. Templates that rewrite
history (drop reasoning, move the system text) have no such cut; the whole rendering is then tokenised, and
`Prompt.append_only` says so.

Control tokens typed by people are seamed in a rendering (`text.quoting`), so that nobody's text can pass for a turn,
neither to the model nor to whoever looks a rendering up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

MAX_LOOKBACK = 8


class Message(TypedDict):
    role: str
    content: str


class Renderer(Protocol):
    """What assembly needs of `text.Tokenizer`."""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str: ...

    def encode_rendered(self, rendering: str) -> list[int]: ...

    def quote_reply(self, text: str) -> str: ...

    def encode_after(self, before: str, text: str) -> list[int]: ...


KnownReply = Callable[[int, str, str], tuple[int, ...] | None]
"""(index of an assistant message, rendering before it, its text) -> ids of both together, if they are known."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`token_ids[:num_reused]` were tokens already, up to and including message `base` (None: nothing was reused).

    The first `num_public_tokens` are an operator-declared system prompt (`public`).
    """

    text: str
    token_ids: tuple[int, ...]
    num_reused: int = 0
    base: int | None = None
    append_only: bool = True
    num_public_tokens: int = 0


def nothing_known(index: int, head: str, reply: str) -> tuple[int, ...] | None:
    """The `KnownReply` of a conversation without history."""
    return None


def assemble(tokenizer: Renderer, messages: Sequence[Message], known: KnownReply = nothing_known) -> Prompt:
    """Render `messages` with the generation prompt and tokenise what follows the latest known reply."""
    text = tokenizer.render(messages, add_generation_prompt=True)
    append_only = True
    replies = [k for k, message in enumerate(messages) if k > 0 and message["role"] == "assistant"]
    for index in reversed(replies[-MAX_LOOKBACK:]):
        head = tokenizer.render(messages[:index], add_generation_prompt=True)
        reply = messages[index]["content"]
        cut = _end_of_reply(text, head, tokenizer.quote_reply(reply))
        if cut is None:
            append_only = False
            continue
        ids = known(index, head, reply)
        if ids is not None:
            suffix = tokenizer.encode_after(text[:cut], text[cut:])
            return Prompt(text, (*ids, *suffix), num_reused=len(ids), base=index, append_only=append_only)
    return Prompt(text, tuple(tokenizer.encode_rendered(text)), append_only=append_only)


def _end_of_reply(text: str, head: str, reply: str) -> int | None:
    """Where `reply` ends in `text`, if `text` is `head`, the reply and more. Templates may trim it."""
    if not text.startswith(head):
        return None
    for form in (reply, reply.strip()):
        if text.startswith(form, len(head)):
            return len(head) + len(form)
    return None
