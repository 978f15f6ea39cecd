"""Workers and gateways on a virtual clock: prefix caches, a prefill queue per worker, and decode.

A worker computes prompts one after another. Running replies slow prefill down, and prompts start to decode when they
are computed. A cache holds segments of prompts, least recently used first out, ends before beginnings.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Protocol

from loadtest.scale.traffic import Chain, Conversation, Node, PlannedTurn, Scenario, draw_conversations

STEP_S = 0.02  # of a decode step
BRANCH_S = 0.0015  # more for each running branch
WARM_UP = 0.25  # share of the time that is not measured


@dataclass(slots=True)
class Worker:
    """A simulated engine worker. `cache`: segments and their tokens, least recently used first."""

    number: int
    capacity: int
    rate: float
    cache: OrderedDict[Node, int] = field(default_factory=OrderedDict)
    num_cached: int = 0
    free_at_s: float = 0.0
    num_running: int = 0
    incarnation: int = 0
    num_requests: int = 0

    @property
    def name(self) -> str:
        """Name in the product's tables."""
        return f"worker-{self.number}"

    def prefill_rate(self) -> float:
        """Return prompt tokens per second; decode takes up to half of the time."""
        decode_s = self.num_running * BRANCH_S
        return self.rate * (1 - 0.5 * decode_s / (STEP_S + decode_s))


@dataclass(slots=True)
class Request:
    """One turn under way. `chain`: its prompt; `worker` and `num_cached` follow when it is dispatched."""

    conversation: Conversation
    turn: int
    chain: Chain
    num_tokens: int
    gateway: int = 0
    worker: int = -1
    num_cached: int = 0
    believed: int = 0
    ticket: object = None

    @property
    def plan(self) -> PlannedTurn:
        """Planned lengths of this turn."""
        return self.conversation.turns[self.turn]


class Policy(Protocol):
    """A rule that chooses workers, and what it learns."""

    def prepare(self, request: Request, now_s: float) -> None:
        """Look up what the choice needs; not part of the measured time."""
        ...

    def choose(self, request: Request) -> int:
        """Return the number of the worker; may set `request.believed`."""
        ...

    def dispatched(self, request: Request, now_s: float) -> None:
        """Count a request after the choice; `request.num_cached` is set."""
        ...

    def started(self, request: Request, now_s: float) -> None:
        """Handle the first token."""
        ...

    def finished(self, request: Request, now_s: float) -> None:
        """Handle the last token; `request.chain` includes the reply."""
        ...

    def restarted(self, worker: Worker) -> None:
        """Handle the loss of a worker's cache."""
        ...


