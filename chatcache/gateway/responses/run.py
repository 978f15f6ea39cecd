"""A response under way, on the server's own time: connections only read its log.

Candidates of a running response that are given up one by one: who may be, and what each receipt says.

How long a response goes on that nobody reads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chatcache.conversations.fork_points import ReplyPrefix
from chatcache.conversations.replies.events import (
    DeltaBatcher,
    ReplyBeams,
    ReplyDelta,
    ReplyDone,
    ReplyFinished,
    ReplyStarted,
)
from chatcache.conversations.replies.service import Reply, is_ranked
from chatcache.conversations.store import StoreUnavailableError
from chatcache.conversations.tree import COMPLETED, FAILED, Conversation, Usage, main_output
from chatcache.conversations.turns import PlannedTurn
from chatcache.errors import ChatcacheError, EngineError, InvalidRequestError, NotFoundError, UnsupportedParameterError
from chatcache.gateway.auth.principal import Principal
from chatcache.gateway.context import Gateway, Model
from chatcache.gateway.errors import INTERNAL_ERROR
from chatcache.gateway.metrics import Metrics, record_reply_metrics
from chatcache.gateway.responses.event_log import ResponseLog
from chatcache.gateway.responses.events import ResponseEventWriter, to_usage
from chatcache.gateway.responses.steering import (
    Steer,
    SteerQueue,
    SteerRefusedError,
    not_steerable_error,
    required_input,
    steer_failed_fields,
    steer_json,
    successor_body,
)
from chatcache.gateway.schemas import responses as schemas
from chatcache.gateway.schemas.responses import Receipt
from chatcache.types.events import FINISH_CANCELLED


@dataclass(slots=True)
class _Drop:
    """One that was asked for. `receipt`: None for a candidate that came to its end by itself."""

    since_s: float
    num_tokens: int
    receipt: asyncio.Future[Receipt | None]


class CandidateCancellations:
    """Of one response. Belongs to one event loop."""

    def __init__(self, reply: Reply, log: ResponseLog, metrics: Metrics) -> None:
        self._reply = reply
        self._log = log
        self._metrics = metrics
        self._waiting: dict[int, _Drop] = {}

    @property
    def since_s(self) -> float | None:
        """When the first that is not settled was asked for."""
        return min((drop.since_s for drop in self._waiting.values()), default=None)

    @property
    def first_active(self) -> int:
        """The first candidate that was not dropped."""
        kept = [each.index for each in self._reply.candidates if not each.dropped]
        return kept[0] if kept else 0

    def check(self, index: int) -> None:
        """Raises: InvalidRequestError, UnsupportedParameterError or NotFoundError if a candidate cannot be dropped."""
        candidates = self._reply.candidates
        if is_ranked(self._reply.request.params):
            message = "beams, best_of and distinct candidates are settled together: cancel the response"
            raise UnsupportedParameterError(message, param="candidate")
        if index >= len(candidates):
            raise InvalidRequestError(f"candidate must be between 0 and {len(candidates) - 1}", param="candidate")
        if candidates[index].done:
            raise _ended(index)

    def is_last(self, index: int) -> bool:
        """Whether all others have ended."""
        return [each.index for each in self._reply.candidates if not each.done] == [index]

    async def drop(self, index: int, response: asyncio.Task[None]) -> Receipt | None:
        """End a candidate that may be dropped, and wait for that; None where the whole `response` ended under it.

        Raises: NotFoundError if it came to its end by itself.
        """
        drop = self._waiting.get(index)
        if drop is None:
            receipt: asyncio.Future[Receipt | None] = asyncio.get_running_loop().create_future()
            drop = _Drop(time.perf_counter(), self._reply.candidates[index].num_tokens, receipt)
            self._waiting[index] = drop
        await self._reply.drop(index)
        ends: tuple[asyncio.Future[Any], ...] = (drop.receipt, response)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not drop.receipt.done():
            return None
        told = drop.receipt.result()
        if told is None:
            raise _ended(index)
        return told

    def done(self, event: ReplyDone) -> None:
        """A candidate has ended, and its frames are written: tell all readers if it was dropped."""
        if event.finish_reason == FINISH_CANCELLED and event.num_pages_freed is None:
            return  # it ends with the whole response, whose last frame tells
        drop = self._waiting.pop(event.index, None)
        receipt: Receipt | None = None
        if event.num_pages_freed is not None:
            now_s = time.perf_counter()
            since_s = drop.since_s if drop is not None else now_s
            num_late = self._reply.candidates[event.index].num_tokens - drop.num_tokens if drop is not None else 0
            receipt = Receipt(num_late, event.num_pages_freed, round((now_s - since_s) * 1000, 3))
            self._metrics.stop_latency.observe(now_s - since_s)
            self._metrics.tokens_after_stop.inc(num_late)
            self._log.append_unnumbered(
                "response.dropped", **dropped_fields(self._log.response_id, event.index, receipt)
            )
        if drop is not None and not drop.receipt.done():
            drop.receipt.set_result(receipt)


def dropped_fields(response_id: str, candidate: int, receipt: Receipt) -> dict[str, object]:
    """The fields of `response.dropped`."""
    return {"response_id": response_id, "candidate": candidate, "receipt": receipt}


def _ended(index: int) -> NotFoundError:
    return NotFoundError(f"candidate {index} has ended", param="candidate")


_FIRST_READER_S = 2.0  # whoever asked for a response needs a moment to begin reading it


class DetachTimer:
    """Ends a response `ttl_s` after the last reader of its log left; None lets it run. Belongs to one event loop."""

    def __init__(self, log: ResponseLog, ttl_s: float | None, end: Callable[[], Awaitable[object]]) -> None:
        self._log = log
        self._ttl_s = ttl_s
        self._end = end
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Watch the readers from now on; there need not be one yet."""
        self._log.on_reader_count = self._readers
        if self._ttl_s is not None:
            self._arm(max(self._ttl_s, _FIRST_READER_S))

    def end_with_last_reader(self) -> None:
        """End it with its last reader: now, if there is none."""
        self._ttl_s = 0.0
        if self._log.on_reader_count is not None:
            self._readers(self._log.num_readers)

    def stop(self) -> None:
        """The response is over."""
        self._log.on_reader_count = None
        self._disarm()

    def _readers(self, num_readers: int) -> None:
        self._disarm()
        if num_readers == 0 and self._ttl_s is not None:
            self._arm(self._ttl_s)

    def _arm(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        async def end() -> None:
            await self._end()

        self._ending = asyncio.create_task(end())


log = logging.getLogger(__name__)

_COALESCE_S = 0.033


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a response was asked for.

    `ttl_s`: how long it outlives its last reader while the `principal` is let in; None: until it is done. `succeed`
    starts a response that goes on with it, and returns its id.
    """

    principal: Principal
    body: Mapping[str, Any]
    generate: bool
    ttl_s: float | None
    start_successor: Callable[[Mapping[str, Any]], Awaitable[str]]


class LiveResponse:
    """A response under way. `log` is its whole story; `cancel` ends it early, from any connection."""

    def __init__(
        self,
        gateway: Gateway,
        model: Model,
        planned: PlannedTurn,
        conversation: Conversation | None,
        reply: Reply,
        order: RunOptions,
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
        self._frames = ResponseEventWriter(self.log, planned, model.tokenizer, reply)
        self._order = order
        self._drops = CandidateCancellations(reply, self.log, gateway.metrics)
        self._lifetime = DetachTimer(self.log, order.ttl_s, self.cancel)
        self._steers = SteerQueue()
        self._cancelled_s: float | None = None
        self._interrupted = False
        self._num_tokens_at_cancel = 0
        self._receipt: Receipt | None = None

    def start(self) -> None:
        """Start the task that does the work; the gateway keeps it until it is over."""
        self.logged = self._gateway.responses.add(self)
        self._frames.created()
        if self._conversation is not None:
            self._tell(self._conversation)
        self._lifetime.start()
        self.task = asyncio.create_task(self._work(), name=self.id)

    def candidate_index(self, item_id: str) -> int | None:
        """Which candidate will be stored as that message."""
        return self._frames.item_ids.index(item_id) if item_id in self._frames.item_ids else None

    async def reply_prefix(self, index: int, num_tokens: int | None, fork_with: int | None) -> ReplyPrefix:
        """Candidate `index` as far as it goes now, or its first tokens, and another token.

        Raises: InvalidRequestError.
        """
        candidate = self._reply.candidates[index]
        ids = candidate.fork_ids(num_tokens, fork_with)  # now; it grows meanwhile
        return await asyncio.to_thread(candidate.make_prefix, self._planned.turn, ids, is_exact=fork_with is not None)

    async def cancel(self) -> Receipt | None:
        """End it within one engine step, and wait for that. The receipt; None if it had ended by itself."""
        if self._cancelled_s is None:
            self._cancelled_s = time.perf_counter()
            self._num_tokens_at_cancel = self._reply.num_tokens
        await self._reply.cancel()
        await asyncio.wait([self.task])
        return self._receipt

    async def interrupt(self) -> None:
        """End it because the server does, with what it has said, and wait for that."""
        self._interrupted = True
        await self._reply.cancel()
        await asyncio.wait([self.task])

    @property
    def first_active_candidate(self) -> int:
        """The first candidate that was not dropped."""
        return self._drops.first_active

    def check_drop(self, candidate: int) -> bool:
        """Whether all other candidates have ended: dropping this one is a cancel.

        Raises: InvalidRequestError, UnsupportedParameterError, NotFoundError where it cannot be dropped.
        """
        self._drops.check(candidate)
        return self._drops.is_last(candidate)

    async def drop(self, candidate: int) -> Receipt | None:
        """End one of several candidates within one engine step, and wait for that; all readers are told.

        The receipt; None if the whole response ended under it. Raises: NotFoundError if the candidate had ended by
        itself.
        """
        return await self._drops.drop(candidate, self.task)

    async def steer(self, given: object) -> None:
        """Queue input, and end the response so that a successor can answer it. Raises: SteerRefusedError."""
        if self._conversation is None or not self._order.generate:
            raise SteerRefusedError("only stored responses that generate can be steered", code="steering_not_supported")
        if self.log.terminal is not None or self._cancelled_s is not None:
            raise not_steerable_error(self.log.terminal)
        steer = self._steers.add(given)
        self.log.append("response.steer.accepted", steer=steer_json(steer, self.id))
        await self._reply.cancel()

    async def _work(self) -> None:
        key_cache, principal = self._gateway.key_cache, self._order.principal
        with key_cache.notify_revoked(principal, self._lifetime.end_with_last_reader):
            if not key_cache.is_valid(principal):  # since a moment ago
                self._lifetime.end_with_last_reader()
            await self._run()

    async def _run(self) -> None:
        try:
            await self._listen()
            if self.log.terminal is None:
                raise EngineError("the engine stopped without saying why")
        except Exception as error:
            await self._fail(error)
        finally:
            if self.log.terminal is None:  # this task was cancelled
                self._frames.failed(INTERNAL_ERROR)
            try:
                await self._hand_over()
            finally:
                self._lifetime.stop()
                self.log.close()
                self._gateway.responses.end(self.id, keep=self._conversation is not None)
                await self._reply.close()

    async def _listen(self) -> None:
        """Take the reply's events to the last, those that many readers draw a few at a time."""
        drawn = DeltaBatcher(self._draw, _COALESCE_S)
        try:
            async for event in record_reply_metrics(self._reply, self._gateway.metrics):
                if isinstance(event, (ReplyDelta, ReplyBeams)):
                    drawn.push(event)
                else:
                    drawn.flush()
                    await self._take(event)
        except Exception:
            drawn.flush()  # what was said comes before that it failed
            raise
        finally:
            drawn.close()

    def _draw(self, event: ReplyDelta | ReplyBeams) -> None:
        if not self._order.generate:
            return
        if isinstance(event, ReplyDelta):
            self._frames.delta(event)
        else:
            self._frames.beams(event)

    async def _take(self, event: ReplyStarted | ReplyDone | ReplyFinished) -> None:
        if not self._order.generate:
            if isinstance(event, ReplyFinished):
                await self._finish(replace(event, num_output_tokens=0))
        elif isinstance(event, ReplyStarted):
            self._frames.started(event)
        elif isinstance(event, ReplyDone):
            self._frames.done(event)
            self._drops.done(event)
        else:
            await self._finish(event)

    async def _finish(self, event: ReplyFinished) -> None:
        """Store, then announce: who has read the terminal frame can rely on the tree."""
        usage = to_usage(event)
        if event.cancelled and self._cancelled_s is None and (self._steers or self._interrupted):
            turn = self._frames.mark_incomplete("steered" if self._steers else "interrupted")
            self._planned = replace(self._planned, turn=turn)
        elif event.cancelled:
            self._receipt = self._stopped(event)
        is_saved = await self._store(self._frames.status(event), usage)
        self._frames.finished(event, self._receipt, is_saved=is_saved)

    async def _hand_over(self) -> None:
        """Let what was steered be answered by a successor, or wait for function outputs, or go back."""
        steers = self._steers.pop_all()
        if not steers:
            return
        if self.log.terminal == "response.failed" or self._cancelled_s is not None:
            self._return(steers, "the response was cancelled or failed")
            return
        calls = (
            required_input(main_output(self._frames.outputs, COMPLETED))
            if self.log.terminal == "response.completed"
            else []
        )
        if calls:
            self.logged.steers = steers
            for steer in steers:
                fields = {"reason": "waiting_for_required_input", "required_input": calls}
                self.log.append("response.steer.pending", steer=steer_json(steer, self.id), **fields)
            return
        try:
            self.logged.successor = await self._order.start_successor(successor_body(self._order.body, self.id, steers))
        except Exception as error:
            if not isinstance(error, ChatcacheError):
                log.exception("%s: its successor could not be created", self.id)
            self._return(steers, error.message if isinstance(error, ChatcacheError) else INTERNAL_ERROR.message)

    def _return(self, steers: Sequence[Steer], why: str) -> None:
        error = SteerRefusedError(why, code="successor_creation_failed")
        for steer in steers:
            self.log.append("response.steer.failed", **steer_failed_fields(error, steer.given, self.id, steer.id))

    async def _fail(self, error: Exception) -> None:
        if not isinstance(error, ChatcacheError):
            log.error("%s failed", self.id, exc_info=error)
        if self.log.terminal is not None:
            return
        turn = self._frames.failed(error if isinstance(error, ChatcacheError) else INTERNAL_ERROR)
        self._planned = replace(self._planned, turn=turn)
        await self._store_failure()

    async def _store_failure(self) -> None:
        """Store that it failed, if anything can be stored: the store itself may be what failed."""
        try:
            await self._store(FAILED, None)
        except NotFoundError:
            log.info("%s: its conversation was deleted under it", self.id)
        except Exception:
            log.exception("%s: that it failed could not be stored", self.id)

    async def _store(self, status: str, usage: Usage | None) -> bool:
        """Store how it ended, now or (False) as soon as the store takes it."""
        if self._conversation is None:
            return True
        end = (self._conversation, self._planned, self._frames.outputs, status, usage)
        conversations = self._model.conversations

        async def store_late() -> None:
            conversation = await conversations.retry_complete(*end)
            self.log.is_unsaved = False
            self._gateway.hub.publish_update(conversation)

        try:
            conversation = await conversations.complete(*end)
        except StoreUnavailableError:
            names = (self._conversation.id, *(item.id for item in self._frames.outputs))
            self.log.is_unsaved = True
            self._gateway.pending_saves.add(self.id, names, store_late)
            return False
        self._tell(conversation)
        return True

    def _tell(self, conversation: Conversation) -> None:
        """Tell the readers, and whoever subscribed, how the conversation stands now."""
        self.log.append_unnumbered("conversation.updated", conversation=schemas.Conversation.from_head(conversation))
        self._gateway.hub.publish_update(conversation)

    def _stopped(self, event: ReplyFinished) -> Receipt:
        """What stopping cost and gave back. Without a cancel of ours the server was closing: nothing to measure."""
        latency_s, num_late = 0.0, 0
        since_s = self._cancelled_s if self._cancelled_s is not None else self._drops.since_s
        if since_s is not None:
            latency_s = time.perf_counter() - since_s
        if self._cancelled_s is not None:
            num_late = self._reply.num_tokens - self._num_tokens_at_cancel
        self._gateway.metrics.stop_latency.observe(latency_s)
        self._gateway.metrics.tokens_after_stop.inc(num_late)
        return Receipt(num_late, event.num_pages_freed, round(latency_s * 1000, 3))
