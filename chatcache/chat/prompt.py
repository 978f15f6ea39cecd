"""Prompt assembly: messages -> token ids without tokenising twice what is already tokens.

    rendering   <|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>And you?<|end|><|assistant|>
                `----------- head -----------'`-raw-'`------------- new -----------------'
    ids         [ ids known for head + reply       ][ encode_after(new)                       ]

The cut is right behind a known reply. It exists only where the template is append-only: the rendering of the whole
conversation must begin with what that reply was generated from, followed by all that the model wrote, calls and
reasoning included. Templates that rewrite history (drop reasoning, move the system text) have no such cut; the whole
rendering is then tokenised, and `Prompt.append_only` says so. Where they write a known reply otherwise than it was
generated, `Prompt.divergence` says where.

Control tokens typed by people are seamed in a rendering (`text.quoting`), so that nobody's text can pass for a turn,
neither to the model nor to whoever looks a rendering up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NotRequired, Protocol, TypedDict

from chatcache.chat.bound import PromptBound
from chatcache.text.quoting import SEAM, unquote

MAX_LOOKBACK = 8
MAX_RENDERED_CHARS = 2_000_000  # what looking for the message of a divergence may cost
NO_VARIABLES: Mapping[str, Any] = {}


class Message(TypedDict):
    """As chat templates read them (`messages` builds those that are more than text)."""

    role: str
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]


class Renderer(Protocol):
    """What assembly needs of `text.Tokenizer`."""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str: ...

    def encode_rendered(self, rendering: str) -> list[int]: ...

    def quote_reply(self, text: str) -> str: ...

    def encode_after(self, before: str, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Known:
    """A reply of ours: all that the model wrote, and the ids of its prompt and itself."""

    raw: str
    ids: tuple[int, ...]


KnownReply = Callable[[int, str, Message], Known | None]
"""(index of an assistant message, rendering before it, the message) -> what is known of it."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt leaves what a reply was generated from: the message, the character and the token of the prompt."""

    message: int
    at_char: int
    at_token: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """`token_ids[:num_reused]` were tokens already, up to and including message `base` (None: nothing was reused).

    The first `num_public_tokens` are an operator-declared system prompt (`public`). `divergence`: the latest known
    reply is not in `text` as it was generated.
    """

    text: str
    token_ids: tuple[int, ...]
    num_reused: int = 0
    base: int | None = None
    append_only: bool = True
    num_public_tokens: int = 0
    divergence: Divergence | None = None


def nothing_known(index: int, head: str, message: Message) -> Known | None:
    """The `KnownReply` of a conversation without history."""
    return None


def assemble(
    tokenizer: Renderer,
    messages: Sequence[Message],
    known: KnownReply = nothing_known,
    variables: Mapping[str, Any] = NO_VARIABLES,
    bound: PromptBound | None = None,
) -> Prompt:
    """Render `messages` with the generation prompt and tokenise what follows the latest known reply.

    `variables` (tools) reach the template. Raises: ContextTooLong beyond `bound`.
    """
    text = tokenizer.render(messages, add_generation_prompt=True, **variables)
    if bound is not None:
        bound.check(len(text))
    append_only = True
    rewritten: tuple[int, str, Known] | None = None
    prompt: Prompt | None = None
    replies = [k for k, message in enumerate(messages) if k > 0 and message["role"] == "assistant"]
    for index in reversed(replies[-MAX_LOOKBACK:]):
        head = tokenizer.render(messages[:index], add_generation_prompt=True, **variables)
        reply = known(index, head, messages[index])
        cut = _end_of_reply(text, head, tokenizer, messages[index], reply)
        if cut is None:
            append_only = False
            if reply is not None and rewritten is None:
                rewritten = index, head, reply
        elif reply is not None:
            suffix = tokenizer.encode_after(text[:cut], text[cut:])
            prompt = Prompt(text, (*reply.ids, *suffix), len(reply.ids), index, append_only)
            break
    if prompt is None:
        prompt = Prompt(text, tuple(tokenizer.encode_rendered(text)), append_only=append_only)
    if rewritten is None:
        return prompt
    where = _divergence(tokenizer, messages, variables, prompt, *rewritten)
    return Prompt(text, prompt.token_ids, prompt.num_reused, prompt.base, append_only, divergence=where)


def _end_of_reply(text: str, head: str, tokenizer: Renderer, message: Message, reply: Known | None) -> int | None:
    """Where a reply ends in `text`, if `text` is `head`, the reply and more. Templates may trim it.

    What a reply is that is not known is only known where it is nothing but text.
    """
    if not text.startswith(head):
        return None
    if reply is not None and reply.raw.strip() != message["content"].strip():
        return _end_of_raw(text, len(head), reply.raw)
    if "tool_calls" in message or "reasoning_content" in message:
        return len(head)
    written = tokenizer.quote_reply(message["content"])
    for form in (written, written.strip()):
        if text.startswith(form, len(head)):
            return len(head) + len(form)
    return None


def _end_of_raw(text: str, start: int, raw: str) -> int | None:
    """Where `raw` ends in `text[start:]`, seams aside: a template writes its own marks without, arguments with them."""
    for form in (raw, raw.strip()):
        at, done = start, 0
        while done < len(form):
            if text.startswith(SEAM, at):
                at += 1
                continue
            end = at + len(form) - done
            seam = text.find(SEAM, at, end)
            piece = text[at : seam if seam >= 0 else end]
            if not piece or not form.startswith(piece, done):
                break
            at, done = at + len(piece), done + len(piece)
        if done == len(form):
            return at
    return None


def _divergence(
    tokenizer: Renderer,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    prompt: Prompt,
    index: int,
    head: str,
    reply: Known,
) -> Divergence:
    """Where `prompt` leaves the tokens of reply `index`, which it should begin with."""
    at_char = _num_common(unquote(prompt.text), unquote(head) + reply.raw)
    at_token = _num_common(prompt.token_ids, reply.ids)
    if prompt.text.startswith(head) or index * len(prompt.text) > MAX_RENDERED_CHARS:
        return Divergence(index, at_char, at_token)
    for message in range(index):
        before = tokenizer.render(messages[: message + 1], add_generation_prompt=False, **variables)
        if not prompt.text.startswith(before) or len(unquote(before)) > at_char:
            return Divergence(message, at_char, at_token)
    return Divergence(index, at_char, at_token)


def _num_common(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
