"""Ollama's API for its clients: /api/chat, /api/generate, /api/embed, /api/tags, /api/show, /api/ps, /api/version.

A request becomes the same stateless chat as one of /v1/chat/completions. A stream is one JSON object per line.
`OllamaWriter` writes the replies. `gateway.errors` refuses the routes that manage Ollama's models.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.prompt import Message, assistant_message, tool_message
from chatcache.conversations.replies.events import ReplyDelta, ReplyDone, ReplyEvent, ReplyFinished, ReplyStarted
from chatcache.conversations.replies.service import EmbeddedPrompt
from chatcache.conversations.tree import ToolCall, new_id
from chatcache.errors import InvalidRequestError, UnsupportedParameterError
from chatcache.gateway.api.chat_completions import ChatRequest, start_chat
from chatcache.gateway.api.embeddings import Work
from chatcache.gateway.api.embeddings import embed as embed_inputs
from chatcache.gateway.api.generation import CompleteReply, arguments_object, reply_events, respond
from chatcache.gateway.api.logprobs import chat_logprobs
from chatcache.gateway.api.params import (
    NO_TOOLS,
    RouteParams,
    clamped_header,
    clamped_limit,
    parse_tool_choice,
    rename_constraint_param,
    schema_output,
    to_params,
)
from chatcache.gateway.api.sse import SseFormat
from chatcache.gateway.api.thinking import NO_THINKING, Thinking, ThinkingSwitch, resolve_thinking
from chatcache.gateway.context import Gateway, Model, gateway_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.json_codec import encode
from chatcache.gateway.middleware import read_json
from chatcache.gateway.schemas.completions import TokenLogprob
from chatcache.gateway.schemas.fields import ignored_header, parse_fields, unknown_fields
from chatcache.gateway.schemas.ollama import (
    Format,
    OllamaAnswer,
    OllamaBase,
    OllamaCall,
    OllamaChat,
    OllamaChatReply,
    OllamaDetails,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaEmbeddingsReply,
    OllamaEmbedReply,
    OllamaError,
    OllamaFunction,
    OllamaGenerate,
    OllamaGenerateReply,
    OllamaMessage,
    OllamaModel,
    OllamaOptions,
    OllamaProcess,
    OllamaProcesses,
    OllamaReply,
    OllamaShow,
    OllamaTag,
    OllamaTags,
    OllamaVersion,
)
from chatcache.gateway.schemas.requests import SamplingFields
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.events import FINISH_LENGTH
from chatcache.types.request import Params, StructuredOutputs

OLLAMA_VERSION = "0.12.6"  # clients compare it: the oldest one that has all that is served here
NDJSON = "application/x-ndjson"
_LATEST = ":latest"
_NEVER = "9999-12-31T23:59:59Z"
_ARCHITECTURE = "chatcache"


async def chat(request: Request) -> Response:
    """POST /api/chat: stateless, streamed unless the request says otherwise."""
    gateway = gateway_of(request)
    timing = _Timing()
    body = await read_json(request, any_media_type=True)
    base, fields = parse_fields(body, OllamaBase), parse_fields(body, OllamaChat)
    ignored = unknown_fields(body, OllamaBase, OllamaChat)
    model = await _require_model(gateway, base.model)
    writer = OllamaWriter(base.model or gateway.model_name, timing, model.tokenizer, is_chat=True)
    if not fields.messages:
        return json_response(writer.loaded(), headers=ignored_header(ignored))
    tools = parse_tool_choice(model.service.reply_format, fields.tools, None, None)
    messages = _messages(fields.messages)
    chat_request = ChatRequest(
        request_id=new_id("chatcmpl", "-"),
        messages=messages,
        tools=tools,
        params=_params(base, model),
        continues=messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
        thinking=_thinking(base, model),
    )
    return await _respond(request, model, base, chat_request, writer, ignored)


async def generate(request: Request) -> Response:
    """POST /api/generate: a reply to one prompt, or its continuation (`raw`)."""
    gateway = gateway_of(request)
    timing = _Timing()
    body = await read_json(request, any_media_type=True)
    base, fields = parse_fields(body, OllamaBase), parse_fields(body, OllamaGenerate)
    ignored = unknown_fields(body, OllamaBase, OllamaGenerate)
    _check_generate(fields)
    model = await _require_model(gateway, base.model)
    writer = OllamaWriter(base.model or gateway.model_name, timing, model.tokenizer, is_chat=False)
    if not fields.prompt:
        return json_response(writer.loaded(), headers=ignored_header(ignored))
    system = [Message(role="system", content=fields.system)] if fields.system else []
    chat_request = ChatRequest(
        request_id=new_id("cmpl", "-"),
        messages=() if fields.raw else [*system, Message(role="user", content=fields.prompt)],
        tools=NO_TOOLS,
        params=_params(base, model),
        raw=fields.prompt if fields.raw else None,
        thinking=NO_THINKING if fields.raw else _thinking(base, model),
    )
    if fields.raw and base.think is not None:
        ignored = (*ignored, "think")
    return await _respond(request, model, base, chat_request, writer, ignored)


async def embed(request: Request) -> Response:
    """POST /api/embed: embeddings of texts."""
    timing = _Timing()
    body = await read_json(request, any_media_type=True)
    fields = parse_fields(body, OllamaEmbed)
    ignored = unknown_fields(body, OllamaEmbed)
    texts = [fields.input] if isinstance(fields.input, str) else fields.input
    name = _served_name(gateway_of(request), fields.model)
    work = Work(texts, "input", name, dimensions=fields.dimensions, truncates=fields.truncate is not False)
    embedded = await embed_inputs(request, work)
    result = OllamaEmbedReply(
        model=fields.model or gateway_of(request).model_name,
        embeddings=[_vector(each) for each in embedded],
        total_duration=time.monotonic_ns() - timing.received_ns,
        load_duration=0,
        prompt_eval_count=sum(each.num_prompt_tokens for each in embedded),
    )
    return json_response(result, headers=ignored_header(ignored))


async def embeddings(request: Request) -> Response:
    """POST /api/embeddings: the embedding of one text, for older clients."""
    body = await read_json(request, any_media_type=True)
    fields = parse_fields(body, OllamaEmbeddings)
    ignored = unknown_fields(body, OllamaEmbeddings)
    work = Work([fields.prompt], "prompt", _served_name(gateway_of(request), fields.model), truncates=True)
    (embedded,) = await embed_inputs(request, work)
    return json_response(OllamaEmbeddingsReply(_vector(embedded)), headers=ignored_header(ignored))


async def tags(request: Request) -> Response:
    """GET /api/tags: the served model."""
    gateway = gateway_of(request)
    await gateway.health()
    if not gateway.model_name:  # unknown while the model loads
        return json_response(OllamaTags([]))
    name = gateway.model_name
    return json_response(OllamaTags([OllamaTag(name, name, _started_at(gateway), 0, _digest(name), _details())]))


async def processes(request: Request) -> Response:
    """GET /api/ps: the served model, once it is loaded."""
    gateway = gateway_of(request)
    health = await gateway.health()
    if not health.ready:
        return json_response(OllamaProcesses([]))
    name = gateway.model_name
    loaded = OllamaProcess(name, name, 0, _digest(name), _details(), _NEVER, 0, gateway.max_model_len)
    return json_response(OllamaProcesses([loaded]))


async def show(request: Request) -> Response:
    """POST /api/show: chat template, context length and abilities of the served model."""
    gateway = gateway_of(request)
    body = await read_json(request, any_media_type=True)
    fields = parse_fields(body, OllamaShow)
    ignored = unknown_fields(body, OllamaShow)
    model = await _require_model(gateway, fields.model or fields.name)
    result = OllamaModel(
        modelfile=f"FROM {gateway.model_name}",
        parameters="",
        template=model.tokenizer.template_source,
        license="",
        details=_details(),
        model_info={
            "general.architecture": _ARCHITECTURE,
            "general.basename": gateway.model_name,
            f"{_ARCHITECTURE}.context_length": gateway.max_model_len,
        },
        capabilities=_capabilities(model),
        modified_at=_started_at(gateway),
    )
    return json_response(result, headers=ignored_header(ignored))


async def version(request: Request) -> Response:
    """GET /api/version: the version of Ollama that clients expect."""
    return json_response(OllamaVersion(OLLAMA_VERSION))


async def _require_model(gateway: Gateway, name: str | None) -> Model:
    """Return the served model, also by its name with Ollama's default tag. Raises: as `Gateway.require_model`."""
    await gateway.require_model(None)  # the name may be unknown until the model is loaded
    return await gateway.require_model(_served_name(gateway, name))


