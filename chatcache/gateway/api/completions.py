"""POST /v1/completions: the route, and the writer of its body and chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.replies.events import ReplyDelta, ReplyDone, ReplyEvent, ReplyFinished
from chatcache.conversations.replies.service import ChatService, Reply, is_ranked, num_candidates
from chatcache.conversations.tree import new_id
from chatcache.errors import InvalidRequestError, UnsupportedParameterError
from chatcache.gateway.api.generation import (
    ChunkWriter,
    CompleteReply,
    CompletionHead,
    completion_usage,
    merge_replies,
    reply_events,
    respond,
)
from chatcache.gateway.api.logprobs import CompletionLogprobsBuilder, limit_alternatives, prompt_logprobs
from chatcache.gateway.api.params import (
    RouteParams,
    check_stream,
    check_tokens,
    clamp_max_tokens,
    clamped_header,
    clamped_limit,
    rename_constraint_param,
    rename_error_params,
    structured_outputs,
    to_params,
)
from chatcache.gateway.auth.principal import principal_of
from chatcache.gateway.context import gateway_of
from chatcache.gateway.json_codec import preencoded
from chatcache.gateway.limits.admission import CHARS_PER_TOKEN, request_cost
from chatcache.gateway.middleware import cancel_on_disconnect, read_json
from chatcache.gateway.schemas.completions import Completion, CompletionChoice, FinishReason, Usage
from chatcache.gateway.schemas.fields import ignored_header, parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import MAX_PROMPTS, CompletionBase, CompletionFields, SamplingFields
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.events import FINISH_LENGTH
from chatcache.types.request import MAX_N, MAX_PROMPT_LOGPROBS, GenerateRequest, Params

_DEFAULT_MAX_TOKENS = 16


async def completions(request: Request) -> Response:
    """POST /v1/completions: text or token ids, one prompt or several; stateless."""
    gateway, principal = gateway_of(request), principal_of(request)
    body = await read_json(request)
    base, fields = parse_fields(body, CompletionBase), parse_fields(body, CompletionFields)
    sampling = parse_fields(body, SamplingFields)
    ignored = unknown_fields(body, CompletionBase, CompletionFields, SamplingFields)
    del body  # unknown fields can be large and are not needed while the reply is generated
    route_params = _route_params(base, fields, sampling)
    model = await gateway.require_model(base.model)
    max_model_len = gateway.max_model_len
    params = to_params(sampling, route_params, model.tokenizer)
    params = clamp_max_tokens(params, 0, max_model_len, _num_prompts(fields.prompt))
    work = request_cost(params, _num_chars(fields.prompt), _num_prompts(fields.prompt))
    async with gateway.admission.acquire(principal, work) as permit:
        given = _prompts(fields)
        prompts = await _tokenize_prompts(given, model.service)
        width = num_candidates(params)
        _check_width(len(prompts), width, sampling)
        # `echo` with `logprobs` is the engine's `prompt_logprobs`.
        prompt_logprobs_name = "logprobs" if base.prompt_logprobs is None else None
        with rename_error_params(prompt_logprobs=prompt_logprobs_name):
            _check_prompt_logprobs(prompts, width, route_params.prompt_logprobs)
        priority = gateway.priority(base.priority)
        completion_id = new_id("cmpl", "-")
        echo = _echo(given, prompts, model.tokenizer) if fields.echo else [None] * len(prompts)
        head = CompletionHead.of(gateway, completion_id)
        writer = _writer(base, fields, params, prompts, echo, head, model.tokenizer)
        requests = [
            GenerateRequest(
                request_id=f"{completion_id}-{at}",
                prompt=prompt,
                params=clamp_max_tokens(params, len(prompt), max_model_len, len(prompts)),
                namespace=principal.tenant,
                cache_salt=base.cache_salt or "",
                priority=priority,
            )
            for at, prompt in enumerate(prompts)
        ]
        with (
            rename_error_params(prompt_logprobs=prompt_logprobs_name),
            rename_constraint_param(sampling.structured_outputs, "response_format"),
        ):
            replies = await cancel_on_disconnect(request, _submit_all(model.service, requests, principal.owner))
        permit.attach(*replies)
        clamped = [
            clamped_limit(route_params.max_tokens, each.params, len(each.prompt), max_model_len) for each in requests
        ]
        limit = min((limit for limit in clamped if limit is not None), default=None)

    def events() -> AsyncIterator[ReplyEvent]:
        merged = merge_replies([reply_events(reply, gateway.metrics) for reply in replies], width)
        return _without_output(merged) if fields.max_tokens == 0 else merged

    headers = ignored_header(ignored) | clamped_header(limit)
    return await respond(request, events, replies, writer, stream=bool(base.stream), headers=headers)


def _writer(
    base: CompletionBase,
    fields: CompletionFields,
    params: Params,
    prompts: Sequence[tuple[int, ...]],
    echo: Sequence[str | None],
    head: CompletionHead,
    tokenizer: Tokenizer,
) -> CompletionWriter:
    return CompletionWriter(
        head,
        tokenizer,
        prompts,
        [text for text in echo for _ in range(num_candidates(params))],
        hidden_ids=tokenizer.special_ids if params.skip_special_tokens else frozenset(),
        num_logprobs=fields.logprobs,
        num_prompt_logprobs=base.prompt_logprobs,
        with_scores=is_ranked(params) and fields.max_tokens != 0,
        with_usage=bool(base.stream_options and base.stream_options.include_usage),
        with_token_ids=bool(base.return_token_ids),
    )


def _route_params(base: CompletionBase, fields: CompletionFields, sampling: SamplingFields) -> RouteParams:
    check_stream(base, sampling)
    echoed_logprobs = fields.logprobs if fields.echo else None
    if echoed_logprobs is not None and base.stream:
        raise UnsupportedParameterError("echo with logprobs cannot be streamed", param="echo")
    max_tokens = fields.max_tokens if fields.max_tokens is not None else _DEFAULT_MAX_TOKENS
    if max_tokens == 0 and not fields.echo:
        raise InvalidRequestError("max_tokens must be at least 1 without echo", param="max_tokens")
    return RouteParams(
        max_tokens=max_tokens or 1,  # the one token is discarded
        logprobs=fields.logprobs,
        prompt_logprobs=_max_or_none(base.prompt_logprobs, echoed_logprobs),
        structured_outputs=structured_outputs(sampling.structured_outputs, base.response_format),
    )


def _check_width(num_prompts: int, width: int, sampling: SamplingFields) -> None:
    num_branches = max(width, sampling.best_of or 1)
    if num_prompts * num_branches > MAX_N:
        name = "n" if num_branches == width else "best_of"
        raise InvalidRequestError(
            f"prompts x {name} must be at most {MAX_N}, got {num_prompts} x {num_branches}", param="prompt"
        )


def _check_prompt_logprobs(prompts: Sequence[tuple[int, ...]], width: int, num_top: int | None) -> None:
    """Limit the total size of prompt log-probabilities over all choices of a request.

    `width`: choices per prompt. `num_top`: alternatives per token, None if not requested. Raises: InvalidRequestError.
    """
    if num_top is None:
        return
    num_tokens = width * sum(map(len, prompts))
    if num_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt logprobs ({num_top}) of {num_tokens} prompt tokens, each prompt n times, are more than one "
            f"answer carries: prompt tokens x n x (prompt_logprobs + 1) must be at most {MAX_PROMPT_LOGPROBS}",
            param="prompt_logprobs",
        )


def _num_chars(prompt: Sequence[object]) -> int:
    """Return the number of characters of a prompt, estimated if it consists of token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(_num_chars(part) if isinstance(part, (str, list)) else CHARS_PER_TOKEN for part in prompt)


