"""What the routes of stored things answer: types for `openapi.json` and its tests, as in `answers`."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from chatcache.gateway.answers import ErrorDetail, OutputTokensDetails, PromptTokensDetails

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseUsage(msgspec.Struct):
    """The prompt counts once, however many candidates share it."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


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
