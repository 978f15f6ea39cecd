"""Workloads for the engine, the oracle that answers them without pages, and the harness that compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from chatcache.config import EngineConfig
from chatcache.decode.actions import (
    Advance,
    BranchAction,
    Candidates,
    Done,
    DrawSpec,
    Emit,
    Extend,
    Fork,
    Output,
    Retire,
)
from chatcache.decode.actions import Strategy as DecodeStrategy
from chatcache.decode.factory import make_strategy
from chatcache.engine.admission import num_branches
from chatcache.engine.engine import Engine
from chatcache.engine.fake import POISON, FakeRunner, fake_capacity, fake_facts, history_of
from chatcache.engine.fake_sampling import log_softmax, top_candidates
from chatcache.errors import ContextTooLong
from chatcache.kv.pool import PagePool
from chatcache.sched.draws import draws_of
from chatcache.sched.limits import worst_case_pages
from chatcache.sched.plan import StepPlan, StepResult
from chatcache.types import (
    BeamSearchParams,
    CandidateDone,
    EngineEvent,
    Failed,
    Finished,
    ForkPoint,
    GenerateRequest,
    SamplingParams,
    Started,
    TokenLogprob,
    Tokens,
)

VOCAB = 32
FACTS = fake_facts(vocab_size=VOCAB)
AUDIT_EVERY = 5  # not every step: an audit makes the scheduler tell the tables what it has put off
WANDER = "wander"  # a namespace prefix that asks for the wandering strategy


class Wander:
    """Fork and retire all over the place, as the drawn tokens say: up to 7 branches, children of retired parents too.

    A branch's id spells its ancestry in base 4, so ids are unique and do not depend on who is drawn first.
    """

    max_branches = 7
    lockstep = False
    steady = True

    def __init__(self, seed: int, max_tokens: int) -> None:
        self._seed = seed
        self._max_tokens = max_tokens
        self._outputs: dict[int, tuple[int, ...]] = {0: ()}
        self._parents: set[int] = set()

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        return (DrawSpec(width=3, seed=self._seed),)

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        actions: list[BranchAction] = []
        outputs: list[Output] = []
        for branch, (candidates,) in drawn.items():
            self._advance(branch, candidates.tokens, actions, outputs)
        return Advance(tuple(actions), tuple(outputs), finished=not self._outputs)

    def _advance(
        self, branch: int, tokens: tuple[int, ...], actions: list[BranchAction], outputs: list[Output]
    ) -> None:
        before = self._outputs[branch]
        whim = (sum(tokens) + len(before) + self._seed) % 8
        last = len(before) + 1 >= self._max_tokens
        grown = not last and branch < 4 and branch not in self._parents  # two generations, everybody once
        if grown and whim <= 2:
            self._parents.add(branch)
            for number in range(1, 3):
                child = branch * 4 + number
                actions.append(Fork(branch, child, tokens[number]))
                self._outputs[child] = (*before, tokens[number])
        if last or (grown and whim == 2) or whim == 7:
            actions.append(Retire(branch))
            del self._outputs[branch]
            outputs += [Emit(branch, (*before, tokens[0])), Done(branch, "stop")]
        else:
            actions.append(Extend(branch, tokens[0]))
            self._outputs[branch] = (*before, tokens[0])


def strategy_for(request: GenerateRequest, facts: Any, **settings: Any) -> DecodeStrategy:
    """Build the strategy of a request; `wander` namespaces get the wandering one."""
    if request.namespace.startswith(WANDER):
        return Wander(settings["seed"], settings["max_tokens"])
    return make_strategy(request, facts, **settings)


@dataclass
class Answer:
    """What one request produced."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    done: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    prompt: tuple[Any, ...] = ()
    failed: bool = False

    def take(self, output: Output | Tokens | CandidateDone) -> None:
        if isinstance(output, Emit | Tokens):
            self.tokens.setdefault(output.index, []).extend(output.token_ids)
            self.logprobs.setdefault(output.index, []).extend(output.logprobs)
        elif isinstance(output, Done | CandidateDone):
            self.done[output.index] = (output.finish_reason, output.stop_reason, output.score)

    def begins_with(self, other: Answer) -> bool:
        """Say whether `other` is a beginning of this answer."""
        return all(self.tokens.get(i, [])[: len(tokens)] == tokens for i, tokens in other.tokens.items())


def prompt_scores(request: GenerateRequest, runner: FakeRunner) -> tuple[TokenLogprob | None, ...]:
    """Score every prompt token after those before it, without any pages."""
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return ()
    scores: list[TokenLogprob | None] = [None]
    for position, token in enumerate(request.prompt[1:], 1):
        logprobs = log_softmax(runner.logits(history_of(request.prompt[:position])))
        ids, values = top_candidates(logprobs, num_top)
        scores.append(TokenLogprob(float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))))
    return tuple(scores)