def _num_prompts(prompt: Sequence[object]) -> int:
    """Count the prompts before they are validated."""
    return len(prompt) if not isinstance(prompt, str) and prompt and isinstance(prompt[0], (str, list)) else 1


def _prompts(fields: CompletionFields) -> list[str | list[int]]:
    """Return the prompts, each as text or token ids. Raises: InvalidRequestError."""
    given = fields.prompt
    kinds = set(map(type, given))
    if isinstance(given, str):
        entries: list[str | list[int]] = [given]
    elif kinds == {int}:
        entries = [cast(list[int], given)]
    elif int in kinds:
        raise InvalidRequestError("prompt: token ids and texts do not mix in one list", param="prompt")
    else:
        entries = cast(list[str | list[int]], given)
    if len(entries) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt: at most {MAX_PROMPTS} prompts, got {len(entries)}", param="prompt")
    return entries


def _echo(
    given: Sequence[str | list[int]], prompts: Sequence[tuple[int, ...]], tokenizer: Tokenizer
) -> list[str | None]:
    """Return the text of each prompt: as it was given, or that of its tokens."""
    return [
        entry if isinstance(entry, str) else tokenizer.decode(ids, skip_special_tokens=False)
        for entry, ids in zip(given, prompts, strict=True)
    ]


async def _tokenize_prompts(entries: Sequence[str | list[int]], service: ChatService) -> list[tuple[int, ...]]:
    """Tokenize the prompts. Raises: InvalidRequestError."""
    prompts: list[tuple[int, ...]] = []
    for entry in entries:
        if isinstance(entry, str):
            ids = await service.encode(entry, add_special_tokens=True)
        else:
            ids = tuple(entry)
            check_tokens(ids, service.tokenizer.vocab_size, "prompt")
        if not ids:
            raise InvalidRequestError("prompt must hold at least one token", param="prompt")
        prompts.append(ids)
    return prompts


def _max_or_none(*numbers: int | None) -> int | None:
    return max((number for number in numbers if number is not None), default=None)


