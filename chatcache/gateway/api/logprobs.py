"""Log-probabilities in the shapes of OpenAI and vLLM."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import numpy as np
from msgspec import Raw

from chatcache.gateway.json_codec import encode, preencoded
from chatcache.gateway.json_pieces import NO_TURNS, PIECE_BYTES, Turns
from chatcache.gateway.schemas import completions as schemas
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.events import TokenLogprob

# JSON has no infinity; OpenAI uses this value for probability 0.
MIN_LOGPROB = -9999.0
_PIECE_ENTRIES = 8
_JSON_BYTES = 72  # of a token and its log-probability, on average

ScoredToken = tuple[int, TokenLogprob]
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


def chat_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> list[schemas.TokenLogprob]:
    """Build the `content` list of OpenAI's `logprobs` object, one entry for each token.

    The `bytes` of all entries joined are the text, even where a token is only part of a character.
    """
    return [
        schemas.TokenLogprob(
            *_token(tokenizer, token, entry.logprob),
            top_logprobs=[schemas.TopLogprob(*_token(tokenizer, *top)) for top in entry.top],
        )
        for token, entry in zip(ids, logprobs, strict=True)
    ]


def encoded_chat_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> list[schemas.TokenLogprob]:
    """Encode what `chat_logprobs` builds, without building it."""
    packed = PackedLogprobs(tokenizer.token_bytes)
    packed.extend(zip(ids, logprobs, strict=True))
    return packed.encoded()


class LogprobCopy(NamedTuple):
    """Entries of a `PackedLogprobs`; `sizes`: how many of the ids and values belong to each."""

    ids: list[int]
    values: list[float]
    sizes: list[int]


class PackedLogprobs:
    """A growing list of tokens and log-probabilities, encoded as `chat_logprobs` entries when it is read.

    The JSON has six times the size, and most of it is read once or never.

        ids      token, its alternatives, token, its alternatives, ...
        values   the log-probability of each
        ends     where each token and its alternatives end in the others
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._ids, self._values, self._ends = array("i"), array("d"), array("I")

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._ends)

    @property
    def num_bytes(self) -> int:
        """Approximate memory use."""
        return sum(len(each) * each.itemsize for each in (self._ids, self._values, self._ends))

    def extend(self, scored: Iterable[ScoredToken]) -> None:
        """Add entries."""
        for token, entry in scored:
            self._ids.append(token)
            self._values.append(entry.logprob)
            for other, value in entry.top:
                self._ids.append(other)
                self._values.append(value)
            self._ends.append(len(self._ids))

    def copy(self, start: int, end: int) -> LogprobCopy:
        """Return entries for `append_copy` of another list."""
        bounds = self._bounds(start, end)
        ids, values = self._ids[bounds[0] : bounds[-1]], self._values[bounds[0] : bounds[-1]]
        return LogprobCopy(ids.tolist(), values.tolist(), [last - first for first, last in pairwise(bounds)])

    def append_copy(self, copied: LogprobCopy) -> None:
        """Add entries of another list."""
        self._ends.extend(accumulate(copied.sizes, initial=len(self._ids)))
        self._ends.pop(-1 - len(copied.sizes))  # the initial value
        self._ids.extend(copied.ids)
        self._values.extend(copied.values)

    def num_json_bytes(self, start: int, end: int) -> int:
        """Return about how long the JSON of entries is."""
        return (self._num_values(end) - self._num_values(start)) * _JSON_BYTES

    def scored(self) -> Iterator[ScoredToken]:
        """Yield all entries as they were added."""
        for first, last in pairwise(self._bounds(0, len(self))):
            token, *others = zip(self._ids[first:last], self._values[first:last], strict=True)
            yield token[0], TokenLogprob(token[1], tuple(others))

    def encoded(self, turns: Turns = NO_TURNS) -> list[schemas.TokenLogprob]:
        """Encode all entries, with a pause after each piece. The result is a `Raw`, as that of `preencoded`."""
        data, end = bytearray(b"["), PIECE_BYTES
        for piece in self.read(0, len(self)):
            data += piece
            if len(data) >= end:
                end += PIECE_BYTES
                turns.end_piece()
        data += b"]"
        return cast(list[schemas.TokenLogprob], Raw(bytes(data)))

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the JSON of entries in small pieces, without the brackets around it; more may be added meanwhile."""
        for at in range(start, end, _PIECE_ENTRIES):
            if at > start:
                yield b","
            yield self._encode(self._bounds(at, min(end, at + _PIECE_ENTRIES)))

    def _bounds(self, start: int, end: int) -> list[int]:
        """Return where entries begin in `ids` and `values`, and where the last one ends."""
        return [self._num_values(start), *self._ends[start:end]]

    def _num_values(self, num_entries: int) -> int:
        """Return how many ids and values the first entries have."""
        return self._ends[num_entries - 1] if num_entries else 0

    def _encode(self, bounds: Sequence[int]) -> bytes:
        """Encode entries. An entry can have twenty alternatives, so the parts of each token are encoded once."""
        begin, table = bounds[0], self._token_bytes
        size = len(table)
        ids, values = self._ids[begin : bounds[-1]], self._values[begin : bounds[-1]]
        numbers = encode(np.maximum(values, MIN_LOGPROB).tolist())[1:-1].split(b",")
        parts = [_token_parts(table[token] if 0 <= token < size else b"") for token in ids]
        tokens = [b"%b%b%b" % (head, number, tail) for (head, tail), number in zip(parts, numbers, strict=True)]
        entries: list[bytes] = []
        for first, last in pairwise(bound - begin for bound in bounds):
            entries.append(b'%b,"top_logprobs":[%b]}' % (tokens[first][:-1], b",".join(tokens[first + 1 : last])))
        return b",".join(entries)


@lru_cache(maxsize=2**16)
def _token_parts(data: bytes) -> tuple[bytes, bytes]:
    """Encode what comes before and after the log-probability of a token with these bytes."""
    return b'{"token":%b,"logprob":' % encode(data.decode("utf-8", "replace")), b',"bytes":%b}' % encode(list(data))


def prompt_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], entries: Sequence[TokenLogprob | None]
) -> schemas.PromptLogprobs:
    """Build vLLM's shape: a row for each prompt token, with itself and the top tokens, by id.

    The row of the first token is None. Rows are encoded already. `rank` is None for a token beyond the alternatives.
    """

    def entry(token: int, logprob: float, rank: int | None) -> schemas.PromptToken:
        return schemas.PromptToken(max(logprob, MIN_LOGPROB), rank, token_text(tokenizer, token))

    rows: schemas.PromptLogprobs = []
    for token, scored in zip(ids, entries, strict=True):
        if scored is None:
            rows.append(None)
            continue
        row = {str(other): entry(other, logprob, rank) for rank, (other, logprob) in enumerate(scored.top, start=1)}
        rows.append(preencoded({str(token): row.pop(str(token), entry(token, scored.logprob, None)), **row}))
    return rows


def limit_alternatives(entries: Sequence[TokenLogprob | None], num_top: int) -> list[TokenLogprob | None]:
    """Drop alternatives beyond `num_top`: two fields of a request may ask for different numbers."""
    return [None if entry is None else TokenLogprob(entry.logprob, entry.top[:num_top]) for entry in entries]


def num_alternatives(entries: Sequence[TokenLogprob | None]) -> int:
    """Return how many alternatives each entry has; it is the same number for all."""
    return len(entries[-1].top) if entries and entries[-1] is not None else 0


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Decode a single token, with U+FFFD for an incomplete character."""
    return _bytes(tokenizer, token).decode("utf-8", "replace")


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> tuple[str, float, list[int]]:
    data = _bytes(tokenizer, token)
    return data.decode("utf-8", "replace"), max(logprob, MIN_LOGPROB), list(data)


