"""The engine: requests in, events out, one step at a time. Synchronous and single-threaded; `bus` gives it a thread or
a process of its own.

The scheduler that a configuration and a runner ask for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from msgspec.structs import replace

from chatcache.config import EngineConfig
from chatcache.decoding.strategy import make_strategy
from chatcache.engine.admission import GrammarWaitQueue, RequestValidator, StrategyFactory, check_policies
from chatcache.engine.events import EventQueue
from chatcache.engine.invariants import InvariantChecker
from chatcache.engine.pipeline import StepFailedError, StepPipeline, candidates_of
from chatcache.engine.protocols import ModelRunner
from chatcache.engine.resume import resume_request
from chatcache.engine.stats import EnginePages, Namespaces, Totals, UsageGauge, lasting, with_pages, with_traffic
from chatcache.errors import DeviceLostError, EngineError, InvalidRequestError, OverloadedError
from chatcache.kv_cache.manager import KVCache
from chatcache.scheduler.batch import Step
from chatcache.scheduler.fairness import FAIR, VirtualTokenCounter
from chatcache.scheduler.preemption import RECOMPUTE, CostModel
from chatcache.scheduler.request import LiveRequest
from chatcache.scheduler.scheduler import Scheduler
from chatcache.types.actions import Advance
from chatcache.types.events import EngineEvent
from chatcache.types.plan import KVCapacity, StepResult
from chatcache.types.request import GenerateRequest
from chatcache.types.stats import EngineHealth, ModelInfo


def build_scheduler(config: EngineConfig, capacity: KVCapacity, digest: str) -> Scheduler:
    """Build the scheduler over empty pages. `digest`: the model's, which names its pages.

    Raises: InvalidRequestError for a policy that does not exist, or that this runner cannot follow.
    """
    check_policies(config, capacity)
    num_host_pages = capacity.num_host_pages if config.preemption_mode != RECOMPUTE else 0
    return Scheduler(
        KVCache(capacity.num_pages, capacity.page_size, digest, config.enable_prefix_caching, num_host_pages),
        num_slots=min(config.max_num_seqs, capacity.num_slots),
        max_num_batched_tokens=config.max_num_batched_tokens,
        cost=CostModel(config.preemption_mode, capacity.swap_page_s),
        counters=VirtualTokenCounter() if config.scheduling_policy == FAIR else None,
    )


PREPARING_WAIT_S = 0.005

log = logging.getLogger(__name__)


class Engine:
    """Continues prompts. After `add`, call `step` while `has_work`; each call returns the new events.

    Where the runner runs ahead, one step may be on the device between two calls; see `engine.flight`.

    `token_bytes[id]` is what a token adds to the text, `special_ids` are no text: stop strings and structured outputs
    need them. `make_strategy` is `decode`'s, replaceable so that tests can decode in ways of their own, and so is the
    `clock` (seconds) that times the runner.
    """

    def __init__(
        self,
        runner: ModelRunner,
        facts: ModelInfo,
        config: EngineConfig,
        token_bytes: Sequence[bytes] | None = None,
        *,
        special_ids: Collection[int] = (),
        make_strategy: StrategyFactory = make_strategy,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._facts = facts
        capacity = runner.capacity()
        limits = (facts.max_model_len, capacity.max_model_len, config.max_model_len or capacity.max_model_len)
        self._max_model_len = min(limits)
        self._scheduler = build_scheduler(config, capacity, facts.digest)
        self._kv = self._scheduler.kv
        self._flights = StepPipeline(runner, self._scheduler, clock)
        self._lost: DeviceLostError | None = None
        self._intake = RequestValidator(
            facts,
            config,
            capacity,
            max_model_len=self._max_model_len,
            most_branches=min(self._scheduler.num_slots, config.max_num_batched_tokens),
            token_bytes=token_bytes,
            special_ids=special_ids,
            make_strategy=make_strategy,
        )
        self._self_check = InvariantChecker(self._kv, self._scheduler, strict=config.strict)
        self._usage = UsageGauge(self._scheduler)
        self._namespaces = Namespaces()
        self._pages = EnginePages(
            self._scheduler,
            capacity,
            self._namespaces,
            vocab_size=facts.vocab_size,
            max_model_len=self._max_model_len,
        )
        self._requests: dict[str, LiveRequest] = {}
        self._preparing = GrammarWaitQueue()
        self._outbox = EventQueue()
        self._totals = Totals()
        self._lasting = lasting(facts, config, capacity, self._max_model_len)

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest) -> None:
        """Accept a request; from here exactly one terminal event will come.

        Raises: InvalidRequestError or ContextLengthError for what can never run, OverloadedError when the queue is full
        or the device
        is gone, RateLimitError when the namespace's share of the queue is.
        """
        if self._lost is not None:
            raise OverloadedError(self._lost.message, code="engine_unavailable")
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request_id {request.request_id!r} is already active", param="request_id")
        max_tokens = self._intake.check(request)
        if request.resume_point is None:
            self._intake.check_room(request, self._scheduler.waiting, self._preparing)
        ticket = self._intake.grammar(request)
        live = self._intake.accept(request, max_tokens, ticket)
        self._namespaces.remember(request.namespace)
        self._requests[request.request_id] = live
        self._outbox.open(request.request_id, 0 if request.resume_point is None else request.resume_point.last_seq)
        if ticket is None or (ticket.is_ready and ticket.failure() is None):
            self._queue(live)
        else:
            self._preparing.add(live, ticket)

    def _queue(self, request: LiveRequest) -> None:
        try:
            if not resume_request(request, self._scheduler, self._outbox):
                del self._requests[request.request_id]
        except Exception as error:
            self._close_failed(request, error)

    def abort(self, request_id: str) -> None:
        """End a request now; its pages are free when this returns. Unknown and finished ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request in self._preparing:
            self._preparing.remove(request)
            self._outbox.finished(request, cancelled=True)
        else:
            num_pages = self._scheduler.finish(request)
            self._outbox.finished(request, cancelled=True, num_pages_freed=num_pages)

    def drop(self, request_id: str, index: int) -> None:
        """End one candidate now; its pages are free when this returns, and the others go on. The last one: as `abort`.

        Unknown requests, and candidates that have ended, are ignored. Raises: UnsupportedParameterError for candidates
        that
        stand for no branch of their own.
        """
        request = self._requests.get(request_id)
        dropped = request.strategy.drop(index) if request is not None else None
        if request is None or dropped is None:
            return
        if dropped.is_last:
            self.abort(request_id)
            return
        if request in self._preparing:
            request.max_branches -= 1
            num_pages = 0
        else:
            num_pages = self._scheduler.drop_branch(request, dropped.branch)
        self._outbox.dropped(request, index, dropped.score, num_pages)

    def prepare_constraints(self) -> None:
        """Do now what the first request with structured outputs would have to wait for; nothing where it cannot be."""
        self._intake.prepare_constraints()

    def is_preparing(self, request_id: str) -> bool:
        """Whether the request's grammar is still being compiled; a `Failed` event will tell if it is no good."""
        request = self._requests.get(request_id)
        return request is not None and request in self._preparing

    def has_work(self) -> bool:
        """Whether to call `step`: for requests, for events, for a step on the device, or to hear that it is lost."""
        return bool(self._requests or self._outbox or self._flights) or self._lost is not None

    def close(self) -> None:
        """Wait for the device, if a step is on it; what runs is left as it is."""
        with suppress(DeviceLostError):
            self._flights.drop()

    # -- the loop -------------------------------------------------------------------------------------------------

    def take_events(self) -> list[EngineEvent]:
        """Return the events since the last call: after an abort its end, without a step."""
        return self._outbox.take()

    def step(self) -> list[EngineEvent]:
        """Run one step and return the events since the last call. Never raises on account of a request.

        Raises: InvariantError, in a strict engine whose books do not add up when it falls idle. DeviceLostError, when
        the
        device is gone and the events that end every request were taken: this engine will never run again.
        """
        if self._lost is not None and not self._outbox:
            raise self._lost
        if self._preparing:
            self._admit_prepared()
        try:
            self._fill()
            if self._flights:
                self._collect()
        except DeviceLostError as error:
            self._lose(error)
        if not self._requests and not self._flights:
            self._self_check.run_if_due()
        return self._outbox.take()

    def _admit_prepared(self) -> None:
        """Queue the requests whose grammar is compiled now; wait a little for one if there is nothing else to do."""
        alone = len(self._preparing) == len(self._requests)
        for request, failure in self._preparing.take(PREPARING_WAIT_S if alone else 0.0):
            if failure is None:
                self._queue(request)
            else:
                self._close_failed(request, failure)

    def _fill(self) -> None:
        try:
            self._flights.fill()
        except Exception:
            log.exception("planning failed; every running request ends")
            self._fail_all(EngineError("The engine could not plan this request."), list(self._scheduler.requests()))
            self._flights.drop()

    def _collect(self) -> None:
        """Take the oldest step's result, and whatever follows from it."""
        try:
            landed = self._flights.collect()
        except StepFailedError as failure:
            for request in failure.requests:
                self._close_failed(request, failure.cause)
            return
        step, faults = landed.step, landed.faults(self._facts.vocab_size)
        if not landed.is_committed:
            self._scheduler.commit(step, faults)
        for request, fault in faults.items():
            self._fail(request, fault)
        self._advance(step, landed.result, faults)
        if self._flights:
            self._scheduler.reconcile(step, landed.result.tokens[:, 0])

    def _lose(self, error: DeviceLostError) -> None:
        """End every request, and with them this engine."""
        log.critical("%s; no request can be served any more", error.message)
        self._lost = error
        self._flights.forget()
        self._fail_all(error, list(self._requests.values()))

    def _advance(self, step: Step, result: StepResult, faults: dict[LiveRequest, Exception]) -> None:
        """Give every drawn request its candidates and carry out what its strategy answers."""
        candidates = candidates_of(step.plan.draws, result)
        for request, answers in step.candidates_by_request(candidates, faults).items():
            try:
                advance = request.strategy.advance(answers)
                self._scheduler.apply(request, advance.actions)
                if not advance.finished and not request.branches:
                    raise EngineError("no branch is left, yet the request is not finished")
            except Exception as error:
                log.warning("request %s failed while decoding", request.request_id, exc_info=True)
                self._fail(request, error)
            else:
                self._report(request, advance)

    def _report(self, request: LiveRequest, advance: Advance) -> None:
        if not request.started:
            request.started = True
            self._totals.begin(request)
            self._outbox.started(request)
        num_before = request.num_output_tokens
        for output in advance.outputs:
            self._outbox.output(request, output)
        self._totals.num_output_tokens += request.num_output_tokens - num_before
        if advance.finished:
            self._totals.end(request)
            del self._requests[request.request_id]
            num_pages = self._scheduler.finish(request)
            self._outbox.finished(request, num_pages_freed=num_pages)

    def _fail(self, request: LiveRequest, error: Exception) -> None:
        if request in self._preparing:
            self._preparing.remove(request)
        else:
            self._scheduler.finish(request, discard=True)
        self._close_failed(request, error)

    def _close_failed(self, request: LiveRequest, error: BaseException) -> None:
        del self._requests[request.request_id]
        self._outbox.failed(request, error)

    def _fail_all(self, error: Exception, requests: Collection[LiveRequest]) -> None:
        for request in requests:
            self._fail(request, error)
        self._kv.abort_step()

    # -- queries --------------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Scheduler:
        """For tests and benchmarks."""
        return self._scheduler

    @property
    def facts(self) -> ModelInfo:
        return self._facts

    @property
    def pages(self) -> EnginePages:
        return self._pages

    def health(self) -> EngineHealth:
        """Cheap enough to ask 20 times a second; sharing and waste are at most a second old."""
        facts = replace(
            self._lasting,
            ready=self._lost is None,
            detail="" if self._lost is None else self._lost.message,
            num_waiting=len(self._preparing),
            num_waiting_tokens=self._preparing.num_prompt_tokens,
            num_self_checks=self._self_check.num_checks,
            num_broken_invariants=self._self_check.num_broken,
            num_steps_ahead=self._flights.num_ahead,
        )
        return with_pages(with_traffic(facts, self._scheduler, self._totals), self._kv, self._usage.read())
