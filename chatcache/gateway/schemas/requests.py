"""Types of request bodies and query strings: names, bounds and defaults of all fields.

`fields.parse_fields` reads one body as several structs: those of its route, and the sampling fields that routes share.
`None` means absent, because many clients send null for fields that are not set. `fields.unknown_fields` names the other
fields of a struct, except those in its class variable `without_effect`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from chatcache.types.request import MAX_N, MAX_PRIORITY, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS

MAX_PARTS = 4096
MAX_CALLS = 128
MAX_TOOLS = 128
MAX_PROMPT_CHARS = 16_384  # of a saved prompt
MAX_DESCRIPTION_CHARS = 200

FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
PromptName = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,63}$")]
PromptText = Annotated[str, Meta(min_length=1, max_length=MAX_PROMPT_CHARS)]
PromptDescription = Annotated[str, Meta(max_length=MAX_DESCRIPTION_CHARS)]
CallId = Annotated[str, Meta(min_length=1, max_length=128)]


class FileFields(msgspec.Struct, frozen=True):
    """A text file or PDF, in base64 or as a data URL. `file_id`, `file_url`: files are not fetched."""

    without_effect: ClassVar = frozenset({"detail"})

    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None
    file_url: str | None = None


class Part(msgspec.Struct, frozen=True):
    """A part of a message. `refusal`: the text of a part of type `refusal`.

    A part of type `file` has a `file`; a part of type `input_file` has the fields of a file itself.
    """

    # Of output parts that are sent back; of input files.
    without_effect: ClassVar = frozenset({"annotations", "logprobs", "detail"})

    type: str
    text: str | None = None
    refusal: str | None = None
    file: FileFields | None = None
    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None
    file_url: str | None = None


Parts = Annotated[list[Part], Meta(max_length=MAX_PARTS)]


class CalledFields(msgspec.Struct, frozen=True):
    """A function call in the history. The name may be one that the model invented."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str


class CallFields(msgspec.Struct, frozen=True):
    """A call in an assistant's message."""

    without_effect: ClassVar = frozenset({"index"})

    id: CallId
    function: CalledFields | None = None
    type: str = "function"


class MessageFields(msgspec.Struct, frozen=True):
    """A chat message or a Responses input item.

    Its `role` or `type` determines the required fields.

    Responses: `function_call` has `call_id`, `name`, `arguments` and, for a function of a namespace, `namespace`;
    `function_call_output` `call_id` and `output`; `reasoning` `content` or `summary`; `item_reference` the `id` of a
    stored item; `compaction` has `encrypted_content`; a `compaction_trigger` is the last item.
    """

    # Of output items and answers that are sent back.
    without_effect: ClassVar = frozenset(
        {"status", "phase", "candidate", "finish_reason", "score", "annotations", "parent_id", "response_id"}
    )

    role: str | None = None
    content: str | Parts | None = None
    type: str | None = None
    id: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[CallFields], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    call_id: CallId | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None