def _bytes(tokenizer: Tokenizer, token: int) -> bytes:
    return tokenizer.token_bytes[token] if 0 <= token < len(tokenizer.token_bytes) else b""


class CompletionLogprobsBuilder:
    """Builds the parallel lists of one choice of /v1/completions, with offsets into its text.

    `hidden_ids`: generated tokens that are not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, hidden_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._built = schemas.CompletionLogprobs([], [], [], [])
        self._decoder = _utf8_decoder("replace")
        self._offset = 0

    def add_prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], text: str) -> None:
        """Add the prompt, which the choice begins with as `text`. The first token has None in `logprobs`.

        Tokens that the tokenizer has added around the text begin at its ends.
        """
        whole = self._tokenizer.decode(ids, skip_special_tokens=False)
        start = len(whole) - len(text) if whole.endswith(text) else max(0, whole.find(text))
        end, is_first = 0, True
        for token, entry in zip(ids, logprobs, strict=True):
            self._add(token, entry, min(max(0, end - start), len(text)))
            data = _bytes(self._tokenizer, token)
            num_hidden = self._tokenizer.leading_space.hidden(data).count(0) if is_first else 0
            end += len(self._decoder.decode(data)) - num_hidden
            is_first = is_first and not data
        self._decoder.reset()
        self._offset = len(text)

    def build(self, scored: Iterable[ScoredToken]) -> schemas.CompletionLogprobs:
        """Add generated tokens; return the lists for what was added since the last call."""
        for token, entry in scored:
            self._add(token, entry, self._offset)
            if token not in self._hidden_ids:
                self._offset += len(self._decoder.decode(_bytes(self._tokenizer, token)))
        built, self._built = self._built, schemas.CompletionLogprobs([], [], [], [])
        return built

    def _add(self, token: int, entry: TokenLogprob | None, offset: int) -> None:
        self._built.tokens.append(token_text(self._tokenizer, token))
        self._built.token_logprobs.append(None if entry is None else max(entry.logprob, MIN_LOGPROB))
        self._built.top_logprobs.append(None if entry is None else self._top(entry))
        self._built.text_offset.append(offset)

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        return {token_text(self._tokenizer, token): max(logprob, MIN_LOGPROB) for token, logprob in entry.top}
