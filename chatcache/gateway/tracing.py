"""OpenTelemetry spans of generations, exported over OTLP if the operator names an endpoint in the environment.

One span per reply, and one per refused request of a route that generates, with the names and attributes of the
semantic conventions for generative AI. Prompts, outputs and tools are never recorded. The packages are an optional
extra (`chatcache[otel]`), imported only if an endpoint is set. Besides the clients of Redis and of MCP servers, the
exporter is the only part of a server that connects to another host while serving.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

from chatcache import __version__
from chatcache.conversations.replies.events import ReplyDone, ReplyEvent, ReplyFinished, ReplyStarted
from chatcache.conversations.replies.service import Reply, num_candidates
from chatcache.errors import ChatcacheError
from chatcache.gateway.errors import ERROR_CODE
from chatcache.types.request import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_PROVIDER = "chatcache"
_CLOSE_TIMEOUT_S = 2.0
_CHAT, _TEXT_COMPLETION = "chat", "text_completion"
# Routes whose refused requests have a span, with the name of their operation.
_OPERATIONS = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _TEXT_COMPLETION,
    "/v1/messages": _CHAT,
    "/v1/responses": _CHAT,
    "/api/chat": _CHAT,
    "/api/generate": _CHAT,
}


@dataclass(slots=True)
class _RequestTrace:
    """The incoming request of a span. `started_ns`: None for a WebSocket, which outlives its requests."""

    parent: Context
    host: str
    started_ns: int | None
    has_span: bool = False


_request: ContextVar[_RequestTrace | None] = ContextVar("request_trace", default=None)


class Tracer:
    """Records generations as spans and sends them in batches, in a thread of its own.

    `model_name` returns the name of the served model.
    """

    def __init__(self, provider: TracerProvider, exporter: SpanExporter, model_name: Callable[[], str]) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer("chatcache", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    async def close(self) -> None:
        """Send the remaining spans; give up after a few seconds."""

        def shut_down() -> None:
            give_up = threading.Timer(_CLOSE_TIMEOUT_S, self._exporter.shutdown)  # ends its retries
            give_up.start()
            try:
                self._provider.shutdown()
            finally:
                give_up.cancel()

        await asyncio.to_thread(shut_down)

    def begin_request(self, scope: Scope) -> None:
        """Read the trace of an incoming request, which the spans made for it belong to."""
        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        started_ns = time.time_ns() if scope["type"] == "http" else None
        _request.set(_RequestTrace(self._propagator.extract(carrier), _host_name(headers), started_ns))

    def end_request(self, scope: Scope, route: str, status: int) -> None:
        """Record a request that was refused, or abandoned, before its generation began."""
        request = _request.get()
        operation = _OPERATIONS.get(route) if scope.get("method") == "POST" else None
        if request is None or request.has_span or operation is None or status < 400:
            return
        span = self._start(operation, {"http.response.status_code": status})
        _set_error(span, scope.get(ERROR_CODE, str(status)))
        span.end()

    async def trace(self, reply: Reply, events: AsyncIterator[ReplyEvent]) -> AsyncIterator[ReplyEvent]:
        """Pass the events of a reply through and record them as one span."""
        span = self._start(_CHAT if reply.is_chat else _TEXT_COMPLETION, _request_attributes(reply))
        reasons: dict[int, str] = {}
        request = _request.get()
        started_ns = (request.started_ns if request is not None else None) or time.time_ns()
        try:
            async for event in events:
                if isinstance(event, ReplyStarted):
                    span.set_attribute("gen_ai.response.time_to_first_chunk", (time.time_ns() - started_ns) / 1e9)
                    span.add_event("gen_ai.first_token")
                elif isinstance(event, ReplyDone):
                    reasons[event.index] = "tool_calls" if event.ends_in_calls else event.finish_reason
                elif isinstance(event, ReplyFinished):
                    span.set_attributes(_usage_attributes(event))
                    span.set_attribute("gen_ai.response.finish_reasons", [reasons[at] for at in sorted(reasons)])
                    if event.cancelled:
                        _set_error(span, "cancelled")
                    span.end()
                yield event
        except BaseException as error:
            if span.is_recording():
                is_left = isinstance(error, (GeneratorExit, asyncio.CancelledError))
                code = error.code if isinstance(error, ChatcacheError) else type(error).__name__
                _set_error(span, "client_disconnected" if is_left else code)
                span.end()
            raise

    def _start(self, operation: str, attributes: Mapping[str, Any]) -> Span:
        from opentelemetry.trace import SpanKind

        request, model_name = _request.get(), self._model_name()
        common: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": model_name,
            "gen_ai.response.model": model_name,
        }
        if request is None:
            return self._tracer.start_span(f"{operation} {model_name}", attributes={**common, **attributes})
        request.has_span = True
        if request.host:
            common["server.address"] = request.host
        return self._tracer.start_span(
            f"{operation} {model_name}",
            context=request.parent,
            kind=SpanKind.SERVER,
            attributes={**common, **attributes},
            start_time=request.started_ns,
        )


def open_tracer(model_name: Callable[[], str], environment: Mapping[str, str] = os.environ) -> Tracer | None:
    """Create the tracer that OpenTelemetry's environment variables describe; None without an endpoint."""
    endpoint = next((environment[name] for name in ENDPOINTS if environment.get(name)), None)
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if endpoint is None or is_off or environment.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return None
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), _HTTP)
    if protocol != _HTTP:
        log.warning("no spans are sent: OTLP over %s is not supported, only %s", protocol, _HTTP)
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning("no spans are sent: an OTLP endpoint is set, but the packages of chatcache[otel] are not installed")
        return None
    is_named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    named = {} if is_named else {"service.name": _PROVIDER}
    provider = TracerProvider(
        resource=Resource.create({**named, "service.version": __version__}), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    log.info("sending spans of generations to %s", endpoint.partition("?")[0].rpartition("@")[2])
    return Tracer(provider, exporter, model_name)


def _request_attributes(reply: Reply) -> dict[str, Any]:
    """Return the attributes of a request: numbers and ids, no text."""
    request, params = reply.request, reply.request.params
    attributes: dict[str, Any] = {
        "gen_ai.response.id": request.request_id,
        "gen_ai.conversation.id": request.conversation_id or None,
        "gen_ai.output.type": "text" if params.structured_outputs is None else "json",
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
    }
    if (num := num_candidates(params)) > 1:
        attributes["gen_ai.request.choice.count"] = num
    if isinstance(params, SamplingParams):
        attributes |= {
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k or None,
            "gen_ai.request.seed": params.seed,
        }
    return {name: value for name, value in attributes.items() if value is not None}


def _usage_attributes(finished: ReplyFinished) -> dict[str, int]:
    return {
        "gen_ai.usage.input_tokens": finished.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": finished.num_cached_tokens,
        "gen_ai.usage.cache_creation.input_tokens": finished.num_prompt_tokens - finished.num_cached_tokens,
        "gen_ai.usage.output_tokens": finished.num_output_tokens,
        "gen_ai.usage.reasoning.output_tokens": finished.num_reasoning_tokens,
    }


def _set_error(span: Span, code: str) -> None:
    """Mark a span as failed; the error's message may repeat parts of the request, so it is left out."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR))


def _host_name(headers: Headers) -> str:
    host = headers.get("host", "")
    name, _, port = host.rpartition(":")
    return name if port.isdigit() else host
