"""The engine: accepts requests, runs steps and emits events.

It is synchronous and belongs to one thread; `engine_process` runs it in a thread or a process of its own.

A request that an earlier engine process had started can be resumed: its branches have tokens but no pages, and the
scheduler recomputes them. Sampling noise is keyed by seed, branch and position, so this engine samples the tokens that
the other one would have. A search (beams, best_of, distinct) repeats the recorded choices of all its steps.

`EventQueue` numbers the events of each request 1, 2, 3, ...
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from contextlib import suppress
from itertools import chain

from msgspec.structs import replace

from chatcache.config import EngineConfig
from chatcache.decoding.beam_search import DrawnByBranch
from chatcache.decoding.sampling import SamplingStrategy
from chatcache.decoding.strategy import make_strategy
from chatcache.engine.admission import GrammarWaitQueue, RequestValidator, StrategyFactory, check_policies
from chatcache.engine.invariants import InvariantChecker
from chatcache.engine.pipeline import BeamRanker, StepFailedError, StepPipeline, build_candidates
from chatcache.engine.protocols import ModelRunner
from chatcache.engine.stats import (
    CacheInspector,
    PageUsageCache,
    RecentNamespaces,
    Totals,
    static_health,
    with_page_usage,
    with_request_counts,
)
from chatcache.errors import ChatcacheError, DeviceLostError, EngineError, InvalidRequestError, OverloadedError
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import TOKEN_BYTES
from chatcache.scheduler.batch import Step
from chatcache.scheduler.fairness import FAIR, VirtualTokenCounter
from chatcache.scheduler.preemption import RECOMPUTE, CostModel
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.scheduler.scheduler import Reservation, Scheduler
from chatcache.types.actions import (
    Advance,
    BeamUpdate,
    DroppedCandidate,
    Embed,
    Emit,
    Extend,
    Finish,
    Fork,
    Output,
    Release,
    SearchStrategy,
    expand_actions,
)
from chatcache.types.events import (
    FINISH_CANCELLED,
    Beams,
    CandidateDone,
    Embedding,
    EngineEvent,
    Failed,
    Finished,
    SearchStep,
    Started,
    StartReport,
    Tokens,
)
from chatcache.types.plan import KVCapacity, StepResult
from chatcache.types.request import GenerateRequest, ResumePoint
from chatcache.types.stats import EngineHealth, ModelInfo

log = logging.getLogger(__name__)

CANNOT_RESUME = "The engine process ended, and this request cannot be resumed."
MAX_TOKENS_PER_EVENT = 4096  # a search may emit a long text at once, and an event must fit a frame


class EventQueue:
    """Numbers events and keeps them until the caller removes them.

    The events of a request begin with `open` and end with a terminal event.
    """

    def __init__(self) -> None:
        self._events: list[EngineEvent] = []
        self._last_seq: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._events)

    def open(self, request_id: str, last_seq: int = 0) -> None:
        """Start the numbering of a request's events at `last_seq` + 1."""
        self._last_seq[request_id] = last_seq

    def pop_all(self) -> list[EngineEvent]:
        """Remove and return all events."""
        events, self._events = self._events, []
        return events

    def emit_started(self, request: LiveRequest) -> None:
        seq, cached = self._next(request), request.num_cached_tokens or 0
        unscored = () if request.num_prompt_top is None or request.prompt_scores_start > 0 else (None,)
        scores = (*unscored, *request.prompt_scores)
        report = StartReport(request.num_copied_pages, request.miss) if request.explain else None
        self._events.append(Started(request.request_id, seq, request.num_prompt_tokens, cached, scores, report))

    def emit_output(self, request: LiveRequest, output: Output) -> None:
        if type(output) is Emit and len(tokens := output.token_ids) == 1:  # most outputs
            name, request.num_output_tokens = request.request_id, request.num_output_tokens + 1
            seq = self._last_seq[name] = self._last_seq[name] + 1
            self._events.append(Tokens(name, seq, output.index, tokens, output.logprobs, output.score))
            return
        match output:
            case Emit():
                self._tokens(request, output)
            case Finish(index, finish_reason, stop_reason, score):
                self._events.append(
                    CandidateDone(
                        request.request_id, self._next(request), index, finish_reason, stop_reason, float(score)
                    )
                )

            case BeamUpdate(beams):
                self._events.append(Beams(request.request_id, self._next(request), beams))
            case Embed(values):
                self._events.append(Embedding(request.request_id, self._next(request), values))

    def emit_repeated(self, request: LiveRequest, outputs: Iterable[Output], last_seq: int) -> None:
        """Emit outputs that follow `Started`, except for the events up to `last_seq`, which were sent.

        Raises: EngineError if there are fewer events than `last_seq`.
        """
        num_before, self._last_seq[request.request_id] = len(self._events), 1
        for output in outputs:
            self.emit_output(request, output)
        self._events[num_before:] = [event for event in self._events[num_before:] if event.seq > last_seq]
        if self._last_seq[request.request_id] < last_seq:
            self._last_seq[request.request_id] = last_seq
            raise EngineError(CANNOT_RESUME)

    def emit_cancelled_candidate(self, request: LiveRequest, index: int, score: float, num_pages_freed: int) -> None:
        """Emit the end of a cancelled candidate; perhaps nothing was computed for it yet."""
        seq, reason = self._next(request), FINISH_CANCELLED
        done = CandidateDone(request.request_id, seq, index, reason, None, float(score), num_pages_freed)
        self._events.append(done)

    def _tokens(self, request: LiveRequest, emit: Emit) -> None:
        index, token_ids, logprobs, score = emit.index, emit.token_ids, emit.logprobs, emit.score
        request.num_output_tokens += len(token_ids)
        for start in range(0, len(token_ids), MAX_TOKENS_PER_EVENT):
            part = slice(start, start + MAX_TOKENS_PER_EVENT)
            seq = self._next(request)
            self._events.append(Tokens(request.request_id, seq, index, token_ids[part], logprobs[part], score))

    def emit_finished(self, request: LiveRequest, *, cancelled: bool = False, num_pages_freed: int = 0) -> None:
        if not cancelled:
            log.info(
                "request %s finished: %d prompt tokens (%d cached), %d output tokens, %d computed, %d preemptions",
                request.request_id,
                request.num_prompt_tokens,
                request.num_cached_tokens or 0,
                request.num_output_tokens,
                request.num_computed_tokens,
                request.num_preemptions,
            )
        self._events.append(
            Finished(
                request_id=request.request_id,
                seq=self._close(request),
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens or 0,
                num_output_tokens=request.num_output_tokens,
                num_computed_tokens=request.num_computed_tokens,
                cancelled=cancelled,
                num_pages_freed=num_pages_freed,
            )
        )

    def emit_failed(self, request: LiveRequest, error: BaseException) -> None:
        """Emit `Failed`.

        Only a `ChatcacheError` shows its text; any other error is a bug and stays in the log.
        """
        known = error if isinstance(error, ChatcacheError) else EngineError("The request failed while it was computed.")
        self._events.append(
            Failed(request.request_id, self._close(request), known.message, known.code, known.param, known.status)
        )

    def _next(self, request: LiveRequest) -> int:
        self._last_seq[request.request_id] += 1
        return self._last_seq[request.request_id]

    def _close(self, request: LiveRequest) -> int:
        return self._last_seq.pop(request.request_id) + 1


