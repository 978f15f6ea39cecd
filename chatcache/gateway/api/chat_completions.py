"""POST /v1/chat/completions: the route, and the writer of its body and chunks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

from msgspec import UNSET, structs
from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.prompt import Message, Prompt
from chatcache.conversations.replies.events import CallDelta, ReplyDelta, ReplyDone
from chatcache.conversations.replies.service import Reply, is_ranked, num_candidates
from chatcache.conversations.tree import new_id
from chatcache.errors import InvalidRequestError, UnsupportedParameterError
from chatcache.gateway.api.attachments import replace_files
from chatcache.gateway.api.generation import (
    ChunkWriter,
    CompleteReply,
    CompletionHead,
    completion_usage,
    reply_events,
    respond,
)
from chatcache.gateway.api.logprobs import encoded_chat_logprobs, prompt_logprobs
from chatcache.gateway.api.messages import to_messages
from chatcache.gateway.api.params import (
    RouteParams,
    ToolUse,
    check_stream,
    clamp_max_tokens,
    clamped_header,
    clamped_limit,
    constrain_to_tools,
    parse_tool_choice,
    rename_constraint_param,
    rename_error_params,
    structured_outputs,
    to_params,
)
from chatcache.gateway.api.thinking import NO_THINKING, Thinking, limit_thinking, parse_thinking
from chatcache.gateway.auth.principal import owner_of, principal_of
from chatcache.gateway.context import Gateway, Model, gateway_of
from chatcache.gateway.json_codec import preencoded
from chatcache.gateway.limits.admission import request_cost
from chatcache.gateway.middleware import cancel_on_disconnect, read_json
from chatcache.gateway.schemas.completions import (
    CalledFunction,
    CalledFunctionDelta,
    ChatCall,
    ChatCallDelta,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FinishReason,
    Usage,
)
from chatcache.gateway.schemas.fields import ignored_header, parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import ChatFields, CompletionBase, SamplingFields, ThinkingFields
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.request import GenerateRequest, Params


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions: stateless, streamed or not."""
    gateway = gateway_of(request)
    body = await read_json(request)
    base, chat = parse_fields(body, CompletionBase), parse_fields(body, ChatFields)
    sampling, thinking_fields = parse_fields(body, SamplingFields), parse_fields(body, ThinkingFields)
    ignored = unknown_fields(body, CompletionBase, ChatFields, SamplingFields, ThinkingFields)
    del body  # unknown fields can be large and are not needed while the reply is generated
    messages = to_messages(await replace_files(gateway, owner_of(request), chat.messages, "messages"), "messages")
    model = await gateway.require_model(base.model)
    route_params = _route_params(base, chat, sampling)
    sampling_params = to_params(sampling, route_params, model.tokenizer)
    thinking = parse_thinking(thinking_fields, model.service.thinking)
    tools = parse_tool_choice(model.service.reply_format, chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    chat_request = ChatRequest(
        request_id=new_id("chatcmpl", "-"),
        messages=messages,
        tools=tools,
        params=sampling_params,
        cache_salt=base.cache_salt or "",
        priority=gateway.priority(base.priority),
        continues=_continues(chat, messages, can_reason=model.service.thinking.can_reason),
        thinking=thinking,
    )
    limit_name = "max_completion_tokens" if chat.max_completion_tokens is not None else None
    with (
        rename_error_params(max_tokens=limit_name, prompt="messages"),
        rename_constraint_param(sampling.structured_outputs, "response_format", "tools" if tools.limits else None),
    ):
        reply = await start_chat(request, model, chat_request)
    writer = _writer(base, chat, reply.request, gateway, model.tokenizer)
    limit = clamped_limit(
        route_params.max_tokens, reply.request.params, len(reply.request.prompt), gateway.max_model_len
    )
    return await respond(
        request,
        lambda: reply_events(reply, gateway.metrics),
        (reply,),
        writer,
        stream=bool(base.stream),
        headers=ignored_header((*thinking.ignored, *ignored)) | clamped_header(limit),
    )


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A stateless chat to generate, in the terms that all APIs share.

    `continues`: the last message is the beginning of the reply. `raw`: the prompt itself, in place of messages.
    `on_prompt` is called with the assembled prompt before it is submitted.
    """

    request_id: str
    messages: Sequence[Message]
    tools: ToolUse
    params: Params
    cache_salt: str = ""
    priority: int = 0
    continues: bool = False
    raw: str | None = None
    on_prompt: Callable[[Prompt], Awaitable[None]] | None = None
    thinking: Thinking = NO_THINKING


async def start_chat(request: Request, model: Model, chat: ChatRequest) -> Reply:
    """Admit a chat, assemble its prompt and submit it to the engine. The caller closes the reply.

    A limit on its length beyond the context is clamped; `clamped_limit` of the reply's request reports that.

    Raises: as `AdmissionController.acquire`, `ChatService.prompt` and `ChatService.start`; ClientDisconnect.
    """
    gateway, service, principal = gateway_of(request), model.service, principal_of(request)
    sampling_params = clamp_max_tokens(chat.params, 0, gateway.max_model_len)
    num_chars = len(chat.raw or "") + sum(len(message["content"]) for message in chat.messages)
    async with gateway.admission.acquire(principal, request_cost(sampling_params, num_chars)) as permit:
        if chat.raw is not None:
            prompt = Prompt(chat.raw, await service.encode(chat.raw, add_special_tokens=True))
        else:
            prompt = await service.prompt(
                chat.messages,
                principal.tenant,
                chat.tools.functions,
                continues=chat.continues,
                kwargs=chat.thinking.kwargs,
                keeps_reasoning=bool(chat.thinking.preserves),
            )
        if chat.on_prompt is not None:
            await chat.on_prompt(prompt)
        sampling_params = clamp_max_tokens(sampling_params, len(prompt.token_ids), gateway.max_model_len)
        params = sampling_params
        if chat.raw is None:
            params = constrain_to_tools(
                sampling_params, chat.tools, service.reply_format, model.tokenizer, prompt.token_ids
            )
        can_reason = sampling_params.structured_outputs is None or params is not sampling_params
        can_reason = can_reason and not chat.continues
        if can_reason and chat.raw is None:
            params = limit_thinking(params, chat.thinking, service.thinking, prompt.token_ids)
        engine_request = GenerateRequest(
            request_id=chat.request_id,
            prompt=prompt.token_ids,
            params=params,
            namespace=principal.tenant,
            cache_salt=chat.cache_salt,
            num_public_tokens=prompt.num_public_tokens,
            priority=chat.priority,
        )
        rendering = prompt.key if chat.raw is None else None
        starting = service.start(
            engine_request, rendering, functions=chat.tools.schemas, thinks=can_reason, owner=principal.owner
        )
        reply = await cancel_on_disconnect(request, starting)
        permit.attach(reply)
    return reply


def _continues(chat: ChatFields, messages: Sequence[Message], *, can_reason: bool) -> bool:
    """Check `continue_final_message` and `add_generation_prompt`. `can_reason`: replies may begin with reasoning.

    Raises: InvalidRequestError, UnsupportedParameterError.
    """
    if not chat.continue_final_message:
        if chat.add_generation_prompt is False:
            raise UnsupportedParameterError(
                "add_generation_prompt is not supported here without continue_final_message",
                param="add_generation_prompt",
            )
        return False
    param = "continue_final_message"
    if chat.add_generation_prompt:
        raise InvalidRequestError(f"{param} and add_generation_prompt exclude each other", param=param)
    last = messages[-1]
    if last["role"] != "assistant" or "tool_calls" in last or ("reasoning_content" in last and not can_reason):
        raise InvalidRequestError(f"{param}: the last message must be an assistant's text", param=param)
    return True


def _writer(
    base: CompletionBase, chat: ChatFields, request: GenerateRequest, gateway: Gateway, tokenizer: Tokenizer
) -> ChatCompletionWriter:
    return ChatCompletionWriter(
        CompletionHead.of(gateway, request.request_id),
        tokenizer,
        request.prompt,
        num_candidates(request.params),
        with_scores=is_ranked(request.params),
        with_logprobs=bool(chat.logprobs),
        with_usage=bool(base.stream_options and base.stream_options.include_usage),
        with_token_ids=bool(base.return_token_ids),
        with_reasoning=chat.include_reasoning is not False,
    )


def _route_params(base: CompletionBase, chat: ChatFields, sampling: SamplingFields) -> RouteParams:
    check_stream(base, sampling)
    return RouteParams(
        max_tokens=chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens,
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


class ChatCompletionWriter(ChunkWriter[ChatChunkChoice]):
    """Converts the events of a reply to the body or the chunks of one chat completion."""

    def __init__(
        self,
        head: CompletionHead,
        tokenizer: Tokenizer,
        prompt: tuple[int, ...],
        num_candidates: int,
        *,
        with_scores: bool = False,
        with_logprobs: bool = False,
        with_usage: bool = False,
        with_token_ids: bool = False,
        with_reasoning: bool = True,
    ) -> None:
        super().__init__(num_candidates, fast_text=not (with_logprobs or with_token_ids), with_usage=with_usage)
        self._head = head
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._with_scores = with_scores
        self._with_logprobs = with_logprobs
        self._with_token_ids = with_token_ids
        self._with_reasoning = with_reasoning

    def body(self, reply: CompleteReply) -> ChatCompletion:
        scores = reply.prompt_logprobs.get(0)
        prompt_rows = preencoded(prompt_logprobs(self._tokenizer, self._prompt, scores)) if scores else UNSET
        return ChatCompletion(
            id=self._head.id,
            object="chat.completion",
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.fingerprint,
            choices=[self._whole_choice(done, reply) for done in reply.dones],
            usage=completion_usage(reply.finished),
            prompt_logprobs=prompt_rows,
            prompt_token_ids=list(self._prompt) if self._with_token_ids else UNSET,
        )

    def chunk(self, choice: ChatChunkChoice) -> ChatCompletionChunk:
        return self._chunk([choice])

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        return self._chunk([], usage)

    def first_chunk(self, index: int) -> ChatCompletionChunk:
        chunk = self.chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content=""), None, None))
        if index == 0 and self._with_token_ids:
            chunk.prompt_token_ids = list(self._prompt)
        return chunk

    def text_choice(self, index: int, text: str) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(content=text), None, None)

    def delta_choice(self, event: ReplyDelta) -> ChatChunkChoice | None:
        if not self._with_reasoning:
            event = structs.replace(event, reasoning="")
        delta = _delta(event)
        if delta is None:
            if not event.logprobs and not (event.token_ids and self._with_token_ids):
                return None
            delta = ChatDelta(content="")
        choice = ChatChunkChoice(event.index, delta, None, None)
        if self._with_logprobs and event.logprobs:
            choice.logprobs = ChatLogprobs(
                encoded_chat_logprobs(self._tokenizer, event.token_ids, event.logprobs), None
            )
        if self._with_token_ids:
            choice.token_ids = list(event.token_ids)
        return choice

    def final_choice(self, event: ReplyDone, unsent_ids: Sequence[int]) -> ChatChunkChoice:
        return ChatChunkChoice(
            event.index,
            ChatDelta(),
            None,
            finish_reason(event),
            stop_reason=event.stop_reason,
            score=event.score if self._with_scores else UNSET,
            token_ids=list(unsent_ids) if self._with_token_ids else UNSET,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
        head = self._head
        return ChatCompletionChunk(
            head.id, "chat.completion.chunk", head.created, head.model, head.fingerprint, choices, usage
        )

    def _whole_choice(self, done: ReplyDone, reply: CompleteReply) -> ChatChoice:
        logprobs = ChatLogprobs(reply.encoded_logprobs(done.index), None) if self._with_logprobs else None
        message = _message(done)
        if not self._with_reasoning:
            message.reasoning_content = message.reasoning = UNSET
        return ChatChoice(
            done.index,
            message,
            logprobs,
            finish_reason(done),
            done.stop_reason,
            score=done.score if self._with_scores else UNSET,
            token_ids=list(done.token_ids) if self._with_token_ids else UNSET,
        )


def finish_reason(done: ReplyDone) -> FinishReason:
    """Convert to OpenAI's finish reason: a reply that stopped after whole tool calls has `tool_calls`."""
    return "tool_calls" if done.ends_in_calls else cast(FinishReason, done.finish_reason)


def _delta(event: ReplyDelta) -> ChatDelta | None:
    """Convert an event to the part of the message that it adds; None if it adds nothing.

    Reasoning is sent as `reasoning_content` and as `reasoning`: vLLM's clients read either name.
    """
    if not (event.reasoning or event.text or event.calls):
        return None
    delta = ChatDelta()
    if event.reasoning:
        delta.reasoning_content = delta.reasoning = event.reasoning
    if event.text:
        delta.content = event.text
    if event.calls:
        delta.tool_calls = [_call_delta(call) for call in event.calls]
    return delta


def _call_delta(call: CallDelta) -> ChatCallDelta:
    if not call.name:
        return ChatCallDelta(call.number, CalledFunctionDelta(call.arguments))
    return ChatCallDelta(call.number, CalledFunctionDelta(call.arguments, call.name), id=call.call_id, type="function")


def _message(done: ReplyDone) -> ChatMessage:
    parts = done.parts
    message = ChatMessage("assistant", done.text, None)
    if parts.reasoning:
        message.reasoning_content = message.reasoning = parts.reasoning
    if parts.tool_calls:
        message.content = done.text or None
        message.tool_calls = [
            ChatCall(call.call_id, "function", CalledFunction(call.name, call.arguments)) for call in parts.tool_calls
        ]
    return message
