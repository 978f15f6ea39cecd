"""Prompt assembly: messages to token ids, reusing the ids of stored replies.

    rendering   <|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>And you?<|end|><|assistant|>
                `----------- head -----------'`-raw-'`------------- new -----------------'
    ids         [ ids known for head + reply       ][ encode_after(new)                       ]

The cut is the end of a known reply. It exists only if the template is append-only: the rendering of the whole
conversation must begin with the prompt that the reply was generated from, followed by all that the model wrote. For
templates that rewrite history (drop reasoning, move the system text), the whole rendering is tokenised
(`Prompt.is_append_only` is False) and `Prompt.divergence` locates the difference.

Text that looks like a control token is escaped in a rendering (`tokenizer.chat_template`), so that no message can
imitate a turn.

`SharedSystemPrompts` counts the leading tokens that are an operator-declared system prompt, whose pages all tenants
share. It uses the server's own list only: a client selects a shared prompt by sending its exact text.

    rendering   <|system|>You are kind.<|end|><|user|>my secret<|end|><|assistant|>
    alone       <|system|>You are kind.<|end|>
                `---- num_public_tokens ------'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NotRequired, Protocol, TypedDict

from chatcache.conversations.tree import Item, ReplyParts, ToolCall
from chatcache.errors import ContextLengthError, InvalidRequestError
from chatcache.tokenizer.chat_template import TOKEN_BREAK, RawJson, parse_arguments, unescape

MAX_PROMPT_CHARS = 8 << 20  # for any model
ALWAYS_TOKENISED_CHARS = 64 << 10  # always tokenised, so that the error can state the number of tokens
_MAX_CHARS_PER_NORMALISED = 4  # characters that a tokenizer may normalise to one
MAX_LOOKBACK = 8
MAX_SEAM_CHARS = 256  # that a template writes between the text of a reply and its calls
_REPLY_MARK = "\ue000chatcache-reply\ue000"
MAX_RENDERED_CHARS = 2_000_000  # bound on the renderings made to find the message of a divergence
NO_VARIABLES: Mapping[str, Any] = {}
TOOL = "tool"
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(slots=True)
class PromptLimits:
    """Limits on the length of a prompt, from which a limit in characters is derived.

    `max_token_chars`: length of the longest token. Both fields are 0 until the model is loaded. The check precedes
    tokenising, because a tokenizer needs about 300 bytes of memory per token, and seconds for a million characters. It
    rejects only prompts that certainly exceed the context length.
    """

    max_model_len: int = 0
    max_token_chars: int = 0

    @property
    def max_chars(self) -> int:
        """Length in characters of the longest prompt that is tokenised."""
        fitting = _MAX_CHARS_PER_NORMALISED * self.max_token_chars * self.max_model_len
        return min(MAX_PROMPT_CHARS, max(ALWAYS_TOKENISED_CHARS, fitting)) if fitting else MAX_PROMPT_CHARS

    def check(self, num_chars: int) -> None:
        """Raise ContextLengthError for a prompt of too many characters."""
        if num_chars > self.max_chars:
            limit = f"this model's maximum context length is {self.max_model_len} tokens"
            if not self.max_model_len:
                limit = f"no prompt may have more than {self.max_chars}"
            raise ContextLengthError(f"the prompt has {num_chars} characters; {limit}", param="prompt")


class Message(TypedDict):
    """A message as chat templates read it."""

    role: str
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]


class Renderer(Protocol):
    """The tokenizer methods that prompt assembly needs."""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str: ...

    def encode_rendered(self, rendering: str) -> list[int]: ...

    def escape_reply(self, text: str) -> str: ...

    def encode_after(self, before: str, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Known:
    """A reply of this server: its raw output, and the token ids of its prompt and of itself."""

    raw: str
    ids: tuple[int, ...]


ReplyLookup = Callable[[int, str, Message], Known | None]
"""(index of an assistant message, rendering before it, the message) -> the known reply, if any."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The position at which a prompt first differs from the token ids of a reply in its history.

    Given as index of the message, of the character in the rendering and of the token.
    """

    message_index: int
    char_index: int
    token_index: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered and tokenised prompt.

    `token_ids[:num_reused]` were stored ids, up to and including message `base_message` (None: nothing was reused). The
    first `num_public_tokens` are an operator-declared system prompt. `divergence`: the latest known reply is not in
    `text` as it was generated. `keeps_reasoning`: the ids contain reasoning that the template left out of `text`.
    """

    text: str
    token_ids: tuple[int, ...]
    num_reused: int = 0
    base_message: int | None = None
    is_append_only: bool = True
    num_public_tokens: int = 0
    divergence: Divergence | None = None
    keeps_reasoning: bool = False

    @property
    def key(self) -> str:
        """The text under which a reply to this prompt is remembered."""
        return recall_key(self.text, keeps_reasoning=self.keeps_reasoning)


