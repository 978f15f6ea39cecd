"""WebSocket /v1/responses: OpenAI's WebSocket mode and the `chatcache.v1` extensions.

Reads the client's frames and dispatches each to its handler.

While the user types, an idle engine computes the prompt of the next turn (prefill ahead).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket

from chatcache.conversations.tree import new_id
from chatcache.errors import ChatcacheError, InvalidRequestError, NotFoundError, RateLimitError
from chatcache.gateway.api.thinking import parse_thinking
from chatcache.gateway.auth.principal import Principal, principal_of
from chatcache.gateway.context import Gateway, gateway_of
from chatcache.gateway.errors import INTERNAL_ERROR
from chatcache.gateway.limits.rate_limits import SECOND_NS, RequestCost, TokenBucket
from chatcache.gateway.middleware import parse_json
from chatcache.gateway.responses.create import build_turn_request, parse_response_tools, resolve_references
from chatcache.gateway.responses.registry import Run
from chatcache.gateway.responses.run import dropped_fields
from chatcache.gateway.responses.steering import (
    SteerRefusedError,
    check_fields,
    not_steerable_error,
    steer_failed_fields,
)
from chatcache.gateway.schemas.fields import parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import (
    AckFields,
    CancelFields,
    DropFields,
    ResponseFields,
    ResponseThinkingFields,
    ResumeFields,
    SteerFields,
    ThinkingFields,
)
from chatcache.gateway.schemas.responses import Conversation
from chatcache.gateway.websocket.frames import CLIENT_GONE, FrameSender
from chatcache.gateway.websocket.streams import MAX_STREAMS, Body, QueueFullError, StreamMultiplexer
from chatcache.types.events import Failed, Finished, Started
from chatcache.types.request import MAX_N, MAX_PRIORITY, GenerateRequest, SamplingParams

log = logging.getLogger(__name__)

PIECE_TOKENS = 512  # other requests wait for at most one piece


class Prewarmer:
    """Prefills prompts for one connection, one at a time. Nothing is stored."""

    def __init__(self, gateway: Gateway, principal: Principal, sender: FrameSender) -> None:
        self._gateway = gateway
        self._principal = principal
        self._sender = sender
        self._task: asyncio.Task[None] | None = None

    async def start(self, body: Mapping[str, Any]) -> None:
        """Cancel the current prefill and start one for this request.

        Raises: InvalidRequestError, UnsupportedParameterError.
        """
        await self.close()
        fields = parse_fields(body, ResponseFields)
        thinking = parse_fields(body, ResponseThinkingFields)
        unknown_fields(body, ResponseFields, ResponseThinkingFields)
        self._task = asyncio.create_task(self._run(fields, thinking))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self, fields: ResponseFields, thinking_fields: ThinkingFields) -> None:
        with contextlib.suppress(*CLIENT_GONE):
            try:
                result = await self._prefill(fields, thinking_fields)
            except Exception as error:
                if not isinstance(error, ChatcacheError):
                    log.exception("prompt.prewarm failed")
                await self._sender.send_error(error if isinstance(error, ChatcacheError) else INTERNAL_ERROR)
                return
            await self._sender.send({"type": "prompt.prewarmed", **result})

    async def _prefill(self, fields: ResponseFields, thinking_fields: ThinkingFields) -> dict[str, object]:
        """Compute the prompt in pieces until it is complete or the engine is busy.

        Raises: as `start_response` for an invalid request.
        """
        model = await self._gateway.require_model(fields.model)
        owner, functions = self._principal.owner, parse_response_tools(model, fields).functions
        given = await resolve_references(self._gateway, owner, fields.input)
        thinking = parse_thinking(thinking_fields, model.service.thinking)
        planned = await model.conversations.plan(
            build_turn_request(fields, given, owner, self._gateway.model_name, functions, thinking=thinking)
        )
        prompt = planned.prompt
        num_done, num_cached, is_idle = 0, 0, True
        while num_done < len(prompt.token_ids) and (is_idle := await self._is_idle()):
            prefix = prompt.token_ids[: num_done + PIECE_TOKENS]
            try:
                async with self._gateway.admission.acquire(
                    self._principal, RequestCost(0, max_tokens=0, is_opportunistic=True)
                ) as ticket:
                    ticket.add_tokens(len(prefix))
                    num_cached_here = await self._compute(prefix, prompt.num_public_tokens, fields.cache_salt or "")
                    ticket.add_tokens(-num_cached_here)
            except RateLimitError:  # prefill is optional, so a rate limit is no error
                is_idle = False
                break
            num_cached = num_cached_here if num_done == 0 else num_cached
            # cached tokens cost nothing: continue after them
            num_done = max(num_done + PIECE_TOKENS, num_cached_here)
        num_input = len(prompt.token_ids)
        return {
            "status": "done" if is_idle else "busy",
            "input_tokens": num_input,
            "cached_tokens": num_cached,
            "warm_tokens": min(num_done, num_input),
        }

    async def _is_idle(self) -> bool:
        if self._gateway.responses.running():  # the engine's health is cached and may be stale
            return False
        health = await self._gateway.health()
        return health.ready and health.num_running == 0 and health.num_waiting == 0

    async def _compute(self, tokens: tuple[int, ...], num_public_tokens: int, cache_salt: str) -> int:
        """Prefill a prompt in the engine; return how many of its tokens were already cached."""
        engine = self._gateway.engine
        request = GenerateRequest(
            request_id=new_id("warm"),
            prompt=tokens,
            params=SamplingParams(temperature=0.0, max_tokens=1),
            namespace=self._principal.tenant,
            cache_salt=cache_salt,
            num_public_tokens=min(num_public_tokens, len(tokens)),
            priority=MAX_PRIORITY if self._gateway.scheduling_policy == "priority" else 0,
        )
        await engine.submit(request)
        num_cached = 0
        try:
            async for event in engine.events(request.request_id):
                if isinstance(event, Started | Finished):
                    num_cached = event.num_cached_tokens
                elif isinstance(event, Failed):
                    break
        except BaseException:
            await asyncio.shield(engine.abort(request.request_id))
            raise
        return num_cached


PROTOCOL = "chatcache.v1"
BAD_MESSAGE = 4400
UNAUTHENTICATED = 4401
RATE_LIMITED = 4429
MAX_FRAMES_PER_S = 200
MAX_BURST = 1000
# Frequent messages are checked against the cached keys only; all others also query the store.
_CACHED_CHECK_TYPES = frozenset({"response.ack"})

Handler = Callable[[Body], Awaitable[None]]


async def responses_socket(socket: WebSocket) -> None:
    """Accept a WebSocket that was authenticated, and serve it until the client disconnects.

    Raises: RateLimitError if too many are open.
    """
    gateway = gateway_of(socket)
    with gateway.socket_limiter.connect(principal_of(socket).owner):
        await _serve(socket, gateway)


async def _serve(socket: WebSocket, gateway: Gateway) -> None:
    extended = PROTOCOL in socket.scope.get("subprotocols", ())
    await socket.accept(subprotocol=PROTOCOL if extended else None)
    gateway.metrics.sockets.inc()
    connection = Connection(socket, gateway, extended)
    try:
        await connection.serve()
    except CLIENT_GONE:
        pass
    finally:
        gateway.metrics.sockets.dec()
        await connection.close()


class Connection:
    """Reads the frames of one WebSocket connection and passes each to the handler of its type."""

    def __init__(self, socket: WebSocket, gateway: Gateway, extended: bool) -> None:
        self._socket = socket
        self._gateway = gateway
        self._extended = extended
        principal = principal_of(socket)
        self._principal, self._owner = principal, principal.owner
        self._sender = FrameSender(socket)
        self._streams = StreamMultiplexer(gateway, principal, self._sender, extended)
        self._prewarmer = Prewarmer(gateway, principal, self._sender)
        self._text = ""  # of the frame that is being handled
        self._cancelling: dict[str, asyncio.Task[None]] = {}
        self._dropping: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._notify_task: asyncio.Task[None] | None = None
        self._close_task: asyncio.Task[None] | None = None
        self._handlers: dict[str, Handler] = {
            "response.create": self._create,
            "response.cancel": self._cancel,
            "response.steer": self._steer,
        }
        if extended:
            self._handlers |= {
                "response.resume": self._resume,
                "response.drop": self._drop,
                "response.ack": self._ack,
                "conversation.subscribe": self._subscribe,
                "prompt.prewarm": self._prewarmer.start,
            }

    async def serve(self) -> None:
        """Handle frames until the client disconnects, its key is revoked or its session expires.

        Raises: one of `CLIENT_GONE`.
        """
        key_cache = self._gateway.key_cache
        remaining_s, loop = key_cache.expires_in_s(self._principal), asyncio.get_running_loop()
        expiry = (
            loop.call_later(remaining_s, self._close_unauthorized, "the session has expired")
            if remaining_s < math.inf
            else None
        )
        try:
            with key_cache.watch_revocation(self._principal, self._close_unauthorized):
                await self._serve()
        finally:
            if expiry is not None:
                expiry.cancel()

    def _close_unauthorized(self, why: str = "the API key was revoked") -> None:
        """Close the connection: its key was revoked or its session has expired."""
        if self._close_task is None:
            self._close_task = asyncio.create_task(self._sender.close(UNAUTHENTICATED, why))

    async def _serve(self) -> None:
        if self._extended:
            await self._gateway.health()  # fills in the limits of `session.created`
            await self._sender.send(session_frame(self._gateway))
        bucket = TokenBucket(MAX_FRAMES_PER_S, time.monotonic_ns(), period_ns=SECOND_NS, burst=MAX_BURST)
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            if not bucket.try_consume(1, time.monotonic_ns()):
                error = RateLimitError(
                    f"this WebSocket sends more than {MAX_FRAMES_PER_S} frames a second, {MAX_BURST} at once"
                )
                await self._refuse(error, RATE_LIMITED, "too many messages")
                return
            try:
                self._gateway.socket_limiter.take_frame(self._owner)
            except RateLimitError as error:
                await self._refuse(error, RATE_LIMITED, "too many messages")
                return
            try:
                text = message.get("text")
                if text is None:
                    raise InvalidRequestError("send text frames", code="invalid_json")
                body = await parse_json(text, self._gateway.decode_throttle, self._owner)
            except InvalidRequestError as error:
                await self._refuse(error, BAD_MESSAGE, "bad message")
                return
            except RateLimitError as error:
                await self._refuse(error, RATE_LIMITED, "too many bytes")
                return
            if not await self._check_key(body):
                return
            self._text = text
            try:
                await self._handle(body)
            except QueueFullError as error:
                await self._refuse(error, RATE_LIMITED, "too many bytes wait")
                return
            self._text = ""

    async def _refuse(self, error: ChatcacheError, code: int, reason: str) -> None:
        """Send an error, then close the connection."""
        await self._sender.send_error(error)
        await self._sender.close(code, reason)

    async def close(self) -> None:
        """Stop all streams and tasks of this connection; finish the cancels and drops that the client requested.

        Stored responses continue for a grace period; others end with their last reader.
        """
        tasks = [task for task in (self._notify_task, self._close_task) if task is not None]
        for task in tasks:
            task.cancel()
        requested = [*self._cancelling.values(), *self._dropping.values()]
        ends = (self._streams.close(), self._prewarmer.close(), *tasks, *requested)
        await asyncio.gather(*ends, return_exceptions=True)

    async def _check_key(self, body: Body) -> bool:
        """Check the key before each message; if it is no longer valid, close and return False."""
        key_cache = self._gateway.key_cache
        try:
            kind = body.get("type")
            if isinstance(kind, str) and kind in _CACHED_CHECK_TYPES:
                key_cache.check(self._principal)
            else:
                await key_cache.recheck(self._principal)
        except ChatcacheError as error:
            with suppress(*CLIENT_GONE):
                await self._sender.send_error(error, body.get("stream_id"))
            await self._sender.close(UNAUTHENTICATED, error.message)
            return False
        return True

    async def _handle(self, body: Body) -> None:
        """Run the handler of a message, and send its error. Raises: QueueFullError."""
        kind = body.get("type")
        handler = self._handlers.get(kind) if isinstance(kind, str) else None
        try:
            if handler is None:
                raise InvalidRequestError(f"type must be one of {', '.join(self._handlers)}", param="type")
            await handler(body)
        except QueueFullError:
            raise
        except ChatcacheError as error:
            await self._sender.send_error(error, body.get("stream_id"))

    async def _create(self, body: Body) -> None:
        self._streams.enqueue(body, self._text.encode())

    async def _cancel(self, body: Body) -> None:
        fields = parse_fields(body, CancelFields)
        self._start_cancel(await self._running(fields.response_id), fields.reason or "")

    async def _running(self, response_id: str) -> Run:
        """Return a running response, of this gateway or another. Raises: NotFoundError, GatewayUnreachableError."""
        found = await self._gateway.find_response(self._owner, response_id)
        run = (found or self._gateway.responses.get(self._owner, response_id)).run
        if run is None:
            raise NotFoundError(f"response {response_id!r} has ended", param="response_id")
        return run

    def _start_cancel(self, run: Run, reason: str = "") -> None:
        if run.id not in self._cancelling:
            self._cancelling[run.id] = asyncio.create_task(self._cancel_run(run, reason))

    async def _drop(self, body: Body) -> None:
        fields = parse_fields(body, DropFields)
        run, key = await self._running(fields.response_id), (fields.response_id, fields.candidate)
        is_last = await run.check_drop(fields.candidate)  # a candidate that has ended is refused, also the second time
        if key in self._dropping:
            return
        if is_last:
            self._start_cancel(run)
        else:
            self._dropping[key] = asyncio.create_task(self._drop_candidate(run, *key))

    async def _drop_candidate(self, run: Run, response_id: str, candidate: int) -> None:
        """End a candidate and send its receipt, unless the connection reads the response.

        The frames of the response contain the receipt, too.
        """
        try:
            receipt = await run.drop(candidate)
            if receipt is not None and self._streams.reader_of(response_id) is None:
                await self._sender.send({"type": "response.dropped", **dropped_fields(response_id, candidate, receipt)})
        except ChatcacheError as error:
            with suppress(*CLIENT_GONE):
                await self._sender.send_error(error)
        except CLIENT_GONE:
            pass
        finally:
            del self._dropping[response_id, candidate]

    async def _cancel_run(self, run: Run, reason: str) -> None:
        """Cancel a response and send its receipt, unless the connection reads the response.

        The frames of the response contain the receipt, too.
        """
        try:
            receipt = await run.cancel(reason)
            if self._streams.reader_of(run.id) is None and not self._streams.terminal_of(run.id)[0]:
                status = (run.log.terminal or "").rpartition(".")[2]
                frame = {"response_id": run.id, "status": "cancelled" if receipt else status, "receipt": receipt}
                await self._sender.send({"type": "response.cancelled", **frame})
        except ChatcacheError as error:
            with suppress(*CLIENT_GONE):
                await self._sender.send_error(error)
        except CLIENT_GONE:
            pass
        finally:
            del self._cancelling[run.id]

    async def _steer(self, body: Body) -> None:
        fields = parse_fields(body, SteerFields)
        response_id, given = fields.previous_response_id, fields.input
        stream_id = self._streams.stream_id_of(response_id)
        try:
            check_fields(body)
            await (await self._steerable(response_id)).steer(given)
        except SteerRefusedError as error:
            failed = steer_failed_fields(error, given, response_id)
            await self._sender.send({"type": "response.steer.failed", "sequence_number": 0, **failed}, stream_id)

    async def _steerable(self, response_id: str) -> Run:
        """Return a running response that this connection reads, which steering requires.

        Raises: SteerRefusedError.
        """
        sent, terminal = self._streams.terminal_of(response_id)
        if sent:
            raise not_steerable_error(terminal)
        logged = await self._gateway.find_response(self._owner, response_id)
        if logged is None or self._streams.reader_of(response_id) is None:
            raise SteerRefusedError("no such response on this connection", code="response_not_found")
        if logged.run is None:
            raise not_steerable_error(logged.log.terminal)
        return logged.run

    async def _resume(self, body: Body) -> None:
        fields = parse_fields(body, ResumeFields)
        after = fields.starting_after if fields.starting_after is not None else -1
        await self._streams.resume(fields.response_id, after, fields.stream_id)

    async def _ack(self, body: Body) -> None:
        fields = parse_fields(body, AckFields)
        reader = self._streams.reader_of(fields.response_id)
        if reader is not None:  # it may have ended meanwhile
            reader.ack(fields.sequence_number)

    async def _subscribe(self, body: Body) -> None:
        if self._notify_task is None:
            self._notify_task = asyncio.create_task(self._notify())

    async def _notify(self) -> None:
        """Subscribe to the owner's conversations and send their changes, the newest state of each."""
        subscription = self._gateway.hub.subscribe(self._owner)
        try:
            await self._sender.send({"type": "conversation.subscribed", "running": self._running_everywhere()})
            while True:
                for conversation_id, conversation in (await subscription.next()).items():
                    if conversation is not None:
                        head, there = Conversation.from_head(conversation), self._running_in(conversation_id)
                        frame = {"type": "conversation.updated", "conversation": head, "running": there}
                    else:
                        frame = {"type": "conversation.deleted", "conversation_id": conversation_id}
                    await self._sender.send(frame)
                if subscription.has_missed:
                    subscription.has_missed = False
                    await self._sender.send({"type": "conversation.missed", "running": self._running_everywhere()})
        except CLIENT_GONE:
            pass
        finally:
            self._gateway.hub.unsubscribe(self._owner, subscription)

    def _running_everywhere(self) -> list[Mapping[str, str]]:
        """Return the owner's running responses in conversations, those of other gateways last."""
        here = [(run.log.conversation_id, run.id) for run in self._gateway.responses.running(self._owner)]
        found = [*here, *self._gateway.hub.running_elsewhere(self._owner)]
        return [
            {"response_id": response_id, "conversation_id": conversation_id}
            for conversation_id, response_id in found
            if conversation_id is not None
        ]

    def _running_in(self, conversation_id: str) -> list[str]:
        """Return the ids of running responses in a conversation."""
        running = self._gateway.responses.running(self._owner)
        here = [run.id for run in running if run.log.conversation_id == conversation_id]
        return here + [found for _, found in self._gateway.hub.running_elsewhere(self._owner, conversation_id)]


def session_frame(gateway: Gateway) -> dict[str, object]:
    """Build the first frame of a `chatcache.v1` connection."""
    limits = {
        "max_frame_bytes": gateway.config.max_frame_bytes,
        "max_n": MAX_N,
        "max_beam_width": MAX_N,
        "max_lanes": MAX_STREAMS,
        "max_frames_per_s": MAX_FRAMES_PER_S,
    }
    model = {"model": gateway.model_name, "max_model_len": gateway.max_model_len or None}
    return {"type": "session.created", "session": {**model, "limits": limits}}
