"""HTTP routes of the Responses API.

A response runs by itself (`responses.run`) and a connection only reads its log. When the last reader leaves, a
response with `store: false` ends, a stored one continues for a grace period, and a background one until it is complete.

Retrieval answers from the log while the response runs and for some time after, and then from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from chatcache.conversations.fork_points import check_runs_here
from chatcache.conversations.prompt import Message
from chatcache.conversations.store import ConversationStore, ItemQuery, StaleRevisionError
from chatcache.conversations.tree import (
    COMPLETED,
    ConversationTree,
    new_id,
    no_response_error,
    plan_response_deletion,
)
from chatcache.errors import ChatcacheError, EngineError, InvalidRequestError, NotFoundError
from chatcache.gateway.api.compaction import SUMMARY_HEAD, with_question, with_trigger
from chatcache.gateway.api.conversations import edit_conversation, listed_items, parse_rev, store_of
from chatcache.gateway.api.idempotency import REPLAYED_HEADER, IdempotencyKey
from chatcache.gateway.api.pagination import PageQuery, paginate
from chatcache.gateway.api.sse import EventStream, SseFormat
from chatcache.gateway.api.thinking import parse_thinking
from chatcache.gateway.auth.principal import owner_of, principal_of
from chatcache.gateway.context import Gateway, gateway_of
from chatcache.gateway.errors import GatewayUnreachableError, json_response
from chatcache.gateway.json_codec import encode
from chatcache.gateway.limits.admission import CHARS_PER_TOKEN
from chatcache.gateway.middleware import cancel_on_disconnect, read_json
from chatcache.gateway.responses.create import (
    build_turn_request,
    find_running_reply,
    parse_response_tools,
    resolve_references,
    start_idempotent_response,
    start_response,
    with_local_end,
)
from chatcache.gateway.responses.event_log import TERMINAL, LogReader
from chatcache.gateway.responses.log_frames import MAX_RESOLVED_BYTES, LogFrame, has_references, in_turns
from chatcache.gateway.responses.registry import LoggedResponse, Run
from chatcache.gateway.responses.state import (
    encode_created_response,
    encode_logged_response,
    load_response_tree,
    no_stream_error,
    stored_response,
)
from chatcache.gateway.schemas.fields import ignored_header, parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import (
    CompactFields,
    DeliveryFields,
    ResponseFields,
    ResponseThinkingFields,
    SamplingFields,
    ThinkingFields,
)
from chatcache.gateway.schemas.responses import (
    CompactedResponse,
    Compaction,
    DeletedResponse,
    InputText,
    InputTokens,
    ResponseFailure,
    ResponseUsage,
    RetainedMessage,
)

# openai-python treats any blank line as the end of an event, so a ping contains none.
PING = b": keep-alive\n"
_FORMAT = SseFormat(keep_alive=PING)
JSON_TYPE = "application/json"


async def create_response(request: Request) -> Response:
    """POST /v1/responses: create a response and return it, or stream its events."""
    gateway = gateway_of(request)
    body = await read_json(request)
    delivery = parse_fields(body, DeliveryFields)
    ignored = unknown_fields(body, DeliveryFields, ResponseFields, SamplingFields, ResponseThinkingFields)
    principal, idempotency_key = principal_of(request), IdempotencyKey.from_request(request, "response", body)
    # A stored response starts even if the client has disconnected: resending the request would duplicate it.
    if idempotency_key is not None:
        run = await start_idempotent_response(gateway, principal, body, idempotency_key)
        if isinstance(run, str):
            return await _replay_response(request, run, delivery, ignored_header(ignored) | REPLAYED_HEADER)
    elif delivery.store is not False:
        run = await start_response(gateway, principal, body)
    else:
        run = await cancel_on_disconnect(request, start_response(gateway, principal, body))
    del body  # unknown fields can be large and are not needed while the reply is generated
    headers = ignored_header(run.ignored)
    if delivery.stream:
        return LogStream(gateway, run.owner, run.log.reader(), headers)
    if delivery.background:
        return Response(encode_created_response(run.log), headers=headers, media_type=JSON_TYPE)
    return await _ended_answer(request, run.logged, headers)


async def compact_response(request: Request) -> Response:
    """POST /v1/responses/compact: replace a conversation by its user's messages and a summary. Stores nothing."""
    gateway, body = gateway_of(request), await read_json(request)
    parse_fields(body, CompactFields)
    ignored = unknown_fields(body, CompactFields, ThinkingFields)
    names = {*CompactFields.__struct_fields__, *ThinkingFields.__struct_fields__}
    known = {name: value for name, value in body.items() if name in names}
    summary_request = {**known, "input": with_trigger(body.get("input")), "store": False}
    run = await cancel_on_disconnect(request, start_response(gateway, principal_of(request), summary_request))
    with run.log.reader():
        await cancel_on_disconnect(request, _wait_until_finished(gateway, run))
    ended = msgspec.json.decode(encode_logged_response(run.log), type=_EndedCompaction)
    if ended.status != COMPLETED:
        raise EngineError(ended.error.message if ended.error is not None else f"the compaction was {ended.status}")
    kept = _retained_messages(run.prompt_messages[:-1], gateway.max_model_len * CHARS_PER_TOKEN // 4)
    result = CompactedResponse(run.id, "response.compaction", ended.created_at, [*kept, *ended.output], ended.usage)
    return json_response(result, headers=ignored_header(tuple(dict.fromkeys((*run.ignored, *ignored)))))


class _EndedCompaction(msgspec.Struct):
    """The fields of the response object of a compaction that its result has."""

    status: str
    created_at: int
    output: list[Compaction]
    usage: ResponseUsage
    error: ResponseFailure | None = None


def _retained_messages(messages: Sequence[Message], max_chars: int) -> list[RetainedMessage]:
    """Return the latest messages of the user, except earlier summaries, up to a total length."""
    kept: list[RetainedMessage] = []
    for message in reversed(messages):
        text = message["content"]
        if message["role"] == "user" and not text.startswith(SUMMARY_HEAD):
            max_chars -= len(text)
            if max_chars < 0:
                break
            kept.append(RetainedMessage(new_id("msg"), "user", "completed", [InputText(text)]))
    return kept[::-1]


async def _replay_response(
    request: Request, response_id: str, delivery: DeliveryFields, headers: dict[str, str]
) -> Response:
    """Answer a repeated request with the response that the first one created.

    Raises: NotFoundError if it was deleted.
    """
    gateway, owner = gateway_of(request), owner_of(request)
    find = gateway.find_caught_up if delivery.stream else gateway.find_response
    logged = await find(owner, response_id)
    if logged is None:  # its log has expired
        tree = await load_response_tree(gateway.opened_store(), owner, response_id)
        if delivery.stream:
            raise no_stream_error(tree, response_id)
        return json_response(stored_response(tree, response_id), headers=headers)
    if delivery.stream:
        return LogStream(gateway, owner, logged.log.reader(), headers)
    if not delivery.background:
        return await _ended_answer(request, logged, headers)
    await logged.catch_up()
    return _logged_answer(gateway, logged, headers)


async def _ended_answer(request: Request, logged: LoggedResponse, headers: Mapping[str, str]) -> Response:
    """Wait until a response has ended, also on another gateway that takes it over, and return its answer."""
    gateway, reader = gateway_of(request), logged.log.reader()
    while logged.run is not None:
        with reader:
            await cancel_on_disconnect(request, _wait_until_finished(gateway, logged.run))
        if logged.log.failure is None:
            break
        logged, reader = await gateway.reopen(logged.owner, reader)
    return _logged_answer(gateway, logged, headers)


async def _wait_until_finished(gateway: Gateway, run: Run) -> None:
    """Wait for the end of the response; a cancelled wait is a client disconnect."""
    try:
        await asyncio.wait([run.task])
    except asyncio.CancelledError:
        gateway.metrics.disconnects.inc()
        raise


class LogStream(EventStream):
    """The numbered frames of a response as SSE. Counts as a reader while it is connected."""

    def __init__(self, gateway: Gateway, owner: str, reader: LogReader, headers: dict[str, str]) -> None:
        self._gateway = gateway
        self._owner = owner
        self._reader = reader
        self._reading = contextlib.ExitStack()
        self._is_complete = False
        self._num_sent = reader.sent_number + 1  # numbered frames
        self._has_ended = False
        self._is_within_frame = False  # has sent a part of a frame
        super().__init__(
            self._frames(),
            keep_alive_s=gateway.config.sse_keep_alive_interval_s,
            format=_FORMAT,
            on_end=self._count_disconnect,
            headers=headers,
        )

    def closing_frame(self, error: ChatcacheError) -> bytes:
        """Return OpenAI's `error` event with the next number.

        Returns b"" after the terminal event, and within an event.
        """
        if self._has_ended or self._is_within_frame:
            return b""
        body = {"code": error.code, "message": error.message, "param": error.param}
        return _sse_event("error", encode({"type": "error", "sequence_number": self._num_sent, **body}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reading:
            self._reading.enter_context(self._reader)
            await super().__call__(scope, receive, send)

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        """Yield all available frames in one chunk, each with its OpenAI event name, or one large frame in several."""
        try:
            while frames := await self._next():
                if has_references(frames[0]):
                    self._is_within_frame = True
                    yield b"event: %s\ndata: " % frames[0].kind.encode()
                    pieces = self._reader.pieces(frames[0])
                    async for piece in in_turns(pieces, self._gateway.loop_turns, self._owner):
                        yield piece
                    yield b"\n\n"
                    self._is_within_frame = False
                else:
                    yield b"".join(_sse_event(frame.kind, frame.data) for frame in frames)
                # The consumer asks for more only after it has sent these.
                self._num_sent += len(frames)
                self._has_ended |= any(frame.kind in TERMINAL for frame in frames)
        except ChatcacheError as error:  # another gateway ran the response, and does not answer any more
            yield self.closing_frame(error)
        self._is_complete = True

    async def _next(self) -> Sequence[LogFrame]:
        """Wait for frames, also of another gateway that takes the response over. Raises: ChatcacheError."""
        while True:
            try:
                return await self._reader.next(self._gateway.loop_turns, self._owner)
            except GatewayUnreachableError:
                _, self._reader = await self._gateway.reopen(self._owner, self._reader)
                self._reading.close()
                self._reading.enter_context(self._reader)

    async def _count_disconnect(self) -> None:
        if not self._is_complete:
            self._gateway.metrics.disconnects.inc()


def _sse_event(kind: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


def _logged_answer(gateway: Gateway, logged: LoggedResponse, headers: Mapping[str, str]) -> Response:
    """Return the response object of a log, in pieces if it has many log-probabilities."""
    logprobs, data = logged.log.logprobs, encode_logged_response(logged.log)
    pieces = logprobs.pieces(data)
    if logprobs.num_resolved_bytes(data) <= MAX_RESOLVED_BYTES:
        return Response(b"".join(pieces), headers=dict(headers), media_type=JSON_TYPE)
    pieces_in_turns = in_turns(pieces, gateway.loop_turns, logged.owner)
    return StreamingResponse(pieces_in_turns, headers=dict(headers), media_type=JSON_TYPE)


_MAX_DIGITS = 15


async def get_response(request: Request) -> Response:
    """GET /v1/responses/{id}: the response now, or with `stream=true` its events."""
    query = request.query_params
    if _parse_bool(query.get("stream", "false")):
        return await _resume_stream(request, _parse_starting_after(query.get("starting_after")))
    return await _current_response(request)


async def delete_response(request: Request) -> Response:
    """DELETE /v1/responses/{id}: cancel the response if it runs, and delete it.

    Messages that other responses continue stay in the conversation. The revision is that before the cancellation.
    """
    gateway, owner, store = gateway_of(request), owner_of(request), store_of(request)
    response_id, rev = request.path_params["id"], parse_rev(request)
    logged = await gateway.find_response(owner, response_id)
    if logged is not None and logged.run is not None:
        if rev is not None:
            head = (await load_response_tree(store, owner, response_id)).conversation
            if head.rev != rev:
                raise StaleRevisionError(head, rev)
            rev = None  # the end of the response makes another revision
        await logged.run.cancel()
    await gateway.pending_saves.flush(response_id)
    try:
        tree = await load_response_tree(store, owner, response_id)
        await _delete_response(gateway, store, tree, response_id, rev)
    except NotFoundError:  # it is not stored, or was deleted meanwhile
        if logged is None:
            raise no_response_error(response_id) from None
    gateway.remove_log(owner, response_id)
    return json_response(DeletedResponse(response_id, "response", deleted=True))


async def cancel_response(request: Request) -> Response:
    """POST /v1/responses/{id}/cancel: end the response and return it.

    It contains a receipt: tokens generated after the cancel, pages freed and latency. A response that has ended is
    returned unchanged.
    """
    gateway = gateway_of(request)
    logged = await gateway.find_response(owner_of(request), request.path_params["id"])
    if logged is not None:
        if logged.run is not None:
            await logged.run.cancel()
        return _logged_answer(gateway, logged, {})
    response_id = request.path_params["id"]
    tree = await load_response_tree(store_of(request), owner_of(request), response_id)
    check_runs_here(tree.turns[response_id], "cancel", "response_id")
    return json_response(stored_response(tree, response_id))


async def list_input_items(request: Request) -> Response:
    """GET /v1/responses/{id}/input_items: the messages of the request."""
    response_id = request.path_params["id"]
    query = PageQuery.parse(request.query_params)
    tree = await load_response_tree(store_of(request), owner_of(request), response_id)
    return json_response(paginate(listed_items(tree, tree.inputs(response_id)), query))


async def count_input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens: length of the prompt. Nothing is computed or stored."""
    gateway, owner = gateway_of(request), owner_of(request)
    body = await read_json(request)
    fields = parse_fields(body, ResponseFields)
    parse_fields(body, SamplingFields)  # validates the same fields as POST /v1/responses
    thinking_fields = parse_fields(body, ResponseThinkingFields)
    ignored = unknown_fields(body, ResponseFields, SamplingFields, ResponseThinkingFields)
    model = await gateway.require_model(fields.model)
    functions = parse_response_tools(model, fields).functions
    running = await find_running_reply(gateway, owner, fields)
    given = await resolve_references(gateway, owner, with_question(fields.input))
    thinking = parse_thinking(thinking_fields, model.service.thinking)
    turn = build_turn_request(fields, given, owner, gateway.model_name, functions, running, thinking)
    turn = with_local_end(gateway, turn)
    async with gateway.tokenize_throttle.acquire(owner, len(await request.body())):
        planned = await model.conversations.plan(turn)
    result = InputTokens("response.input_tokens", len(planned.prompt.token_ids))
    return json_response(result, headers=ignored_header((*thinking.ignored, *ignored)))


async def _current_response(request: Request) -> Response:
    gateway, owner, response_id = gateway_of(request), owner_of(request), request.path_params["id"]
    with contextlib.suppress(GatewayUnreachableError):  # the stored state is the answer then
        logged = await gateway.find_response(owner, response_id)
        if logged is not None:
            await logged.catch_up()
            return _logged_answer(gateway, logged, {})
    tree = await load_response_tree(store_of(request), owner, response_id)
    return json_response(stored_response(tree, response_id))


async def _resume_stream(request: Request, after: int) -> Response:
    gateway, owner, response_id = gateway_of(request), owner_of(request), request.path_params["id"]
    logged = await gateway.find_caught_up(owner, response_id, after)
    if logged is None:
        raise no_stream_error(await load_response_tree(store_of(request), owner, response_id), response_id)
    reader = logged.log.reader(after)
    gateway.metrics.resumed.labels(transport="sse").inc()
    return LogStream(gateway, owner, reader, {})


async def _delete_response(
    gateway: Gateway, store: ConversationStore, tree: ConversationTree, response_id: str, rev: int | None
) -> None:
    """Delete the response, and its conversation if it was created with it and is empty now."""
    owner, conversation_id = tree.conversation.owner, tree.conversation.id
    conversation = await edit_conversation(
        store, owner, conversation_id, lambda now: plan_response_deletion(now, response_id), expected_rev=rev
    )
    if tree.turns[response_id].created_at == tree.conversation.created_at:
        try:
            remaining = await store.list_items(owner, conversation_id, ItemQuery(all_branches=True, limit=1))
            if not remaining.items:
                await store.delete(owner, conversation_id, expected_rev=remaining.conversation.rev)
                gateway.responses.remove_conversation(owner, conversation_id)
                gateway.hub.publish_deletion(owner, conversation_id)
                return
        except StaleRevisionError:
            pass  # the conversation was continued meanwhile
        except NotFoundError:
            return  # it was deleted meanwhile
    gateway.hub.publish_update(conversation)


def _parse_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise InvalidRequestError("stream must be true or false", param="stream")
    return text == "true"


def _parse_starting_after(text: str | None) -> int:
    """Parse `starting_after`; -1, before all events, if absent. Raises: InvalidRequestError."""
    if text is None:
        return -1
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS:
        raise InvalidRequestError("starting_after must be the sequence_number of an event", param="starting_after")
    return int(text)