def _served_name(gateway: Gateway, name: str | None) -> str | None:
    """Remove Ollama's default tag from a model's name, unless the served model has it."""
    return name if name is None or name == gateway.model_name else name.removesuffix(_LATEST)


def _check_generate(fields: OllamaGenerate) -> None:
    """Refuse what would change the result. Raises: UnsupportedParameterError."""
    _check_images(fields.images, "images")
    if fields.template:
        raise UnsupportedParameterError(
            "template: the model's own chat template is used; send a rendered prompt with raw", param="template"
        )
    if fields.context:
        raise UnsupportedParameterError(
            "context is not supported; send the conversation as messages to /api/chat", param="context"
        )


def _check_images(images: Sequence[str] | None, where: str) -> None:
    if images:
        raise UnsupportedParameterError(f"{where}: this server reads text only", param=where)


def _params(base: OllamaBase, model: Model) -> Params:
    """Build the engine's parameters. Raises: InvalidRequestError."""
    options = base.options if base.options is not None else OllamaOptions()
    sampling = SamplingFields(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
        stop=options.stop,
    )
    if base.top_logprobs and not base.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    num_logprobs = (base.top_logprobs or 0) if base.logprobs else None
    route = RouteParams(_max_tokens(base), num_logprobs, structured_outputs=_structured_outputs(base.format))
    return to_params(sampling, route, model.tokenizer)


