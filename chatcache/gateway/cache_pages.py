"""Every page of the KV cache in one letter; and which conversations would find theirs."""

from __future__ import annotations

from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response

from chatcache.errors import NotFound
from chatcache.gateway.body import read_json
from chatcache.gateway.context import gateway_of
from chatcache.gateway.conversations import store_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.fields import ignored_header, read, unknown_fields
from chatcache.gateway.principal import principal_of, tenant_of
from chatcache.gateway.wire import WarmthFields
from chatcache.types.pages import PackedPrompt

TOKEN_BYTES = 4  # of a packed prompt


async def page_map(request: Request) -> Response:
    """GET /v1/cache/map: a tenant sees others' pages as theirs and no more, an open server's visitors all."""
    gateway, tenant = gateway_of(request), tenant_of(request)
    await gateway.ready(None)
    pages = await gateway.engine.page_map(tenant, operator=gateway.is_open)
    return json_response(
        {
            "object": "cache.map",
            "page_size": pages.page_size,
            "num_pages": pages.num_pages,
            "pages_per_cell": pages.num_pages_per_cell,
            "cells": pages.cells,
        }
    )


async def warmth(request: Request) -> Response:
    """POST /v1/cache/warmth: how much of each conversation's active path is computed. Changes nothing."""
    gateway, principal = gateway_of(request), principal_of(request)
    body = await read_json(request)
    fields = read(body, WarmthFields)
    ignored = unknown_fields(body, WarmthFields)
    model, store = await gateway.ready(None), store_of(request)
    prompts: dict[str, PackedPrompt] = {}
    for conversation_id in fields.conversations:
        with suppress(NotFound):
            prompts[conversation_id] = await model.histories.of(store, principal.owner, conversation_id)
    most = gateway.max_model_len * TOKEN_BYTES  # what lies behind can never have been computed
    cut = [PackedPrompt(prompt.tokens[:most], prompt.num_public_tokens) for prompt in prompts.values()]
    counts = await gateway.engine.num_cached(cut, principal.tenant)
    told = zip(prompts.items(), counts, strict=True)
    entries = [
        {"conversation_id": name, "tokens": len(prompt.tokens) // TOKEN_BYTES, "cached_tokens": count}
        for (name, prompt), count in told
    ]
    return json_response({"object": "list", "data": entries}, headers=ignored_header(ignored))
