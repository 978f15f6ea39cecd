"""Responses of chat completions and completions: bodies, chunks, log-probabilities, usage."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


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
