"""Decoding in pieces: the same values and refusals as decoding at once, and no large piece."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.errors import InvalidRequestError
from chatcache.gateway import json_codec, json_pieces
from chatcache.gateway.json_codec import decode_object
from chatcache.gateway.json_pieces import PIECE_BYTES, Turns
from loadtest.attacks.json_bodies import BODIES

PIECE = 12


def in_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Decode every text in pieces of this size."""
    monkeypatch.setattr(json_codec, "PIECE_BYTES", -1)
    monkeypatch.setattr(json_pieces, "PIECE_BYTES", size)


def outcome(raw: bytes) -> Any:
    """Return the value, or whether the text was refused for a repeated key or as invalid."""
    try:
        return decode_object(raw)
    except InvalidRequestError as error:
        return "twice" in error.message


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.sampled_from('a"\\,:[]{} é\n'), max_size=30),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text("ab\\\"", max_size=3), inner, max_size=8),
    max_leaves=30,
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.text(max_size=3), values, max_size=6), st.booleans(), st.integers(0, 2**32))
def test_pieces_give_the_value_or_the_refusal_of_the_whole(value: Any, is_ascii: bool, seed: int) -> None:
    raw, rng = json.dumps(value, ensure_ascii=is_ascii, indent=rng_indent(seed)).encode(), random.Random(seed)
    texts = [raw]
    for _ in range(4):  # one byte is removed, repeated or replaced
        at = rng.randrange(len(raw))
        texts += [
            raw[:at] + rng.choice((b"", raw[at : at + 1] * 2, b",", b":", b'"', b"\\", b"]", b"}")) + raw[at + 1 :]
        ]
    expected = [outcome(each) for each in texts]
    with pytest.MonkeyPatch.context() as patch:
        in_pieces(patch, PIECE)
        assert [outcome(each) for each in texts] == expected


def rng_indent(seed: int) -> int | None:
    return (None, 0, 2)[seed % 3]


@pytest.mark.parametrize(
    ("raw", "is_repeated"),
    [
        (b'{"a": 1, "bbbbbbbbbb": 2, "cccccccccc": 3, "a": 4}', True),  # in two pieces
        (b'{"a": 1, "bbbbbbbbbb": 2, "\\u0061": [1, 2, 3, 4, 5, 6]}', True),
        (b'{"x": [{"a": 1, "a": 2}, 2, 3, 4, 5, 6, 7, 8, 9]}', True),
        (b'{"x": [1, 2, 3, 4, 5, 6, , 8, 9, 10, 11, 12, 13]}', False),
        (b'{"x": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, ]}', False),
        (b'{"x": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, 1]', False),
        (b'{"x": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12] 1}', False),
        (b'{"x" "y": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]}', False),
        (b"{1: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]}", False),
        (b'{"x": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12', False),
        (b'{"x": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa', False),
        (b'{"x": 1}, {"y": [1, 2, 3, 4, 5, 6, 7, 8, 9]}', False),
    ],
)
def test_invalid_text_is_refused_in_pieces(monkeypatch: pytest.MonkeyPatch, raw: bytes, is_repeated: bool) -> None:
    in_pieces(monkeypatch, PIECE)
    assert outcome(raw) is is_repeated


def test_message_about_a_piece_has_the_position_in_the_text() -> None:
    raw = b'{"x": [%b 1 2]}' % (b"1," * PIECE_BYTES)
    with pytest.raises(InvalidRequestError) as caught:
        decode_object(raw)
    assert caught.value.message == f"not valid JSON: expected ',' or ']' (byte {raw.index(b'1 2') + 2})"


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_large_body_is_decoded_in_small_pieces(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A text between quotes cannot be divided; all else is."""
    raw, sizes, decode = BODIES[name], list[int](), msgspec.json.decode

    def counted(text: bytes) -> Any:
        sizes.append(len(text))
        return decode(text)

    monkeypatch.setattr(Turns, "end_piece", lambda self: None)
    monkeypatch.setattr(msgspec.json, "decode", counted)
    assert decode_object(raw) == json.loads(raw)
    assert len(sizes) > 10 or "text" in name or "escapes" in name
    assert sorted(sizes)[-2] <= PIECE_BYTES + 100
