"""The reply service.

Submits an engine request and yields parsed text events of its candidates.

`Candidate` holds the tokens and the visible text of one candidate of a reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import anyio
import msgspec

from chatcache.conversations.fork_points import ReplyPrefix, build_prefix, check_fork_at, fork_token_ids
from chatcache.conversations.prompt import (
    NO_VARIABLES,
    Function,
    Known,
    Message,
    Prompt,
    PromptLimits,
    SharedSystemPrompts,
    assemble,
    assistant_message,
    link_tool_results,
    recall_key,
    reply_key,
    template_variables,
    tool_calls_of,
)
from chatcache.conversations.replies.events import (
    BeamReader,
    ReplyBatchEnd,
    ReplyDelta,
    ReplyDone,
    ReplyEvent,
    ReplyFinished,
    ReplyStarted,
)
from chatcache.conversations.replies.parser import TAIL_TOKENS, ParsedDelta, ReplyContext
from chatcache.conversations.token_memo import ArgumentMemo, TokenMemo
from chatcache.conversations.tree import ToolCall, Turn
from chatcache.engine.protocols import EngineClient
from chatcache.errors import ChatcacheError, OverloadedError
from chatcache.tokenizer.detokenizer import IncrementalDetokenizer
from chatcache.tokenizer.reply_format import ReplyFormat
from chatcache.tokenizer.thinking import ThinkingControls
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.tokenizer.tool_formats import Functions
from chatcache.types.events import FINISH_CANCELLED, Beams, CandidateDone, Embedding, Failed, Finished, Started, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams, seed_of


class Candidate:
    """Collects the tokens of one candidate and converts them to text while it is generated.

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
        self._parser = context.new_parser(self.prompt, origin=request.request_id, index=index)
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
    def tool_calls(self) -> Sequence[ToolCall]:
        """The calls so far."""
        return self._parser.calls

    @property
    def reply_key(self) -> str:
        """The text by which this reply is recognised when a client sends it back."""
        return reply_key(self._text, self._parser.calls)

    @property
    def _text(self) -> str:
        return self._parser.text if self._context.is_parsed else self.raw

    @property
    def stored_ids(self) -> tuple[int, ...]:
        """The token ids that decode to exactly `raw`.

        They include neither the token that ended the candidate nor text after a stop string.
        """
        ids = self._ids[:-1] if self._ended_by_token else self._ids
        if self._stream.stopped is None:
            return (*self._prefix_ids, *ids)
        visible = self._stream.text
        kept, text = len(ids), self._decode(ids)
        while kept and not visible.startswith(text):
            kept -= 1
            text = self._decode(ids[:kept])
        rest = self._tokenizer.encode_after(self._prefix_text + text, visible[len(text) :])
        return (*self._prefix_ids, *ids[:kept], *rest)

    def fork_ids(self, num_tokens: int | None, fork_with: int | None = None) -> tuple[int, ...]:
        """Return the tokens that a fork of this candidate begins with.

        These are the stored ids so far, or the first `num_tokens` of them, followed by the token `fork_with` if given.
        Raises: InvalidRequestError naming `fork_at` or `fork_with`.
        """
        ids = self.stored_ids
        if num_tokens is not None:
            check_fork_at(num_tokens, len(ids))
        return fork_token_ids(self._context, ids[:num_tokens], fork_with)

    def make_prefix(self, turn: Turn, ids: tuple[int, ...], *, is_exact: bool = False) -> ReplyPrefix:
        """Build the prefix for a fork that continues `ids`, the first tokens of this candidate.

        `is_exact`: see `build_prefix`. Slow for a long prefix: run it on a thread.
        """
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
        end = self._tokenizer.decode(self._ids[-1:], skip_special_tokens=False) if self._ended_by_token else ""
        rest = self._pending.merge(self._parser.push(self._stream.finish()).merge(self._parser.finish(end)))
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

    def snapshot(self) -> ReplyDone:
        """Return the candidate as it would be if the request were cancelled now."""
        held, parser = self._stream.held_text, self._parser
        raw = self.raw + held
        if self._context.is_parsed:
            parser = parser.copy(self._context.immutables)
            parser.push(held)
            parser.finish()
        return ReplyDone(
            index=self.index,
            text=parser.text if self._context.is_parsed else raw,
            finish_reason=FINISH_CANCELLED,
            stop_reason=None,
            token_ids=(),
            stored_ids=self.stored_ids,
            parts=parser.parts(raw),
        )

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


# Rendering and tokenising this much text takes about a millisecond; longer prompts are assembled on a thread.
_NOTHING = Message(role="assistant", content="")
_INLINE_CHARS = 4_000
_CHARS_PER_MESSAGE = 40  # the rendering cost of an empty message, in characters
_INLINE_FUNCTIONS = 2
_ABORT_TIMEOUT_S = 5.0


