"""Log-probabilities in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.text.tokenizer import Tokenizer
from chatcache.types import TokenLogprob

# JSON has no infinity; clients use this floor for "impossible".
FLOOR = -9999.0


def chat_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[object]:
    """The `content` list: one entry per token; `bytes` join to the text even where a token is half a character."""
    return [
        {**_token(tokenizer, token, entry.logprob), "top_logprobs": [_token(tokenizer, *top) for top in entry.top]}
        for token, entry in zip(ids, logprobs, strict=True)
    ]


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, object]:
    data = _bytes(tokenizer, token)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, FLOOR), "bytes": list(data)}


def _bytes(tokenizer: Tokenizer, token: int) -> bytes:
    return tokenizer.token_bytes[token] if 0 <= token < len(tokenizer.token_bytes) else b""


class CompletionLogprobs:
    """The older shape of /v1/completions: parallel lists, offsets into the text so far."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset

    def take(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, list[object]]:
        """The lists for these tokens; the next call continues behind them."""
        out: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip(ids, logprobs, strict=True):
            text = _bytes(self._tokenizer, token).decode("utf-8", "replace")
            top = {_bytes(self._tokenizer, t).decode("utf-8", "replace"): max(p, FLOOR) for t, p in entry.top}
            out["tokens"].append(text)
            out["token_logprobs"].append(max(entry.logprob, FLOOR))
            out["top_logprobs"].append(top)
            out["text_offset"].append(self._offset)
            self._offset += len(text)
        return out


def joined(parts: Sequence[dict[str, list[object]]]) -> dict[str, list[object]]:
    """Several takes as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [entry for part in parts for entry in part[name]] for name in names}
