"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.replies.events import CallDelta, ReplyDelta, ReplyDone, ReplyEvent, ReplyFinished
from chatcache.conversations.replies.service import is_ranked, num_candidates
from chatcache.conversations.tree import new_id
from chatcache.errors import InvalidRequestError
from chatcache.gateway.api.generation import FastChunks, Heard, generation, is_plain, respond, usage
from chatcache.gateway.api.logprobs import chat_logprobs, prompt_logprobs
from chatcache.gateway.api.messages import to_messages
from chatcache.gateway.api.params import (
    Asked,
    check_stream,
    constrain_to_tools,
    parse_tool_choice,
    rename_param_errors,
    rename_params,
    structured_outputs,
    to_params,
)
from chatcache.gateway.auth.principal import principal_of
from chatcache.gateway.context import gateway_of
from chatcache.gateway.json_codec import encoded
from chatcache.gateway.limits.admission import work_of
from chatcache.gateway.middleware import read_json, until_disconnect
from chatcache.gateway.schemas.fields import ignored_header, read, unknown_fields
from chatcache.gateway.schemas.requests import ChatFields, CompletionBase, SamplingFields
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.events import FINISH_STOP
from chatcache.types.request import GenerateRequest


async def chat_completions(request: Request) -> Response:
    gateway = gateway_of(request)
    body = await read_json(request)
    base, chat, sampling = read(body, CompletionBase), read(body, ChatFields), read(body, SamplingFields)
    ignored = unknown_fields(body, CompletionBase, ChatFields, SamplingFields)
    messages = to_messages(chat.messages, "messages")
    model = await gateway.ready(base.model)
    asked = to_params(sampling, _asked(base, chat, sampling), model.tokenizer.vocab_size)
    form = model.service.reply_format
    use = parse_tool_choice(form, chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    principal = principal_of(request)
    work = work_of(asked, sum(len(message["content"]) for message in messages))
    async with gateway.door.entering(principal, work) as permit:
        prompt = await model.service.prompt(messages, principal.tenant, use.functions)
        params = constrain_to_tools(asked, use, form, model.tokenizer, prompt.token_ids)
        engine_request = GenerateRequest(
            request_id=new_id("chatcmpl", "-"),
            prompt=prompt.token_ids,
            params=params,
            namespace=principal.tenant,
            num_public_tokens=prompt.num_public_tokens,
            priority=gateway.priority(base.priority),
        )
        shape = ChatShape(
            id=engine_request.request_id,
            created=int(time.time()),
            model=gateway.model_name,
            fingerprint=gateway.fingerprint,
            tokenizer=model.tokenizer,
            num_candidates=num_candidates(params),
            with_scores=is_ranked(params),
            with_logprobs=bool(chat.logprobs),
            with_usage=bool(base.stream_options and base.stream_options.include_usage),
            prompt=prompt.token_ids,
            with_token_ids=bool(base.return_token_ids),
        )
        names = rename_params(max_tokens="max_completion_tokens" if chat.max_completion_tokens is not None else None)
        thinks = asked.structured_outputs is None or params is not asked
        starting = model.service.start(
            engine_request, prompt.text, functions=use.names, thinks=thinks, owner=principal.owner
        )
        with (
            names,
            rename_param_errors(sampling.structured_outputs, "response_format", "tools" if use.limits else None),
        ):
            reply = await until_disconnect(request, starting)
        permit.cover(reply)
    return await respond(
        request,
        lambda: generation(reply, gateway.metrics),
        (reply,),
        shape,
        stream=bool(base.stream),
        headers=ignored_header(ignored),
    )


def _asked(base: CompletionBase, chat: ChatFields, sampling: SamplingFields) -> Asked:
    check_stream(base, sampling)
    return Asked(
        max_tokens=chat.max_completion_tokens if chat.max_completion_tokens is not None else base.max_tokens,
        logprobs=_logprobs(chat),
        prompt_logprobs=base.prompt_logprobs,
        structured_outputs=structured_outputs(sampling.structured_outputs, base.response_format),
    )


def _logprobs(chat: ChatFields) -> int | None:
    if chat.logprobs:
        return chat.top_logprobs or 0
    if chat.top_logprobs is not None:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The wire form."""

    id: str
    created: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    num_candidates: int
    with_scores: bool
    with_logprobs: bool
    with_usage: bool
    prompt: tuple[int, ...]
    with_token_ids: bool

    async def chunks(self, events: AsyncIterator[ReplyEvent]) -> AsyncIterator[object]:
        """Role chunks of all candidates in index order with the first token, text, an end for each, usage."""
        begun = False
        num_sent = [0] * self.num_candidates
        plain = FastChunks(lambda index, text: self._chunk(self._choice(index, {"content": text})))
        only_text = not (self.with_logprobs or self.with_token_ids)
        async for event in events:
            if begun and only_text and isinstance(event, ReplyDelta) and is_plain(event):
                yield plain.of(event)
                continue
            if isinstance(event, ReplyDelta | ReplyDone) and not begun:
                begun = True
                for index in range(self.num_candidates):
                    first: dict[str, Any] = {}
                    if index == 0 and self.with_token_ids:
                        first["prompt_token_ids"] = self.prompt
                    yield {**self._chunk(self._choice(index, {"role": "assistant", "content": ""})), **first}
            if isinstance(event, ReplyDelta):
                num_sent[event.index] += len(event.token_ids)
                delta = _delta(event)
                if delta or event.logprobs or (event.token_ids and self.with_token_ids):
                    yield self._chunk(self._text(event, delta or {"content": ""}))
            elif isinstance(event, ReplyDone):
                choice = self._choice(event.index, {}, finish_reason(event), event.stop_reason)
                if self.with_scores:
                    choice["score"] = event.score
                if self.with_token_ids:
                    choice["token_ids"] = event.token_ids[num_sent[event.index] :]
                yield self._chunk(choice)
            elif isinstance(event, ReplyFinished) and self.with_usage:
                yield {**self._chunk(), "usage": usage(event)}

    def whole(self, heard: Heard) -> object:
        """The non-streamed body."""
        choices: list[dict[str, Any]] = []
        for done in heard.dones:
            choice: dict[str, Any] = {
                "index": done.index,
                "message": _message(done),
                "logprobs": None,
                "finish_reason": finish_reason(done),
                "stop_reason": done.stop_reason,
            }
            if self.with_scores:
                choice["score"] = done.score
            if self.with_logprobs:
                mine = heard.deltas.get(done.index, ())
                content = [entry for d in mine for entry in chat_logprobs(self.tokenizer, d.token_ids, d.logprobs)]
                choice["logprobs"] = encoded({"content": content, "refusal": None})
            if self.with_token_ids:
                choice["token_ids"] = done.token_ids
            choices.append(choice)
        body = {**self._head("chat.completion"), "choices": choices, "usage": usage(heard.finished)}
        if heard.prompt_logprobs.get(0):
            body["prompt_logprobs"] = encoded(prompt_logprobs(self.tokenizer, self.prompt, heard.prompt_logprobs[0]))
        return {**body, "prompt_token_ids": self.prompt} if self.with_token_ids else body

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": choices, "usage": None}

    def _choice(
        self, index: int, delta: dict[str, Any], finish: str | None = None, stop: str | int | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return choice if finish is None else {**choice, "stop_reason": stop}

    def _text(self, event: ReplyDelta, delta: dict[str, Any]) -> dict[str, Any]:
        choice = self._choice(event.index, delta)
        if self.with_logprobs and event.logprobs:
            content = chat_logprobs(self.tokenizer, event.token_ids, event.logprobs)
            choice["logprobs"] = {"content": content, "refusal": None}
        if self.with_token_ids:
            choice["token_ids"] = event.token_ids
        return choice


def finish_reason(done: ReplyDone) -> str:
    """OpenAI's: a reply that ended with calls ended for them."""
    return "tool_calls" if done.parts.tool_calls and done.finish_reason == FINISH_STOP else done.finish_reason


def _delta(event: ReplyDelta) -> dict[str, Any]:
    """What an event adds to a message. Reasoning has two names: OpenAI's clients know none, vLLM's both."""
    delta: dict[str, Any] = {}
    if event.reasoning:
        delta |= {"reasoning_content": event.reasoning, "reasoning": event.reasoning}
    if event.text:
        delta["content"] = event.text
    if event.calls:
        delta["tool_calls"] = [_call_delta(call) for call in event.calls]
    return delta


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if not call.name:
        return {"index": call.number, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.number, "id": call.call_id, "type": "function", "function": function}


def _message(done: ReplyDone) -> dict[str, Any]:
    parts = done.parts
    message: dict[str, Any] = {"role": "assistant", "content": done.text, "refusal": None}
    if parts.reasoning:
        message |= {"reasoning_content": parts.reasoning, "reasoning": parts.reasoning}
    if parts.tool_calls:
        message["content"] = done.text or None
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parts.tool_calls
        ]
    return message
