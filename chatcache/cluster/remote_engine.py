"""EngineClient of the engine workers on a bus, as the gateway uses it.

The gateway records what each of its requests has emitted (`RequestJournal`). When a worker's lease expires, its
requests are resumed by other workers from these records; the client only notices a pause. Notices of a worker that
counts as dead are not read any more, so nothing arrives twice. A request that three workers did not survive fails.

A request is sent to the worker with the lowest cost in seconds, see `request_router`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from chatcache.cluster import bus
from chatcache.cluster.redis_placement import RedisPlacementIndex
from chatcache.cluster.request_router import COST, RequestRouter, RoutedRequest
from chatcache.engine_process.client import EngineClientBase
from chatcache.engine_process.protocol import (
    FRAME_HEADER_BYTES,
    Abort,
    Answer,
    CancelCandidate,
    Command,
    Events,
    FrameTooLargeError,
    Notice,
    PromptScores,
    Reply,
    Submit,
    decode_error,
    decode_notice,
    encode,
    encode_error,
)
from chatcache.engine_process.recovery import RequestJournal
from chatcache.errors import (
    ChatcacheError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    RequestPoisonedError,
    UnsupportedParameterError,
)
from chatcache.types.events import TERMINAL, EngineEvent, Finished
from chatcache.types.request import GenerateRequest
from chatcache.types.stats import (
    Durations,
    EngineHealth,
    ExplainQuery,
    Explanation,
    ModelInfo,
    PackedPrompt,
    PageAccounts,
    PageMap,
    SlotUsage,
)

log = logging.getLogger(__name__)
Result = TypeVar("Result")

MAX_REPORT_AGE_S = 0.1
MAX_LOST_WORKERS = 3  # that a request has run on before it counts as the cause
_POLL_S = 0.5
_NO_WORKER = "no engine worker is ready"


class RemoteWorker:
    """One life of a worker process, as a gateway sees it.

    `receive` is called with this worker and each of its notices, `receive_loads` with its load when it changes;
    `is_lost` is set when its notices have a gap.
    """

    def __init__(
        self,
        client: bus.Client,
        status: bus.WorkerStatus,
        gateway: str,
        numbers: itertools.count[int],
        receive: Callable[[RemoteWorker, Notice], None],
        receive_loads: Callable[[str, bus.Loads, str], None],
    ) -> None:
        self.status = status
        self.is_lost = False
        self.queries = EngineClientBase(self.send, numbers=numbers)
        self._client = client
        self._gateway = gateway
        self._receive = receive
        self._receive_loads = receive_loads
        self._commands: list[bytes] = []
        self._writer = bus.StreamWriter(client, bus.inbox(status.id), self._take)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def id(self) -> str:
        return self.status.id

    @property
    def is_ready(self) -> bool:
        return self.status.health.ready and not self.status.is_draining and not self.is_lost

    async def start(self) -> None:
        """Read this worker's notices from now on. Raises: an error of `bus.OUTAGES`."""
        last = await bus.last_entry(self._client, bus.outbox(self.id))
        self._tasks = [asyncio.create_task(self._read(last)), asyncio.create_task(self._writer.run())]

    def send(self, command: Command) -> None:
        """Send a command.

        Raises: InvalidRequestError for a command that cannot be encoded; nothing was sent then.
        """
        try:
            self._commands.append(encode(command)[FRAME_HEADER_BYTES:])
        except (FrameTooLargeError, msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
            raise InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error
        self._writer.wake()

    async def close(self) -> None:
        """Stop reading and writing; pending queries fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.queries.fail_calls(OverloadedError("the engine worker ended", code="engine_unavailable"))

    def _take(self) -> Mapping[bytes, bytes]:
        if not self._commands:
            return {}
        commands, self._commands = self._commands, []
        return {bus.FROM: self._gateway.encode(), bus.COMMANDS: bus.encode_list(commands)}

    async def _read(self, last: str) -> None:
        reader = bus.StreamReader(self._client, bus.outbox(self.id), last)
        expected = int(last.partition("-")[0]) + 1
        own = self._gateway.encode()
        while not self.is_lost:
            for number, fields in await reader.read():
                if number != expected:
                    log.error("notices %d to %d of worker %s are missing", expected, number - 1, self.id)
                    self.is_lost = True
                    return
                expected += 1
                try:
                    if bus.LOADS in fields:
                        self._receive_loads(self.id, bus.decode_loads(fields[bus.LOADS]), self._gateway)
                    for body in bus.decode_list(fields[own]) if own in fields else ():
                        self._receive(self, decode_notice(body))
                except (msgspec.MsgspecError, ValueError) as error:
                    log.error("notice %d of worker %s is invalid: %s", number, self.id, error)
                    self.is_lost = True
                    return


@dataclass(slots=True, eq=False)
class PlacedRequest:
    """A request from its submit to its terminal event, and the worker that runs it (None: it waits for one).

    `calls`: the number of its submit, and one for each worker that resumed it. `is_answered`: its worker has answered
    the last of them; events before that answer are of an earlier submit to the same worker.
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

    @property
    def id(self) -> str:
        return self.journal.request.request_id


class RemoteEngine:
    """EngineClient of all workers on a bus.

    Belongs to one event loop. `name` is the first part of this gateway's id on the bus. `routing`: cost | hash.
    """

    def __init__(self, url: str, name: str, routing: str = COST) -> None:
        self._url = url
        self._name = name
        self._routing = routing
        self._router = RequestRouter(None)
        self._routed: dict[str, RoutedRequest] = {}  # located, not yet submitted
        self._numbers = itertools.count(1)
        self._client = EngineClientBase(self._route, numbers=self._numbers)
        self._workers: dict[str, RemoteWorker] = {}
        self._refused: set[str] = set()  # ids of workers of another model
        self._requests: dict[str, PlacedRequest] = {}
        self._by_call: dict[int, PlacedRequest] = {}
        self._drops: dict[int, CancelCandidate] = {}
        self._redis: bus.Client = None
        self._id = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._has_lease = asyncio.Event()
        self._loaded = asyncio.Event()
        self._error: ChatcacheError | None = None
        self._failed = asyncio.Event()
        self._health: EngineHealth | None = None
        self._added_at = 0.0
        self.model_info: ModelInfo | None = None
        self.num_moved = 0

    async def __aenter__(self) -> RemoteEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def id(self) -> str:
        """This gateway's id on the bus; it changes when its lease has expired."""
        return self._id

    @property
    def workers(self) -> list[bus.WorkerStatus]:
        """The last status of each connected worker."""
        return [worker.status for worker in self._workers.values()]

    async def start(self) -> None:
        """Connect to the bus; returns at once. Calling again is harmless."""
        if not self._tasks:
            self._redis = bus.connect(self._url)
            index = RedisPlacementIndex(self._redis) if self._routing == COST else None
            self._router = RequestRouter(index)
            self._tasks = [asyncio.create_task(self._hold_lease()), asyncio.create_task(self._watch_workers())]
            if index is not None:
                self._tasks.append(asyncio.create_task(index.run()))
            for task in self._tasks:
                task.add_done_callback(self._on_task_end)

    async def wait_loaded(self) -> ModelInfo:
        """Wait until the first worker is ready. Raises: EngineError when closed before."""
        await self._loaded.wait()
        if self.model_info is None:
            raise EngineError("the gateway was closed")
        return self.model_info

    async def wait_failed(self) -> ChatcacheError:
        """Wait until this client ends by an error of its own; workers may come and go."""
        await self._failed.wait()
        return self._error or EngineError("the gateway was closed")

    async def close(self, grace_s: float = 0.0) -> None:
        """Leave the bus: the workers abort the requests of a gateway without a lease."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))
        if self._redis is not None:
            with bus.ignore_outages():
                await self._redis.delete(bus.gateway_key(self._id))
            await self._redis.aclose()
        self._requests.clear()
        self._client.fail_all(EngineError("the gateway was closed"))
        self._loaded.set()

    def kill(self) -> None:
        """End without waiting: the leases expire."""

    # -- EngineClient -------------------------------------------------------------------------------------------------

    async def submit(self, request: GenerateRequest) -> None:
        self._check(request.prompt)
        routed = await self._router.locate(request)
        self._routed[request.request_id] = routed
        try:
            await self._client.submit(request)
        finally:
            self._routed.pop(request.request_id, None)

    def events(self, request_id: str, after: int = 0) -> AsyncIterator[EngineEvent]:
        return self._client.events(request_id, after)

    def num_tokens_sent(self, request_id: str) -> int:
        return self._client.num_tokens_sent(request_id)

    async def abort(self, request_id: str) -> None:
        self._client.abort(request_id)

    async def cancel_candidate(self, request_id: str, index: int) -> None:
        await self._client.cancel_candidate(request_id, index)

    async def health(self) -> EngineHealth:
        """Return the sum of the workers' health reports, and what was sent to each; ready if one of them is.

        It is computed at most once in MAX_REPORT_AGE_S: each request asks for it, and a sum takes 12 us per worker.
        """
        if not any(worker.is_ready for worker in self._workers.values()):
            return EngineHealth(ready=False, detail=_NO_WORKER, num_waiting=len(self._requests))
        now = asyncio.get_running_loop().time()
        if self._health is None or now - self._added_at >= MAX_REPORT_AGE_S:
            reports = [worker.status.health for worker in self._workers.values() if not worker.is_lost]
            total = add_reports([report for report in reports if report.ready])
            self._health, self._added_at = msgspec.structs.replace(total, workers=self._router.reports()), now
        return self._health

    async def explain(self, query: ExplainQuery) -> Explanation:
        self._check(query.prompt)
        found = await self._ask_all(lambda worker: worker.queries.explain(query))
        return max(found, key=lambda each: each.num_cached_tokens)

    async def count_cached_tokens(self, prompts: Sequence[PackedPrompt], namespace: str = "") -> list[int]:
        self._check()
        counts = await self._ask_all(lambda worker: worker.queries.count_cached_tokens(prompts, namespace))
        return [max(column) for column in zip(*counts, strict=True)]

    async def page_map(self, namespace: str = "", *, operator: bool = False) -> PageMap:
        """Return the maps of all workers one after the other."""
        self._check()
        maps = await self._ask_all(lambda worker: worker.queries.page_map(namespace, operator))
        return PageMap(
            page_size=maps[0].page_size,
            num_pages=sum(each.num_pages for each in maps),
            num_pages_per_cell=max(each.num_pages_per_cell for each in maps),
            cells="".join(each.cells for each in maps),
        )

    async def page_accounts(self) -> PageAccounts:
        self._check()
        found = await self._ask_all(lambda worker: worker.queries.page_accounts())
        return PageAccounts(
            num_pages_in_use=sum(each.num_pages_in_use for each in found),
            page_bytes=found[0].page_bytes,
            requests=_sum_by_key(each.requests for each in found),
            conversations=_sum_by_key(each.conversations for each in found),
            namespaces=_sum_by_key(each.namespaces for each in found),
            states=_sum_by_key(each.states for each in found),
        )

    async def stats(self) -> Any:
        """Return the statistics of each worker by its name."""
        self._check()
        workers = [worker for worker in self._workers.values() if worker.is_ready]
        found = await asyncio.gather(*(worker.queries.invoke("stats") for worker in workers))
        return {worker.status.name: each for worker, each in zip(workers, found, strict=True)}

    async def reset_prefix_cache(self) -> bool:
        self._check()
        return all(await self._ask_all(lambda worker: worker.queries.invoke("reset_prefix_cache")))

    async def _ask_all(self, ask: Callable[[RemoteWorker], Awaitable[Result]]) -> list[Result]:
        """Ask all ready workers. Raises: OverloadedError if one of them ends meanwhile."""
        return list(await asyncio.gather(*(ask(worker) for worker in self._workers.values() if worker.is_ready)))

    def _check(self, prompt: Sequence[int] = ()) -> None:
        """Raise: OverloadedError without a ready worker, ContextLengthError."""
        if self.model_info is None or not any(worker.is_ready for worker in self._workers.values()):
            raise OverloadedError(_NO_WORKER, code="engine_unavailable" if self.model_info else "model_loading")
        if len(prompt) > self.model_info.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens; "
                f"this model's maximum context length is {self.model_info.max_model_len} tokens",
                param="prompt",
            )

    # -- commands -----------------------------------------------------------------------------------------------------

    def _route(self, command: Command) -> None:
        """Send a command of a request to its worker, or apply it here while no worker runs the request."""
        if isinstance(command, Submit):
            routed = self._routed.pop(command.request.request_id)
            placed = PlacedRequest([command.call], RequestJournal(command.request), routed)
            if placed.id in self._requests:  # it was aborted and has not ended yet
                raise InvalidRequestError(f"request_id {placed.id!r} is already active", param="request_id")
            self._requests[placed.id] = self._by_call[command.call] = placed
            try:
                self._place(placed)
            except ChatcacheError:
                self._forget(placed)
                raise
        elif isinstance(command, Abort | CancelCandidate):
            found = self._requests.get(command.request_id)
            if found is None:
                if isinstance(command, CancelCandidate):
                    self._client.receive(Answer(command.call))
            elif found.worker is None:
                self._end_waiting(found, command)
            else:
                if isinstance(command, Abort):
                    found.is_aborted = True
                else:
                    self._drops[command.call] = command
                found.worker.send(command)

    def _place(self, placed: PlacedRequest) -> None:
        """Send a request to a worker; without one it waits."""
        worker = self._choose(placed)
        if worker is None:
            return
        num_new = self._router.reserve(placed.routed)
        if placed.is_moved:  # with a number of its own, as the worker ignores a submit that it has
            call = next(self._numbers)
            placed.calls.append(call)
            self._by_call[call] = placed
            worker.send(Submit(call, placed.journal.resumed_request(), num_new))
        else:
            worker.send(Submit(placed.calls[0], placed.journal.request, num_new))
        placed.worker, placed.numerics, placed.is_answered = worker, worker.status.numerics, False

    def _choose(self, placed: PlacedRequest) -> RemoteWorker | None:
        """Choose a ready worker: that of the forked request, else by cost; one with the same numerics."""
        fork_of, source = placed.journal.request.fork_of, None
        if fork_of is not None and (forked := self._requests.get(fork_of.request_id)) is not None:
            source = forked.worker.id if forked.worker is not None else None
        if not placed.refused_by and not placed.numerics:
            found = self._workers.get(self._router.choose(placed.routed, required=source) or "")
            if found is not None and found.is_ready:
                return found
        ready = [worker for worker in self._workers.values() if worker.is_ready and worker.id not in placed.refused_by]
        ready = [worker for worker in ready if worker.status.numerics == placed.numerics] or ready
        chosen = self._router.choose(placed.routed, [worker.id for worker in ready], source)
        return None if chosen is None else self._workers[chosen]

    def _end_waiting(self, placed: PlacedRequest, command: Abort | CancelCandidate) -> None:
        """Apply the end of a request, or of one of its candidates, that no worker runs."""
        if isinstance(command, Abort):
            self._abort_waiting(placed)
            return
        reply = Answer(command.call)
        if not placed.journal.has_independent_candidates:
            error = UnsupportedParameterError(
                "this candidate cannot be dropped alone: cancel the response", param="candidate"
            )
            reply = Answer(command.call, error=encode_error(error))
        elif (done := placed.journal.cancelled_candidate_event(command.index)) is not None:
            if placed.journal.num_unfinished == 1:
                self._abort_waiting(placed)
            else:
                self._emit(placed, done)
        self._client.receive(reply)

    def _abort_waiting(self, placed: PlacedRequest) -> None:
        if placed.is_accepted:
            self._emit(placed, placed.journal.cancelled_event())
        else:
            self._forget(placed)

    # -- notices ------------------------------------------------------------------------------------------------------

    def _receive(self, worker: RemoteWorker, notice: Notice) -> None:
        """Record and pass on a notice. Raises: ValueError for events that are out of order."""
        if isinstance(notice, Reply):
            self._receive_reply(worker, notice)
        elif isinstance(notice, PromptScores):
            if self._runs(worker, notice.request_id) is not None:
                self._client.receive(notice)
        elif isinstance(notice, Events):
            for step in notice.search_steps:
                if (search := self._runs(worker, step.request_id)) is not None:
                    search.journal.record_search_step(step.record)
            events: list[EngineEvent] = []
            for event in notice.events:
                placed = self._runs(worker, event.request_id)
                if placed is None:
                    continue
                placed.journal.record(event)
                events.append(event)
                if not placed.routed.is_prefilled:
                    self._router.started(placed.routed, event)
                if isinstance(event, Finished):
                    self._router.finished(placed.routed, placed.journal.candidate_tokens)
                if isinstance(event, TERMINAL):
                    self._forget(placed)
            if events:
                self._client.receive(Events(tuple(events)))

    def _receive_reply(self, worker: RemoteWorker, reply: Reply) -> None:
        self._drops.pop(reply.call, None)
        placed = self._by_call.get(reply.call)
        error = reply.error if isinstance(reply, Answer) else None
        if placed is None:
            worker.queries.receive(reply)
            self._client.receive(reply)
        elif placed.worker is not worker or reply.call != placed.calls[-1]:
            return
        elif error is None:
            placed.is_answered = True
            if not placed.is_accepted:
                placed.is_accepted = True
                self._client.receive(Answer(placed.calls[0]))
        elif error.kind != OverloadedError.__name__ or not self._place_elsewhere(placed, worker):
            self._end(placed, decode_error(error))

    def _place_elsewhere(self, placed: PlacedRequest, worker: RemoteWorker) -> bool:
        """Send a request that a worker has no room for to another one; return whether there is one."""
        placed.refused_by.add(worker.id)
        if self._choose(placed) is None:
            return False
        self._place(placed)
        return True

    def _runs(self, worker: RemoteWorker, request_id: str) -> PlacedRequest | None:
        placed = self._requests.get(request_id)
        return placed if placed is not None and placed.worker is worker and placed.is_answered else None

    def _emit(self, placed: PlacedRequest, event: EngineEvent) -> None:
        """Record an event that no worker sent, and send it to the client."""
        placed.journal.record(event)
        if isinstance(event, TERMINAL):
            self._forget(placed)
        self._client.receive(Events((event,)))

    def _forget(self, placed: PlacedRequest) -> None:
        self._requests.pop(placed.id, None)
        for call in placed.calls:
            del self._by_call[call]
        self._router.release(placed.routed)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("the connection to the bus failed", exc_info=error)
            self._error = EngineError(f"the connection to the bus failed: {error}")
            self._failed.set()

    # -- workers ------------------------------------------------------------------------------------------------------

    async def _hold_lease(self) -> None:
        """Hold this gateway's lease. When it expired, the workers end its requests: resume them under a new id."""
        while True:
            name = bus.new_id(self._name)
            lease = bus.Lease(self._redis, bus.gateway_key(name))
            while not lease.is_acquired:
                await lease.renew(b"1")
                await asyncio.sleep(0 if lease.is_acquired else bus.RETRY_S)
            self._id = name
            for worker in list(self._workers.values()):  # which are not at fault, and used again
                await self._remove(worker, num_lost=0)
            self._has_lease.set()
            while await lease.renew(b"1"):  # noqa: ASYNC110 - time is what matters
                await asyncio.sleep(bus.RENEW_S)
            log.error("the lease of this gateway expired: its requests are resumed")

    async def _watch_workers(self) -> None:
        """Connect to workers that hold a lease, and move the requests of those that do not any more."""
        await self._has_lease.wait()
        while True:
            with bus.ignore_outages():
                await self._update_workers()
            self._place_waiting()
            await asyncio.sleep(_POLL_S)

    async def _update_workers(self) -> None:
        ids = sorted(each.decode() for each in await self._redis.smembers(bus.WORKERS))
        values = await self._redis.mget([bus.worker_key(each) for each in ids]) if ids else []
        found = dict(zip(ids, values, strict=True))
        self._refused.intersection_update(ids)
        for worker in list(self._workers.values()):
            if worker.is_lost or not found.get(worker.id):
                await self._remove(worker)
        for each, value in found.items():
            status = bus.decode_status(value)
            if value is None:
                await self._redis.srem(bus.WORKERS, each)
            elif status is None or each in self._refused:
                continue
            elif (known := self._workers.get(each)) is not None:
                known.status = status
            else:
                await self._add(status)
        self._router.update([worker.status for worker in self._workers.values() if worker.is_ready])

    async def _add(self, status: bus.WorkerStatus) -> None:
        if self.model_info is not None and status.model_info.digest != self.model_info.digest:
            log.error("worker %s serves another model (%s): it is not used", status.id, status.model_info.name)
            self._refused.add(status.id)
            return
        worker = RemoteWorker(self._redis, status, self._id, self._numbers, self._receive, self._router.update_load)
        await worker.start()
        self._workers[status.id] = worker
        self._router.connect(status, self._id)
        log.info("worker %s is connected", status.id)
        if status.health.ready:
            self.model_info = status.model_info
            self._loaded.set()

    async def _remove(self, worker: RemoteWorker, num_lost: int = 1) -> None:
        """Disconnect from a worker, and let its requests wait for another one.

        `num_lost`: 1 if the worker may have ended because of one of them.
        """
        worker.is_lost = True
        await worker.close()
        self._workers.pop(worker.id, None)
        moved = [placed for placed in self._requests.values() if placed.worker is worker]
        log.warning("worker %s is lost; %d requests are resumed by others", worker.id, len(moved))
        for placed in moved:
            placed.num_lost_workers += num_lost
            placed.is_moved = True
            self._router.release(placed.routed)
            self._suspend(placed)
        self._router.disconnect(worker.id)
        for call, drop in list(self._drops.items()):
            found = self._requests.get(drop.request_id)
            if found is None:
                del self._drops[call]
                self._client.receive(Answer(call))
            elif found.worker is None:
                del self._drops[call]
                self._end_waiting(found, drop)

    def _suspend(self, placed: PlacedRequest) -> None:
        """Let a request of a lost worker wait for another one, unless it must end."""
        placed.worker = None
        if placed.is_aborted:
            self._abort_waiting(placed)
        elif placed.num_lost_workers >= MAX_LOST_WORKERS:
            reason = f"{MAX_LOST_WORKERS} engine workers ended while they ran this request"
            self._end(placed, RequestPoisonedError(reason))
        elif not placed.journal.is_resumable:
            reason = "the engine worker ended; the record of this search is too long to continue it"
            self._end(placed, OverloadedError(f"{reason}: send the request again", code="engine_unavailable"))
        else:
            self.num_moved += 1

    def _place_waiting(self) -> None:
        for placed in [each for each in self._requests.values() if each.worker is None]:
            try:
                self._place(placed)
            except ChatcacheError as error:  # it exceeds a frame
                self._end(placed, error)

    def _end(self, placed: PlacedRequest, error: ChatcacheError) -> None:
        """Fail a request: answer its submit with the error, or emit `Failed` if it was accepted."""
        if placed.is_accepted:
            self._emit(placed, placed.journal.failed_event(error))
        else:
            self._forget(placed)
            self._client.receive(Answer(placed.calls[0], error=encode_error(error)))


_SUMMED = ("kv_bytes", "state_bytes", "max_queued_requests", "max_queued_tokens", "owed_s")


def add_reports(reports: Sequence[EngineHealth]) -> EngineHealth:
    """Add up health reports: counts and histograms are summed, texts and limits are those of the first.

    Raises: ValueError without a report.
    """
    if not reports:
        raise ValueError("no report")
    first = reports[0]
    summed: dict[str, Any] = {}
    for name in EngineHealth.__struct_fields__:
        values = [getattr(report, name) for report in reports]
        if name.startswith("num_") or name in _SUMMED:
            summed[name] = sum(values)
        elif isinstance(values[0], Durations):
            counts = tuple(sum(column) for column in zip(*(each.counts for each in values), strict=True))
            summed[name] = Durations(counts, sum(each.total_s for each in values))
        elif isinstance(values[0], SlotUsage):
            parts = SlotUsage.__struct_fields__
            summed[name] = SlotUsage(**{part: sum(getattr(each, part) for each in values) for part in parts})
    return msgspec.structs.replace(first, **summed)


def _sum_by_key(dicts: Any) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in dicts:
        for key, value in each.items():
            total[key] = total.get(key, 0.0) + value
    return total
