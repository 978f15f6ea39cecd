"""REST of conversations: what the page lists, finds, shows, renames and deletes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from chatcache.chat.search import Hit, SearchQuery
from chatcache.chat.store import ConversationStore, cursor_of
from chatcache.chat.tree import FORKED, Conversation, Item, Turn, Usage
from chatcache.errors import InvalidRequest
from chatcache.gateway.body import read_json
from chatcache.gateway.context import gateway_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.fields import ignored_header, read, unknown_fields
from chatcache.gateway.heads import conversation_json
from chatcache.gateway.paging import page, read_limit
from chatcache.gateway.principal import owner_of
from chatcache.gateway.wire import ConversationPatch


def usage_json(usage: Usage) -> dict[str, object]:
    """OpenAI's Responses usage."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        },
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


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


def _match_json(hit: Hit) -> dict[str, object]:
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
    return json_response({**found, "next": cursor_of(heads[limit - 1]) if has_more else None})


class OneConversation(HTTPEndpoint):
    """/v1/conversations/{id}."""

    async def get(self, request: Request) -> Response:
        conversation = await store_of(request).get(owner_of(request), request.path_params["id"])
        return json_response(conversation_json(conversation))

    async def post(self, request: Request) -> Response:
        body = await read_json(request)
        patch = read(body, ConversationPatch)
        ignored = unknown_fields(body, ConversationPatch)
        conversation = await store_of(request).update(
            owner_of(request),
            request.path_params["id"],
            title=patch.title,
            active_leaf=patch.active_leaf,
            metadata=patch.metadata,
            expect=patch.rev,
        )
        gateway_of(request).hub.changed(conversation)
        return json_response(conversation_json(conversation), headers=ignored_header(ignored))

    async def delete(self, request: Request) -> Response:
        """Delete it, and end what is still being said in it."""
        gateway, owner, conversation_id = gateway_of(request), owner_of(request), request.path_params["id"]
        await store_of(request).delete(owner, conversation_id, expect=read_rev(request))
        gateway.hub.deleted(owner, conversation_id)
        runs = [run for run in gateway.responses.running(owner) if run.conversation_id == conversation_id]
        await asyncio.gather(*(run.cancel() for run in runs))
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


def read_rev(request: Request) -> int | None:
    """`rev` of a query. Raises: InvalidRequest."""
    text = request.query_params.get("rev")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise InvalidRequest("rev must be a whole number, the one the conversation was read with", param="rev")
    return int(text)


def store_of(request: Request) -> ConversationStore:
    """Raises: Overloaded before it is open."""
    return gateway_of(request).opened_store()
