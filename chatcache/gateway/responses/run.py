"""A running response: consumes the reply, writes the event log and stores the result.

Connections only read the log, so a response does not depend on any of them. `CandidateCancellations` drops single
candidates; `DetachTimer` ends a response that has no reader.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from chatcache.conversations.checkpoints import CheckpointEncoder, ReplyCheckpoint
from chatcache.conversations.fork_points import ReplyPrefix
from chatcache.conversations.prompt import Message, message_from_item
from chatcache.conversations.replies.events import (
    DeltaBatcher,
    ReplyBatchEnd,
    ReplyBeams,
    ReplyDelta,
    ReplyDone,
    ReplyFinished,
    ReplyStarted,
)
from chatcache.conversations.replies.service import Reply, is_ranked
from chatcache.conversations.store import StoreUnavailableError
from chatcache.conversations.tree import (
    COMPLETED,
    FAILED,
    Conversation,
    ResponseElsewhereError,
    Usage,
    main_output,
)
from chatcache.conversations.turns import PlannedTurn
from chatcache.errors import ChatcacheError, EngineError, InvalidRequestError, NotFoundError, UnsupportedParameterError
from chatcache.gateway.auth.principal import Principal
from chatcache.gateway.context import Gateway, Model, moved_error
from chatcache.gateway.errors import INTERNAL_ERROR
from chatcache.gateway.metrics import Metrics, record_reply_metrics
from chatcache.gateway.responses.event_log import ResponseLog
from chatcache.gateway.responses.events import CompactionEventWriter, ResponseEventWriter, to_usage
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
from chatcache.types.events import FINISH_CANCELLED, STOP_DEAD_END

log = logging.getLogger(__name__)

_BATCH_INTERVAL_S = 0.033
_EVENTS_PER_TURN = 8  # of the event loop
_CANDIDATES_PER_CHECKPOINT = 4  # of thousands of tokens each: a millisecond
_MIN_FIRST_READER_S = 2.0  # time for the client to start reading


@dataclass(slots=True)
class _PendingDrop:
    """A requested end of one candidate that the engine has not reported yet.

    `num_tokens`: tokens generated at the time of the request. `receipt`: resolves to None if the candidate ended by
    itself.
    """

    since_s: float
    num_tokens: int
    receipt: asyncio.Future[Receipt | None]


class CandidateCancellations:
    """Ends single candidates of one response at a client's request. Belongs to one event loop."""

    def __init__(self, reply: Reply, log: ResponseLog, metrics: Metrics) -> None:
        self._reply = reply
        self._log = log
        self._metrics = metrics
        self._waiting: dict[int, _PendingDrop] = {}

    @property
    def since_s(self) -> float | None:
        """Time of the earliest request to end a candidate that is still pending; None without one."""
        return min((drop.since_s for drop in self._waiting.values()), default=None)

    @property
    def first_active(self) -> int:
        """Index of the first candidate that was not dropped."""
        kept = [each.index for each in self._reply.candidates if not each.dropped]
        return kept[0] if kept else 0

    def check(self, index: int) -> None:
        """Check whether a candidate can be dropped.

        Raises: InvalidRequestError, UnsupportedParameterError, NotFoundError.
        """
        candidates = self._reply.candidates
        if is_ranked(self._reply.request.params):
            message = "beams, best_of and distinct candidates end together: cancel the response"
            raise UnsupportedParameterError(message, param="candidate")
        if index >= len(candidates):
            raise InvalidRequestError(f"candidate must be between 0 and {len(candidates) - 1}", param="candidate")
        if candidates[index].done:
            raise _candidate_ended_error(index)

    def is_last(self, index: int) -> bool:
        """Whether all other candidates have ended."""
        return [each.index for each in self._reply.candidates if not each.done] == [index]

    async def drop(self, index: int, response: asyncio.Task[None]) -> Receipt | None:
        """End a candidate that passed `check` and wait for its end.

        Returns None if the whole response ended meanwhile. Raises: NotFoundError if the candidate ended by itself.
        """
        drop = self._waiting.get(index)
        if drop is None:
            receipt: asyncio.Future[Receipt | None] = asyncio.get_running_loop().create_future()
            drop = _PendingDrop(time.perf_counter(), self._reply.candidates[index].num_tokens, receipt)
            self._waiting[index] = drop
        await self._reply.drop(index)
        ends: tuple[asyncio.Future[Any], ...] = (drop.receipt, response)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not drop.receipt.done():
            return None
        dropped_receipt = drop.receipt.result()
        if dropped_receipt is None:
            raise _candidate_ended_error(index)
        return dropped_receipt

    def done(self, event: ReplyDone) -> None:
        """Record that a candidate ended.

        If a client dropped it, all readers of the response get a `response.dropped` event with the pages freed.
        """
        if event.finish_reason == FINISH_CANCELLED and event.num_pages_freed is None:
            return  # the whole response ends; its terminal frame reports it
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
    """Return the fields of the event `response.dropped`: a candidate was ended."""
    return {"response_id": response_id, "candidate": candidate, "receipt": receipt}


