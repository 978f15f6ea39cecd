"""Routes for the served model, the version, and tokenizing text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.prompt import link_tool_results, template_variables
from chatcache.errors import InvalidRequestError
from chatcache.gateway.api.attachments import replace_files
from chatcache.gateway.api.messages import to_messages
from chatcache.gateway.api.params import check_tokens, parse_tool_choice
from chatcache.gateway.api.thinking import parse_thinking
from chatcache.gateway.auth.principal import owner_of
from chatcache.gateway.context import Gateway, gateway_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.middleware import read_json
from chatcache.gateway.schemas.fields import ignored_header, parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import DetokenizeFields, ThinkingFields, TokenizeFields
from chatcache.gateway.schemas.server import Model, Models, Text, Tokens, Version
from chatcache.tokenizer.tokenizer import Tokenizer


def _model(gateway: Gateway) -> Model:
    return Model(
        id=gateway.model_name,
        object="model",
        type="model",
        display_name=gateway.model_name,
        created=gateway.started_at,
        created_at=datetime.fromtimestamp(gateway.started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        owned_by="chatcache",
        root=gateway.model_name,
        parent=None,
        max_model_len=gateway.max_model_len or None,
        max_input_tokens=gateway.max_model_len or None,
        lifecycle="active",
    )


async def list_models(request: Request) -> Response:
    gateway = gateway_of(request)
    await gateway.health()
    name = gateway.model_name or None  # while the model loads, it may be unknown
    return json_response(Models("list", [_model(gateway)] if name else [], False, name, name))


async def get_model(request: Request) -> Response:
    gateway = gateway_of(request)
    await gateway.health()
    gateway.check_model_id(request.path_params["id"])
    return json_response(_model(gateway))


async def get_version(request: Request) -> Response:
    return json_response(Version(gateway_of(request).version))


async def tokenize(request: Request) -> Response:
    gateway = gateway_of(request)
    body = await read_json(request)
    fields = parse_fields(body, TokenizeFields)
    thinking_fields = parse_fields(body, ThinkingFields)
    ignored = unknown_fields(body, TokenizeFields, ThinkingFields)
    model = await gateway.require_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    if fields.messages is not None:
        messages = await replace_files(gateway, owner_of(request), fields.messages, "messages")
        fields = msgspec.structs.replace(fields, messages=messages)
    thinking = parse_thinking(thinking_fields, model.service.thinking)
    functions = parse_tool_choice(model.service.reply_format, fields.tools, "none", None).functions
    variables = template_variables(functions, thinking.kwargs)
    async with gateway.tokenize_throttle.acquire(owner_of(request), len(await request.body())):
        ids = await asyncio.to_thread(_token_ids, fields, model.tokenizer, variables)
    result = Tokens(len(ids), ids, gateway.max_model_len)
    if fields.return_token_strs:
        result.token_strs = [model.tokenizer.token_bytes[token].decode("utf-8", "replace") for token in ids]
    return json_response(result, headers=ignored_header((*thinking.ignored, *ignored)))


def _token_ids(fields: TokenizeFields, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> list[int]:
    if fields.messages is None:
        return list(tokenizer.encode(fields.prompt or "", add_special_tokens=fields.add_special_tokens is not False))
    messages = link_tool_results(to_messages(fields.messages, "messages"), "messages")
    generation = fields.add_generation_prompt is not False
    text = tokenizer.render(messages, add_generation_prompt=generation, **variables)
    return list(tokenizer.encode_rendered(text, add_special_tokens=bool(fields.add_special_tokens)))


async def detokenize(request: Request) -> Response:
    gateway = gateway_of(request)
    body = await read_json(request)
    fields = parse_fields(body, DetokenizeFields)
    ignored = unknown_fields(body, DetokenizeFields)
    model = await gateway.require_model(fields.model)
    check_tokens(fields.tokens, model.tokenizer.vocab_size, "tokens")
    async with gateway.tokenize_throttle.acquire(owner_of(request), len(await request.body())):
        text = await asyncio.to_thread(model.tokenizer.decode, fields.tokens, skip_special_tokens=False)
    return json_response(Text(text), headers=ignored_header(ignored))
