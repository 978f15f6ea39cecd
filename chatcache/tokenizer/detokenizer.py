"""Tokens to text, as they come: what is returned once is never taken back.

             token bytes           held back while they could begin a stop string, or a character
ids  ->  [ ............... | ...... ]  ->  visible bytes  ->  incremental UTF-8  ->  delta
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chatcache.tokenizer.tokenizer import Tokenizer


class TextStream:
    """Detokenize one candidate incrementally. The deltas joined equal `tokenizer.decode` of all ids, cut at the stop.

    `stop` strings are matched on the bytes of all tokens, hidden special tokens included, exactly as the engine does;
    with `include_stop` the stop string (or stop token) stays in the text. `stop_token_ids` (default: the tokenizer's
    EOS ids) end a candidate and are hidden. `prompt_ids_tail`, the last prompt ids, tell that the text continues
    another, so that the space of a first word is kept. Before `min_tokens` tokens no stop string counts. `visible_ids`:
    special tokens that are not skipped, since somebody else looks for them.
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
        self._lead = tokenizer.lead
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
        self._torn = False  # without stop strings: the decoder holds the beginning of a character
        self._num_tokens = 0
        self._parts: list[str] = []
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that was found; nothing pushed after it counts."""
        return self._stopped

    @property
    def is_torn(self) -> bool:
        """Whether a character has begun and is not complete. Only without stop strings."""
        return self._torn

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._parts)

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens; return the text that is now certain."""
        return self._keep("".join([self._next(token) for token in token_ids]))

    def finish(self) -> str:
        """Return what was held back; a character left incomplete becomes U+FFFD."""
        held, shown, self._held, self._shown = self._held, self._shown, b"", b""
        return self._keep(self._decoder.decode(_visible(held, shown), True))

    def _next(self, token: int) -> str:
        if self._stopped is not None:
            return ""
        self._num_tokens += 1
        piece = self._piece(token)
        if not self._stops and not self._at_start and not self._torn and token not in self._unusual and piece.isascii():
            return piece.decode("ascii")  # most tokens, in a tenth of the time
        shown = self._visibility(token, piece)
        if not self._stops:
            text = self._decoder.decode(_visible(piece, shown))
            self._torn = bool(self._decoder.getstate()[0])
            return text
        if token in self._terminal:  # ends the candidate by itself, so its bytes complete no stop string
            held, self._held, self._shown = _visible(self._held, self._shown), b"", b""
            return self._decoder.decode(held + _visible(piece, shown))
        num_old = len(self._held)
        self._held += piece
        self._shown += shown
        match = self._match(num_old) if self._num_tokens >= self._min_tokens else None
        if match is not None:
            start, end, self._stopped = match
            return self._release(end if self._include_stop else start, last=True)
        return self._release(self._open_from())

    def _piece(self, token: int) -> bytes:
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def _visibility(self, token: int, piece: bytes) -> bytes:
        if token in self._hidden or (token in self._terminal and not self._include_stop):
            return bytes(len(piece))
        if self._at_start and piece:
            self._at_start = False
            return self._lead.hidden(piece)
        return b"\x01" * len(piece)

    def _match(self, num_old: int) -> tuple[int, int, str] | None:
        """Find (start, end, stop) of the stop string that ends first among the new bytes; the longest such."""
        best: tuple[int, int, str] | None = None
        for stop, needle in self._stops:
            start = self._held.find(needle, max(0, num_old - len(needle) + 1))
            if start >= 0 and (best is None or (start + len(needle), start) < (best[1], best[0])):
                best = (start, start + len(needle), stop)
        return best

    def _open_from(self) -> int:
        """Return where the first still possible stop string begins in the held bytes (their length if none does)."""
        for start, byte in enumerate(self._held):
            if byte not in self._firsts:
                continue
            rest = self._held[start:]
            if any(len(rest) < len(needle) and needle.startswith(rest) for _, needle in self._stops):
                return start
        return len(self._held)

    def _release(self, num_bytes: int, *, last: bool = False) -> str:
        """Decode the first `num_bytes` held bytes and keep the rest held, or drop it if these are the `last`."""
        ready = _visible(self._held[:num_bytes], self._shown[:num_bytes])
        self._held, self._shown = (b"", b"") if last else (self._held[num_bytes:], self._shown[num_bytes:])
        return self._decoder.decode(ready, last)

    def _keep(self, delta: str) -> str:
        if delta:
            self._parts.append(delta)
        return delta


def _visible(piece: bytes, shown: bytes) -> bytes:
    if 0 not in shown:
        return piece
    return bytes(byte for byte, show in zip(piece, shown, strict=True) if show)
