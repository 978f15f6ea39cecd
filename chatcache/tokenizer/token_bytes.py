"""Table of the bytes that each token adds to the text.

Computed from the decoder of the tokenizer: byte-level BPE (GPT-2's byte map) or a SentencePiece-style chain (metaspace,
<0xNN> byte fallback, one leading space stripped). Any other decoder is probed: each token is decoded after a fixed
anchor token, and the text after the anchor is recorded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tokenizers import Tokenizer as Backend


class LeadingSpace(Enum):
    """Spaces that a decoder drops from the first token of a text."""

    KEEP = "nothing"
    SPACE = "one leading space"
    SPACES = "every space in the token"

    def hidden(self, piece: bytes) -> bytes:
        """Return a mask with one byte per byte of `piece`.

        0 if the byte is dropped from a first token, else 1.
        """
        if self is LeadingSpace.SPACES:
            return bytes(byte != 0x20 for byte in piece)
        if self is LeadingSpace.SPACE and piece.startswith(b" "):
            return b"\x00" + b"\x01" * (len(piece) - 1)
        return b"\x01" * len(piece)


@dataclass(frozen=True, slots=True)
class TokenByteTable:
    """Bytes of each token (empty for unused ids) and the rule for the first token."""

    by_id: tuple[bytes, ...]
    leading_space: LeadingSpace


def build_byte_table(backend: Backend) -> TokenByteTable:
    """Compute the bytes of every token of a vocabulary."""
    vocab = backend.get_vocab(with_added_tokens=True)
    by_id = [""] * (max(vocab.values(), default=-1) + 1)
    for token, index in vocab.items():
        by_id[index] = token
    steps = _decoder_steps(backend)
    if all(_is_supported(step) for step in steps) and steps:
        return TokenByteTable(tuple(_token_to_bytes(steps, token) for token in by_id), _leading_space(steps))
    return _probe_decoder(backend, by_id)


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    """Return the steps of the decoder, as the library serialises them."""
    if backend.decoder is None:
        return []
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return _flatten(state)


def _flatten(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for inner in state["decoders"] for step in _flatten(inner)]


def _is_supported(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "ByteLevel" | "ByteFallback" | "Fuse" | "Metaspace":
            return True
        case "Replace":
            return "String" in step["pattern"]
        case "Strip":
            return bool(step["content"] == " " and step["start"] <= 1 and step["stop"] == 0)
        case _:
            return False


def _leading_space(steps: list[dict[str, Any]]) -> LeadingSpace:
    for step in steps:
        if step["type"] == "Metaspace" and step["prepend_scheme"] != "never":
            return LeadingSpace.SPACES
        if step["type"] == "Strip" and step["start"] == 1:
            return LeadingSpace.SPACE
    return LeadingSpace.KEEP


def _token_to_bytes(steps: list[dict[str, Any]], token: str) -> bytes:
    text = token
    for step in steps:
        match step["type"]:
            case "ByteLevel":
                return _undo_byte_map(text)
            case "ByteFallback":
                if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                    try:
                        return bytes([int(text[3:5], 16)])
                    except ValueError:
                        pass
            case "Replace":
                text = text.replace(step["pattern"]["String"], step["content"])
            case "Metaspace":
                text = text.replace(step["replacement"], " ")
    return text.encode("utf-8", "surrogatepass")


def _byte_map() -> dict[int, int]:
    """Return the inverse of GPT-2's map from bytes to printable characters.

    Printable Latin-1 characters stand for themselves, U+0100, U+0101, ... for the other bytes in order. Code points
    below 256 that stand for no byte map outside Latin-1.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    outside = dict.fromkeys(others, 65535)
    return outside | {byte: byte for byte in plain} | {0x100 + place: byte for place, byte in enumerate(others)}


_BYTES = _byte_map()


def _undo_byte_map(text: str) -> bytes:
    """Convert a token's characters back to bytes.

    Added tokens are not mapped: they are encoded as UTF-8.
    """
    try:
        return text.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _probe_decoder(backend: Backend, by_id: list[str]) -> TokenByteTable:
    """Probe a decoder of unknown type: decode each token after a fixed anchor token."""
    special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    anchor = next((i for i, token in enumerate(by_id) if token and i not in special and backend.decode([i])), None)
    if anchor is None:
        return TokenByteTable(tuple(token.encode() for token in by_id), LeadingSpace.KEEP)
    head = len(backend.decode([anchor], skip_special_tokens=False))
    after = [
        backend.decode([anchor, index], skip_special_tokens=False)[head:] if token else ""
        for index, token in enumerate(by_id)
    ]
    drops_space = after[anchor].startswith(" ") and not backend.decode([anchor]).startswith(" ")
    return TokenByteTable(
        tuple(text.encode() for text in after), LeadingSpace.SPACE if drops_space else LeadingSpace.KEEP
    )
