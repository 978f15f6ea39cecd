"""Responses about stored conversations: lists, messages, Responses API objects and their events."""

from __future__ import annotations

from typing import Any, Generic, Literal, Self, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from chatcache.conversations import tree
from chatcache.gateway.schemas.completions import OutputTokensDetails, PromptTokensDetails, TokenLogprob
from chatcache.gateway.schemas.errors import ErrorDetail

Entry = TypeVar("Entry")


class Page(msgspec.Struct, Generic[Entry]):
    """A page of a list; ask for the next one with `after` = `last_id`."""

    object: Literal["list"]
    data: list[Entry]
    first_id: str | None
    last_id: str | None
    has_more: bool


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseUsage(msgspec.Struct):
    """The prompt counts once, however many candidates share it."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def from_usage(cls, usage: tree.Usage) -> Self:
        return cls(
            input_tokens=usage.num_prompt_tokens,
            input_tokens_details=PromptTokensDetails(
                usage.num_cached_tokens, usage.num_prompt_tokens - usage.num_cached_tokens
            ),
            output_tokens=usage.num_output_tokens,
            output_tokens_details=OutputTokensDetails(usage.num_reasoning_tokens),
            total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        )


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[object]
    logprobs: list[object] | UnsetType = UNSET


class Conversation(msgspec.Struct):
    """The head of a tree of messages. `rev` grows by one with every change; `active_leaf` is the message shown last."""

    id: str
    object: Literal["conversation"]
    created_at: int
    updated_at: float
    title: str
    active_leaf: str | None
    rev: int
    metadata: dict[str, str]

    @classmethod
    def from_head(cls, head: tree.Conversation) -> Self:
        return cls(
            id=head.id,
            object="conversation",
            created_at=int(head.created_at),
            updated_at=head.updated_at,
            title=head.title,
            active_leaf=head.active_leaf,
            rev=head.rev,
            metadata=dict(head.metadata),
        )


class Snippet(msgspec.Struct):
    """A piece of a message. `marks`: [start, end] of each found word in it, in characters (code points)."""

    text: str
    marks: list[tuple[int, int]]


class Match(msgspec.Struct):
    """Where a search found its words: the message that matches best (null: only the title does), marks in the title."""

    item_id: str | None
    role: str | None
    snippet: Snippet | None
    title_marks: list[tuple[int, int]]


class FoundConversation(Conversation):
    """A conversation in a list; `match` where it was searched for."""

    match: Match | UnsetType = UNSET


class ConversationPage(msgspec.Struct):
    """A page of conversations. `after` = `next` goes on where it ended, even if the last one changes or goes."""

    object: Literal["list"]
    data: list[FoundConversation]
    first_id: str | None
    last_id: str | None
    has_more: bool
    next: str | None


class ConflictDetail(ErrorDetail):
    """`conversation`: what it is now, where the `rev` that was sent is not its own (code `stale_revision`)."""

    conversation: Conversation | UnsetType = UNSET


class Conflict(msgspec.Struct):
    """Somebody else was there first, or a response is being generated there. Retrying alone does not help."""

    error: ConflictDetail


class ImportEntry(msgspec.Struct):
    """What became of one conversation of a file. `token_exact`: it can be continued on the tokens it was made of."""

    number: int
    status: Literal["created", "extended", "unchanged", "failed"]
    id: str | UnsetType = UNSET
    source_id: str | UnsetType = UNSET
    title: str | UnsetType = UNSET
    num_items: int | UnsetType = UNSET
    token_exact: bool | UnsetType = UNSET
    skipped: dict[str, int] | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET


class Import(msgspec.Struct):
    """Counts of conversations by what became of them, of new messages, and of what in the file is no message."""

    object: Literal["conversation.import"]
    dry_run: bool
    created: int
    extended: int
    unchanged: int
    failed: int
    num_items: int
    skipped: dict[str, int]
    data: list[ImportEntry]
    has_more: bool


class Title(msgspec.Struct):
    """`generated`: the title is the model's; else it said nothing useful, or somebody was faster."""

    object: Literal["conversation.title"]
    title: str
    generated: bool
    usage: ResponseUsage
    conversation: Conversation


class Deleted(msgspec.Struct):
    id: str
    object: str
    deleted: Literal[True]


class Item(msgspec.Struct, tag_field="type", tag="message"):
    """A message of the tree. Siblings (equal `parent_id`) are candidates or branches."""

    id: str
    role: Literal["system", "user", "assistant", "tool"]
    status: str
    content: list[InputText | OutputText]
    parent_id: str | None
    response_id: str | None
    index: int
    num_tokens: int | None
    finish_reason: str | None
    created_at: int
    usage: ResponseUsage | None
    candidate: int | UnsetType = UNSET


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class Reasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """What a candidate thought first. Its place in the tree is told in lists."""

    id: str
    status: ItemStatus
    summary: list[object]
    content: list[ReasoningText]
    candidate: int
    parent_id: str | UnsetType | None = UNSET
    response_id: str | UnsetType | None = UNSET


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function that a candidate calls. `arguments`: the JSON text that the model wrote, which may be cut off."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    candidate: int
    parent_id: str | UnsetType | None = UNSET
    response_id: str | UnsetType | None = UNSET


class FunctionCallOutput(msgspec.Struct, tag_field="type", tag="function_call_output"):
    """What a function that the model called has returned."""

    id: str
    call_id: str
    output: str
    status: str
    parent_id: str | None
    response_id: str | None


ListedItem = Item | Reasoning | FunctionCall | FunctionCallOutput


class TokenSpan(msgspec.Struct):
    """Token `index` shows the characters (code points) [start, end) of the text; null where it shows nothing."""

    index: int
    start: int | None
    end: int | None


class MessageTokens(msgspec.Struct):
    object: Literal["list"]
    item_id: str
    data: list[TokenSpan]


class Alternative(msgspec.Struct):
    """A token by itself. `ends`: it would end the reply."""

    id: int
    text: str
    logprob: float
    probability: float
    ends: bool


class PlacedToken(Alternative):
    """The token that is there. `rank`: 1 for the likeliest, null beyond the 20th."""

    rank: int | None


class TokenUsage(msgspec.Struct):
    input_tokens: int
    cached_tokens: int
    copied_pages: int


class MessageToken(msgspec.Struct):
    """Raw probabilities of the model, as at temperature 1. `alternatives`: the likeliest first, whatever was said."""

    object: Literal["message.token"]
    index: int
    token: PlacedToken
    alternatives: list[Alternative]
    usage: TokenUsage


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
    """One of OpenAI's events, as docs/responses.md lists them; the `event:` line repeats `type`."""

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