def _candidate_ended_error(index: int) -> NotFoundError:
    return NotFoundError(f"candidate {index} has ended", param="candidate")


class DetachTimer:
    """Ends a response that has had no reader of its log for `ttl_s` seconds (None: never).

    Belongs to one event loop.
    """

    def __init__(self, log: ResponseLog, ttl_s: float | None, end: Callable[[], Awaitable[object]]) -> None:
        self._log = log
        self._ttl_s = ttl_s
        self._end = end
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to watch the readers.

        A response without a first reader ends after `ttl_s`, but not at once.
        """
        self._log.on_reader_count = self._on_reader_count
        if self._ttl_s is not None:
            self._start_timer(max(self._ttl_s, _MIN_FIRST_READER_S))

    def end_with_last_reader(self) -> None:
        """Set the grace period to zero: end now if there is no reader."""
        self._ttl_s = 0.0
        if self._log.on_reader_count is not None:
            self._on_reader_count(self._log.num_readers)

    def stop(self) -> None:
        """Stop watching: the response has ended."""
        self._log.on_reader_count = None
        self._cancel_timer()

    def _on_reader_count(self, num_readers: int) -> None:
        self._cancel_timer()
        if num_readers == 0 and self._ttl_s is not None:
            self._start_timer(self._ttl_s)

    def _start_timer(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        async def end() -> None:
            await self._end()

        self._ending = asyncio.create_task(end())


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Settings of a response that come from its request.

    `settings`: the fields that a successor repeats. `ttl_s`: grace period after the last reader, None to run until
    complete; it becomes zero when the key is revoked. `start_successor` starts a response that continues this one, and
    returns its id. `compacts`: the reply is a summary of its prompt.
    """

    principal: Principal
    settings: Mapping[str, Any]
    generate: bool
    ttl_s: float | None
    start_successor: Callable[[Mapping[str, Any]], Awaitable[str]]
    compacts: bool = False


