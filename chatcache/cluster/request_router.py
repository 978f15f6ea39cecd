"""The routing of one gateway: locates prompts in the placement index, chooses workers, and learns from ended requests.

    locate     page keys of the prompt, places of its boundaries      (asynchronous: asks Redis)
    choose     the worker with the lowest cost, see `routing`
    reserve    counts the request before it is sent
    started    the places of the prompt are recorded, since it has been computed there
    finished   the places of the reply are recorded

With `--routing hash`, or while Redis does not answer, the hash of the conversation decides.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from chatcache.cluster import bus
from chatcache.cluster.placement import Boundary, Place, boundaries_of
from chatcache.cluster.redis_placement import RedisPlacementIndex
from chatcache.cluster.routing import (
    Decision,
    Reservation,
    RoutedPrompt,
    Router,
    WorkerLoad,
    WorkerLoads,
    update_prices,
)
from chatcache.kv_cache.page_hash import TOKEN_BYTES, CacheScope, encode_tokens, hash_page_run, hash_pages, root_hash
from chatcache.types.events import TERMINAL, EngineEvent, Started
from chatcache.types.request import GenerateRequest, num_branches
from chatcache.types.stats import ModelInfo, WorkerReport

COST, HASH = "cost", "hash"
MAX_RECORDED_CANDIDATES = 4


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request, what is known of its prompt, and its reservation while a worker runs it.

    `keys`: of the prompt's full pages, and `parent`, which the next page follows; `tail`: the tokens after them.
    `ends`: prompt tokens before the end of each message. `places`: None if the index was not asked or did not answer.
    """

    prompt: RoutedPrompt
    places: list[Place | None] | None = None
    keys: list[bytes] = field(default_factory=list)
    parent: bytes = b""
    tail: bytes = b""
    ends: tuple[int, ...] = ()
    page_size: int = 0
    decision: Decision | None = None
    reservation: Reservation | None = None
    is_prefilled: bool = False


@dataclass(slots=True)
class _Worker:
    """A connected worker, its load, and the counters of `WorkerReport`."""

    status: bus.WorkerStatus
    load: WorkerLoad
    requests: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_predicted_tokens: int = 0
    num_cached_tokens: int = 0


