"""Generate the OpenAPI 3.1 document from the route table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from chatcache.gateway.api.idempotency import HEADER, KEY_PATTERN
from chatcache.gateway.auth.principal import COOKIE_NAME
from chatcache.gateway.routing import SSE, Body, Entry, Operation, Socket
from chatcache.gateway.schemas.server import Error

Schema = dict[str, Any]

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_COMMON_ERRORS = (403, 500)  # a Host or Origin that is not served; an unexpected error
_KEY_ERRORS = (401, 503)  # no valid key; the key store cannot be read now
_BODY_ERRORS = (400, 408, 413, 415)
_DESCRIPTION = """A self-hosted ChatGPT-style server: an OpenAI-compatible API and stored conversations, on an
inference engine with a shared, copy-on-write KV cache. The API has OpenAI's fields and shapes, with extensions.

Request bodies are strict JSON: UTF-8, no duplicate keys, nested at most 32 levels deep. Unknown fields are ignored and
listed in the x-chatcache-ignored header; fields that are known but not supported are refused with status 400. OpenAPI
does not describe WebSockets: they are listed under x-websockets."""


def document(routes: Iterable[Entry], version: str, root_path: str = "") -> Schema:
    """Describe the routes of a table. `root_path`: where a reverse proxy serves the application."""
    entries = tuple(routes)
    operations = [entry for entry in entries if isinstance(entry, Operation)]
    sockets = [entry for entry in entries if isinstance(entry, Socket)]
    paths: dict[str, Schema] = {}
    for operation in operations:
        paths.setdefault(_path(operation.path), {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "chatcache",
            "version": version,
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": _components(operations, sockets),
            "responses": _error_responses(operations),
            "headers": {
                "x-request-id": {
                    "description": "The request's id in the server's log: the client's x-request-id, if it sent one.",
                    "required": True,
                    "schema": {"type": "string"},
                }
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "session": {"type": "apiKey", "in": "cookie", "name": COOKIE_NAME},
            },
        },
        "x-websockets": {
            socket.path: {
                "summary": socket.summary,
                "messages": {kind: _ref(body.name) for kind, body in socket.messages.items()},
            }
            for socket in sockets
        },
    }


def _components(operations: Sequence[Operation], sockets: Sequence[Socket]) -> dict[str, Schema]:
    """Collect all schemas by name. The structs of a request body are merged into one schema."""
    types: list[object] = []
    bodies: dict[str, Body] = {}
    for operation in operations:
        types += [
            kind
            for kind in (operation.response, operation.stream, operation.error, *operation.error_bodies.values())
            if kind
        ]
        if operation.body is not None:
            bodies[operation.body.name] = operation.body
    for socket in sockets:
        bodies |= {body.name: body for body in socket.messages.values()}
    parts = {kind for body in bodies.values() for kind in body.kinds}
    schemas = _schemas([*types, *parts])[1]
    merged = {name: _merge_body(body, schemas) for name, body in bodies.items()}
    inlined = {kind.__name__ for kind in parts}
    return dict(sorted({**{k: v for k, v in schemas.items() if k not in inlined}, **merged}.items()))


def _merge_body(body: Body, schemas: Mapping[str, Schema]) -> Schema:
    """Merge the fields of the body's structs into one object schema."""
    properties: Schema = {}
    required: list[str] = []
    for kind in body.kinds:
        schema = schemas[kind.__name__]
        properties |= schema["properties"]
        required += schema["required"]
    return {"title": body.name, "type": "object", "properties": properties, "required": required}


def _operation(operation: Operation) -> Schema:
    schema: Schema = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "parameters": [*_path_parameters(operation), *_query_parameters(operation), *_headers(operation)],
        "responses": _responses(operation),
        "security": [{}, {"key": []}, {"api_key": []}, {"session": []}] if _needs_key(operation) else [],
    }
    if operation.body is not None:
        content = {"application/json": {"schema": _ref(operation.body.name)}}
        schema["requestBody"] = {"required": operation.body.required, "content": content}
    if operation.upload_types:
        schema["requestBody"] = {
            "required": True,
            "content": {kind: {"schema": {}} for kind in operation.upload_types},
        }
    return schema


