"""One candidate of a reply: its tokens and its visible text."""

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
    """Accumulates one candidate.

    An ending token (EOS or a stop id) is part of the ids and not of the text. A candidate that continues a stored reply
    begins with that reply's ids and text (`prefix`), which end the prompt; a character whose bytes are incomplete at
    the end of the prefix becomes text of this candidate.
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
        num_partial = prefix.num_partial_tokens if prefix is not None else 0
        self._partial_ids = request.prompt[len(request.prompt) - num_partial :]
        self.prompt = request.prompt[: len(request.prompt) - len(self._prefix_ids)]
        self._parser = context.new_parser(self.prompt)
        self._reasoning_finished = False
        self._ids: list[int] = []
        self._keeps_stop = params.include_stop_str_in_output
        eos = () if params.ignore_eos else tokenizer.eos_token_ids
        self._terminal = frozenset((*eos, *params.stop_token_ids))
        self._skip_special_tokens = params.skip_special_tokens
        self._tail = request.prompt[: len(request.prompt) - num_partial][-TAIL_TOKENS:]
        self._stream = self._text_stream(params.stop, params.min_tokens + num_partial)
        self._pending = self._parser.push(self._prefix_text + self._stream.push(self._partial_ids))

    @property
    def num_tokens(self) -> int:
        """The number of tokens received."""
        return len(self._ids)

    @property
    def raw(self) -> str:
        """The whole output of the model, without special tokens that carry no meaning."""
        return self._prefix_text + self._stream.text

    @property
    def reply_key(self) -> str:
        """The text by which this reply is recognised when a client sends it back."""
        return reply_key(self._text, self._parser.calls)

    @property
    def _text(self) -> str:
        return self._parser.text if self._context.is_parsed else self.raw

    @property
    def stored_ids(self) -> tuple[int, ...]:
        """The ids that stand for exactly `raw`.

        Without the ending token and without text after a stop string.
        """
        ids = self._ids[:-1] if self._ended_by_token else self._ids
        if self._stream.stopped is None or self._keeps_stop:
            return (*self._prefix_ids, *ids)
        visible = self._stream.text
        kept, text = len(ids), self._decode(ids)
        while kept and not visible.startswith(text):
            kept -= 1
            text = self._decode(ids[:kept])
        rest = self._tokenizer.encode_after(self._prefix_text + text, visible[len(text) :])
        return (*self._prefix_ids, *ids[:kept], *rest)

    def fork_ids(self, num_tokens: int | None, fork_with: int | None = None) -> tuple[int, ...]:
        """Return the stored ids so far, or the first `num_tokens` of them, followed by `fork_with`.

        Raises: InvalidRequestError naming `fork_at` or `fork_with`.
        """
        ids = self.stored_ids
        if num_tokens is not None:
            check_fork_at(num_tokens, len(ids))
        return fork_token_ids(self._context, ids[:num_tokens], fork_with)

    def make_prefix(self, turn: Turn, ids: tuple[int, ...], *, is_exact: bool = False) -> ReplyPrefix:
        """Return the prefix of a fork after `ids`. Slow for long ones: run it on a thread."""
        call_ids = [call.call_id for call in self._parser.calls]
        skips = self._skip_special_tokens
        return build_prefix(self._context, turn, self.index, self.prompt, ids, call_ids, skips=skips, is_exact=is_exact)

    @property
    def _ended_by_token(self) -> bool:
        return bool(self._ids) and self._ids[-1] in self._terminal and not self._keeps_stop

    def push(self, event: Tokens) -> ReplyDelta | None:
        """Add new tokens.

        Return None if there is nothing to emit: after the end, or for the ending token alone.
        """
        if self._stream.stopped is not None:
            return None
        self._ids += event.token_ids
        num_visible = len(event.token_ids) - self._ended_by_token
        ids, logprobs = event.token_ids[:num_visible], event.logprobs[:num_visible]
        if not self._context.is_parsed:
            text = self._stream.push(event.token_ids)
            if self._pending:
                text, self._pending = self._pending.text + text, ParsedDelta()
            return ReplyDelta(self.index, text, ids, logprobs) if num_visible or text else None
        delta = self._parse(event.token_ids)
        if not num_visible and not delta:
            return None
        delta, self._pending = self._pending.merge(delta), ParsedDelta()
        return ReplyDelta(self.index, delta.text, ids, logprobs, delta.reasoning, delta.calls)

    def finish(self, event: CandidateDone | None) -> tuple[ReplyDelta | ReplyDone, ...]:
        """End the candidate and emit held-back text. `event` is None when the request was cancelled."""
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
        """Parse token by token, to count the tokens of reasoning."""
        if self._reasoning_finished and len(token_ids) == 1:
            return self._parser.push(self._stream.push(token_ids))
        delta = ParsedDelta()
        for number, token in enumerate(token_ids, len(self._ids) - len(token_ids) + 1):
            was_reasoning = self._parser.is_thinking
            delta = delta.merge(self._parser.push(self._stream.push((token,))))
            if was_reasoning or self._parser.is_thinking:
                self.num_reasoning_tokens = number
        self._reasoning_finished = self._parser.reasoning_finished
        return delta

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