class ReplyFailedError(ChatcacheError):
    """The engine ended the request in an error; the fields are those of the engine's event."""

    def __init__(self, event: Failed) -> None:
        super().__init__(event.message, param=event.param, code=event.code)
        self.status = event.status
        self.type = "invalid_request_error" if 400 <= event.status < 500 else "server_error"


class EmbeddedPrompt(NamedTuple):
    """The embedding of a prompt, as in `events.Embedding`, and its token counts."""

    values: bytes
    num_prompt_tokens: int
    num_cached_tokens: int


def num_candidates(params: Params) -> int:
    """Return how many candidates a request returns."""
    if isinstance(params, SamplingParams):
        return params.n
    return params.n if params.n is not None else params.beam_width


def is_ranked(params: Params) -> bool:
    """Check whether candidates are returned best first, with a meaningful score."""
    return isinstance(params, BeamSearchParams) or params.distinct or (params.best_of or 0) > params.n


class ChatService:
    """Assembles stateless prompts and submits requests to an engine, in this process or another."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        token_memo: TokenMemo | None = None,
        shared_prompts: SharedSystemPrompts | None = None,
        reply_format: ReplyFormat | None = None,
        limits: PromptLimits | None = None,
        seed: int = 0,
    ) -> None:
        """`seed`: base seed of requests without a seed, whichever engine runs them."""
        self.engine = engine
        self._seed = seed
        self.limits = limits if limits is not None else PromptLimits()
        self.tokenizer = tokenizer
        self.reply_format = reply_format if reply_format is not None else ReplyFormat()
        self.thinking = ThinkingControls(tokenizer, self.reply_format)
        self.token_memo = token_memo if token_memo is not None else TokenMemo()
        self._argument_memo = ArgumentMemo()
        self._shared_prompts = shared_prompts if shared_prompts is not None else SharedSystemPrompts()
        self._live: dict[str, tuple[str, GenerateRequest]] = {}  # by request id, with the owner

    async def prompt(
        self,
        messages: Sequence[Message],
        namespace: str,
        functions: Sequence[Function] = (),
        *,
        continues: bool = False,
        kwargs: Mapping[str, Any] = NO_VARIABLES,
        keeps_reasoning: bool = False,
    ) -> Prompt:
        """Assemble a stateless chat's prompt; replies of this server in it keep their token ids.

        Calls of this server keep the arguments as they were written, if the client sends them in another notation.
        `continues`: the prompt ends with the text of the last message, the beginning of the reply. `kwargs`: variables
        of the chat template. `keeps_reasoning`: replies stay as they were generated, even if the template leaves their
        reasoning out.

        Raises: InvalidRequestError for the result of an unknown call, or messages that the template rejects.
        """
        messages = [self._restore_arguments(each, namespace) for each in link_tool_results(messages, "messages")]
        begun = messages.pop() if continues else None
        variables = template_variables(functions, {**kwargs, **(self.thinking.keeps if keeps_reasoning else {})})
        kept_until = self.thinking.closing_marker if keeps_reasoning else ""

        def known(index: int, head: str, message: Message) -> Known | None:
            head = recall_key(head, keeps_reasoning=bool(kept_until))
            return self.token_memo.recall(namespace, head, reply_key(message["content"], tool_calls_of(message)))

        def assembled() -> Prompt:
            prompt = assemble(self.tokenizer, messages, known, variables, self.limits, kept_until)
            num_public = self._shared_prompts.count_shared_tokens(self.tokenizer, messages, prompt)
            if begun is not None:
                reasoning = begun.get("reasoning_content", "")
                text = self.tokenizer.escape_reply(self.thinking.begin_reply(begun["content"], reasoning, prompt.text))
                ids = (*prompt.token_ids, *self.tokenizer.encode_after(prompt.text, text))
                prompt = replace(prompt, text=prompt.text + text, token_ids=ids)
            return replace(prompt, num_public_tokens=num_public) if num_public else prompt

        num_chars = sum(len(message["content"]) + _CHARS_PER_MESSAGE for message in (*messages, begun or _NOTHING))
        if num_chars <= _INLINE_CHARS and len(functions) <= _INLINE_FUNCTIONS:
            return assembled()
        return await asyncio.to_thread(assembled)

    async def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Tokenise raw text. Raises: ContextLengthError."""
        self.limits.check(len(text))
        if len(text) <= _INLINE_CHARS:
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return tuple(await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens))

    async def start(
        self,
        request: GenerateRequest,
        rendering: str | None = None,
        prefix: ReplyPrefix | None = None,
        functions: Functions | None = None,
        thinks: bool = True,
        owner: str | None = None,
    ) -> Reply:
        """Submit a request; the reply must then be read to its end or closed.

        `rendering`: the prompt's text if it came from the chat template. It lets later turns recall this reply;
        reasoning (unless `thinks` is False) and calls of `functions` (None: none) are then parsed. `prefix`: the
        beginning of the reply, which ends the prompt. `owner`: None for the namespace's tenant. Raises: the errors of
        `EngineClient.submit`.
        """
        request = self._seeded(request)
        await self.engine.submit(request)
        return self.resume(request, rendering, prefix, functions, thinks, owner)

    def resume(
        self,
        request: GenerateRequest,
        rendering: str | None = None,
        prefix: ReplyPrefix | None = None,
        functions: Functions | None = None,
        thinks: bool = True,
        owner: str | None = None,
    ) -> Reply:
        """Return the reply to a request that was submitted, see `start`; its events are read from the first on."""
        self._live[request.request_id] = request.namespace if owner is None else owner, request
        reply_format = self.reply_format if rendering is not None else ReplyFormat()
        if not thinks:
            reply_format = replace(reply_format, reasoning=None)
        context = ReplyContext(self.tokenizer, reply_format, functions)
        return Reply(self, request, rendering, prefix, context)

    def _seeded(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with its seed, so that every engine draws the same tokens."""
        params = request.params
        if not isinstance(params, SamplingParams) or params.seed is not None:
            return request
        params = msgspec.structs.replace(params, seed=seed_of(request, self._seed))
        return msgspec.structs.replace(request, params=params)

    async def embed(self, request: GenerateRequest, owner: str) -> EmbeddedPrompt:
        """Embed the prompt of a request with `pooling`; leaving early aborts it.

        Raises: the errors of `EngineClient.submit`, ReplyFailedError, OverloadedError if the server ended the request.
        """
        await self.engine.submit(request)
        self._live[request.request_id] = owner, request
        values, end = b"", None
        try:
            async for event in self.engine.events(request.request_id):
                if isinstance(event, Embedding):
                    values = event.values
                elif isinstance(event, Finished | Failed):
                    end = event
        finally:
            self.discard(request)
            if end is None:
                await self.abort(request)
        if isinstance(end, Failed):
            raise ReplyFailedError(end)
        if end is None or end.cancelled:
            raise OverloadedError("the server ended this request; send it again", code="engine_unavailable")
        return EmbeddedPrompt(values, end.num_prompt_tokens, end.num_cached_tokens)

    async def abort(self, request: GenerateRequest) -> None:
        """Abort a request, also during cancellation."""
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _ABORT_TIMEOUT_S):
            await self.engine.abort(request.request_id)

    def live_requests_of(self, owner: str) -> dict[str, str]:
        """Return the running requests of an owner, each with its conversation ("" for none)."""
        return {name: request.conversation_id for name, (whose, request) in self._live.items() if whose == owner}

    @property
    def num_live(self) -> int:
        """The number of running requests."""
        return len(self._live)

    async def abort_live(self, except_for: Collection[str] = ()) -> None:
        """Abort every running request except some."""
        for request_id in [name for name in self._live if name not in except_for]:
            await self.engine.abort(request_id)

    def discard(self, request: GenerateRequest) -> None:
        """Remove a finished request from the running ones."""
        self._live.pop(request.request_id, None)

    def remember(self, request: GenerateRequest, rendering: str, candidate: Candidate) -> None:
        """Memorise a finished candidate for clients that will resend it as text."""
        ids = (*candidate.prompt, *candidate.stored_ids)
        self.token_memo.remember(request.namespace, rendering, candidate.reply_key, ids, candidate.raw)
        for call in candidate.tool_calls:
            self._argument_memo.remember(request.namespace, call.call_id, call.arguments)

    def _restore_arguments(self, message: Message, namespace: str) -> Message:
        calls = tool_calls_of(message)
        if not calls:
            return message
        recall = self._argument_memo.recall
        restored = [
            ToolCall(each.call_id, each.name, recall(namespace, each.call_id, each.arguments)) for each in calls
        ]
        return assistant_message(message["content"], message.get("reasoning_content", ""), restored)


class ReplyObserver(Protocol):
    """Receives the start and the end of each reply.

    `is_whole` is False for a reply that was cut short. `on_ended` is called exactly once, also for a reply that never
    started, unless the reply was handed over: then another process continues it.
    """

    def on_started(self, reply: Reply) -> None: ...

    def on_ended(self, reply: Reply, *, is_whole: bool) -> None: ...

    def hand_over(self) -> None: ...


class Reply:
    """One accepted request in progress.

    An async context manager: leaving it early aborts the request. `is_chat`: the prompt came from the chat template.
    `is_parsed`: candidates may have parts other than text. `num_computed_prompt_tokens`: prompt tokens that the cache
    lacked; for a reply cut short before its first token, all that may have been computed. `marks_batches`: `events`
    yields a `ReplyBatchEnd` after the events that an engine worker has sent together. `num_events`: of the engine.
    `may_move`: another process may continue the reply, so `settle` or `close` reports its end to the observer.
    """

    def __init__(
        self,
        service: ChatService,
        request: GenerateRequest,
        rendering: str | None,
        prefix: ReplyPrefix | None,
        context: ReplyContext,
    ) -> None:
        self.request = request
        self._service = service
        self._rendering = rendering
        self.is_chat = rendering is not None
        self.is_parsed = context.is_parsed
        self.ended = False
        self.observer: ReplyObserver | None = None
        self.num_computed_prompt_tokens = 0
        self._has_started = False
        self.num_tokens = 0
        self.num_events = 0
        self.marks_batches = False
        self.may_move = False
        self._is_whole = False
        self.candidates = tuple(
            Candidate(index, context, request, prefix) for index in range(num_candidates(request.params))
        )

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def events(self) -> AsyncIterator[ReplyEvent]:
        """Yield events until `ReplyFinished`. Raises: ReplyFailedError."""
        beams = BeamReader(self._service.tokenizer.token_bytes)
        async for event in self._service.engine.events(self.request.request_id):
            self.num_events = event.seq
            if isinstance(event, Tokens):
                self.num_tokens += len(event.token_ids)
                delta = self.candidates[event.index].push(event)
                if delta is not None:
                    yield delta
                if self.marks_batches and not event.has_more:
                    yield ReplyBatchEnd()
            elif isinstance(event, Started):
                self._has_started = True
                self.num_computed_prompt_tokens = event.num_prompt_tokens - event.num_cached_tokens
                if self.observer is not None:
                    self.observer.on_started(self)
                yield ReplyStarted(
                    event.num_prompt_tokens, event.num_cached_tokens, event.prompt_logprobs, report=event.report
                )
            elif isinstance(event, Beams):
                yield beams.read(event)
                if self.marks_batches and not event.has_more:
                    yield ReplyBatchEnd()
            elif isinstance(event, CandidateDone):
                for each in self._finish_candidate(event):
                    yield each
            elif isinstance(event, Failed):
                self._end()
                raise ReplyFailedError(event)
            elif isinstance(event, Finished):
                if not self._has_started:
                    self.num_computed_prompt_tokens = event.num_prompt_tokens - event.num_cached_tokens
                self._end(is_whole=not event.cancelled)
                for candidate in self.candidates:
                    if event.cancelled and not candidate.done:
                        for each in candidate.finish(None):
                            yield each
                yield ReplyFinished(
                    num_prompt_tokens=event.num_prompt_tokens,
                    num_cached_tokens=event.num_cached_tokens,
                    num_output_tokens=event.num_output_tokens,
                    cancelled=event.cancelled,
                    num_pages_freed=event.num_pages_freed,
                    num_reasoning_tokens=sum(candidate.num_reasoning_tokens for candidate in self.candidates),
                )
                return

    def _end(self, *, is_whole: bool = False) -> None:
        self.ended, self._is_whole = True, is_whole
        self._service.discard(self.request)
        if not self.may_move:
            self.settle()

    def settle(self) -> None:
        """Report the end to the observer, unless that has been done."""
        observer, self.observer = self.observer, None
        if observer is not None:
            observer.on_ended(self, is_whole=self._is_whole)

    def hand_over(self) -> None:
        """Report to the observer that another process continues the reply."""
        observer, self.observer = self.observer, None
        if observer is not None:
            observer.hand_over()

    def _finish_candidate(self, event: CandidateDone) -> tuple[ReplyDelta | ReplyDone, ...]:
        candidate = self.candidates[event.index]
        events = candidate.finish(event)
        if self._rendering is not None and not candidate.dropped:
            self._service.remember(self.request, self._rendering, candidate)
        return events

    async def cancel(self) -> None:
        """Ask the engine to stop; `events` then ends with `ReplyFinished(cancelled=True)`."""
        await self._service.engine.abort(self.request.request_id)

    async def drop(self, index: int) -> None:
        """Ask the engine to end only candidate `index`, with finish reason "cancelled".

        If no other candidate is running, this cancels the whole reply. Raises: the errors of
        `EngineClient.cancel_candidate`.
        """
        await self._service.engine.cancel_candidate(self.request.request_id, index)

    async def close(self) -> None:
        """Abort the request unless it has ended. Safe to call twice, and during cancellation."""
        if self.ended:
            self.settle()
            return
        if not self._has_started:  # the engine may be about to emit the first token
            self.num_computed_prompt_tokens = len(self.request.prompt)
        # A slow reader has not received all tokens that were computed.
        self.num_tokens = max(self.num_tokens, self._service.engine.num_tokens_sent(self.request.request_id))
        self._end()
        self.settle()
        await self._service.abort(self.request)
