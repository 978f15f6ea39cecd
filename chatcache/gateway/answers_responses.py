"""What the routes of responses answer: types for `openapi.json` and its tests, as in `answers`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from chatcache.gateway.answers import TokenLogprob
from chatcache.gateway.answers_stored import FunctionCall, ItemStatus, Reasoning, ResponseUsage


class ResponseText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[object]
    logprobs: list[TokenLogprob]


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """What a candidate says. `score`: of ranked ones (beams, best_of, distinct); `finish_reason`: once it is finished.

    `candidate`: which of the response's `n` it is.
    """

    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[ResponseText]
    candidate: int | UnsetType = UNSET
    finish_reason: str | UnsetType | None = UNSET
    score: float | UnsetType = UNSET


OutputItem = OutputMessage | Reasoning | FunctionCall


class ResponseRef(msgspec.Struct):
    id: str


class ResponseFailure(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: str


class Receipt(msgspec.Struct):
    """What a cancel cost and gave back."""

    tokens_after_stop: int
    pages_freed: int
    stop_latency_ms: float


class Response(msgspec.Struct):
    """A response. `receipt`: of one that was cancelled. `saved`: false while the store has not taken what it said.

    What follows `conversation` is repeated from the request.
    """

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    previous_response_id: str | None
    conversation: ResponseRef | None
    input_item_ids: list[str]
    forked_item_id: str | None
    parent_item_id: str | None
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    truncation: Literal["disabled"]
    text: dict[str, Any]
    store: bool
    background: bool
    metadata: dict[str, str]
    max_output_tokens: int | None
    top_logprobs: int
    n: int
    temperature: float | None
    top_p: float | None
    distinct: bool | UnsetType = UNSET
    beam_width: int | UnsetType = UNSET
    length_penalty: float | UnsetType = UNSET
    num_beam_groups: int | UnsetType = UNSET
    diversity_penalty: float | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET
    saved: Literal[False] | UnsetType = UNSET


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(msgspec.Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseEvent(msgspec.Struct):
    """One of OpenAI's events, as the README lists them; the `event:` line repeats `type`."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    item: dict[str, Any] | UnsetType = UNSET
    part: dict[str, Any] | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET
    saved: Literal[False] | UnsetType = UNSET