def resume_request(request: LiveRequest, scheduler: Scheduler, event_queue: EventQueue) -> bool:
    """Queue a request, after restoring its resume point; return False if it ended by that.

    A request whose candidates have all ended is finished at once. Raises: EngineError for a request that cannot be
    resumed, and any error of a grammar that replays the tokens.
    """
    resumed, request.resume_point = request.resume_point, None
    if resumed is not None:
        _restore(request, resumed, event_queue)
    if request.branches:
        scheduler.add(request)
    else:
        event_queue.emit_finished(request)
    return bool(request.branches)


def _restore(request: LiveRequest, resumed: ResumePoint, event_queue: EventQueue) -> None:
    """Restore the progress of a request, and emit what had not been sent."""
    if resumed.num_cached_tokens is not None:
        request.started, request.first_token_s = True, request.accepted_s
        request.num_cached_tokens = resumed.num_cached_tokens
        request.num_prompt_top = None  # its scores were sent
    if resumed.steps:
        event_queue.emit_repeated(request, _repeat_search(request, resumed.steps), resumed.last_seq)
        request.choose_fork_sources()
    elif resumed.candidates:
        for end in _restore_branches(request, resumed):
            event_queue.emit_output(request, end)


def _repeat_search(request: LiveRequest, steps: Sequence[bytes]) -> list[Output]:
    """Repeat the recorded steps of a search; return their outputs."""
    strategy = request.strategy
    if not isinstance(strategy, SearchStrategy):
        raise EngineError(CANNOT_RESUME)
    outputs: list[Output] = []
    for record in steps:
        advance = strategy.replay(record)
        outputs += advance.outputs
        for action in expand_actions(advance.actions):
            _repeat_action(request.branches, action)
    return outputs