def recall_key(head: str, *, keeps_reasoning: bool) -> str:
    """Return the key of the replies that follow a rendering."""
    return f"{head}\0{keeps_reasoning}" if keeps_reasoning else head


@dataclass(frozen=True, slots=True)
class Function:
    """A function declared to the model.

    `parameters`: JSON schema of the arguments; `strict`: enforce the schema.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def to_template(self) -> dict[str, Any]:
        """Return the function in the form that chat templates expect."""
        described = {"description": self.description} if self.description is not None else {}
        parameters = self.parameters if self.parameters is not None else _NO_PARAMETERS
        return {"type": "function", "function": {"name": self.name, **described, "parameters": parameters}}

    def to_echo(self) -> dict[str, Any]:
        """Return the function as the response object repeats it in `tools`; `Turn.echo["tools"]` stores the same."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }


def argument_schemas(functions: Iterable[Function]) -> dict[str, Mapping[str, Any]]:
    """Return the JSON schema of the arguments of each function, by name."""
    return {each.name: each.parameters if each.parameters is not None else _NO_PARAMETERS for each in functions}


def no_known_reply(index: int, head: str, message: Message) -> Known | None:
    """Return None for every message: the `ReplyLookup` of a conversation without stored replies."""
    return None


def assemble(
    tokenizer: Renderer,
    messages: Sequence[Message],
    known: ReplyLookup = no_known_reply,
    variables: Mapping[str, Any] = NO_VARIABLES,
    limits: PromptLimits | None = None,
    kept_until: str = "",
) -> Prompt:
    """Render `messages` with the generation prompt, and reuse the token ids of known replies.

    Only the text after the latest known reply is tokenised. `variables` (tools) are passed to the template.
    `kept_until`: the marker that ends the model's reasoning; replies then stay as they were generated, even if the
    template leaves their reasoning out. Raises: ContextLengthError beyond `limits`.
    """
    text = tokenizer.render(messages, add_generation_prompt=True, **variables)
    if limits is not None:
        limits.check(len(text))
    append_only = True
    mismatch: tuple[int, str, Known] | None = None
    prompt: Prompt | None = None
    replies = [k for k, message in enumerate(messages) if k > 0 and message["role"] == "assistant"]
    for index in reversed(replies[-MAX_LOOKBACK:]):
        head = tokenizer.render(messages[:index], add_generation_prompt=True, **variables)
        reply = known(index, head, messages[index])
        cut = _end_of_reply(text, head, tokenizer, messages[index], reply)
        if cut is None and reply is not None and kept_until:
            answer = reply.raw.rpartition(kept_until)[2].strip()
            after = _text_after_reply(tokenizer, messages, index, variables, answer)
            if after is not None:
                suffix = tokenizer.encode_after(reply.raw, after)
                prompt = Prompt(text, (*reply.ids, *suffix), len(reply.ids), index, append_only)
                break
        if cut is None:
            append_only = False
            if reply is not None and mismatch is None:
                mismatch = index, head, reply
        elif reply is not None:
            suffix = tokenizer.encode_after(text[:cut], text[cut:])
            prompt = Prompt(text, (*reply.ids, *suffix), len(reply.ids), index, append_only)
            break
    if prompt is None:
        prompt = Prompt(text, tuple(tokenizer.encode_rendered(text)), is_append_only=append_only)
    if kept_until:
        prompt = replace(prompt, keeps_reasoning=True)
    if mismatch is None:
        return prompt
    where = _divergence(tokenizer, messages, variables, prompt, *mismatch)
    return replace(prompt, is_append_only=append_only, divergence=where)