def _max_tokens(base: OllamaBase) -> int | None:
    wanted = base.options.num_predict if base.options is not None else None
    return wanted if wanted is not None and wanted > 0 else None


def _structured_outputs(format: Format | None) -> StructuredOutputs | None:
    if format is None or format == "":
        return None
    if isinstance(format, dict):
        return schema_output(format, strict=False)
    if format != "json":
        raise InvalidRequestError('format must be "json" or a JSON schema', param="format")
    return StructuredOutputs(json_object=True)


def _messages(given: Sequence[OllamaMessage]) -> list[Message]:
    """Convert the messages of a chat. Calls and results without an id are matched by name and order.

    Raises: InvalidRequestError, UnsupportedParameterError.
    """
    messages: list[Message] = []
    unanswered: list[ToolCall] = []
    for at, message in enumerate(given):
        where, content = f"messages[{at}]", message.content or ""
        _check_images(message.images, f"{where}.images")
        if message.role == "assistant":
            unanswered = [
                ToolCall(
                    call.id or f"call_{at}_{number}",
                    call.function.name,
                    json.dumps(call.function.arguments, ensure_ascii=False),
                )
                for number, call in enumerate(message.tool_calls or ())
            ]
            messages.append(assistant_message(content, message.thinking or "", unanswered))
        elif message.role == "tool":
            call_id = message.tool_call_id or _answered_call(unanswered, message.tool_name, where)
            unanswered = [call for call in unanswered if call.call_id != call_id]
            messages.append(tool_message(content, call_id))
        else:
            messages.append(Message(role=message.role, content=content))
    return messages


def _answered_call(unanswered: Sequence[ToolCall], name: str | None, where: str) -> str:
    """Return the id of the call that a result without an id belongs to. Raises: InvalidRequestError."""
    for call in unanswered:
        if name is None or call.name == name:
            return call.call_id
    called = f" of {name[:64]!r}" if name is not None else ""
    raise InvalidRequestError(f"{where}: no call{called} precedes this result", param=where)


@dataclass(slots=True)
class _Timing:
    """Times of a request, by the clock of `time.monotonic_ns`."""

    received_ns: int = field(default_factory=time.monotonic_ns)
    submitted_ns: int = 0
    first_token_ns: int = 0

    async def watch(self, events: AsyncIterator[ReplyEvent]) -> AsyncIterator[ReplyEvent]:
        """Pass events through and note the time of the first token."""
        async for event in events:
            if isinstance(event, ReplyStarted):
                self.first_token_ns = time.monotonic_ns()
            yield event

    def durations(self) -> dict[str, int]:
        """Return the durations of a request that ends now. Unit: ns."""
        now_ns = time.monotonic_ns()
        first_ns = self.first_token_ns or now_ns
        return {
            "total_duration": now_ns - self.received_ns,
            "load_duration": self.submitted_ns - self.received_ns,
            "prompt_eval_duration": first_ns - self.submitted_ns,
            "eval_duration": now_ns - first_ns,
        }


def _thinking(base: OllamaBase, model: Model) -> Thinking:
    """Resolve `think`. Raises: InvalidRequestError, UnsupportedParameterError."""
    return resolve_thinking(
        model.service.thinking,
        switch=ThinkingSwitch(base.think, "think") if isinstance(base.think, bool) else None,
        effort=base.think if isinstance(base.think, str) else None,
        effort_name="think",
    )


