"""Messages and tools in request bodies."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAX_PARTS = 4096
MAX_CALLS = 128
MAX_TOOLS = 128

FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[str, Meta(min_length=1, max_length=128)]


class Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


Parts = Annotated[list[Part], Meta(max_length=MAX_PARTS)]


class CalledFields(msgspec.Struct, frozen=True):
    """The function of a call, its arguments as the model wrote them. A name that it made up is history all the same."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str


class CallFields(msgspec.Struct, frozen=True):
    """A call in an assistant's message."""

    id: CallId
    function: CalledFields | None = None
    type: str = "function"


class MessageFields(msgspec.Struct, frozen=True):
    """A chat message or a Responses input item; which fields it needs its `role` or `type` tells.

    Responses: `function_call` has `call_id`, `name` and `arguments`; `function_call_output` `call_id` and `output`;
    `reasoning` `content` or `summary`.
    """

    role: str | None = None
    content: str | Parts | None = None
    type: str = "message"
    tool_calls: Annotated[list[CallFields], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    call_id: CallId | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None


class FunctionFields(msgspec.Struct, frozen=True):
    """A function that may be called. `parameters`: a JSON schema of an object; with `strict` calls are held to it."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(msgspec.Struct, frozen=True):
    """A tool: its `function` in chat completions, the function's own fields in Responses."""

    type: str = "function"
    function: FunctionFields | None = None
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    """One tool of `allowed_tools`."""

    type: str = "function"
    function: NamedFunction | None = None
    name: str | None = None


class AllowedTools(msgspec.Struct, frozen=True):
    mode: str
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoiceFields(msgspec.Struct, frozen=True):
    """A named function, or the tools that may be called now (`allowed_tools`)."""

    type: str
    function: NamedFunction | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None
    mode: str | None = None
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None


Tools = Annotated[list[ToolFields], Meta(max_length=MAX_TOOLS)]
