"""Response bodies of stored conversations, their messages and the Responses API."""

from __future__ import annotations

from typing import Any, Generic, Literal, Self, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from chatcache.conversations import store, tree
from chatcache.gateway.schemas.completions import OutputTokensDetails, PromptTokensDetails, TokenLogprob
from chatcache.gateway.schemas.server import CacheLookup, ErrorDetail, MissCause

Entry = TypeVar("Entry")


class Page(msgspec.Struct, Generic[Entry]):
    """One page of a list. The next page has `after` = `last_id`. `total`: the entries of all pages, where counted."""

    object: Literal["list"]
    data: list[Entry]
    first_id: str | None
    last_id: str | None
    has_more: bool
    total: int | msgspec.UnsetType = msgspec.UNSET


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseUsage(msgspec.Struct):
    """Token counts. The prompt counts once, also with several candidates."""

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
    """The head of a message tree.

    `rev` grows by one with every change. `active_leaf`: end of the active path.
    """

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
    """An excerpt of a message.

    `marks`: [start, end] of each found word, in characters (code points).
    """

    text: str
    marks: list[tuple[int, int]]


class Match(msgspec.Struct):
    """Where a search found its words.

    `item_id`: the best message, null if only the title matches.
    """

    item_id: str | None
    role: str | None
    snippet: Snippet | None
    title_marks: list[tuple[int, int]]


class FoundConversation(Conversation):
    """A conversation in a list. `match`: in the results of a search."""

    match: Match | UnsetType = UNSET


class ConversationPage(msgspec.Struct):
    """A page of conversations.

    The next page has `after` = `next`, which stays valid if the last entry changes.
    """

    object: Literal["list"]
    data: list[FoundConversation]
    first_id: str | None
    last_id: str | None
    has_more: bool
    next: str | None


class ConflictDetail(ErrorDetail):
    """The description of a conflict.

    `conversation`: its present version, with code `stale_revision`.
    """

    conversation: Conversation | UnsetType = UNSET


class Conflict(msgspec.Struct):
    """A conflict with another client or a running response. Retrying alone does not help."""

    error: ConflictDetail


class ImportEntry(msgspec.Struct):
    """The result for one conversation of a file.

    `token_exact`: it can be continued on its original token ids.
    """

    number: int
    status: Literal["created", "extended", "unchanged", "failed"]
    id: str | UnsetType = UNSET
    source_id: str | UnsetType = UNSET
    title: str | UnsetType = UNSET
    num_items: int | UnsetType = UNSET
    token_exact: bool | UnsetType = UNSET
    skipped: dict[str, int] | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET


class Attachment(msgspec.Struct):
    """The text of a file.

    `num_pages`: of a PDF. `text`: the block to put into a message, `num_chars` characters of it from the file;
    `num_tokens`: its length alone.
    """

    object: Literal["attachment"]
    filename: str
    num_bytes: int
    num_pages: int | None
    num_chars: int
    num_tokens: int
    text: str


class Import(msgspec.Struct):
    """The result of an import: number of conversations by outcome, and their entries.

    `num_items`: new messages. `skipped`: number of parts of the file that are not messages, by kind.
    """

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
    """The result of generating a title.

    `generated` is false if the model gave no usable title, or the title was changed meanwhile.
    """

    object: Literal["conversation.title"]
    title: str
    generated: bool
    usage: ResponseUsage
    conversation: Conversation


class Share(msgspec.Struct):
    """A link to one branch. `path`: its address on this server, which is not stored and never returned again."""

    object: Literal["conversation.share"]
    id: str
    leaf: str
    path: str
    conversation: Conversation


class SavedPrompt(msgspec.Struct):
    """A text to start a message with. `variables`: the names that the text has as `{{name}}`, in their order."""

    object: Literal["prompt"]
    name: str
    text: str
    description: str
    variables: list[str]
    created_at: int
    updated_at: int

    @classmethod
    def of(cls, prompt: store.SavedPrompt) -> Self:
        times = (int(prompt.created_at), int(prompt.updated_at))
        return cls("prompt", prompt.name, prompt.text, prompt.description, prompt.variables, *times)


class SavedPrompts(msgspec.Struct):
    """All saved prompts of the tenant, by name."""

    object: Literal["list"]
    data: list[SavedPrompt]


class Deleted(msgspec.Struct):
    id: str
    object: str
    deleted: Literal[True]


class Receipt(msgspec.Struct):
    """The effect of a cancel: tokens generated after it, pages freed by it, and its latency."""

    tokens_after_stop: int
    pages_freed: int
    stop_latency_ms: float


class Statistics(msgspec.Struct):
    """Figures of a response, measured on the server.

    `first_token_ms`: from the request to the first output. `decode_ms`: from there to the end. `copied_pages` and
    `miss` need `explain`. `fork_at`: number of tokens shared with the reply that this one continues. `receipt`: of a
    cancelled response.
    """

    first_token_ms: float | None
    decode_ms: float | None
    copied_pages: int | None = None
    miss: MissCause | None = None
    fork_at: int | None = None
    receipt: Receipt | None = None


class IncompleteDetails(msgspec.Struct):
    reason: str


class Item(msgspec.Struct, tag_field="type", tag="message"):
    """A message of the tree. Messages with the same `parent_id` are candidates or branches.

    `incomplete_details` and `statistics` are those of the response that generated it. In the list of all branches, a
    message has the `calls` of functions that it makes, and the output of a function the `call_id` of its call.
    """

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
    incomplete_details: IncompleteDetails | UnsetType = UNSET
    statistics: Statistics | UnsetType = UNSET
    calls: list[FunctionCall] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    text: str


class Reasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The reasoning of a candidate, in `summary` if the request asked for one, else in `content`.

    `parent_id` and `response_id` are present in lists.
    """

    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]
    candidate: int
    parent_id: str | UnsetType | None = UNSET
    response_id: str | UnsetType | None = UNSET


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function call of a candidate.

    `arguments`: the generated JSON text, which may be cut off. `namespace`: of a function of a namespace.
    """

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    candidate: int
    parent_id: str | UnsetType | None = UNSET
    response_id: str | UnsetType | None = UNSET
    namespace: str | UnsetType = UNSET


class FunctionCallOutput(msgspec.Struct, tag_field="type", tag="function_call_output"):
    """The result of a function that the model called."""

    id: str
    call_id: str
    output: str
    status: str
    parent_id: str | None
    response_id: str | None


ListedItem = Item | Reasoning | FunctionCall | FunctionCallOutput


class TokenSpan(msgspec.Struct):
    """The characters (code points) [start, end) of one token in the text; null if it has none.

    `token`, `alternatives` (most likely first): with `top` in the query.
    """

    index: int
    start: int | None
    end: int | None
    token: PlacedToken | UnsetType = UNSET
    alternatives: list[Alternative] | UnsetType = UNSET


class MessageTokens(msgspec.Struct):
    """`usage`: of the pass that computed the probabilities, with `top` in the query."""

    object: Literal["list"]
    item_id: str
    data: list[TokenSpan]
    usage: TokenUsage | UnsetType = UNSET


class Alternative(msgspec.Struct):
    """A token that the model could have generated. `ends`: it would have ended the reply."""

    id: int
    text: str
    logprob: float
    probability: float
    ends: bool


class PlacedToken(Alternative):
    """The token that the message has at the position.

    `rank`: 1 for the most likely token, null beyond 20.
    """

    rank: int | None


class TokenUsage(msgspec.Struct):
    input_tokens: int
    cached_tokens: int
    copied_pages: int


class MessageToken(msgspec.Struct):
    """The most likely tokens at one position of a message, with probabilities at temperature 1.

    `alternatives`: most likely first; may include the token itself.
    """

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
    """The message of a candidate.

    `score`: with ranked candidates (beams, best_of, distinct). `finish_reason`: at the end.
    `candidate`: its index among the `n` candidates of the response.
    """

    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[ResponseText]
    candidate: int | UnsetType = UNSET
    finish_reason: str | UnsetType | None = UNSET
    score: float | UnsetType = UNSET


class Compaction(msgspec.Struct, tag_field="type", tag="compaction"):
    """A summary that replaces the items before it in the `input` of later requests; clients need not read it."""

    id: str
    encrypted_content: str


ReplyItem = OutputMessage | Reasoning | FunctionCall
OutputItem = ReplyItem | Compaction


class RetainedMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A user's message that a compaction keeps."""

    id: str
    role: Literal["user"]
    status: Literal["completed"]
    content: list[InputText]


class CompactedResponse(msgspec.Struct):
    """The result of a compaction: the `input` that replaces the conversation."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[RetainedMessage | Compaction]
    usage: ResponseUsage


class ResponseRef(msgspec.Struct):
    id: str


class ResponseFailure(msgspec.Struct):
    code: str
    message: str


class PromptCacheDiagnostics(msgspec.Struct, omit_defaults=True):
    """How the prompt reuses that of the compared response. `lookup`: what the cache held of this one.

    `cache_miss`: the prompts differ, and the other fields say how. `unavailable`: neither tools nor input differ; the
    `lookup` has the reason.
    """

    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]
    lookup: CacheLookup
    reason: Literal["input_changed", "tools_changed", "context_compacted"] | UnsetType = UNSET
    cache_missed_tokens: int | UnsetType = UNSET
    comparison_reusable_tokens: int | UnsetType = UNSET


class ReasoningSettings(msgspec.Struct):
    """`effort`: the level in effect, null if the request has none or the model has no levels. `summary`: as asked."""

    effort: str | None
    summary: str | None


class Response(msgspec.Struct):
    """A response.

    `receipt`: only if the response was cancelled: how quickly it stopped and how many pages that freed.
    `saved`: false while the store has not saved the output. `omitted`: values of `include` whose data the server
    does not have any more.

    The fields after `conversation` repeat the request.
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
    reasoning: ReasoningSettings
    thinking_token_budget: int | UnsetType = UNSET
    distinct: bool | UnsetType = UNSET
    beam_width: int | UnsetType = UNSET
    length_penalty: float | UnsetType = UNSET
    num_beam_groups: int | UnsetType = UNSET
    diversity_penalty: float | UnsetType = UNSET
    prompt_cache_diagnostics: PromptCacheDiagnostics | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET
    saved: Literal[False] | UnsetType = UNSET
    omitted: list[str] | UnsetType = UNSET


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(msgspec.Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseEvent(msgspec.Struct):
    """One of OpenAI's events, as docs/responses.md lists them.

    The `event:` line of SSE repeats `type`.
    """

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    item: dict[str, Any] | UnsetType = UNSET
    part: dict[str, Any] | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET
    statistics: Statistics | UnsetType = UNSET
    saved: Literal[False] | UnsetType = UNSET
