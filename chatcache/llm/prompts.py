"""Prompts as users write them: texts, token ids in any form, chats with tools."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, cast

import msgspec
from msgspec.structs import replace

from chatcache.conversations.prompt import Message as TemplateMessage
from chatcache.conversations.prompt import link_tool_results, template_variables
from chatcache.conversations.replies.parser import ReplyContext
from chatcache.errors import InvalidRequestError
from chatcache.gateway.api.params import constrain_to_tools, parse_tool_choice
from chatcache.gateway.schemas.requests import ToolChoiceFields, ToolFields
from chatcache.tokenizer.bad_words import resolve_bad_words
from chatcache.tokenizer.chat_template import parse_arguments, unescape
from chatcache.tokenizer.reply_format import ReplyFormat, detect_format
from chatcache.tokenizer.thinking import ThinkingControls
from chatcache.types.request import Params

if TYPE_CHECKING:
    from chatcache.tokenizer.tokenizer import Tokenizer


class IntegerArray(Protocol):
    """A numpy array or a torch tensor of integers."""

    @property
    def ndim(self) -> int: ...
    def tolist(self) -> Any: ...


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int] | IntegerArray


class TextPrompt(TypedDict):
    prompt: str


PROMPT_FIELDS = ("prompt_token_ids", "prompt")
Prompt = str | Sequence[int] | IntegerArray | TokensPrompt | TextPrompt
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids of a prompt, its text if it was given as text, and the parameters of its request.

    `context`: how the replies are parsed; None if they are plain text.
    """

    text: str | None
    token_ids: tuple[int, ...]
    params: Params
    context: ReplyContext | None = None


PromptSource = Callable[[Params], EncodedPrompt]
"""Encodes one prompt when its request is about to be submitted, so that a long list is not encoded ahead."""