def alone(request: GenerateRequest, *, seed: int = 0) -> Answer:
    """Answer a request from plain lists of tokens: no pages, no scheduler, no steps shared with anybody."""
    runner = FakeRunner(fake_capacity(2), VOCAB)
    max_tokens = request.params.max_tokens or 16
    seed = getattr(request.params, "seed", None) or seed
    strategy = strategy_for(request, FACTS, seed=seed, max_tokens=max_tokens, token_bytes=None)
    branches = {0: list(request.prompt)}
    answer, finished = Answer(prompt=prompt_scores(request, runner)), False
    while not finished:
        drawn: dict[int, tuple[Candidates, ...]] = {}
        for branch, tokens in branches.items():
            specs = list(strategy.draws(branch))
            draws = draws_of(specs, [0] * len(specs), [len(tokens)] * len(specs))
            result = runner.draw(draws, [history_of(tokens)], tokens[-1:])
            drawn[branch] = tuple(_candidates(result, draw, spec) for draw, spec in enumerate(specs))
        advance = strategy.advance(drawn)
        finished = advance.finished
        for action in advance.actions:
            if isinstance(action, Fork):
                branches[action.child] = [*branches[action.parent], action.token]
            elif isinstance(action, Extend):
                branches[action.branch].append(action.token)
            else:
                del branches[action.branch]
        for output in advance.outputs:
            answer.take(output)
    return answer


def _candidates(result: StepResult, draw: int, spec: DrawSpec) -> Candidates:
    """Read one draw's cells out of a result."""
    ids = [token for token in result.tokens[draw].tolist()[: spec.width] if token >= 0]
    top = zip(result.top_tokens[draw].tolist(), result.top_logprobs[draw].tolist(), strict=True)
    distinct = spec.width > 1 and spec.temperature > 0
    noisy = result.perturbed[draw].tolist() if distinct and result.perturbed is not None else []
    logprobs = result.logprobs[draw].tolist()[: len(ids)]
    raw = result.raw_logprobs[draw].tolist() if distinct and result.raw_logprobs is not None else []
    alternatives = tuple(top)[: spec.num_top]
    return Candidates(tuple(ids), tuple(logprobs), alternatives, tuple(noisy[: len(ids)]), tuple(raw[: len(ids)]))


@dataclass(frozen=True)
class Arrival:
    request: GenerateRequest
    step: int
    cancelled_at: int | None


class Crashing(FakeRunner):
    """Raises in some steps, having spoilt everything that the plan would have written: in `crashes`, and in
    `swap_crashes`, which counts only those that move pages to or from the host."""

    crashes: frozenset[int] = frozenset()
    swap_crashes: frozenset[int] = frozenset()
    num_swaps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        moves = bool(len(plan.swaps_out) or len(plan.swaps_in))
        self.num_swaps += moves
        if plan.step not in self.crashes and not (moves and self.num_swaps in self.swap_crashes):
            return super().execute(plan)
        self.host_cells[plan.swaps_out[:, 1]] = POISON
        for pages in (plan.swaps_in[:, 1], plan.copies[:, 1]):
            self.cells[pages] = POISON
        raise RuntimeError("crashed as planned")


@dataclass(frozen=True)
class Workload:
    """Requests and the engine they come to. Its runner crashes in some steps: see `Crashing`."""

    arrivals: tuple[Arrival, ...]
    num_pages: int
    page_size: int
    num_slots: int
    budget: int
    caching: bool
    num_host_pages: int = 0
    preemption: str = "auto"
    policy: str = "fcfs"
    crashes: frozenset[int] = frozenset()
    swap_crashes: frozenset[int] = frozenset()

    def engine(self) -> tuple[Engine, FakeRunner]:
        capacity = fake_capacity(self.num_pages, self.page_size, self.num_slots, 256, self.num_host_pages)
        runner = Crashing(capacity, VOCAB)
        runner.crashes, runner.swap_crashes = self.crashes, self.swap_crashes
        config = EngineConfig(
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.num_slots,
            enable_prefix_caching=self.caching,
            preemption=self.preemption,
            scheduling_policy=self.policy,
            strict=True,
        )
        return Engine(runner, FACTS, config, make_strategy=strategy_for), runner


def poison_free_pages(engine: Engine, runner: FakeRunner) -> None:
    """Spoil every page that nobody holds and nobody may match: nothing in it may ever be read again."""
    kv = engine.scheduler.kv
    runner.cells[_free(kv.pool)] = POISON
    if kv.host is not None:
        runner.host_cells[[page - 1 for page in _free(kv.host.pool)]] = POISON


