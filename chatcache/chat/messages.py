"""Messages with structure: what an assistant called and thought, and what its calls returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chatcache.chat.prompt import Message
from chatcache.chat.tree import Item, ReplyParts, ToolCall
from chatcache.errors import InvalidRequest
from chatcache.text.verbatim import VerbatimJson, arguments_of

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


def message_of(item: Item) -> Message:
    if item.role == "assistant":
        return assistant_message(item.text, item.parts.reasoning, item.parts.tool_calls)
    if item.role == TOOL:
        return tool_message(item.text, item.parts.call_id)
    return Message(role=item.role, content=item.text)


def parts_of(message: Message) -> ReplyParts:
    """What a stored item keeps of a message beside its text."""
    return ReplyParts(
        reasoning=message.get("reasoning_content", ""),
        tool_calls=calls_of(message),
        call_id=message.get("tool_call_id", ""),
    )


def calls_of(message: Message) -> tuple[ToolCall, ...]:
    return tuple(_call(call) for call in message.get("tool_calls", ()))


def linked(messages: Sequence[Message], param: str, num_old: int = 0) -> list[Message]:
    """Name the function in every answer to a call, as some templates want it.

    Raises: InvalidRequest for an answer to a call that was not made, unless it is among the first `num_old` messages.
    """
    names: dict[str, str] = {}
    found: list[Message] = []
    for message in messages:
        names.update({call.call_id: call.name for call in calls_of(message)})
        if message["role"] == TOOL:
            call_id = message.get("tool_call_id", "")
            if call_id in names:
                message = Message(role=TOOL, content=message["content"], tool_call_id=call_id, name=names[call_id])
            elif len(found) >= num_old:
                raise InvalidRequest(f"{param}: no function was called with the id {call_id[:64]!r}", param=param)
        found.append(message)
    return found


def said(text: str, calls: Sequence[ToolCall]) -> str:
    """What tells one reply from another: its text and calls, as a client sends them back."""
    if not calls:
        return text
    return "\0".join((text.strip(), *(part for call in calls for part in (call.name, call.arguments))))


def _call_json(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments_of(call.arguments)}
    return {"id": call.call_id, "type": "function", "function": function}


def _call(call: dict[str, Any]) -> ToolCall:
    arguments = call["function"]["arguments"]
    source = arguments.source if isinstance(arguments, VerbatimJson) else arguments
    return ToolCall(call["id"], call["function"]["name"], source)