def _responses(operation: Operation) -> Schema:
    content: Schema = {operation.media_type: {"schema": {"type": "string"}}}
    if operation.response is not None:
        content = {"application/json": {"schema": _schema(operation.response)}}
    content |= {media_type: {"schema": {"type": "string"}} for media_type in operation.text_types}
    if operation.stream is not None:
        is_sse = operation.stream_media_type == SSE
        event = _event(operation.stream, has_done=operation.error is Error) if is_sse else _schema(operation.stream)
        content[operation.stream_media_type] = {"schema": event}
    statuses = {*operation.errors, *_COMMON_ERRORS, *(_KEY_ERRORS if _needs_key(operation) else ())}
    statuses |= set(_BODY_ERRORS if operation.body is not None else ())
    failures = {
        str(status): _response(status, {"application/json": {"schema": _schema(kind)}})
        for status, kind in operation.error_bodies.items()
    }
    errors = {str(status): _error(status, operation.error) for status in sorted(statuses)}
    return {"200": _response(200, content), **errors, **failures}


def _needs_key(operation: Operation) -> bool:
    return operation.permission != "open"


def _event(kind: object, *, has_done: bool) -> Schema:
    """Describe one server-sent event, like `itemSchema` of OpenAPI 3.2; 3.1 has no such field."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _schema(kind)}
    end = [{"const": "[DONE]"}] if has_done else []
    return {
        "description": f"One event of the stream.{' The data of the last event is [DONE].' if has_done else ''}",
        "type": "object",
        "properties": {"data": {"anyOf": [data, *end]}},
        "required": ["data"],
    }


def _error(status: int, kind: type[msgspec.Struct]) -> Schema:
    """Describe an error response; those with the common envelope are components."""
    if kind is Error:
        return {"$ref": f"#/components/responses/{status}"}
    return _response(status, {"application/json": {"schema": _ref(kind.__name__)}})


def _error_responses(operations: Sequence[Operation]) -> Schema:
    """Describe the responses with the error envelope, by status."""
    statuses = {*_COMMON_ERRORS, 401, *_BODY_ERRORS}.union(*(operation.errors for operation in operations))
    content = {"application/json": {"schema": _ref(Error.__name__)}}
    return {str(status): _response(status, content) for status in sorted(statuses)}


def _response(status: int, content: Schema) -> Schema:
    headers = {"x-request-id": {"$ref": "#/components/headers/x-request-id"}}
    return {"description": HTTPStatus(status).phrase, "headers": headers, "content": content}


def _path_parameters(operation: Operation) -> list[Schema]:
    names = _PARAMETER.findall(operation.path)
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]


def _query_parameters(operation: Operation) -> list[Schema]:
    if operation.query is None:
        return []
    schema = _schemas([operation.query])[1][operation.query.__name__]
    return [
        {"name": name, "in": "query", "required": name in schema["required"], "schema": _without_null(each)}
        for name, each in schema["properties"].items()
    ]


def _headers(operation: Operation) -> list[Schema]:
    if not operation.idempotent:
        return []
    description = "For a day, a repeated request with the same key returns the result of the first one."
    schema = {"type": "string", "pattern": KEY_PATTERN.pattern}
    return [{"name": HEADER, "in": "header", "required": False, "description": description, "schema": schema}]


def _without_null(schema: Schema) -> Schema:
    """Remove `null` from the schema of a query parameter, which is omitted instead."""
    options = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    return options[0] if len(options) == 1 else schema


def _schema(kind: object) -> Schema:
    return _schemas([kind])[0][0]


def _schemas(kinds: Iterable[object]) -> tuple[tuple[Schema, ...], dict[str, Schema]]:
    return msgspec.json.schema_components(kinds, schema_hook=_object_schema, ref_template=_REF)


def _object_schema(kind: type) -> Schema:
    """Return the schema of `object`, any JSON value, which msgspec cannot describe itself.

    Passed to msgspec as `schema_hook`. Raises: NotImplementedError for other types.
    """
    if kind is object:
        return {"description": "any JSON value"}
    raise NotImplementedError(kind)


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(name=name)}


def _path(path: str) -> str:
    """Remove Starlette's converters from a path."""
    return _PARAMETER.sub(r"{\1}", path)


def _operation_id(operation: Operation) -> str:
    words = re.findall(r"\w+", _path(operation.path))
    return "_".join([operation.method.lower(), *words])
