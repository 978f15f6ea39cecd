"""A response under way, on the server's own time: connections only read its log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chatcache.chat.coalesce import Coalescer
from chatcache.chat.conversations import PlannedTurn
from chatcache.chat.events import ReplyBeams, ReplyDelta, ReplyDone, ReplyFinished, ReplyStarted
from chatcache.chat.forks import ReplyStart
from chatcache.chat.service import Reply
from chatcache.chat.store import StoreUnavailable
from chatcache.chat.tree import COMPLETED, FAILED, Conversation, Usage, main_output
from chatcache.errors import ChatcacheError, EngineFault, NotFound
from chatcache.gateway.context import Gateway, Model
from chatcache.gateway.drops import Drops
from chatcache.gateway.errors import INTERNAL
from chatcache.gateway.heads import conversation_json
from chatcache.gateway.lifetimes import Lifetime
from chatcache.gateway.metering import metered
from chatcache.gateway.principal import Principal
from chatcache.gateway.response_frames import ResponseFrames, usage_of
from chatcache.gateway.response_log import ResponseLog
from chatcache.gateway.response_registry import Receipt
from chatcache.gateway.steer import (
    Steer,
    SteerQueue,
    SteerRefused,
    failure,
    not_steerable,
    required_input,
    steer_json,
    successor_body,
)

log = logging.getLogger(__name__)

_COALESCE_S = 0.033


@dataclass(frozen=True, slots=True)
class Order:
    """How a response was asked for.

    `ttl_s`: how long it outlives its last reader while the `principal` is let in; None: until it is done. `succeed`
    starts a response that goes on with it, and returns its id.
    """

    principal: Principal
    body: Mapping[str, Any]
    generate: bool
    ttl_s: float | None
    succeed: Callable[[Mapping[str, Any]], Awaitable[str]]


class LiveResponse:
    """A response under way. `log` is its whole story; `cancel` ends it early, from any connection."""

    def __init__(
        self,
        gateway: Gateway,
        model: Model,
        planned: PlannedTurn,
        conversation: Conversation | None,
        reply: Reply,
        order: Order,
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
        self._frames = ResponseFrames(self.log, planned, model.tokenizer, reply)
        self._order = order
        self._drops = Drops(reply, self.log, gateway.metrics)
        self._lifetime = Lifetime(self.log, order.ttl_s, self.cancel)
        self._steers = SteerQueue()
        self._cancelled_s: float | None = None
        self._interrupted = False
        self._num_tokens_at_cancel = 0
        self._receipt: Receipt | None = None

    def begin(self) -> None:
        """Start the task that does the work; the gateway keeps it until it is over."""
        self.logged = self._gateway.responses.begin(self)
        self._frames.created()
        if self._conversation is not None:
            self._tell(self._conversation)
        self._lifetime.begin()
        self.task = asyncio.create_task(self._work(), name=self.id)

    def index_of(self, item_id: str) -> int | None:
        """Which candidate will be stored as that message."""
        return self._frames.item_ids.index(item_id) if item_id in self._frames.item_ids else None

    async def start_of(self, index: int, num_tokens: int | None, fork_with: int | None) -> ReplyStart:
        """Candidate `index` as far as it goes now, or its first tokens, and another token. Raises: InvalidRequest."""
        candidate = self._reply.candidates[index]
        ids = candidate.first_ids(num_tokens, fork_with)  # now; it grows meanwhile
        return await asyncio.to_thread(candidate.start, self._planned.turn, ids, is_exact=fork_with is not None)

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
    def first_kept(self) -> int:
        """The first candidate that was not dropped."""
        return self._drops.first_kept

    def check_drop(self, candidate: int) -> bool:
        """Whether all other candidates have ended: dropping this one is a cancel.

        Raises: InvalidRequest, UnsupportedParameter, NotFound where it cannot be dropped.
        """
        self._drops.check(candidate)
        return self._drops.is_last(candidate)

    async def drop(self, candidate: int) -> Receipt | None:
        """End one of several candidates within one engine step, and wait for that; all readers are told.

        The receipt; None if the whole response ended under it. Raises: NotFound if the candidate had ended by itself.
        """
        return await self._drops.drop(candidate, self.task)

    async def steer(self, given: object) -> None:
        """Queue input, and end the response so that a successor can answer it. Raises: SteerRefused."""
        if self._conversation is None or not self._order.generate:
            raise SteerRefused("only stored responses that generate can be steered", code="steering_not_supported")
        if self.log.terminal is not None or self._cancelled_s is not None:
            raise not_steerable(self.log.terminal)
        steer = self._steers.add(given)
        self.log.append("response.steer.accepted", steer=steer_json(steer, self.id))
        await self._reply.cancel()

    async def _work(self) -> None:
        keyring, principal = self._gateway.keyring, self._order.principal
        with keyring.watching(principal, self._lifetime.shorten):
            if not keyring.lets_in(principal):  # since a moment ago
                self._lifetime.shorten()
            await self._run()

    async def _run(self) -> None:
        try:
            await self._listen()
            if self.log.terminal is None:
                raise EngineFault("the engine stopped without saying why")
        except Exception as error:
            await self._fail(error)
        finally:
            if self.log.terminal is None:  # this task was cancelled
                self._frames.failed(INTERNAL)
            try:
                await self._hand_over()
            finally:
                self._lifetime.stop()
                self.log.close()
                self._gateway.responses.end(self.id, keep=self._conversation is not None)
                await self._reply.close()

    async def _listen(self) -> None:
        """Take the reply's events to the last, those that many readers draw a few at a time."""
        drawn = Coalescer(self._draw, _COALESCE_S)
        try:
            async for event in metered(self._reply, self._gateway.metrics):
                if isinstance(event, (ReplyDelta, ReplyBeams)):
                    drawn.take(event)
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
        usage = usage_of(event)
        if event.cancelled and self._cancelled_s is None and (self._steers or self._interrupted):
            turn = self._frames.cut("steered" if self._steers else "interrupted")
            self._planned = replace(self._planned, turn=turn)
        elif event.cancelled:
            self._receipt = self._stopped(event)
        is_saved = await self._store(self._frames.status(event), usage)
        self._frames.finished(event, self._receipt, is_saved=is_saved)

    async def _hand_over(self) -> None:
        """Let what was steered be answered by a successor, or wait for function outputs, or go back."""
        steers = self._steers.take()
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
            self.logged.successor = await self._order.succeed(successor_body(self._order.body, self.id, steers))
        except Exception as error:
            if not isinstance(error, ChatcacheError):
                log.exception("%s: its successor could not be created", self.id)
            self._return(steers, error.message if isinstance(error, ChatcacheError) else INTERNAL.message)

    def _return(self, steers: Sequence[Steer], why: str) -> None:
        error = SteerRefused(why, code="successor_creation_failed")
        for steer in steers:
            self.log.append("response.steer.failed", **failure(error, steer.given, self.id, steer.id))

    async def _fail(self, error: Exception) -> None:
        if not isinstance(error, ChatcacheError):
            log.error("%s failed", self.id, exc_info=error)
        if self.log.terminal is not None:
            return
        turn = self._frames.failed(error if isinstance(error, ChatcacheError) else INTERNAL)
        self._planned = replace(self._planned, turn=turn)
        await self._store_failure()

    async def _store_failure(self) -> None:
        """Store that it failed, if anything can be stored: the store itself may be what failed."""
        try:
            await self._store(FAILED, None)
        except NotFound:
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
            conversation = await conversations.settle_late(*end)
            self.log.unsaved = False
            self._gateway.hub.changed(conversation)

        try:
            conversation = await conversations.settle(*end)
        except StoreUnavailable:
            names = (self._conversation.id, *(item.id for item in self._frames.outputs))
            self.log.unsaved = True
            self._gateway.unsaved.add(self.id, names, store_late)
            return False
        self._tell(conversation)
        return True

    def _tell(self, conversation: Conversation) -> None:
        """Tell the readers, and whoever subscribed, how the conversation stands now."""
        self.log.note("conversation.updated", conversation=conversation_json(conversation))
        self._gateway.hub.changed(conversation)

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
        return {
            "tokens_after_stop": num_late,
            "pages_freed": event.num_pages_freed,
            "stop_latency_ms": round(latency_s * 1000, 3),
        }
