"""`/v1/responses/{id}`: retrieving, following, cancelling and deleting a response that somebody began.

While a response runs, and for a while after, it is what its log says; later it is what the tree says.
"""

from __future__ import annotations

import contextlib

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from chatcache.chat.removal import without_response
from chatcache.chat.store import ConversationStore, StaleRevision
from chatcache.chat.tree import ConversationTree
from chatcache.errors import InvalidRequest, NotFound
from chatcache.gateway.body import read_json
from chatcache.gateway.context import Gateway, gateway_of
from chatcache.gateway.conversation_items import edited, wire_items
from chatcache.gateway.conversations import store_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.fields import ignored_header, read, unknown_fields
from chatcache.gateway.paging import PageQuery, paged
from chatcache.gateway.principal import owner_of
from chatcache.gateway.response_run import response_tools, running_reply, turn_request
from chatcache.gateway.response_state import as_logged, as_stored, find_stored, stream_expired
from chatcache.gateway.responses_http import JSON, LogStream
from chatcache.gateway.wire import ResponseFields, SamplingFields

_MAX_DIGITS = 15


class OneResponse(HTTPEndpoint):
    """/v1/responses/{id}."""

    async def get(self, request: Request) -> Response:
        """As it is now; with `stream=true`, its events from `starting_after` on."""
        query = request.query_params
        if _flag(query.get("stream", "false")):
            return await _follow(request, _number(query.get("starting_after")))
        return await _now(request)

    async def delete(self, request: Request) -> Response:
        """End it if it runs. What others were continued from stays in the conversation as messages."""
        gateway, owner, store = gateway_of(request), owner_of(request), store_of(request)
        response_id = request.path_params["id"]
        logged = gateway.responses.find(owner, response_id)
        if logged is not None and logged.run is not None:
            await logged.run.cancel()
        await gateway.unsaved.settle(response_id)
        try:
            tree = await find_stored(store, owner, response_id)
        except NotFound:
            if logged is None:
                raise
        else:
            await _remove(gateway, store, tree, response_id)
        gateway.responses.forget(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel(request: Request) -> Response:
    """POST /v1/responses/{id}/cancel: what it had said, and the receipt. One that has ended is answered as it is."""
    logged = gateway_of(request).responses.find(owner_of(request), request.path_params["id"])
    if logged is not None and logged.run is not None:
        await logged.run.cancel()
        return Response(as_logged(logged.log), media_type=JSON)
    return await _now(request)


async def input_items(request: Request) -> Response:
    """GET /v1/responses/{id}/input_items: the messages that came with the request."""
    response_id = request.path_params["id"]
    query = PageQuery.read(request.query_params)
    tree = await find_stored(store_of(request), owner_of(request), response_id)
    return json_response(paged(wire_items(tree, tree.inputs(response_id)), query))


class InputTokens(HTTPEndpoint):
    """/v1/responses/input_tokens. A class, so that no other method is taken for one of a response of that name."""

    async def post(self, request: Request) -> Response:
        """How long the prompt would be. Nothing is computed or stored."""
        gateway, owner = gateway_of(request), owner_of(request)
        body = await read_json(request)
        fields = read(body, ResponseFields)
        read(body, SamplingFields)  # what a response would refuse is refused here
        ignored = unknown_fields(body, ResponseFields, SamplingFields)
        model = await gateway.ready(fields.model)
        functions = response_tools(model, fields).functions
        running = await running_reply(gateway, owner, fields)
        asked = turn_request(fields, owner, gateway.model_name, functions, running)
        async with gateway.counting.turn(owner, len(await request.body())):
            planned = await model.conversations.plan(asked)
        answer = {"object": "response.input_tokens", "input_tokens": len(planned.prompt.token_ids)}
        return json_response(answer, headers=ignored_header(ignored))


async def _now(request: Request) -> Response:
    gateway, owner, response_id = gateway_of(request), owner_of(request), request.path_params["id"]
    logged = gateway.responses.find(owner, response_id)
    if logged is not None:
        return Response(as_logged(logged.log), media_type=JSON)
    tree = await find_stored(store_of(request), owner, response_id)
    return json_response(as_stored(tree, response_id))


async def _follow(request: Request, after: int) -> Response:
    gateway, owner, response_id = gateway_of(request), owner_of(request), request.path_params["id"]
    logged = gateway.responses.find(owner, response_id)
    if logged is None:
        await find_stored(store_of(request), owner, response_id)
        raise stream_expired(response_id)
    reader = logged.log.reader(after)
    gateway.metrics.resumed.labels(transport="sse").inc()
    return LogStream(gateway, reader, {})


async def _remove(gateway: Gateway, store: ConversationStore, tree: ConversationTree, response_id: str) -> None:
    """Take it out; a conversation that came into being with it and holds nothing else is not left behind empty."""
    owner, conversation_id = tree.conversation.owner, tree.conversation.id
    conversation = await edited(store, owner, conversation_id, lambda now: without_response(now, response_id))
    if tree.turns[response_id].created_at == tree.conversation.created_at:
        left = await store.load(owner, conversation_id)
        with contextlib.suppress(StaleRevision):  # somebody goes on in it
            if not left.items:
                await store.delete(owner, conversation_id, expect=left.conversation.rev)
                gateway.hub.deleted(owner, conversation_id)
                return
    gateway.hub.changed(conversation)


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise InvalidRequest("stream must be true or false", param="stream")
    return text == "true"


def _number(text: str | None) -> int:
    """`starting_after`; -1, which is before all events, where there is none. Raises: InvalidRequest."""
    if text is None:
        return -1
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS:
        raise InvalidRequest("starting_after must be the sequence_number of an event", param="starting_after")
    return int(text)
