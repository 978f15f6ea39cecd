"""One candidate of a reply: its tokens as they arrive, its text as it may be shown."""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.conversations.fork_points import ReplyPrefix, build_prefix, check_fork_at, fork_token_ids
from chatcache.conversations.prompt import reply_key
from chatcache.conversations.replies.events import ReplyDelta, ReplyDone
from chatcache.conversations.replies.parser import TAIL_TOKENS, ParsedDelta, ReplyContext
from chatcache.conversations.tree import Turn
from chatcache.tokenizer.detokenizer import IncrementalDetokenizer
from chatcache.types.events import FINISH_CANCELLED, CandidateDone, Tokens
from chatcache.types.request import GenerateRequest


class Candidate:
    """Accumulates one candidate. The token that ends it (EOS or a stop id) stays in the ids and out of the text.

    A candidate that goes on with a reply begins with that one's ids and text (`prefix`), which end the prompt; the
    character in its middle, if it ends in one, is text of this candidate.
    """

    def __init__(
        self, index: int, context: ReplyContext, request: GenerateRequest, prefix: ReplyPrefix | None = None
    ) -> None:
        params = request.params
        self.index = index
        self.done = False
        self.dropped = False
        self.num_reasoning_tokens = 0
        self._context = context
        self._tokenizer = tokenizer = context.tokenizer
        self._prefix_ids, self._prefix_text = (prefix.ids, prefix.text) if prefix is not None else ((), "")
        num_open = prefix.num_partial_tokens if prefix is not None else 0
        self._partial_ids = request.prompt[len(request.prompt) - num_open :]
        self.prompt = request.prompt[: len(request.prompt) - len(self._prefix_ids)]
        self._parser = context.new_parser(self.prompt)
        self._reasoning_finished = False
        self._ids: list[int] = []
        self._keeps_stop = params.include_stop_str_in_output
        eos = () if params.ignore_eos else tokenizer.eos_token_ids
        self._terminal = frozenset((*eos, *params.stop_token_ids))
        self._skip_special_tokens = params.skip_special_tokens
        self._tail = request.prompt[: len(request.prompt) - num_open][-TAIL_TOKENS:]
        self._stream = self._text_stream(params.stop, params.min_tokens + num_open)
        self._pending = self._parser.push(self._prefix_text + self._stream.push(self._partial_ids))

    @property
    def num_tokens(self) -> int:
        """How many have come."""
        return len(self._ids)

    @property
    def raw(self) -> str:
        """All that the model wrote, but for special tokens that mean nothing."""
        return self._prefix_text + self._stream.text

    @property
    def reply_key(self) -> str:
        """What names this reply when a client sends it back."""
        return reply_key(self._text, self._parser.calls)

    @property
    def _text(self) -> str:
        return self._parser.text if self._context.is_parsed else self.raw

    @property
    def stored_ids(self) -> tuple[int, ...]:
        """Ids that stand for exactly `raw`: without the ending token, and without what lies behind a stop string."""
        ids = self._ids[:-1] if self._ended_by_token else self._ids
        if self._stream.stopped is None or self._keeps_stop:
            return (*self._prefix_ids, *ids)
        shown = self._stream.text
        kept, text = len(ids), self._decode(ids)
        while kept and not shown.startswith(text):
            kept -= 1
            text = self._decode(ids[:kept])
        rest = self._tokenizer.encode_after(self._prefix_text + text, shown[len(text) :])
        return (*self._prefix_ids, *ids[:kept], *rest)

    def fork_ids(self, num_tokens: int | None, fork_with: int | None = None) -> tuple[int, ...]:
        """The settled ids so far, or the first `num_tokens` of them, and a token that goes on instead.

        Raises: InvalidRequestError naming `fork_at` or `fork_with`.
        """
        ids = self.stored_ids
        if num_tokens is not None:
            check_fork_at(num_tokens, len(ids))
        return fork_token_ids(self._context, ids[:num_tokens], fork_with)

    def make_prefix(self, turn: Turn, ids: tuple[int, ...], *, is_exact: bool = False) -> ReplyPrefix:
        """What a fork behind `ids` begins with. Long ones take a while: for a thread beside the event loop."""
        call_ids = [call.call_id for call in self._parser.calls]
        skips = self._skip_special_tokens
        return build_prefix(self._context, turn, self.index, self.prompt, ids, call_ids, skips=skips, is_exact=is_exact)

    @property
    def _ended_by_token(self) -> bool:
        return bool(self._ids) and self._ids[-1] in self._terminal and not self._keeps_stop

    def push(self, event: Tokens) -> ReplyDelta | None:
        """Take new tokens. None: nothing to tell (the text already ended, or only the ending token came)."""
        if self._stream.stopped is not None:
            return None
        self._ids += event.token_ids
        shown = len(event.token_ids) - self._ended_by_token
        ids, logprobs = event.token_ids[:shown], event.logprobs[:shown]
        if not self._context.is_parsed:
            text = self._stream.push(event.token_ids)
            if self._pending:
                text, self._pending = self._pending.text + text, ParsedDelta()
            return ReplyDelta(self.index, text, ids, logprobs) if shown or text else None
        heard = self._parse(event.token_ids)
        if not shown and not heard:
            return None
        heard, self._pending = self._pending.merge(heard), ParsedDelta()
        return ReplyDelta(self.index, heard.text, ids, logprobs, heard.reasoning, heard.calls)

    def finish(self, event: CandidateDone | None) -> tuple[ReplyDelta | ReplyDone, ...]:
        """End it; what was held back comes out first. None: the request was cancelled under it."""
        self.done = True
        self.dropped = event is not None and event.finish_reason == FINISH_CANCELLED
        rest = self._pending.merge(self._parser.push(self._stream.finish()).merge(self._parser.finish()))
        self._pending = ParsedDelta()
        done = ReplyDone(
            index=self.index,
            text=self._text,
            finish_reason=event.finish_reason if event is not None else FINISH_CANCELLED,
            stop_reason=event.stop_reason if event is not None else None,
            token_ids=(*self._prefix_ids, *self._ids),
            stored_ids=self.stored_ids,
            score=event.score if event is not None else 0.0,
            parts=self._parser.parts(self.raw),
            num_pages_freed=event.num_pages_freed if event is not None and self.dropped else None,
        )
        if not rest:
            return (done,)
        return ReplyDelta(self.index, rest.text, (), (), rest.reasoning, rest.calls), done

    def _parse(self, token_ids: Sequence[int]) -> ParsedDelta:
        """Read token by token: which of them are thought is counted."""
        if self._reasoning_finished and len(token_ids) == 1:
            return self._parser.push(self._stream.push(token_ids))
        heard = ParsedDelta()
        for number, token in enumerate(token_ids, len(self._ids) - len(token_ids) + 1):
            thought = self._parser.is_thinking
            heard = heard.merge(self._parser.push(self._stream.push((token,))))
            if thought or self._parser.is_thinking:
                self.num_reasoning_tokens = number
        self._reasoning_finished = self._parser.reasoning_finished
        return heard

    def _decode(self, ids: Sequence[int]) -> str:
        stream = self._text_stream((), 0)
        return stream.push((*self._partial_ids, *ids)) + stream.finish()

    def _text_stream(self, stop: Sequence[str], min_tokens: int) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            self._tokenizer,
            stop=stop,
            include_stop=self._keeps_stop,
            skip_special_tokens=self._skip_special_tokens,
            prompt_ids_tail=self._tail,
            stop_token_ids=self._terminal,
            min_tokens=min_tokens,
            visible_ids=self._context.mark_ids,
        )
