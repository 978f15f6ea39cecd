"""Registry of responses that can be read, resumed, steered or cancelled.

Holds running responses, and the logs of those that ended recently. A `Command` is what another gateway asks about one.
`Checkpointer` stores the output of running ones about once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from chatcache.conversations.checkpoints import ReplyCheckpoint
from chatcache.conversations.fork_points import ReplyPrefix
from chatcache.conversations.store import ConversationStore, StoreUnavailableError
from chatcache.errors import NotFoundError
from chatcache.gateway.responses.event_log import ResponseLog
from chatcache.gateway.responses.steering import Steer
from chatcache.gateway.schemas.responses import Receipt

log = logging.getLogger(__name__)

KEEP_ENDED_S = 15 * 60.0
MAX_ENDED_BYTES = 32 * 1024 * 1024
_DELETED_S = 5.0  # for other gateways to read the end of a response whose conversation was deleted
_RESTORE_S = 8.0  # for a response that was taken over to have the events that it had before


class _Command(msgspec.Struct, tag=True, array_like=True):
    """A question of another gateway about one response."""


class Find(_Command):
    """An answer without a value, of the gateway that has the log of the response."""


class Watch(_Command):
    """The frames of the log from `position` on. `is_read`: a client reads them."""

    position: int
    logprob_sizes: dict[int, int]
    is_read: bool


class CountFrames(_Command):
    """How many frames the log has."""


class Cancel(_Command):
    """End the response; `reason`: why it is incomplete."""

    reason: str = ""


class CheckDrop(_Command):
    """Whether dropping the candidate cancels the response."""

    candidate: int


class Drop(_Command):
    """End one candidate."""

    candidate: int


class AddSteer(_Command):
    """Queue input for a successor."""

    input_value: Any


class TakeSteers(_Command):
    """The steering input that waits for a successor. It does not wait there any more."""


class ReturnSteers(_Command):
    """Have steering input wait again that was taken."""

    steers: tuple[Steer, ...]


class Fork(_Command):
    """The beginning of a candidate: the one with this message id, or the first that was not dropped."""

    item_id: str | None
    num_tokens: int | None
    fork_with: int | None


Command = Find | Watch | CountFrames | Cancel | CheckDrop | Drop | AddSteer | TakeSteers | ReturnSteers | Fork


class Run(Protocol):
    """A running response: `responses.run.LiveResponse` here, `peers.RemoteResponse` on another gateway."""

    id: str
    owner: str
    log: ResponseLog
    task: asyncio.Task[None]

    async def catch_up(self) -> None:
        """Have all events so far in the log. Raises: GatewayUnreachableError."""
        ...

    async def checkpoints(self) -> list[ReplyCheckpoint]:
        """Return the output since the last checkpoints; empty without any or if the response is not stored.

        Each has some of the candidates; the event loop has turns in between.
        """
        ...

    def confirm_checkpoints(self) -> None:
        """Take the last checkpoints as stored."""
        ...

    async def reply_prefix(
        self, item_id: str | None, num_tokens: int | None, fork_with: int | None
    ) -> ReplyPrefix | None:
        """Return the beginning of a candidate that is being generated, for a fork to continue.

        The candidate is the one that will be stored under `item_id`, or else the first that was not dropped. The
        beginning has all tokens so far, or the first `num_tokens`, then the token `fork_with` if given. Returns None
        without such a candidate, or if the response has ended. Raises: InvalidRequestError.
        """
        ...

    async def steer(self, given: object) -> None:
        """Queue input for a successor, the response that continues this one, and end this one.

        Raises: SteerRefusedError.
        """
        ...

    async def check_drop(self, candidate: int) -> bool:
        """Whether dropping this candidate cancels the response.

        Raises: ChatcacheError if it cannot be dropped.
        """
        ...

    async def drop(self, candidate: int) -> Receipt | None:
        """End one of several candidates within one engine step, and wait until it has ended.

        Returns the receipt (see `Receipt`); None if the whole response ended meanwhile. Raises: NotFoundError if the
        candidate had already ended.
        """
        ...

    async def cancel(self, reason: str = "") -> Receipt | None:
        """End the response within one engine step and wait for the end; `reason`: why it is incomplete.

        Returns the receipt (see `Receipt`); None if the response had already ended.
        """
        ...

    async def interrupt(self) -> None:
        """End the response because the server shuts down; keep its text."""
        ...


@dataclass(slots=True)
class LoggedResponse:
    """A running or recently ended response and its event log.

    `run`: None once the response has ended. `successor`: the id of the response that continues it. `steers`: steering
    input that waits for a successor. `is_deleted`: its conversation was deleted while it ran.
    """

    id: str
    owner: str
    log: ResponseLog
    run: Run | None
    ended_s: float = 0.0
    successor: str | None = None
    steers: tuple[Steer, ...] = ()
    is_deleted: bool = False

    async def catch_up(self, number: int | None = None) -> None:
        """Have all events so far in the log, unless it has that of this number already.

        Only the log of a response that runs on another gateway can be behind. Raises: GatewayUnreachableError.
        """
        if self.run is not None and (number is None or number > self.log.last_number):
            await self.run.catch_up()

    @property
    def num_bytes(self) -> int:
        return self.log.num_bytes + sum(steer.num_bytes for steer in self.steers)


class ResponseRegistry:
    """Responses by id, visible to their owner only.

    Ended responses are evicted by age and by total size, oldest first.
    """

    def __init__(self, max_ended_bytes: int = MAX_ENDED_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_ended_bytes = max_ended_bytes
        self._clock = clock
        self._live: dict[str, LoggedResponse] = {}
        self._ended: dict[str, LoggedResponse] = {}
        self._sizes: dict[str, int] = {}
        self._ended_bytes = 0
        self._restoring: dict[str, asyncio.Event] = {}
        self.on_end: Callable[[Run], None] | None = None  # called when a response has ended

    @property
    def num_ended_bytes(self) -> int:
        return self._ended_bytes

    def add(self, run: Run) -> LoggedResponse:
        """Register a running response."""
        logged = self._live[run.id] = LoggedResponse(run.id, run.owner, run.log, run)
        return logged

    def start_restoring(self, response_id: str) -> None:
        """Record that a response of another gateway is taken over: its log does not have all earlier events yet."""
        self._restoring[response_id] = asyncio.Event()

    def end_restoring(self, response_id: str) -> None:
        """Record that a response has all events that it had on the other gateway, or is not taken over."""
        if (restored := self._restoring.pop(response_id, None)) is not None:
            restored.set()

    async def wait_restored(self, response_id: str) -> None:
        """Wait while a response is being taken over."""
        if (restored := self._restoring.get(response_id)) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RESTORE_S):
                    await restored.wait()

    def end(self, response_id: str, *, keep: bool) -> None:
        """Record that a response ended and its log is closed.

        `keep`: it stays readable for a while; for other gateways only, and for `_DELETED_S`, if it is deleted.
        """
        self.end_restoring(response_id)
        found = self._live.pop(response_id, None)
        if found is None:
            return
        run, found.run, found.ended_s = found.run, None, self._clock()
        if self.on_end is not None and run is not None:
            self.on_end(run)
        if keep:
            self._ended[response_id] = found
            self._sizes[response_id] = found.num_bytes
            self._ended_bytes += found.num_bytes
            if found.is_deleted:
                asyncio.get_running_loop().call_later(_DELETED_S, self.remove, response_id)
        self._evict()

    def find(self, owner: str, response_id: str, *, deleted: bool = False) -> LoggedResponse | None:
        """Return a running or recently ended response of this owner.

        `deleted`: also one that ended because its conversation was deleted.
        """
        self._evict()
        found = self._live.get(response_id) or self._ended.get(response_id)
        if found is None or found.owner != owner or (found.is_deleted and found.run is None and not deleted):
            return None
        return found

    def get(self, owner: str, response_id: str, param: str = "response_id") -> LoggedResponse:
        """Return a running or recently ended response of this owner. Raises: NotFoundError."""
        found = self.find(owner, response_id)
        if found is None:
            raise NotFoundError(f"no response {response_id[:128]!r} is running or has recently ended", param=param)
        return found

    def running(self, owner: str | None = None) -> tuple[Run, ...]:
        """Return the running responses of one owner, or of all (None)."""
        runs = (each.run for each in self._live.values() if owner is None or each.owner == owner)
        return tuple(run for run in runs if run is not None)

    def conversations(self) -> set[tuple[str, str]]:
        """Return the owner and the id of each conversation that has logs here and is not known to be deleted."""
        logged = (each for each in (*self._live.values(), *self._ended.values()) if not each.is_deleted)
        return {(each.owner, found) for each in logged if (found := each.log.conversation_id) is not None}

    def remove(self, response_id: str) -> None:
        """Remove the log of an ended response that was deleted."""
        if self._ended.pop(response_id, None) is not None:
            self._ended_bytes -= self._sizes.pop(response_id)

    def remove_conversation(self, owner: str, conversation_id: str) -> tuple[Run, ...]:
        """Remove the logs of a deleted conversation, also those of its running responses when they end.

        Returns the running ones, which the caller cancels.
        """
        members = [
            each
            for each in (*self._live.values(), *self._ended.values())
            if each.owner == owner and each.log.conversation_id == conversation_id
        ]
        for each in members:
            if each.run is None and not each.is_deleted:
                self.remove(each.id)
            each.is_deleted = True
        return tuple(each.run for each in members if each.run is not None)

    def _evict(self) -> None:
        oldest_s = self._clock() - KEEP_ENDED_S
        while self._ended:
            first = next(iter(self._ended.values()))
            if first.ended_s >= oldest_s and self._ended_bytes <= self._max_ended_bytes:
                return
            self.remove(first.id)


CHECKPOINT_INTERVAL_S = 0.75  # with the time to write them, output is stored within a second
_MAX_BATCH = 64  # responses whose checkpoints are written at once


class Checkpointer:
    """Collects new output of running responses and stores it in batches; tokens themselves cost nothing more."""

    def __init__(self, responses: ResponseRegistry, store: ConversationStore) -> None:
        self._responses = responses
        self._store = store

    async def loop(self) -> None:
        """Store checkpoints until cancelled. While the store is unavailable, the output waits for the next round."""
        while True:
            await asyncio.sleep(CHECKPOINT_INTERVAL_S)
            try:
                with contextlib.suppress(StoreUnavailableError):
                    await self.save()
            except Exception:
                log.exception("checkpoints of running responses could not be stored")

    async def save(self) -> None:
        """Store the new output of all running responses. Raises: StoreUnavailableError."""
        batch: list[tuple[Run, list[ReplyCheckpoint]]] = []
        for run in self._responses.running():
            if checkpoints := await run.checkpoints():
                batch.append((run, checkpoints))
            if len(batch) == _MAX_BATCH:
                await self._write(batch)
                batch = []
        await self._write(batch)

    async def _write(self, batch: list[tuple[Run, list[ReplyCheckpoint]]]) -> None:
        if batch:
            await self._store.checkpoint([each for _, checkpoints in batch for each in checkpoints])
            for run, _ in batch:
                run.confirm_checkpoints()
