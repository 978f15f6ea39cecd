"""EngineClient of the engine workers on a bus, as the gateway uses it.

The gateway records what each of its requests has emitted (`RequestJournal`). When a worker's lease expires, its
requests are resumed by other workers from these records; the client only notices a pause. Notices of a worker that
counts as dead are not read any more, so nothing arrives twice. A request that three workers did not survive fails.

When another gateway ends, this one takes over the requests of which that one has left a record (see `records`); not
while the bus has just been away, when the leases of gateways expired that have not ended.

A request is sent to the worker with the lowest cost in seconds, see `request_router`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from chatcache.cluster import bus
from chatcache.cluster.records import (
    Attempt,
    GatewayRecords,
    Item,
    RequestRecord,
    find_orphaned,
    history,
    keep_outboxes,
    read_outboxes,
)
from chatcache.cluster.redis_placement import RedisPlacementIndex
from chatcache.cluster.remote_worker import (
    PlacedRequest,
    RemoteWorker,
    add_accounts,
    add_reports,
    best_explanation,
    join_maps,
)
from chatcache.cluster.request_router import COST, RequestRouter, RoutedRequest
from chatcache.engine_process.client import EngineClientBase, check_length
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
from chatcache.errors import ChatcacheError, EngineError, InvalidRequestError, OverloadedError
from chatcache.types.events import TERMINAL, EngineEvent, Finished, SearchStep
from chatcache.types.request import GenerateRequest
from chatcache.types.stats import (
    EngineHealth,
    ExplainQuery,
    Explanation,
    ModelInfo,
    PackedPrompt,
    PageAccounts,
    PageMap,
)

log = logging.getLogger(__name__)
Result = TypeVar("Result")

MAX_REPORT_AGE_S = 0.1
ADOPT_TIMEOUT_S = 2.0  # for the workers to give the requests of a lost gateway to this one
_POLL_S = 0.5
_ADOPT_POLL_S = 0.01
_NO_WORKER = "no engine worker is ready"


class RemoteEngine:
    """EngineClient of all workers on a bus.

    Belongs to one event loop. `name` is the first part of this gateway's id on the bus. `routing`: cost | hash.
    `on_adopt` is called with a request of another gateway that has ended, the data of its record, and the number of its
    events so far; it returns whether this gateway continues it, and reads its events from the first on. Without it,
    nothing is taken over.
    `on_lost` is called with the id of a request that another gateway has taken over from this one. `owns` is asked
    about a request whose record is missing, and returns whether no other gateway has taken it over.
    """

    on_adopt: Callable[[GenerateRequest, bytes, int], Awaitable[bool]] | None = None
    on_lost: Callable[[str], None] | None = None
    owns: Callable[[str], Awaitable[bool]] | None = None

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
        self._record_tasks: set[asyncio.Task[None]] = set()
        self._records = GatewayRecords(None)
        self._outages = bus.OutageMonitor()
        self._has_lease = asyncio.Event()
        self._loaded = asyncio.Event()
        self._error: ChatcacheError | None = None
        self._failed = asyncio.Event()
        self._health: EngineHealth | None = None
        self._added_at = 0.0
        self.model_info: ModelInfo | None = None
        self.num_moved = 0
        self.num_adopted = 0

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
            self._records = GatewayRecords(self._redis)
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
        tasks = [*self._tasks, *self._record_tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))
        if self._redis is not None:
            with bus.ignore_outages():
                await self._records.delete_discarded(self._id)
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

    async def record(self, request_id: str, data: bytes) -> None:
        """Leave a record of a running request on the bus, so that another gateway can take it over.

        `data`: what `on_adopt` of that gateway gets. Without effect while the bus does not answer.
        """
        if (placed := self._requests.get(request_id)) is not None:
            placed.data = data
            await self._records.write(self._id, [placed.to_record()])

    def discard_record(self, request_id: str) -> None:
        """Delete the record of a request that needs no other gateway any more."""
        self._records.discard(request_id)

    def leave(self, request_id: str) -> None:
        """Leave a request that has a record to the gateway that takes it over when this one is closed."""
        if request_id in self._records.names and (placed := self._requests.get(request_id)) is not None:
            self._forget(placed)

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
        return best_explanation(await self._ask_all(lambda worker: worker.queries.explain(query)))

    async def count_cached_tokens(self, prompts: Sequence[PackedPrompt], namespace: str = "") -> list[int]:
        self._check()
        counts = await self._ask_all(lambda worker: worker.queries.count_cached_tokens(prompts, namespace))
        return [max(column) for column in zip(*counts, strict=True)]

    async def page_map(self, namespace: str = "", *, operator: bool = False) -> PageMap:
        """Return the maps of all workers one after the other."""
        self._check()
        return join_maps(await self._ask_all(lambda worker: worker.queries.page_map(namespace, operator)))

    async def page_accounts(self) -> PageAccounts:
        self._check()
        return add_accounts(await self._ask_all(lambda worker: worker.queries.page_accounts()))

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
        check_length(prompt, self.model_info)

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
            call = self._add_call(placed)
            placed.attempts.append(Attempt(self._id, worker.id, call, worker.position, placed.journal.last_seq))
            if placed.data is not None:
                placed.is_recording = True
                self._start(self._record_and_submit(placed, worker, num_new))
                return
            worker.send(Submit(call, placed.journal.resumed_request(), num_new))
        else:
            placed.attempts = [Attempt(self._id, worker.id, placed.calls[0], worker.position)]
            worker.send(Submit(placed.calls[0], placed.journal.request, num_new))
        placed.worker, placed.numerics, placed.is_answered = worker, worker.status.numerics, False

    async def _record_and_submit(self, placed: PlacedRequest, worker: RemoteWorker, num_new: int | None) -> None:
        """Send a request to a worker when its record names that one: events that no record leads to would be lost."""
        is_recorded = await self._records.write(self._id, [placed.to_record()])
        placed.is_recording = False
        if self._requests.get(placed.id) is not placed or not is_recorded or worker.is_lost:
            self._router.release(placed.routed)  # it waits on, unless it has ended
            return
        try:
            worker.send(Submit(placed.calls[-1], placed.journal.resumed_request(), num_new))
        except ChatcacheError as error:  # it exceeds a frame
            self._end(placed, error)
        else:
            placed.worker, placed.numerics, placed.is_answered = worker, worker.status.numerics, False

    def _add_call(self, placed: PlacedRequest) -> int:
        call = next(self._numbers)
        placed.calls.append(call)
        self._by_call[call] = placed
        return call

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
            reply = refused_drop(command)
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
            if (placed := self._runs(worker, notice.request_id)) is not None:
                self._apply(placed, notice)
        elif isinstance(notice, Events):
            for step in notice.search_steps:
                if (search := self._runs(worker, step.request_id)) is not None:
                    self._apply(search, step)
            for event in notice.events:
                if (placed := self._runs(worker, event.request_id)) is not None:
                    self._apply(placed, event)

    def _apply(self, placed: PlacedRequest, item: Item) -> None:
        """Record and pass on what a worker has sent of a request. Raises: ValueError for an event out of order."""
        if placed.held is not None:
            placed.held.append(item)
        elif isinstance(item, PromptScores):
            self._client.receive(item)
        elif isinstance(item, SearchStep):
            placed.journal.record_search_step(item.record)
        else:
            if not placed.routed.is_prefilled:
                self._router.started(placed.routed, item)
            if isinstance(item, Finished):
                self._router.finished(placed.routed, placed.journal.candidate_tokens)
            self._emit(placed, item)

    def _receive_reply(self, worker: RemoteWorker, reply: Reply) -> None:
        self._drops.pop(reply.call, None)
        placed = self._by_call.get(reply.call)
        error = reply.error if isinstance(reply, Answer) else None
        if placed is None:
            worker.queries.receive(reply)
            self._client.receive(reply)
        elif placed.worker is not worker or reply.call != placed.calls[-1]:
            return
        elif placed.held is not None and error is not None:  # it does not run there any more
            placed.worker = None
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
        """Record an event, and send it to the client."""
        placed.journal.record(event)
        if isinstance(event, TERMINAL):
            self._forget(placed)
        self._client.receive(Events((event,)))

    def _forget(self, placed: PlacedRequest) -> None:
        self._requests.pop(placed.id, None)
        for call in placed.calls:
            self._by_call.pop(call, None)
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
            self._id, old = name, self._id
            if old:
                await self._keep_own_requests(old)
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
            has_answered = False
            with bus.ignore_outages():
                await self._update_workers()
                await self._update_records()
                has_answered = True
            self._records.are_uncertain |= not has_answered
            self._place_waiting()
            await asyncio.sleep(_POLL_S)

    async def _update_workers(self) -> None:
        ids = sorted(each.decode() for each in await self._redis.smembers(bus.WORKERS))
        values = await self._redis.mget([bus.worker_key(each) for each in ids]) if ids else []
        self._outages.record_answer()
        found = dict(zip(ids, values, strict=True))
        self._refused.intersection_update(ids)
        for worker in list(self._workers.values()):
            has_lease = bool(found.get(worker.id))
            if worker.is_lost or not has_lease:
                is_at_fault = not worker.has_gap if has_lease else not self._outages.had_outage
                await self._remove(worker, num_lost=int(is_at_fault))
        for each, value in found.items():
            status = bus.decode_status(value)
            if value is None:
                await self._redis.srem(bus.WORKERS, each)
            elif status is None or each in self._refused:
                continue
            elif (known := self._workers.get(each)) is not None:
                known.update(status)
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
        if worker.gateway != self._id:  # the lease of this gateway has expired meanwhile
            await worker.close()
            return
        self._workers[status.id] = worker
        self._router.connect(status, self._id)
        log.info("worker %s is connected", status.id)
        if status.health.ready:
            self.model_info = status.model_info
            self._loaded.set()

    async def _remove(self, worker: RemoteWorker, num_lost: int) -> None:
        """Disconnect from a worker, and let its requests wait for another one.

        `num_lost`: 1 if the worker may have ended because of one of them.
        """
        worker.is_lost = True
        await worker.close()
        if self._workers.get(worker.id) is not worker:  # it was removed by another task
            return
        del self._workers[worker.id]
        moved = [placed for placed in self._requests.values() if placed.worker is worker]
        log.warning("worker %s is lost; %d requests are resumed by others", worker.id, len(moved))
        for placed in moved:
            placed.num_lost_workers += num_lost
            self._router.release(placed.routed)
            if placed.held is not None:
                placed.worker = None
                continue
            placed.is_moved = True
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
        elif (error := placed.resume_error()) is not None:
            self._end(placed, error)
        else:
            self.num_moved += 1

    def _place_waiting(self) -> None:
        for placed in [each for each in self._requests.values() if each.is_waiting]:
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

    # -- records ------------------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._record_tasks.add(task)
        task.add_done_callback(self._on_record_task_end)

    def _on_record_task_end(self, task: asyncio.Task[None]) -> None:
        self._record_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the records of requests cannot be processed", exc_info=error)

    async def _update_records(self) -> None:
        """Delete records that are not needed, and take over the requests of gateways that have ended."""
        await self._records.delete_discarded(self._id)
        if self._records.are_uncertain:
            recorded = [placed for placed in self._requests.values() if placed.id in self._records.names]
            self._start(self._adopt(await self._records.restore(self._id, [each.to_record() for each in recorded])))
        used = {each.worker for placed in self._requests.values() if placed.data for each in placed.attempts}
        await keep_outboxes(self._redis, used - self._workers.keys())
        if self.on_adopt is None or self._outages.had_outage:
            return
        for gateway in await find_orphaned(self._redis):
            if gateway != self._id and (records := await self._records.take(gateway, self._id)):
                log.warning("gateway %s has ended: %d of its requests are taken over", gateway, len(records))
                self._start(self._adopt(records))

    async def _keep_own_requests(self, old: str) -> None:
        """Give up the requests that another gateway has taken over while this one, `old`, had no lease."""
        for name in await self._records.move(old, self._id, self.owns):
            if (placed := self._requests.get(name)) is not None:
                self._forget(placed)
            if self.on_lost is not None:
                self.on_lost(name)
            self._client.drop_log(name)

    async def _adopt(self, records: Sequence[RequestRecord]) -> None:
        """Continue requests of gateways that have ended, except those that run here."""
        adopted: list[tuple[RequestRecord, PlacedRequest]] = []
        for record in [each for each in records if each.request.request_id not in self._requests]:
            try:
                adopted.append((record, await self._open_adopted(record)))
            except InvalidRequestError:  # it has just ended here
                self.discard_record(record.request.request_id)
        await self._records.write(self._id, [placed.to_record() for _, placed in adopted])
        for record, placed in adopted:
            if placed.worker is not None:
                placed.worker.send(Adopt(placed.calls[-1], placed.id, record.attempts[-1].gateway))
        deadline = asyncio.get_running_loop().time() + ADOPT_TIMEOUT_S
        while any(placed.worker is not None and not placed.is_answered for _, placed in adopted):
            await asyncio.sleep(_ADOPT_POLL_S)
            if asyncio.get_running_loop().time() > deadline:
                break
        outboxes = await read_outboxes(self._redis, records)
        for record, placed in adopted:
            try:
                is_continued = await self._continue(placed, record.data, history(record, outboxes))
            except Exception:
                log.exception("request %s cannot be taken over", placed.id)
                is_continued = False
            self.num_adopted += is_continued
            if not is_continued:
                self._give_up(placed)

    async def _continue(self, placed: PlacedRequest, data: bytes, items: Sequence[Item] | None) -> bool:
        """Repeat what was sent of a request and continue it; return whether that is possible."""
        if items is None:
            log.error("request %s cannot be taken over: events of it are missing", placed.id)
        if items is None or placed.id not in self._records.names:  # another gateway has taken it over meanwhile
            return False
        self._replay(placed, items)
        return self.on_adopt is not None and await self.on_adopt(placed.journal.request, data, placed.journal.last_seq)

    async def _open_adopted(self, record: RequestRecord) -> PlacedRequest:
        """Return the request of a record, with a call for the worker that runs it; events are held until `_replay`.

        Raises: InvalidRequestError if this gateway has the log of the request already.
        """
        routed = await self._router.locate(record.request)
        self._client.open_log(record.request.request_id)
        placed = self._requests[record.request.request_id] = PlacedRequest.from_record(record, routed)
        worker = self._workers.get(record.attempts[-1].worker)
        if worker is not None and not worker.is_lost:
            placed.worker = worker
            placed.attempts.append(Attempt(self._id, worker.id, self._add_call(placed), worker.position))
        return placed

    def _replay(self, placed: PlacedRequest, items: Sequence[Item]) -> None:
        """Repeat all that was sent of a request, and what was held meanwhile; then resume it if no worker runs it."""
        held, placed.held = placed.held or [], None
        if not placed.is_answered:
            placed.worker = None
        for item in (*items, *held):
            self._apply(placed, item)
        if placed.worker is None and placed.id in self._requests:
            placed.is_moved = True
            self._suspend(placed)

    def _give_up(self, placed: PlacedRequest) -> None:
        """End a request that this gateway has taken over and cannot continue."""
        if placed.worker is not None:
            placed.worker.send(Abort(placed.id))
        self._forget(placed)
        self._client.drop_log(placed.id)
        self.discard_record(placed.id)