def _free(pool: PagePool) -> list[int]:
    return [page for page in range(1, pool.num_pages) if not pool.refs[page] and not pool.is_published(page)]


def step_and_watch(engine: Engine) -> list[EngineEvent]:
    """Run a step; the first in turn must not be preempted in it, and nobody more than five times."""
    first = next(iter(engine.scheduler.running), None)
    before = first.num_preemptions if first else 0
    events = engine.step()
    if first is not None and first.num_preemptions > before:
        assert engine.scheduler.running[0].turn < first.turn, "the first in turn was preempted"
    assert all(request.num_preemptions <= 5 for request in engine.scheduler.requests())
    return events


def run(workload: Workload, *, audit: bool = True, max_steps: int = 1000) -> dict[str, Answer]:
    """Run the workload; check events, pages and progress on the way. Returns the answers of accepted requests.

    Without `audit` nobody looks at reference counts: then wrong pages must show in the answers.
    """
    engine, runner = workload.engine()
    answers: dict[str, Answer] = {}
    events: dict[str, list[EngineEvent]] = {}
    todo = sorted(workload.arrivals, key=lambda arrival: arrival.step)
    aborts = sorted((a.cancelled_at, a.request.request_id) for a in todo if a.cancelled_at is not None)
    step = 0
    while todo or engine.has_work():
        while todo and todo[0].step <= step:
            request = todo.pop(0).request
            try:
                engine.add(request)
            except ContextTooLong:
                continue
            answers[request.request_id], events[request.request_id] = Answer(), []
        while aborts and aborts[0][0] <= step:
            engine.abort(aborts.pop(0)[1])
        for event in step_and_watch(engine):
            events[event.request_id].append(event)
            if isinstance(event, Tokens | CandidateDone):
                answers[event.request_id].take(event)
            elif isinstance(event, Started):
                answers[event.request_id].prompt = event.prompt_logprobs
        if audit and step % AUDIT_EVERY == 0:
            engine.check()
        poison_free_pages(engine, runner)
        step += 1
        assert step < max_steps, "the engine stalls"
    health = engine.health()
    assert (health.num_pages_in_use, health.num_host_pages_in_use) == (0, 0)
    assert health.num_self_checks > 0 or not health.num_steps
    for request_id, seen in events.items():
        check_events(request_id, seen, may_fail=bool(workload.crashes or workload.swap_crashes))
        if isinstance(seen[-1], Failed):
            answers[request_id].failed = True
    return answers


def check_events(request_id: str, events: list[EngineEvent], *, may_fail: bool = False) -> None:
    """Numbered without a gap, `Started` before any token, exactly one terminal event, at the end."""
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert isinstance(events[-1], Finished | Failed if may_fail else Finished), (request_id, events[-1])
    assert not any(isinstance(event, Finished | Failed) for event in events[:-1])
    if len(events) > 1:
        assert isinstance(events[0], Started)
        assert not any(isinstance(event, Started) for event in events[1:])


def assert_equals_alone(workload: Workload, *, audit: bool = True) -> None:
    """Run the workload and compare every answer with the request's own, computed alone from plain lists."""
    answers = run(workload, audit=audit)
    for arrival in workload.arrivals:
        request = arrival.request
        if request.request_id not in answers:
            continue
        expected, got = alone(request), answers[request.request_id]
        if arrival.cancelled_at is None and not got.failed:
            assert got == expected
        else:
            assert expected.begins_with(got)


