"""Rules that choose a worker: the product's own, and those of other routers, written from their documentation.

The other rules see the load of all gateways at once, and, except SGLang's trees, the true contents of all caches.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from chatcache.cluster.placement import Boundary, MemoryPlacementIndex, Place, boundary_pages
from chatcache.cluster.routing import (
    Decision,
    Reservation,
    RoutedPrompt,
    Router,
    RoutingWeights,
    WorkerLoad,
    WorkerLoads,
)
from loadtest.scale.cluster import BRANCH_S, Cluster, Policy, Request, Worker
from loadtest.scale.traffic import Node

PAGE_TOKENS = 16
SGLANG_MIN_MATCH, SGLANG_MAX_DIFFERENCE, SGLANG_MAX_RATIO = 0.3, 64, 1.5
LAG_S = 0.01  # until a gateway sees the reservations of another one


class Rule:
    """Base of the rules: requests, owed prompt tokens and pages of each worker, known at once to all gateways."""

    def __init__(self, cluster: Cluster, num_gateways: int, seed: int) -> None:
        self.cluster, self.num_workers = cluster, len(cluster.workers)
        self.rng = random.Random(f"{seed} rule")
        self.num_requests = np.zeros(self.num_workers)
        self.owed = np.zeros(self.num_workers)
        self.active = np.zeros(self.num_workers)
        self.cached = np.zeros(self.num_workers)

    def prepare(self, request: Request, now_s: float) -> None:
        """Fill `cached` with the prompt tokens in the cache of each worker."""
        self.cached[:] = 0
        found = self.cluster.cached_everywhere(request.chain)
        self.cached[list(found)] = list(found.values())

    def choose(self, request: Request) -> int:
        """Return the number of the worker."""
        raise NotImplementedError

    def dispatched(self, request: Request, now_s: float) -> None:
        """Count the request."""
        worker, missing = request.worker, request.num_tokens - request.num_cached
        self.num_requests[worker] += 1
        self.owed[worker] += missing
        self.active[worker] += request.num_tokens
        request.ticket = missing

    def started(self, request: Request, now_s: float) -> None:
        """Remove the computed prompt from the owed tokens."""
        self.owed[request.worker] -= request.ticket

    def finished(self, request: Request, now_s: float) -> None:
        """Remove the request."""
        self.num_requests[request.worker] -= 1
        self.active[request.worker] -= request.num_tokens

    def restarted(self, worker: Worker) -> None:
        """Nothing: the caches are looked up."""

    def least(self, cost: np.ndarray) -> int:
        """Return a worker with the lowest cost, drawn at random among equals."""
        best = np.flatnonzero(cost == cost.min())
        return int(best[int(self.rng.random() * len(best))])


class RoundRobin(Rule):
    """Each gateway has a counter of its own."""

    def __init__(self, cluster: Cluster, num_gateways: int, seed: int) -> None:
        super().__init__(cluster, num_gateways, seed)
        self.next = [self.rng.randrange(self.num_workers) for _ in range(num_gateways)]

    def prepare(self, request: Request, now_s: float) -> None:
        """Look nothing up."""

    def choose(self, request: Request) -> int:
        """Return the next worker."""
        self.next[request.gateway] = (self.next[request.gateway] + 1) % self.num_workers
        return self.next[request.gateway]


class LeastLoaded(Rule):
    """The fewest requests."""

    def prepare(self, request: Request, now_s: float) -> None:
        """Look nothing up."""

    def choose(self, request: Request) -> int:
        """Return a worker with the fewest requests."""
        return self.least(self.num_requests)


class Oracle(Rule):
    """Seconds by the true contents of all caches: queue, prefill, and the decode steps that grow longer."""

    def choose(self, request: Request) -> int:
        """Return a worker with the lowest cost."""
        rates = np.array([worker.prefill_rate() for worker in self.cluster.workers])
        cost = (self.owed + request.num_tokens - self.cached) / rates
        return self.least(cost + self.num_requests * BRANCH_S * RoutingWeights().decode_horizon)


class Dynamo(Rule):
    """Blocks to prefill, own overlap subtracted, plus active blocks; temperature 0."""

    def choose(self, request: Request) -> int:
        """Return a worker with the fewest blocks."""
        return self.least(self.owed + 2 * request.num_tokens - self.cached + self.active)


class LoadAware(Rule):
    """production-stack: matched share minus the relative load, beta = 1."""

    def choose(self, request: Request) -> int:
        """Return a worker with the highest score."""
        mean = self.num_requests.mean()
        return self.least((self.num_requests - mean) / max(1.0, mean) - self.cached / request.num_tokens)


class SGLang(Rule):
    """The longest match if it exceeds 30 % of the prompt, else the smallest tree; the least load when imbalanced.

    `shared`: all gateways have one tree and one load table; otherwise each has its own.
    """

    def __init__(self, cluster: Cluster, num_gateways: int, seed: int, shared: bool = False) -> None:
        super().__init__(cluster, num_gateways, seed)
        num_views = 1 if shared else num_gateways
        self.trees: list[dict[Node, dict[int, None]]] = [{} for _ in range(num_views)]
        self.sizes = [np.zeros(self.num_workers) for _ in range(num_views)]
        self.loads = [np.zeros(self.num_workers) for _ in range(num_views)]

    def _view(self, request: Request) -> int:
        return request.gateway % len(self.trees)

    def prepare(self, request: Request, now_s: float) -> None:
        """Look nothing up: the tree is part of the rule."""

    def choose(self, request: Request) -> int:
        """Return the worker that the tree or the load names."""
        view = self._view(request)
        load, tree = self.loads[view], self.trees[view]
        if load.max() - load.min() > SGLANG_MAX_DIFFERENCE and load.max() > SGLANG_MAX_RATIO * load.min():
            return int(load.argmin())
        matched, end = None, 0
        for node, num_tokens in request.chain:
            if node not in tree:
                break
            matched, end = tree[node], end + num_tokens
        if matched and end > SGLANG_MIN_MATCH * request.num_tokens:
            return next(iter(matched))
        return self.least(self.sizes[view])

    def dispatched(self, request: Request, now_s: float) -> None:
        """Insert the prompt into the tree."""
        super().dispatched(request, now_s)
        view, worker = self._view(request), request.worker
        self.loads[view][worker] += 1
        for node, num_tokens in request.chain:
            holders = self.trees[view].setdefault(node, {})
            if worker not in holders:
                holders[worker] = None
                self.sizes[view][worker] += num_tokens

    def finished(self, request: Request, now_s: float) -> None:
        """Remove the request."""
        super().finished(request, now_s)
        self.loads[self._view(request)][request.worker] -= 1


def prompt_boundaries(request: Request) -> tuple[Boundary, ...]:
    """Return the boundaries of a prompt as the product chooses them.

    The key of a page is the segment with its last token, and its number.
    """
    ends, total = [], 0
    for _, num_tokens in request.chain:
        total += num_tokens
        ends.append(total)
    num_pages = total // PAGE_TOKENS
    messages = [end // PAGE_TOKENS for end in ends] if request.conversation.has_messages else []

    def key(page: int) -> tuple[Node, int]:
        return request.chain[bisect_left(ends, page * PAGE_TOKENS)][0], page

    return tuple(
        Boundary(key(page), page * PAGE_TOKENS, key(page + 1) if page < num_pages else None)
        for page in boundary_pages(num_pages, messages)
    )


@dataclass(slots=True)
class Ticket:
    """What the product keeps of a request: the prompt, its decision and its reservation."""

    prompt: RoutedPrompt
    places: list[Place | None]
    decision: Decision | None = None
    reservation: Reservation | None = None


class Seconds:
    """The product: cost in seconds over one index, one load table per gateway, changes arrive elsewhere after LAG_S.

    `stamped`: places carry incarnations. `counted`: load counts before dispatch. `hashed`: no index, the hash decides.
    """

    def __init__(
        self,
        cluster: Cluster,
        num_gateways: int,
        seed: int,
        *,
        weights: RoutingWeights | None = None,
        shared: bool = True,
        stamped: bool = True,
        counted: bool = True,
        hashed: bool = False,
    ) -> None:
        self.cluster, self.shared, self.stamped, self.counted, self.hashed = cluster, shared, stamped, counted, hashed
        self.routers = [Router(weights, seed * 1000 + gateway) for gateway in range(num_gateways)]
        self.loads = [WorkerLoads(map(self._load, cluster.workers)) for _ in range(num_gateways)]
        self.indexes = [MemoryPlacementIndex() for _ in range(1 if shared else num_gateways)]
        self.arriving: list[tuple[float, int, int, Callable[[WorkerLoads], None]]] = []
        self.num_changes = 0

    def _load(self, worker: Worker) -> WorkerLoad:
        incarnation = worker.incarnation if self.stamped else 0
        return WorkerLoad(worker.name, incarnation, 1 / worker.rate, BRANCH_S, worker.capacity)

    def _change(self, request: Request, now_s: float, change: Callable[[WorkerLoads], None]) -> None:
        """Change the gateway's own table at once, and the others a little later."""
        change(self.loads[request.gateway])
        if self.shared and len(self.loads) > 1:
            self.num_changes += 1
            heappush(self.arriving, (now_s + LAG_S, self.num_changes, request.gateway, change))

    def _index(self, request: Request) -> MemoryPlacementIndex:
        return self.indexes[request.gateway % len(self.indexes)]

    def prepare(self, request: Request, now_s: float) -> None:
        """Apply changes of other gateways that have arrived; look up the places."""
        while self.arriving and self.arriving[0][0] <= now_s:
            _, _, source, change = heappop(self.arriving)
            for gateway, loads in enumerate(self.loads):
                if gateway != source:
                    change(loads)
        boundaries = () if self.hashed else prompt_boundaries(request)
        prompt = RoutedPrompt(request.num_tokens, boundaries, repr(request.conversation.key).encode())
        request.ticket = Ticket(prompt, self._index(request).lookup(boundaries, now_s))

    def choose(self, request: Request) -> int:
        """Return the worker that the product's router chooses."""
        ticket = _ticket(request)
        places = None if self.hashed else ticket.places
        ticket.decision = self.routers[request.gateway].choose(ticket.prompt, places, self.loads[request.gateway])
        if ticket.decision is None:
            raise RuntimeError("no workers")
        request.believed = ticket.decision.num_cached_tokens
        return int(ticket.decision.worker.partition("-")[2])

    def dispatched(self, request: Request, now_s: float) -> None:
        """Reserve the load."""
        ticket = _ticket(request)
        decision = ticket.decision
        if decision is None:
            raise RuntimeError("dispatched before the choice")
        loads = self.loads[request.gateway]
        known = loads.get(decision.worker)
        if known is None:
            raise RuntimeError(f"{decision.worker} is not known")
        num_tokens = request.num_tokens - decision.num_cached_tokens
        ticket.reservation = Reservation(decision.worker, known.incarnation, num_tokens, 1)
        if self.counted:
            reservation = ticket.reservation
            self._change(request, now_s, lambda loads: loads.apply(reservation))

    def started(self, request: Request, now_s: float) -> None:
        """Return the prompt tokens and record the places; the worker reports its speed and its free cache."""
        worker, reservation = self.cluster.workers[request.worker], _ticket(request).reservation
        if self.counted and reservation is not None:
            self._change(request, now_s, lambda loads: loads.finish_prefill(reservation))
        for loads in self.loads:
            known = loads.get(worker.name)
            if known is not None:
                known.seconds_per_token = 1 / worker.prefill_rate()
                known.free_tokens = worker.capacity - worker.num_cached
        self._record(request, _ticket(request).prompt.boundaries, now_s)

    def finished(self, request: Request, now_s: float) -> None:
        """Return the branch and record the places of the reply."""
        reservation = _ticket(request).reservation
        if self.counted and reservation is not None:
            self._change(request, now_s, lambda loads: loads.finish(reservation))
        self._record(request, prompt_boundaries(request), now_s)

    def _record(self, request: Request, boundaries: tuple[Boundary, ...], now_s: float) -> None:
        worker = self.cluster.workers[request.worker]
        if not self.hashed:
            incarnation = worker.incarnation if self.stamped else 0
            self._index(request).record(boundaries, worker.name, incarnation, now_s)

    def restarted(self, worker: Worker) -> None:
        """Replace the worker by its new incarnation."""
        if self.stamped:
            for loads in self.loads:
                loads.add(self._load(worker))


