"""Parse request fields; classify the others as without effect, ignored, unsupported or unknown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec import inspect

from chatcache.errors import InvalidRequestError, UnsupportedParameterError

Fields = TypeVar("Fields", bound=msgspec.Struct)

# Fields of OpenAI's or vLLM's clients that other structs, or none, have to read on this route.
WITHOUT_EFFECT = frozenset({"type", "stream", "stream_id", "stream_options", "parallel_tool_calls"})
# Fields that agents and SDKs send by default and that have no meaning here. They are named as ignored, like unknown
# fields, except for the listed values.
IGNORED: Mapping[str, tuple[object, ...]] = {
    "reasoning": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "truncation": ("disabled",),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "prompt_cache_options": ({},),
    "client_metadata": ({},),
    "metadata": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "user": (),
    "safety_identifier": (),
    "access_programs": ([],),
    "prediction": (),
    "max_tool_calls": (),
    "request_id": (),
    "session_id": (),
    "stream_interval": (1,),
    "spaces_between_special_tokens": (True,),
}
# Values of `include` that have a meaning here; the others are named as ignored.
LOGPROBS = "message.output_text.logprobs"
# Fields that would change the result and are not supported. The listed values mean "off" and are accepted.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "background": (False,),
    "generate": (True,),
    "prompt": (),
    "context_management": ([],),
    "image": (),
    "moderation": (),
    "suffix": ("",),
    "prompt_logprobs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "vllm_xargs": ({},),
    "stream_beams": (False,),
    "explain": (False,),
    "fork_at": (),
    "fork_with": (),
}
# The supported equivalents of fields of other servers and older clients.
_EQUIVALENTS: Mapping[str, str] = {
    "functions": 'tools: [{"type": "function", "function": ...}]',
    "function_call": "tool_choice",
    **{f"guided_{kind}": f'structured_outputs: {{"{kind}": ...}}' for kind in ("json", "regex", "choice", "grammar")},
}
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_MISSING = re.compile(r"missing required field `(.+?)`")
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FLOAT = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float` - at `\$\.?([^`]*)`")
_MAX_EXACT = 2**53  # larger floats are not exact integers
_MAX_LISTED = 16
MAX_INTEGRAL_FLOATS = 16


def parse_fields(body: Mapping[str, Any], kind: type[Fields]) -> Fields:
    """Convert the fields of `body` that a struct has; other structs of the route have the rest.

    Raises: InvalidRequestError naming the field and the limit.
    """
    try:
        return _convert(body, kind, MAX_INTEGRAL_FLOATS)
    except msgspec.ValidationError as error:
        text = str(error)
        path, missing = _PATH.search(text), _MISSING.search(text)
        message = _PATH.sub("", text)
        param = path.group(1) if path else ""
        if missing:
            param = f"{param}.{missing.group(1)}" if param else missing.group(1)
            raise InvalidRequestError(f"{param} is required", param=param, code="missing_required_parameter") from None
        param = param.replace("[...]", "")
        choices = _list_choices(kind, param)
        raise InvalidRequestError(_describe_limit(param, message, choices), param=param or None) from None


def _convert(body: Mapping[str, Any], kind: type[Fields], max_floats: int) -> Fields:
    """Convert a body, in which `max_floats` integers may be written as 5.0: each of them repeats the conversion.

    Raises: msgspec.ValidationError.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        corrected = _with_integer(body, str(error)) if max_floats else None
        if corrected is None:
            raise
    return _convert(corrected, kind, max_floats - 1)


def _with_integer(body: Mapping[str, Any], message: str) -> Mapping[str, Any] | None:
    """Copy a body, with an integer where msgspec's message says that there is a float; None if it has a fraction."""
    found = _FLOAT.fullmatch(message)
    if found is None:
        return None
    copied: dict[str, Any] = dict(body)
    inner: Any = copied
    *path, last = [int(step) if step.isdigit() else step for step in re.findall(r"[^.\[\]]+", found[1])]
    try:
        for step in path:
            inner[step] = copy(inner[step])
            inner = inner[step]
        value = inner[last]
        if not isinstance(value, float) or not value.is_integer() or abs(value) > _MAX_EXACT:
            return None
        inner[last] = int(value)
    except (LookupError, TypeError):  # the path of a value of a mapping does not name its key
        return None
    return copied


_LIMIT = re.compile(r"Expected `(\w+)` (of length )?(<=|>=|<|>) ([-+.\w]+)")
_PATTERN = re.compile(r"Expected `str` matching regex '(.+)'")
_CHOICE = re.compile(r"Invalid enum value (.+)")
_TYPE = re.compile(r"Expected `([\w| ]+)`, got `(\w+)`")
_COMPARISONS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "greater than"}
_UNITS = {"str": "character", "array": "element", "object": "entry"}
_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
}


def _list_choices(kind: type[msgspec.Struct], param: str) -> list[str]:
    """List the values of a field, or of the elements of a list, that is one of several constants; else none."""
    hints: list[Any] = [kind]
    for name in re.findall(r"[^.\[\]]+", param):
        parts = [part for hint in hints for part in _parts_of(hint)]
        if name.isdigit():
            hints = [get_args(each)[0] for each in parts if get_origin(each) in (list, Sequence)]
        else:
            structs = [each for each in parts if isinstance(each, type) and issubclass(each, msgspec.Struct)]
            fields = [field for each in structs for field in msgspec.structs.fields(each) if field.encode_name == name]
            hints = [field.type for field in fields]
    parts = [part for hint in hints for part in _parts_of(hint)]
    values = [str(value) for part in parts if get_origin(part) is Literal for value in get_args(part)]
    return ["true", "false", *values] if bool in parts else values


