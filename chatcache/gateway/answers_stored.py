"""What the routes of stored things and of the cache answer: types for `openapi.json` and its tests, as in `answers`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

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


class CachedPage(msgspec.Struct):
    index: int
    tokens: int
    state: str
    public: bool


class CacheMiss(msgspec.Struct):
    """Why the first page that is missing is missing; `cached_text` is what the cache holds there instead."""

    reason: Literal["never_computed", "evicted", "other_namespace", "diverged", "template_changed"]
    at_token: int
    detail: str
    text: str
    cached_text: str | None


class CachedMessage(msgspec.Struct):
    index: int
    role: str
    tokens: int
    cached_tokens: int


class CacheDivergence(msgspec.Struct):
    """Where the chat template writes history otherwise than it was when the latest reply was generated."""

    reason: Literal["template_changed"]
    message: int
    at_char: int
    at_token: int
    text: str


class CacheExplanation(msgspec.Struct):
    """What of a prompt is computed already. `messages` is null for raw prompts, and where a template mixes messages."""

    object: Literal["cache.explanation"]
    model: str
    prompt_tokens: int
    cached_tokens: int
    public_tokens: int
    page_size: int
    pages: list[CachedPage]
    miss: CacheMiss | None
    divergence: CacheDivergence | None
    messages: list[CachedMessage] | None


class Charge(msgspec.Struct):
    """Pages held; a page that k requests share counts 1/k for each."""

    id: str
    pages: float


class Pool(msgspec.Struct):
    """Every page in one state. `waste`: the share of held cells without a token."""

    page_size: int
    active: int
    shared: int
    cached: int
    free: int
    waste: float
    host_pages: int
    host_pages_in_use: int


class CacheMap(msgspec.Struct):
    """`cells`: one letter for every `pages_per_cell` pages, the busiest page's.

    f: free; i: idle (cached, goes when room is needed); o: another tenant's; p: pinned; a: in the table of one branch;
    s: shared by several.
    """

    object: Literal["cache.map"]
    page_size: int
    num_pages: int
    pages_per_cell: int
    cells: Annotated[str, Meta(max_length=4096, pattern="^[fiopas]*$")]


class Warmth(msgspec.Struct):
    """`cached_tokens` of a conversation's `tokens` need not be computed for its next turn."""

    conversation_id: str
    tokens: int
    cached_tokens: int


class CacheWarmth(msgspec.Struct):
    """Of the conversations that were asked about and are there, in the same order."""

    object: Literal["list"]
    data: list[Warmth]


class CacheAccounts(msgspec.Struct):
    """`pool`: on a server without keys, where everybody sees everything."""

    object: Literal["cache.accounts"]
    scope: Literal["server", "tenant"]
    pages_in_use: float
    page_bytes: int
    requests: list[Charge]
    conversations: list[Charge]
    pool: Pool | UnsetType = UNSET
