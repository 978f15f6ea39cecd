"""The loop around an engine: read commands, step, send notices. The same code runs in a thread and in a child.

Submits that the engine has not made up its mind about: their grammar is still being compiled.

The caller hears of a bad grammar as of any other bad parameter, by the answer to its submit; so that waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from chatcache.engine_process.protocol import (
    Abort,
    Accounted,
    Answer,
    Ask,
    Command,
    CountCached,
    Drop,
    ErrorData,
    Events,
    Explain,
    Explained,
    MapPages,
    Mapped,
    Notice,
    Reply,
    Stop,
    Submit,
    encode_error,
)
from chatcache.errors import ChatcacheError, EngineError, InvalidRequestError
from chatcache.types.events import EngineEvent, Failed
from chatcache.types.request import GenerateRequest
from chatcache.types.stats import EngineHealth, Explanation, ModelInfo, PackedPrompt, PageAccounts, PageMap


class PendingSubmits:
    """The calls that wait for one, by request."""

    def __init__(self, send: Callable[[Answer], None]) -> None:
        self._send = send
        self._calls: dict[str, int] = {}

    def await_for(self, request_id: str, call: int) -> None:
        self._calls[request_id] = call

    def settle(self, events: Sequence[EngineEvent], is_preparing: Callable[[str], bool]) -> tuple[EngineEvent, ...]:
        """Answer the calls whose time has come; return the events without the failures answered by that."""
        if not self._calls:
            return tuple(events)
        failures = {event.request_id: event for event in events if isinstance(event, Failed)}
        refused: set[str] = set()
        for request_id, call in list(self._calls.items()):
            if is_preparing(request_id):
                continue
            del self._calls[request_id]
            failure = failures.get(request_id)
            if failure is None or failure.seq != 1:
                self._send(Answer(call))
                continue
            refused.add(request_id)
            kind = "InvalidRequestError" if 400 <= failure.status < 500 else "EngineError"
            self._send(Answer(call, fault=ErrorData(kind, failure.message, failure.code, failure.param)))
        return tuple(event for event in events if event.request_id not in refused)


log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 0.05

Send = Callable[[Notice], None]
Call = Submit | Drop | Ask | Explain | CountCached | MapPages
Progress = Callable[[float, str], None]


class StepEngine(Protocol):
    """What the loop needs of `engine.Engine`: synchronous and driven by one thread."""

    @property
    def facts(self) -> ModelInfo: ...
    def add(self, request: GenerateRequest) -> Any: ...
    def abort(self, request_id: str) -> Any: ...
    def drop(self, request_id: str, index: int) -> None: ...
    def is_preparing(self, request_id: str) -> bool: ...
    def has_work(self) -> bool: ...
    def take_events(self) -> Sequence[EngineEvent]: ...
    def step(self) -> Sequence[EngineEvent]: ...
    def health(self) -> EngineHealth: ...
    @property
    def pages(self) -> EnginePages: ...


class EnginePages(Protocol):
    """What it needs of the engine's books."""

    def explain(
        self, prompt: Sequence[int], namespace: str = "", num_public_tokens: int = 0, *, operator: bool = False
    ) -> Explanation: ...
    def num_cached(self, prompts: Sequence[PackedPrompt], namespace: str = "") -> list[int]: ...
    def page_map(self, namespace: str = "", *, operator: bool = False) -> PageMap: ...
    def accounts(self) -> PageAccounts: ...
    def stats(self) -> Any: ...
    def reset_prefix_cache(self) -> bool: ...


class CommandQueue(Protocol):
    def read(self, block: bool) -> list[Command]:
        """Return the commands that arrived, waiting for at least one if `block`.

        Raises: EOFError when the other side is gone.
        """
        ...


def run_engine(engine: StepEngine, inbox: CommandQueue, send: Send) -> None:
    """Serve commands until `Stop` or the end of the inbox. Blocks on the inbox while there is nothing to compute."""
    told_at = 0.0
    verdicts = PendingSubmits(send)
    while True:
        try:
            commands = inbox.read(block=not engine.has_work())
        except EOFError:
            return
        for command in commands:
            if isinstance(command, Stop):
                return
            _obey(engine, command, send, verdicts)
        if not engine.has_work():
            continue
        if commands and (ended := engine.take_events()):  # who is stopped is not kept waiting for the others' next step
            send(Events(verdicts.settle(ended, engine.is_preparing), engine.health()))
        events = verdicts.settle(engine.step(), engine.is_preparing)
        now = time.monotonic()
        due = now - told_at >= HEALTH_INTERVAL_S or not engine.has_work()
        if events or due:
            send(Events(events, engine.health() if due else None))
        if due:
            told_at = now


def _obey(engine: StepEngine, command: Command, send: Send, verdicts: PendingSubmits) -> None:
    """Apply one command. A refusal is an answer; anything unforeseen ends this call, not the loop."""
    if isinstance(command, Abort):
        engine.abort(command.request_id)
    elif isinstance(command, Call):
        try:
            reply = _answer(engine, command)
        except ChatcacheError as error:
            reply = Answer(command.call, fault=encode_error(error))
        except Exception:
            log.exception("%s failed", type(command).__name__)
            reply = Answer(command.call, fault=encode_error(EngineError("the engine failed at this; its log says how")))
        if isinstance(command, Submit) and engine.is_preparing(command.request.request_id) and _is_yes(reply):
            verdicts.await_for(command.request.request_id, command.call)
        else:
            send(reply)


def _is_yes(reply: Reply) -> bool:
    return isinstance(reply, Answer) and reply.fault is None


def _answer(engine: StepEngine, command: Call) -> Reply:
    match command:
        case Submit(call, request):
            engine.add(request)
            return Answer(call)
        case Drop(call, request_id, index):
            engine.drop(request_id, index)
            return Answer(call)
        case Explain(call, prompt, namespace, num_public_tokens, operator):
            return Explained(call, engine.pages.explain(prompt, namespace, num_public_tokens, operator=operator))
        case CountCached(call, prompts, namespace):
            return Answer(call, value=engine.pages.num_cached(prompts, namespace))
        case MapPages(call, namespace, operator):
            return Mapped(call, engine.pages.page_map(namespace, operator=operator))
        case Ask(call, "accounts"):
            return Accounted(call, engine.pages.accounts())
        case Ask(call, "stats"):
            return Answer(call, value=engine.pages.stats())
        case Ask(call, "reset_prefix_cache"):
            return Answer(call, value=engine.pages.reset_prefix_cache())
    raise InvalidRequestError("not a call")
