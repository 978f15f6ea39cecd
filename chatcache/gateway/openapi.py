"""`GET /openapi.json`: the table of the API as an OpenAPI 3.1 document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from chatcache.gateway.api.idempotency import HEADER, KEY_PATTERN
from chatcache.gateway.auth.principal import NAME
from chatcache.gateway.routing import Body, Entry, Operation, Socket
from chatcache.gateway.schemas.errors import Error

Schema = dict[str, Any]

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_ALWAYS = (403, 500)  # a Host or Origin that is not served; a bug
_OF_KEYS = (401, 503)  # none that opens this; keys that cannot be read now
_OF_BODIES = (400, 408, 413, 415)
_DESCRIPTION = """A chat backend that owns its KV cache. OpenAI's fields and shapes, and more beside them.

Bodies are strict JSON (UTF-8, no duplicate keys, at most 32 deep). A field nobody knows is ignored and named in the
x-chatcache-ignored header; one that is known but not supported is a 400. OpenAPI has no word for WebSockets: they are
under x-websockets."""


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
            "responses": _refusals(operations),
            "headers": {
                "x-request-id": {
                    "description": "Names the request in the server's log; the client's own, if it sent one.",
                    "required": True,
                    "schema": {"type": "string"},
                }
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": NAME},
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
    """Every schema by name, request bodies merged."""
    types: list[object] = [Error]
    bodies: dict[str, Body] = {}
    for operation in operations:
        types += [kind for kind in (operation.response, operation.stream, *operation.error_bodies.values()) if kind]
        if operation.body is not None:
            bodies[operation.body.name] = operation.body
    for socket in sockets:
        bodies |= {body.name: body for body in socket.messages.values()}
    parts = {kind for body in bodies.values() for kind in body.kinds}
    schemas = _schemas([*types, *parts])[1]
    merged = {name: _merged(body, schemas) for name, body in bodies.items()}
    inlined = {kind.__name__ for kind in parts}
    return dict(sorted({**{k: v for k, v in schemas.items() if k not in inlined}, **merged}.items()))


def _merged(body: Body, schemas: Mapping[str, Schema]) -> Schema:
    """The fields of several structs as one object."""
    properties: Schema = {}
    required: list[str] = []
    for kind in body.kinds:
        schema = schemas[kind.__name__]
        properties |= schema["properties"]
        required += schema["required"]
    return {"title": body.name, "type": "object", "properties": properties, "required": required}


def _operation(operation: Operation) -> Schema:
    described: Schema = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "parameters": [*_path_parameters(operation), *_query_parameters(operation), *_headers(operation)],
        "responses": _responses(operation),
        "security": [{}, {"key": []}, {"session": []}] if _needs_key(operation) else [],
    }
    if operation.body is not None:
        content = {"application/json": {"schema": _ref(operation.body.name)}}
        described["requestBody"] = {"required": operation.body.required, "content": content}
    if operation.upload_types:
        described["requestBody"] = {
            "required": True,
            "content": {kind: {"schema": {}} for kind in operation.upload_types},
        }
    return described


def _responses(operation: Operation) -> Schema:
    content: Schema = {operation.media_type: {"schema": {"type": "string"}}}
    if operation.response is not None:
        content = {"application/json": {"schema": _schema(operation.response)}}
    content |= {media_type: {"schema": {"type": "string"}} for media_type in operation.text_types}
    if operation.stream is not None:
        content["text/event-stream"] = {"schema": _event(operation.stream)}
    statuses = {*operation.errors, *_ALWAYS, *(_OF_KEYS if _needs_key(operation) else ())}
    statuses |= set(_OF_BODIES if operation.body is not None else ())
    failures = {
        str(status): _response(status, {"application/json": {"schema": _schema(kind)}})
        for status, kind in operation.error_bodies.items()
    }
    refused = {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)}
    return {"200": _response(200, content), **refused, **failures}


def _needs_key(operation: Operation) -> bool:
    return operation.permission != "open"


def _event(kind: object) -> Schema:
    """One server-sent event, as OpenAPI 3.2 describes them in `itemSchema`; 3.1 has no word for a stream of them."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _schema(kind)}
    return {
        "description": "Each event of the stream; the last one's data is [DONE].",
        "type": "object",
        "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}},
        "required": ["data"],
    }


def _refusals(operations: Sequence[Operation]) -> Schema:
    """The answers in the one error envelope, by status."""
    statuses = {*_ALWAYS, 401, *_OF_BODIES, *(status for operation in operations for status in operation.errors)}
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
    said = "The same request again with the same key, for a day, is answered with what the first one made."
    schema = {"type": "string", "pattern": KEY_PATTERN.pattern}
    return [{"name": HEADER, "in": "header", "required": False, "description": said, "schema": schema}]


def _without_null(schema: Schema) -> Schema:
    """A query has no null: what may be null may be left out."""
    options = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    return options[0] if len(options) == 1 else schema


def _schema(kind: object) -> Schema:
    return _schemas([kind])[0][0]


def _schemas(kinds: Iterable[object]) -> tuple[tuple[Schema, ...], dict[str, Schema]]:
    return msgspec.json.schema_components(kinds, schema_hook=_anything, ref_template=_REF)


def _anything(kind: type) -> Schema:
    """The schema of `object`. Raises: NotImplementedError for a type that has none."""
    if kind is object:
        return {"description": "any JSON value"}
    raise NotImplementedError(kind)


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(name=name)}


def _path(path: str) -> str:
    """Starlette's path without its converters."""
    return _PARAMETER.sub(r"{\1}", path)


def _operation_id(operation: Operation) -> str:
    words = re.findall(r"\w+", _path(operation.path))
    return "_".join([operation.method.lower(), *words])
