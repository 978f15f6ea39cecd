"""EngineClient of the engine workers on a bus, as the gateway uses it.

It holds the gateway's lease, and connects to the workers that hold theirs. `placed_requests` has its requests and what
becomes of them when a worker is lost, `takeover` those of gateways that have ended. A request is sent to the worker
with the lowest cost in seconds, see `request_router`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from chatcache.cluster import bus
from chatcache.cluster.placed_requests import PlacedRequests
from chatcache.cluster.redis_placement import RedisPlacementIndex
from chatcache.cluster.remote_worker import RemoteWorker, add_accounts, add_reports, best_explanation, join_maps
from chatcache.cluster.request_router import COST, RequestRouter
from chatcache.cluster.takeover import GatewayRecords, Takeover
from chatcache.engine_process.client import check_length
from chatcache.errors import ChatcacheError, EngineError, OverloadedError
from chatcache.types.events import EngineEvent
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
_POLL_S = 0.2
_NO_WORKER = "no engine worker is ready"
_NO_BUS = "the bus does not answer"
_CONNECTING = "connecting to the bus"


class RemoteEngine:
    """EngineClient of all workers on a bus.

    Belongs to one event loop. `name` is the first part of this gateway's id on the bus. `routing`: cost | hash.
    Raises: InvalidRequestError for an invalid URL.
    """

    def __init__(self, url: str, name: str, routing: str = COST) -> None:
        self._name = name
        self._redis = bus.connect(url)
        self._index = RedisPlacementIndex(self._redis) if routing == COST else None
        self._router = RequestRouter(self._index)
        self._numbers = itertools.count(1)
        self._workers: dict[str, RemoteWorker] = {}
        self._refused: set[str] = set()  # ids of workers of another model
        self._records = GatewayRecords(self._redis)
        self._requests = PlacedRequests(self._router, self._workers, self._numbers, self._records.write)
        self._tasks: list[asyncio.Task[None]] = []
        self._outages = bus.OutageMonitor()
        self._silent_leases = bus.SilentLeases(max_gap_s=2 * _POLL_S)
        self._has_lease = asyncio.Event()
        self._has_tried = False  # to get the first lease
        self._loaded = asyncio.Event()
        self._error: ChatcacheError | None = None
        self._failed = asyncio.Event()
        self._health: EngineHealth | None = None
        self._added_at = 0.0
        self.model_info: ModelInfo | None = None
        self.recorder = Takeover(self._redis, self._records, self._requests)

    async def __aenter__(self) -> RemoteEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def id(self) -> str:
        """This gateway's id on the bus; it changes when its lease has expired."""
        return self._records.gateway

    @property
    def workers(self) -> list[bus.WorkerStatus]:
        """The last status of each connected worker."""
        return [worker.status for worker in self._workers.values()]

    @property
    def num_moved(self) -> int:
        """Number of times that a request of a lost worker was resumed."""
        return self._requests.num_moved

    async def start(self) -> None:
        """Connect to the bus; returns at once. Calling again is harmless."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._hold_lease()), asyncio.create_task(self._watch_workers())]
            if self._index is not None:
                self._tasks.append(asyncio.create_task(self._index.run()))
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
        await self.recorder.close()
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))
        with bus.ignore_outages():
            if self._tasks:
                await self._redis.delete(bus.gateway_key(self.id))
        await self._redis.aclose()
        self._requests.fail_all(EngineError("the gateway was closed"))
        self._loaded.set()

    def kill(self) -> None:
        """End without waiting: the leases expire."""

    # -- EngineClient -------------------------------------------------------------------------------------------------

    async def submit(self, request: GenerateRequest) -> None:
        self._check(request.prompt)
        await self._requests.submit(request)

    def events(self, request_id: str, after: int = 0) -> AsyncIterator[EngineEvent]:
        return self._requests.client.events(request_id, after)

    def num_tokens_sent(self, request_id: str) -> int:
        return self._requests.client.num_tokens_sent(request_id)

    async def abort(self, request_id: str) -> None:
        self._requests.client.abort(request_id)

    async def cancel_candidate(self, request_id: str, index: int) -> None:
        await self._requests.client.cancel_candidate(request_id, index)

    async def health(self) -> EngineHealth:
        """Return the sum of the workers' health reports, and what was sent to each; ready if one of them is.

        It is computed at most once in MAX_REPORT_AGE_S: each request asks for it, and a sum takes 12 us per worker.
        """
        if not any(worker.is_ready for worker in self._workers.values()):
            return EngineHealth(ready=False, detail=self._problem, num_waiting=len(self._requests))
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

    @property
    def _problem(self) -> str:
        """Why no request can run, while no worker is ready."""
        if not self._has_tried:
            return _CONNECTING
        return _NO_WORKER if self._has_lease.is_set() else _NO_BUS

    def _check(self, prompt: Sequence[int] = ()) -> None:
        """Raise: OverloadedError without a ready worker, ContextLengthError."""
        if self.model_info is None or not any(worker.is_ready for worker in self._workers.values()):
            raise OverloadedError(self._problem, code="engine_unavailable" if self.model_info else "model_loading")
        check_length(prompt, self.model_info)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("the connection to the bus failed", exc_info=error)
            self._error = EngineError(f"the connection to the bus failed: {error}")
            self._failed.set()

    # -- lease and workers --------------------------------------------------------------------------------------------

    async def _hold_lease(self) -> None:
        """Hold this gateway's lease. When it expired, the workers end its requests: resume them under a new id."""
        while True:
            name = bus.new_id(self._name)
            lease = bus.Lease(self._redis, bus.gateway_key(name))
            while not lease.is_acquired:
                await lease.renew(b"1")
                self._has_tried = True
                await asyncio.sleep(0 if lease.is_acquired else bus.RETRY_S)
            await self.recorder.change_id(name)
            for worker in list(self._workers.values()):  # which are not at fault, and used again
                await self._remove(worker, num_lost=0)
            self._has_lease.set()
            while await lease.renew(b"1"):
                await lease.wait()
            log.error("the lease of this gateway expired: its requests are resumed")
            self._has_lease.clear()

    async def _watch_workers(self) -> None:
        """Connect to workers that hold a lease, and move the requests of those that do not any more."""
        while True:
            await self._has_lease.wait()
            has_answered = False
            with bus.ignore_outages():
                await self._update_workers()
                await self.recorder.update(self._workers, had_outage=self._outages.had_outage)
                has_answered = True
            self._records.are_uncertain |= not has_answered
            await self._requests.place_waiting()
            await asyncio.sleep(_POLL_S)

    async def _update_workers(self) -> None:
        ids = bus.decode_ids(await self._redis.smembers(bus.WORKERS))
        keys = [bus.worker_key(each) for each in ids]
        own, *values = await self._redis.mget([bus.gateway_key(self.id), *keys])
        self._outages.record_answer()
        had_outage = self._outages.had_outage or own is None  # the bus has lost its data, this gateway's lease, too
        found = dict(zip(ids, values, strict=True))
        for each in self._silent_leases.update(found):
            log.error("worker %s does not renew its lease", each)
            await self._redis.delete(bus.worker_key(each))  # it takes a new id if it continues
            found[each] = None
        self._refused.intersection_update(ids)
        for worker in list(self._workers.values()):
            has_lease = bool(found.get(worker.id))
            if worker.is_lost or not has_lease:
                is_at_fault = not worker.has_gap if has_lease else not had_outage
                await self._remove(worker, num_lost=int(is_at_fault))
        for each, value in found.items():
            status = bus.decode_status(each, value)
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
            mine, its = (msgspec.structs.asdict(each) for each in (self.model_info, status.model_info))
            pairs = [(name, its[name], mine[name]) for name in mine if its[name] != mine[name]]
            differences = ", ".join(f"{name}: {one!r}, not {other!r}" for name, one, other in pairs)
            log.error("worker %s serves another model than the others (%s): it is not used", status.id, differences)
            self._refused.add(status.id)
            return
        receive, receive_loads = self._requests.receive, self._router.update_load
        worker = RemoteWorker(self._redis, status, self.id, self._numbers, receive, receive_loads)
        await worker.start()
        if worker.gateway != self.id:  # the lease of this gateway has expired meanwhile
            await worker.close()
            return
        self._workers[status.id] = worker
        self._router.connect(status, self.id)
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
        self._requests.leave_worker(worker, num_lost)
        self._router.disconnect(worker.id)