_FAMILIES = [tuple(int(t) for t in np.random.default_rng(i).integers(1, VOCAB, 48)) for i in range(3)]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Prompts of a few families, so that prefixes are often shared."""
    family = draw(st.sampled_from(_FAMILIES))
    shared = draw(st.integers(1, 40))
    own = draw(st.lists(st.integers(1, VOCAB - 1), max_size=8))
    return (*family[:shared], *own)


@st.composite
def requests(draw: st.DrawFn, number: int, tight: bool = False) -> GenerateRequest:
    kind = draw(st.sampled_from(["greedy", "sample", "sample", "n", "distinct", "beam", "beam", WANDER]))
    max_tokens = draw(st.integers(10, 40) if tight else st.one_of(st.integers(1, 12), st.integers(13, 40)))
    params: SamplingParams | BeamSearchParams
    if kind == "beam":
        width, groups = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (5, 1), (4, 2), (3, 3), (6, 2)]))
        params = BeamSearchParams(
            beam_width=width,
            n=draw(st.sampled_from([None, 1, 2])),
            num_beam_groups=groups,
            diversity_penalty=draw(st.sampled_from([0.0, 0.5])) if groups > 1 else 0.0,
            stream_beams=draw(st.booleans()),
            logprobs=draw(st.sampled_from([None, 2])),
            max_tokens=max_tokens,
            length_penalty=draw(st.sampled_from([0.0, 1.0])),
            early_stopping=draw(st.one_of(st.booleans(), st.just("never"))),
        )
    else:
        several = draw(st.integers(2, 6))
        n = {"n": several, "distinct": several, WANDER: Wander.max_branches}.get(kind, 1)
        params = SamplingParams(
            n=n,
            distinct=kind == "distinct",
            max_tokens=max_tokens,
            seed=draw(st.integers(0, 99)),
            temperature=0.0 if kind == "greedy" else draw(st.sampled_from([0.7, 1.5])),
            top_k=draw(st.sampled_from([0, 5])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
            logprobs=draw(st.sampled_from([None, 2])),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 2])),
            ignore_eos=tight or draw(st.sampled_from([True, True, False])),
        )
    namespace = WANDER if kind == WANDER else draw(st.sampled_from(["", "", "other"]))
    prompt = draw(prompts())
    num_public = draw(st.sampled_from([0, 0, len(prompt) // 2, len(prompt)]))
    return GenerateRequest(
        request_id=f"r{number}",
        prompt=prompt,
        params=params,
        namespace=namespace,
        num_public_tokens=num_public,
        priority=draw(st.sampled_from([0, 0, -1, 5])),
    )


@st.composite
def forks(draw: st.DrawFn, number: int, source: Arrival, tight: bool = False) -> Arrival:
    """Ask on from somewhere within an answer that may still be streaming, hint included."""
    request = draw(requests(number, tight))
    lines = alone(source.request).tokens
    index = draw(st.sampled_from(sorted(lines)))
    line = (*source.request.prompt, *lines[index])
    prompt = (*line[: draw(st.integers(1, len(line)))], *draw(st.lists(st.integers(1, VOCAB - 1), max_size=4)))
    namespace = draw(st.sampled_from([source.request.namespace, request.namespace]))
    if namespace.startswith(WANDER) != request.namespace.startswith(WANDER):
        namespace = request.namespace
    point = ForkPoint(source.request.request_id, draw(st.sampled_from([0, index])))
    fork = replace(request, prompt=prompt, namespace=namespace, num_public_tokens=0, fork_of=point)
    return Arrival(fork, source.step + draw(st.integers(1, 12)), None)


@st.composite
def workloads(draw: st.DrawFn, tight: bool = False) -> Workload:
    """Any workload; or a `tight` one: long requests, many for their pool, that preempt each other."""
    arrivals: list[Arrival] = []
    for number in range(draw(st.integers(3, 8) if tight else st.integers(1, 7))):
        step = draw(st.sampled_from([0, 0, 0, 1, 3, 9]))
        cancelled_at = draw(st.one_of(st.none(), st.none(), st.none(), st.integers(step, step + 15)))
        if arrivals and draw(st.integers(0, 2)) == 0:
            arrivals.append(draw(forks(number, draw(st.sampled_from(arrivals)), tight)))
        else:
            arrivals.append(Arrival(draw(requests(number, tight)), step, cancelled_at))
    page_size = draw(st.sampled_from([1, 2, 4, 8, 16]))
    largest = max(
        worst_case_pages(len(r.prompt), r.params.max_tokens or 1, num_branches(r.params), page_size)
        for r in (arrival.request for arrival in arrivals)
    )
    num_host_pages = draw(st.sampled_from([12, 40, 300] if tight else [0, 3, 20, 300]))
    spare = [0, 1, 2, 4] if tight else [-1, 0, 0, 1, 2, 4, 8, 200]
    return Workload(
        tuple(arrivals),
        num_pages=max(1 + largest + draw(st.sampled_from(spare)), 2),
        page_size=page_size,
        num_slots=draw(st.sampled_from([16, 32] if tight else [7, 10, 16, 32])),
        budget=draw(st.sampled_from([7, 11, 24, 64, 512])),
        caching=draw(st.sampled_from([True, True, True, False])),
        num_host_pages=num_host_pages,
        preemption=draw(st.sampled_from(["auto", "recompute", "swap", "swap"] if num_host_pages else ["auto"])),
        policy=draw(st.sampled_from(["fcfs", "fcfs", "priority", "fair"])),
        crashes=draw(st.sampled_from([frozenset[int]()] * 3 + [frozenset({9}), frozenset({5, 20, 33})])),
        swap_crashes=draw(st.sampled_from([frozenset[int]()] * 3 + [frozenset({1}), frozenset({2, 3})])),
    )
