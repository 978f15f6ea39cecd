"""Objects out of a stream of bytes, against a parser that has all of it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from chatcache.errors import InvalidRequestError
from chatcache.gateway import json_codec as json_values
from chatcache.gateway.json_codec import JsonObjectSplitter


def split(data: bytes, sizes: list[int]) -> list[Any]:
    """Feed `data` in pieces of these sizes, over and over."""
    values, found, at, turn = JsonObjectSplitter(), [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        found += values.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    values.end()
    return [json.loads(each) for each in found]


def any_value(generator: random.Random, depth: int = 0) -> Any:
    kind = generator.random()
    if depth > 3 or kind < 0.3:
        return generator.choice(['a"b\\', "}{][", "\\\\", "é\n", 1, None, True, "x" * 50, '\\"'])
    if kind < 0.6:
        return [any_value(generator, depth + 1) for _ in range(generator.randint(0, 3))]
    names = (generator.choice('ab"c') + str(number) for number in range(generator.randint(0, 3)))
    return {name: any_value(generator, depth + 1) for name in names}


def test_splitter_with_any_chunking_returns_all_objects() -> None:
    generator = random.Random(3)
    for _ in range(1000):
        objects = [{"v": any_value(generator)} for _ in range(generator.randint(0, 4))]
        indent = generator.choice([None, 1])
        forms = [
            json.dumps(objects, indent=indent),
            "\n".join(json.dumps(each, ensure_ascii=generator.random() < 0.5) for each in objects) + "\r\n",
            " ".join(json.dumps(each, indent=indent) for each in objects),
            "\ufeff" + "".join(json.dumps(each) for each in objects),
        ]
        data = generator.choice(forms).encode()
        sizes = generator.choices([1, 2, 3, 50], k=5)
        assert split(data, sizes) == objects, data
        if objects and not data.endswith(b"\n"):
            with pytest.raises(InvalidRequestError, match=r"ends within|where an object"):
                split(data[:-1], sizes)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        *(("x", 0), ("1", 0), ("[1]", 1), ('"a"', 0), ("[{}]]", 4), ("{}}", 2), ("[]{}", 2), ("{}[", 2), ("[[]]", 1)),
        *(("{} x", 3), ("[{} x]", 4), (",{}", 0), ("[,{}]", 1), ("nul", 0), ("\ufeff\ufeff{}", 3), ("}", 0), ("]", 0)),
    ],
)
def test_splitter_on_invalid_bytes_reports_their_position(text: str, at: int) -> None:
    for sizes in ([1], [100]):
        with pytest.raises(InvalidRequestError, match=rf"at byte {at}\b"):
            split(text.encode(), sizes)


@pytest.mark.parametrize("text", ["[{}", '{"a', '[{"a": [1, 2', "{} {", "[", b"\xef\xbb".decode("latin-1")])
def test_splitter_on_truncated_input_raises(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        split(text.encode("latin-1"), [1])


def test_splitter_buffers_one_object_and_limits_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    values = JsonObjectSplitter()
    for _ in range(2000):
        assert values.feed(b'{"a":"' + b"x" * 1000 + b'"}\n')
        assert len(values._buffer) < 10
    monkeypatch.setattr(json_values, "MAX_BRACKETS", 100)
    with pytest.raises(InvalidRequestError, match="at most 100"):
        JsonObjectSplitter().feed(b'{"a":' + b"[" * 100)
    assert len(JsonObjectSplitter().feed(b'{"a":[]}' * 100)) == 100  # counted by object
