"""Response bodies and stream chunks of chat completions and completions."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct):
    """Details of the prompt tokens.

    `cached_tokens`: those whose KV pages were in the cache.
    """

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Token counts. The prompt counts once, also with several candidates."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: OutputTokensDetails


class TopLogprob(msgspec.Struct):
    """A likely token. A logprob of -9999 stands for probability 0."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A generated token and the most likely tokens at its position.

    The `bytes` of all tokens joined are the text, even where a token is only part of a character.
    """

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None


class PromptToken(msgspec.Struct):
    """A prompt token or an alternative.

    `rank` is null for a token that is not among the alternatives.
    """

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CalledFunction(msgspec.Struct):
    """A function call. `arguments`: the generated JSON text, which may be cut off."""

    name: str
    arguments: str


class ChatCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct):
    """The message of a choice.

    `content` is null if there are only tool calls. `reasoning` repeats `reasoning_content`.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One candidate.

    `score`: with ranked candidates (beams, best_of). `token_ids`: with return_token_ids.
    """

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
    """An addition to call `index`. The first delta of a call has its id, type and name."""

    index: int
    function: CalledFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """The part of the message that this chunk adds. The first chunk of each choice has the role."""

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
    """One event of a streamed chat completion, with one choice.

    With stream_options.include_usage, a last chunk has no choice but the usage.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists with one entry for each token.

    The first token of a prompt has no log-probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One choice. In a stream, only its last chunk has `finish_reason` and `stop_reason`.

    `token_ids`, and in the first chunk `prompt_token_ids`: with return_token_ids.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    score: float | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The body of a completion, and each event of its stream, where only the last has `usage`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None
