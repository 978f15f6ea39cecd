"""Routes of conversations and their items: list, search, create, read, edit, delete, title.

A conversation is a tree of messages. Items are listed along the path to the active leaf, which is OpenAI's flat list;
clients that support branches name another leaf or request all branches.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.replies.events import ReplyDone, ReplyFinished
from chatcache.conversations.replies.service import Reply
from chatcache.conversations.search import SearchHit, SearchQuery
from chatcache.conversations.store import (
    ConversationStore,
    IdempotencyConflictError,
    ItemQuery,
    StaleRevisionError,
    encode_cursor,
)
from chatcache.conversations.titles import TITLE, SideTasks, clean_title
from chatcache.conversations.tree import (
    FORKED,
    INCOMPLETE,
    MAX_EDIT_ATTEMPTS,
    Conversation,
    ConversationTree,
    Item,
    MessageDeletion,
    Turn,
    Usage,
    changes_too_often_error,
    new_id,
    plan_message_deletion,
)
from chatcache.conversations.turns import add_messages, save_new_conversation
from chatcache.errors import EngineError, InvalidRequestError, NotFoundError
from chatcache.gateway.api.attachments import replace_files
from chatcache.gateway.api.idempotency import REPLAYED_HEADER, IdempotencyKey
from chatcache.gateway.api.messages import to_messages
from chatcache.gateway.api.pagination import PageQuery, end_ids, make_page, paginate, parse_limit
from chatcache.gateway.api.params import rename_error_params
from chatcache.gateway.auth.principal import owner_of, principal_of
from chatcache.gateway.context import gateway_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.json_codec import encode
from chatcache.gateway.limits.admission import CHARS_PER_TOKEN
from chatcache.gateway.limits.rate_limits import RequestCost
from chatcache.gateway.metrics import Metrics, record_reply_metrics
from chatcache.gateway.middleware import cancel_on_disconnect, read_json, read_optional_json
from chatcache.gateway.responses.objects import STATISTICS, has_summary, output_items
from chatcache.gateway.schemas import responses as schemas
from chatcache.gateway.schemas.fields import ignored_header, parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import (
    BranchFields,
    ConversationFields,
    ConversationPatch,
    ItemsFields,
    TitleFields,
)
from chatcache.transfer.importer import copy_branch

_Echoed = TypeVar("_Echoed", bound=msgspec.Struct)


def message_item(item: Item, turn: Turn | None) -> schemas.Item:
    """Convert a message to one item. `turn`: the response that generated it."""
    is_output = item.role == "assistant"
    # A fork shares the tokens of its source: the usage of the turn counts them for the source's outputs only.
    usage = turn.usage if turn is not None and item.finish_reason != FORKED else None
    return schemas.Item(
        id=item.id,
        role=cast(Any, item.role),
        status=item.status,
        content=[schemas.OutputText(item.text, []) if is_output else schemas.InputText(item.text)],
        parent_id=item.parent_id,
        response_id=item.response_id,
        index=item.index,
        num_tokens=len(item.token_ids) or None,
        finish_reason=item.finish_reason,
        created_at=int(item.created_at),
        usage=schemas.ResponseUsage.from_usage(usage) if usage is not None else None,
        incomplete_details=_echoed(turn, "incomplete_details", schemas.IncompleteDetails)
        if turn is not None and item.status == INCOMPLETE
        else UNSET,
        statistics=_echoed(turn, STATISTICS, schemas.Statistics) if usage is not None and turn is not None else UNSET,
    )


def _echoed(turn: Turn, name: str, kind: type[_Echoed]) -> _Echoed | UnsetType:
    """Return what a stored response has under this name; that of an imported one may be malformed."""
    try:
        return msgspec.convert(turn.echo[name], kind)
    except (KeyError, msgspec.ValidationError):
        return UNSET


def _found_conversation(hit: SearchHit) -> schemas.FoundConversation:
    """Convert a search result to the conversation and the text ranges where words were found.

    The ranges (marks) are [start, end] in characters, never markup.
    """
    found = schemas.FoundConversation.from_head(hit.conversation)
    snippet = schemas.Snippet(hit.snippet.text, list(hit.snippet.marks)) if hit.snippet is not None else None
    found.match = schemas.Match(hit.item_id, hit.role, snippet, list(hit.title_marks))
    return found


async def list_conversations(request: Request) -> Response:
    """GET /v1/conversations: newest change first; with `query`, the results of a search."""
    query = request.query_params
    limit, after, words = parse_limit(query.get("limit", "20")), query.get("after"), query.get("query", "")
    store, owner = store_of(request), owner_of(request)
    with rename_error_params(conversation="after"):
        if words.strip():
            hits = await store.search(owner, SearchQuery.parse(words), limit + 1, after)
            heads: Sequence[Conversation] = [hit.conversation for hit in hits]
            entries = [_found_conversation(hit) for hit in hits]
        else:
            heads = await store.list(owner, limit + 1, after)
            entries = [schemas.FoundConversation.from_head(head) for head in heads]
    has_more, shown = len(heads) > limit, entries[:limit]
    cursor = encode_cursor(heads[limit - 1]) if has_more else None
    first_id, last_id = end_ids(shown)
    return json_response(schemas.ConversationPage("list", shown, first_id, last_id, has_more, cursor))


async def get_conversation(request: Request) -> Response:
    """GET /v1/conversations/{id}: return a conversation without its messages."""
    conversation = await store_of(request).get(owner_of(request), request.path_params["id"])
    return json_response(schemas.Conversation.from_head(conversation))


async def update_conversation(request: Request) -> Response:
    """POST /v1/conversations/{id}: change title, metadata or active leaf."""
    body = await read_json(request)
    patch = parse_fields(body, ConversationPatch)
    ignored = unknown_fields(body, ConversationPatch)
    conversation = await store_of(request).update(
        owner_of(request),
        request.path_params["id"],
        title=patch.title,
        active_leaf=patch.active_leaf,
        metadata=patch.metadata,
        expected_rev=patch.rev,
    )
    gateway_of(request).hub.publish_update(conversation)
    return json_response(schemas.Conversation.from_head(conversation), headers=ignored_header(ignored))


async def delete_conversation(request: Request) -> Response:
    """DELETE /v1/conversations/{id}: delete it and cancel its running responses."""
    gateway, owner, conversation_id = gateway_of(request), owner_of(request), request.path_params["id"]
    await store_of(request).delete(owner, conversation_id, expected_rev=parse_rev(request))
    runs = gateway.responses.remove_conversation(owner, conversation_id)
    gateway.hub.publish_deletion(owner, conversation_id)
    await asyncio.gather(*(run.cancel() for run in runs))
    return json_response(schemas.Deleted(conversation_id, "conversation.deleted", deleted=True))


def parse_rev(request: Request) -> int | None:
    """Parse the `rev` parameter of the query. Raises: InvalidRequestError."""
    text = request.query_params.get("rev")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise InvalidRequestError("rev must be a whole number, the one the conversation was read with", param="rev")
    return int(text)


def store_of(request: Request) -> ConversationStore:
    """Return the open store. Raises: OverloadedError before it is open."""
    return gateway_of(request).opened_store()


# Listing this many messages takes about a millisecond; longer conversations are listed in a thread.
_INLINE_ITEMS = 100


async def create_conversation(request: Request) -> Response:
    """POST /v1/conversations: create a conversation, empty or with messages."""
    body = await read_optional_json(request)
    fields = parse_fields(body, ConversationFields)
    ignored = unknown_fields(body, ConversationFields)
    gateway, store, owner = gateway_of(request), store_of(request), owner_of(request)
    messages = to_messages(await replace_files(gateway, owner, fields.items or (), "items"), "items")
    idempotency_key = IdempotencyKey.from_request(request, "conversation", body)
    if idempotency_key is None:
        conversation = await save_new_conversation(store, owner, messages, fields.metadata, fields.title)
        gateway.hub.publish_update(conversation)
        return json_response(schemas.Conversation.from_head(conversation), headers=ignored_header(ignored))
    async with gateway.idempotency_locks.get(owner, idempotency_key):
        found = await idempotency_key.find_target(store, owner)
        try:
            if found is None:
                conversation = await save_new_conversation(
                    store, owner, messages, fields.metadata, fields.title, idempotency_key.claim
                )
        except IdempotencyConflictError as conflict:  # through another gateway
            found = idempotency_key.resolve(conflict.claim)
    if found is not None:
        return json_response(schemas.Conversation.from_head(await store.get(owner, found)), headers=REPLAYED_HEADER)
    gateway.hub.publish_update(conversation)
    return json_response(schemas.Conversation.from_head(conversation), headers=ignored_header(ignored))


async def branch_conversation(request: Request) -> Response:
    """POST /v1/conversations/{id}/branch: copy the path to a message into a new conversation."""
    gateway, store, owner = gateway_of(request), store_of(request), owner_of(request)
    body = await read_optional_json(request)
    fields = parse_fields(body, BranchFields)
    ignored = unknown_fields(body, BranchFields)
    await gateway.pending_saves.flush(request.path_params["id"], fields.leaf)
    tree = await store.load_path(owner, request.path_params["id"], fields.leaf)
    leaf = fields.leaf if fields.leaf is not None else tree.conversation.active_leaf
    if leaf is None or leaf not in tree.items:
        raise NotFoundError(f"no message {(leaf or '')[:128]!r} in this conversation", param="leaf")
    copy = await asyncio.to_thread(copy_branch, tree, leaf, new_id("conv"), fields.title)
    merged = await store.merge(copy.conversation, copy.items, copy.turns)
    gateway.hub.publish_update(merged.conversation)
    return json_response(schemas.Conversation.from_head(merged.conversation), headers=ignored_header(ignored))


async def list_items(request: Request) -> Response:
    """GET .../items: a page of the messages on one path of the tree, newest first.

    The path ends at `leaf` (default: the active leaf). With `branches=all`: all messages, oldest first.
    """
    query = request.query_params
    if query.get("branches", "all") != "all":
        raise InvalidRequestError('branches must be "all"', param="branches")
    all_branches = "branches" in query
    page = PageQuery.parse(query, order="asc", limit=None) if all_branches else PageQuery.parse(query)
    wanted = ItemQuery(
        leaf=query.get("leaf"),
        all_branches=all_branches,
        start=message_id_of(page.after) if page.after is not None else None,
        limit=page.limit + 2 if page.limit is not None else None,  # the message of `after`, and one of the next page
        is_descending=page.order == "desc",
    )
    tree = await store_of(request).list_items(owner_of(request), request.path_params["id"], wanted)
    if len(tree.items) <= _INLINE_ITEMS:
        data = _encode_items(tree, page, all_branches=all_branches)
    else:
        data = await asyncio.to_thread(_encode_items, tree, page, all_branches=all_branches)
    return Response(data, media_type="application/json")


async def create_items(request: Request) -> Response:
    """POST .../items: append messages after the active leaf or `parent_id`."""
    store, owner, conversation_id = store_of(request), owner_of(request), request.path_params["id"]
    body = await read_json(request)
    fields = parse_fields(body, ItemsFields)
    ignored = unknown_fields(body, ItemsFields)
    messages = to_messages(await replace_files(gateway_of(request), owner, fields.items, "items"), "items")
    conversation, items = await add_messages(
        store, owner, conversation_id, messages, fields.parent_id, expected_rev=fields.rev
    )
    gateway_of(request).hub.publish_update(conversation)
    if len(items) <= _INLINE_ITEMS:
        data = _encode_new_items(conversation, items)
    else:
        data = await asyncio.to_thread(_encode_new_items, conversation, items)
    return Response(data, media_type="application/json", headers=ignored_header(ignored))


async def get_item(request: Request) -> Response:
    """GET .../items/{item_id}: return one item of a conversation."""
    item_id = request.path_params["item_id"]
    tree = await store_of(request).load_path(
        owner_of(request), request.path_params["id"], message_id_of(item_id), limit=1
    )
    return json_response(find_item(tree, item_id)[1])


async def delete_item(request: Request) -> Response:
    """DELETE .../items/{item_id}: remove a message and connect those before and after it."""
    gateway, owner, conversation_id = gateway_of(request), owner_of(request), request.path_params["id"]
    item: Item | None = None

    def plan(tree: ConversationTree) -> MessageDeletion:
        nonlocal item
        item, _ = find_item(tree, request.path_params["item_id"])
        return plan_message_deletion(tree, item.id)

    await gateway.pending_saves.flush(conversation_id)
    conversation = await edit_conversation(
        store_of(request), owner, conversation_id, plan, expected_rev=parse_rev(request)
    )
    if item is not None and item.response_id is not None:
        gateway.remove_log(owner, item.response_id)  # which has the text of the message
    gateway.hub.publish_update(conversation)
    return json_response(schemas.Conversation.from_head(conversation))


async def edit_conversation(
    store: ConversationStore,
    owner: str,
    conversation_id: str,
    edit: Callable[[ConversationTree], MessageDeletion],
    *,
    expected_rev: int | None = None,
) -> Conversation:
    """Plan a deletion from the present tree and apply it; plan again if the tree has changed.

    `edit` plans the deletion. With `expected_rev`, it is applied only to that revision.

    Raises: what `edit` raises; NotFoundError; StaleRevisionError for another revision than `expected_rev`;
    ConversationBusyError.
    """
    for _ in range(MAX_EDIT_ATTEMPTS):
        tree = await store.load(owner, conversation_id)
        if expected_rev is not None and tree.conversation.rev != expected_rev:
            raise StaleRevisionError(tree.conversation, expected_rev)
        with contextlib.suppress(StaleRevisionError):
            return await store.delete_messages(owner, conversation_id, edit(tree), expected_rev=tree.conversation.rev)
    raise changes_too_often_error()


def _encode_items(tree: ConversationTree, page: PageQuery, *, all_branches: bool) -> bytes:
    """Encode the page that begins in the first message of `tree`, of which the items are in the order of the page."""
    items = tree.items.values()
    if all_branches:
        found = paginate([_branch_item(tree, item) for item in items], page, is_ordered=True)
        if tree.num_stored_items is not None:
            found.total = tree.num_stored_items
        return encode(found)
    step = 1 if page.order == "asc" else -1
    entries = [entry for item in items for entry in _listed_items_of(tree, item)[::step]]
    return encode(paginate(entries, page, is_ordered=True))


def _branch_item(tree: ConversationTree, item: Item) -> schemas.Item:
    """Convert a message with its calls to one item."""
    message = message_item(item, tree.turn_of(item))
    if calls := [output for output in output_items(item) if isinstance(output, schemas.FunctionCall)]:
        message.calls = calls
    if item.role == "tool":
        message.call_id = item.parts.call_id
    return message


def _encode_new_items(conversation: Conversation, items: Sequence[Item]) -> bytes:
    return encode(make_page(listed_items(ConversationTree(conversation, items, ()), items), has_more=False))


def listed_items(tree: ConversationTree, items: Iterable[Item]) -> list[schemas.ListedItem]:
    """Convert messages to OpenAI's items.

    Reasoning, calls and outputs of calls are separate items.
    """
    return [entry for item in items for entry in _listed_items_of(tree, item)]


def _listed_items_of(tree: ConversationTree, item: Item) -> list[schemas.ListedItem]:
    if item.role == "tool":
        call_id = item.parts.call_id
        return [schemas.FunctionCallOutput(item.id, call_id, item.text, item.status, item.parent_id, item.response_id)]
    if item.role != "assistant":
        return [message_item(item, tree.turn_of(item))]
    turn = tree.turn_of(item)
    entries: list[schemas.ListedItem] = []
    for output in output_items(item, summarizes=turn is not None and has_summary(turn.echo)):
        if isinstance(output, schemas.OutputMessage):
            message = message_item(item, turn)
            message.content, message.candidate = [schemas.OutputText(item.text, [], [])], item.index
            entries.append(message)
        else:
            output.parent_id, output.response_id = item.parent_id, item.response_id
            entries.append(output)
    return entries


def message_id_of(item_id: str) -> str:
    """Return the id of the message that an item belongs to: reasoning and calls have ids of their own."""
    if item_id.startswith(("rs_", "fc_")):
        return f"msg_{item_id.split('_')[1]}"
    return item_id


def find_item(tree: ConversationTree, item_id: str) -> tuple[Item, schemas.ListedItem]:
    """Find the item with this id, and its message: an item is a message, reasoning or a call.

    Raises: NotFoundError.
    """
    item = tree.items.get(message_id_of(item_id))
    for entry in _listed_items_of(tree, item) if item is not None else ():
        if item is not None and entry.id == item_id:
            return item, entry
    if item is not None and item.id == item_id:
        return item, message_item(item, tree.turn_of(item))
    raise NotFoundError(f"no item {item_id[:128]!r} in this conversation", param="item_id")


async def generate_title(request: Request) -> Response:
    """POST .../title: generate a title, and store it unless the title was changed meanwhile."""
    gateway, store, principal = gateway_of(request), store_of(request), principal_of(request)
    owner = principal.owner
    body = await read_optional_json(request)
    fields = parse_fields(body, TitleFields)
    ignored = unknown_fields(body, TitleFields)
    model = await gateway.require_model(fields.model)
    tree = await store.load_path(owner, request.path_params["id"])
    before = tree.conversation
    if fields.rev is not None and fields.rev != before.rev:
        raise StaleRevisionError(before, fields.rev)
    tasks = SideTasks(model.conversations, model.service)
    work = RequestCost(len(TITLE.question) // CHARS_PER_TOKEN, max_tokens=TITLE.max_tokens)
    async with gateway.admission.acquire(principal, work) as permit:
        reply = await tasks.start(TITLE, tree, gateway.model_name, gateway.lowest_priority)
        permit.attach(reply)
    text, usage = await cancel_on_disconnect(request, _read_reply(reply, gateway.metrics))
    title = clean_title(text)
    conversation = await _store_title(store, before, title) if title else await store.get(owner, before.id)
    if conversation.rev != before.rev:
        gateway.hub.publish_update(conversation)
    result = schemas.Title(
        object="conversation.title",
        title=conversation.title,
        generated=bool(title) and conversation.title == title,
        usage=schemas.ResponseUsage.from_usage(usage),
        conversation=schemas.Conversation.from_head(conversation),
    )
    return json_response(result, headers=ignored_header(ignored))


async def _read_reply(reply: Reply, metrics: Metrics) -> tuple[str, Usage]:
    """Read a reply to its end; return its text and usage."""
    text = ""
    async with reply:
        async for event in record_reply_metrics(reply, metrics):
            if isinstance(event, ReplyDone):
                text = event.text
            elif isinstance(event, ReplyFinished):
                return text, Usage(event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens)
    raise EngineError("the engine ended without a result")


async def _store_title(store: ConversationStore, before: Conversation, title: str) -> Conversation:
    """Store a title, unless another client has set one since `before`.

    Other changes do not matter.
    """
    present = before
    while present.title == before.title != title:
        try:
            return await store.update(before.owner, before.id, title=title, expected_rev=present.rev)
        except StaleRevisionError as stale:
            present = stale.current
    return present