class FunctionFields(msgspec.Struct, frozen=True):
    """A function that the model may call.

    `parameters`: a JSON schema of an object, enforced with `strict`.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(msgspec.Struct, frozen=True):
    """A tool: its `function` in chat completions, the function's own fields in Responses.

    `tools`: the functions of a tool of type `namespace`. Tools of types that are not executed are ignored.
    """

    executed_types: ClassVar = frozenset({"function", "namespace"})

    type: str = "function"
    function: FunctionFields | None = None
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: Annotated[list[ToolFields], Meta(max_length=MAX_TOOLS)] | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    """One tool of `allowed_tools`. Those of types that are not executed are ignored."""

    executed_types: ClassVar = frozenset({"function"})

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


MAX_MESSAGES = 4096
MAX_NEW_ITEMS = 1024  # that one request adds to a conversation: other users wait while they are stored
MAX_PROMPTS = 64
MAX_BAD_WORDS = 64
MAX_ALLOWED_TOKEN_IDS = 300_000  # more than any vocabulary has
MAX_WARMTH = 100  # conversations of one question
_INT32_MAX = 2**31 - 1

Count = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Candidates = Annotated[int, Meta(ge=1, le=MAX_N)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
ShortText = Annotated[str, Meta(max_length=512)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
SchemaName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
IdempotencyKey = Annotated[str, Meta(pattern="^[!-~]{1,255}$")]
Id = Annotated[str, Meta(min_length=1, max_length=128)]


class StructuredFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: the constraint on the output, in exactly one of these fields."""

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class JsonSchemaFields(msgspec.Struct, frozen=True):
    """OpenAI's named JSON schema. It is enforced; keywords that cannot be are an error only with `strict`."""

    name: SchemaName | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's `response_format`.

    `schema`, which other servers read here, is refused, because ignoring it would change the result.
    """

    type: str
    json_schema: JsonSchemaFields | None = None
    schema: Any = None


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """`text.format` of the Responses API: `response_format` without the nested `json_schema`."""

    type: str
    name: SchemaName | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """`text` of the Responses API: the format of the output."""

    format: TextFormat | None = None


class SamplingFields(msgspec.Struct, frozen=True):
    """The sampling and beam search fields that all generating routes accept."""

    n: Candidates | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.001, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_INT32_MAX)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    beam_width: Candidates | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    num_beam_groups: Candidates | None = None
    diversity_penalty: Annotated[float, Meta(ge=0, le=100)] | None = None
    distinct: bool | None = None
    best_of: Candidates | None = None
    structured_outputs: StructuredFields | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    """`reasoning` of the Responses API: the effort, `none` to `max`."""

    effort: ShortText | None = None


class SummarizedReasoning(ReasoningOptions, frozen=True):
    """`reasoning` of a response. With a `summary` of any kind, clients get the reasoning itself as its summary."""

    summary: Literal["auto", "concise", "detailed"] | None = None


class ThinkingFields(msgspec.Struct, frozen=True):
    """The fields that control the model's reasoning.

    `reasoning_effort`, `reasoning.effort`: none, minimal, low, medium, high, xhigh or max. `enable_thinking`: the
    switch of the chat template. `thinking_token_budget`: the most tokens of reasoning, after which it is ended.
    `preserve_thinking`: earlier replies keep their reasoning in the prompt. `chat_template_kwargs`: variables of the
    chat template.
    """

    reasoning_effort: ShortText | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=_INT32_MAX)] | None = None
    preserve_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponseThinkingFields(ThinkingFields, frozen=True):
    reasoning: SummarizedReasoning | None = None

    @property
    def summary(self) -> str | None:
        """The kind of summary that the request asks for."""
        return self.reasoning.summary if self.reasoning is not None else None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class CompletionBase(msgspec.Struct, frozen=True):
    """The fields that chat completions and completions have in common."""

    model: ShortText | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


class ChatFields(msgspec.Struct, frozen=True):
    """`include_reasoning`: false leaves the reasoning out of the answer (vLLM)."""

    messages: Annotated[list[MessageFields], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: Tools | None = None
    tool_choice: str | ToolChoiceFields | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    include_reasoning: bool | None = None


class CompletionFields(msgspec.Struct, frozen=True):
    """One prompt or several. `max_tokens`: 0 only with `echo`, for the prompt alone."""

    prompt: str | Annotated[list[str | int | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, le=_INT32_MAX)] | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None


class ConversationRef(msgspec.Struct, frozen=True):
    id: Id


class PromptCacheOptions(msgspec.Struct, frozen=True):
    """`comparison_response_id`: a response whose prompt is compared with this one's, for a diagnosis.

    `prewarm`: compute the prompt only, as with `generate: false`.
    """

    without_effect: ClassVar = frozenset({"mode", "ttl"})

    comparison_response_id: Id | None = None
    prewarm: bool | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream of events. Events are never padded, so `include_obfuscation` has no effect."""

    include_obfuscation: bool | None = None


