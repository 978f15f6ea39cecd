"""The engine: accepts requests, runs steps and emits events.

It is synchronous and belongs to one thread; `engine_process` runs it in a thread or a process of its own.
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
from chatcache.engine.pipeline import StepFailedError, StepPipeline, build_candidates
from chatcache.engine.protocols import ModelRunner
from chatcache.engine.resume import resume_request
from chatcache.engine.stats import (
    CacheInspector,
    PageUsageCache,
    RecentNamespaces,
    Totals,
    static_health,
    with_page_usage,
    with_request_counts,
)
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

log = logging.getLogger(__name__)

GRAMMAR_WAIT_S = 0.005


def build_scheduler(config: EngineConfig, capacity: KVCapacity, digest: str) -> Scheduler:
    """Build a scheduler with an empty page pool.

    `digest`: of the model, part of every page hash.

    Raises: InvalidRequestError for an unknown policy, or one that this runner does not support.
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


class Engine:
    """Generates tokens for requests.

    After `add`, call `step` while `has_work`; each call returns new events.

    With a runner that launches asynchronously, one step may be on the device between two calls; see `engine.pipeline`.

    Stop strings and structured outputs need `token_bytes` (the bytes that each token adds to the text) and
    `special_ids` (tokens that add no text). Tests may replace `make_strategy` and the `clock` (seconds) that times the
    runner.
    """

    def __init__(
        self,
        runner: ModelRunner,
        model_info: ModelInfo,
        config: EngineConfig,
        token_bytes: Sequence[bytes] | None = None,
        *,
        special_ids: Collection[int] = (),
        make_strategy: StrategyFactory = make_strategy,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model_info = model_info
        capacity = runner.capacity()
        limits = (model_info.max_model_len, capacity.max_model_len, config.max_model_len or capacity.max_model_len)
        self._max_model_len = min(limits)
        self._scheduler = build_scheduler(config, capacity, model_info.digest)
        self._kv = self._scheduler.kv
        self._pipeline = StepPipeline(runner, self._scheduler, clock)
        self._device_error: DeviceLostError | None = None
        self._validator = RequestValidator(
            model_info,
            config,
            capacity,
            max_model_len=self._max_model_len,
            max_branches=min(self._scheduler.num_slots, config.max_num_batched_tokens),
            token_bytes=token_bytes,
            special_ids=special_ids,
            make_strategy=make_strategy,
        )
        self._invariant_checker = InvariantChecker(self._kv, self._scheduler, strict=config.strict)
        self._page_usage = PageUsageCache(self._scheduler)
        self._recent_namespaces = RecentNamespaces()
        self._cache = CacheInspector(
            self._scheduler,
            capacity,
            self._recent_namespaces,
            vocab_size=model_info.vocab_size,
            max_model_len=self._max_model_len,
        )
        self._requests: dict[str, LiveRequest] = {}
        self._grammar_queue = GrammarWaitQueue()
        self._event_queue = EventQueue()
        self._totals = Totals()
        self._static_health = static_health(model_info, config, capacity, self._max_model_len)

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest) -> None:
        """Accept a request, which then ends in exactly one terminal event.

        Raises: InvalidRequestError or ContextLengthError for a request that can never run, OverloadedError when the
        queue is full or the device is lost, RateLimitError when the namespace has used its share of the queue.
        """
        if self._device_error is not None:
            raise OverloadedError(self._device_error.message, code="engine_unavailable")
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request_id {request.request_id!r} is already active", param="request_id")
        max_tokens = self._validator.check(request)
        if request.resume_point is None:
            self._validator.check_queue_limits(request, self._scheduler.waiting, self._grammar_queue)
        grammar = self._validator.start_grammar(request)
        live = self._validator.create_request(request, max_tokens, grammar)
        self._recent_namespaces.add(request.namespace)
        self._requests[request.request_id] = live
        self._event_queue.open(request.request_id, 0 if request.resume_point is None else request.resume_point.last_seq)
        if grammar is None or (grammar.is_ready and grammar.failure() is None):
            self._queue(live)
        else:
            self._grammar_queue.add(live, grammar)

    def _queue(self, request: LiveRequest) -> None:
        try:
            if not resume_request(request, self._scheduler, self._event_queue):
                del self._requests[request.request_id]
        except Exception as error:
            self._close_failed(request, error)

    def abort(self, request_id: str) -> None:
        """End a request and free its pages. Unknown and finished ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request in self._grammar_queue:
            self._grammar_queue.remove(request)
            self._event_queue.emit_finished(request, cancelled=True)
        else:
            num_pages = self._scheduler.finish(request)
            self._event_queue.emit_finished(request, cancelled=True, num_pages_freed=num_pages)

    def cancel_candidate(self, request_id: str, index: int) -> None:
        """End one candidate and free its pages; the other candidates continue.

        The last one aborts the request.

        Unknown requests and candidates that have ended are ignored. Raises: UnsupportedParameterError for candidates
        without a branch of their own.
        """
        request = self._requests.get(request_id)
        dropped = request.strategy.drop(index) if request is not None else None
        if request is None or dropped is None:
            return
        if dropped.is_last:
            self.abort(request_id)
            return
        if request in self._grammar_queue:
            request.max_branches -= 1
            num_pages = 0
        else:
            num_pages = self._scheduler.drop_branch(request, dropped.branch)
        self._event_queue.emit_cancelled_candidate(request, index, dropped.score, num_pages)

    def start_grammar_compiler(self) -> None:
        """Start the grammar compiler before the first request needs it."""
        self._validator.start_grammar_compiler()

    def is_compiling_grammar(self, request_id: str) -> bool:
        """Whether the request's grammar is still being compiled.

        An invalid grammar ends in a `Failed` event.
        """
        request = self._requests.get(request_id)
        return request is not None and request in self._grammar_queue

    def has_work(self) -> bool:
        """Whether `step` has to be called.

        That is so for requests, events, a launched step, and once more to raise DeviceLostError.
        """
        return bool(self._requests or self._event_queue or self._pipeline) or self._device_error is not None

    def close(self) -> None:
        """Wait for the steps on the device. Requests are not ended."""
        with suppress(DeviceLostError):
            self._pipeline.drain()

    # -- the loop -------------------------------------------------------------------------------------------------

    def pop_events(self) -> list[EngineEvent]:
        """Return the events since the last call without running a step, for instance of an abort."""
        return self._event_queue.pop_all()

    def step(self) -> list[EngineEvent]:
        """Run one step and return the events since the last call.

        Errors of requests become `Failed` events.

        Raises: InvariantError in a strict engine that finds a violation when it becomes idle. DeviceLostError when the
        device is lost and the events that end all requests were returned: this engine cannot run again.
        """
        if self._device_error is not None and not self._event_queue:
            raise self._device_error
        if self._grammar_queue:
            self._queue_compiled()
        try:
            self._launch()
            if self._pipeline:
                self._collect()
        except DeviceLostError as error:
            self._fail_device(error)
        if not self._requests and not self._pipeline:
            self._invariant_checker.run_if_due()
        return self._event_queue.pop_all()

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammar is compiled.

        With no other work, wait GRAMMAR_WAIT_S for one.
        """
        is_only_work = len(self._grammar_queue) == len(self._requests)
        for request, failure in self._grammar_queue.pop_ready(GRAMMAR_WAIT_S if is_only_work else 0.0):
            if failure is None:
                self._queue(request)
            else:
                self._close_failed(request, failure)

    def _launch(self) -> None:
        try:
            self._pipeline.fill()
        except Exception:
            log.exception("planning failed; all running requests are ended")
            self._fail_all(EngineError("The engine could not plan this request."), list(self._scheduler.requests()))
            self._pipeline.drain()

    def _collect(self) -> None:
        """Wait for the oldest step, commit it and emit its outputs."""
        try:
            completed = self._pipeline.collect()
        except StepFailedError as failure:
            for request in failure.requests:
                self._close_failed(request, failure.cause)
            return
        step, errors = completed.step, completed.collect_errors(self._model_info.vocab_size)
        if not completed.is_committed:
            self._scheduler.commit(step, errors)
        for request, error in errors.items():
            self._fail(request, error)
        self._advance(step, completed.result, errors)
        if self._pipeline:
            self._scheduler.reconcile(step, completed.result.tokens[:, 0])

    def _fail_device(self, error: DeviceLostError) -> None:
        """End all requests and remember that the device is lost."""
        log.critical("%s; this engine cannot serve requests any more", error.message)
        self._device_error = error
        self._pipeline.discard()
        self._fail_all(error, list(self._requests.values()))

    def _advance(self, step: Step, result: StepResult, errors: dict[LiveRequest, Exception]) -> None:
        """Pass the sampled tokens to the strategies and apply their actions."""
        candidates = build_candidates(step.plan.draws, result)
        for request, answers in step.candidates_by_request(candidates, errors).items():
            try:
                advance = request.strategy.advance(answers)
                self._scheduler.apply(request, advance.actions)
                if not advance.finished and not request.branches:
                    raise EngineError("the request has no branch left, but it is not finished")
            except Exception as error:
                log.warning("request %s failed while decoding", request.request_id, exc_info=True)
                self._fail(request, error)
            else:
                self._emit_outputs(request, advance)

    def _emit_outputs(self, request: LiveRequest, advance: Advance) -> None:
        if not request.started:
            request.started = True
            self._totals.record_start(request)
            self._event_queue.emit_started(request)
        num_before = request.num_output_tokens
        for output in advance.outputs:
            self._event_queue.emit_output(request, output)
        self._totals.num_output_tokens += request.num_output_tokens - num_before
        if advance.finished:
            self._totals.record_finish(request)
            del self._requests[request.request_id]
            num_pages = self._scheduler.finish(request)
            self._event_queue.emit_finished(request, num_pages_freed=num_pages)

    def _fail(self, request: LiveRequest, error: Exception) -> None:
        if request in self._grammar_queue:
            self._grammar_queue.remove(request)
        else:
            self._scheduler.finish(request, discard=True)
        self._close_failed(request, error)

    def _close_failed(self, request: LiveRequest, error: BaseException) -> None:
        del self._requests[request.request_id]
        self._event_queue.emit_failed(request, error)

    def _fail_all(self, error: Exception, requests: Collection[LiveRequest]) -> None:
        for request in requests:
            self._fail(request, error)
        self._kv.abort_step()

    # -- queries --------------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for tests and benchmarks."""
        return self._scheduler

    @property
    def model_info(self) -> ModelInfo:
        return self._model_info

    @property
    def cache(self) -> CacheInspector:
        return self._cache

    def health(self) -> EngineHealth:
        """Return the engine's state and counters.

        Cheap; page sharing and waste are at most one second old.
        """
        model_info = replace(
            self._static_health,
            ready=self._device_error is None,
            detail="" if self._device_error is None else self._device_error.message,
            num_waiting=len(self._grammar_queue),
            num_waiting_tokens=self._grammar_queue.num_prompt_tokens,
            num_self_checks=self._invariant_checker.num_checks,
            num_broken_invariants=self._invariant_checker.num_broken,
            num_steps_ahead=self._pipeline.num_ahead,
        )
        return with_page_usage(
            with_request_counts(model_info, self._scheduler, self._totals), self._kv, self._page_usage.read()
        )
