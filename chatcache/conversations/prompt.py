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

How long a text may be to be worth tokenising.

A tokenizer takes three hundred bytes for each token while it works, and seconds for a million. What is certainly too
long is refused before: what was stored is longer than any request may be.

Messages with structure: what an assistant called and thought, and what its calls returned.

Functions that a model is told of.

System prompts that the operator declared public: their pages are shared by everybody, what follows them by nobody.

Which tokens those are is settled here, from the server's own list, and nowhere else: a client can name a prompt only by
sending its exact text.

    rendering   <|system|>You are kind.<|end|><|user|>my secret<|end|><|assistant|>
    alone       <|system|>You are kind.<|end|>
                `---- num_public_tokens ------'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NotRequired, Protocol, TypedDict

from chatcache.conversations.tree import Item, ReplyParts, ToolCall
from chatcache.errors import ContextLengthError, InvalidRequestError
from chatcache.tokenizer.chat_template import TOKEN_BREAK, RawJson, parse_arguments, unescape

MAX_PROMPT_CHARS = 8 << 20  # for any model
ALWAYS_TOKENISED_CHARS = 64 << 10  # so much is tokenised, and its tokens are told to whoever sent too many
_NORMALISED = 4  # so many characters that a tokenizer may make one of


@dataclass(slots=True)
class PromptLimits:
    """What the model says of that; 0 until it is known."""

    max_model_len: int = 0
    max_token_chars: int = 0

    @property
    def max_chars(self) -> int:
        fitting = _NORMALISED * self.max_token_chars * self.max_model_len
        return min(MAX_PROMPT_CHARS, max(ALWAYS_TOKENISED_CHARS, fitting)) if fitting else MAX_PROMPT_CHARS

    def check(self, num_chars: int) -> None:
        """Raises: ContextLengthError."""
        if num_chars > self.max_chars:
            told = f"this model's maximum context length is {self.max_model_len} tokens"
            if not self.max_model_len:
                told = f"no prompt may have more than {self.max_chars}"
            raise ContextLengthError(f"the prompt has {num_chars} characters; {told}", param="prompt")


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

    def escape_reply(self, text: str) -> str: ...

    def encode_after(self, before: str, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Known:
    """A reply of ours: all that the model wrote, and the ids of its prompt and itself."""

    raw: str
    ids: tuple[int, ...]


ReplyLookup = Callable[[int, str, Message], Known | None]
"""(index of an assistant message, rendering before it, the message) -> what is known of it."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt leaves what a reply was generated from: the message, the character and the token of the prompt."""

    message_index: int
    char_index: int
    token_index: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """`token_ids[:num_reused]` were tokens already, up to and including message `base` (None: nothing was reused).

    The first `num_public_tokens` are an operator-declared system prompt (`public`). `divergence`: the latest known
    reply is not in `text` as it was generated.
    """

    text: str
    token_ids: tuple[int, ...]
    num_reused: int = 0
    base_message: int | None = None
    is_append_only: bool = True
    num_public_tokens: int = 0
    divergence: Divergence | None = None


def no_known_reply(index: int, head: str, message: Message) -> Known | None:
    """The `ReplyLookup` of a conversation without history."""
    return None


def assemble(
    tokenizer: Renderer,
    messages: Sequence[Message],
    known: ReplyLookup = no_known_reply,
    variables: Mapping[str, Any] = NO_VARIABLES,
    limits: PromptLimits | None = None,
) -> Prompt:
    """Render `messages` with the generation prompt and tokenise what follows the latest known reply.

    `template_variables` (tools) reach the template. Raises: ContextLengthError beyond `bound`.
    """
    text = tokenizer.render(messages, add_generation_prompt=True, **variables)
    if limits is not None:
        limits.check(len(text))
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
        prompt = Prompt(text, tuple(tokenizer.encode_rendered(text)), is_append_only=append_only)
    if rewritten is None:
        return prompt
    where = _divergence(tokenizer, messages, variables, prompt, *rewritten)
    return Prompt(text, prompt.token_ids, prompt.num_reused, prompt.base_message, append_only, divergence=where)


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
    written = tokenizer.escape_reply(message["content"])
    for form in (written, written.strip()):
        if text.startswith(form, len(head)):
            return len(head) + len(form)
    return None


def _end_of_raw(text: str, start: int, raw: str) -> int | None:
    """Where `raw` ends in `text[start:]`, seams aside: a template writes its own marks without, arguments with them."""
    for form in (raw, raw.strip()):
        at, done = start, 0
        while done < len(form):
            if text.startswith(TOKEN_BREAK, at):
                at += 1
                continue
            end = at + len(form) - done
            seam = text.find(TOKEN_BREAK, at, end)
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
    at_char = _num_common(unescape(prompt.text), unescape(head) + reply.raw)
    at_token = _num_common(prompt.token_ids, reply.ids)
    if prompt.text.startswith(head) or index * len(prompt.text) > MAX_RENDERED_CHARS:
        return Divergence(index, at_char, at_token)
    for message in range(index):
        before = tokenizer.render(messages[: message + 1], add_generation_prompt=False, **variables)
        if not prompt.text.startswith(before) or len(unescape(before)) > at_char:
            return Divergence(message, at_char, at_token)
    return Divergence(index, at_char, at_token)


def _num_common(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


TOOL = "tool"


def assistant_message(text: str, reasoning: str = "", calls: Sequence[ToolCall] = ()) -> Message:
    message = Message(role="assistant", content=text)
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_call_json(call) for call in calls]
    return message


def tool_message(text: str, call_id: str) -> Message:
    """What a call returned."""
    return Message(role=TOOL, content=text, tool_call_id=call_id)


def message_from_item(item: Item) -> Message:
    if item.role == "assistant":
        return assistant_message(item.text, item.parts.reasoning, item.parts.tool_calls)
    if item.role == TOOL:
        return tool_message(item.text, item.parts.call_id)
    return Message(role=item.role, content=item.text)


def parts_from_message(message: Message) -> ReplyParts:
    """What a stored item keeps of a message beside its text."""
    return ReplyParts(
        reasoning=message.get("reasoning_content", ""),
        tool_calls=tool_calls_of(message),
        call_id=message.get("tool_call_id", ""),
    )


def tool_calls_of(message: Message) -> tuple[ToolCall, ...]:
    return tuple(_call(call) for call in message.get("tool_calls", ()))


def link_tool_results(messages: Sequence[Message], param: str, num_old: int = 0) -> list[Message]:
    """Name the function in every answer to a call, as some templates want it.

    Raises: InvalidRequestError for an answer to a call that was not made, unless it is among the first `num_old`
    messages.
    """
    names: dict[str, str] = {}
    found: list[Message] = []
    for message in messages:
        names.update({call.call_id: call.name for call in tool_calls_of(message)})
        if message["role"] == TOOL:
            call_id = message.get("tool_call_id", "")
            if call_id in names:
                message = Message(role=TOOL, content=message["content"], tool_call_id=call_id, name=names[call_id])
            elif len(found) >= num_old:
                raise InvalidRequestError(f"{param}: no function was called with the id {call_id[:64]!r}", param=param)
        found.append(message)
    return found


def reply_key(text: str, calls: Sequence[ToolCall]) -> str:
    """What tells one reply from another: its text and calls, as a client sends them back."""
    if not calls:
        return text
    return "\0".join((text.strip(), *(part for call in calls for part in (call.name, call.arguments))))


def _call_json(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": parse_arguments(call.arguments)}
    return {"id": call.call_id, "type": "function", "function": function}


def _call(call: dict[str, Any]) -> ToolCall:
    arguments = call["function"]["arguments"]
    source = arguments.source if isinstance(arguments, RawJson) else arguments
    return ToolCall(call["id"], call["function"]["name"], source)


_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Function:
    """`parameters`: a JSON schema of the arguments (None: it takes none). `strict`: calls are held to it."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def to_template(self) -> dict[str, Any]:
        """The form that chat templates know."""
        described = {"description": self.description} if self.description is not None else {}
        parameters = self.parameters if self.parameters is not None else _NOTHING
        return {"type": "function", "function": {"name": self.name, **described, "parameters": parameters}}

    def to_echo(self) -> dict[str, Any]:
        """The flat form of the response object; `Turn.echo` keeps it as "tools"."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }


def template_variables(functions: Sequence[Function]) -> dict[str, Any]:
    """What a template is told beside the messages."""
    return {"tools": [function.to_template() for function in functions]} if functions else {}


def functions_from_echo(tools: object) -> tuple[Function, ...]:
    """Read back what `Function.echo` wrote."""
    if not isinstance(tools, list | tuple):
        return ()
    return tuple(
        Function(tool["name"], tool.get("description"), tool.get("parameters"), bool(tool.get("strict")))
        for tool in tools
    )


class SharedSystemPrompts:
    """The declared texts, with or without the line end that files have. Threads may share it."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts = frozenset(form for text in texts for form in (text, text.removesuffix("\n").removesuffix("\r")))
        self._ids: dict[str, tuple[int, ...]] = {}

    def count_shared_tokens(self, tokenizer: Renderer, messages: Sequence[Message], prompt: Prompt) -> int:
        """Count the leading tokens of `prompt` that hold its declared system message and nothing else.

        0 without one, and for templates that write it anywhere but at the start.
        """
        if not messages or messages[0]["role"] != "system" or messages[0]["content"] not in self._texts:
            return 0
        try:
            alone = tokenizer.render(messages[:1], add_generation_prompt=False)
        except InvalidRequestError:  # there are templates that render no system message, or not alone
            return 0
        if not prompt.text.startswith(alone) or messages[0]["content"].strip() not in unescape(alone):
            return 0
        ids = self._ids.get(alone)
        if ids is None:
            ids = tuple(tokenizer.encode_rendered(alone))
            if len(self._ids) > 2 * len(self._texts):  # a template that writes the date renders anew every day
                self._ids.clear()
            self._ids[alone] = ids
        same = (ours == theirs for ours, theirs in zip(ids, prompt.token_ids, strict=False))
        return next((count for count, equal in enumerate(same) if not equal), min(len(ids), len(prompt.token_ids)))
