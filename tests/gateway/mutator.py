"""Mutations of valid messages: types, extreme values, missing and odd fields, invalid JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, Any]

HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, 2**31, 2**63, -(2**63) - 1, 1e308, 5e-324, 10**40),
    *(
        "",
        "\x00",
        "\ud83d\ude00",
        "\u2028\x85",
        "'; drop table items; --",
        "../../etc/passwd",
        "x" * 10_000,
        "<|im_end|>",
    ),
    *([], {}, [[]], [None], [{}] * 50, {"": ""}, {"type": "response.create"}, [0] * 1000, {"a": {"b": [{"c": []}]}}),
]


class Mutator:
    """Changes messages; the same seed, the same changes."""

    def __init__(self, seed: int, valid: Sequence[Message]) -> None:
        self._random = random.Random(seed)
        self._valid = valid

    def message(self) -> bytes | str:
        """A message: mostly JSON of another shape, sometimes other text, sometimes bytes."""
        pick = self._random.choice
        value = json.loads(json.dumps(pick(self._valid)))
        for _ in range(self._random.choice((0, 1, 1, 2, 3))):
            self._change(value)
        text = json.dumps(value, ensure_ascii=self._random.random() < 0.7)
        if self._random.random() < 0.2:
            text = self._damage(text)
        data = text.encode("utf-8", "surrogatepass")
        return data if self._random.random() < 0.03 else data.decode("utf-8", "replace")

    def _change(self, value: Message) -> None:
        """Replace, drop, rename or add something, somewhere in the message."""
        containers = list(_containers(value))
        found = self._random.choice(containers)
        keys = list(found) if isinstance(found, dict) else list(range(len(found)))
        way, pick = self._random.random(), self._random.choice
        if way < 0.2 and isinstance(found, dict):
            found[self._random.choice(("", "model", "\x00", "stream_id", "response", "type", "n"))] = self._hostile()
        elif keys and way < 0.3 and isinstance(found, dict):
            found[self._random.choice(("", "x", "-1", "99999999999", "\u0661", "a" * 600))] = found.pop(pick(keys))
        elif keys and way < 0.4:
            del found[self._random.choice(keys)]
        elif keys:
            found[self._random.choice(keys)] = self._hostile()

    def _hostile(self) -> Any:
        return json.loads(json.dumps(self._random.choice(HOSTILE)))

    def _damage(self, text: str) -> str:
        """Cut, double, or change characters."""
        at = self._random.randrange(len(text))
        return self._random.choice(
            (
                text[:at],
                text + text,
                text[:at] + self._random.choice('{}[]",:\\\x00é') + text[at + 1 :],
                text[:at] + '"\\ud800"' + text[at:],
                text[:at] + "NaN" + text[at:],
                text.replace("{", "[" * 40, 1),
            )
        )


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for child in value.values() if isinstance(value, dict) else value:
            yield from _containers(child)
