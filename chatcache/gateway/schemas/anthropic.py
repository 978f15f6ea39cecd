"""Request and response bodies, stream events and errors of Anthropic's Messages API.

`fields.unknown_fields` names the fields that are not listed here, and tools of other types, as ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from chatcache.gateway.schemas.requests import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    CallId,
    ShortText,
    StopString,
)
from chatcache.gateway.schemas.server import CacheLookup
from chatcache.types.request import MAX_STOP_STRINGS

_INT32_MAX = 2**31 - 1


class CacheControl(msgspec.Struct, frozen=True):
    """A cache breakpoint. Every prompt is cached in pages, so it only changes how the usage is reported."""

    type: str = "ephemeral"


class ResultBlock(msgspec.Struct, frozen=True):
    """A content block inside a tool result."""

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None


class DocumentSource(msgspec.Struct, frozen=True):
    """The content of a document; `type` text has it as `data`."""

    type: str
    media_type: str | None = None
    data: str | None = None


class ContentBlock(msgspec.Struct, frozen=True):
    """A content block of a message. Its `type` determines the required fields.

    `text`: `text`. `thinking`: `thinking`. `tool_use`: `id`, `name` and `input`. `tool_result`: `tool_use_id`.
    `document`: `source`, and possibly `title`.
    """

    # Of answers that are sent back.
    without_effect: ClassVar = frozenset({"signature", "citations", "caller", "data"})

    type: str
    text: str | None = None
    thinking: str | None = None
    id: CallId | None = None
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    input: dict[str, Any] | None = None
    tool_use_id: CallId | None = None
    content: str | Annotated[list[ResultBlock], Meta(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None
    source: DocumentSource | None = None
    title: str | None = None
    cache_control: CacheControl | None = None


class MessageParam(msgspec.Struct, frozen=True):
    """A message of the conversation. A `system` message may stand anywhere."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Meta(max_length=MAX_PARTS)]


class SystemBlock(msgspec.Struct, frozen=True):
    """A text block of the system prompt."""

    text: str
    type: Literal["text"] = "text"
    cache_control: CacheControl | None = None


class ToolParam(msgspec.Struct, frozen=True):
    """A function that the model may call. Tools of types that are not executed are ignored.

    `input_schema`: a JSON schema of an object, enforced with `strict`.
    """

    executed_types: ClassVar = frozenset({"custom", "function", None})

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")] | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoiceParam(msgspec.Struct, frozen=True):
    """Which tools the model calls: as it likes, at least one, the named one, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """The JSON schema of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any] | bool


class OutputConfig(msgspec.Struct, frozen=True):
    """The format of the answer, and the effort of the reasoning before it."""

    effort: ShortText | None = None
    format: OutputFormat | None = None


class ThinkingParam(msgspec.Struct, frozen=True):
    """Whether the model reasons. `budget_tokens`: the most tokens of reasoning, after which it is ended."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0, le=_INT32_MAX)] | None = None


class ContextEdit(msgspec.Struct, frozen=True):
    """An edit of the history. `clear_thinking_20251015` with `keep` "all" keeps the reasoning of all replies."""

    type: str
    keep: Any = None


class ContextManagement(msgspec.Struct, frozen=True):
    edits: Annotated[list[ContextEdit], Meta(max_length=MAX_TOOLS)] | None = None


class ThreadParam(msgspec.Struct, frozen=True):
    """A conversation that the server holds, which this server does not: `create` is named as ignored.

    `continue` is refused as an unknown thread, whereupon clients send the whole history.
    """

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class DiagnosticsParam(msgspec.Struct, frozen=True):
    """The message whose prompt is compared with this one's; null on the first turn, to have its prompt remembered."""

    previous_message_id: CallId | None = None


class MessagesPrompt(msgspec.Struct, frozen=True):
    """The fields that determine the prompt; `count_tokens` takes the same ones.

    `output_format`: the name of `output_config.format` in the beta version of structured outputs.
    """

    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: ShortText | None = None
    system: str | Annotated[list[SystemBlock], Meta(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[ToolParam], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None
    thread: ThreadParam | None = None
    thinking: ThinkingParam | None = None
    context_management: ContextManagement | None = None


class MessagesOptions(msgspec.Struct, frozen=True):
    """The other fields of a message request.

    `max_tokens`: 0 computes and caches the prompt only; more than the context holds is reduced to what fits.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=_INT32_MAX)] | None = None
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=_INT32_MAX)] | None = None
    metadata: dict[str, Any] | None = None
    diagnostics: DiagnosticsParam | None = None


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of the model. `signature`: a constant, because nothing is signed here."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a function. `input`: its arguments; {} if they are cut off or no JSON object."""

    id: str
    name: str
    input: dict[str, Any]


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ThinkingTokens(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Token counts. The prompt is the sum of the three input counts.

    `cache_read_input_tokens`: prompt tokens whose KV pages were in the cache. `cache_creation_input_tokens`: prompt
    tokens computed for a request with `cache_control`; without it they are `input_tokens`.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class CacheMissReason(msgspec.Struct):
    """The first difference from the earlier prompt. `cache_missed_input_tokens`: its tokens that were not reused.

    `unavailable`: neither tools nor messages differ; the `lookup` has the reason.
    """

    type: Literal["system_changed", "tools_changed", "messages_changed", "previous_message_not_found", "unavailable"]
    cache_missed_input_tokens: int | UnsetType = UNSET


class MessageDiagnostics(msgspec.Struct):
    """Why the prompt of the earlier message could not be reused. `lookup`: what the cache held of this one."""

    cache_miss_reason: CacheMissReason
    lookup: CacheLookup


class AssistantMessage(msgspec.Struct, tag_field="type", tag="message"):
    """The answer to a message request.

    `diagnostics`: present if the request has it; null if nothing differs from the earlier prompt.
    """

    id: str
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    diagnostics: MessageDiagnostics | UnsetType | None = UNSET


class TokenCount(msgspec.Struct):
    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: AssistantMessage


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: OutputBlock


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Keeps the connection alive; has no meaning."""


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """A part of the arguments' JSON text."""

    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """Why the message ended, and the final usage."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


class ErrorCode(msgspec.Struct):
    error_code: str


class MessagesErrorDetail(msgspec.Struct):
    """`details`: for errors that clients recover from by themselves."""

    type: str
    message: str
    details: ErrorCode | UnsetType = UNSET


class MessagesError(msgspec.Struct, tag_field="type", tag="error"):
    """The body of every error response of the Messages API, and the `error` event of its streams."""

    error: MessagesErrorDetail
    request_id: str | None


MessagesEvent = (
    MessageStart
    | ContentBlockStart
    | Ping
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | MessagesError
)
