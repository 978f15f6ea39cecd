"""OpenAI's Conversations: creating one, and its items.

A conversation here is a tree. A client that knows nothing of branches sees the path to the active leaf, as a list;
one that does names another leaf, or asks for all branches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from chatcache.chat import additions
from chatcache.chat.removal import TreeEdit, without_item
from chatcache.chat.store import ConversationStore, KeyTaken, StaleRevision
from chatcache.chat.tree import Conversation, ConversationTree, Item
from chatcache.errors import InvalidRequest, NotFound
from chatcache.gateway.body import read_json, read_json_or_nothing
from chatcache.gateway.context import gateway_of
from chatcache.gateway.conversations import item_json, list_conversations, read_rev, store_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.fields import ignored_header, read, unknown_fields
from chatcache.gateway.heads import conversation_json
from chatcache.gateway.jsonio import encode
from chatcache.gateway.messages import to_messages
from chatcache.gateway.paging import PageQuery, page, paged
from chatcache.gateway.principal import owner_of
from chatcache.gateway.repeats import REPLAYED, Once
from chatcache.gateway.response_object import output_items
from chatcache.gateway.wire import ConversationFields, ItemsFields

_TRIES = 5
# Listing this many messages takes about a millisecond; longer conversations leave the event loop alone.
_INLINE_ITEMS = 100


class Conversations(HTTPEndpoint):
    """/v1/conversations."""

    async def get(self, request: Request) -> Response:
        return await list_conversations(request)

    async def post(self, request: Request) -> Response:
        """Create one, empty or with the messages it begins with."""
        body = await read_json_or_nothing(request)
        fields = read(body, ConversationFields)
        ignored = unknown_fields(body, ConversationFields)
        messages = to_messages(fields.items or (), "items")
        gateway, store, owner = gateway_of(request), store_of(request), owner_of(request)
        once = Once.of_request(request, "conversation", body)
        if once is None:
            conversation = await additions.create(store, owner, messages, fields.metadata, fields.title)
            gateway.hub.changed(conversation)
            return json_response(conversation_json(conversation), headers=ignored_header(ignored))
        async with gateway.keys.of(owner, once):
            found = await once.earlier(store, owner)
            try:
                if found is None:
                    conversation = await additions.create(
                        store, owner, messages, fields.metadata, fields.title, once.claim
                    )
            except KeyTaken as taken:  # through another gateway
                found = once.same(taken.claim)
        if found is not None:
            return json_response(conversation_json(await store.get(owner, found)), headers=REPLAYED)
        gateway.hub.changed(conversation)
        return json_response(conversation_json(conversation), headers=ignored_header(ignored))


class Items(HTTPEndpoint):
    """/v1/conversations/{id}/items."""

    async def get(self, request: Request) -> Response:
        """A page of one path, newest first; with `branches=all` the whole tree, oldest first and in one piece."""
        query = request.query_params
        if query.get("branches", "all") != "all":
            raise InvalidRequest('branches must be "all"', param="branches")
        tree = await store_of(request).load(owner_of(request), request.path_params["id"])
        data = (
            _listed(tree, query) if len(tree.items) <= _INLINE_ITEMS else await asyncio.to_thread(_listed, tree, query)
        )
        return Response(data, media_type="application/json")

    async def post(self, request: Request) -> Response:
        """Append messages at the active leaf, or under `parent_id`."""
        store, owner, conversation_id = store_of(request), owner_of(request), request.path_params["id"]
        body = await read_json(request)
        fields = read(body, ItemsFields)
        ignored = unknown_fields(body, ItemsFields)
        messages = to_messages(fields.items, "items")
        conversation, items = await additions.add(
            store, owner, conversation_id, messages, fields.parent_id, expect=fields.rev
        )
        gateway_of(request).hub.changed(conversation)
        entries = wire_items(ConversationTree(conversation, items, ()), items)
        return json_response(page(entries, has_more=False), headers=ignored_header(ignored))


class OneItem(HTTPEndpoint):
    """/v1/conversations/{id}/items/{item_id}."""

    async def get(self, request: Request) -> Response:
        tree = await store_of(request).load(owner_of(request), request.path_params["id"])
        _, entry = find_item(tree, request.path_params["item_id"])
        return json_response(entry)

    async def delete(self, request: Request) -> Response:
        """Take the message out, of every branch that it is on; what followed it follows the one before it."""
        await gateway_of(request).unsaved.settle(request.path_params["id"])
        conversation = await edited(
            store_of(request),
            owner_of(request),
            request.path_params["id"],
            lambda tree: without_item(tree, find_item(tree, request.path_params["item_id"])[0].id),
            expect=read_rev(request),
        )
        gateway_of(request).hub.changed(conversation)
        return json_response(conversation_json(conversation))


async def edited(
    store: ConversationStore,
    owner: str,
    conversation_id: str,
    edit: Callable[[ConversationTree], TreeEdit],
    *,
    expect: int | None = None,
) -> Conversation:
    """Apply an edit to the tree as it is, whatever else is written meanwhile; or (`expect`) only as it was read.

    Raises: what `edit` raises, NotFound, StaleRevision.
    """
    tries = 0
    while True:
        tree = await store.load(owner, conversation_id)
        if expect is not None and tree.conversation.rev != expect:
            raise StaleRevision(tree.conversation, expect)
        try:
            return await store.edit(owner, conversation_id, edit(tree), expect=tree.conversation.rev)
        except StaleRevision:
            tries += 1
            if tries == _TRIES:
                raise


def _listed(tree: ConversationTree, query: Mapping[str, str]) -> bytes:
    if "branches" in query:
        entries = [item_json(item, tree.turn_of(item)) for item in tree.items.values()]
        return encode(paged(entries, PageQuery.read(query, order="asc", limit=None)))
    return encode(paged(wire_items(tree, _path(tree, query.get("leaf"))), PageQuery.read(query)))


def wire_items(tree: ConversationTree, items: Iterable[Item]) -> list[dict[str, object]]:
    """OpenAI's items; what one message holds beside its text are items of their own there."""
    return [entry for item in items for entry in _wire_item(tree, item)]


def _wire_item(tree: ConversationTree, item: Item) -> list[dict[str, object]]:
    whole = item_json(item, tree.turn_of(item))
    if item.role == "assistant":
        return [
            {**whole, **entry} if entry["type"] == "message" else {**_place(item), **entry}
            for entry in output_items(item)
        ]
    if item.role == "tool":
        answer = {"type": "function_call_output", "call_id": item.parts.call_id, "output": item.text}
        return [{**_place(item), "id": item.id, "status": item.status, **answer}]
    return [whole]


def _place(item: Item) -> dict[str, object]:
    return {"parent_id": item.parent_id, "response_id": item.response_id}


def _path(tree: ConversationTree, leaf: str | None) -> tuple[Item, ...]:
    if leaf is not None and leaf not in tree.items:
        raise NotFound(f"no message {leaf[:128]!r} in this conversation", param="leaf")
    return tree.path(leaf if leaf is not None else tree.conversation.active_leaf)


def find_item(tree: ConversationTree, item_id: str) -> tuple[Item, dict[str, object]]:
    """The message, and the form of it that has this id: all of it, or one of the calls it makes. Raises: NotFound."""
    known = tree.items.get(item_id)
    for item in (known,) if known is not None else tree.items.values():
        for entry in _wire_item(tree, item):
            if entry["id"] == item_id:
                return item, entry
    if known is not None:
        return known, item_json(known, tree.turn_of(known))
    raise NotFound(f"no item {item_id[:128]!r} in this conversation", param="item_id")
