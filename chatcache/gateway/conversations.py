"""REST of conversations: what the page lists, shows, renames and deletes."""

from __future__ import annotations

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from chatcache.chat.store import ConversationStore
from chatcache.chat.tree import FORKED, Conversation, Item, Turn, Usage
from chatcache.errors import Overloaded
from chatcache.gateway.body import read_json
from chatcache.gateway.context import gateway_of, owner_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.fields import ignored_header, read, unknown_fields
from chatcache.gateway.paging import page, read_limit
from chatcache.gateway.wire import ConversationPatch


def conversation_json(conversation: Conversation) -> dict[str, object]:
    """The wire form; the owner stays inside."""
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "updated_at": conversation.updated_at,
        "title": conversation.title,
        "active_leaf": conversation.active_leaf,
        "rev": conversation.rev,
        "metadata": dict(conversation.metadata),
    }


def usage_json(usage: Usage) -> dict[str, object]:
    """OpenAI's Responses usage."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        },
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
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


async def list_conversations(request: Request) -> Response:
    limit = read_limit(request.query_params.get("limit", "20"))
    after = request.query_params.get("after")
    found = await store_of(request).list(owner_of(request), limit + 1, after)
    return json_response(page([conversation_json(each) for each in found[:limit]], has_more=len(found) > limit))


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
        return json_response(conversation_json(conversation), headers=ignored_header(ignored))

    async def delete(self, request: Request) -> Response:
        conversation_id = request.path_params["id"]
        await store_of(request).delete(owner_of(request), conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


def store_of(request: Request) -> ConversationStore:
    """Raises: Overloaded before it is open."""
    store = gateway_of(request).store
    if store is None:
        raise Overloaded("the server is still starting")
    return store
