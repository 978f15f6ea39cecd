"""The engine: requests in, events out, one step at a time. Synchronous and single-threaded; `bus` gives it a thread or
a process of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

from chatcache.config import EngineConfig
from chatcache.decode.actions import Advance
from chatcache.decode.factory import make_strategy
from chatcache.engine.accounts import UsageGauge, page_accounts
from chatcache.engine.admission import check_prompt
from chatcache.engine.build import build_scheduler
from chatcache.engine.client import ModelRunner
from chatcache.engine.health import Totals, with_pages, with_traffic
from chatcache.engine.intake import Intake, StrategyFactory
from chatcache.engine.outbox import Outbox
from chatcache.engine.preparing import Preparing
from chatcache.engine.results import bad_draws, candidates_of, check_shapes
from chatcache.engine.scoring import collect_scores
from chatcache.engine.selfcheck import SelfCheck
from chatcache.errors import EngineFault, InvalidRequest, Overloaded
from chatcache.kv.audit import PageUsage, check, page_usage
from chatcache.kv.chain import Scope
from chatcache.sched.audit import check_tokens
from chatcache.sched.batch import Step
from chatcache.sched.plan import StepPlan, StepResult
from chatcache.sched.request import LiveRequest
from chatcache.sched.scheduler import Scheduler
from chatcache.types import EngineEvent, EngineHealth, Explanation, GenerateRequest, ModelFacts, PageAccounts

MAX_REMEMBERED_NAMESPACES = 1024
PREPARING_WAIT_S = 0.005

log = logging.getLogger(__name__)


class Engine:
    """Continues prompts. After `add`, call `step` while `has_work`; each call returns the new events.

    `token_bytes[id]` is what a token adds to the text, `special_ids` are no text: stop strings and structured outputs
    need them. `make_strategy` is `decode`'s, replaceable so that tests can decode in ways of their own, and so is the
    `clock` (seconds) that times the runner.
    """

    def __init__(
        self,
        runner: ModelRunner,
        facts: ModelFacts,
        config: EngineConfig,
        token_bytes: Sequence[bytes] | None = None,
        *,
        special_ids: Collection[int] = (),
        make_strategy: StrategyFactory = make_strategy,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._facts = facts
        self._config = config
        self._clock = clock
        self._capacity = capacity = runner.capacity()
        limits = (facts.max_model_len, capacity.max_model_len, config.max_model_len or capacity.max_model_len)
        self._max_model_len = min(limits)
        self._scheduler = build_scheduler(config, capacity, facts.digest)
        self._kv = self._scheduler.kv
        self._intake = Intake(
            facts,
            config,
            capacity,
            max_model_len=self._max_model_len,
            most_branches=min(self._scheduler.num_slots, config.max_num_batched_tokens),
            token_bytes=token_bytes,
            special_ids=special_ids,
            make_strategy=make_strategy,
        )
        self._self_check = SelfCheck(self._kv, self._scheduler, strict=config.strict)
        self._usage = UsageGauge(self._scheduler)
        self._namespaces: dict[str, None] = {}  # the latest ones, oldest first
        self._requests: dict[str, LiveRequest] = {}
        self._preparing = Preparing()
        self._outbox = Outbox()
        self._totals = Totals()

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest) -> None:
        """Accept a request; from here exactly one terminal event will come.

        Raises: InvalidRequest or ContextTooLong for what can never run, Overloaded when the queue is full.
        """
        if request.request_id in self._requests:
            raise InvalidRequest(f"request_id {request.request_id!r} is already active", param="request_id")
        max_tokens = self._intake.check(request)
        if len(self._scheduler.waiting) + len(self._preparing) >= self._config.max_num_waiting:
            raise Overloaded(f"{self._config.max_num_waiting} requests are waiting already; try again later")
        ticket = self._intake.grammar(request)
        live = self._intake.accept(request, max_tokens, ticket)
        self._remember(request.namespace)
        self._requests[request.request_id] = live
        self._outbox.open(request.request_id)
        if ticket is None or (ticket.ready and ticket.failure() is None):
            self._scheduler.add(live)
        else:
            self._preparing.add(live, ticket)

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

    def prepare_constraints(self) -> None:
        """Do now what the first request with structured outputs would have to wait for; nothing where it cannot be."""
        self._intake.prepare_constraints()

    def is_preparing(self, request_id: str) -> bool:
        """Whether the request's grammar is still being compiled; a `Failed` event will tell if it is no good."""
        request = self._requests.get(request_id)
        return request is not None and request in self._preparing

    def has_work(self) -> bool:
        return bool(self._requests) or len(self._outbox) > 0

    def _remember(self, namespace: str) -> None:
        self._namespaces.pop(namespace, None)
        self._namespaces[namespace] = None
        if len(self._namespaces) > MAX_REMEMBERED_NAMESPACES:
            del self._namespaces[next(iter(self._namespaces))]

    # -- the loop -------------------------------------------------------------------------------------------------

    def step(self) -> list[EngineEvent]:
        """Run one step and return the events since the last call. Never raises on account of a request.

        Raises: BrokenInvariant, in a strict engine whose books do not add up when it falls idle.
        """
        if self._preparing:
            self._admit_prepared()
        try:
            step = self._scheduler.plan()
        except Exception:
            log.exception("planning failed; every running request ends")
            self._fail_all(EngineFault("The engine could not plan this request."))
            step = None
        if step is not None:
            self._run(step)
        if not self._requests:
            self._self_check.run_if_due()
        return self._outbox.take()

    def _admit_prepared(self) -> None:
        """Queue the requests whose grammar is compiled now; wait a little for one if there is nothing else to do."""
        alone = len(self._preparing) == len(self._requests)
        for request, failure in self._preparing.take(PREPARING_WAIT_S if alone else 0.0):
            if failure is None:
                self._scheduler.add(request)
            else:
                self._close_failed(request, failure)

    def _run(self, step: Step) -> None:
        try:
            result = self._execute(step.plan)
            check_shapes(step.plan, result)
        except Exception as error:
            log.exception("step %d failed", step.plan.step)
            for request in self._scheduler.abandon(step):
                self._close_failed(request, error)
            return
        faults = dict(step.faults) | collect_scores(step, result)
        for draw, message in (*result.faults, *bad_draws(step.plan.draws, result, self._facts.vocab_size)):
            faults.setdefault(step.request_of_draw(draw), EngineFault(message))
        self._scheduler.commit(step, faults)
        for request, fault in faults.items():
            self._fail(request, fault)
        self._advance(step, result, faults)

    def _execute(self, plan: StepPlan) -> StepResult:
        started_s = self._clock()
        result = self._runner.execute(plan)
        rows = plan.rows
        self._scheduler.swaps.cost.prefill.note(len(rows.tokens), len(rows.slot), self._clock() - started_s)
        return result

    def _advance(self, step: Step, result: StepResult, faults: dict[LiveRequest, Exception]) -> None:
        """Give every drawn request its candidates and carry out what its strategy answers."""
        candidates = candidates_of(step.plan.draws, result)
        for request, answers in step.answers(candidates, faults).items():
            try:
                advance = request.strategy.advance(answers)
                self._scheduler.apply(request, advance.actions)
                if not advance.finished and not request.branches:
                    raise EngineFault("no branch is left, yet the request is not finished")
            except Exception as error:
                log.warning("request %s failed while decoding", request.request_id, exc_info=True)
                self._fail(request, error)
            else:
                self._report(request, advance)

    def _report(self, request: LiveRequest, advance: Advance) -> None:
        if not request.started:
            request.started = True
            self._totals.num_prompt_tokens += request.num_prompt_tokens
            self._totals.num_cached_tokens += request.num_cached_tokens or 0
            self._outbox.started(request)
        num_before = request.num_output_tokens
        for output in advance.outputs:
            self._outbox.output(request, output)
        self._totals.num_output_tokens += request.num_output_tokens - num_before
        if advance.finished:
            del self._requests[request.request_id]
            num_pages = self._scheduler.finish(request)
            self._outbox.finished(request, num_pages_freed=num_pages)
            log.info(
                "request %s finished: %d prompt tokens (%d cached), %d output tokens, %d computed, %d preemptions",
                request.request_id,
                request.num_prompt_tokens,
                request.num_cached_tokens or 0,
                request.num_output_tokens,
                request.num_computed_tokens,
                request.num_preemptions,
            )

    def _fail(self, request: LiveRequest, error: Exception) -> None:
        self._scheduler.finish(request, forget=True)
        self._close_failed(request, error)

    def _close_failed(self, request: LiveRequest, error: BaseException) -> None:
        del self._requests[request.request_id]
        self._outbox.failed(request, error)

    def _fail_all(self, error: Exception) -> None:
        for request in list(self._scheduler.requests()):
            self._fail(request, error)
        self._kv.abandon()

    # -- queries --------------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Scheduler:
        """For tests and benchmarks."""
        return self._scheduler

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def health(self) -> EngineHealth:
        """Cheap enough to ask 20 times a second; sharing and waste are at most a second old."""
        facts = EngineHealth(
            ready=True,
            model=self._config.served_model_name or self._facts.name,
            max_model_len=self._max_model_len,
            scheduling_policy=self._config.scheduling_policy,
            page_size=self._capacity.page_size,
            kv_bytes=self._capacity.kv_bytes,
            num_waiting=len(self._preparing),
            num_self_checks=self._self_check.num_checks,
            num_broken_invariants=self._self_check.num_broken,
            load_fraction=1.0,
        )
        return with_pages(with_traffic(facts, self._scheduler, self._totals), self._kv, self._usage.read())

    def stats(self) -> PageUsage:
        """Count what the pages are used for. O(pages held): for metrics and tests."""
        return page_usage(self._kv, self._scheduler.tables())

    def accounts(self) -> PageAccounts:
        """Charge the pages in use to requests, conversations and namespaces. O(pages held)."""
        page_bytes = self._capacity.kv_bytes // self._capacity.num_pages
        return page_accounts(self._kv, self._scheduler.running, page_bytes)

    def explain(
        self, prompt: Sequence[int], namespace: str = "", num_public_tokens: int = 0, *, operator: bool = False
    ) -> Explanation:
        """Say what of a prompt is already computed, and why not more. It changes nothing.

        An `operator` may also learn what (recently seen) other namespaces have computed; a tenant must not.
        Raises: InvalidRequest, ContextTooLong.
        """
        check_prompt(prompt, num_public_tokens, self._facts.vocab_size, self._max_model_len)
        chain = self._kv.chain(prompt, Scope(namespace, num_public_tokens))
        return self._kv.explain(chain, self._namespaces if operator else ())

    def num_pages_held(self, request_id: str) -> int:
        """Count the distinct pages a request holds; 0 if it is unknown or waiting."""
        request = self._requests.get(request_id)
        return len({page for table in request.tables() for page in table.pages()}) if request else 0

    def check(self) -> None:
        """Verify pages, tables and reference counts against each other. Raises: BrokenInvariant."""
        tables = self._scheduler.tables()
        check(self._kv, tables, [request.host_pages for request in self._scheduler.requests()])
        check_tokens(self._kv, self._scheduler.running)

    def reset_prefix_cache(self) -> bool:
        """Forget all that finished requests left behind; refused (False) while requests run."""
        if self._scheduler.running:
            return False
        self._kv.forget_all()
        return True
