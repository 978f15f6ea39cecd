"""Choose a worker for a request by its cost in measured seconds.

The cost of sending prompt x to worker w is

    J(w) = [Q + U(x)] c  +  decode n d o  +  interference n U(x) c  +  eviction E(x) c

    c     seconds per prompt token of w, from what all workers measured (`update_prices`)
    Q     prompt tokens that w still has to compute for other requests
    U(x)  tokens of x that w is not believed to have in its cache, discounted (below)
    n d o running branches, seconds by which one more branch lengthens a decode step, and steps of the horizon
    E(x)  tokens that w must evict from its cache to make room

The term with n U c is the time for which the running replies of w wait for this prefill.

**Discount.** A prefix that many prompts share (a system prompt) is an investment: computed on another worker once, it
serves all later requests there. If it counted in full, its first holder would win whenever nothing is running, and
an idle cluster would send everything to one worker. Tokens before a place with f different continuations count
kappa(f) = max(1/9, 1 / (1 + (f - 1) / 2)) times. The private history of a conversation has f = 1 and counts in full.
A prefix with MAX_CONTINUATIONS of them and a single holder does not count at all: its second copy is free. So two idle
workers share requests that never overlap, and the loss of one worker does not lose a popular prefix.

**Load counts before dispatch.** `WorkerLoads.reserve` adds a request's tokens and branches when it is routed, so a
burst is spread before any worker has reported anything. The reservation is returned when the reply ends. Workers report
the load of the other gateways (`WorkerLoads.update_others`).

**Candidates** are the believed holders and a few sampled workers (`num_samples`): with more, a decision takes longer,
and the simulated figures change little.
Without a placement index the worker follows from a hash of the conversation (`WorkerLoads.hash_owner`).

Units: seconds and tokens. Nothing here does input or output.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from chatcache.cluster.placement import MAX_CONTINUATIONS, Boundary, Place

MIN_DISCOUNT = 1 / 9  # of MAX_CONTINUATIONS
EQUAL_SLOWNESS = 1.5  # up to this ratio to the median, workers count as equal
SLOWNESS_HALF_LIFE_S = 30.0
DEFAULT_SECONDS = 0.001  # per token, while no worker has measured any


@dataclass(frozen=True, slots=True)
class RoutingWeights:
    """Weights of the cost terms; the first three are factors of seconds.

    `decode_horizon`: decode steps for which the present load is assumed to last. `min_discount`: 1 switches the
    discount off. `num_samples`: workers that are considered in addition to the believed holders.
    """

    decode: float = 1.0
    interference: float = 0.2
    eviction: float = 0.5
    min_discount: float = MIN_DISCOUNT
    decode_horizon: int = 6
    num_samples: int = 6


class RouteReason(Enum):
    """Why a worker was chosen; a label of the routing metrics."""

    FORK = "fork"
    PREFIX = "prefix"
    LOAD = "load"
    HASH = "hash"


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """What routing needs of a request.

    `boundaries`: ascending. `num_public_tokens`: start of the prompt that is shared by all tenants. `required_worker`:
    worker of the running reply that this request forks.
    """

    num_tokens: int
    boundaries: tuple[Boundary, ...]
    conversation: bytes
    num_branches: int = 1
    num_public_tokens: int = 0
    required_worker: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen worker, the prompt tokens it is believed to have in its cache, and the cost in seconds."""

    worker: str
    num_cached_tokens: int
    cost_s: float
    reason: RouteReason


@dataclass(slots=True)
class WorkerLoad:
    """What a worker reported last, plus the reservations made since.

    `queued_tokens`: prompt tokens that are not computed yet. `free_tokens`: tokens that fit in the cache without an
    eviction. `other_tokens`, `other_branches`: the part of `queued_tokens` and `num_branches` that other gateways sent.
    `last_choice`: number of the latest decision for this worker. `slowness`: see `update_prices`.
    """

    name: str
    incarnation: int
    seconds_per_token: float
    seconds_per_branch: float
    free_tokens: int = 0
    queued_tokens: int = 0
    num_branches: int = 0
    other_tokens: int = 0
    other_branches: int = 0
    last_choice: int = 0
    slowness: float = 1.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """Load that one routed request adds to a worker."""

    worker: str
    incarnation: int
    num_tokens: int
    num_branches: int


