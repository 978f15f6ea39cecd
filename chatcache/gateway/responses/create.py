"""Create a response from a request body: validate, plan, submit and store its input.

HTTP and WebSocket share this path.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from chatcache.conversations.fork_points import ReplyPrefix, TurnRequest
from chatcache.conversations.prompt import Function, Message, argument_schemas
from chatcache.conversations.prompt_history import PromptRecord
from chatcache.conversations.replies.service import Reply, num_candidates
from chatcache.conversations.store import Claim, StoreUnavailableError
from chatcache.conversations.turns import PRESERVE_THINKING, PlannedTurn
from chatcache.errors import ChatcacheError, InvalidRequestError, NotFoundError, UnsupportedParameterError
from chatcache.gateway.api.attachments import replace_files
from chatcache.gateway.api.cache_diagnosis import diagnose, response_diagnostics
from chatcache.gateway.api.compaction import is_compaction, to_summary_request
from chatcache.gateway.api.conversations import find_item, message_id_of
from chatcache.gateway.api.idempotency import IdempotencyKey
from chatcache.gateway.api.messages import input_messages
from chatcache.gateway.api.params import (
    RouteParams,
    ToolUse,
    clamp_max_tokens,
    clamped_limit,
    constrain_to_tools,
    conversation_id,
    parse_tool_choice,
    rename_constraint_param,
    rename_error_params,
    structured_outputs,
    to_params,
)
from chatcache.gateway.api.thinking import NO_THINKING, Thinking, limit_thinking, parse_thinking
from chatcache.gateway.auth.principal import Principal
from chatcache.gateway.context import Gateway, Model
from chatcache.gateway.limits.admission import request_cost
from chatcache.gateway.responses.objects import HAS_LOGPROBS
from chatcache.gateway.responses.run import LiveResponse, RunOptions
from chatcache.gateway.responses.steering import Steer, has_function_outputs, queued_input, response_settings
from chatcache.gateway.responses.takeover import ReplyRecord, reply_record, take_over
from chatcache.gateway.schemas.fields import LOGPROBS, parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import MessageFields, ResponseFields, ResponseThinkingFields, SamplingFields
from chatcache.tokenizer.thinking import KWARGS, ThinkingControls
from chatcache.types.request import ForkPoint, GenerateRequest, Params, SamplingParams

NONE_UNSTORED: Mapping[str, tuple[Message, ...]] = {}


async def start_response(
    gateway: Gateway,
    principal: Principal,
    body: Mapping[str, Any],
    *,
    extended: bool = False,
    idempotency_key: IdempotencyKey | None = None,
    unstored: Mapping[str, tuple[Message, ...]] = NONE_UNSTORED,
) -> LiveResponse:
    """Validate, plan and submit a response and store its input; then it runs by itself.

    `extended`: the client reads `chatcache.v1` frames. `unstored`: by response id, the messages up to the end
    of responses that were not stored and may be continued. If the caller is cancelled after the submit, the response
    still starts. Steering input that waits for the same previous response is put before the input of the body.

    Raises: any ChatcacheError. Then nothing runs and nothing was stored (after StoreUnavailableError: perhaps).
    """
    async with _taken_steers(gateway, principal.owner, body) as steers:
        if steers:
            body = {**body, "input": queued_input(steers, body.get("input"))}
        return await _start(gateway, principal, body, extended, idempotency_key, unstored)


async def start_idempotent_response(
    gateway: Gateway,
    principal: Principal,
    body: Mapping[str, Any],
    idempotency_key: IdempotencyKey,
    *,
    extended: bool = False,
) -> LiveResponse | str:
    """Start a response, or return the id of the response that an equal request has started.

    Raises: IdempotencyConflictError if a different request has used the key.
    """
    if body.get("store") is False:
        raise InvalidRequestError(
            "an Idempotency-Key needs store: only a stored response can be returned again", param="store"
        )
    async with gateway.idempotency_locks.get(principal.owner, idempotency_key):
        target = await idempotency_key.find_target(gateway.opened_store(), principal.owner)
        if target is not None:
            return target
        try:
            return await start_response(gateway, principal, body, extended=extended, idempotency_key=idempotency_key)
        except StoreUnavailableError:  # the store may have the response, and it does not run
            raise
        except ChatcacheError:  # perhaps because another gateway has used the key meanwhile
            target = await idempotency_key.find_target(gateway.opened_store(), principal.owner)
            if target is None:
                raise
            return target


@dataclass(frozen=True, slots=True)
class _RequestFields:
    """The fields of a request. `ignored`: names of those without effect. `compacts`: the reply is a summary."""

    response: ResponseFields
    sampling: SamplingFields
    thinking: ResponseThinkingFields
    ignored: tuple[str, ...]
    compacts: bool


def _read_fields(body: Mapping[str, Any]) -> _RequestFields:
    """Parse the fields of a request and check their combination.

    Raises: InvalidRequestError, UnsupportedParameterError.
    """
    fields, sampling = parse_fields(body, ResponseFields), parse_fields(body, SamplingFields)
    thinking = parse_fields(body, ResponseThinkingFields)
    ignored = unknown_fields(body, ResponseFields, SamplingFields, ResponseThinkingFields)
    if fields.prompt_cache_options is not None and fields.prompt_cache_options.prewarm:
        fields = msgspec.structs.replace(fields, generate=False)
    compacts = is_compaction(fields)
    if compacts:
        fields = to_summary_request(fields)
        if (sampling.n or 1) > 1 or sampling.beam_width is not None or sampling.use_beam_search:
            raise InvalidRequestError("a compaction has one candidate", param="n")
    if fields.background and fields.store is False:
        raise InvalidRequestError("background needs store: the response could not be retrieved", param="background")
    return _RequestFields(fields, sampling, thinking, ignored, compacts)


async def _start(
    gateway: Gateway,
    principal: Principal,
    body: Mapping[str, Any],
    extended: bool,
    idempotency_key: IdempotencyKey | None = None,
    unstored: Mapping[str, tuple[Message, ...]] = NONE_UNSTORED,
) -> LiveResponse:
    request_fields = _read_fields(body)
    fields, sampling = request_fields.response, request_fields.sampling
    model = await gateway.require_model(fields.model)
    tools = parse_response_tools(model, fields)
    thinking = parse_thinking(request_fields.thinking, model.service.thinking)
    request = await _find_turn(gateway, principal.owner, fields, tools, thinking, unstored)
    sampling_params = _sampling_params(gateway, model, request_fields, extended)
    cost = request_cost(sampling_params, sum(len(message["content"]) for message in request.input))
    async with gateway.admission.acquire(principal, cost) as ticket:
        with rename_error_params(prompt="input"):
            planned = await model.conversations.plan(request)
        if request_fields.compacts and len(planned.messages) == 1 + (planned.turn.instructions is not None):
            message = "input is required: there is no conversation to summarize"
            raise InvalidRequestError(message, param="input", code="missing_required_parameter")
        if planned.prefix is not None:  # a continued reply keeps its tools
            tools = replace(tools, schemas=argument_schemas(planned.request.functions) or None, limits=None)
        prompt = planned.prompt.token_ids
        sampling_params = clamp_max_tokens(sampling_params, len(prompt), gateway.max_model_len)
        params = constrain_to_tools(sampling_params, tools, model.service.reply_format, model.tokenizer, prompt)
        has_reasoning = sampling_params.structured_outputs is None or params is not sampling_params
        if has_reasoning:
            num_prefix = len(planned.prefix.ids) if planned.prefix is not None else 0
            params = limit_thinking(params, thinking, model.service.thinking, prompt, num_prefix)
        planned = _with_echo(gateway, planned, request_fields, params, tools, thinking, model.service.thinking)
        planned = await _with_diagnosis(gateway, principal, planned, fields)
        start, engine_request = model.service.start, _engine_request(gateway, principal, fields, planned, params)
        renamed = rename_constraint_param(sampling.structured_outputs, "text", "tools" if tools.limits else None)
        with rename_error_params(max_tokens="max_output_tokens", prompt="input"), renamed:
            reply = await start(
                engine_request, planned.prompt.key, planned.prefix, tools.schemas, has_reasoning, principal.owner
            )
        ticket.attach(reply)

    async def start_successor(successor: Mapping[str, Any]) -> str:
        return (await _start(gateway, principal, successor, extended)).id

    options = RunOptions(
        principal=principal,
        settings=response_settings(fields, sampling, request_fields.thinking),
        generate=fields.generate is not False,
        ttl_s=_ttl_s(gateway, fields),
        start_successor=start_successor,
        compacts=request_fields.compacts,
    )
    claim = idempotency_key.claim(planned.turn.id) if idempotency_key is not None else None
    record: ReplyRecord | None = None
    if gateway.recorder is not None and planned.request.store and options.generate:
        record = reply_record(planned, options, tools.schemas, cost, thinks=has_reasoning, extended=extended)
    opening = asyncio.create_task(_open_conversation(gateway, model, planned, reply, options, claim, record))
    opening.add_done_callback(lambda task: task.cancelled() or task.exception())
    return await asyncio.shield(opening)


async def continue_response(
    gateway: Gateway, request: GenerateRequest, data: bytes, num_events: int, num_takeovers: int
) -> bool:
    """Continue a response of a gateway that has ended; return whether this gateway runs it now. See `take_over`."""

    async def start_successor(principal: Principal, body: Mapping[str, Any], extended: bool) -> str:
        return (await _start(gateway, principal, body, extended)).id

    return await take_over(gateway, start_successor, request, data, num_events, num_takeovers)


async def _find_turn(
    gateway: Gateway,
    owner: str,
    fields: ResponseFields,
    tools: ToolUse,
    thinking: Thinking,
    unstored: Mapping[str, tuple[Message, ...]],
) -> TurnRequest:
    """Find what the request continues, and resolve the references of its input. Raises: any ChatcacheError."""
    await gateway.pending_saves.flush(
        fields.previous_response_id, fields.previous_item_id, conversation_id(fields.conversation)
    )
    reply_prefix = await find_running_reply(gateway, owner, fields)
    given = await resolve_references(gateway, owner, fields.input)
    request = build_turn_request(fields, given, owner, gateway.model_name, tools.functions, reply_prefix, thinking)
    if (history := unstored.get(fields.previous_response_id or "")) is not None:
        request = replace(request, input=(*history, *request.input), previous_response_id=None)
    return with_local_end(gateway, request)


def with_local_end(gateway: Gateway, request: TurnRequest) -> TurnRequest:
    """Note in the request whether the response that it continues has ended in this process."""
    previous = request.previous_response_id
    has_ended = previous is not None and gateway.responses.find(request.owner, previous) is not None
    return replace(request, has_ended=has_ended) if has_ended else request


def _sampling_params(gateway: Gateway, model: Model, fields: _RequestFields, extended: bool) -> Params:
    """Build the engine's parameters, before the prompt is planned.

    Raises: InvalidRequestError, UnsupportedParameterError.
    """
    route_params = _route_params(fields.response, fields.sampling, extended)
    with rename_error_params(max_tokens="max_output_tokens"):
        params = to_params(fields.sampling, route_params, model.tokenizer)
        params = clamp_max_tokens(params, 0, gateway.max_model_len)
    if fields.response.generate is False:
        return SamplingParams(temperature=0.0, max_tokens=1)  # the one token is discarded
    return params


def _with_echo(
    gateway: Gateway,
    planned: PlannedTurn,
    request_fields: _RequestFields,
    params: Params,
    tools: ToolUse,
    thinking: Thinking,
    controls: ThinkingControls,
) -> PlannedTurn:
    """Add the fields that the response object repeats to the turn."""
    fields, summary = request_fields.response, request_fields.thinking.summary
    ignored = [*thinking.ignored, *request_fields.ignored]
    if summary is not None and (request_fields.compacts or not controls.can_reason):
        ignored.insert(len(thinking.ignored), "reasoning.summary")
        summary = None
    echo = _echo_fields(fields, params, planned, tools, tuple(ignored))
    echo |= _echo_thinking(thinking, planned, summary)
    limit = clamped_limit(fields.max_output_tokens, params, len(planned.prompt.token_ids), gateway.max_model_len)
    if limit is not None:
        echo["max_output_tokens"] = limit
    turn = replace(planned.turn, echo=echo)
    if not planned.request.store:  # the response that it continues may not be stored either
        turn = replace(turn, previous_response_id=fields.previous_response_id)
    return replace(planned, turn=turn)


def _engine_request(
    gateway: Gateway, principal: Principal, fields: ResponseFields, planned: PlannedTurn, params: Params
) -> GenerateRequest:
    prefix = planned.request.running_prefix
    return GenerateRequest(
        request_id=planned.turn.id,
        prompt=planned.prompt.token_ids,
        params=params,
        namespace=principal.tenant,
        cache_salt=fields.cache_salt or "",
        num_public_tokens=planned.prompt.num_public_tokens,
        conversation_id=planned.conversation_id if planned.request.store else "",
        priority=gateway.priority(fields.priority),
        fork_of=ForkPoint(prefix.turn.id, prefix.index) if prefix is not None else None,
        explain=bool(fields.explain),
    )


async def _with_diagnosis(
    gateway: Gateway, principal: Principal, planned: PlannedTurn, fields: ResponseFields
) -> PlannedTurn:
    """Remember the prompt, and compare it with that of the response which the request names, if any."""
    given = fields.input if isinstance(fields.input, list) else ()
    record = PromptRecord(
        planned.messages,
        planned.request.functions,
        array("i", planned.prompt.token_ids),
        is_compacted=any(item.type == "compaction" for item in given),
    )
    options = fields.prompt_cache_options
    if options is not None and (earlier := options.comparison_response_id) is not None:
        diagnosis = await diagnose(gateway, principal, planned.prompt, record, earlier, fields.cache_salt or "")
        found = msgspec.to_builtins(response_diagnostics(diagnosis))
        planned = replace(
            planned, turn=replace(planned.turn, echo={**planned.turn.echo, "prompt_cache_diagnostics": found})
        )
    gateway.prompt_history.add(principal.owner, planned.turn.id, record)
    return planned


async def _open_conversation(
    gateway: Gateway,
    model: Model,
    planned: PlannedTurn,
    reply: Reply,
    options: RunOptions,
    claim: Claim | None,
    record: ReplyRecord | None,
) -> LiveResponse:
    try:
        conversation = await model.conversations.open(planned, claim)
    except BaseException:
        await reply.close()
        raise
    run = LiveResponse(
        gateway, model, planned, conversation, reply, options, record.encode if record is not None else None
    )
    await run.save_record()
    run.start()
    return run


def _ttl_s(gateway: Gateway, fields: ResponseFields) -> float | None:
    """How long the response continues without a reader; None means until it is complete."""
    if fields.store is False:
        return 0.0
    return None if fields.background else gateway.config.disconnect_grace_period_s


def _route_params(fields: ResponseFields, sampling: SamplingFields, extended: bool) -> RouteParams:
    for name in ("stream_beams", "explain"):
        if getattr(fields, name) and not extended:
            raise UnsupportedParameterError(f"{name} needs the subprotocol chatcache.v1", param=name)
    return RouteParams(
        max_tokens=fields.max_output_tokens,
        logprobs=_logprobs(fields),
        structured_outputs=structured_outputs(
            sampling.structured_outputs, text_format=fields.text.format if fields.text is not None else None
        ),
        stream_beams=bool(fields.stream_beams),
    )


async def find_running_reply(gateway: Gateway, owner: str, fields: ResponseFields) -> ReplyPrefix | None:
    """Return the prefix of a running reply that the request continues, up to `fork_at` if given.

    The reply may run on another gateway. Raises: InvalidRequestError, GatewayUnreachableError.
    """
    _check_fork(fields)
    item_id, response_id = fields.previous_item_id, fields.previous_response_id
    fork = (item_id, fields.fork_at, fields.fork_with)
    start: ReplyPrefix | None = None
    if item_id is not None:
        for run in gateway.responses.running(owner):
            start = start or await run.reply_prefix(*fork)
        if start is None and gateway.peers is not None:
            start = await gateway.peers.fork(owner, None, *fork)
    elif response_id is not None:
        logged = gateway.responses.find(owner, response_id)
        if logged is not None and logged.run is not None:
            start = await logged.run.reply_prefix(*fork)
        elif logged is None and gateway.peers is not None:
            start = await gateway.peers.fork(owner, response_id, *fork)
    if start is not None and not start.ids:
        name = "previous_item_id" if fields.previous_item_id is not None else "previous_response_id"
        raise InvalidRequestError(f"{name}: the response has no text yet", param=name, code="nothing_to_fork")
    return start


def _check_fork(fields: ResponseFields) -> None:
    """Check the combination of fork fields. Raises: InvalidRequestError."""
    if fields.fork_with is None:
        if fields.fork_at == 0:
            raise InvalidRequestError("fork_at must be at least 1, or 0 with fork_with", param="fork_at")
    elif fields.fork_at is None:
        raise InvalidRequestError("fork_with needs fork_at: the number of tokens before it", param="fork_with")
    elif fields.input is not None and fields.input != []:
        raise InvalidRequestError("fork_with continues a reply and cannot be combined with input", param="fork_with")


@asynccontextmanager
async def _taken_steers(gateway: Gateway, owner: str, body: Mapping[str, Any]) -> AsyncIterator[tuple[Steer, ...]]:
    """Take the steering input that waits at the previous response for function outputs; give it back after an error.

    Other gateways are only asked if the request has outputs. Raises: GatewayUnreachableError, StoreUnavailableError.
    """
    previous = body.get("previous_response_id")
    logged = gateway.responses.find(owner, previous) if isinstance(previous, str) else None
    if logged is not None:
        steers, logged.steers = logged.steers, ()
        try:
            yield steers
        except BaseException:
            logged.steers = (*steers, *logged.steers)
            raise
    elif gateway.peers is not None and isinstance(previous, str) and has_function_outputs(body.get("input")):
        async with gateway.peers.taken_steers(owner, previous) as steers:
            yield steers
    else:
        yield ()


def parse_response_tools(model: Model, fields: ResponseFields) -> ToolUse:
    """Parse the tool fields. Raises: InvalidRequestError, UnsupportedParameterError."""
    return parse_tool_choice(model.service.reply_format, fields.tools, fields.tool_choice, fields.parallel_tool_calls)


async def resolve_references(
    gateway: Gateway, owner: str, given: str | list[MessageFields] | None
) -> str | list[MessageFields] | None:
    """Replace each `item_reference` of an `input` by the stored item of this owner that it names, and files by text.

    Raises: InvalidRequestError with the field of a reference to an unknown item, or of a file that is not readable.
    """
    if given is None or isinstance(given, str):
        return given
    resolved: list[MessageFields] = []
    for at, item in enumerate(given):
        if item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None):
            item = await _stored_item(gateway, owner, item.id or "", f"input[{at}].id")
        resolved.append(item)
    return await replace_files(gateway, owner, resolved, "input")


async def _stored_item(gateway: Gateway, owner: str, item_id: str, param: str) -> MessageFields:
    """Return a stored item as an input item. Raises: InvalidRequestError."""
    message_id = message_id_of(item_id)
    try:
        store = gateway.opened_store()
        await gateway.pending_saves.flush(message_id)
        tree = await store.load_path(owner, await store.locate(owner, message_id), message_id, limit=1)
        return msgspec.convert(msgspec.to_builtins(find_item(tree, item_id)[1]), MessageFields)
    except NotFoundError:
        raise InvalidRequestError(f"{param}: no stored item {item_id[:128]!r}", param=param) from None


def build_turn_request(
    fields: ResponseFields,
    given: str | list[MessageFields] | None,
    owner: str,
    model_name: str,
    functions: tuple[Function, ...] = (),
    reply_prefix: ReplyPrefix | None = None,
    thinking: Thinking = NO_THINKING,
) -> TurnRequest:
    """Convert the fields of a request into a turn request. `given`: its input, without references.

    Raises: InvalidRequestError, UnsupportedParameterError.
    """
    _check_fork(fields)
    messages = input_messages(given)
    reply_start = ""
    if fields.continue_final_message:
        messages, reply_start = messages[:-1], _final_text(messages)
    return TurnRequest(
        owner=owner,
        model=model_name,
        input=messages,
        instructions=fields.instructions,
        conversation_id=conversation_id(fields.conversation),
        previous_response_id=fields.previous_response_id,
        previous_item_id=fields.previous_item_id,
        store=fields.store is not False,
        fork_at=fields.fork_at,
        fork_with=fields.fork_with,
        rev=fields.rev,
        running_prefix=reply_prefix,
        functions=functions,
        template_kwargs=thinking.kwargs,
        preserve_thinking=thinking.preserves,
        reply_start=reply_start,
    )


def _final_text(messages: Sequence[Message]) -> str:
    """Return the text of the last message, with which the reply is to begin.

    Raises: InvalidRequestError unless it is an assistant's text.
    """
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or set(last) != {"role", "content"} or not last["content"]:
        raise InvalidRequestError(
            "continue_final_message: the last message of the input must be an assistant's text",
            param="continue_final_message",
        )
    return last["content"]


def _logprobs(fields: ResponseFields) -> int | None:
    if LOGPROBS in (fields.include or ()):
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise InvalidRequestError(f'top_logprobs needs include: ["{LOGPROBS}"]', param="top_logprobs")
    return None


def _echo_fields(
    fields: ResponseFields, params: Params, planned: PlannedTurn, tools: ToolUse, ignored: tuple[str, ...]
) -> dict[str, object]:
    """Return the request fields, as validated, that the response object repeats."""
    stored = planned.request.store
    echo: dict[str, object] = {
        "conversation": {"id": planned.conversation_id} if stored else None,
        "input_item_ids": [item.id for item in planned.inputs] if stored else [],
        "forked_item_id": planned.cut_item.id if planned.cut_item is not None and stored else None,
        "store": stored,
        "background": bool(fields.background),
        "metadata": fields.metadata or {},
        "max_output_tokens": fields.max_output_tokens,
        "top_logprobs": fields.top_logprobs or 0,
        "n": num_candidates(params),
        "text": {"format": fields.text.format if fields.text and fields.text.format else {"type": "text"}},
        "tools": [function.to_echo() for function in planned.request.functions],
        "tool_choice": tools.choice,
        "parallel_tool_calls": tools.parallel,
        "temperature": None,
        "top_p": None,
    }
    if isinstance(params, SamplingParams):
        echo |= {"temperature": params.temperature, "top_p": params.top_p, "distinct": params.distinct}
    else:
        names = ("beam_width", "length_penalty", "num_beam_groups", "diversity_penalty")
        echo |= {name: getattr(params, name) for name in names}
    if params.logprobs is not None:
        echo[HAS_LOGPROBS] = True
    return echo | ({"ignored": ignored} if ignored else {})


def _echo_thinking(thinking: Thinking, planned: PlannedTurn, summary: str | None) -> dict[str, object]:
    """Return the reasoning controls that the response object repeats, and those that later turns compare."""
    request = planned.request
    echo: dict[str, object] = {"reasoning": {"effort": thinking.effort, "summary": summary}}
    if thinking.budget is not None:
        echo["thinking_token_budget"] = thinking.budget
    if request.template_kwargs:
        echo[KWARGS] = dict(request.template_kwargs)
    return echo | ({PRESERVE_THINKING: True} if request.preserve_thinking else {})
