"""Strict JSON in, ASCII JSON out.

Accepted: UTF-8, one value, depth <= 32, at most 100,000 objects, arrays and members and 1,000,000 values, no duplicate
keys, no NaN or Infinity (nor 1e999), no lone surrogates. What two parsers could read differently is refused here, once,
for HTTP bodies and WebSocket frames alike.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from chatcache.errors import InvalidRequest

MAX_DEPTH = 32
MAX_NODES = 100_000
MAX_VALUES = 1_000_000
_NON_ASCII = re.compile(r"[^\x00-\x7f]")
_MARK_OR_STRING = re.compile(rb'[\[{:,]|"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def decode_object(data: bytes | str) -> dict[str, Any]:
    """Parse a JSON object. Raises: InvalidRequest with code "invalid_json"."""
    try:
        raw = data.encode() if isinstance(data, str) else data
        _check_size(raw)
        value = msgspec.json.decode(raw)
        if not isinstance(value, dict):
            raise _invalid("the body must be a JSON object")
        _check_depth(value)
        json.loads(raw, object_pairs_hook=_unique)
    except UnicodeError:
        raise _invalid("the body must be UTF-8") from None
    except RecursionError:
        raise _invalid(f"JSON may nest at most {MAX_DEPTH} deep") from None
    except msgspec.MsgspecError as error:
        raise _invalid(f"not valid JSON: {error}") from None
    except ValueError as error:
        raise _invalid(str(error)) from None
    return value


def encode(value: object) -> bytes:
    """Encode as compact JSON, ASCII only: no byte of it can mean a line end or break a narrow terminal."""
    data = msgspec.json.encode(value)
    return data if data.isascii() else _NON_ASCII.sub(_escape, data.decode()).encode("ascii")


def encoded(value: object) -> msgspec.Raw:
    """A value that is encoded already: what is large goes into an answer piece by piece, and into several once."""
    return msgspec.Raw(encode(value))


def _escape(match: re.Match[str]) -> str:
    units = match.group().encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _check_size(raw: bytes) -> None:
    """Bound what a parser would have to build, before one builds it: values take far more time than their bytes.

    What looks like structure inside strings does not count; strings are only looked for where there is enough of it to
    matter.
    """
    num_nodes = raw.count(b"[") + raw.count(b"{") + raw.count(b":")
    if num_nodes <= MAX_NODES and num_nodes + raw.count(b",") <= MAX_VALUES:
        return
    num_nodes = num_values = 0
    for match in _MARK_OR_STRING.finditer(raw):
        if match.end() - match.start() == 1:
            num_values += 1
            num_nodes += match.group() != b","
            if num_nodes > MAX_NODES:
                raise _invalid(f"JSON may hold at most {MAX_NODES} objects, arrays and members")
            if num_values > MAX_VALUES:
                raise _invalid(f"JSON may hold at most {MAX_VALUES} values")


def _check_depth(value: object) -> None:
    stack: list[tuple[object, int]] = [(value, 1)]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise _invalid(f"JSON may nest at most {MAX_DEPTH} deep")
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        stack += [(child, depth + 1) for child in children if isinstance(child, dict | list)]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same key appears twice in one JSON object")
    return found


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_json")
