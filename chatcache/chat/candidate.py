"""One candidate of a reply: its tokens as they arrive, its text as it may be shown."""

from __future__ import annotations

from chatcache.chat.events import ReplyDelta, ReplyDone
from chatcache.text import TextStream, Tokenizer
from chatcache.types import FINISH_CANCELLED, CandidateDone, Params, Tokens


class Candidate:
    """Accumulates one candidate. The token that ends it (EOS or a stop id) stays in the ids and out of the text."""

    def __init__(self, index: int, tokenizer: Tokenizer, params: Params) -> None:
        self.index = index
        self.done = False
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._stop_ids = _hidden_stop_ids(tokenizer, params)
        self._keep_stop_string = params.include_stop_str_in_output
        self._stream = TextStream(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def settled_ids(self) -> tuple[int, ...]:
        """Ids that stand for exactly `text`: without the ending token, and without what lies behind a stop string."""
        ids = self._ids[:-1] if self._ids and self._ids[-1] in self._stop_ids else self._ids
        if self._stream.stopped is None or self._keep_stop_string:
            return tuple(ids)
        kept = len(ids)
        while kept and not self.text.startswith(self._tokenizer.decode(ids[:kept])):
            kept -= 1
        tail = self.text[len(self._tokenizer.decode(ids[:kept])) :]
        return (*ids[:kept], *self._tokenizer.encode(tail))

    def push(self, event: Tokens) -> ReplyDelta | None:
        """Take new tokens. None: nothing to tell (the text already ended, or only the ending token came)."""
        self._ids += event.token_ids
        shown, logprobs = event.token_ids, event.logprobs
        if shown and shown[-1] in self._stop_ids:
            shown, logprobs = shown[:-1], logprobs[:-1]
        if not shown or self._stream.stopped is not None:
            return None
        return ReplyDelta(self.index, self._stream.push(shown), shown, logprobs)

    def finish(self, event: CandidateDone | None) -> tuple[ReplyDelta | ReplyDone, ...]:
        """End it; what was held back comes out first. None: the request was cancelled under it."""
        self.done = True
        rest = self._stream.finish()
        done = ReplyDone(
            index=self.index,
            text=self._stream.text,
            finish_reason=event.finish_reason if event is not None else FINISH_CANCELLED,
            stop_reason=event.stop_reason if event is not None else None,
            token_ids=tuple(self._ids),
            settled_ids=self.settled_ids,
            score=event.score if event is not None else 0.0,
        )
        return (ReplyDelta(self.index, rest, ()), done) if rest else (done,)


def _hidden_stop_ids(tokenizer: Tokenizer, params: Params) -> frozenset[int]:
    if params.include_stop_str_in_output:
        return frozenset()
    eos = () if params.ignore_eos else tokenizer.eos_token_ids
    return frozenset((*eos, *params.stop_token_ids))