class WorkerLoads:
    """Loads of all live workers as one gateway knows them.

    `by_name`: read only. Invariant: `queued_tokens` and `num_branches` are sums over the open reservations of the
    worker's incarnation, and what other gateways sent.
    """

    def __init__(self, workers: Iterable[WorkerLoad] = ()) -> None:
        self.by_name: dict[str, WorkerLoad] = {}
        self._order: list[WorkerLoad] = []
        self._seeds: NDArray[np.uint64] | None = None
        self._num_choices = 0
        for worker in workers:
            self.add(worker)

    def __len__(self) -> int:
        return len(self._order)

    def get(self, name: str) -> WorkerLoad | None:
        """Return the load of a worker, None if it is not alive."""
        return self.by_name.get(name)

    def all(self) -> Sequence[WorkerLoad]:
        """Return the loads of all workers."""
        return self._order

    def add(self, worker: WorkerLoad) -> None:
        """Add a worker, or replace it by its new incarnation."""
        self.by_name[worker.name] = worker
        self._update_order()

    def remove(self, name: str) -> None:
        """Remove a worker whose lease has expired."""
        if self.by_name.pop(name, None) is not None:
            self._update_order()

    def _update_order(self) -> None:
        self._order, self._seeds = list(self.by_name.values()), None

    def reserve(self, decision: Decision, prompt: RoutedPrompt) -> Reservation:
        """Count a routed request before it is dispatched. Raises: KeyError for a worker that is not alive."""
        worker = self.by_name[decision.worker]
        num_tokens = prompt.num_tokens - decision.num_cached_tokens
        reservation = Reservation(worker.name, worker.incarnation, num_tokens, prompt.num_branches)
        self.apply(reservation)
        return reservation

    def apply(self, reservation: Reservation) -> None:
        """Count a reservation, also one of another gateway; one of an earlier incarnation counts nothing."""
        worker = self._matching(reservation)
        if worker is not None:
            self._num_choices += 1
            worker.last_choice = self._num_choices
            worker.queued_tokens += reservation.num_tokens
            worker.num_branches += reservation.num_branches

    def finish_prefill(self, reservation: Reservation) -> None:
        """Remove the prompt tokens of a reservation: the first token of the reply is here."""
        worker = self._matching(reservation)
        if worker is not None:
            worker.queued_tokens -= reservation.num_tokens

    def finish(self, reservation: Reservation) -> None:
        """Remove the branches of a reservation whose prefill has finished."""
        worker = self._matching(reservation)
        if worker is not None:
            worker.num_branches -= reservation.num_branches

    def update_others(self, name: str, num_tokens: int, num_branches: int) -> None:
        """Set the prompt tokens and branches that a worker has of other gateways; an unknown worker is ignored."""
        worker = self.by_name.get(name)
        if worker is not None:
            worker.queued_tokens += num_tokens - worker.other_tokens
            worker.num_branches += num_branches - worker.other_branches
            worker.other_tokens, worker.other_branches = num_tokens, num_branches

    def _matching(self, reservation: Reservation) -> WorkerLoad | None:
        worker = self.by_name.get(reservation.worker)
        return worker if worker is not None and worker.incarnation == reservation.incarnation else None

    def is_overloaded(self, max_queue_s: float) -> bool:
        """Return whether every worker owes more than this many seconds of prefill."""
        return all(worker.queued_tokens * worker.seconds_per_token > max_queue_s for worker in self._order)

    def hash_owner(self, key: bytes) -> WorkerLoad | None:
        """Return the worker that owns a key by rendezvous hashing, None without workers.

        When a worker leaves, only its own keys get another owner. Source: Thaler and Ravishankar, 1998.
        """
        if not self._order:
            return None
        if self._seeds is None:
            self._seeds = np.array([_hash64(worker.name.encode()) for worker in self._order], np.uint64)
        # The finaliser of SplitMix64, over all workers at once.
        mixed = self._seeds ^ np.uint64(_hash64(key))
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return self._order[int((mixed ^ (mixed >> np.uint64(31))).argmax())]


def update_prices(measured: Sequence[tuple[WorkerLoad, float, float]], elapsed_s: float) -> None:
    """Set the seconds per token and per branch of all workers from what each has measured lately, 0 for nothing yet.

    The times of equal workers differ up to threefold, as they depend on the lengths of the latest prompts; this noise
    must not send all requests to one of them. So each worker gets the median, multiplied by its `slowness` if that is
    far enough from 1: the ratio of its time per token to the median, a geometric mean over SLOWNESS_HALF_LIFE_S. Times
    per branch are too coarse for a ratio of their own. `elapsed_s`: since the last update.
    """
    typical = _typical([token_s for _, token_s, _ in measured])
    typical_branch = _typical([branch_s for _, _, branch_s in measured])
    weight = 1 - 0.5 ** (elapsed_s / SLOWNESS_HALF_LIFE_S)
    for load, token_s, _ in measured:
        if token_s > 0:
            load.slowness *= (token_s / typical / load.slowness) ** weight
        factor = 1.0 if 1 / EQUAL_SLOWNESS <= load.slowness <= EQUAL_SLOWNESS else load.slowness
        load.seconds_per_token, load.seconds_per_branch = typical * factor, typical_branch * factor


def _typical(seconds: Sequence[float]) -> float:
    known = [each for each in seconds if each > 0]
    return median_low(known) if known else DEFAULT_SECONDS


