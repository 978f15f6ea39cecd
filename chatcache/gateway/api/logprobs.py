"""Log-probabilities in the shapes of OpenAI and vLLM."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

from chatcache.gateway.json_codec import encode, preencoded
from chatcache.gateway.schemas import completions as schemas
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.events import TokenLogprob

# JSON has no infinity; OpenAI uses this value for probability 0.
MIN_LOGPROB = -9999.0
_CHUNK_BYTES = 16 * 1024


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


class EncodedLogprobs:
    """A growing list of `chat_logprobs` entries, kept as JSON to save memory.

    The JSON has a tenth of the size of the objects. All but its end is compressed, to another tenth.
    """

    def __init__(self) -> None:
        self._chunks: list[bytes] = []  # compressed, each of `_CHUNK_BYTES`
        self._num_chunk_bytes = 0  # of memory
        self._tail = bytearray()

    def __len__(self) -> int:
        """Size of the JSON in bytes."""
        return len(self._chunks) * _CHUNK_BYTES + len(self._tail)

    @property
    def num_bytes(self) -> int:
        """Approximate memory use."""
        return self._num_chunk_bytes + len(self._tail)

    def extend(self, entries: bytes) -> tuple[int, int]:
        """Add entries as `encoded_logprobs` returns them; return where they begin and end."""
        if len(self) and entries:
            self._tail += b","
        start = len(self)
        self.append_json(entries)
        return start, len(self)

    def append_json(self, data: bytes) -> None:
        """Append a part of the JSON of another list, as `read` returns it."""
        self._tail += data
        while len(self._tail) >= 2 * _CHUNK_BYTES:  # readers that keep up never decompress
            self._chunks.append(zlib.compress(self._tail[:_CHUNK_BYTES], 1))
            del self._tail[:_CHUNK_BYTES]
            self._num_chunk_bytes += len(self._chunks[-1])

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the entries between two positions, in pieces of at most two chunks; more may be added meanwhile."""
        first, tail_start = start // _CHUNK_BYTES, len(self._chunks) * _CHUNK_BYTES
        tail = bytes(self._tail[max(0, start - tail_start) : max(0, end - tail_start)])
        for at, chunk in enumerate(self._chunks[first : -(-end // _CHUNK_BYTES)], first):
            chunk_start = at * _CHUNK_BYTES
            yield zlib.decompress(chunk)[max(0, start - chunk_start) : end - chunk_start]
        yield tail


def encoded_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> bytes:
    """Encode the entries of `chat_logprobs`, without the brackets around them.

    An entry can have twenty alternatives and a step hundreds of entries, so the parts of each token are encoded once.
    """
    table, numbers = tokenizer.token_bytes, iter(_numbers(logprobs))
    size = len(table)
    entries: list[bytes] = []
    for token, entry in zip(ids, logprobs, strict=True):
        head, tail = _token_parts(table[token] if 0 <= token < size else b"")
        number = next(numbers)
        top: list[bytes] = []
        for other, _ in entry.top:
            top_head, top_tail = _token_parts(table[other] if 0 <= other < size else b"")
            top.append(b"%b%b%b}" % (top_head, next(numbers), top_tail))
        entries.append(b'%b%b%b,"top_logprobs":[%b]}' % (head, number, tail, b",".join(top)))
    return b",".join(entries)


def _numbers(logprobs: Sequence[TokenLogprob]) -> list[bytes]:
    """Encode the log-probability of each entry, followed by those of its alternatives."""
    values = [
        max(value, MIN_LOGPROB) for entry in logprobs for value in (entry.logprob, *(top[1] for top in entry.top))
    ]
    return encode(values)[1:-1].split(b",") if values else []


@lru_cache(maxsize=2**16)
def _token_parts(data: bytes) -> tuple[bytes, bytes]:
    """Encode what comes before and after the log-probability of a token with these bytes."""
    return b'{"token":%b,"logprob":' % encode(data.decode("utf-8", "replace")), b',"bytes":%b' % encode(list(data))


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
    """Builds the parallel lists of one choice of /v1/completions, with offsets into its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def build(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> schemas.CompletionLogprobs:
        """Build the lists for the next tokens. The first token of a prompt has None in `logprobs`."""
        built = schemas.CompletionLogprobs([], [], [], [])
        for token, entry in zip(ids, logprobs, strict=True):
            text = token_text(self._tokenizer, token)
            built.tokens.append(text)
            built.token_logprobs.append(None if entry is None else max(entry.logprob, MIN_LOGPROB))
            built.top_logprobs.append(None if entry is None else self._top(entry))
            built.text_offset.append(self._offset)
            self._offset += len(text)
        return built

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        return {token_text(self._tokenizer, token): max(logprob, MIN_LOGPROB) for token, logprob in entry.top}
