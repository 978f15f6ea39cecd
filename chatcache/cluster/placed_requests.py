"""The requests of a gateway: which worker runs each, and what it has emitted.

    submit --> worker --- notices --> journal --> event log of the client
       ^         |
    waiting <----+  the worker is lost, or has no room

The gateway records what each of its requests has emitted (`RequestJournal`). When a worker's lease expires, its
requests are resumed by other workers from these records; the client only notices a pause. Notices of a worker that
counts as dead are not read any more, so nothing arrives twice. A request that three workers did not survive fails.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from chatcache.cluster.remote_worker import RemoteWorker
from chatcache.cluster.request_router import RequestRouter, RoutedRequest
from chatcache.engine_process.client import EngineClientBase
from chatcache.engine_process.protocol import (
    Abort,
    Adopt,
    Answer,
    CancelCandidate,
    Command,
    Events,
    Notice,
    PromptScores,
    Reply,
    Submit,
    decode_error,
    encode_error,
)
from chatcache.engine_process.recovery import RequestJournal, refused_drop
from chatcache.errors import ChatcacheError, InvalidRequestError, OverloadedError, RequestPoisonedError
from chatcache.types.events import TERMINAL, EngineEvent, Finished, SearchStep
from chatcache.types.request import GenerateRequest

log = logging.getLogger(__name__)

MAX_LOST_WORKERS = 3  # that a request has run on before it counts as the cause

Item = PromptScores | SearchStep | EngineEvent


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """One command that made a worker send the events of a request to a gateway: `Submit` or `Adopt`.

    `call`: its number; the events follow the answer to it, in entries after `entry` of the worker's outbox. `last_seq`:
    the last event before it, None if all events that the attempt before has sent are valid.
    """

    gateway: str
    worker: str
    call: int
    entry: int
    last_seq: int | None = None


class RequestRecord(msgspec.Struct, frozen=True):
    """A request that another gateway can take over, see `takeover`.

    `numerics`: of the workers that ran it. `data`: what the gateway knows besides. `num_takeovers`: of
    two gateways that have taken the record over, the one with the higher number owns it.
    """

    request: GenerateRequest
    attempts: tuple[Attempt, ...]
    numerics: str
    data: bytes
    num_takeovers: int = 0


@dataclass(slots=True, eq=False)
class PlacedRequest:
    """A request from its submit to its terminal event, and the worker that runs it (None: it waits for one).

    `calls`: the number of its submit, and one for each worker that resumed it. `is_answered`: its worker has answered
    the last of them; events before that answer are of an earlier submit to the same worker. `attempts`, `data` and
    `num_takeovers`: see `RequestRecord`; without data the request has no record. `held`: what its worker sends while
    what it has sent before is read from the bus; None otherwise. `refused_by`: ids of the workers without room for it.
    """

    calls: list[int]
    journal: RequestJournal
    routed: RoutedRequest
    worker: RemoteWorker | None = None
    is_answered: bool = False
    is_accepted: bool = False
    is_aborted: bool = False
    is_moved: bool = False
    num_lost_workers: int = 0
    numerics: str = ""
    refused_by: set[str] = field(default_factory=set)
    attempts: list[Attempt] = field(default_factory=list)
    data: bytes | None = None
    num_takeovers: int = 0
    held: list[Item] | None = None

    @property
    def id(self) -> str:
        return self.journal.request.request_id

    @property
    def needs_new_record(self) -> bool:
        """Whether the record must name the next worker before the request is sent there."""
        return self.is_moved and self.data is not None

    @classmethod
    def from_record(cls, record: RequestRecord, routed: RoutedRequest) -> PlacedRequest:
        """Return the request of a record, whose events are held."""
        return cls(
            [],
            RequestJournal(record.request),
            routed,
            is_accepted=True,
            num_lost_workers=len({each.worker for each in record.attempts}) - 1,
            numerics=record.numerics,
            attempts=list(record.attempts),
            data=record.data,
            num_takeovers=record.num_takeovers,
            held=[],
        )

    def to_record(self) -> RequestRecord:
        """Return what another gateway needs to take the request over."""
        attempts = tuple(self.attempts)
        return RequestRecord(self.journal.request, attempts, self.numerics, self.data or b"", self.num_takeovers)

    def resume_error(self) -> ChatcacheError | None:
        """Return why no other worker can resume the request; None if one can."""
        if self.num_lost_workers >= MAX_LOST_WORKERS:
            return RequestPoisonedError(f"{MAX_LOST_WORKERS} engine workers ended while they ran this request")
        if self.journal.is_resumable:
            return None
        reason = "the engine worker ended; the record of this search is too long to continue it"
        return OverloadedError(f"{reason}: send the request again", code="engine_unavailable")


class PlacedRequests:
    """All requests of a gateway, between its `client` and the workers.

    Belongs to one event loop. `workers`: the connected ones by id, which the caller changes. `numbers`: of calls.
    `write_records` stores records, and returns whether the bus has answered.
    """

    def __init__(
        self,
        router: RequestRouter,
        workers: Mapping[str, RemoteWorker],
        numbers: Iterator[int],
        write_records: Callable[[Sequence[RequestRecord]], Awaitable[bool]],
    ) -> None:
        self.client = EngineClientBase(self._send, numbers=numbers)
        self.num_moved = 0
        self._router = router
        self._workers = workers
        self._numbers = numbers
        self._write_records = write_records
        self._routed: dict[str, RoutedRequest] = {}  # located, not yet submitted
        self._by_id: dict[str, PlacedRequest] = {}
        self._by_call: dict[int, PlacedRequest] = {}
        self._drops: dict[int, CancelCandidate] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[PlacedRequest]:
        return iter(self._by_id.values())

    def get(self, request_id: str) -> PlacedRequest | None:
        return self._by_id.get(request_id)

    def forget(self, placed: PlacedRequest) -> None:
        """Remove a request that has ended, or that another gateway continues."""
        self._by_id.pop(placed.id, None)
        for call in placed.calls:
            self._by_call.pop(call, None)
        self._router.release(placed.routed)

    def fail_all(self, error: ChatcacheError) -> None:
        """End all requests with an error, since this gateway ends."""
        self._by_id.clear()
        self.client.fail_all(error)

    # -- commands -----------------------------------------------------------------------------------------------------

    async def submit(self, request: GenerateRequest) -> None:
        """Send a request to a worker, and wait until it is accepted. Raises: as `EngineClient.submit`."""
        self._routed[request.request_id] = await self._router.locate(request)
        try:
            await self.client.submit(request)
        finally:
            self._routed.pop(request.request_id, None)

    def _send(self, command: Command) -> None:
        """Send a command of a request to its worker, or apply it here while no worker runs the request."""
        if isinstance(command, Submit):
            self._submit_new(command)
        elif isinstance(command, Abort | CancelCandidate):
            found = self._by_id.get(command.request_id)
            if found is None:
                if isinstance(command, CancelCandidate):
                    self.client.receive(Answer(command.call))
            elif found.worker is None:
                self._end_waiting(found, command)
            else:
                if isinstance(command, Abort):
                    found.is_aborted = True
                else:
                    self._drops[command.call] = command
                found.worker.send(command)

    def _submit_new(self, command: Submit) -> None:
        routed = self._routed.pop(command.request.request_id)
        placed = PlacedRequest([command.call], RequestJournal(command.request), routed)
        if placed.id in self._by_id:  # it was aborted and has not ended yet
            raise InvalidRequestError(f"request_id {placed.id!r} is already active", param="request_id")
        self._by_id[placed.id] = self._by_call[command.call] = placed
        try:
            if (worker := self._choose(placed)) is not None:
                self._submit_to(placed, worker, self._reserve(placed, worker))
        except ChatcacheError:
            self.forget(placed)
            raise

    def _choose(self, placed: PlacedRequest) -> RemoteWorker | None:
        """Choose a ready worker: that of the forked request, else by cost; one with the same numerics."""
        fork_of, source = placed.journal.request.fork_of, None
        if fork_of is not None and (forked := self._by_id.get(fork_of.request_id)) is not None:
            source = forked.worker.id if forked.worker is not None else None
        if not placed.refused_by and not placed.numerics:
            found = self._workers.get(self._router.choose(placed.routed, required=source) or "")
            if found is not None and found.is_ready:
                return found
        ready = [worker for worker in self._workers.values() if worker.is_ready and worker.id not in placed.refused_by]
        ready = [worker for worker in ready if worker.status.numerics == placed.numerics] or ready
        chosen = self._router.choose(placed.routed, [worker.id for worker in ready], source)
        return None if chosen is None else self._workers[chosen]

    def _reserve(self, placed: PlacedRequest, worker: RemoteWorker) -> int | None:
        """Reserve the chosen worker; return the prompt tokens to compute there, if the index knows."""
        if placed.is_moved:  # with a call of its own, as the worker ignores a submit that it has
            self._add_attempt(placed, worker, placed.journal.last_seq)
        else:
            placed.attempts = [Attempt(worker.gateway, worker.id, placed.calls[0], worker.position)]
        return self._router.reserve(placed.routed)

    def _add_attempt(self, placed: PlacedRequest, worker: RemoteWorker, last_seq: int | None = None) -> None:
        call = next(self._numbers)
        placed.calls.append(call)
        self._by_call[call] = placed
        placed.attempts.append(Attempt(worker.gateway, worker.id, call, worker.position, last_seq))

    def _submit_to(self, placed: PlacedRequest, worker: RemoteWorker, num_new: int | None) -> None:
        """Send a request to its reserved worker. Raises: InvalidRequestError if it exceeds a frame."""
        request = placed.journal.resumed_request() if placed.is_moved else placed.journal.request
        worker.send(Submit(placed.calls[-1], request, num_new))
        placed.worker, placed.numerics, placed.is_answered = worker, worker.status.numerics, False

    async def place_waiting(self) -> None:
        """Send the waiting requests to workers; those with a record, when it names the worker.

        Events that no record leads to would be lost for the gateway that takes the request over.
        """
        placing: list[tuple[PlacedRequest, RemoteWorker, int | None]] = []
        for placed in [each for each in self if each.worker is None and each.held is None]:
            if (worker := self._choose(placed)) is not None:
                placing.append((placed, worker, self._reserve(placed, worker)))
            else:
                placed.refused_by.clear()  # these workers may have room next time
        records = [placed.to_record() for placed, _, _ in placing if placed.needs_new_record]
        is_recorded = not records or await self._write_records(records)
        for placed, worker, num_new in placing:
            if self._by_id.get(placed.id) is not placed:  # it has ended meanwhile
                continue
            if worker.is_lost or (placed.needs_new_record and not is_recorded):
                self._router.release(placed.routed)
                continue
            try:
                self._submit_to(placed, worker, num_new)
            except ChatcacheError as error:  # it exceeds a frame
                self._end(placed, error)

    def _end_waiting(self, placed: PlacedRequest, command: Abort | CancelCandidate) -> None:
        """Apply the end of a request, or of one of its candidates, that no worker runs."""
        if isinstance(command, Abort):
            self._abort_waiting(placed)
            return
        reply = Answer(command.call)
        if not placed.journal.has_independent_candidates:
            reply = refused_drop(command)
        elif (done := placed.journal.cancelled_candidate_event(command.index)) is not None:
            if placed.journal.num_unfinished == 1:
                self._abort_waiting(placed)
            else:
                self._emit(placed, done)
        self.client.receive(reply)

    def _abort_waiting(self, placed: PlacedRequest) -> None:
        if placed.is_accepted:
            self._emit(placed, placed.journal.cancelled_event())
        else:
            self.forget(placed)

    # -- notices ------------------------------------------------------------------------------------------------------

    def receive(self, worker: RemoteWorker, notice: Notice) -> None:
        """Record and pass on a notice. Raises: ValueError for events that are out of order."""
        if isinstance(notice, Reply):
            self._receive_reply(worker, notice)
        elif isinstance(notice, PromptScores):
            if (placed := self._runs(worker, notice.request_id)) is not None:
                self._apply(placed, notice)
        elif isinstance(notice, Events):
            for item in (*notice.search_steps, *notice.events):
                if (placed := self._runs(worker, item.request_id)) is not None:
                    self._apply(placed, item)

    def _apply(self, placed: PlacedRequest, item: Item) -> None:
        """Record and pass on what a worker has sent of a request. Raises: ValueError for an event out of order."""
        if placed.held is not None:
            placed.held.append(item)
        elif isinstance(item, PromptScores):
            self.client.receive(item)
        elif isinstance(item, SearchStep):
            placed.journal.record_search_step(item.record)
        else:
            if not placed.routed.is_prefilled:
                self._router.started(placed.routed, item)
            if isinstance(item, Finished):
                self._router.finished(placed.routed, placed.journal.candidate_tokens)
            self._emit(placed, item)

    def _receive_reply(self, worker: RemoteWorker, reply: Reply) -> None:
        drop = self._drops.get(reply.call)
        if drop is not None:
            found = self._by_id.get(drop.request_id)
            if found is not None and found.worker is not worker:
                return  # of a worker that has refused the request: another one has it, and the drop
            del self._drops[reply.call]
        placed = self._by_call.get(reply.call)
        error = reply.error if isinstance(reply, Answer) else None
        if placed is None:
            worker.queries.receive(reply)
            self.client.receive(reply)
        elif placed.worker is not worker or reply.call != placed.calls[-1]:
            return
        elif placed.held is not None and error is not None:  # it does not run there any more
            placed.worker = None
        elif error is None:
            placed.is_answered = True
            if not placed.is_accepted:
                placed.is_accepted = True
                self.client.receive(Answer(placed.calls[0]))
        elif error.kind != OverloadedError.__name__ or not self._place_elsewhere(placed, worker):
            self._end(placed, decode_error(error))

    def _place_elsewhere(self, placed: PlacedRequest, worker: RemoteWorker) -> bool:
        """Send a request that a worker has no room for to another one; return False if there is none.

        A request with a record waits until `place_waiting` has written it. One that was aborted ends.
        """
        placed.refused_by.add(worker.id)
        placed.worker = None
        self._router.release(placed.routed)
        if placed.is_aborted:
            self._abort_waiting(placed)
            return True
        other = self._choose(placed)
        if other is None:
            return False
        if not placed.needs_new_record:
            self._submit_to(placed, other, self._reserve(placed, other))
        for call in [call for call, drop in self._drops.items() if drop.request_id == placed.id]:
            self._send(self._drops.pop(call))  # again, to the other worker
        return True

    def _runs(self, worker: RemoteWorker, request_id: str) -> PlacedRequest | None:
        placed = self._by_id.get(request_id)
        return placed if placed is not None and placed.worker is worker and placed.is_answered else None

    def _emit(self, placed: PlacedRequest, event: EngineEvent) -> None:
        """Record an event, and send it to the client."""
        placed.journal.record(event)
        if isinstance(event, TERMINAL):
            self.forget(placed)
        self.client.receive(Events((event,)))

    def _end(self, placed: PlacedRequest, error: ChatcacheError) -> None:
        """Fail a request: answer its submit with the error, or emit `Failed` if it was accepted."""
        if placed.is_accepted:
            self._emit(placed, placed.journal.failed_event(error))
        else:
            self.forget(placed)
            self.client.receive(Answer(placed.calls[0], error=encode_error(error)))

    # -- changes of workers and gateways ------------------------------------------------------------------------------

    def leave_worker(self, worker: RemoteWorker, num_lost: int) -> None:
        """Let the requests of a lost worker wait for another one.

        `num_lost`: 1 if the worker may have ended because of one of them.
        """
        moved = [placed for placed in self if placed.worker is worker]
        if worker.status.is_draining and not moved:
            log.info("worker %s has drained and left", worker.id)
        else:
            log.warning("worker %s is lost; %d requests are resumed by others", worker.id, len(moved))
        for placed in moved:
            placed.num_lost_workers += num_lost
            self._router.release(placed.routed)
            if placed.held is not None:
                placed.worker = None
            else:
                self._suspend(placed)
        for call, drop in list(self._drops.items()):
            found = self._by_id.get(drop.request_id)
            if found is None:
                del self._drops[call]
                self.client.receive(Answer(call))
            elif found.worker is None:
                del self._drops[call]
                self._end_waiting(found, drop)

    def _suspend(self, placed: PlacedRequest) -> None:
        """Let a request that its worker does not continue wait for another one, unless it must end."""
        placed.worker, placed.is_moved = None, True
        if placed.is_aborted:
            self._abort_waiting(placed)
        elif (error := placed.resume_error()) is not None:
            self._end(placed, error)
        else:
            self.num_moved += 1

    async def open_recorded(self, record: RequestRecord) -> PlacedRequest:
        """Add the request of a record; its events are held until `replay`.

        Raises: InvalidRequestError if this gateway has the log of the request already.
        """
        routed = await self._router.locate(record.request)
        self.client.open_log(record.request.request_id)
        placed = self._by_id[record.request.request_id] = PlacedRequest.from_record(record, routed)
        worker = self._workers.get(record.attempts[-1].worker)
        if worker is not None and not worker.is_lost:
            placed.worker = worker
            self._add_attempt(placed, worker)
        return placed

    def adopt(self, placed: PlacedRequest, gateway: str) -> None:
        """Ask the worker that runs a request, if any, to send its events to this gateway instead of `gateway`."""
        if placed.worker is not None:
            placed.worker.send(Adopt(placed.calls[-1], placed.id, gateway))

    def replay(self, placed: PlacedRequest, items: Sequence[Item]) -> None:
        """Repeat all that was sent of a request, and what was held meanwhile; then resume it if no worker runs it."""
        held, placed.held = placed.held or [], None
        for item in (*items, *held):
            self._apply(placed, item)
        if placed.worker is None and placed.id in self._by_id:
            self._suspend(placed)

    def give_up(self, placed: PlacedRequest) -> None:
        """End a request that this gateway has taken over and cannot continue."""
        if placed.worker is not None:
            placed.worker.send(Abort(placed.id))
        self.forget(placed)
        self.client.drop_log(placed.id)
