"""REST of conversations: what the page lists, finds, shows, renames and deletes.

OpenAI's Conversations: creating one, and its items.

A conversation here is a tree. A client that knows nothing of branches sees the path to the active leaf, as a list;
one that does names another leaf, or asks for all branches.

POST /v1/conversations/{id}/title: a name from the model, for the price of asking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.replies.events import ReplyDone, ReplyFinished
from chatcache.conversations.replies.service import Reply
from chatcache.conversations.search import SearchHit, SearchQuery
from chatcache.conversations.store import ConversationStore, IdempotencyConflictError, StaleRevisionError, encode_cursor
from chatcache.conversations.titles import TITLE, SideTasks, clean_title
from chatcache.conversations.tree import (
    FORKED,
    Conversation,
    ConversationTree,
    Item,
    MessageDeletion,
    Turn,
    Usage,
    plan_message_deletion,
)
from chatcache.conversations.turns import add_messages, save_new_conversation
from chatcache.errors import EngineError, InvalidRequestError, NotFoundError
from chatcache.gateway.api.idempotency import REPLAYED, IdempotencyCache
from chatcache.gateway.api.messages import to_messages
from chatcache.gateway.api.pagination import PageQuery, page, paged, read_limit
from chatcache.gateway.auth.principal import owner_of, principal_of
from chatcache.gateway.context import gateway_of
from chatcache.gateway.errors import conversation_json, json_response
from chatcache.gateway.json_codec import encode
from chatcache.gateway.limits.admission import CHARS_PER_TOKEN
from chatcache.gateway.limits.rate_limits import RequestCost
from chatcache.gateway.metrics import Metrics, record_reply_metrics
from chatcache.gateway.middleware import read_json, read_json_or_nothing, until_disconnect
from chatcache.gateway.responses.objects import output_items, usage_json
from chatcache.gateway.schemas.fields import ignored_header, read, unknown_fields
from chatcache.gateway.schemas.requests import ConversationFields, ConversationPatch, ItemsFields, TitleFields


def item_json(item: Item, turn: Turn | None) -> dict[str, object]:
    """The wire form of a message; `turn` is the response that made it."""
    kind = "output_text" if item.role == "assistant" else "input_text"
    part: dict[str, object] = {"type": kind, "text": item.text}
    forked = item.finish_reason == FORKED  # the response's figures are of its outputs
    if kind == "output_text":
        part["annotations"] = []
    return {
        "id": item.id,
        "type": "message",
        "role": item.role,
        "status": item.status,
        "content": [part],
        "parent_id": item.parent_id,
        "response_id": item.response_id,
        "index": item.index,
        "num_tokens": len(item.token_ids) or None,
        "finish_reason": item.finish_reason,
        "created_at": int(item.created_at),
        "usage": usage_json(turn.usage) if turn is not None and turn.usage is not None and not forked else None,
    }


def _match_json(hit: SearchHit) -> dict[str, object]:
    """Where the words are. Marks are [start, end] in characters (code points), never markup."""
    return {
        "item_id": hit.item_id,
        "role": hit.role,
        "snippet": {"text": hit.snippet.text, "marks": hit.snippet.marks} if hit.snippet is not None else None,
        "title_marks": hit.title_marks,
    }


async def list_conversations(request: Request) -> Response:
    """By last change, newest first; with `query` only those where the words are found, each with its `match`."""
    query = request.query_params
    limit, after, words = read_limit(query.get("limit", "20")), query.get("after"), query.get("query", "")
    store, owner = store_of(request), owner_of(request)
    if words.strip():
        hits = await store.search(owner, SearchQuery.parse(words), limit + 1, after)
        heads: Sequence[Conversation] = [hit.conversation for hit in hits]
        entries = [{**conversation_json(hit.conversation), "match": _match_json(hit)} for hit in hits]
    else:
        heads = await store.list(owner, limit + 1, after)
        entries = [conversation_json(head) for head in heads]
    has_more = len(heads) > limit
    found = page(entries[:limit], has_more=has_more)
    return json_response({**found, "next": encode_cursor(heads[limit - 1]) if has_more else None})


async def get_conversation(request: Request) -> Response:
    conversation = await store_of(request).get(owner_of(request), request.path_params["id"])
    return json_response(conversation_json(conversation))


async def update_conversation(request: Request) -> Response:
    body = await read_json(request)
    patch = read(body, ConversationPatch)
    ignored = unknown_fields(body, ConversationPatch)
    conversation = await store_of(request).update(
        owner_of(request),
        request.path_params["id"],
        title=patch.title,
        active_leaf=patch.active_leaf,
        metadata=patch.metadata,
        expected_rev=patch.rev,
    )
    gateway_of(request).hub.changed(conversation)
    return json_response(conversation_json(conversation), headers=ignored_header(ignored))


async def delete_conversation(request: Request) -> Response:
    """Delete it, and end what is still being said in it."""
    gateway, owner, conversation_id = gateway_of(request), owner_of(request), request.path_params["id"]
    await store_of(request).delete(owner, conversation_id, expected_rev=read_rev(request))
    gateway.hub.deleted(owner, conversation_id)
    runs = [run for run in gateway.responses.running(owner) if run.conversation_id == conversation_id]
    await asyncio.gather(*(run.cancel() for run in runs))
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


def read_rev(request: Request) -> int | None:
    """`rev` of a query. Raises: InvalidRequestError."""
    text = request.query_params.get("rev")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise InvalidRequestError("rev must be a whole number, the one the conversation was read with", param="rev")
    return int(text)


def store_of(request: Request) -> ConversationStore:
    """Raises: OverloadedError before it is open."""
    return gateway_of(request).opened_store()


_TRIES = 5
# Listing this many messages takes about a millisecond; longer conversations leave the event loop alone.
_INLINE_ITEMS = 100


async def create_conversation(request: Request) -> Response:
    """Create one, empty or with the messages it begins with."""
    body = await read_json_or_nothing(request)
    fields = read(body, ConversationFields)
    ignored = unknown_fields(body, ConversationFields)
    messages = to_messages(fields.items or (), "items")
    gateway, store, owner = gateway_of(request), store_of(request), owner_of(request)
    once = IdempotencyCache.of_request(request, "conversation", body)
    if once is None:
        conversation = await save_new_conversation(store, owner, messages, fields.metadata, fields.title)
        gateway.hub.changed(conversation)
        return json_response(conversation_json(conversation), headers=ignored_header(ignored))
    async with gateway.keys.of(owner, once):
        found = await once.earlier(store, owner)
        try:
            if found is None:
                conversation = await save_new_conversation(
                    store, owner, messages, fields.metadata, fields.title, once.claim
                )
        except IdempotencyConflictError as taken:  # through another gateway
            found = once.same(taken.claim)
    if found is not None:
        return json_response(conversation_json(await store.get(owner, found)), headers=REPLAYED)
    gateway.hub.changed(conversation)
    return json_response(conversation_json(conversation), headers=ignored_header(ignored))


async def list_items(request: Request) -> Response:
    """A page of one path, newest first; with `branches=all` the whole tree, oldest first and in one piece."""
    query = request.query_params
    if query.get("branches", "all") != "all":
        raise InvalidRequestError('branches must be "all"', param="branches")
    tree = await store_of(request).load(owner_of(request), request.path_params["id"])
    data = _listed(tree, query) if len(tree.items) <= _INLINE_ITEMS else await asyncio.to_thread(_listed, tree, query)
    return Response(data, media_type="application/json")


async def create_items(request: Request) -> Response:
    """Append messages at the active leaf, or under `parent_id`."""
    store, owner, conversation_id = store_of(request), owner_of(request), request.path_params["id"]
    body = await read_json(request)
    fields = read(body, ItemsFields)
    ignored = unknown_fields(body, ItemsFields)
    messages = to_messages(fields.items, "items")
    conversation, items = await add_messages(
        store, owner, conversation_id, messages, fields.parent_id, expected_rev=fields.rev
    )
    gateway_of(request).hub.changed(conversation)
    entries = wire_items(ConversationTree(conversation, items, ()), items)
    return json_response(page(entries, has_more=False), headers=ignored_header(ignored))


async def get_item(request: Request) -> Response:
    tree = await store_of(request).load(owner_of(request), request.path_params["id"])
    _, entry = find_item(tree, request.path_params["item_id"])
    return json_response(entry)


async def delete_item(request: Request) -> Response:
    """Take the message out, of every branch that it is on; what followed it follows the one before it."""
    await gateway_of(request).unsaved.settle(request.path_params["id"])
    conversation = await edited(
        store_of(request),
        owner_of(request),
        request.path_params["id"],
        lambda tree: plan_message_deletion(tree, find_item(tree, request.path_params["item_id"])[0].id),
        expected_rev=read_rev(request),
    )
    gateway_of(request).hub.changed(conversation)
    return json_response(conversation_json(conversation))


async def edited(
    store: ConversationStore,
    owner: str,
    conversation_id: str,
    edit: Callable[[ConversationTree], MessageDeletion],
    *,
    expected_rev: int | None = None,
) -> Conversation:
    """Apply an edit to the tree as it is, whatever else is written meanwhile; or (`expect`) only as it was read.

    Raises: what `edit` raises, NotFoundError, StaleRevisionError.
    """
    tries = 0
    while True:
        tree = await store.load(owner, conversation_id)
        if expected_rev is not None and tree.conversation.rev != expected_rev:
            raise StaleRevisionError(tree.conversation, expected_rev)
        try:
            return await store.delete_messages(owner, conversation_id, edit(tree), expected_rev=tree.conversation.rev)
        except StaleRevisionError:
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
        raise NotFoundError(f"no message {leaf[:128]!r} in this conversation", param="leaf")
    return tree.path(leaf if leaf is not None else tree.conversation.active_leaf)


def find_item(tree: ConversationTree, item_id: str) -> tuple[Item, dict[str, object]]:
    """The message, and the form of it that has this id: all of it, or one of the calls it makes.

    Raises: NotFoundError.
    """
    known = tree.items.get(item_id)
    for item in (known,) if known is not None else tree.items.values():
        for entry in _wire_item(tree, item):
            if entry["id"] == item_id:
                return item, entry
    if known is not None:
        return known, item_json(known, tree.turn_of(known))
    raise NotFoundError(f"no item {item_id[:128]!r} in this conversation", param="item_id")


async def generate_title(request: Request) -> Response:
    """Ask the model for a title and store it, unless it says nothing useful or somebody was faster."""
    gateway, store, principal = gateway_of(request), store_of(request), principal_of(request)
    owner = principal.owner
    body = await read_json_or_nothing(request)
    fields = read(body, TitleFields)
    ignored = unknown_fields(body, TitleFields)
    model = await gateway.ready(fields.model)
    tree = await store.load(owner, request.path_params["id"])
    before = tree.conversation
    if fields.rev is not None and fields.rev != before.rev:
        raise StaleRevisionError(before, fields.rev)
    tasks = SideTasks(model.conversations, model.service)
    work = RequestCost(len(TITLE.question) // CHARS_PER_TOKEN, max_tokens=TITLE.max_tokens)
    async with gateway.door.entering(principal, work) as permit:
        reply = await tasks.start(TITLE, tree, gateway.model_name, gateway.lowest_priority)
        permit.cover(reply)
    text, usage = await until_disconnect(request, _heard(reply, gateway.metrics))
    title = clean_title(text)
    conversation = await _named(store, before, title) if title else await store.get(owner, before.id)
    if conversation.rev != before.rev:
        gateway.hub.changed(conversation)
    answer = {
        "object": "conversation.title",
        "title": conversation.title,
        "generated": bool(title) and conversation.title == title,
        "usage": usage_json(usage),
        "conversation": conversation_json(conversation),
    }
    return json_response(answer, headers=ignored_header(ignored))


async def _heard(reply: Reply, metrics: Metrics) -> tuple[str, Usage]:
    """What was said, and what it took."""
    text = ""
    async with reply:
        async for event in record_reply_metrics(reply, metrics):
            if isinstance(event, ReplyDone):
                text = event.text
            elif isinstance(event, ReplyFinished):
                return text, Usage(event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens)
    raise EngineError("the engine stopped without saying why")


async def _named(store: ConversationStore, before: Conversation, title: str) -> Conversation:
    """Store a title, whatever else has changed since `before`; but a name that somebody gave it meanwhile stays."""
    present = before
    while present.title == before.title != title:
        try:
            return await store.update(before.owner, before.id, title=title, expected_rev=present.rev)
        except StaleRevisionError as stale:
            present = stale.current
    return present