def _parts_of(hint: Any) -> Iterator[Any]:
    """Yield a type, those of a union and of an annotated type."""
    yield hint
    if get_origin(hint) in (Annotated, Union, UnionType):
        for each in get_args(hint):
            yield from _parts_of(each)


def _describe_limit(param: str, message: str, choices: Sequence[str] = ()) -> str:
    """Rephrase msgspec's message about a field without its notation of types."""
    subject = param or "the body"
    if choices and (value := _CHOICE.fullmatch(message)):
        return f"{subject} must be one of {', '.join(choices)}, got {value[1]}"
    if limit := _LIMIT.fullmatch(message):
        kind, is_length, sign, number = limit.groups()
        number = number.removesuffix(".0")
        if not is_length:
            return f"{subject} must be {_COMPARISONS[sign]} {number}"
        unit = _UNITS.get(kind, "element")
        if number != "1":
            unit = unit.removesuffix("y") + "ies" if unit.endswith("y") else f"{unit}s"
        return f"{subject} must have {_COMPARISONS[sign]} {number} {unit}"
    if pattern := _PATTERN.fullmatch(message):
        return f"{subject} must match {pattern[1]}"
    if types := _TYPE.fullmatch(message):
        expected = " or ".join(_TYPES.get(kind, kind) for kind in types[1].split(" | "))
        return f"{subject} must be {expected}, got {_TYPES.get(types[2], types[2])}"
    return f"{subject}: {message[:1].lower()}{message[1:]}"


def unknown_fields(body: Mapping[str, Any], *kinds: type[msgspec.Struct]) -> tuple[str, ...]:
    """List the fields that are ignored, nested ones with their path, for the `x-chatcache-ignored` header.

    A tool that is not executed is listed as `tools.` and its type. `body` may be invalid. Raises:
    UnsupportedParameterError for a field that is known and not supported.
    """
    nested: dict[str, tuple[type[msgspec.Struct], ...]] = {}
    for kind in kinds:
        nested |= _struct_fields(kind)
    found: dict[str, None] = {}
    for name, value in body.items():
        if name == "include" and isinstance(value, list):
            found |= dict.fromkeys(f"include.{each}" for each in value if each != LOGPROBS)
        elif name in nested:
            found |= dict.fromkeys(_ignored_below(value, nested[name], name))
        elif name in IGNORED:
            found |= dict.fromkeys(_ignored_values(name, value))
        elif name in UNSUPPORTED:
            _check_unsupported(name, value)
        elif name not in WITHOUT_EFFECT:
            found[name] = None
    return tuple(found)


def _check_unsupported(name: str, value: object) -> None:
    if value is not None and not any(_same(value, off) for off in UNSUPPORTED[name]):
        hint = f"; send {_EQUIVALENTS[name]}" if name in _EQUIVALENTS else ""
        raise UnsupportedParameterError(f"{name} is not supported here{hint}", param=name)


def _ignored_values(name: str, value: object) -> Iterator[str]:
    """Name a field of `IGNORED` unless it has no value; of `reasoning`, the members that have one."""
    if name == "reasoning" and isinstance(value, dict):
        yield from (f"{name}.{member}" for member, each in value.items() if each is not None)
    elif value is not None and value not in IGNORED[name]:
        yield name


def _ignored_below(value: object, kinds: tuple[type[msgspec.Struct], ...], path: str) -> Iterator[str]:
    """Name the ignored fields inside a value that should be one of `kinds`, or a list of them."""
    if not kinds or value is None:
        return
    if isinstance(value, list):
        for each in value:
            yield from _ignored_below(each, kinds, path)
    elif isinstance(value, dict):
        kind = kinds[0]
        executed = getattr(kind, "executed_types", None)
        tool_type = str(value.get("type", "function"))
        if executed is not None and tool_type not in executed:
            yield f"{path}.{tool_type}"
            return
        nested, without_effect = _struct_fields(kind), getattr(kind, "without_effect", ())
        for name, each in value.items():
            if name in nested:
                if nested[name]:
                    yield from _ignored_below(each, nested[name], f"{path}.{name}")
            elif each is not None and name not in without_effect:
                yield f"{path}.{name}"


@cache
def _struct_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[type[msgspec.Struct], ...]]:
    """Return the fields of a struct, each with the structs that its value, or each of its elements, may be."""
    described = cast(inspect.StructType, inspect.type_info(kind))
    return {field.encode_name: tuple(_structs_of(field.type)) for field in described.fields}


def _structs_of(kind: inspect.Type) -> Iterator[type[msgspec.Struct]]:
    if isinstance(kind, inspect.Metadata):
        yield from _structs_of(kind.type)
    elif isinstance(kind, inspect.StructType):
        yield kind.cls
    elif isinstance(kind, inspect.ListType):
        yield from _structs_of(kind.item_type)
    elif isinstance(kind, inspect.UnionType):
        for option in kind.types:
            yield from _structs_of(option)


def ignored_header(names: tuple[str, ...]) -> dict[str, str]:
    """Build the header that lists the ignored fields.

    Names that are invalid in a header are only counted.
    """
    if not names:
        return {}
    fit = [name for name in names if _HEADER_NAME.fullmatch(name)][:_MAX_LISTED]
    more = [f"+{len(names) - len(fit)}"] if len(fit) < len(names) else []
    return {"x-chatcache-ignored": ", ".join(fit + more)}


def _same(value: object, off: object) -> bool:
    """Compare without treating True as 1."""
    return value == off and isinstance(value, bool) == isinstance(off, bool)
