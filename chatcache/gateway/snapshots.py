"""What the outputs of a response say so far, gathered from its events: what one `response.snapshot` tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_ADDED = "response.output_item.added"
_DONE = "response.output_item.done"
_DELTA = ".delta"
_TEXT_NAMES = {"function_call": "arguments"}  # of item types whose text goes by another name


@dataclass(slots=True)
class _Output:
    head: dict[str, Any]
    text_name: str
    parts: list[str] = field(default_factory=list)


class OutputTexts:
    """The text of every output item, by item id, joined from deltas whatever they are of."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._outputs: dict[object, _Output] = {}

    def take(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Heed an event that adds an item, or adds to one."""
        if kind == _ADDED:
            item = fields["item"]
            head = {"item_id": item["id"], "output_index": fields["output_index"], "type": item["type"]}
            head |= {name: item[name] for name in ("name", "call_id", "candidate", "status") if name in item}
            self._outputs[item["id"]] = _Output(head, _TEXT_NAMES.get(item["type"], "text"))
        elif kind == _DONE and (output := self._outputs.get(fields["item"]["id"])) is not None:
            item = fields["item"]
            output.head |= {name: item[name] for name in ("status", "finish_reason", "score") if name in item}
        elif kind.endswith(_DELTA) and (output := self._outputs.get(fields["item_id"])) is not None:
            output.parts.append(fields["delta"])
            self.num_bytes += len(fields["delta"])

    def outputs(self) -> list[dict[str, object]]:
        """All items in the order they came."""
        found: list[dict[str, object]] = []
        for output in self._outputs.values():
            output.parts = ["".join(output.parts)]
            found.append({**output.head, output.text_name: output.parts[0]})
        return found
