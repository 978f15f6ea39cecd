"""JSON that goes into a rendering as it was written: spacing, order and escapes are part of what the model said."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64


class VerbatimJson(dict[str, Any]):
    """An object as templates read it; `tojson` writes `source`, the text it was read from."""

    __slots__ = ("source",)

    def __init__(self, value: dict[str, Any], source: str) -> None:
        super().__init__(value)
        self.source = source


def arguments_of(source: str) -> VerbatimJson | str:
    """Return a call's arguments for a template: an object where they are one, else the text itself."""
    try:
        value = json.loads(source)
        json.dumps(value, ensure_ascii=False).encode()  # escapes may stand for lone surrogates
    except (ValueError, RecursionError):
        return source
    return VerbatimJson(value, source) if isinstance(value, dict) and _is_shallow(value, MAX_DEPTH) else source


def _is_shallow(value: Any, left: int) -> bool:
    """Whether templates, and whoever else walks it, can go as deep as it is."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left > 0 and all(_is_shallow(each, left - 1) for each in inner)


def dumped(value: Any, **options: Any) -> str:
    """Dump as JSON, verbatim where that is asked for."""
    sources: list[str] = []
    text = json.dumps(_marked(value, sources), **options)
    for number, source in enumerate(sources):
        mark = json.dumps(_mark(number), ensure_ascii=options.get("ensure_ascii", True))
        text = text.replace(mark, source, 1)
    return text


def _marked(value: Any, sources: list[str]) -> Any:
    if isinstance(value, VerbatimJson):
        sources.append(value.source)
        return _mark(len(sources) - 1)
    if isinstance(value, dict):
        return {key: _marked(each, sources) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(each, sources) for each in value]
    return value


def _mark(number: int) -> str:
    return f"\udcfe{number}\udcfe"  # lone surrogates: no valid text holds them
