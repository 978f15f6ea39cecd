"""Convert chat messages and Responses input items to messages of a conversation.

In a chat, an assistant message has content, reasoning_content and tool_calls, and a tool message has tool_call_id. In
Responses input, consecutive reasoning, message and function_call items are one assistant message, and a
function_call_output item is a tool message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from chatcache.conversations.prompt import Message, assistant_message, tool_message
from chatcache.conversations.tree import ToolCall
from chatcache.errors import InvalidRequestError, UnsupportedParameterError
from chatcache.gateway.api.compaction import SUMMARY_HEAD, decode_summary
from chatcache.gateway.schemas.requests import CallFields, MessageFields, Part

Value = TypeVar("Value")

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_REASONING_PARTS = ("text", "reasoning_text", "summary_text")


def to_messages(fields: Sequence[MessageFields], param: str) -> tuple[Message, ...]:
    """Convert messages.

    Raises: InvalidRequestError, UnsupportedParameterError with `param[i]...`.
    """
    reader = _MessageReader()
    for at, each in enumerate(fields):
        reader.read(each, f"{param}[{at}]")
    reader.flush()
    return tuple(reader.messages)


def input_messages(given: str | Sequence[MessageFields] | None) -> tuple[Message, ...]:
    """Convert a Responses `input`. Raises: InvalidRequestError, UnsupportedParameterError."""
    if isinstance(given, str):
        return (Message(role="user", content=given),)
    return to_messages(given or (), "input")


@dataclass(slots=True)
class _Assistant:
    """An assistant message while its items are collected. `text` is None before a message item."""

    text: str | None = None
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class _MessageReader:
    """Builds messages from items in order; `param` names in errors come from the caller."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._open: _Assistant | None = None

    def read(self, item: MessageFields, where: str) -> None:
        match item.type or "message":
            case "message":
                self._message(item, where)
            case "reasoning":
                self.flush()
                reasoning = item.content or item.summary
                self._open = _Assistant(reasoning=_text(reasoning, where, _REASONING_PARTS) if reasoning else "")
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                self.flush()
                call_id = _required(item.call_id, f"{where}.call_id")
                self.messages.append(tool_message(_text(item.output, where, _TEXT_PARTS, "output"), call_id))
            case "compaction":
                self.flush()
                param = f"{where}.encrypted_content"
                summary = decode_summary(_required(item.encrypted_content, param), param)
                self.messages.append(Message(role="user", content=SUMMARY_HEAD + summary))
            case kind:
                raise UnsupportedParameterError(f"{where}.type {kind[:40]!r} is not supported", param=f"{where}.type")

    def flush(self) -> None:
        """Complete the assistant message. Reasoning without a message or a call after it is dropped."""
        finished, self._open = self._open, None
        if finished is not None and (finished.text is not None or finished.calls):
            self.messages.append(assistant_message(finished.text or "", finished.reasoning, finished.calls))

    def _message(self, item: MessageFields, where: str) -> None:
        role = _required(item.role, f"{where}.role")
        if role == "assistant":
            self._assistant(item, where)
            return
        self.flush()
        if item.tool_calls:
            raise InvalidRequestError(f"{where}.tool_calls: only an assistant calls", param=f"{where}.tool_calls")
        if role == "tool":
            call_id = _required(item.tool_call_id, f"{where}.tool_call_id")
            self.messages.append(tool_message(_text(item.content, where, _TEXT_PARTS), call_id))
        elif role == "function":
            raise UnsupportedParameterError(
                f'{where}.role "function" is not supported: use tools', param=f"{where}.role"
            )
        elif role not in ROLES:
            raise InvalidRequestError(f"{where}.role must be one of {', '.join(ROLES)}, tool", param=f"{where}.role")
        else:
            self.messages.append(Message(role=ROLES[role], content=_text(item.content, where, _TEXT_PARTS)))

    def _assistant(self, item: MessageFields, where: str) -> None:
        content = item.content if item.content is not None else item.refusal
        reasoning = item.reasoning_content or item.reasoning or ""
        if content is None and not item.tool_calls and not reasoning:
            raise _missing(f"{where}.content")
        calls = [_tool_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(item.tool_calls or ())]
        text = _text(content, where, _TEXT_PARTS) if content is not None else ""
        begun = self._open
        if begun is None or begun.text is not None or begun.calls or reasoning:
            self.flush()
            begun = _Assistant(reasoning=reasoning)
        begun.text = text
        begun.calls += calls
        self._open = begun

    def _call(self, item: MessageFields, where: str) -> None:
        call_id = _required(item.call_id, f"{where}.call_id")
        name, arguments = _required(item.name, f"{where}.name"), _required(item.arguments, f"{where}.arguments")
        if not 1 <= len(name) <= 256:
            raise InvalidRequestError(f"{where}.name must have 1 to 256 characters", param=f"{where}.name")
        if item.namespace:
            name = f"{item.namespace}.{name}"
        self._open = self._open if self._open is not None else _Assistant()
        self._open.calls.append(ToolCall(call_id, name, arguments))


def _tool_call(call: CallFields, where: str) -> ToolCall:
    if call.type != "function":
        raise UnsupportedParameterError(f"{where}.type {call.type[:40]!r} is not supported", param=f"{where}.type")
    function = _required(call.function, f"{where}.function")
    return ToolCall(call.id, function.name, function.arguments)


def _text(content: str | Sequence[Part] | None, where: str, kinds: Sequence[str], name: str = "content") -> str:
    if content is None:
        raise _missing(f"{where}.{name}")
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for at, part in enumerate(content):
        if part.type not in kinds:
            raise UnsupportedParameterError(
                f"{where}.{name}[{at}]: only text and file parts are supported", param=f"{where}.{name}[{at}].type"
            )
        field = "refusal" if part.type == "refusal" else "text"
        texts.append(_required(getattr(part, field), f"{where}.{name}[{at}].{field}"))
    return "\n".join(texts)


def _required(value: Value | None, param: str) -> Value:
    if value is None:
        raise _missing(param)
    return value


def _missing(param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} is required", param=param, code="missing_required_parameter")
