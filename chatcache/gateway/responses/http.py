"""`POST /v1/responses`, streamed or whole, and reading a response again while its log is kept.

The response runs by itself (`response_run`); a connection only reads its log. What becomes of a response whose readers
leave is settled there: without `store` it ends, with it it goes on for a while, in the background until it is done.

`/v1/responses/{id}`: retrieving, following, cancelling and deleting a response that somebody began.

While a response runs, and for a while after, it is what its log says; later it is what the tree says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chatcache.conversations.store import ConversationStore, StaleRevisionError
from chatcache.conversations.tree import ConversationTree, plan_response_deletion
from chatcache.errors import ChatcacheError, InvalidRequestError, NotFoundError
from chatcache.gateway.api.conversations import edit_conversation, listed_items, store_of
from chatcache.gateway.api.idempotency import REPLAYED_HEADER, IdempotencyKey
from chatcache.gateway.api.pagination import PageQuery, paginate
from chatcache.gateway.api.sse import EventStream
from chatcache.gateway.auth.principal import owner_of, principal_of
from chatcache.gateway.context import Gateway, gateway_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.json_codec import encode
from chatcache.gateway.middleware import cancel_on_disconnect, read_json
from chatcache.gateway.responses.create import (
    build_turn_request,
    find_running_reply,
    parse_response_tools,
    start_idempotent_response,
    start_response,
)
from chatcache.gateway.responses.event_log import TERMINAL, LogReader
from chatcache.gateway.responses.registry import Run
from chatcache.gateway.responses.state import (
    encode_created_response,
    encode_logged_response,
    load_response_tree,
    stored_response,
    stream_expired_error,
)
from chatcache.gateway.schemas.fields import ignored_header, parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import DeliveryFields, ResponseFields, SamplingFields

# openai-python takes a blank line for the end of an event wherever ids may be: a ping has none.
PING = b": keep-alive\n"
JSON = "application/json"


async def create_response(request: Request) -> Response:
    """POST /v1/responses."""
    gateway = gateway_of(request)
    body = await read_json(request)
    delivery = parse_fields(body, DeliveryFields)
    headers = ignored_header(unknown_fields(body, DeliveryFields, ResponseFields, SamplingFields))
    principal, once = principal_of(request), IdempotencyKey.from_request(request, "response", body)
    # One that is stored is started even if the client is gone by then: resending it could only double it.
    if once is not None:
        run = await start_idempotent_response(gateway, principal, body, once)
        if isinstance(run, str):
            return await _again(request, run, delivery, headers | REPLAYED_HEADER)
    elif delivery.store is not False:
        run = await start_response(gateway, principal, body)
    else:
        run = await cancel_on_disconnect(request, start_response(gateway, principal, body))
    if delivery.stream:
        return LogStream(gateway, run.log.reader(), headers)
    if delivery.background:
        return Response(encode_created_response(run.log), headers=headers, media_type=JSON)
    with run.log.reader():
        await cancel_on_disconnect(request, _over(gateway, run))
    return Response(encode_logged_response(run.log), headers=headers, media_type=JSON)


async def _again(request: Request, response_id: str, delivery: DeliveryFields, headers: dict[str, str]) -> Response:
    """Answer a request that comes again with what the first one made. Raises: NotFoundError where that was deleted."""
    gateway, owner = gateway_of(request), owner_of(request)
    logged = gateway.responses.find(owner, response_id)
    if logged is None:  # of long ago, or another gateway's
        tree = await load_response_tree(gateway.opened_store(), owner, response_id)
        if delivery.stream:
            raise stream_expired_error(response_id)
        return json_response(stored_response(tree, response_id), headers=headers)
    if delivery.stream:
        return LogStream(gateway, logged.log.reader(), headers)
    if not delivery.background and logged.run is not None:
        with logged.log.reader():
            await cancel_on_disconnect(request, _over(gateway, logged.run))
    return Response(encode_logged_response(logged.log), headers=headers, media_type=JSON)


async def _over(gateway: Gateway, run: Run) -> None:
    """Wait for the end; whoever stops waiting before has left."""
    try:
        await asyncio.wait([run.task])
    except asyncio.CancelledError:
        gateway.metrics.disconnects.inc()
        raise


class LogStream(EventStream):
    """The numbered frames of a log as SSE. Counts as a reader for as long as it is connected."""

    def __init__(self, gateway: Gateway, reader: LogReader, headers: dict[str, str]) -> None:
        self._gateway = gateway
        self._reader = reader
        self._whole = False
        self._num_sent = reader.sent_number + 1  # of the response's numbered frames
        self._has_ended = False
        super().__init__(
            self._frames(),
            keep_alive_s=gateway.config.sse_keep_alive_interval_s,
            keep_alive=PING,
            on_end=self._ended,
            headers=headers,
        )

    def closing_frame(self, error: ChatcacheError) -> bytes:
        """OpenAI's `error` event under the next number, unless the response's own end was told."""
        if self._has_ended:
            return b""
        body = {"code": error.code, "message": error.message, "param": error.param}
        return _framed("error", encode({"type": "error", "sequence_number": self._num_sent, **body}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reader:
            await super().__call__(scope, receive, send)

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        """What is there goes in one piece, each event with OpenAI's name for it."""
        while frames := await self._reader.next():
            yield b"".join(_framed(frame.kind, frame.data) for frame in frames)
            # Whoever asks for more has sent them.
            self._num_sent += len(frames)
            self._has_ended |= any(frame.kind in TERMINAL for frame in frames)
        self._whole = True

    async def _ended(self) -> None:
        if not self._whole:
            self._gateway.metrics.disconnects.inc()