def _ticket(request: Request) -> Ticket:
    if not isinstance(request.ticket, Ticket):
        raise TypeError("the request was not prepared by this policy")
    return request.ticket


Build = Callable[[Cluster, int, int], Policy]
OURS = "chatcache (seconds)"
HASH = "hash of the conversation"
SGLANG_SHARED = "SGLang rule, one shared tree"
POLICIES: dict[str, Build] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    HASH: lambda cluster, gateways, seed: Seconds(cluster, gateways, seed, hashed=True),
    "SGLang rule, a tree per gateway": SGLang,
    SGLANG_SHARED: lambda cluster, gateways, seed: SGLang(cluster, gateways, seed, shared=True),
    "Dynamo cost": Dynamo,
    "production-stack loadaware": LoadAware,
    OURS: Seconds,
    "true cache contents (oracle)": Oracle,
}
CONTROLS: dict[str, Build] = {
    "each gateway alone": lambda cluster, gateways, seed: Seconds(cluster, gateways, seed, shared=False),
    "no incarnations": lambda cluster, gateways, seed: Seconds(cluster, gateways, seed, stamped=False),
    "load not counted": lambda cluster, gateways, seed: Seconds(cluster, gateways, seed, counted=False),
    "no discount": lambda cluster, gateways, seed: Seconds(
        cluster, gateways, seed, weights=RoutingWeights(min_discount=1.0)
    ),
}
"""The product with one part switched off: what each part is good for."""