def _repeat_action(branches: dict[int, Branch], action: Extend | Fork | Release) -> None:
    """Apply an action to branches without pages."""
    match action:
        case Extend(branch, token):
            branches[branch].append(token)
        case Fork(parent, child, token):
            branches[child] = branches[parent].fork(child, token)
        case _:
            del branches[action.branch]


def _restore_branches(request: LiveRequest, resumed: ResumePoint) -> tuple[Finish, ...]:
    strategy = request.strategy
    if not isinstance(strategy, SamplingStrategy):
        raise EngineError(CANNOT_RESUME)
    ends = strategy.resume(resumed.candidates)
    sent_tokens = {each.index: each.tokens for each in resumed.candidates}
    request.num_output_tokens = sum(map(len, sent_tokens.values())) // TOKEN_BYTES
    if not request.num_output_tokens:
        request.max_branches = sum(not each.is_done for each in resumed.candidates)
        return ends
    request.branches = {
        index: Branch(
            index,
            request,
            bytearray(sent_tokens[index]),
            request.num_prompt_tokens + len(sent_tokens[index]) // TOKEN_BYTES,
            ordinal=index,
        )
        for index in strategy.live_candidates
    }
    request.num_branches_created = len(sent_tokens)
    request.max_branches = len(request.branches)
    request.choose_fork_sources()
    return ends


def _drop_candidate(request: LiveRequest, index: int) -> DroppedCandidate | None:
    """Drop a candidate, in the resume point of a request that was not resumed yet; None if it has ended."""
    resumed = request.resume_point
    if resumed is None or not resumed.candidates:
        return request.strategy.drop(index)
    live = [each.index for each in resumed.candidates if not each.is_done]
    if index not in live:
        return None
    if len(live) == 1:
        return DroppedCandidate(is_last=True)
    candidates = [replace(each, is_done=each.is_done or each.index == index) for each in resumed.candidates]
    request.resume_point = replace(resumed, candidates=tuple(candidates))
    return DroppedCandidate(score=resumed.candidates[index].score)


GRAMMAR_WAIT_S = 0.005


CPU_PREFILL_TIME_S = 0.05


def max_prefill_time_s(config: EngineConfig, device: str) -> float:
    """Return the configured time of a step for prompts, or the default of the device; 0 for no limit."""
    if config.max_prefill_time_s is not None:
        return config.max_prefill_time_s
    return CPU_PREFILL_TIME_S if device == "cpu" else 0.0


def build_scheduler(
    config: EngineConfig, capacity: KVCapacity, digest: str, device: str, reservation: Reservation | None = None
) -> Scheduler:
    """Build a scheduler with an empty page pool.

    `digest`: of the model, part of every page hash. `device`: of the model.

    Raises: InvalidRequestError for an unknown policy, or one that this runner does not support.
    """
    check_policies(config, capacity)
    num_host_pages = capacity.num_host_pages if config.preemption_mode != RECOMPUTE else 0
    kv = KVCache(
        *(capacity.num_pages, capacity.page_size, digest, config.enable_prefix_caching, num_host_pages),
        num_states=capacity.num_states,
        num_host_states=capacity.num_host_states if num_host_pages else 0,
    )
    num_slots = min(config.max_num_seqs, capacity.num_slots)
    return Scheduler(
        kv,
        num_slots=num_slots if kv.states is None else min(num_slots, kv.states.max_live),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_time_s=max_prefill_time_s(config, device),
        cost=CostModel(config.preemption_mode, capacity.swap_page_s),
        counters=VirtualTokenCounter() if config.scheduling_policy == FAIR else None,
        reservation=reservation,
    )


