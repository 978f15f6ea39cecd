"""Streaming text equals the text: whatever the bytes, the tokens, the chunks and the stop strings."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.decoding.stopping import START, StopRules
from chatcache.tokenizer.detokenizer import IncrementalDetokenizer
from chatcache.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.tokenizers import KINDS, backend_of

BACKENDS = {kind: backend_of(kind) for kind in KINDS}
TOKENIZERS = {kind: Tokenizer(BACKENDS[kind], eos_token_ids=BACKENDS[kind].encode("</s>").ids[1:]) for kind in KINDS}
BYTE_IDS = {  # token id of each single byte
    kind: {piece[0]: index for index, piece in enumerate(tokenizer.token_bytes) if len(piece) == 1}
    for kind, tokenizer in TOKENIZERS.items()
}
kinds = st.sampled_from(KINDS)
texts = st.text(max_size=30) | st.sampled_from(
    ["👩‍👩‍👧 family", "🏳️‍🌈", "中文 日本語", "e\u0301\u0301", "  two  spaces ", "a\x00b", "naïve", "\ufffd"]
)


class OneByteEach:
    """A tokenizer whose token i is byte i: every split of a text into tokens can be written down."""

    def __init__(self, pieces: Sequence[bytes] | None = None) -> None:
        self.backend = TOKENIZERS["bytelevel"]
        self.token_bytes = tuple(pieces or [bytes([byte]) for byte in range(256)])
        self.leading_space = self.backend.leading_space
        self.special_ids: frozenset[int] = frozenset()
        self.eos_token_ids: tuple[int, ...] = ()


def stream_of(tokenizer: object, *args: object, **kwargs: object) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tokenizer, *args, **kwargs)  # type: ignore[arg-type]


def consume(stream: IncrementalDetokenizer, ids: Iterable[int]) -> str:
    """Push one by one, finish; check that nothing said is ever unsaid."""
    said = ""
    for token in ids:
        delta = stream.push([token])
        said += delta
        assert stream.text == said
    return said + stream.finish()


def cut(text: bytes, stops: Sequence[str], include: bool) -> bytes:
    """Cut at the stop string that ends first, the longest of those."""
    hits = [
        (start + len(stop.encode()), start)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop.encode(), start)
    ]
    if not hits:
        return text
    end, start = min(hits)
    return text[: end if include else start]


@given(kind=kinds, text=texts)
@settings(max_examples=300, deadline=None)
def test_round_trip(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    assert consume(IncrementalDetokenizer(tokenizer), ids) == tokenizer.decode(ids)
    whole = IncrementalDetokenizer(tokenizer)
    assert whole.push(ids) + whole.finish() == tokenizer.decode(ids)


@given(kind=kinds, data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_ids(kind: str, data: st.DataObject, skip: bool) -> None:
    """Random ids make invalid UTF-8 and special tokens in odd places; ids beyond the vocabulary add nothing."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=25))
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, stop_token_ids=())
    assert consume(stream, ids) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(raw=st.binary(max_size=20) | texts.map(str.encode), stops=st.lists(st.text("ab中👩", min_size=1), max_size=3))
@settings(max_examples=300, deadline=None)
def test_bytes_one_by_one(raw: bytes, stops: list[str]) -> None:
    stream = stream_of(OneByteEach(), stops)
    assert consume(stream, raw) == cut(raw, stops, include=False).decode("utf-8", "replace")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("say stop now", ["stop"]),
        ("aaab", ["aab", "ab"]),
        ("中文👩", ["文"]),
        ("x</s>y", ["</s>", "s"]),
        ("sto sto", ["stop"]),
        ("ab\n\nUser", ["\n\nUser:", "\n\nU"]),
    ],
)
def test_every_split_point(text: str, stops: list[str], include: bool) -> None:
    """Pieces of any size, so the stop string is cut everywhere, and deltas hold whole characters only."""
    raw = text.encode()
    want = cut(raw, stops, include).decode()
    for cuts in itertools.combinations(range(1, len(raw)), min(3, len(raw) - 1)):
        bounds = [0, *cuts, len(raw)]
        pieces = [raw[a:b] for a, b in itertools.pairwise(bounds)]
        stream = stream_of(OneByteEach(pieces), stops, include)
        said = ""
        for token in range(len(pieces)):
            delta = stream.push([token])
            said += delta
            assert "\ufffd" not in delta
            assert want.startswith(said)  # no part of a stop string was let out
        assert said + stream.finish() == want
        assert (stream.stopped is not None) == (cut(raw, stops, False) != raw)


def test_ten_thousand_random_sequences_agree_with_the_engine() -> None:
    """The engine's stop rules and the stream find the same stop at the same token."""
    rng = random.Random(11)
    pieces = [b"", b"a", b"b", b"ab", b"ba", b"aab", "é".encode()[:1], "é".encode()[1:], b"bbab"]
    tokenizer = OneByteEach(pieces)
    tokenizer.special_ids = frozenset({3})
    for _ in range(10_000):
        stops = ["".join(rng.choices("abé", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 2))]
        ids = [rng.randrange(len(pieces)) for _ in range(8)]
        min_tokens = rng.choice([0, 0, 3])
        rules = StopRules(max_tokens=99, min_tokens=min_tokens, stop_strings=stops, token_bytes=pieces)
        stream = stream_of(tokenizer, stops, min_tokens=min_tokens)
        trail = START
        for token in ids:
            trail, ended = rules.advance(trail, token)
            stream.push([token])
            assert stream.stopped == (ended.stop_reason if ended else None)
            if ended:
                break