def _hash64(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def discount(num_continuations: int, min_discount: float = MIN_DISCOUNT) -> float:
    """Return kappa(f), the share with which tokens of a prefix with f continuations count."""
    return max(min_discount, 1 / (1 + max(0, num_continuations - 1) / 2))


def _place_discount(place: Place, min_discount: float) -> float:
    num_continuations = len(place.continuations)
    if num_continuations >= MAX_CONTINUATIONS and len(place.holders) == 1:
        return 0.0 if min_discount < 1 else 1.0
    return discount(num_continuations, min_discount)


def missing_tokens(
    prompt: RoutedPrompt, places: Sequence[Place | None], min_discount: float = MIN_DISCOUNT
) -> list[float]:
    """Return the discounted tokens after each boundary; the first entry counts from the start of the prompt.

    Tokens before a boundary are shared at least as widely as the boundary itself, so the lowest discount of all places
    from there on counts.
    """
    boundaries = prompt.boundaries
    missing = [0.0] * (len(boundaries) + 1)
    total, end, share, num_public = 0.0, prompt.num_tokens, 1.0, prompt.num_public_tokens
    for number in range(len(boundaries), -1, -1):
        start = boundaries[number - 1].num_tokens if number else 0
        total += (end - start) * share
        if num_public > start and share > min_discount:
            total -= (min(num_public, end) - start) * (share - min_discount)
        missing[number], end = total, start
        place = places[number - 1] if number else None
        if place is not None and len(place.continuations) > 1:
            place_share = _place_discount(place, min_discount)
            if place_share < share:
                share = place_share
    return missing


class Router:
    """Chooses workers for requests. Each gateway has one; they share the index and the reservations."""

    def __init__(self, weights: RoutingWeights | None = None, seed: int = 0) -> None:
        self.weights = RoutingWeights() if weights is None else weights
        self._random = random.Random(seed).random

    def choose(
        self, prompt: RoutedPrompt, places: Sequence[Place | None] | None, workers: WorkerLoads
    ) -> Decision | None:
        """Return the worker with the lowest cost, None without workers.

        `places`: one for each boundary of the prompt; None without a placement index: then the hash decides. A fork of
        a running reply goes to its worker if that is alive. Of equal costs the least recently chosen worker wins.
        """
        if places is None:
            owner = workers.hash_owner(prompt.conversation)
            return None if owner is None else Decision(owner.name, 0, 0.0, RouteReason.HASH)
        weights, boundaries = self.weights, prompt.boundaries
        missing = missing_tokens(prompt, places, weights.min_discount)
        holders, numbers = _holders(places, workers)
        required = None if prompt.required_worker is None else workers.get(prompt.required_worker)
        candidates: Iterable[WorkerLoad] = (required,) if required is not None else self._candidates(holders, workers)
        best: WorkerLoad | None = None
        best_cost, best_number = 0.0, 0
        horizon, interference = weights.decode * weights.decode_horizon, weights.interference
        for worker in candidates:
            number = numbers.get(worker.name, 0)
            lacking, n = missing[number], worker.num_branches
            tokens = worker.queued_tokens + lacking * (1 + interference * n)
            if lacking > worker.free_tokens:
                tokens += weights.eviction * min(lacking, lacking - worker.free_tokens)
            cost = tokens * worker.seconds_per_token + horizon * n * worker.seconds_per_branch
            if best is None or cost < best_cost or (cost == best_cost and worker.last_choice < best.last_choice):
                best, best_cost, best_number = worker, cost, number
        if best is None:
            return None
        num_cached = boundaries[best_number - 1].num_tokens if best_number else 0
        reason = RouteReason.FORK if best is required else RouteReason.PREFIX if best_number else RouteReason.LOAD
        return Decision(best.name, min(num_cached, prompt.num_tokens - 1), best_cost, reason)

    def _candidates(self, holders: dict[str, WorkerLoad], workers: WorkerLoads) -> Iterable[WorkerLoad]:
        """Return the holders, and sampled workers, which are added to `holders`; a few workers are all candidates."""
        every, num_samples = workers.all(), self.weights.num_samples
        if len(every) <= num_samples:
            return every
        draw, num_workers = self._random, len(every)
        for _ in range(num_samples):
            worker = every[int(draw() * num_workers)]
            holders[worker.name] = worker
        return holders.values()


def _holders(places: Sequence[Place | None], workers: WorkerLoads) -> tuple[dict[str, WorkerLoad], dict[str, int]]:
    """Return the live holders, and how many boundaries each is believed to have. Stale incarnations hold nothing."""
    found: dict[str, WorkerLoad] = {}
    numbers: dict[str, int] = {}
    known = workers.by_name
    for number in range(len(places), 0, -1):
        place = places[number - 1]
        if place is not None:
            for name, incarnation in place.holders.items():
                if name not in found and name in known and known[name].incarnation == incarnation:
                    found[name], numbers[name] = known[name], number
    return found, numbers