class Cluster:
    """Workers, and which of them hold each segment."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        rng = random.Random(seed)
        slow = scenario.prefill_rate / scenario.slow_factor
        self.workers = [
            Worker(number, scenario.cache_tokens, slow if rng.random() < scenario.slow_share else scenario.prefill_rate)
            for number in range(scenario.num_workers)
        ]
        self.holders: dict[Node, dict[int, None]] = {}

    def cached_tokens(self, worker: Worker, chain: Chain) -> int:
        """Return the tokens of the longest prefix in a worker's cache."""
        found = 0
        for node, num_tokens in chain:
            if node not in worker.cache:
                break
            found += num_tokens
        return found

    def cached_everywhere(self, chain: Chain) -> dict[int, int]:
        """Return workers that have a prefix in their cache -> its tokens."""
        found: dict[int, int] = {}
        holders, end = self.holders.get(chain[0][0], {}), chain[0][1]
        for node, num_tokens in chain[1:]:
            here = self.holders.get(node)
            if not here:
                break
            further = holders.keys() & here.keys()
            if not further:
                break
            for number in holders.keys() - further:
                found[number] = end
            holders, end = dict.fromkeys(further), end + num_tokens
        found.update(dict.fromkeys(holders, end))
        return found

    def insert(self, worker: Worker, chain: Chain) -> None:
        """Put a prompt into a worker's cache and evict what no longer fits."""
        cache = worker.cache
        for node, num_tokens in reversed(chain):
            if node in cache:
                cache.move_to_end(node)
            else:
                cache[node] = num_tokens
                worker.num_cached += num_tokens
                self.holders.setdefault(node, {})[worker.number] = None
        while worker.num_cached > worker.capacity:
            node, num_tokens = cache.popitem(last=False)
            worker.num_cached -= num_tokens
            self._drop(node, worker)

    def restart(self, worker: Worker) -> None:
        """Empty a worker's cache."""
        for node in worker.cache:
            self._drop(node, worker)
        worker.cache.clear()
        worker.num_cached = 0
        worker.incarnation += 1

    def _drop(self, node: Node, worker: Worker) -> None:
        here = self.holders[node]
        del here[worker.number]
        if not here:
            del self.holders[node]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one run after the warm-up. `belief_error`: mean tokens between predicted and actual cached tokens."""

    num_requests: int
    hit_rate: float
    mean_ttft_s: float
    p50_ttft_s: float
    p99_ttft_s: float
    cov: float
    belief_error: float
    decision_us: float


def simulate(scenario: Scenario, policy: Policy, cluster: Cluster, num_gateways: int, seed: int) -> Outcome:
    """Run the traffic of a scenario to its end. Raises: RuntimeError if nothing arrived after the warm-up."""
    rng, order = random.Random(f"{seed} gateways"), count()
    events: list[tuple[float, int, str, Request | None]] = []
    conversations = draw_conversations(scenario, seed)
    duration_s = scenario.duration_s if scenario.trace is None else max(each.start_s for each in conversations)
    ttft_s: list[float] = []
    decisions_s: list[float] = []
    errors: list[int] = []
    num_hits = num_tokens = 0

    def push(at_s: float, kind: str, request: Request | None) -> None:
        heapq.heappush(events, (at_s, next(order), kind, request))

    def turn(at_s: float, conversation: Conversation, number: int, history: Chain) -> None:
        plan = conversation.turns[number]
        chain = history
        if plan.user_tokens:
            chain = (*history, ((*conversation.key, number, "user"), plan.user_tokens))
        push(at_s, "arrive", Request(conversation, number, chain, sum(length for _, length in chain)))

    for each in conversations:
        turn(each.start_s, each, 0, each.start)
    if scenario.restart_share:
        push(duration_s / 2, "restart", None)
    while events:
        now_s, _, kind, request = heapq.heappop(events)
        if request is None:
            for worker in cluster.workers[: round(scenario.restart_share * len(cluster.workers))]:
                cluster.restart(worker)
                policy.restarted(worker)
        elif kind == "arrive":
            if now_s > duration_s:
                continue
            request.gateway = rng.randrange(num_gateways)
            policy.prepare(request, now_s)
            begun_s = perf_counter()
            request.worker = policy.choose(request)
            decision_s = perf_counter() - begun_s
            worker = cluster.workers[request.worker]
            request.num_cached = min(cluster.cached_tokens(worker, request.chain), request.num_tokens - 1)
            policy.dispatched(request, now_s)
            missing = request.num_tokens - request.num_cached
            worker.free_at_s = max(now_s, worker.free_at_s) + missing / worker.prefill_rate()
            cluster.insert(worker, request.chain)
            if now_s >= WARM_UP * duration_s:
                num_hits, num_tokens = num_hits + request.num_cached, num_tokens + request.num_tokens
                errors.append(abs(request.believed - request.num_cached))
                decisions_s.append(decision_s)
                ttft_s.append(worker.free_at_s - now_s)
                worker.num_requests += 1
            push(worker.free_at_s, "start", request)
        elif kind == "start":
            worker = cluster.workers[request.worker]
            worker.num_running += 1
            policy.started(request, now_s)
            push(now_s + request.plan.output_tokens * (STEP_S + BRANCH_S * worker.num_running), "finish", request)
        else:
            worker, conversation, number = cluster.workers[request.worker], request.conversation, request.turn
            worker.num_running -= 1
            request.chain = (*request.chain, ((*conversation.key, number, "reply"), request.plan.output_tokens))
            cluster.insert(worker, request.chain)
            policy.finished(request, now_s)
            turns = conversation.turns
            if number + 1 < len(turns):
                turn(now_s + turns[number].think_s, conversation, number + 1, request.chain)
            if conversation.fork_at is not None and number and number == len(turns) // 2:
                kept = request.chain[: 2 + int(conversation.fork_at * (len(request.chain) - 2))]
                fork = Conversation((*conversation.key, "fork"), now_s, kept, turns[number:])
                turn(now_s + turns[number].think_s * conversation.fork_at, fork, 0, kept)
    if not ttft_s:
        raise RuntimeError(f"{scenario.name}: no request arrived after the warm-up")
    ttft_s.sort()
    shares = [worker.num_requests for worker in cluster.workers]
    return Outcome(
        len(ttft_s), num_hits / num_tokens, statistics.fmean(ttft_s), ttft_s[len(ttft_s) // 2],
        ttft_s[min(len(ttft_s) - 1, int(len(ttft_s) * 0.99))], statistics.pstdev(shares) / statistics.fmean(shares),
        statistics.fmean(errors), statistics.median(decisions_s) * 1e6,
    )  # fmt: skip