def test_a_held_back_prefix_is_released_when_it_comes_to_nothing() -> None:
    stream = stream_of(OneByteEach(), ["stop"])
    assert [stream.push([byte]) for byte in b"a sto"] == ["a", " ", "", "", ""]
    assert stream.push(b"r") == "stor"
    assert stream.push(b"st") == ""
    assert stream.finish() == "st"
    assert stream.text == "a storst"


def test_no_replacement_character_flickers() -> None:
    stream = stream_of(OneByteEach())
    deltas = [stream.push([byte]) for byte in "👩‍👧".encode()]
    assert [delta for delta in deltas if delta] == ["👩", "\u200d", "👧"]
    assert stream.push([0xE4]) == "" and stream.finish() == "\ufffd"


def test_nothing_counts_after_the_stop() -> None:
    stream = stream_of(OneByteEach(), ["b"])
    assert stream.push(b"abc") == "a"
    assert stream.push(b"abc") == "" and stream.finish() == "" and stream.stopped == "b"


def test_eos_and_stop_tokens_are_hidden() -> None:
    tokenizer = TOKENIZERS["bytelevel"]
    hello, end, mark = tokenizer.encode("Hello"), tokenizer.encode("</s>"), tokenizer.encode("<|im_end|>")
    for skip in (True, False):
        assert consume(IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), hello + end) == "Hello"
    assert (
        consume(IncrementalDetokenizer(tokenizer, include_stop=True, skip_special_tokens=False), hello + end)
        == "Hello</s>"
    )
    assert consume(IncrementalDetokenizer(tokenizer, include_stop=True), hello + end) == "Hello"
    assert consume(IncrementalDetokenizer(tokenizer), hello + mark + hello) == "HelloHello"
    shown = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert consume(shown, hello + mark + hello) == "Hello<|im_end|>Hello"
    assert consume(IncrementalDetokenizer(tokenizer, stop_token_ids=hello[-1:]), hello) == tokenizer.decode(hello[:-1])


def test_eos_completes_no_stop_string_but_flushes_what_was_held() -> None:
    tokenizer = TOKENIZERS["bytelevel"]
    stream = IncrementalDetokenizer(tokenizer, ["lo</s>"], True, False)
    assert "Hello".startswith(stream.push(tokenizer.encode("Hello"))) and stream.text != "Hello"
    stream.push(tokenizer.eos_token_ids)
    assert stream.text == "Hello</s>" and stream.finish() == "" and stream.stopped is None


def test_a_special_token_can_be_a_stop_string() -> None:
    tokenizer = TOKENIZERS["bytelevel"]
    stream = IncrementalDetokenizer(tokenizer, ["<|im_end|>"])
    assert consume(stream, tokenizer.encode("Hello<|im_end|>again")) == "Hello"
    assert stream.stopped == "<|im_end|>"


@pytest.mark.parametrize(("kind", "kept"), [("llama", " Hello"), ("metaspace", " Hello"), ("bytelevel", " Hello")])
def test_the_space_of_a_first_word_is_kept_behind_a_prompt(kind: str, kept: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(" Hello" if kind == "bytelevel" else "Hello")
    alone = IncrementalDetokenizer(tokenizer)
    assert alone.push(ids) + alone.finish() == tokenizer.decode(ids)
    behind = IncrementalDetokenizer(tokenizer, prompt_ids_tail=tokenizer.encode("Say it:"))
    assert behind.push(ids) + behind.finish() == kept
    behind_specials = IncrementalDetokenizer(tokenizer, prompt_ids_tail=[tokenizer.encode("<s>")[-1]])
    assert behind_specials.push(ids) + behind_specials.finish() == tokenizer.decode(ids)


@given(kind=kinds, before=texts.filter(str.strip), after=texts)
@settings(max_examples=200, deadline=None)
def test_behind_a_prompt_the_text_is_what_the_prompt_lacks(kind: str, before: str, after: str) -> None:
    tokenizer = TOKENIZERS[kind]
    head, tail = tokenizer.encode(before), tokenizer.encode_after(before, after)
    if tokenizer.decode(head) and "\ufffd" not in tokenizer.decode(head):
        got = consume(IncrementalDetokenizer(tokenizer, prompt_ids_tail=head[-8:]), tail)
        assert tokenizer.decode(head) + got == tokenizer.decode(head + tail)


def test_incomplete_characters_before_a_stop_become_one_mark() -> None:
    stream = stream_of(OneByteEach(), ["!"])
    assert consume(stream, b"a\xe4\xb8!b") == "a\ufffd"


@pytest.mark.parametrize("byte", [0x00, 0x0A, 0x20, 0x41, 0xC3, 0xFF])
def test_byte_tokens(byte: int) -> None:
    for kind in KINDS:
        tokenizer = TOKENIZERS[kind]
        ids = [*tokenizer.encode("x"), BYTE_IDS[kind][byte]]
        assert consume(IncrementalDetokenizer(tokenizer), ids) == "x" + bytes([byte]).decode("utf-8", "replace")
