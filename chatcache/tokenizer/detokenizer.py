"""Incremental detokenization: token ids to text deltas.

Text that was returned is never withdrawn.

         token bytes    held: may be the start of a stop string or an incomplete character
ids -> [ ............. | ...... ] -> visible bytes -> incremental UTF-8 decoder -> delta
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chatcache.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Converts the tokens of one candidate to text while they are generated.

    The deltas joined equal `tokenizer.decode` of all ids, cut at the stop.

    `stop` strings are matched on the bytes of all tokens, hidden special tokens included, exactly as in the engine;
    with `include_stop` the stop string (or stop token) stays in the text. Stop strings are ignored within the first
    `min_tokens` tokens. `stop_token_ids` (default: the tokenizer's EOS ids) end a candidate and are hidden.
    `prompt_ids_tail`: the last prompt ids; if they have text, the leading space of the first word is kept.
    `visible_ids`: special tokens that stay in the text because a later parser needs them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_ids_tail: Sequence[int] = (),
        *,
        stop_token_ids: Collection[int] | None = None,
        min_tokens: int = 0,
        visible_ids: Collection[int] = (),
    ) -> None:
        self._pieces = tokenizer.token_bytes
        self._lead = tokenizer.leading_space
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._stops = tuple((text, text.encode()) for text in stop)
        self._firsts = frozenset(needle[0] for _, needle in self._stops)
        self._terminal = frozenset(tokenizer.eos_token_ids if stop_token_ids is None else stop_token_ids)
        hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._hidden = hidden.difference(visible_ids) if visible_ids else hidden
        self._at_start = all(not self._piece(token) or token in self._hidden for token in prompt_ids_tail)
        self._held = b""  # bytes that could begin a stop string
        self._shown = b""  # one byte per held byte: 1 visible, 0 hidden
        self._unusual = self._hidden | self._terminal
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_incomplete_char = False  # the decoder holds the first bytes of a character
        self._num_tokens = 0
        self._parts: list[str] = []
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that was found; tokens pushed after it are ignored."""
        return self._stopped

    @property
    def has_incomplete_char(self) -> bool:
        """True if the last token ended within a UTF-8 character.

        Only maintained without stop strings.
        """
        return self._has_incomplete_char

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._parts)

    @property
    def held_text(self) -> str:
        """The text that `finish` would return now."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.setstate(self._decoder.getstate())
        return decoder.decode(_visible_bytes(self._held, self._shown), True)

    def push(self, token_ids: Iterable[int]) -> str:
        """Append tokens; return the text that is now final."""
        return self._record("".join([self._decode_token(token) for token in token_ids]))

    def finish(self) -> str:
        """End the text: return the held bytes as text; an incomplete character becomes U+FFFD."""
        held, shown, self._held, self._shown = self._held, self._shown, b"", b""
        return self._record(self._decoder.decode(_visible_bytes(held, shown), True))

    def _decode_token(self, token: int) -> str:
        if self._stopped is not None:
            return ""
        self._num_tokens += 1
        piece = self._piece(token)
        if (
            not self._stops
            and not self._at_start
            and not self._has_incomplete_char
            and token not in self._unusual
            and piece.isascii()
        ):
            return piece.decode("ascii")  # fast path for most tokens: about 10 times faster
        shown = self._visibility(token, piece)
        if not self._stops:
            text = self._decoder.decode(_visible_bytes(piece, shown))
            self._has_incomplete_char = bool(self._decoder.getstate()[0])
            return text
        if token in self._terminal:  # ends the candidate itself, so its bytes cannot complete a stop string
            held, self._held, self._shown = _visible_bytes(self._held, self._shown), b"", b""
            return self._decoder.decode(held + _visible_bytes(piece, shown))
        num_old = len(self._held)
        self._held += piece
        self._shown += shown
        match = self._find_stop(num_old) if self._num_tokens >= self._min_tokens else None
        if match is not None:
            start, end, self._stopped = match
            return self._release(end if self._include_stop else start, last=True)
        return self._release(self._first_possible_stop())

    def _piece(self, token: int) -> bytes:
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def _visibility(self, token: int, piece: bytes) -> bytes:
        if token in self._hidden or (token in self._terminal and not self._include_stop):
            return bytes(len(piece))
        if self._at_start and piece:
            self._at_start = False
            return self._lead.hidden(piece)
        return b"\x01" * len(piece)

    def _find_stop(self, num_old: int) -> tuple[int, int, str] | None:
        """Return (start, end, stop) of the stop string that ends first in the new bytes, or None.

        Of several that end at the same byte it is the longest. `num_old`: number of held bytes that were searched
        before.
        """
        best: tuple[int, int, str] | None = None
        for stop, needle in self._stops:
            start = self._held.find(needle, max(0, num_old - len(needle) + 1))
            if start >= 0 and (best is None or (start + len(needle), start) < (best[1], best[0])):
                best = (start, start + len(needle), stop)
        return best

    def _first_possible_stop(self) -> int:
        """Return the offset of the first held byte that may start a stop string.

        If there is none, this is the number of held bytes.
        """
        for start, byte in enumerate(self._held):
            if byte not in self._firsts:
                continue
            rest = self._held[start:]
            if any(len(rest) < len(needle) and needle.startswith(rest) for _, needle in self._stops):
                return start
        return len(self._held)

    def _release(self, num_bytes: int, *, last: bool = False) -> str:
        """Decode the first `num_bytes` held bytes; hold the rest, or drop it if `last`."""
        ready = _visible_bytes(self._held[:num_bytes], self._shown[:num_bytes])
        self._held, self._shown = (b"", b"") if last else (self._held[num_bytes:], self._shown[num_bytes:])
        return self._decoder.decode(ready, last)

    def _record(self, delta: str) -> str:
        if delta:
            self._parts.append(delta)
        return delta


def _visible_bytes(piece: bytes, shown: bytes) -> bytes:
    if 0 not in shown:
        return piece
    return bytes(byte for byte, show in zip(piece, shown, strict=True) if show)
