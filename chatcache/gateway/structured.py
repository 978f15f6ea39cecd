"""What the output must match: `structured_outputs` (vLLM's) and `response_format` (OpenAI's) as one thing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from chatcache.errors import InvalidRequest
from chatcache.gateway.wire import JsonSchemaFields, ResponseFormat, StructuredFields, TextFormat
from chatcache.types.params import StructuredOutputs

_FORMATS = ("text", "json_object", "json_schema")


def structured_outputs(
    structured: StructuredFields | None,
    response_format: ResponseFormat | None = None,
    text_format: TextFormat | None = None,
) -> StructuredOutputs | None:
    """The constraint of a request, None for free text. Raises: InvalidRequest naming the field."""
    if structured is None:
        if response_format is not None:
            return _format(response_format.type, response_format.json_schema, "response_format", ".json_schema")
        if text_format is not None:
            return _format(text_format.type, text_format, "text.format", "")
        return None
    if response_format is not None or text_format is not None:
        other = "response_format" if response_format is not None else "text"
        raise InvalidRequest(f"structured_outputs and {other} exclude each other", param="structured_outputs")
    chosen = [name for name in structured.__struct_fields__ if getattr(structured, name) not in (None, False)]
    if len(chosen) != 1:
        names = ", ".join(structured.__struct_fields__)
        raise InvalidRequest(f"structured_outputs must have exactly one of {names}", param="structured_outputs")
    return StructuredOutputs(
        json=structured.json if structured.json is None or isinstance(structured.json, str) else _text(structured.json),
        json_object=bool(structured.json_object),
        regex=structured.regex,
        choice=tuple(structured.choice or ()),
        grammar=structured.grammar,
    )


@contextlib.contextmanager
def named_after(structured: StructuredFields | None, field: str, tools: str | None = None) -> Iterator[None]:
    """Call the constraint in refusals what the client called it: `field`, unless it used `structured_outputs`.

    `tools`: the field that the constraint comes from, where it is not one of these.
    """
    try:
        yield
    except InvalidRequest as error:
        if (tools is not None or structured is None) and error.param == "structured_outputs":
            error.param = tools or field
            error.message = error.message.replace("structured_outputs", error.param)
        raise


def _format(
    kind: str, schema: JsonSchemaFields | TextFormat | None, name: str, inside: str
) -> StructuredOutputs | None:
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise InvalidRequest(f"{name}.type must be one of {', '.join(_FORMATS)}", param=f"{name}.type")
    for field in ("name", "schema"):
        if schema is None or getattr(schema, field) is None:
            raise InvalidRequest(
                f"{name}{inside}.{field} is required",
                param=f"{name}{inside}.{field}",
                code="missing_required_parameter",
            )
    return StructuredOutputs(json=_text(schema.schema if schema is not None else None))


def _text(schema: object) -> str:
    return msgspec.json.encode(schema).decode()
