"""Records of running responses, from which another gateway continues them when theirs has ended.

    gateway A: submit -> store the input -> ReplyRecord --- A ends --- gateway B: take over in the store -> LiveResponse

B reads the events of the engine from the first on, in the same batches, so its event log has the same frames. Steering
input is part of the record, since it comes from a client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from chatcache.conversations.fork_points import ReplyPrefix, TurnRequest
from chatcache.conversations.prompt import Divergence, Prompt
from chatcache.conversations.store import StoreUnavailableError
from chatcache.conversations.tree import Turn
from chatcache.conversations.turns import PlannedTurn
from chatcache.errors import ChatcacheError, NotFoundError
from chatcache.gateway.auth.principal import Principal
from chatcache.gateway.context import Gateway
from chatcache.gateway.limits.rate_limits import RequestCost
from chatcache.gateway.responses.run import LiveResponse, RunOptions
from chatcache.gateway.responses.steering import Steer, restored_steer
from chatcache.types.request import GenerateRequest

log = logging.getLogger(__name__)

RETRY_S = 0.2  # while the store does not answer

StartSuccessor = Callable[[Principal, Mapping[str, Any], bool], Awaitable[str]]


class RecordedSteer(msgspec.Struct, frozen=True, array_like=True):
    """Steering input, and the sequence number of the event that accepted it."""

    sequence_number: int
    id: str
    input_value: Any


class ReplyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway needs to continue a response, besides the request to the engine and what the store has.

    `rendering`, `functions`, `thinks`: see `ChatService.start`. `extended`: the client reads `chatcache.v1` frames.
    `settings`, `ttl_s`: see `RunOptions`. `cost`: what was reserved. The others are of the turn request.
    """

    principal: Principal
    turn: Turn
    conversation_id: str
    rendering: str
    divergence: Divergence | None
    prefix: ReplyPrefix | None
    reply_start: str
    fork_with: int | None
    functions: dict[str, Any] | None
    thinks: bool
    settings: dict[str, Any]
    ttl_s: float | None
    extended: bool
    compacts: bool
    cost: RequestCost
    steers: tuple[RecordedSteer, ...] = ()

    def encode(self, steers: Sequence[tuple[int, Steer]] = ()) -> bytes:
        """Encode the record with the steering input of the response, each with its sequence number."""
        recorded = tuple(RecordedSteer(number, steer.id, steer.input_value) for number, steer in steers)
        return msgspec.msgpack.encode(msgspec.structs.replace(self, steers=recorded))


_records = msgspec.msgpack.Decoder(ReplyRecord)


def reply_record(
    planned: PlannedTurn,
    options: RunOptions,
    functions: Mapping[str, Any] | None,
    cost: RequestCost,
    *,
    thinks: bool,
    extended: bool,
) -> ReplyRecord:
    """Return the record of a response that is about to run."""
    return ReplyRecord(
        principal=options.principal,
        turn=planned.turn,
        conversation_id=planned.conversation_id,
        rendering=planned.prompt.key,
        divergence=planned.prompt.divergence,
        prefix=planned.prefix,
        reply_start=planned.request.reply_start,
        fork_with=planned.request.fork_with,
        functions=dict(functions) if functions is not None else None,
        thinks=thinks,
        settings=dict(options.settings),
        ttl_s=options.ttl_s,
        extended=extended,
        compacts=options.compacts,
        cost=cost,
    )


async def take_over(
    gateway: Gateway,
    start_successor: StartSuccessor,
    request: GenerateRequest,
    data: bytes,
    num_events: int,
    num_takeovers: int,
) -> bool:
    """Continue a response of a gateway that has ended; return whether this gateway runs it now.

    `start_successor` starts the response that answers steering input, for a principal. `num_events`: of the engine,
    that the response has had. `num_takeovers`: of the response, this one included. Readers wait until the response
    has had its events again.
    """
    is_running = False
    gateway.responses.start_restoring(request.request_id)
    try:
        record = _records.decode(data)
        attempt = partial(_take_over, gateway, start_successor, request, record, num_events, num_takeovers)
        is_running = await _retry_while_store_is_down(attempt, request.request_id)
    except (ChatcacheError, msgspec.MsgspecError) as error:
        log.error("response %s cannot be taken over: %s", request.request_id, error)
    except Exception:
        log.exception("response %s cannot be taken over", request.request_id)
    finally:
        if not is_running:
            gateway.responses.end_restoring(request.request_id)
            if gateway.peers is not None:
                gateway.peers.give_up(request.request_id)
    return is_running


async def _retry_while_store_is_down(attempt: Callable[[], Awaitable[bool]], response_id: str) -> bool:
    """Repeat a takeover until the store answers: after a failover it may do so later than the bus."""
    while True:
        try:
            return await attempt()
        except StoreUnavailableError as error:
            log.warning("response %s is taken over later: %s", response_id, error)
            await asyncio.sleep(RETRY_S)


async def _take_over(
    gateway: Gateway,
    start_successor: StartSuccessor,
    request: GenerateRequest,
    record: ReplyRecord,
    num_events: int,
    num_takeovers: int,
) -> bool:
    if gateway.model is None or gateway.peers is None or gateway.admission.is_closed:
        return False
    principal, turn = record.principal, record.turn
    try:
        conversation = await gateway.opened_store().get(principal.owner, record.conversation_id)
    except NotFoundError:
        return False  # it was deleted
    if not await gateway.peers.take_over(record.conversation_id, turn.id, num_takeovers):
        return False  # it has ended, or a later gateway has taken it over
    planned = PlannedTurn(
        request=TurnRequest(principal.owner, turn.model, fork_with=record.fork_with, reply_start=record.reply_start),
        turn=turn,
        messages=(),
        prompt=Prompt("", (), divergence=record.divergence),
        inputs=(),
        conversation=conversation,
        conversation_id=conversation.id,
        prefix=record.prefix,
    )
    reply = gateway.model.service.resume(
        request, record.rendering, record.prefix, record.functions, record.thinks, principal.owner
    )
    gateway.admission.adopt(principal, record.cost).attach(reply)
    options = RunOptions(
        principal=principal,
        settings=record.settings,
        generate=True,
        ttl_s=record.ttl_s,
        start_successor=lambda body: start_successor(principal, body, record.extended),
        compacts=record.compacts,
    )
    run = LiveResponse(gateway, gateway.model, planned, conversation, reply, options, record.encode)
    steers = [(each.sequence_number, restored_steer(each.id, each.input_value)) for each in record.steers]
    run.restore(num_events, steers)
    run.start()
    gateway.metrics.taken_over.inc()
    log.warning("response %s is taken over from a gateway that has ended", turn.id)
    return True