class PromptReader:
    """Turns prompts and chats into token ids. `tokenizer` is None for a model without one."""

    def __init__(self, tokenizer: Tokenizer | None, model: str) -> None:
        self._tokenizer = tokenizer
        self._model = model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises: InvalidRequestError for a model folder without one.
        """
        if self._tokenizer is None:
            raise InvalidRequestError(f"{self._model}: this model has no tokenizer; pass token ids")
        return self._tokenizer

    @cached_property
    def _reply_format(self) -> ReplyFormat:
        return detect_format(self.tokenizer)

    @cached_property
    def _thinking(self) -> ThinkingControls:
        return ThinkingControls(self.tokenizer, self._reply_format)

    def prompts(self, prompts: Any) -> list[PromptSource]:
        """Return the source of one prompt or of each of several; rows of a matrix are prompts.

        Raises: InvalidRequestError for an object of another type, and for text without a tokenizer.
        """
        if _is_single(prompts):
            return [self.prompt(prompts)]
        return [self.prompt(each) for each in prompts]

    def prompt(self, prompt: Any) -> PromptSource:
        if isinstance(prompt, Mapping):
            others = [name for name in prompt if name not in PROMPT_FIELDS and prompt[name] is not None]
            if others:
                fields = " or ".join(PROMPT_FIELDS)
                message = f"a prompt is a dict with {fields} and no other field, got {others[0]!r:.40}"
                raise InvalidRequestError(message, param="prompts")
            given = prompt.get("prompt_token_ids")
            prompt = prompt.get("prompt") if given is None else given
        if isinstance(prompt, str):
            tokenizer, text = self.tokenizer, prompt

            def encode(params: Params) -> EncodedPrompt:
                token_ids = tuple(tokenizer.encode(text, add_special_tokens=True))
                return EncodedPrompt(text, token_ids, self.resolve(params, token_ids))

            return encode
        token_ids = _token_ids(prompt)
        return lambda params: EncodedPrompt(None, token_ids, self.resolve(params, token_ids))

    def resolve(self, params: Params, prompt: Sequence[int] = ()) -> Params:
        """Return the parameters with `bad_words` and the markers of the reasoning as token ids.

        Raises: InvalidRequestError.
        """
        if params.thinking_token_budget is not None:
            params = replace(params, thinking_marks=self._thinking.marks(prompt))
        return resolve_bad_words(params, self.tokenizer) if params.bad_words else params

    def chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Any,
        tool_choice: Any,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[PromptSource]:
        """Return the source of one chat or of each of several. `kwargs`: variables of the chat template.

        Raises: InvalidRequestError for a model without a chat template, and for invalid tools or variables.
        """
        several = _list_chats(messages)
        tokenizer = self.tokenizer
        if not tokenizer.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template: use generate, or LLM(chat_template=...)", param="messages"
            )
        form = self._reply_format
        given = _convert(tools, list[ToolFields], "tools")
        choice = _convert(tool_choice, str | ToolChoiceFields | None, "tool_choice")
        use = parse_tool_choice(form, given, choice, None)
        context = ReplyContext(tokenizer, form, use.schemas) if given else None
        self._thinking.check_kwargs(kwargs or {})
        variables = template_variables(use.functions, kwargs or {})

        def source(chat: Sequence[Message]) -> PromptSource:
            def encode(params: Params) -> EncodedPrompt:
                text = tokenizer.render(_template_messages(chat), **variables)
                token_ids = tuple(tokenizer.encode_rendered(text))
                if context is not None:
                    params = constrain_to_tools(params, use, form, tokenizer, token_ids)
                return EncodedPrompt(unescape(text), token_ids, self.resolve(params, token_ids), context)

            return encode

        return [source(chat) for chat in several]


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    if hasattr(prompts, "ndim"):
        return bool(prompts.ndim < 2)
    if not (hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__")):
        raise _prompt_error()
    return len(prompts) > 0 and hasattr(prompts[0], "__index__") and getattr(prompts[0], "ndim", 0) == 0


def _token_ids(prompt: Any) -> tuple[int, ...]:
    """Return token ids as Python integers.

    Raises: InvalidRequestError for anything else, floating-point and boolean arrays included.
    """
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        if all(type(token) is int for token in values):
            return tuple(values)
        try:
            if not any(isinstance(token, bool) for token in values):
                return tuple(operator.index(token) for token in values)
        except TypeError:
            pass
    raise _prompt_error()


def _prompt_error() -> InvalidRequestError:
    return InvalidRequestError(
        "a prompt is text, token ids (a list, a numpy array or a torch tensor of one dimension), "
        "or a dict with prompt_token_ids or prompt",
        param="prompts",
    )


def check_params_type(params: object) -> None:
    """Raise InvalidRequestError unless `params` are those of a request."""
    if not isinstance(params, Params):
        kind = type(params).__name__
        raise InvalidRequestError(
            f"sampling_params must be SamplingParams or BeamSearchParams, got {kind}", param="sampling_params"
        )


def _list_chats(messages: Any) -> Sequence[Sequence[Message]]:
    """Return one chat, or each of several. Raises: InvalidRequestError for objects of other types."""
    chats: Any = [messages] if not messages or (_is_list(messages) and isinstance(messages[0], dict)) else messages
    if not (
        _is_list(chats) and all(_is_list(chat) and chat and all(isinstance(m, dict) for m in chat) for chat in chats)
    ):
        raise InvalidRequestError(
            "messages must be a list of messages, each a dict with role and content, or a list of such lists; "
            "a list cannot be empty",
            param="messages",
        )
    return cast(Sequence[Sequence[Message]], chats)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _convert(value: Any, kind: Any, param: str) -> Any:
    if value is None:
        return None
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{param}: {error}", param=param) from None


def _template_messages(chat: Sequence[Message]) -> Sequence[Any]:
    """Return messages as chat templates expect them.

    Text parts are joined, arguments of calls parsed, and results have their function's name.
    """
    chat = [_join_parts(message) for message in chat]
    if not any("tool_calls" in message or message.get("role") == "tool" for message in chat):
        return chat
    parsed: list[Message] = []
    for message in chat:
        calls = message.get("tool_calls")
        if calls:
            message = {
                **message,
                "content": message.get("content") or "",
                "tool_calls": [_parse_call(c) for c in calls],
            }
        parsed.append(message)
    return link_tool_results(cast(list[TemplateMessage], parsed), "messages")


def _join_parts(message: Message) -> Message:
    """Return a message whose content is text, as the gateway does.

    Raises: InvalidRequestError for a role or a content of another type, and for other parts.
    """
    content: Any = message.get("content")
    if not isinstance(role := message.get("role"), str):
        raise InvalidRequestError(f"messages: role must be text, got {role!r:.40}", param="messages")
    if not _is_list(content):
        if not isinstance(content, str | None):
            problem = f"content must be text or a list of text parts, got {content!r:.40}"
            raise InvalidRequestError(f"messages: {problem}", param="messages")
        return message
    texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) < len(content):
        raise InvalidRequestError("messages: only text parts are supported in a content", param="messages")
    return {**message, "content": "\n".join(texts)}


def _parse_call(call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        function, arguments = call["function"], call["function"]["arguments"]
        _ = call["id"], function["name"]
    except (KeyError, TypeError):
        raise InvalidRequestError(
            "messages: a call needs id, function.name and function.arguments", param="messages"
        ) from None
    parsed = parse_arguments(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**function, "arguments": parsed}}
