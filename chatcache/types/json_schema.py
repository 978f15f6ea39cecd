"""JSON schemas as constraints: what is enforced of them, and where the listed keys of an object are all of its keys.

`x-guidance` is llguidance's own keyword of a whole schema: its options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

OPTIONS = "x-guidance"
DEFAULT_OPTIONS = {"whitespace_pattern": " "}  # at most one space: otherwise some models emit newlines without end
# Formats that are enforced. The others are annotations, as JSON Schema allows.
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
_ANNOTATIONS = {"title", "description", "$comment"}
_UNSUPPORTED_PATTERN = re.compile(r"\(\?<?[=!]|(?<!\\)(?:\\\\)*\\[bB1-9]")  # look-around, references to groups
# Keywords next to which `properties` is no complete list of the keys.
_OPENING = {
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "propertyNames",
    "minProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "enum",
    "const",
    "not",
    "if",
    "$ref",
    "$dynamicRef",
}
_COMBINING = ("allOf", "anyOf", "oneOf")
_OF_KEYS = _OPENING | {"properties", "required", *_COMBINING}
_OF_ITEMS = {"items", "additionalItems", "prefixItems", "contains", "unevaluatedItems"}
# Keywords with one schema, a list and a mapping of schemas; those of `_CONDITIONS` need not hold for the value.
_NESTED = ("items", "additionalItems", "additionalProperties", "prefixItems", *_COMBINING, "properties")
_CONDITIONS = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "dependentSchemas",
    "patternProperties",
    "unevaluatedProperties",
)
_MAPPINGS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


def relax_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema whose keywords that cannot be enforced are ignored instead of an error."""
    options = schema.get(OPTIONS, DEFAULT_OPTIONS)
    return {**schema, OPTIONS: {"lenient": True, **options}} if isinstance(options, dict) else dict(schema)


def is_relaxed_schema(schema: Any) -> bool:
    """Return whether a schema is one of `relax_schema`."""
    options = schema.get(OPTIONS) if isinstance(schema, dict) else None
    return isinstance(options, dict) and options.get("lenient") is True


def simplify_schema(root: Any) -> None:
    """Remove the keywords without a meaning from a parsed JSON schema, then close its objects.

    These are: annotations, null in place of a keyword's value, `propertyNames` of any string, a `format` that is not
    enforced, and in a relaxed schema the patterns that no grammar can enforce.
    """
    is_relaxed = is_relaxed_schema(root)
    stack: list[Any] = [root]
    while stack:
        schema = stack.pop()
        if isinstance(schema, list):
            stack += schema
        if not isinstance(schema, dict):
            continue
        for word, value in list(schema.items()):
            if _is_meaningless(word, value, is_relaxed=is_relaxed):
                del schema[word]
            elif word in _MAPPINGS:
                stack += value.values() if isinstance(value, dict) else ()
            elif word in _NESTED or word in _CONDITIONS or word == "propertyNames":
                stack.append(value)
    close_objects(root)


def _is_meaningless(word: str, value: Any, *, is_relaxed: bool) -> bool:
    if word in _ANNOTATIONS:
        return True
    if value is None:
        return word not in ("const", "default")
    if word == "propertyNames":
        return bool(value == {"type": "string"})
    if word == "format":
        return isinstance(value, str) and value not in FORMATS
    return word == "pattern" and is_relaxed and isinstance(value, str) and bool(_UNSUPPORTED_PATTERN.search(value))


def close_objects(root: Any) -> None:
    """Set `additionalProperties: false` where a parsed JSON schema lists properties and says nothing about others.

    Models invent keys where a schema allows them; vLLM, llama.cpp and Ollama allow only those that are listed. Objects
    that several schemas describe together (`allOf`, or `$ref`, `anyOf` or `oneOf` next to properties) stay as they are,
    with the values in them: closed parts would exclude each other's keys.
    """
    closed: dict[int, dict[str, Any]] = {}
    shared: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        schema, is_shared = stack.pop()
        if isinstance(schema, list):
            stack += [(each, is_shared) for each in schema]
        if not isinstance(schema, dict) or (id(schema), is_shared) in seen:
            continue
        seen.add((id(schema), is_shared))
        if is_shared:
            shared.add(id(schema))
        elif _lists_all_keys(schema):
            closed[id(schema)] = schema
        else:
            is_shared = _is_combined(schema)
        if "$ref" in schema:
            target = _resolve(schema["$ref"], root)
            if target is None:  # not known which schemas it combines
                return
            stack.append((target, is_shared))
        for word, nested in schema.items():
            if word in _NESTED or word in _CONDITIONS:
                is_mapping = word in _MAPPINGS
                inner = list(nested.values()) if is_mapping and isinstance(nested, dict) else nested
                stack.append((inner, is_shared or word in _CONDITIONS))
    for number, schema in closed.items():
        if number not in shared:
            schema["additionalProperties"] = False


def _members(schema: dict[str, Any], word: str) -> list[dict[str, Any]]:
    """Return the schemas of a combining keyword that concern the keys of an object or the items of an array."""
    members = schema.get(word)
    if not isinstance(members, list):
        return []
    return [each for each in members if isinstance(each, dict) and (_OF_KEYS | _OF_ITEMS) & each.keys()]


def _lists_all_keys(schema: dict[str, Any]) -> bool:
    """Whether the schema and those next to it mention no other keys than those of `properties`."""
    listed = schema.get("properties")
    if not isinstance(listed, dict) or _OPENING & schema.keys():
        return False
    combined = [member for word in _COMBINING for member in _members(schema, word)]
    required = [schema.get("required", []), *(member.get("required") for member in combined)]
    names = [name for each in required if isinstance(each, list) for name in each]
    return all(isinstance(name, str) and name in listed for name in names) and all(
        _OF_KEYS & member.keys() == {"required"} for member in combined
    )


def _is_combined(schema: dict[str, Any]) -> bool:
    """Whether more than one schema concerns the keys or values of the same object, or the items of the same array."""
    if {"enum", "const"} & schema.keys():  # which describe them, too
        return True
    own = bool(((_OF_KEYS | _OF_ITEMS) - {"$ref", *_COMBINING}) & schema.keys())
    num_parts = own + ("$ref" in schema) + ("patternProperties" in schema)
    num_parts += len(_members(schema, "allOf")) + bool(_members(schema, "anyOf")) + bool(_members(schema, "oneOf"))
    return num_parts > 1


def _resolve(reference: object, root: Any) -> Any:
    """Return what a local `$ref` refers to; None if there is no such schema."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(key)] if key.isdecimal() and len(key) < 9 and int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found