async def _respond(
    request: Request,
    model: Model,
    base: OllamaBase,
    chat_request: ChatRequest,
    writer: OllamaWriter,
    ignored: tuple[str, ...],
) -> Response:
    gateway = gateway_of(request)
    with rename_constraint_param(None, "format", "tools" if chat_request.tools.limits else None):
        reply = await start_chat(request, model, chat_request)
    writer.timing.submitted_ns = time.monotonic_ns()
    limit = clamped_limit(_max_tokens(base), reply.request.params, len(reply.request.prompt), gateway.max_model_len)
    return await respond(
        request,
        lambda: writer.timing.watch(reply_events(reply, gateway.metrics)),
        (reply,),
        writer,
        stream=base.stream is not False,
        headers=ignored_header((*chat_request.thinking.ignored, *ignored)) | clamped_header(limit),
        format=SseFormat(
            media_type=NDJSON,
            encode_event=_encode_line,
            encode_error=lambda error: _encode_line(OllamaError(error.message)),
            end=b"",
            final=(b'{"done":true', b'{"error":'),
            keep_alive=_encode_line(writer.line()),
        ),
    )


def _encode_line(value: object) -> bytes:
    return encode(value) + b"\n"


class OllamaWriter:
    """Converts the events of a reply to the body or the lines of one answer."""

    def __init__(self, model_name: str, timing: _Timing, tokenizer: Tokenizer, *, is_chat: bool) -> None:
        self.timing = timing
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._is_chat = is_chat

    def loaded(self) -> OllamaReply:
        """Return the answer to a request without a prompt, which only loads the model."""
        return self.line(is_done=True, done_reason="load")

    def body(self, reply: CompleteReply) -> OllamaReply:
        (done,) = reply.dones
        logprobs = reply.encoded_logprobs(0)
        return self.line(
            done.text,
            done.parts.reasoning,
            _calls(done),
            logprobs,
            is_done=True,
            **self._counts(done, reply.finished),
        )

    async def chunks(self, events: AsyncIterator[ReplyEvent]) -> AsyncIterator[object]:
        last: ReplyDone | None = None
        async for event in events:
            if isinstance(event, ReplyDelta):
                logprobs = self._logprobs(event)
                if event.text or event.reasoning or logprobs:
                    yield self.line(event.text, event.reasoning, logprobs=logprobs)
            elif isinstance(event, ReplyDone):
                last = event
                if calls := _calls(event):
                    yield self.line(calls=calls)
            elif isinstance(event, ReplyFinished) and last is not None:
                yield self.line(is_done=True, **self._counts(last, event))

    def line(
        self,
        text: str = "",
        reasoning: str = "",
        calls: list[OllamaCall] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        *,
        is_done: bool = False,
        **counts: Any,
    ) -> OllamaReply:
        """Build a line of the stream, or the whole answer."""
        head = {
            "done": is_done,
            "model": self._model_name,
            "created_at": _timestamp(datetime.now(UTC)),
            "logprobs": logprobs or UNSET,
            **counts,
        }
        thinking = reasoning or UNSET
        if self._is_chat:
            return OllamaChatReply(**head, message=OllamaAnswer("assistant", text, thinking, calls or UNSET))
        return OllamaGenerateReply(**head, response=text, thinking=thinking)

    def _logprobs(self, delta: ReplyDelta) -> list[TokenLogprob]:
        return chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs) if delta.logprobs else []

    def _counts(self, done: ReplyDone, finished: ReplyFinished) -> dict[str, Any]:
        return {
            "done_reason": "length" if done.finish_reason == FINISH_LENGTH else "stop",
            "prompt_eval_count": finished.num_prompt_tokens,
            "prompt_cached_count": finished.num_cached_tokens,
            "eval_count": finished.num_output_tokens,
            **self.timing.durations(),
        }


def _calls(done: ReplyDone) -> list[OllamaCall]:
    """Convert the calls; one that was cut off is left out, since a client would execute it."""
    return [
        OllamaCall(call.call_id, OllamaFunction(number, call.name, arguments_object(call.arguments)))
        for number, call in enumerate(done.parts.finished_calls)
    ]


def _vector(embedded: EmbeddedPrompt) -> list[float]:
    found: list[float] = np.frombuffer(embedded.values, "<f4").tolist()
    return found


def _capabilities(model: Model) -> list[str]:
    reply_format = model.service.reply_format
    has_tools = reply_format.supports_tools and reply_format.syntax is not None
    return [
        *("completion", "embedding"),
        *(["tools"] if has_tools else []),
        *(["thinking"] if reply_format.reasoning is not None else []),
    ]


def _details() -> OllamaDetails:
    return OllamaDetails("", "safetensors", "", [], "", "")


def _digest(name: str) -> str:
    """Return a digest that identifies the model by its name; clients show it and compare it."""
    return hashlib.sha256(name.encode()).hexdigest()


def _started_at(gateway: Gateway) -> str:
    return _timestamp(datetime.fromtimestamp(gateway.started_at, UTC))


def _timestamp(when: datetime) -> str:
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")
