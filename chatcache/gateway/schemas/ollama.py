"""Request and response bodies of Ollama's API.

`fields.unknown_fields` names the fields and options that are not listed here as ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from chatcache.gateway.schemas.completions import TokenLogprob
from chatcache.gateway.schemas.embeddings import Text, Texts
from chatcache.gateway.schemas.requests import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    CallId,
    FunctionFields,
    Penalty,
    ShortText,
    StopString,
    ToolFields,
    TopLogprobs,
)
from chatcache.types.request import MAX_STOP_STRINGS

_INT32_MAX = 2**31 - 1

Images = Annotated[list[str], Meta(max_length=MAX_PARTS)]
Format = str | dict[str, Any]


class OllamaCalledFunction(msgspec.Struct, frozen=True):
    """The function of a call, with its arguments as an object."""

    without_effect: ClassVar = frozenset({"index"})

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: dict[str, Any] = {}


class OllamaToolCall(msgspec.Struct, frozen=True):
    """A call in an assistant's message. Clients may leave out its id."""

    function: OllamaCalledFunction
    id: CallId | None = None
    type: str = "function"


class OllamaMessage(msgspec.Struct, frozen=True):
    """A message of a chat. A tool's message names its call by `tool_call_id` or `tool_name`, or follows the calls."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_name: str | None = None
    tool_call_id: CallId | None = None


class OllamaOptions(msgspec.Struct, frozen=True):
    """The sampling options. `num_predict`: 0 or less generates to the end of the context."""

    num_predict: Annotated[int, Meta(ge=-_INT32_MAX, le=_INT32_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.001, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None


class OllamaBase(msgspec.Struct, frozen=True):
    """The fields that chat and generate have in common. `stream` is true unless the request says otherwise.

    `think`: whether the model reasons, or the effort of it.
    """

    model: ShortText | None = None
    stream: bool | None = None
    format: Format | None = None
    options: OllamaOptions | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    think: bool | ShortText | None = None


class OllamaFunctionFields(FunctionFields, frozen=True):
    """A function that the model may call. Unlike elsewhere, its name may have dots."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class OllamaTool(ToolFields, frozen=True):
    """A tool with its `function`."""

    function: OllamaFunctionFields | None = None


class OllamaChat(msgspec.Struct, frozen=True):
    """A chat. Without messages, it only checks that the model is loaded.

    A last message of the assistant is the beginning of the answer.
    """

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[OllamaTool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerate(msgspec.Struct, frozen=True):
    """A prompt, which becomes a user's message; with `raw`, it is continued as it is."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: str | None = None
    context: Annotated[list[int], Meta(max_length=_INT32_MAX)] | None = None
    images: Images | None = None


class OllamaEmbed(msgspec.Struct, frozen=True):
    """Texts to embed. `truncate`: shorten texts that exceed the context, which is the default."""

    input: Texts
    model: ShortText | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1, le=_INT32_MAX)] | None = None


class OllamaEmbeddings(msgspec.Struct, frozen=True):
    """A text to embed, in the form of older clients."""

    prompt: Text
    model: ShortText | None = None


class OllamaShow(msgspec.Struct, frozen=True):
    """The model to describe; older clients send its name as `name`."""

    without_effect: ClassVar = frozenset({"verbose"})

    model: ShortText | None = None
    name: ShortText | None = None


class OllamaError(msgspec.Struct):
    """The body of every error response, and the last line of a stream that fails."""

    error: str


class OllamaFunction(msgspec.Struct):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct):
    """A call of the model. `arguments` is empty if the call is cut off."""

    id: str
    function: OllamaFunction


class OllamaAnswer(msgspec.Struct):
    """The message of an answer, or what a line of the stream adds to it."""

    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaReply(msgspec.Struct, kw_only=True):
    """An answer, or a line of its stream. `done` is true in the last line, which has the counts.

    Durations are in nanoseconds. `prompt_cached_count`: prompt tokens whose pages were in the cache.
    """

    done: bool
    model: str
    created_at: str
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    prompt_cached_count: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatReply(OllamaReply, kw_only=True):
    """An answer of /api/chat, or a line of its stream."""

    message: OllamaAnswer


class OllamaGenerateReply(OllamaReply, kw_only=True):
    """An answer of /api/generate, or a line of its stream."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedReply(msgspec.Struct):
    """An embedding of length 1 for each text. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsReply(msgspec.Struct):
    embedding: list[float]


class OllamaDetails(msgspec.Struct):
    """What Ollama derives from a model's file. The server does not know it, except for the format."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaTag(msgspec.Struct):
    """The served model. `size` is 0: the server does not know it."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(msgspec.Struct):
    models: list[OllamaTag]


class OllamaProcess(msgspec.Struct):
    """The loaded model. It expires never, which is a date that clients can read."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaProcesses(msgspec.Struct):
    models: list[OllamaProcess]


class OllamaModel(msgspec.Struct):
    """A description of the served model. `model_info` has its architecture and context length."""

    modelfile: str
    parameters: str
    template: str
    license: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct):
    """The version of Ollama whose API the server speaks; clients refuse older ones."""

    version: str