def _framed(kind: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


_MAX_DIGITS = 15


async def get_response(request: Request) -> Response:
    """As it is now; with `stream=true`, its events from `starting_after` on."""
    query = request.query_params
    if _flag(query.get("stream", "false")):
        return await _follow(request, _number(query.get("starting_after")))
    return await _now(request)


async def delete_response(request: Request) -> Response:
    """End it if it runs. What others were continued from stays in the conversation as messages."""
    gateway, owner, store = gateway_of(request), owner_of(request), store_of(request)
    response_id = request.path_params["id"]
    logged = gateway.responses.find(owner, response_id)
    if logged is not None and logged.run is not None:
        await logged.run.cancel()
    await gateway.pending_saves.flush(response_id)
    try:
        tree = await load_response_tree(store, owner, response_id)
    except NotFoundError:
        if logged is None:
            raise
    else:
        await _remove(gateway, store, tree, response_id)
    gateway.responses.remove(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """POST /v1/responses/{id}/cancel: what it had said, and the receipt. One that has ended is answered as it is."""
    logged = gateway_of(request).responses.find(owner_of(request), request.path_params["id"])
    if logged is not None and logged.run is not None:
        await logged.run.cancel()
        return Response(encode_logged_response(logged.log), media_type=JSON)
    return await _now(request)


async def list_input_items(request: Request) -> Response:
    """GET /v1/responses/{id}/input_items: the messages that came with the request."""
    response_id = request.path_params["id"]
    query = PageQuery.parse(request.query_params)
    tree = await load_response_tree(store_of(request), owner_of(request), response_id)
    return json_response(paginate(listed_items(tree, tree.inputs(response_id)), query))


async def count_input_tokens(request: Request) -> Response:
    """How long the prompt would be. Nothing is computed or stored."""
    gateway, owner = gateway_of(request), owner_of(request)
    body = await read_json(request)
    fields = parse_fields(body, ResponseFields)
    parse_fields(body, SamplingFields)  # what a response would refuse is refused here
    ignored = unknown_fields(body, ResponseFields, SamplingFields)
    model = await gateway.require_model(fields.model)
    functions = parse_response_tools(model, fields).functions
    running = await find_running_reply(gateway, owner, fields)
    asked = build_turn_request(fields, owner, gateway.model_name, functions, running)
    async with gateway.tokenize_throttle.acquire(owner, len(await request.body())):
        planned = await model.conversations.plan(asked)
    answer = {"object": "response.input_tokens", "input_tokens": len(planned.prompt.token_ids)}
    return json_response(answer, headers=ignored_header(ignored))


async def _now(request: Request) -> Response:
    gateway, owner, response_id = gateway_of(request), owner_of(request), request.path_params["id"]
    logged = gateway.responses.find(owner, response_id)
    if logged is not None:
        return Response(encode_logged_response(logged.log), media_type=JSON)
    tree = await load_response_tree(store_of(request), owner, response_id)
    return json_response(stored_response(tree, response_id))


async def _follow(request: Request, after: int) -> Response:
    gateway, owner, response_id = gateway_of(request), owner_of(request), request.path_params["id"]
    logged = gateway.responses.find(owner, response_id)
    if logged is None:
        await load_response_tree(store_of(request), owner, response_id)
        raise stream_expired_error(response_id)
    reader = logged.log.reader(after)
    gateway.metrics.resumed.labels(transport="sse").inc()
    return LogStream(gateway, reader, {})


async def _remove(gateway: Gateway, store: ConversationStore, tree: ConversationTree, response_id: str) -> None:
    """Take it out; a conversation that came into being with it and holds nothing else is not left behind empty."""
    owner, conversation_id = tree.conversation.owner, tree.conversation.id
    conversation = await edit_conversation(
        store, owner, conversation_id, lambda now: plan_response_deletion(now, response_id)
    )
    if tree.turns[response_id].created_at == tree.conversation.created_at:
        left = await store.load(owner, conversation_id)
        with contextlib.suppress(StaleRevisionError):  # somebody goes on in it
            if not left.items:
                await store.delete(owner, conversation_id, expected_rev=left.conversation.rev)
                gateway.hub.publish_deletion(owner, conversation_id)
                return
    gateway.hub.publish_update(conversation)


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise InvalidRequestError("stream must be true or false", param="stream")
    return text == "true"


def _number(text: str | None) -> int:
    """`starting_after`; -1, which is before all events, where there is none. Raises: InvalidRequestError."""
    if text is None:
        return -1
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS:
        raise InvalidRequestError("starting_after must be the sequence_number of an event", param="starting_after")
    return int(text)
