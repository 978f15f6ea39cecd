"""What the stateless routes answer, as types: `openapi.json` is made of them, and tests hold real answers to them.

Nothing here builds an answer. A field with a default may be absent; one without is always there.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

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
