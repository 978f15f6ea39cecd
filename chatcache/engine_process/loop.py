"""The loop around an engine: read commands, run a step, send notices.

The same loop runs in a thread and in a child process.

The answer to a submit waits until the request's grammar is compiled, so that an invalid grammar is reported by the
answer, like any other invalid parameter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

from chatcache.engine_process.protocol import (
    Abort,
    Answer,
    CancelCandidate,
    Command,
    CountCached,
    ErrorData,
    Events,
    Explain,
    ExplainReply,
    Invoke,
    MapPages,
    Notice,
    PageAccountsReply,
    PageMapReply,
    Reply,
    Stop,
    Submit,
    encode_error,
)
from chatcache.errors import ChatcacheError, EngineError, InvalidRequestError
from chatcache.types.events import EngineEvent, Failed, SearchStep
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

HEALTH_INTERVAL_S = 0.05
IDLE_CHECK_S = 1.0  # between checks of an idle engine's device

Send = Callable[[Notice], None]
Call = Submit | CancelCandidate | Invoke | Explain | CountCached | MapPages
Progress = Callable[[float, str], None]


class PendingSubmits:
    """The unanswered `Submit` calls: each is answered when the grammar of its request has been compiled.

    Maps request ids to call numbers.
    """

    def __init__(self, send: Callable[[Answer], None]) -> None:
        self._send = send
        self._calls: dict[str, int] = {}

    def add(self, request_id: str, call: int) -> None:
        self._calls[request_id] = call

    def resolve(
        self,
        events: Sequence[EngineEvent],
        is_compiling: Callable[[str], bool],
        invalid_grammars: Container[str],
    ) -> tuple[EngineEvent, ...]:
        """Answer the submits whose grammar is compiled or invalid.

        `invalid_grammars`: the requests that `events` end because their grammar could not be compiled. Any other
        failure is an event, as it is for a grammar that was compiled before. Returns the events without those of
        requests that were rejected by their answer.
        """
        if not self._calls:
            return tuple(events)
        failures = {event.request_id: event for event in events if isinstance(event, Failed)}
        refused: set[str] = set()
        for request_id, call in list(self._calls.items()):
            if is_compiling(request_id):
                continue
            del self._calls[request_id]
            failure = failures.get(request_id) if request_id in invalid_grammars else None
            if failure is None or failure.seq != 1:
                self._send(Answer(call))
                continue
            refused.add(request_id)
            kind = "InvalidRequestError" if 400 <= failure.status < 500 else "EngineError"
            self._send(Answer(call, error=ErrorData(kind, failure.message, failure.code, failure.param)))
        return tuple(event for event in events if event.request_id not in refused)


class StepEngine(Protocol):
    """The synchronous engine that the loop drives from one thread.

    `engine.Engine` implements it.
    """

    @property
    def model_info(self) -> ModelInfo: ...
    def add(self, request: GenerateRequest) -> Any: ...
    def abort(self, request_id: str) -> Any: ...
    def cancel_candidate(self, request_id: str, index: int) -> None: ...
    def is_compiling_grammar(self, request_id: str) -> bool: ...
    def has_work(self) -> bool: ...
    def check_device(self) -> None: ...
    def pop_events(self) -> Sequence[EngineEvent]: ...
    def step(self) -> Sequence[EngineEvent]: ...
    @property
    def invalid_grammars(self) -> Container[str]: ...
    @property
    def search_steps(self) -> Sequence[SearchStep]: ...
    def health(self) -> EngineHealth: ...
    @property
    def cache(self) -> CacheQueries: ...


class CacheQueries(Protocol):
    """Queries about the engine's page cache. `engine.CacheInspector` implements them."""

    def explain(self, query: ExplainQuery) -> Explanation: ...
    def count_cached_tokens(self, prompts: Sequence[PackedPrompt], namespace: str = "") -> list[int]: ...
    def page_map(self, namespace: str = "", *, operator: bool = False) -> PageMap: ...
    def page_accounts(self) -> PageAccounts: ...
    def stats(self) -> Any: ...
    def reset_prefix_cache(self) -> bool: ...


class CommandQueue(Protocol):
    """Source of the loop's commands."""

    def read(self, wait_s: float | None) -> list[Command]:
        """Return the commands that arrived. If there are none, wait `wait_s` for one; None waits without limit.

        Raises: EOFError when the sender has closed its end.
        """
        ...


def run_engine(engine: StepEngine, command_queue: CommandQueue, send: Send) -> None:
    """Serve commands until `Stop` or the end of the queue. Without work, wait for a command and check the device."""
    sent_at = 0.0
    pending = PendingSubmits(send)
    while True:
        try:
            commands = command_queue.read(0 if engine.has_work() else IDLE_CHECK_S)
        except EOFError:
            return
        for command in commands:
            if isinstance(command, Stop):
                return
            _apply(engine, command, send, pending)
        if not engine.has_work():
            engine.check_device()
            continue
        if commands and (ended := engine.pop_events()):  # an aborted request ends before the next step
            send(Events(pending.resolve(ended, engine.is_compiling_grammar, ()), engine.health()))
        events = pending.resolve(engine.step(), engine.is_compiling_grammar, engine.invalid_grammars)
        now = time.monotonic()
        due = now - sent_at >= HEALTH_INTERVAL_S or not engine.has_work()
        search_steps = tuple(engine.search_steps)
        if events or search_steps or due:
            send(Events(events, engine.health() if due else None, search_steps))
        if due:
            sent_at = now


def _apply(engine: StepEngine, command: Command, send: Send, pending: PendingSubmits) -> None:
    """Apply one command. An error is the answer to its call and does not end the loop."""
    if isinstance(command, Abort):
        engine.abort(command.request_id)
    elif isinstance(command, Call):
        try:
            reply = _call(engine, command)
        except ChatcacheError as error:
            reply = Answer(command.call, error=encode_error(error))
        except Exception:
            log.exception("%s failed", type(command).__name__)
            reply = Answer(command.call, error=encode_error(EngineError("the engine failed at this; see its log")))
        if (
            isinstance(command, Submit)
            and engine.is_compiling_grammar(command.request.request_id)
            and _is_accepted(reply)
        ):
            pending.add(command.request.request_id, command.call)
        else:
            send(reply)


def _is_accepted(reply: Reply) -> bool:
    return isinstance(reply, Answer) and reply.error is None


def _call(engine: StepEngine, command: Call) -> Reply:
    match command:
        case Submit(call, request):
            engine.add(request)
            return Answer(call)
        case CancelCandidate(call, request_id, index):
            engine.cancel_candidate(request_id, index)
            return Answer(call)
        case Explain(call, query):
            return ExplainReply(call, engine.cache.explain(query))
        case CountCached(call, prompts, namespace):
            return Answer(call, value=engine.cache.count_cached_tokens(prompts, namespace))
        case MapPages(call, namespace, operator):
            return PageMapReply(call, engine.cache.page_map(namespace, operator=operator))
        case Invoke(call, "accounts"):
            return PageAccountsReply(call, engine.cache.page_accounts())
        case Invoke(call, "stats"):
            return Answer(call, value=engine.cache.stats())
        case Invoke(call, "reset_prefix_cache"):
            return Answer(call, value=engine.cache.reset_prefix_cache())
    raise InvalidRequestError("not a call")