class Engine:
    """Generates tokens for requests.

    After `add`, call `step` while `has_work`; each call returns new events.

    With a runner that launches asynchronously, one step may be on the device between two calls; see `engine.pipeline`.

    Stop strings and structured outputs need `token_bytes` (the bytes that each token adds to the text) and
    `special_ids` (tokens that add no text). Tests may replace `make_strategy` and the `clock` (seconds) that times the
    runner; studies may add a `reservation` to the scheduler.
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
        reservation: Reservation | None = None,
    ) -> None:
        self._model_info = model_info
        capacity = runner.capacity()
        limits = (model_info.max_model_len, capacity.max_model_len, config.max_model_len or capacity.max_model_len)
        self._max_model_len = min(limits)
        self._scheduler = build_scheduler(config, capacity, model_info.digest, model_info.device, reservation)
        self._kv = self._scheduler.kv
        self._runner = runner
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
        self._beam_ranker = BeamRanker()
        self._event_queue = EventQueue()
        self._search_steps: list[SearchStep] = []
        self._invalid_grammars: set[str] = set()
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
        dropped = _drop_candidate(request, index) if request is not None else None
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

    def check_device(self) -> None:
        """Find a device that is lost while the engine is idle; the next `step` raises DeviceLostError then."""
        try:
            self._runner.check_device()
        except DeviceLostError as error:
            self._fail_device(error)

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
        self._search_steps = []
        self._invalid_grammars.clear()
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

    @property
    def search_steps(self) -> list[SearchStep]:
        """What the searches chose in the last call of `step`."""
        return self._search_steps

    @property
    def invalid_grammars(self) -> Set[str]:
        """The requests that the last call of `step` ended because their grammar could not be compiled."""
        return self._invalid_grammars

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammar is compiled.

        With no other work, wait GRAMMAR_WAIT_S for one.
        """
        is_only_work = len(self._grammar_queue) == len(self._requests)
        for request, failure in self._grammar_queue.pop_ready(GRAMMAR_WAIT_S if is_only_work else 0.0):
            if failure is None:
                self._queue(request)
            else:
                self._invalid_grammars.add(request.request_id)
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
            self._fail(request, error, discard=True)
        is_ahead = completed.is_committed and bool(step.decode_branches)  # the next step was launched
        if is_ahead:
            self._scheduler.record_drawn(step, completed.result.tokens[:, 0])
        self._advance(step, completed.result, errors)
        if is_ahead:
            self._scheduler.reconcile(step, completed.result.tokens[:, 0])

    def _fail_device(self, error: DeviceLostError) -> None:
        """End all requests and remember that the device is lost."""
        log.critical("%s; this engine cannot serve requests any more", error.message)
        self._device_error = error
        self._pipeline.discard()
        self._fail_all(error, list(self._requests.values()))

    def _advance(self, step: Step, result: StepResult, errors: dict[LiveRequest, Exception]) -> None:
        """Pass the sampled tokens to the strategies and apply their actions."""
        work: Iterable[tuple[LiveRequest, DrawnByBranch | Callable[[], Advance]]]
        if result.tokens.shape[1] > 1:
            ranked, candidates = self._beam_ranker.rank(step, result, errors)
            work = chain(step.candidates_by_request(candidates, errors).items(), ranked)
        else:
            work = step.candidates_by_request(build_candidates(step.plan.draws, result), errors).items()
        for request, drawn in work:
            try:
                advance = drawn() if callable(drawn) else request.strategy.advance(drawn)
                self._scheduler.apply(request, advance.actions)
                if not advance.finished and not request.branches:
                    raise EngineError("the request has no branch left, but it is not finished")
            except Exception as error:
                is_invalid = isinstance(error, InvalidRequestError)
                if not is_invalid:
                    log.warning("request %s failed while decoding", request.request_id, exc_info=True)
                self._fail(request, error, discard=not is_invalid)
            else:
                if advance.record:
                    self._search_steps.append(SearchStep(request.request_id, advance.record))
                self._emit_outputs(request, advance)

    def _emit_outputs(self, request: LiveRequest, advance: Advance) -> None:
        if not request.started:
            request.started = True
            self._totals.record_start(request)
            if request.pooler is None:
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

    def _fail(self, request: LiveRequest, error: Exception, *, discard: bool = False) -> None:
        """End a request with an error.

        `discard`: the pages that it computed may be wrong, after an invalid result, a failed step or an internal error.
        """
        if request in self._grammar_queue:
            self._grammar_queue.remove(request)
        else:
            self._scheduler.finish(request, discard=discard)
        self._close_failed(request, error)

    def _close_failed(self, request: LiveRequest, error: BaseException) -> None:
        del self._requests[request.request_id]
        self._event_queue.emit_failed(request, error)

    def _fail_all(self, error: Exception, requests: Collection[LiveRequest]) -> None:
        for request in requests:
            self._fail(request, error, discard=True)
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

        Cheap; page sharing and waste are at most one second old, and those of an idle engine are current.
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
            with_request_counts(model_info, self._scheduler, self._totals),
            self._kv,
            self._page_usage.read(),
        )