async def _submit_all(service: ChatService, requests: Sequence[GenerateRequest], owner: str) -> list[Reply]:
    """Submit all prompts, or none. Raises: what `EngineClient.submit` raises."""
    starts = [asyncio.ensure_future(service.start(request, owner=owner)) for request in requests]
    try:
        return list(await asyncio.gather(*starts))
    except BaseException:  # the first refusal, or the client has disconnected
        for start in starts:
            start.cancel()
        for outcome in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(outcome, Reply):
                await outcome.close()
        raise


async def _without_output(events: AsyncIterator[ReplyEvent]) -> AsyncIterator[ReplyEvent]:
    """Yield the events of replies as if nothing had been generated."""
    async for event in events:
        if isinstance(event, ReplyDone):
            yield ReplyDone(event.index, "", FINISH_LENGTH, None, (), ())
        elif isinstance(event, ReplyFinished):
            yield replace(event, num_output_tokens=0)
        elif not isinstance(event, ReplyDelta):
            yield event


class CompletionWriter(ChunkWriter[CompletionChoice]):
    """Converts the events of the merged replies to the body or the chunks of one completion.

    Choices are numbered prompt by prompt. `echo`: the prompt before each choice's own text, None to leave it out.
    `hidden_ids`: generated tokens that are not part of the text. `num_logprobs`, `num_prompt_logprobs`: how many
    alternatives of each generated token and each prompt token are returned.
    """

    def __init__(
        self,
        head: CompletionHead,
        tokenizer: Tokenizer,
        prompts: Sequence[tuple[int, ...]],
        echo: Sequence[str | None],
        *,
        hidden_ids: Collection[int],
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
        with_scores: bool,
        with_usage: bool,
        with_token_ids: bool,
    ) -> None:
        super().__init__(len(echo), fast_text=num_logprobs is None and not with_token_ids, with_usage=with_usage)
        self._head = head
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._echo = echo
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._with_scores = with_scores
        self._with_token_ids = with_token_ids
        self._logprobs = [CompletionLogprobsBuilder(tokenizer, hidden_ids) for _ in echo]

    def body(self, reply: CompleteReply) -> Completion:
        return self._completion(
            [self._whole_choice(done, reply) for done in reply.dones], completion_usage(reply.finished)
        )

    def chunk(self, choice: CompletionChoice) -> Completion:
        return self._completion([choice])

    def usage_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def first_chunk(self, index: int) -> Completion:
        choice = self.text_choice(index, self._echo[index] or "")
        if self._with_token_ids:
            choice.prompt_token_ids = list(self._prompt_of(index))
        return self.chunk(choice)

    def text_choice(self, index: int, text: str) -> CompletionChoice:
        return CompletionChoice(index, text, None, None)

    def delta_choice(self, event: ReplyDelta) -> CompletionChoice | None:
        if not (event.text or event.logprobs or (self._with_token_ids and event.token_ids)):
            return None
        choice = self.text_choice(event.index, event.text)
        if event.logprobs:
            scored = zip(event.token_ids, event.logprobs, strict=True)
            choice.logprobs = self._logprobs[event.index].build(scored)
        if self._with_token_ids:
            choice.token_ids = list(event.token_ids)
        return choice

    def final_choice(self, event: ReplyDone, unsent_ids: Sequence[int]) -> CompletionChoice:
        choice = CompletionChoice(
            event.index, "", None, cast(FinishReason, event.finish_reason), stop_reason=event.stop_reason
        )
        if self._with_scores:
            choice.score = event.score
        if self._with_token_ids:
            choice.token_ids = list(unsent_ids)
        return choice

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        head = self._head
        return Completion(head.id, "text_completion", head.created, head.model, head.fingerprint, choices, usage)

    def _prompt_number(self, index: int) -> int:
        """Return the number of the prompt that a choice continues."""
        return index * len(self._prompts) // self.num_choices

    def _prompt_of(self, index: int) -> tuple[int, ...]:
        return self._prompts[self._prompt_number(index)]

    def _whole_choice(self, done: ReplyDone, reply: CompleteReply) -> CompletionChoice:
        prompt, echo = self._prompt_of(done.index), self._echo[done.index]
        scores = reply.prompt_logprobs.get(self._prompt_number(done.index), ())
        choice = self.final_choice(done, done.token_ids)
        choice.text = (echo or "") + done.text
        if self._with_token_ids:
            choice.prompt_token_ids = list(prompt)
        if self._num_logprobs is not None:
            builder = self._logprobs[done.index]
            if echo is not None:
                builder.add_prompt(prompt, limit_alternatives(scores, self._num_logprobs), echo)
            packed = reply.logprobs.get(done.index)
            choice.logprobs = preencoded(builder.build(packed.scored() if packed is not None else ()))
            reply.turns.end_piece()
        if self._num_prompt_logprobs is not None:
            rows = prompt_logprobs(self._tokenizer, prompt, limit_alternatives(scores, self._num_prompt_logprobs))
            choice.prompt_logprobs = preencoded(rows)
        return choice
