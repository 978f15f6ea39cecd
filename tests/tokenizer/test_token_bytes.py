"""Token bytes against the library's own decoder."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from chatcache.tokenizer.tokenizer import LeadingSpace, Tokenizer, build_byte_table
from tests.tokenizer.tokenizers import KINDS, backend_of

BACKENDS = {kind: backend_of(kind) for kind in KINDS}
TOKENIZERS = {kind: Tokenizer(backend_of(kind)) for kind in KINDS}


@given(kind=st.sampled_from(KINDS), text=st.text(max_size=40), skip=st.booleans())
@settings(max_examples=400, deadline=None)
def test_decode_equals_the_library_on_texts(kind: str, text: str, skip: bool) -> None:
    ids = BACKENDS[kind].encode(text).ids
    assert TOKENIZERS[kind].encode(text, add_special_tokens=True) == ids
    assert TOKENIZERS[kind].decode(ids, skip) == BACKENDS[kind].decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_equals_the_library_on_random_ids(kind: str) -> None:
    """Byte-level: any ids. Byte fallback: where a run of byte tokens is valid UTF-8 (the library turns every byte of
    an invalid run into U+FFFD, its valid characters too; we keep those, as a stream must)."""
    rng = random.Random(3)
    tokenizer, backend = TOKENIZERS[kind], BACKENDS[kind]
    bytes_ids = {i for i in range(tokenizer.vocab_size) if (backend.id_to_token(i) or "").startswith("<0x")}
    ids_drawn = [i for i in range(tokenizer.vocab_size) if kind == "bytelevel" or i not in bytes_ids]
    for _ in range(2000):
        ids = rng.choices(ids_drawn, k=rng.randint(0, 8))
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


def test_an_invalid_run_of_bytes_keeps_its_valid_characters() -> None:
    tokenizer = TOKENIZERS["llama"]
    ids = [tokenizer.token_bytes.index(bytes([byte])) for byte in b"\xe4\xbd\xa0\xff"]
    assert tokenizer.decode(ids) == "你\ufffd"


@pytest.mark.parametrize(
    ("kind", "lead"),
    [
        ("bytelevel", LeadingSpace.KEEP),
        ("llama", LeadingSpace.SPACE),
        ("gemma", LeadingSpace.KEEP),
        ("metaspace", LeadingSpace.SPACES),
    ],
)
def test_leading_space_of_known_decoders(kind: str, lead: LeadingSpace) -> None:
    assert TOKENIZERS[kind].leading_space is lead


def test_every_byte_of_the_byte_level_map() -> None:
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    pieces = build_byte_table(backend).by_id
    assert sorted(pieces) == [bytes([byte]) for byte in range(256)]
    text = "aé中👩\x00\x7f\xad "
    assert b"".join(pieces[index] for index in backend.encode(text).ids) == text.encode()


@pytest.mark.parametrize("token", ["<é ü>", "<|a b|>", "ü", "中", "\xad", "Ġ x", "\x7f\x00"])
def test_added_tokens_outside_the_byte_map_stand_for_themselves(token: str) -> None:
    backend = backend_of("bytelevel")
    backend.add_tokens([AddedToken(token, normalized=False)])
    (index,) = backend.encode(token, add_special_tokens=False).ids
    assert build_byte_table(backend).by_id[index].decode("utf-8", "replace") == backend.decode([index])


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(cleanup=False), decoders.BPEDecoder("</w>")])
def test_other_decoders_are_asked(decoder: decoders.Decoder | None) -> None:
    words = {"hello": 0, "##world": 1, "again": 2, "x</w>": 3}
    backend = Backend(models.WordLevel(words, unk_token="hello"))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend)
    rng = random.Random(0)
    for _ in range(50):
        ids = rng.choices([0, 1, 2] if not isinstance(decoder, decoders.BPEDecoder) else [0, 2], k=4)
        if ids[0] != 1:  # a text does not begin with a word's continuation
            assert tokenizer.decode(ids) == backend.decode(ids)


def test_ids_with_holes() -> None:
    backend = Backend(models.BPE(vocab={"a": 0, "b": 5}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    assert build_byte_table(backend).by_id == (b"a", b"", b"", b"", b"", b"b")


def test_an_empty_vocabulary() -> None:
    assert build_byte_table(Backend(models.BPE())).by_id == ()