def _end_of_reply(text: str, head: str, tokenizer: Renderer, message: Message, reply: Known | None) -> int | None:
    """Return the offset in `text` at which a reply after `head` ends; None if not found.

    Templates may strip the white space around a reply. If `reply` is None, the server did not generate it, and its end
    is only found if it is plain text.
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


def _text_after_reply(
    tokenizer: Renderer, messages: Sequence[Message], index: int, variables: Mapping[str, Any], answer: str
) -> str | None:
    """Return what the template writes after reply `index`, whose reasoning it may leave out; None if not found.

    `answer`: the reply without its reasoning.
    """
    message, content = messages[index], messages[index]["content"].strip()
    if not answer.startswith(content):
        return None
    probe: Message = {**message, "content": _REPLY_MARK}
    probe.pop("reasoning_content", None)
    try:
        text = tokenizer.render([*messages[:index], probe, *messages[index + 1 :]], True, **variables)
    except InvalidRequestError:
        return None
    _, mark, after = text.rpartition(_REPLY_MARK)
    calls = answer[len(content) :].strip()
    if not mark or not calls:
        return after if mark else None
    for place in range(min(len(after), MAX_SEAM_CHARS)):
        end = _end_of_raw(after, place, calls) if after.startswith(calls[0], place) else None
        if end is not None:
            return after[end:]
    return None


def _end_of_raw(text: str, start: int, raw: str) -> int | None:
    """Return where `raw` ends in `text[start:]`, ignoring the separators that escaping inserts."""
    for form in (raw, raw.strip()):
        position, done = start, 0
        while done < len(form):
            if text.startswith(TOKEN_BREAK, position):
                position += 1
                continue
            end = position + len(form) - done
            seam = text.find(TOKEN_BREAK, position, end)
            piece = text[position : seam if seam >= 0 else end]
            if not piece or not form.startswith(piece, done):
                break
            position, done = position + len(piece), done + len(piece)
        if done == len(form):
            return position
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
    """Find where `prompt` first differs from the tokens of reply `index`, a part of its history."""
    char_index = _num_common(unescape(prompt.text), unescape(head) + reply.raw)
    token_index = _num_common(prompt.token_ids, reply.ids)
    if prompt.text.startswith(head) or index * len(prompt.text) > MAX_RENDERED_CHARS:
        return Divergence(index, char_index, token_index)
    for message in range(index):
        before = tokenizer.render(messages[: message + 1], add_generation_prompt=False, **variables)
        if not prompt.text.startswith(before) or len(unescape(before)) > char_index:
            return Divergence(message, char_index, token_index)
    return Divergence(index, char_index, token_index)


def _num_common(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def assistant_message(text: str, reasoning: str = "", calls: Sequence[ToolCall] = ()) -> Message:
    message = Message(role="assistant", content=text)
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_call_json(call) for call in calls]
    return message


def tool_message(text: str, call_id: str) -> Message:
    """Return the message with the result of a call."""
    return Message(role=TOOL, content=text, tool_call_id=call_id)


def message_from_item(item: Item) -> Message:
    if item.role == "assistant":
        return assistant_message(item.text, item.parts.reasoning, item.parts.tool_calls)
    if item.role == TOOL:
        return tool_message(item.text, item.parts.call_id)
    return Message(role=item.role, content=item.text)


def parts_from_message(message: Message) -> ReplyParts:
    """Return the fields of a message that a stored item keeps besides its text."""
    return ReplyParts(
        reasoning=message.get("reasoning_content", ""),
        tool_calls=tool_calls_of(message),
        call_id=message.get("tool_call_id", ""),
    )


def tool_calls_of(message: Message) -> tuple[ToolCall, ...]:
    return tuple(_call(call) for call in message.get("tool_calls", ()))


def link_tool_results(messages: Sequence[Message], param: str, num_old: int = 0) -> list[Message]:
    """Add the function name to every tool result, as some templates require.

    Raises: InvalidRequestError for the result of an unknown call, unless it is among the first `num_old` messages.
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
    """Return the key under which a reply is remembered: its text and its tool calls.

    It is built from what a client sends back, so it contains no reasoning and no call ids.
    """
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


def template_variables(functions: Sequence[Function], kwargs: Mapping[str, Any] = NO_VARIABLES) -> dict[str, Any]:
    """Return the template variables: those that the client set, and the one that declares the functions."""
    return {**kwargs, **({"tools": [function.to_template() for function in functions]} if functions else {})}


def functions_from_echo(tools: object) -> tuple[Function, ...]:
    """Parse the result of `Function.to_echo`."""
    if not isinstance(tools, list | tuple):
        return ()
    return tuple(
        Function(tool["name"], tool.get("description"), tool.get("parameters"), bool(tool.get("strict")))
        for tool in tools
    )


class SharedSystemPrompts:
    """The system prompts that the operator declared as shared, with or without a final newline.

    Thread-safe.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts = frozenset(form for text in texts for form in (text, text.removesuffix("\n").removesuffix("\r")))
        self._ids: dict[str, tuple[int, ...]] = {}

    def count_shared_tokens(self, tokenizer: Renderer, messages: Sequence[Message], prompt: Prompt) -> int:
        """Count the leading tokens of `prompt` that hold only its operator-declared system message.

        0 without a declared one, and for templates that do not write it at the start.
        """
        if not messages or messages[0]["role"] != "system" or messages[0]["content"] not in self._texts:
            return 0
        try:
            alone = tokenizer.render(messages[:1], add_generation_prompt=False)
        except InvalidRequestError:  # some templates render no system message, or not alone
            return 0
        if not prompt.text.startswith(alone) or messages[0]["content"].strip() not in unescape(alone):
            return 0
        ids = self._ids.get(alone)
        if ids is None:
            ids = tuple(tokenizer.encode_rendered(alone))
            if len(self._ids) > 2 * len(self._texts):  # a template that writes the date renders differently every day
                self._ids.clear()
            self._ids[alone] = ids
        same = (ours == theirs for ours, theirs in zip(ids, prompt.token_ids, strict=False))
        return next((count for count, equal in enumerate(same) if not equal), min(len(ids), len(prompt.token_ids)))
