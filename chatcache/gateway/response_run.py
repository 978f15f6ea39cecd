"""One response from request to stored answer, on the server's own time: connections only read its log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from chatcache.chat.coalesce import coalesced
from chatcache.chat.conversations import PlannedTurn, TurnRequest
from chatcache.chat.events import ReplyBeams, ReplyDelta, ReplyDone, ReplyEvent, ReplyFinished, ReplyStarted
from chatcache.chat.forks import ReplyStart
from chatcache.chat.service import Reply, num_candidates
from chatcache.chat.tree import FAILED, Conversation, Usage
from chatcache.errors import ChatcacheError, EngineFault, InvalidRequest, NotFound, UnsupportedParameter
from chatcache.gateway.context import Gateway, Model
from chatcache.gateway.errors import INTERNAL
from chatcache.gateway.fields import read, unknown_fields
from chatcache.gateway.heads import conversation_json
from chatcache.gateway.lifetimes import Lifetime
from chatcache.gateway.metering import metered
from chatcache.gateway.params import Asked, conversation_id, input_messages, known_as, to_params
from chatcache.gateway.response_frames import ResponseFrames
from chatcache.gateway.response_log import ResponseLog
from chatcache.gateway.response_registry import Receipt, Run
from chatcache.gateway.structured import named_after, structured_outputs
from chatcache.gateway.wire import ResponseFields, SamplingFields
from chatcache.types import ForkPoint, GenerateRequest, Params, SamplingParams

log = logging.getLogger(__name__)

LOGPROBS = "message.output_text.logprobs"
_COALESCE_S = 0.033


async def start_response(
    gateway: Gateway, owner: str, body: Mapping[str, Any], *, watched: bool = False
) -> ResponseRun:
    """Validate, plan, submit, store the input; from here on the run goes by itself.

    `watched`: whoever asked reads `chatcache.v1` frames too.
    Raises: any ChatcacheError; then nothing was stored and nothing runs.
    """
    fields, sampling = read(body, ResponseFields), read(body, SamplingFields)
    ignored = unknown_fields(body, ResponseFields, SamplingFields)
    if fields.background and fields.store is False:
        raise InvalidRequest("background needs store: nobody could read the response", param="background")
    model = await gateway.ready(fields.model)
    running = await _running_reply(gateway, owner, fields)
    request = turn_request(fields, owner, gateway.model_name, running)
    params = to_params(sampling, _asked(fields, sampling, watched), model.tokenizer.vocab_size)
    planned = await model.conversations.plan(request)
    planned = replace(planned, turn=replace(planned.turn, echo=_echo(fields, params, planned, ignored)))
    engine_request = GenerateRequest(
        request_id=planned.turn.id,
        prompt=planned.prompt.token_ids,
        params=params,
        namespace=owner,
        num_public_tokens=planned.prompt.num_public_tokens,
        conversation_id=planned.conversation_id if request.store else "",
        priority=gateway.priority(fields.priority),
        fork_of=ForkPoint(running.turn.id, running.index) if running is not None else None,
    )
    with known_as(max_tokens="max_output_tokens"), named_after(sampling.structured_outputs, "text"):
        reply = await model.service.start(engine_request, planned.prompt.text, planned.prefix)
    try:
        conversation = await model.conversations.open(planned)
    except BaseException:
        await reply.close()
        raise
    run = ResponseRun(gateway, model, planned, conversation, reply, ttl_s=_ttl_s(gateway, fields))
    run.begin()
    return run


class ResponseRun:
    """A response under way. `log` is its whole story; `cancel` ends it early, from any connection."""

    def __init__(
        self,
        gateway: Gateway,
        model: Model,
        planned: PlannedTurn,
        conversation: Conversation | None,
        reply: Reply,
        *,
        ttl_s: float | None,
    ) -> None:
        self.id = planned.turn.id
        self.owner = planned.request.owner
        self.conversation_id = conversation.id if conversation is not None else None
        self.log = ResponseLog(self.id)
        self._gateway = gateway
        self._model = model
        self._planned = planned
        self._conversation = conversation
        self._reply = reply
        self._frames = ResponseFrames(self.log, planned.turn, model.tokenizer, reply.request.params)
        self._lifetime = Lifetime(self.log, ttl_s, self.cancel)
        self._cancelled_s: float | None = None
        self._num_tokens_at_cancel = 0
        self._receipt: Receipt | None = None

    def begin(self) -> None:
        """Start the task that does the work; the gateway keeps it until it is over."""
        self._gateway.responses.begin(self)
        self._frames.created()
        if self._conversation is not None:
            self._tell(self._conversation)
        self._lifetime.begin()
        self.task = asyncio.create_task(self._work(), name=self.id)

    def index_of(self, item_id: str) -> int | None:
        """Which candidate will be stored as that message."""
        return self._frames.item_ids.index(item_id) if item_id in self._frames.item_ids else None

    async def start_of(self, index: int, num_tokens: int | None) -> ReplyStart:
        """Candidate `index` as far as it goes now, or its first tokens. Raises: InvalidRequest."""
        candidate = self._reply.candidates[index]
        ids = candidate.first_ids(num_tokens)  # now; it grows meanwhile
        return await asyncio.to_thread(candidate.start, self._planned.turn, ids)

    async def cancel(self) -> Receipt | None:
        """End it within one engine step, and wait for that. The receipt; None if it had ended by itself."""
        if self._cancelled_s is None:
            self._cancelled_s = time.perf_counter()
            self._num_tokens_at_cancel = self._reply.num_tokens
        await self._reply.cancel()
        await asyncio.wait([self.task])
        return self._receipt

    async def _work(self) -> None:
        try:
            async for event in coalesced(metered(self._reply, self._gateway.metrics), _COALESCE_S):
                await self._take(event)
            if self.log.terminal is None:
                raise EngineFault("the engine stopped without saying why")
        except Exception as error:
            await self._fail(error)
        finally:
            if self.log.terminal is None:  # this task was cancelled
                self._frames.failed(INTERNAL)
            self._lifetime.stop()
            self.log.close()
            self._gateway.responses.end(self.id, keep=self._conversation is not None)
            await self._reply.close()

    async def _take(self, event: ReplyEvent) -> None:
        if isinstance(event, ReplyStarted):
            self._frames.started(event)
        elif isinstance(event, ReplyDelta):
            self._frames.delta(event)
        elif isinstance(event, ReplyBeams):
            self._frames.beams(event)
        elif isinstance(event, ReplyDone):
            self._frames.done(event)
        else:
            await self._finish(event)

    async def _finish(self, event: ReplyFinished) -> None:
        """Store, then announce: who has read the terminal frame can rely on the tree."""
        usage = Usage(event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens)
        await self._store(self._frames.status(event), usage)
        if event.cancelled:
            self._receipt = self._stopped(event)
        self._frames.finished(event, self._receipt)

    async def _fail(self, error: Exception) -> None:
        if not isinstance(error, ChatcacheError):
            log.error("%s failed", self.id, exc_info=error)
        if self.log.terminal is not None:
            return
        self._frames.failed(error if isinstance(error, ChatcacheError) else INTERNAL)
        await self._store_failure()

    async def _store_failure(self) -> None:
        """Store that it failed, if anything can be stored: the store itself may be what failed."""
        try:
            await self._store(FAILED, None)
        except NotFound:
            log.info("%s: its conversation was deleted under it", self.id)
        except Exception:
            log.exception("%s: that it failed could not be stored", self.id)

    async def _store(self, status: str, usage: Usage | None) -> None:
        if self._conversation is None:
            return
        conversation = await self._model.conversations.settle(
            self._conversation, self._planned, self._frames.outputs, status, usage
        )
        self._tell(conversation)

    def _tell(self, conversation: Conversation) -> None:
        """Tell the readers, and whoever subscribed, how the conversation stands now."""
        self.log.note("conversation.updated", conversation=conversation_json(conversation))
        self._gateway.hub.changed(conversation)

    def _stopped(self, event: ReplyFinished) -> Receipt:
        """What stopping cost and gave back. Without a cancel of ours the server was closing: nothing to measure."""
        latency_s, num_late = 0.0, 0
        if self._cancelled_s is not None:
            latency_s = time.perf_counter() - self._cancelled_s
            num_late = self._reply.num_tokens - self._num_tokens_at_cancel
        self._gateway.metrics.stop_latency.observe(latency_s)
        self._gateway.metrics.tokens_after_stop.inc(num_late)
        return {
            "tokens_after_stop": num_late,
            "pages_freed": event.num_pages_freed,
            "stop_latency_ms": round(latency_s * 1000, 3),
        }


def _ttl_s(gateway: Gateway, fields: ResponseFields) -> float | None:
    """How long the response outlives its last reader; None: until it is done."""
    if fields.store is False:
        return 0.0
    return None if fields.background else gateway.config.detach_ttl_s


def _asked(fields: ResponseFields, sampling: SamplingFields, watched: bool) -> Asked:
    if fields.stream_beams and not watched:
        raise UnsupportedParameter("stream_beams needs the subprotocol chatcache.v1", param="stream_beams")
    return Asked(
        max_tokens=fields.max_output_tokens,
        logprobs=_logprobs(fields),
        structured_outputs=structured_outputs(
            sampling.structured_outputs, text_format=fields.text.format if fields.text is not None else None
        ),
        stream_beams=bool(fields.stream_beams),
    )


async def _running_reply(gateway: Gateway, owner: str, fields: ResponseFields) -> ReplyStart | None:
    """The reply to continue, where it is still being generated: as far as it goes, or up to `fork_at`.

    Raises: InvalidRequest.
    """
    found: tuple[Run, int] | None = None
    if fields.previous_item_id is not None:
        for run in gateway.responses.running(owner):
            index = run.index_of(fields.previous_item_id)
            if index is not None:
                found = run, index
    elif fields.previous_response_id is not None:
        logged = gateway.responses.find(owner, fields.previous_response_id)
        found = (logged.run, 0) if logged is not None and logged.run is not None else None
    if found is None:
        return None
    start = await found[0].start_of(found[1], fields.fork_at)
    if not start.ids:
        name = "previous_item_id" if fields.previous_item_id is not None else "previous_response_id"
        raise InvalidRequest(f"{name}: nothing has been said there yet", param=name, code="nothing_to_fork")
    return start


def turn_request(fields: ResponseFields, owner: str, model_name: str, running: ReplyStart | None = None) -> TurnRequest:
    """Where and what. Raises: InvalidRequest, UnsupportedParameter."""
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
        running=running,
    )


def _logprobs(fields: ResponseFields) -> int | None:
    if LOGPROBS in (fields.include or ()):
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise InvalidRequest(f'top_logprobs needs include: ["{LOGPROBS}"]', param="top_logprobs")
    return None


def _echo(fields: ResponseFields, params: Params, planned: PlannedTurn, ignored: tuple[str, ...]) -> dict[str, object]:
    """Fields of the request, as understood, that the response object repeats."""
    stored = planned.request.store
    echo: dict[str, object] = {
        "conversation": {"id": planned.conversation_id} if stored else None,
        "input_item_ids": [item.id for item in planned.inputs] if stored else [],
        "forked_item_id": planned.cut.id if planned.cut is not None and stored else None,
        "store": stored,
        "background": bool(fields.background),
        "metadata": fields.metadata or {},
        "max_output_tokens": fields.max_output_tokens,
        "top_logprobs": fields.top_logprobs or 0,
        "n": num_candidates(params),
        "text": {"format": fields.text.format if fields.text and fields.text.format else {"type": "text"}},
        "temperature": None,
        "top_p": None,
    }
    if isinstance(params, SamplingParams):
        echo |= {"temperature": params.temperature, "top_p": params.top_p, "distinct": params.distinct}
    else:
        names = ("beam_width", "length_penalty", "num_beam_groups", "diversity_penalty")
        echo |= {name: getattr(params, name) for name in names}
    return echo | ({"ignored": ignored} if ignored else {})