class LiveResponse:
    """A running response. `log` contains all its events; any connection may `cancel` it.

    `encode_record` returns the record from which another gateway can continue the response, given the steering input
    and the sequence numbers of its events; None if none can.
    """

    def __init__(
        self,
        gateway: Gateway,
        model: Model,
        planned: PlannedTurn,
        conversation: Conversation | None,
        reply: Reply,
        options: RunOptions,
        encode_record: Callable[[Sequence[tuple[int, Steer]]], bytes] | None = None,
    ) -> None:
        self.id = planned.turn.id
        self.owner = planned.request.owner
        self.ignored = tuple(cast(Sequence[str], planned.turn.echo.get("ignored", ())))
        conversation_id = conversation.id if conversation is not None else None
        self.log = ResponseLog(self.id, model.tokenizer.token_bytes, conversation_id)
        self._gateway = gateway
        self._model = model
        self._planned = planned
        self._conversation = conversation
        self._reply = reply
        writer = CompactionEventWriter if options.compacts else ResponseEventWriter
        self._writer = writer(self.log, planned, reply)
        self._options = options
        self._drops = CandidateCancellations(reply, self.log, gateway.metrics)
        self._detach_timer = DetachTimer(self.log, options.ttl_s, self.cancel)
        self._steers = SteerQueue()
        self._encode_record = encode_record
        self._writing = asyncio.Lock()  # held while events of the reply are written, and while steering input is saved
        self._accepted_steers: list[tuple[int, Steer]] = []
        self._restored_steers: list[tuple[int, Steer]] = []
        self._num_restored_events: int | None = None
        self._is_abandoned = False
        reply.marks_batches = reply.may_move = encode_record is not None
        num_checkpoints = -(-len(reply.candidates) // _CANDIDATES_PER_CHECKPOINT)
        self._checkpoint_encoders = [CheckpointEncoder() for _ in range(num_checkpoints)]
        self._checkpoint_progress = self._pending_progress = (0, 0)  # numbers of tokens and of finished candidates
        self._cancelled_s: float | None = None
        self._cancel_reason = ""
        self._interrupted = False
        self._num_tokens_at_cancel = 0
        self._receipt: Receipt | None = None

    def start(self) -> None:
        """Register the response and start its task."""
        self.logged = self._gateway.responses.add(self)
        self._writer.created()
        if self._conversation is not None:
            self._publish_conversation(self._conversation)
        self._detach_timer.start()
        self.task = asyncio.create_task(self._run_while_authorized(), name=self.id)

    async def save_record(self) -> bool:
        """Leave a record for the gateway that continues the response if this one ends; return False if that failed."""
        if self._encode_record is None or self._gateway.recorder is None:
            return True
        return await self._gateway.recorder.record(self.id, self._encode_record(self._accepted_steers))

    def restore(self, num_events: int, steers: Sequence[tuple[int, Steer]]) -> None:
        """Repeat what another gateway has done until it ended, before readers of this response begin.

        `num_events`: of the engine. `steers`: steering input, and the numbers of the events that accepted it.
        """
        self._num_restored_events = num_events
        self._accepted_steers = list(steers)
        self._restored_steers = list(steers)

    def abandon(self) -> None:
        """End here without a result: another gateway has taken the response over. Readers get an error."""
        if not self._is_abandoned:
            self._is_abandoned = True
            self._reply.hand_over()
            self._give_up()
            self._gateway.responses.end(self.id, keep=False)
            self.log.fail(moved_error())
            if self.task is not asyncio.current_task():
                self.task.cancel()

    def _give_up(self) -> None:
        if self._gateway.peers is not None:
            self._gateway.peers.give_up(self.id)

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """The messages of the prompt, instructions included."""
        return self._planned.messages

    @property
    def history(self) -> tuple[Message, ...]:
        """All messages up to the end of a response that is not stored, for a response that continues it.

        Empty for a stored response, and unless this one has completed or reached its limit.
        """
        if self._conversation is not None or self._cancelled_s is not None or self.log.terminal == "response.failed":
            return ()
        if self._options.compacts:
            return ()
        outputs = self._writer.outputs
        reply = (message_from_item(main_output(outputs, COMPLETED)),) if outputs else ()
        has_instructions = self._planned.request.instructions is not None  # they are for this response only
        return (*self._planned.messages[has_instructions:], *reply)

    async def catch_up(self) -> None:
        """Do nothing: the log has all events."""

    async def checkpoints(self) -> list[ReplyCheckpoint]:
        """Return the output since the last checkpoints; empty without any or if the response is not stored.

        Each has some of the candidates; the event loop has turns in between.
        """
        found: list[ReplyCheckpoint] = []
        progress = self._reply.num_tokens, len(self._writer.outputs)
        if self._conversation is None or not self._options.generate or progress == self._checkpoint_progress:
            return found
        self._pending_progress = progress
        for number, encoder in enumerate(self._checkpoint_encoders):
            if self.log.terminal is not None:
                return []
            start = number * _CANDIDATES_PER_CHECKPOINT
            candidates = self._reply.candidates[start : start + _CANDIDATES_PER_CHECKPOINT]
            data = encoder.encode(self._writer.current_outputs(candidates))
            if data is not None:
                found.append(ReplyCheckpoint(self._conversation.id, self.id, data))
            await asyncio.sleep(0)
        return found

    def confirm_checkpoints(self) -> None:
        """Take the last checkpoints as stored."""
        for encoder in self._checkpoint_encoders:
            encoder.confirm()
        self._checkpoint_progress = self._pending_progress

    async def reply_prefix(
        self, item_id: str | None, num_tokens: int | None, fork_with: int | None
    ) -> ReplyPrefix | None:
        """Return the beginning of a candidate that is being generated, for a fork to continue.

        The candidate is the one that will be stored under `item_id`, or else the first that was not dropped. The
        beginning has all tokens so far, or the first `num_tokens`, then the token `fork_with` if given. Returns None
        without such a candidate, or if the response has ended. Raises: InvalidRequestError.
        """
        item_ids = self._writer.item_ids
        if self.log.terminal is not None or (item_id is not None and item_id not in item_ids):
            return None
        candidate = self._reply.candidates[self._drops.first_active if item_id is None else item_ids.index(item_id)]
        ids = candidate.fork_ids(num_tokens, fork_with)  # copied now, because the candidate keeps growing
        return await asyncio.to_thread(candidate.make_prefix, self._planned.turn, ids, is_exact=fork_with is not None)

    async def cancel(self, reason: str = "") -> Receipt | None:
        """End the response within one engine step and wait for the end; `reason`: why it is incomplete.

        Returns the receipt (see `Receipt`); None if the response had already ended.
        """
        if self._cancelled_s is None:
            self._cancel_reason = reason
            self._cancelled_s = time.perf_counter()
            self._num_tokens_at_cancel = self._reply.num_tokens
        await self._reply.cancel()
        await asyncio.wait([self.task])
        return self._receipt

    async def interrupt(self) -> None:
        """End the response because the server shuts down; keep its text, or leave it to another gateway."""
        recorder, peers = self._gateway.recorder, self._gateway.peers
        if self._encode_record is not None and recorder is not None and peers is not None and await peers.has_others():
            recorder.leave(self.id)
            peers.leave_responses()
            self.abandon()
        else:
            self._interrupted = True
            await self._reply.cancel()
        await asyncio.wait([self.task])

    async def check_drop(self, candidate: int) -> bool:
        """Whether all other candidates have ended, so that dropping this one is a cancel.

        Raises: InvalidRequestError, UnsupportedParameterError, NotFoundError if it cannot be dropped.
        """
        self._drops.check(candidate)
        return self._drops.is_last(candidate)

    async def drop(self, candidate: int) -> Receipt | None:
        """End one of several candidates within one engine step, and notify all readers.

        Returns the receipt (see `Receipt`); None if the whole response ended meanwhile. Raises: NotFoundError if the
        candidate ended by itself.
        """
        return await self._drops.drop(candidate, self.task)

    async def steer(self, input_value: object) -> None:
        """Queue input and end the response, so that a successor can answer the input.

        Raises: SteerRefusedError.
        """
        if self._conversation is None or not self._options.generate:
            raise SteerRefusedError("only stored responses that generate can be steered", code="steering_not_supported")
        async with self._writing:
            self._require_steerable()
            steer = self._steers.add(input_value)
            before = self._accepted_steers
            try:
                await self._save_steer(steer)
                self._require_steerable()
            except BaseException:
                self._steers.remove(steer)
                self._accepted_steers = before
                raise
            self.log.append("response.steer.accepted", steer=steer_json(steer, self.id))
        await self._reply.cancel()

    def _require_steerable(self) -> None:
        """Check that the response still takes steering input. Raises: SteerRefusedError."""
        if self.log.terminal is not None or self._cancelled_s is not None:
            raise not_steerable_error(self.log.terminal)

    async def _save_steer(self, steer: Steer) -> None:
        """Record the input and the number of the event that will accept it, before a reader can have that event.

        Raises: SteerRefusedError if it cannot be recorded.
        """
        before, number = self._accepted_steers, 0
        while number != self.log.last_number + 1:  # at first, and after an event meanwhile that is none of the reply
            number = self.log.last_number + 1
            self._accepted_steers = [*before, (number, steer)]
            if not await self.save_record():
                self._accepted_steers = before
                await self.save_record()  # so that it is not recorded later
                raise SteerRefusedError("the input cannot be recorded now: send it again", code="steering_unavailable")

    async def _continue_restoring(self, num_events: int) -> None:
        """Accept steering input again whose event is the next one; end after all of it and `num_events` events."""
        while self._restored_steers and self._restored_steers[0][0] <= self.log.last_number + 1:
            _, steer = self._restored_steers.pop(0)
            self._steers.restore(steer)
            self.log.append("response.steer.accepted", steer=steer_json(steer, self.id))
            await self._reply.cancel()
        if self._reply.num_events >= num_events and not self._restored_steers:
            self._num_restored_events = None
            self._gateway.responses.end_restoring(self.id)

    async def _run_while_authorized(self) -> None:
        key_cache, principal = self._gateway.key_cache, self._options.principal
        with key_cache.watch_revocation(principal, self._detach_timer.end_with_last_reader):
            if not key_cache.is_valid(principal):  # revoked before the watch began
                self._detach_timer.end_with_last_reader()
            await self._run()

    async def _run(self) -> None:
        try:
            await self._consume_events()
            if self.log.terminal is None:
                raise EngineError("the engine ended the reply without a final event")
        except ResponseElsewhereError:
            self.abandon()
        except Exception as error:
            await self._fail(error)
        finally:
            try:
                if not self._is_abandoned:
                    await self._end()
            finally:
                self._detach_timer.stop()
                if not self._is_abandoned:
                    self.log.close()
                    self._gateway.responses.end(self.id, keep=self._conversation is not None)
                await self._reply.close()

    async def _end(self) -> None:
        """Write the terminal frame if there is none, and start the successor."""
        if self.log.terminal is None:  # this task was cancelled
            self._writer.failed(INTERNAL_ERROR)
        await self._start_successor()
        if not self.log.is_unsaved:
            self._discard_record()

    def _discard_record(self) -> None:
        if self._encode_record is not None and self._gateway.recorder is not None:
            self._gateway.recorder.discard_record(self.id)

    async def _consume_events(self) -> None:
        """Handle all events of the reply; deltas are batched while there are many.

        If another gateway can continue the response, the batches are those of the engine, and the same there.
        """
        batcher = DeltaBatcher(self._write_delta, None if self._encode_record is not None else _BATCH_INTERVAL_S)
        try:
            num_events = 0
            if self._num_restored_events is not None:
                await self._continue_restoring(self._num_restored_events)
            async for event in record_reply_metrics(self._reply, self._gateway.metrics):
                num_events += 1
                if num_events % _EVENTS_PER_TURN == 0:  # those of a step are here already: many candidates have many
                    await asyncio.sleep(0)
                async with self._writing:
                    if isinstance(event, (ReplyDelta, ReplyBeams)):
                        batcher.push(event)
                        continue
                    await batcher.flush()
                    if not isinstance(event, ReplyBatchEnd):
                        await self._handle_event(event)
                    if self._num_restored_events is not None:
                        await self._continue_restoring(self._num_restored_events)
        except Exception:
            await batcher.flush()  # write the remaining text before the failure
            raise
        finally:
            batcher.close()

    def _write_delta(self, event: ReplyDelta | ReplyBeams) -> None:
        if not self._options.generate:
            return
        if isinstance(event, ReplyDelta):
            self._writer.delta(event)
        else:
            self._writer.beams(event)

    async def _handle_event(self, event: ReplyStarted | ReplyDone | ReplyFinished) -> None:
        if not self._options.generate:
            if isinstance(event, ReplyFinished):
                await self._finish(replace(event, num_output_tokens=0))
        elif isinstance(event, ReplyStarted):
            self._writer.started(event)
        elif isinstance(event, ReplyDone):
            self._writer.done(event)
            self._drops.done(event)
        else:
            await self._finish(event)

    async def _finish(self, event: ReplyFinished) -> None:
        """Store the result, then write the terminal frame.

        In this order, because a client that has read the terminal frame may continue the stored response at once.
        """
        usage = to_usage(event)
        if event.cancelled and self._cancelled_s is None and (self._steers or self._interrupted):
            turn = self._writer.mark_incomplete("steered" if self._steers else "interrupted")
            self._planned = replace(self._planned, turn=turn)
        elif event.cancelled:
            self._receipt = self._stop_receipt(event)
            if self._cancel_reason:
                self._planned = replace(self._planned, turn=self._writer.mark_incomplete(self._cancel_reason))
        elif self._writer.ended_in_dead_ends:
            self._planned = replace(self._planned, turn=self._writer.mark_incomplete(STOP_DEAD_END))
        self._planned = replace(self._planned, turn=self._writer.record_statistics(self._receipt))
        is_saved = await self._store(self._writer.status(event), usage)
        self._reply.settle()
        self._writer.finished(event, self._receipt, is_saved=is_saved)

    async def _start_successor(self) -> None:
        """Start the response that answers the steering input.

        If it cannot start yet, because function outputs are missing, keep the input for the request that brings them;
        reject the input if the response failed or was cancelled.
        """
        steers = self._steers.pop_all()
        if not steers:
            return
        if self.log.terminal == "response.failed" or self._cancelled_s is not None:
            self._reject_steers(steers, "the response was cancelled or failed")
            return
        calls: list[dict[str, str]] = []
        if self.log.terminal == "response.completed":
            calls = required_input(main_output(self._writer.outputs, COMPLETED))
        if calls:
            self.logged.steers = steers
            for steer in steers:
                fields = {"reason": "waiting_for_required_input", "required_input": calls}
                self.log.append("response.steer.pending", steer=steer_json(steer, self.id), **fields)
            return
        try:
            self.logged.successor = await self._options.start_successor(
                successor_body(self._options.settings, self.id, steers)
            )
        except Exception as error:
            if not isinstance(error, ChatcacheError):
                log.exception("%s: its successor could not be created", self.id)
            self._reject_steers(steers, error.message if isinstance(error, ChatcacheError) else INTERNAL_ERROR.message)

    def _reject_steers(self, steers: Sequence[Steer], why: str) -> None:
        error = SteerRefusedError(why, code="successor_creation_failed")
        for steer in steers:
            self.log.append("response.steer.failed", **steer_failed_fields(error, steer.input_value, self.id, steer.id))

    async def _fail(self, error: Exception) -> None:
        if not isinstance(error, ChatcacheError):
            log.error("%s failed", self.id, exc_info=error)
        if self.log.terminal is not None:
            return
        peers = self._gateway.peers
        if self._encode_record is not None and peers is not None and not await peers.runs_here(self.id):
            self.abandon()
            return
        self._reply.settle()
        turn = self._writer.failed(error if isinstance(error, ChatcacheError) else INTERNAL_ERROR)
        self._planned = replace(self._planned, turn=turn)
        await self._store_failure()

    async def _store_failure(self) -> None:
        """Store the failure, if the store accepts it: the store may be the cause."""
        try:
            await self._store(FAILED, None)
        except NotFoundError:
            log.info("%s: its conversation was deleted while it ran", self.id)
            self.logged.is_deleted = True
        except ResponseElsewhereError:
            log.info("%s: another gateway has ended it", self.id)
        except Exception:
            log.exception("%s: could not store its failure", self.id)
            self._give_up()

    async def _store(self, status: str, usage: Usage | None) -> bool:
        """Store the result now (True), or as soon as the store is available (False)."""
        if self._conversation is None:
            return True
        stored_reply = (self._conversation, self._planned, self._writer.outputs, status, usage)
        conversations = self._model.conversations

        async def store_late() -> None:
            conversation = await conversations.retry_complete(*stored_reply)
            self.log.is_unsaved = False
            self._discard_record()
            self._gateway.hub.publish_update(conversation)

        try:
            conversation = await conversations.complete(*stored_reply)
        except StoreUnavailableError:
            names = (self._conversation.id, *(item.id for item in self._writer.outputs))
            self.log.is_unsaved = True
            self._gateway.pending_saves.add(self.id, names, store_late)
            return False
        self._publish_conversation(conversation)
        return True

    def _publish_conversation(self, conversation: Conversation) -> None:
        """Send the conversation's new state to readers and subscribers."""
        self.log.append_unnumbered("conversation.updated", conversation=schemas.Conversation.from_head(conversation))
        self._gateway.hub.publish_update(conversation)

    def _stop_receipt(self, event: ReplyFinished) -> Receipt:
        """Build the receipt of a cancelled reply (tokens, pages, latency) and update the metrics.

        Latency is zero if the server, not a client, ended the reply.
        """
        latency_s, num_late = 0.0, 0
        since_s = self._cancelled_s if self._cancelled_s is not None else self._drops.since_s
        if since_s is not None:
            latency_s = time.perf_counter() - since_s
        if self._cancelled_s is not None:
            num_late = self._reply.num_tokens - self._num_tokens_at_cancel
        self._gateway.metrics.stop_latency.observe(latency_s)
        self._gateway.metrics.tokens_after_stop.inc(num_late)
        return Receipt(num_late, event.num_pages_freed, round(latency_s * 1000, 3))
