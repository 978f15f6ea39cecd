"""Functions that a model is told of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Function:
    """`parameters`: a JSON schema of the arguments (None: it takes none). `strict`: calls are held to it."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """The form that chat templates know."""
        described = {"description": self.description} if self.description is not None else {}
        parameters = self.parameters if self.parameters is not None else _NOTHING
        return {"type": "function", "function": {"name": self.name, **described, "parameters": parameters}}

    def echo(self) -> dict[str, Any]:
        """The flat form of the response object; `Turn.echo` keeps it as "tools"."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }


def variables(functions: Sequence[Function]) -> dict[str, Any]:
    """What a template is told beside the messages."""
    return {"tools": [function.for_template() for function in functions]} if functions else {}


def echoed(tools: object) -> tuple[Function, ...]:
    """Read back what `Function.echo` wrote."""
    if not isinstance(tools, list | tuple):
        return ()
    return tuple(
        Function(tool["name"], tool.get("description"), tool.get("parameters"), bool(tool.get("strict")))
        for tool in tools
    )
