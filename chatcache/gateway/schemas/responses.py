"""What the stateless routes answer, as types: `openapi.json` is made of them, and tests hold real answers to them.

Nothing here builds an answer. A field with a default may be absent; one without is always there.

What the routes of stored things answer: types for `openapi.json` and its tests, as in `answers`.

What the routes of responses answer: types for `openapi.json` and its tests, as in `answers`.

What the routes of the cache answer: types for `openapi.json` and its tests, as in `answers`.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

Entry = TypeVar("Entry")
FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorDetail(msgspec.Struct):
    """`param` is the field at fault, `code` a stable name for the cause."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """The one form of every refusal and failure."""

    error: ErrorDetail


class Page(msgspec.Struct, Generic[Entry]):
    """A page of a list; ask for the next one with `after` = `last_id`."""

    object: Literal["list"]
    data: list[Entry]
    first_id: str | None
    last_id: str | None
    has_more: bool


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens` came from KV pages computed before."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """The prompt counts once, however many candidates share it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: OutputTokensDetails


class TopLogprob(msgspec.Struct):
    """-9999 stands for impossible."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """`bytes` join to the text even where a token is half a character."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None


class PromptToken(msgspec.Struct):
    """`rank` is null for a token beyond the alternatives asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CalledFunction(msgspec.Struct):
    """`arguments`: the JSON text that the model wrote, which may be cut off."""

    name: str
    arguments: str


class ChatCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct):
    """`content` is null where there are only calls. `reasoning` repeats `reasoning_content`."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """`score`: of ranked candidates (beams, best_of). `token_ids`: with return_token_ids."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    score: float | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CalledFunctionDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ChatCallDelta(msgspec.Struct):
    """More of call `index`. The first one of each has its id, type and name."""

    index: int
    function: CalledFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """What this chunk adds. The first one of each choice has the role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    score: float | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct):
    """One choice a chunk; none in the last one, which has the usage if stream_options asked for it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists; nothing predicts a prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """`finish_reason` is null, and `stop_reason` absent, in all chunks of a choice but its last."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    score: float | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    """Also each event of the stream; `usage` is null in those but the last."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None


class Model(msgspec.Struct):
    """`max_model_len` is null until the model is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class Models(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class Tokens(msgspec.Struct):
    """`token_strs`: with return_token_strs."""

    count: int
    tokens: list[int]
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class Text(msgspec.Struct):
    prompt: str


class Version(msgspec.Struct):
    version: str


class Session(msgspec.Struct):
    """Who one is. `key_id` is null on an open server; `expires_at` (since 1970) is the cookie's, null with a key."""

    object: Literal["session"]
    key_id: str | None
    tenant: str
    user: str
    is_admin: bool
    expires_at: int | None


class SessionDeleted(msgspec.Struct):
    object: Literal["session"]
    deleted: bool


class Alive(msgspec.Struct):
    status: Literal["alive"]


class Ready(msgspec.Struct):
    """The load is shown to who has a key, and to all where there are none."""

    status: Literal["ready"]
    model: str
    max_model_len: int
    num_running: int | UnsetType = UNSET
    num_waiting: int | UnsetType = UNSET
    kv_pages: int | UnsetType = UNSET
    kv_pages_in_use: int | UnsetType = UNSET


class NotReady(msgspec.Struct):
    """`progress`: of loading, 0 to 1."""

    status: Literal["loading", "unavailable"]
    model: str
    detail: str
    progress: float
    error: ErrorDetail


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
