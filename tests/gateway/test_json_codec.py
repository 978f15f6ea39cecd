"""Strict JSON decoding, ASCII encoding, and splitting of a byte stream into objects."""

from __future__ import annotations

import asyncio
import json
import random
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.errors import InvalidRequestError
from chatcache.gateway import json_codec as json_values
from chatcache.gateway.json_codec import MAX_DEPTH, MAX_NODES, MAX_VALUES, JsonObjectSplitter, decode_object, encode
from chatcache.gateway.limits.admission import TextThrottle
from chatcache.gateway.middleware import parse_json
from tests.gateway.serving import Server

REFUSED = {
    "empty": b"",
    "not an object": b"[1]",
    "a string": b'"x"',
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": Infinity}',
    "minus Infinity": b'{"a": -Infinity}',
    "overflow": b'{"a": 1e999}',
    "duplicate key": b'{"a": 1, "a": 2}',
    "duplicate key, escaped": b'{"a": 1, "\\u0061": 2}',
    "duplicate key, nested": b'{"x": [{"a": 1, "a": 1}]}',
    "lone high surrogate": b'{"a": "\\ud800"}',
    "lone low surrogate": b'{"a": "\\udc00"}',
    "surrogates reversed": b'{"a": "\\udc00\\ud800"}',
    "lone surrogate key": b'{"\\ud800": 1}',
    "raw surrogate bytes": b'{"a": "\xed\xa0\x80"}',
    "latin-1": b'{"a": "\xe9"}',
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "overlong": b'{"a": "\xc0\xaf"}',
    "too deep": b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
    "far too deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "trailing comma": b'{"a": 1,}',
    "comment": b'{"a": 1} // x',
    "two values": b'{"a": 1}{"b": 2}',
    "single quotes": b"{'a': 1}",
    "control character": b'{"a": "\x01"}',
    "leading zero": b'{"a": 01}',
    "endless digits": b'{"a": ' + b"9" * 100_000 + b"}",
    "NUL": b'{"a": 1}\x00',
    "a million arrays": b'{"a":[' + b"[]," * 10**6 + b"[]]}",
    "two million numbers": b'{"a":[' + b"0," * (2 * 10**6) + b"0]}",
    "too many members": b"{" + b",".join(b'"%d":1' % n for n in range(MAX_NODES)) + b"}",
    "too many objects, with strings": b'{"a":[' + b'{"\\"{[":"x"},' * (MAX_NODES // 2) + b"{}]}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_ambiguous_or_invalid_json_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_object(REFUSED[name])
    assert caught.value.code == "invalid_json"
    caught.value.message.encode("ascii")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": "\\ud800"}', "a string has a lone surrogate"),
        (b'{"a": "\\ud800 x"}', "a string has a lone surrogate"),
        (b'{"a": "\\udc00"}', "a string has a lone surrogate"),
        (b'{"a": "\\ud800', "it ends too early"),
        (b'{"a"', "it ends too early"),
        (b"", "it ends too early"),
        (b'{"a": 1e999}', "a number is out of range"),
        (b'{"a": %s}' % (b"9" * 5000), "a number is out of range"),
        (b'{"a": 1,}', "trailing comma in object (byte 8)"),
    ],
)
def test_message_names_the_problem(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_object(data)
    assert caught.value.message == f"not valid JSON: {message}"


def test_brackets_inside_strings_do_not_count() -> None:
    """However many: a log or a program is a legitimate message."""
    text = '{"a": [1, "\\"]}:' * 50_000
    body = {"messages": [{"content": text}, {"content": "\\"}], "more": [[1]] * 100, "many": ["{:"] * MAX_NODES}
    assert text.count("{") + text.count("[") + text.count(":") > MAX_NODES
    assert decode_object(json.dumps(body)) == body
    assert decode_object(json.dumps(body).encode()) == body


@pytest.mark.slow
def test_maximal_number_of_nodes_is_accepted_and_one_more_refused() -> None:
    """The oracle is the number of values that Python's parser builds."""
    members: dict[str, object] = {str(number): [] for number in range((MAX_NODES - 1) // 2)}
    assert decode_object(json.dumps(members)) == members
    with pytest.raises(InvalidRequestError, match=str(MAX_NODES)):
        decode_object(json.dumps({**members, "x": []}))


@pytest.mark.slow
def test_maximal_number_of_values_is_accepted_and_one_more_refused() -> None:
    """A prompt of token ids may be as long as any context; commas in text are text."""
    inside = [0] * (MAX_VALUES - 4)
    body = {"a": inside, "b": ""}
    assert decode_object(json.dumps(body)) == body
    with pytest.raises(InvalidRequestError, match=str(MAX_VALUES)):
        decode_object(json.dumps({**body, "a": [*inside, 0, 0]}))
    text = {"a": ',"' * MAX_VALUES, "b": [","] * 5}
    assert decode_object(json.dumps(text)) == text


def test_maximal_depth_is_accepted() -> None:
    inner = b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1)
    assert decode_object(b'{"a":' + inner + b"}")


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(), values, max_size=5))
def test_decode_object_equals_json_loads(value: dict[str, object]) -> None:
    assert decode_object(json.dumps(value)) == value
    assert decode_object(json.dumps(value, ensure_ascii=False).encode()) == value


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(), values, max_size=5))
def test_encode_writes_one_ascii_line_of_the_same_value(value: dict[str, object]) -> None:
    data = encode(value)
    assert set(data) <= set(string.printable.encode()) - set(b"\r\n\t\x0b\x0c") | {0x7F}
    assert json.loads(data) == value


@pytest.mark.parametrize("name", ["NaN", "duplicate key", "lone high surrogate", "far too deep", "latin-1", "empty"])
def test_invalid_json_over_http_and_websocket_is_refused(server: Server, name: str) -> None:
    headers = {"content-type": "application/json"}
    status, _, answer = server.request("POST", "/v1/chat/completions", raw=REFUSED[name], headers=headers)
    assert status == 400 and answer["error"]["code"] == "invalid_json"


@pytest.mark.slow
async def test_large_body_is_parsed_outside_the_event_loop() -> None:
    """The event loop stays responsive while a large body is checked."""
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    turning = asyncio.create_task(turn())
    body = {"a": [{"b": [[number]]} for number in range(20_000)]}
    assert await parse_json(json.dumps(body), TextThrottle(), "") == body
    turning.cancel()
    assert turns > 3


# Splitting a byte stream into objects


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
