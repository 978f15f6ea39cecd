"""Parse request fields; classify the others as without effect, unsupported or unknown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from chatcache.errors import InvalidRequestError, UnsupportedParameterError

Fields = TypeVar("Fields", bound=msgspec.Struct)

# Fields of OpenAI's or vLLM's clients that have no effect on the result.
WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls", "prediction"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "access_programs", "max_tool_calls"),
        *("request_id", "session_id", "stream_interval", "spaces_between_special_tokens"),
        *("type", "stream", "stream_id", "stream_options", "include"),
    }
)
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
    "truncation": ("disabled",),
    "reasoning": ({},),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
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
_MAX_LISTED = 16


def parse_fields(body: Mapping[str, Any], kind: type[Fields]) -> Fields:
    """Convert the fields of `body` that a struct has; other structs of the route have the rest.

    Raises: InvalidRequestError naming the field and the limit.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        path, missing = _PATH.search(text), _MISSING.search(text)
        message = _PATH.sub("", text)
        param = path.group(1) if path else ""
        if missing:
            param = f"{param}.{missing.group(1)}" if param else missing.group(1)
            raise InvalidRequestError(f"{param} is required", param=param, code="missing_required_parameter") from None
        param = param.replace("[...]", "")
        raise InvalidRequestError(_describe_limit(param, message), param=param or None) from None


_LIMIT = re.compile(r"Expected `(\w+)` (of length )?(<=|>=|<|>) ([-+.\w]+)")
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


def _describe_limit(param: str, message: str) -> str:
    """Rephrase msgspec's message about a field without its notation of types."""
    subject = param or "the body"
    if limit := _LIMIT.fullmatch(message):
        kind, is_length, sign, number = limit.groups()
        number = number.removesuffix(".0")
        if not is_length:
            return f"{subject} must be {_COMPARISONS[sign]} {number}"
        unit = _UNITS.get(kind, "element")
        if number != "1":
            unit = unit.removesuffix("y") + "ies" if unit.endswith("y") else f"{unit}s"
        return f"{subject} must have {_COMPARISONS[sign]} {number} {unit}"
    if types := _TYPE.fullmatch(message):
        expected = " or ".join(_TYPES.get(kind, kind) for kind in types[1].split(" | "))
        return f"{subject} must be {expected}, got {_TYPES.get(types[2], types[2])}"
    return f"{subject}: {message[:1].lower()}{message[1:]}"


def unknown_fields(body: Mapping[str, Any], *kinds: type[msgspec.Struct]) -> tuple[str, ...]:
    """List the unknown fields, for the `x-chatcache-ignored` header.

    Raises: UnsupportedParameterError for a field that is known and not supported.
    """
    known = frozenset(name for kind in kinds for name in kind.__struct_fields__)
    rest = [name for name in body if name not in known]
    for name in rest:
        value = body[name]
        if name in UNSUPPORTED and value is not None and not any(_same(value, off) for off in UNSUPPORTED[name]):
            hint = f"; send {_EQUIVALENTS[name]}" if name in _EQUIVALENTS else ""
            raise UnsupportedParameterError(f"{name} is not supported here{hint}", param=name)
    return tuple(name for name in rest if name not in WITHOUT_EFFECT and name not in UNSUPPORTED)


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
