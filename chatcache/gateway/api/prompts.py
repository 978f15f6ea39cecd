"""Saved prompts: texts to start a message with, which all users of a tenant share."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.store import SavedPrompt
from chatcache.errors import InvalidRequestError
from chatcache.gateway.api.conversations import store_of
from chatcache.gateway.auth.principal import tenant_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.json_codec import encode
from chatcache.gateway.middleware import read_json
from chatcache.gateway.schemas import responses as schemas
from chatcache.gateway.schemas.fields import ignored_header, parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import PromptFields, PromptPatch

_INLINE_CHARS = 65_536  # encoding this much text takes about a millisecond


async def list_prompts(request: Request) -> Response:
    """GET /v1/prompts: all saved prompts of the tenant, by name."""
    found = await store_of(request).saved_prompts.list(tenant_of(request))
    page = schemas.SavedPrompts("list", [schemas.SavedPrompt.of(prompt) for prompt in found])
    if sum(len(prompt.text) for prompt in found) <= _INLINE_CHARS:
        data = encode(page)
    else:
        data = await asyncio.to_thread(encode, page)
    return Response(data, media_type="application/json")


async def create_prompt(request: Request) -> Response:
    """POST /v1/prompts: save a prompt under a new name."""
    body = await read_json(request)
    fields = parse_fields(body, PromptFields)
    _check_name(fields.name)
    now = time.time()
    prompt = SavedPrompt(fields.name, fields.text, fields.description, now, now)
    await store_of(request).saved_prompts.create(tenant_of(request), prompt)
    return json_response(schemas.SavedPrompt.of(prompt), headers=ignored_header(unknown_fields(body, PromptFields)))


async def get_prompt(request: Request) -> Response:
    """GET /v1/prompts/{name}: one saved prompt."""
    prompt = await store_of(request).saved_prompts.get(tenant_of(request), request.path_params["name"])
    return json_response(schemas.SavedPrompt.of(prompt))


async def update_prompt(request: Request) -> Response:
    """POST /v1/prompts/{name}: change the given fields; another name renames it."""
    body = await read_json(request)
    fields = parse_fields(body, PromptPatch)
    if fields == PromptPatch():
        raise InvalidRequestError("give at least one of name, text, description")
    if fields.name is not None:
        _check_name(fields.name)
    prompt = await store_of(request).saved_prompts.update(
        tenant_of(request),
        request.path_params["name"],
        new_name=fields.name,
        text=fields.text,
        description=fields.description,
    )
    return json_response(schemas.SavedPrompt.of(prompt), headers=ignored_header(unknown_fields(body, PromptPatch)))


async def delete_prompt(request: Request) -> Response:
    """DELETE /v1/prompts/{name}: delete a saved prompt for all users of the tenant."""
    name = request.path_params["name"]
    await store_of(request).saved_prompts.delete(tenant_of(request), name)
    return json_response(schemas.Deleted(name, "prompt", True))


def _check_name(name: str) -> None:
    """Refuse a name that ends in a line break, which the `$` of a pattern allows."""
    if name.endswith("\n"):
        raise InvalidRequestError("name must not contain a line break", param="name")
