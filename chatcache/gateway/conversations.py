"""REST of conversations: what the page lists, shows, renames and deletes."""

from __future__ import annotations

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from chatcache.chat.store import ConversationStore
from chatcache.chat.tree import FORKED, Conversation, Item, Turn, Usage
from chatcache.errors import InvalidRequest, Overloaded
from chatcache.gateway.body import read_json
from chatcache.gateway.context import gateway_of, owner_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.fields import ignored_header, read, unknown_fields
from chatcache.gateway.wire import ConversationPatch

MAX_LIMIT = 100


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
    limit = _limit(request.query_params.get("limit", "20"))
    after = request.query_params.get("after")
    found = await _store(request).list(owner_of(request), limit + 1, after)
    return json_response(_page([conversation_json(each) for each in found[:limit]], has_more=len(found) > limit))


async def list_items(request: Request) -> Response:
    tree = await _store(request).load(owner_of(request), request.path_params["id"])
    return json_response(_page([item_json(item, tree.turn_of(item)) for item in tree.items.values()], has_more=False))


class OneConversation(HTTPEndpoint):
    """/v1/conversations/{id}."""

    async def get(self, request: Request) -> Response:
        conversation = await _store(request).get(owner_of(request), request.path_params["id"])
        return json_response(conversation_json(conversation))

    async def post(self, request: Request) -> Response:
        body = await read_json(request)
        patch = read(body, ConversationPatch)
        ignored = unknown_fields(body, ConversationPatch)
        conversation = await _store(request).update(
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
        await _store(request).delete(owner_of(request), conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


def _store(request: Request) -> ConversationStore:
    store = gateway_of(request).store
    if store is None:
        raise Overloaded("the server is still starting")
    return store


def _limit(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MAX_LIMIT:
        raise InvalidRequest(f"limit must be between 1 and {MAX_LIMIT}", param="limit")
    return int(text)


def _page(data: list[dict[str, object]], *, has_more: bool) -> dict[str, object]:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}