class ResponseFields(msgspec.Struct, frozen=True):
    """Fields of a response request, besides the sampling fields."""

    model: ShortText | None = None
    input: str | Annotated[list[MessageFields], Meta(max_length=MAX_MESSAGES)] | None = None
    stream_options: ResponseStreamOptions | None = None
    instructions: str | None = None
    tools: Tools | None = None
    tool_choice: str | ToolChoiceFields | None = None
    parallel_tool_calls: bool | None = None
    conversation: Id | ConversationRef | None = None
    previous_response_id: Id | None = None
    previous_item_id: Id | None = None
    fork_at: Annotated[int, Meta(ge=0, le=_INT32_MAX)] | None = None
    fork_with: TokenId | None = None
    continue_final_message: bool | None = None
    rev: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    store: bool | None = None
    max_output_tokens: Count | None = None
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[ShortText], Meta(max_length=16)] | None = None
    metadata: Annotated[dict[ShortText, ShortText], Meta(max_length=16)] | None = None
    background: bool | None = None
    generate: bool | None = None
    stream_id: Id | None = None
    stream_beams: bool | None = None
    explain: bool | None = None
    text: TextOptions | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    prompt_cache_options: PromptCacheOptions | None = None


class CompactFields(msgspec.Struct, frozen=True):
    """A conversation to replace by a summary. `tools`: those of its requests, so that their prompt is reused."""

    model: ShortText | None = None
    input: str | Annotated[list[MessageFields], Meta(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    tools: Tools | None = None
    cache_salt: CacheSalt | None = None


class ExplainFields(msgspec.Struct, frozen=True):
    """A prompt to explain: raw, a chat, or a response that continues a stored conversation.

    `page_texts`: the reply contains the text of each cached page.
    """

    model: ShortText | None = None
    prompt: str | list[TokenId] | None = None
    messages: Annotated[list[MessageFields], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    input: str | Annotated[list[MessageFields], Meta(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    tools: Tools | None = None
    conversation: Id | ConversationRef | None = None
    previous_response_id: Id | None = None
    previous_item_id: Id | None = None
    cache_salt: CacheSalt | None = None
    page_texts: bool | None = None


class WarmthFields(msgspec.Struct, frozen=True):
    """Conversations whose active paths are looked up in the cache."""

    conversations: Annotated[list[Id], Meta(max_length=MAX_WARMTH)]


class McpCallFields(msgspec.Struct, frozen=True):
    """A call of an MCP server's tool.

    `arguments`: JSON text as in the model's call. `confirmed`: the user has agreed to this call.
    """

    server: str
    tool: str
    arguments: str = "{}"
    confirmed: bool = False


class ConversationFields(msgspec.Struct, frozen=True):
    """A new conversation."""

    items: Annotated[list[MessageFields], Meta(max_length=MAX_NEW_ITEMS)] | None = None
    metadata: Annotated[dict[ShortText, ShortText], Meta(max_length=16)] | None = None
    title: Annotated[str, Meta(min_length=1, max_length=200)] | None = None


class ItemsFields(msgspec.Struct, frozen=True):
    """Messages to append.

    `parent_id`: the message to follow (absent: the active leaf), or "root".
    """

    items: Annotated[list[MessageFields], Meta(min_length=1, max_length=MAX_NEW_ITEMS)]
    parent_id: Id | None = None
    rev: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class BranchFields(msgspec.Struct, frozen=True):
    """A branch to copy: `leaf` is its last message (absent: the active leaf). `title`: absent for the same."""

    leaf: Id | None = None
    title: Annotated[str, Meta(min_length=1, max_length=200)] | None = None


class ShareFields(msgspec.Struct, frozen=True):
    """A branch to share: `leaf` is its last message (absent: the active leaf). `rev`: the expected revision."""

    leaf: Id | None = None
    rev: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class PromptFields(msgspec.Struct, frozen=True):
    """A prompt to save. `{{name}}` in the text is a variable."""

    name: PromptName
    text: PromptText
    description: PromptDescription = ""


class PromptPatch(msgspec.Struct, frozen=True):
    """Changes of a saved prompt; absent fields stay as they are. Another `name` renames it."""

    name: PromptName | None = None
    text: PromptText | None = None
    description: PromptDescription | None = None


class TitleFields(msgspec.Struct, frozen=True):
    """The model that generates a title, and the expected revision of the conversation."""

    model: ShortText | None = None
    rev: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class ConversationPatch(msgspec.Struct, frozen=True):
    title: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    active_leaf: Id | None = None
    metadata: Annotated[dict[ShortText, ShortText], Meta(max_length=16)] | None = None
    rev: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class TokenizeFields(msgspec.Struct, frozen=True):
    model: ShortText | None = None
    prompt: str | None = None
    messages: Annotated[list[MessageFields], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(msgspec.Struct, frozen=True):
    tokens: Annotated[list[TokenId], Meta(max_length=1_000_000)]
    model: ShortText | None = None


class DeliveryFields(msgspec.Struct, frozen=True):
    """Fields of a response request that select how the HTTP client receives the response."""

    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None


class CreateFields(msgspec.Struct, frozen=True):
    """Fields of `response.create` for the connection.

    The key replaces HTTP's `Idempotency-Key` header.
    """

    stream_id: Id | None = None
    idempotency_key: IdempotencyKey | None = None


class CancelFields(msgspec.Struct, frozen=True):
    """End a running response. `reason`: "steered" if the client continues with another message."""

    response_id: Id
    reason: Literal["steered"] | None = None


class DropFields(msgspec.Struct, frozen=True):
    """End one candidate of a running response.

    `candidate`: index among the `n` candidates of the response.
    """

    response_id: Id
    candidate: Annotated[int, Meta(ge=0, lt=MAX_N)]


class ResumeFields(msgspec.Struct, frozen=True):
    """Receive the events of a response from a position on.

    `starting_after`: the last `sequence_number` that the client has; -1 is none.
    """

    response_id: Id
    starting_after: Annotated[int, Meta(ge=-1, le=2**53)] | None = None
    stream_id: Id | None = None


class AckFields(msgspec.Struct, frozen=True):
    response_id: Id
    sequence_number: Annotated[int, Meta(ge=-1, le=2**53)]


class SteerFields(msgspec.Struct, frozen=True):
    """Input that interrupts a running response and is answered by a new one.

    `input`: a text or user messages, checked separately because its errors have a form of their own.
    """

    previous_response_id: Id
    input: Any = None


# Query strings


class ListQuery(msgspec.Struct):
    """Selects a page of a list."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: str | None = None


class InputItemsQuery(msgspec.Struct):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class RetrieveQuery(msgspec.Struct):
    """How to return a response: as an object, or as events with `stream`.

    `starting_after`: omit events up to this `sequence_number`.
    """

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0)] | None = None


class ItemsQuery(msgspec.Struct):
    """Selects a page of the path to `leaf` (default: active leaf), or all items, oldest first."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    leaf: str | None = None
    branches: Literal["all"] | None = None


class SearchQuery(ListQuery):
    """Selects a page of the conversations, or of those that match a search.

    `query`: words that must all be in the title or in one message; the last may be a prefix.
    """

    query: Annotated[str, Meta(max_length=4096)] | None = None


class ExportQuery(msgspec.Struct):
    """Format and extent of an export.

    `branch`: last message of the branch, or "all" (not for HTML). Default: all for JSON, the active one otherwise.
    """

    format: Literal["json", "markdown", "html"] = "json"
    branch: str | None = None


class ImportQuery(msgspec.Struct):
    """Options of an import.

    `dry_run`: report the result without changing anything.
    """

    dry_run: bool = False


class AttachmentQuery(msgspec.Struct):
    """`filename`: the name that the model reads before the text."""

    filename: str = "file"


class TokensQuery(msgspec.Struct):
    """`top`: return each token with its probability, and as many of the most likely tokens."""

    top: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class TokenQuery(msgspec.Struct):
    """`top`: number of most likely tokens to return."""

    top: Annotated[int, Meta(ge=1, le=MAX_TOP_LOGPROBS)] = 8


class RevQuery(msgspec.Struct):
    """`rev`: the expected revision of the conversation; status 409 if it has changed since."""

    rev: Annotated[int, Meta(ge=0, le=10**15 - 1)] | None = None
