"""Links to one branch of a conversation. A client that has the link reads the branch without a key.

A link has the id of the conversation and a secret of 256 bits. The store has only the digest of the secret, in the
conversation's metadata next to the last message of the branch, so a link ends with the conversation. A conversation has
one link; a new one replaces it. Every request with a wrong link gets the same answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from chatcache.conversations.store import StaleRevisionError
from chatcache.conversations.tree import MAX_EDIT_ATTEMPTS, SHARE_KEY, Conversation, changes_too_often_error
from chatcache.errors import InvalidRequestError, NotFoundError
from chatcache.gateway.api.conversations import parse_rev, store_of
from chatcache.gateway.auth.principal import owner_of
from chatcache.gateway.context import gateway_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.middleware import read_optional_json
from chatcache.gateway.schemas import responses as schemas
from chatcache.gateway.schemas.fields import ignored_header, parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import ShareFields
from chatcache.transfer.html import POLICY, branch_html

_SECRET_BYTES = 32
_MAX_METADATA = 16
_HEADERS = {
    "content-security-policy": f"{POLICY}; frame-ancestors 'none'; sandbox allow-popups allow-top-navigation",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-robots-tag": "noindex",
    "cache-control": "private, no-store",
}


async def create_share(request: Request) -> Response:
    """POST /v1/conversations/{id}/share: make a link to the path to `leaf`; an older link ends."""
    body = await read_optional_json(request)
    fields = parse_fields(body, ShareFields)
    ignored = unknown_fields(body, ShareFields)
    conversation_id = request.path_params["id"]
    await gateway_of(request).pending_saves.flush(conversation_id, fields.leaf)
    tree = await store_of(request).load_path(owner_of(request), conversation_id, fields.leaf, limit=1)
    leaf = fields.leaf if fields.leaf is not None else tree.conversation.active_leaf
    if leaf is None or leaf not in tree.items:
        raise NotFoundError(f"no message {(leaf or '')[:128]!r} in this conversation", param="leaf")
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    conversation = await _set_share(request, f"{leaf} {_digest(secret)}", fields.rev)
    path = f"{gateway_of(request).config.root_path}/share/{conversation.id}.{secret}"
    share = schemas.Share(
        "conversation.share", conversation.id, leaf, path, schemas.Conversation.from_head(conversation)
    )
    return json_response(share, headers=ignored_header(ignored))


async def delete_share(request: Request) -> Response:
    """DELETE /v1/conversations/{id}/share: end the link, if there is one."""
    return json_response(schemas.Conversation.from_head(await _set_share(request, None, parse_rev(request))))


async def get_share(request: Request) -> Response:
    """GET /share/{token}: the shared branch as an HTML page. Raises: NotFoundError."""
    conversation_id, _, secret = request.path_params["token"].partition(".")
    store = store_of(request)
    error = NotFoundError("there is no such link, or it has ended")
    try:
        owner = await store.find_owner(conversation_id)
        head = await store.get(owner, conversation_id)
    except NotFoundError:
        raise error from None
    leaf, _, digest = head.metadata.get(SHARE_KEY, "").partition(" ")
    if not digest or not hmac.compare_digest(digest.encode(), _digest(secret).encode()):
        raise error
    async with gateway_of(request).share_renderings:  # clients without a key may call this
        tree = await store.load_path(owner, conversation_id, leaf)
        if leaf not in tree.items:  # deleted
            raise error
        note = "A read-only copy of a conversation."
        page = await asyncio.to_thread(branch_html, head.title, tree.path(leaf), note)
    return HTMLResponse(page.encode("utf-8", "replace"), headers=_HEADERS)


async def _set_share(request: Request, value: str | None, expected_rev: int | None) -> Conversation:
    """Set or remove the link in the metadata; without `expected_rev`, other changes at the same time do not matter."""
    store, owner, conversation_id = store_of(request), owner_of(request), request.path_params["id"]
    for _ in range(MAX_EDIT_ATTEMPTS):
        head = await store.get(owner, conversation_id)
        if expected_rev is not None and head.rev != expected_rev:
            raise StaleRevisionError(head, expected_rev)
        metadata = {name: text for name, text in head.metadata.items() if name != SHARE_KEY}
        if value is not None:
            metadata[SHARE_KEY] = value
        if len(metadata) > _MAX_METADATA:
            raise InvalidRequestError("the metadata is full: a link needs one of its 16 entries", param="metadata")
        if metadata == head.metadata:
            return head
        try:
            conversation = await store.update(owner, conversation_id, metadata=metadata, expected_rev=head.rev)
        except StaleRevisionError:
            continue
        gateway_of(request).hub.publish_update(conversation)
        return conversation
    raise changes_too_often_error()


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