class RequestRouter:
    """Chooses workers by their ids on the bus.

    `index`: None for hashing only. `clock`: seconds since the epoch, the same on all gateways.
    """

    def __init__(self, index: RedisPlacementIndex | None, clock: Callable[[], float] = time.time) -> None:
        self._index = index
        self._clock = clock
        self._router = Router(seed=secrets.randbits(32))  # gateways sample different workers
        self._workers: dict[str, _Worker] = {}  # by id
        self._ids: dict[str, str] = {}  # by name of the load
        self._live: dict[int, str] = {}  # name of the load by incarnation
        self._loads = WorkerLoads()  # of all workers
        self._ready = WorkerLoads()  # of those that accept requests
        self._updated_s = clock()
        self._page_size = 0
        self._model_info: ModelInfo | None = None  # the same for all workers

    # -- workers ------------------------------------------------------------------------------------------------------

    def connect(self, status: bus.WorkerStatus, gateway: str) -> None:
        """Add a worker, which can be chosen after the next `update`; `gateway`: this one's id.

        Its load has its name, so that its conversations return after a restart; a second worker of the same name, its
        id.
        """
        name = status.id if status.name in self._ids else status.name
        load = WorkerLoad(name, bus.incarnation(status.id), 0.0, 0.0)
        self._workers[status.id] = _Worker(status, load)
        self._ids[name] = status.id
        self._live[load.incarnation] = name
        self._model_info = status.model_info
        self._loads.add(load)
        self.update_load(status.id, status.loads, gateway)

    def disconnect(self, worker_id: str) -> None:
        """Remove a worker. Reservations on it must have been released."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            del self._ids[worker.load.name]
            del self._live[worker.load.incarnation]
            self._loads.remove(worker.load.name)
            self._ready.remove(worker.load.name)

    def update(self, ready: Iterable[bus.WorkerStatus]) -> None:
        """Set the workers that accept requests now, with their latest reports."""
        found = [(status, self._workers[status.id]) for status in ready if status.id in self._workers]
        for status, worker in found:
            worker.status, health = status, status.health
            worker.load.free_tokens = health.page_size * (
                health.num_pages - health.num_pages_in_use - health.num_pages_idle
            )
        elapsed_s, self._updated_s = self._clock() - self._updated_s, self._clock()
        update_prices(
            [
                (worker.load, status.health.seconds_per_prompt_token, status.health.seconds_per_branch)
                for status, worker in found
            ],
            max(0.0, elapsed_s),
        )
        names = {worker.load.name: worker.load for _, worker in found}
        if {load.name for load in self._ready.all()} != names.keys():
            self._ready = WorkerLoads(names.values())
        self._page_size = max((status.health.page_size for status, _ in found), default=self._page_size)

    def update_load(self, worker_id: str, loads: bus.Loads, gateway: str) -> None:
        """Set the load that a worker has of other gateways than this one."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            others = [load for name, load in loads.items() if name != gateway]
            self._loads.update_others(
                worker.load.name, sum(each[0] for each in others), sum(each[1] for each in others)
            )

    def reports(self) -> tuple[WorkerReport, ...]:
        """Return the counters of each worker."""
        return tuple(
            WorkerReport(
                name=worker.load.name,
                requests=dict(worker.requests),
                num_prompt_tokens=worker.num_prompt_tokens,
                num_predicted_tokens=worker.num_predicted_tokens,
                num_cached_tokens=worker.num_cached_tokens,
                owed_s=worker.status.health.owed_s,
            )
            for worker in self._workers.values()
        )

    # -- requests -----------------------------------------------------------------------------------------------------

    async def locate(self, request: GenerateRequest) -> RoutedRequest:
        """Look up which workers have the beginning of a prompt in their caches."""
        conversation = (request.conversation_id or request.request_id).encode()
        num_tokens, num_new = len(request.prompt), num_branches(request.params)
        if self._index is None or not self._page_size or self._model_info is None:
            return RoutedRequest(RoutedPrompt(num_tokens, (), conversation, num_new))
        size, model_info = self._page_size, self._model_info
        tokens = np.asarray(request.prompt, dtype=np.int32)
        scope = CacheScope(request.namespace, request.num_public_tokens, request.cache_salt)
        chain = hash_pages(root_hash(model_info.digest, size), encode_tokens(tokens), size * TOKEN_BYTES, scope)
        ends = (np.flatnonzero(np.isin(tokens, model_info.eos_token_ids)) + 1).tolist()
        boundaries = boundaries_of(chain.keys, size, ends)
        prompt = RoutedPrompt(num_tokens, boundaries, conversation, num_new, request.num_public_tokens)
        places = await self._index.lookup(boundaries, self._clock(), self._live)
        tail = chain.data[len(chain.keys) * chain.page_bytes :]
        return RoutedRequest(prompt, places, chain.keys, chain.parents[-1], tail, tuple(ends), size)

    def choose(
        self, routed: RoutedRequest, among: Collection[str] | None = None, required: str | None = None
    ) -> str | None:
        """Choose a worker and return its id; None if there is none.

        `among`: ids to choose from, None for all workers that accept requests. `required`: id of the worker that runs
        the reply that this request forks.
        """
        workers = self._ready
        if among is not None:
            found = (self._workers.get(each) for each in among)
            workers = WorkerLoads(worker.load for worker in found if worker is not None)
        source = self._workers.get(required) if required is not None else None
        prompt = replace(routed.prompt, required_worker=source.load.name) if source is not None else routed.prompt
        routed.decision = self._router.choose(prompt, routed.places, workers)
        return None if routed.decision is None else self._ids[routed.decision.worker]

    def reserve(self, routed: RoutedRequest) -> int | None:
        """Count the request at its chosen worker; return the prompt tokens to compute there, if the index knows."""
        decision = routed.decision
        if decision is None:
            return None
        self.release(routed)
        routed.reservation, routed.is_prefilled = self._loads.reserve(decision, routed.prompt), False
        self._workers[self._ids[decision.worker]].requests[decision.reason.value] += 1
        return None if routed.places is None else routed.reservation.num_tokens

    def release(self, routed: RoutedRequest) -> None:
        """Return the reservation of a request that has ended or left its worker."""
        if routed.reservation is not None:
            if not routed.is_prefilled:
                self._loads.finish_prefill(routed.reservation)
            self._loads.finish(routed.reservation)
            routed.reservation = None

    def started(self, routed: RoutedRequest, event: EngineEvent) -> None:
        """Return the reserved prompt tokens at the first event, and record where the prompt is cached.

        The first event of a resumed request is not `Started`.
        """
        if routed.reservation is None or routed.decision is None or isinstance(event, TERMINAL):
            return
        routed.is_prefilled = True
        self._loads.finish_prefill(routed.reservation)
        worker = self._workers.get(self._ids.get(routed.decision.worker, ""))
        if worker is None or routed.places is None or not isinstance(event, Started):
            return
        worker.num_prompt_tokens += event.num_prompt_tokens
        worker.num_predicted_tokens += routed.decision.num_cached_tokens
        worker.num_cached_tokens += event.num_cached_tokens
        if self._index is not None:
            self._index.record(routed.prompt.boundaries, routed.reservation.incarnation, self._clock())

    def finished(self, routed: RoutedRequest, candidates: Sequence[bytes]) -> None:
        """Record where the replies are cached; `candidates`: their tokens, little-endian int32.

        The last token of a reply was sampled and never computed.
        """
        reservation = routed.reservation
        if self._index is None or reservation is None or not routed.is_prefilled or not routed.page_size:
            return
        now_s, num_prompt = self._clock(), routed.prompt.num_tokens
        ends, num_before = (*routed.ends, num_prompt), 0
        for tokens in candidates[:MAX_RECORDED_CANDIDATES] or [b""]:
            data, page_bytes = routed.tail + tokens[:-TOKEN_BYTES], routed.page_size * TOKEN_BYTES
            pages = [data[at : at + page_bytes] for at in range(0, len(data) - page_bytes + 1, page_bytes)]
            found: tuple[Boundary, ...] = boundaries_of(
                routed.keys + hash_page_run(routed.parent, pages), routed.page_size, ends
            )
            self._index.record([each for each in found if each.num_tokens > num_before], reservation.incarnation, now_s)
            num_before = num_prompt  # the boundaries of the prompt are recorded once
