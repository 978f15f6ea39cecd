"""From a request's body to a response under way, whatever the transport."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from chatcache.conversations.fork_points import ReplyPrefix, TurnRequest
from chatcache.conversations.prompt import Function
from chatcache.conversations.replies.service import Reply, num_candidates
from chatcache.conversations.store import Claim, IdempotencyConflictError
from chatcache.conversations.turns import PlannedTurn
from chatcache.errors import InvalidRequestError, UnsupportedParameterError
from chatcache.gateway.api.idempotency import IdempotencyKey
from chatcache.gateway.api.messages import input_messages
from chatcache.gateway.api.params import (
    RouteParams,
    ToolUse,
    constrain_to_tools,
    conversation_id,
    parse_tool_choice,
    rename_constraint_param,
    rename_error_params,
    structured_outputs,
    to_params,
)
from chatcache.gateway.auth.principal import Principal
from chatcache.gateway.context import Gateway, Model
from chatcache.gateway.limits.admission import request_cost
from chatcache.gateway.responses.registry import LoggedResponse, Run
from chatcache.gateway.responses.run import LiveResponse, RunOptions
from chatcache.gateway.responses.steering import queued_input
from chatcache.gateway.schemas.fields import parse_fields, unknown_fields
from chatcache.gateway.schemas.requests import ResponseFields, SamplingFields
from chatcache.types.request import ForkPoint, GenerateRequest, Params, SamplingParams

LOGPROBS = "message.output_text.logprobs"


async def start_response(
    gateway: Gateway,
    principal: Principal,
    body: Mapping[str, Any],
    *,
    watched: bool = False,
    once: IdempotencyKey | None = None,
) -> LiveResponse:
    """Validate, plan, submit, store the input; from here on the run goes by itself.

    `watched`: whoever asked reads `chatcache.v1` frames too. Once the engine has the request, it begins even if whoever
    asked stops waiting for it. Steering input that waits for the same previous response comes in front of the body's.
    Raises: any ChatcacheError; then nothing was stored (StoreUnavailableError: perhaps) and nothing runs.
    """
    steered = _steered_before(gateway, principal.owner, body)
    if steered is None:
        return await _start(gateway, principal, body, watched, once)
    steers, steered.steers = steered.steers, ()
    try:
        return await _start(
            gateway, principal, {**body, "input": queued_input(steers, body.get("input"))}, watched, once
        )
    except BaseException:
        steered.steers = steers
        raise


async def start_idempotent_response(
    gateway: Gateway, principal: Principal, body: Mapping[str, Any], once: IdempotencyKey, *, watched: bool = False
) -> LiveResponse | str:
    """`start_response`, or the id of the response that the same request started before.

    Raises: IdempotencyConflictError for a key that came with another request.
    """
    if body.get("store") is False:
        raise InvalidRequestError("an Idempotency-Key needs store: nothing else can be answered again", param="store")
    async with gateway.idempotency_locks.get(principal.owner, once):
        found = await once.find_target(gateway.opened_store(), principal.owner)
        if found is not None:
            return found
        try:
            return await start_response(gateway, principal, body, watched=watched, once=once)
        except IdempotencyConflictError as taken:  # through another gateway
            return once.resolve(taken.claim)


async def _start(
    gateway: Gateway, principal: Principal, body: Mapping[str, Any], watched: bool, once: IdempotencyKey | None = None
) -> LiveResponse:
    fields, sampling = parse_fields(body, ResponseFields), parse_fields(body, SamplingFields)
    ignored = unknown_fields(body, ResponseFields, SamplingFields)
    if fields.background and fields.store is False:
        raise InvalidRequestError("background needs store: nobody could read the response", param="background")
    model = await gateway.require_model(fields.model)
    await gateway.pending_saves.flush(
        fields.previous_response_id, fields.previous_item_id, conversation_id(fields.conversation)
    )
    running = await find_running_reply(gateway, principal.owner, fields)
    use = parse_response_tools(model, fields)
    request = build_turn_request(fields, principal.owner, gateway.model_name, use.functions, running)
    asked = to_params(sampling, _asked(fields, sampling, watched), model.tokenizer.vocab_size)
    if fields.generate is False:
        asked = SamplingParams(temperature=0.0, max_tokens=1)  # its one token is thrown away
    work = request_cost(asked, sum(len(message["content"]) for message in request.input))
    async with gateway.admission.acquire(principal, work) as permit:
        planned = await model.conversations.plan(request)
        if planned.prefix is not None:  # a reply goes on as it began
            use = replace(use, names=frozenset(each.name for each in planned.request.functions) or None, limits=None)
        params = constrain_to_tools(asked, use, model.service.reply_format, model.tokenizer, planned.prompt.token_ids)
        thinks = asked.structured_outputs is None or params is not asked
        planned = replace(planned, turn=replace(planned.turn, echo=_echo(fields, params, planned, use, ignored)))
        engine_request = GenerateRequest(
            request_id=planned.turn.id,
            prompt=planned.prompt.token_ids,
            params=params,
            namespace=principal.tenant,
            num_public_tokens=planned.prompt.num_public_tokens,
            conversation_id=planned.conversation_id if request.store else "",
            priority=gateway.priority(fields.priority),
            fork_of=ForkPoint(running.turn.id, running.index) if running is not None else None,
            explain=bool(fields.explain),
        )
        start = model.service.start
        named = rename_constraint_param(sampling.structured_outputs, "text", "tools" if use.limits else None)
        with rename_error_params(max_tokens="max_output_tokens"), named:
            reply = await start(engine_request, planned.prompt.text, planned.prefix, use.names, thinks, principal.owner)
        permit.attach(reply)

    async def succeed(successor: Mapping[str, Any]) -> str:
        return (await _start(gateway, principal, successor, watched)).id

    order = RunOptions(principal, body, fields.generate is not False, _ttl_s(gateway, fields), succeed)
    claim = once.claim(planned.turn.id) if once is not None else None
    opening = asyncio.create_task(_open(gateway, model, planned, reply, order, claim))
    opening.add_done_callback(lambda task: task.cancelled() or task.exception())
    return await asyncio.shield(opening)


async def _open(
    gateway: Gateway, model: Model, planned: PlannedTurn, reply: Reply, order: RunOptions, claim: Claim | None
) -> LiveResponse:
    try:
        conversation = await model.conversations.open(planned, claim)
    except BaseException:
        await reply.close()
        raise
    run = LiveResponse(gateway, model, planned, conversation, reply, order)
    run.start()
    return run


def _ttl_s(gateway: Gateway, fields: ResponseFields) -> float | None:
    """How long the response outlives its last reader; None: until it is done."""
    if fields.store is False:
        return 0.0
    return None if fields.background else gateway.config.disconnect_grace_period_s


def _asked(fields: ResponseFields, sampling: SamplingFields, watched: bool) -> RouteParams:
    for name in ("stream_beams", "explain"):
        if getattr(fields, name) and not watched:
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
    """The reply to continue, where it is still being generated: as far as it goes, or up to `fork_at`.

    Raises: InvalidRequestError.
    """
    _check_fork(fields)
    found: tuple[Run, int] | None = None
    if fields.previous_item_id is not None:
        for run in gateway.responses.running(owner):
            index = run.candidate_index(fields.previous_item_id)
            if index is not None and run.log.terminal is None:
                found = run, index
    elif fields.previous_response_id is not None:
        logged = gateway.responses.find(owner, fields.previous_response_id)
        if logged is not None and logged.run is not None and logged.log.terminal is None:
            found = logged.run, logged.run.first_active_candidate
    if found is None:
        return None
    start = await found[0].reply_prefix(found[1], fields.fork_at, fields.fork_with)
    if not start.ids:
        name = "previous_item_id" if fields.previous_item_id is not None else "previous_response_id"
        raise InvalidRequestError(f"{name}: nothing has been said there yet", param=name, code="nothing_to_fork")
    return start


def _check_fork(fields: ResponseFields) -> None:
    """Raises: InvalidRequestError for fields of a fork that do not go together."""
    if fields.fork_with is None:
        if fields.fork_at == 0:
            raise InvalidRequestError("fork_at must be at least 1, or 0 with fork_with", param="fork_at")
    elif fields.fork_at is None:
        raise InvalidRequestError("fork_with needs fork_at: behind how many tokens", param="fork_with")
    elif fields.input is not None and fields.input != []:
        raise InvalidRequestError("fork_with goes on with a reply: leave input out", param="fork_with")


def _steered_before(gateway: Gateway, owner: str, body: Mapping[str, Any]) -> LoggedResponse | None:
    """The response to continue, if steering input waits there for function outputs."""
    previous = body.get("previous_response_id")
    logged = gateway.responses.find(owner, previous) if isinstance(previous, str) else None
    return logged if logged is not None and logged.steers else None


def parse_response_tools(model: Model, fields: ResponseFields) -> ToolUse:
    """What the request says of tools. Raises: InvalidRequestError, UnsupportedParameterError."""
    return parse_tool_choice(model.service.reply_format, fields.tools, fields.tool_choice, fields.parallel_tool_calls)


def build_turn_request(
    fields: ResponseFields,
    owner: str,
    model_name: str,
    functions: tuple[Function, ...] = (),
    running: ReplyPrefix | None = None,
) -> TurnRequest:
    """Where and what. Raises: InvalidRequestError, UnsupportedParameterError."""
    _check_fork(fields)
    return TurnRequest(
        owner=owner,
        model=model_name,
        input=input_messages(fields.input),
        instructions=fields.instructions,
        conversation_id=conversation_id(fields.conversation),
        previous_response_id=fields.previous_response_id,
        previous_item_id=fields.previous_item_id,
        store=fields.store is not False,
        fork_at=fields.fork_at,
        fork_with=fields.fork_with,
        rev=fields.rev,
        running_prefix=running,
        functions=functions,
    )


def _logprobs(fields: ResponseFields) -> int | None:
    if LOGPROBS in (fields.include or ()):
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise InvalidRequestError(f'top_logprobs needs include: ["{LOGPROBS}"]', param="top_logprobs")
    return None


def _echo(
    fields: ResponseFields, params: Params, planned: PlannedTurn, use: ToolUse, ignored: tuple[str, ...]
) -> dict[str, object]:
    """Fields of the request, as understood, that the response object repeats."""
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
        "tool_choice": use.choice,
        "parallel_tool_calls": use.parallel,
        "temperature": None,
        "top_p": None,
    }
    if isinstance(params, SamplingParams):
        echo |= {"temperature": params.temperature, "top_p": params.top_p, "distinct": params.distinct}
    else:
        names = ("beam_width", "length_penalty", "num_beam_groups", "diversity_penalty")
        echo |= {name: getattr(params, name) for name in names}
    return echo | ({"ignored": ignored} if ignored else {})
