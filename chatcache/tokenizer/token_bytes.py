"""What each token adds to the text, as bytes.

Covers the decoders of causal models: byte-level BPE (GPT-2's byte map) and SentencePiece-style chains (metaspace,
<0xNN> byte fallback, one leading space stripped). Any other decoder is asked token by token, behind an anchor token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tokenizers import Tokenizer as Backend


class LeadingSpace(Enum):
    """What a decoder drops from the first token of a text."""

    KEEP = "nothing"
    SPACE = "one leading space"
    SPACES = "every space in the token"

    def hidden(self, piece: bytes) -> bytes:
        """Return one byte per byte of `piece`: 0 where a first token's byte is dropped, else 1."""
        if self is LeadingSpace.SPACES:
            return bytes(byte != 0x20 for byte in piece)
        if self is LeadingSpace.SPACE and piece.startswith(b" "):
            return b"\x00" + b"\x01" * (len(piece) - 1)
        return b"\x01" * len(piece)


@dataclass(frozen=True, slots=True)
class TokenByteTable:
    """`of[id]` is the token's bytes (empty for ids the tokenizer lacks); `lead` applies to a text's first token."""

    of: tuple[bytes, ...]
    lead: LeadingSpace


def pieces_of(backend: Backend) -> TokenByteTable:
    """Compute the pieces of a whole vocabulary."""
    vocab = backend.get_vocab(with_added_tokens=True)
    by_id = [""] * (max(vocab.values(), default=-1) + 1)
    for token, index in vocab.items():
        by_id[index] = token
    steps = _steps(backend)
    if all(_is_known(step) for step in steps) and steps:
        return TokenByteTable(tuple(_apply(steps, token) for token in by_id), _lead(steps))
    return _asked(backend, by_id)


def _steps(backend: Backend) -> list[dict[str, Any]]:
    """Return the decoder's steps as the library itself serialises them."""
    if backend.decoder is None:
        return []
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return _flat(state)


def _flat(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for inner in state["decoders"] for step in _flat(inner)]


def _is_known(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "ByteLevel" | "ByteFallback" | "Fuse" | "Metaspace":
            return True
        case "Replace":
            return "String" in step["pattern"]
        case "Strip":
            return bool(step["content"] == " " and step["start"] <= 1 and step["stop"] == 0)
        case _:
            return False


def _lead(steps: list[dict[str, Any]]) -> LeadingSpace:
    for step in steps:
        if step["type"] == "Metaspace" and step["prepend_scheme"] != "never":
            return LeadingSpace.SPACES
        if step["type"] == "Strip" and step["start"] == 1:
            return LeadingSpace.SPACE
    return LeadingSpace.KEEP


def _apply(steps: list[dict[str, Any]], token: str) -> bytes:
    text = token
    for step in steps:
        match step["type"]:
            case "ByteLevel":
                return _unmapped(text)
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
    """Map GPT-2's printable stand-in for each byte back to the byte: printable Latin-1 stands for itself, the others
    for U+0100, U+0101, ... in order. Code points below 256 that stand for nothing map outside Latin-1."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    outside = dict.fromkeys(others, 65535)
    return outside | {byte: byte for byte in plain} | {0x100 + place: byte for place, byte in enumerate(others)}


_BYTES = _byte_map()


def _unmapped(text: str) -> bytes:
    """Undo the byte map; text with any character outside it stands for itself (added tokens)."""
    try:
        return text.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _asked(backend: Backend, by_id: list[str]) -> TokenByteTable:
    """Ask an unknown decoder for what each token adds behind an anchor."""
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
