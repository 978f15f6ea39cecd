"""The loop around an engine: read commands, step, send notices. The same code runs in a thread and in a child."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from chatcache.bus.codec import Abort, Answer, Ask, Command, Events, Notice, Stop, Submit, to_fault
from chatcache.errors import ChatcacheError
from chatcache.types import EngineEvent, EngineHealth, GenerateRequest, ModelFacts

HEALTH_INTERVAL_S = 0.05

Send = Callable[[Notice], None]
Progress = Callable[[float, str], None]


class SteppedEngine(Protocol):
    """What the loop needs of `engine.Engine`: synchronous and driven by one thread."""

    @property
    def facts(self) -> ModelFacts: ...
    def add(self, request: GenerateRequest) -> Any: ...
    def abort(self, request_id: str) -> Any: ...
    def has_work(self) -> bool: ...
    def step(self) -> Sequence[EngineEvent]: ...
    def health(self) -> EngineHealth: ...
    def stats(self) -> Any: ...
    def reset_prefix_cache(self) -> bool: ...


class Inbox(Protocol):
    def read(self, block: bool) -> list[Command]:
        """Return the commands that arrived, waiting for at least one if `block`.

        Raises: EOFError when the other side is gone.
        """
        ...


def run_engine(engine: SteppedEngine, inbox: Inbox, send: Send) -> None:
    """Serve commands until `Stop` or the end of the inbox. Blocks on the inbox while there is nothing to compute."""
    told_at = 0.0
    while True:
        try:
            commands = inbox.read(block=not engine.has_work())
        except EOFError:
            return
        for command in commands:
            if isinstance(command, Stop):
                return
            _obey(engine, command, send)
        if not engine.has_work():
            continue
        events = tuple(engine.step())
        now = time.monotonic()
        due = now - told_at >= HEALTH_INTERVAL_S or not engine.has_work()
        if events or due:
            send(Events(events, engine.health() if due else None))
        if due:
            told_at = now


def _obey(engine: SteppedEngine, command: Command, send: Send) -> None:
    """Apply one command. A refusal is an answer; anything unforeseen ends this call, not the loop."""
    if isinstance(command, Abort):
        engine.abort(command.request_id)
    elif isinstance(command, Submit | Ask):
        try:
            value = engine.add(command.request) if isinstance(command, Submit) else getattr(engine, command.what)()
        except ChatcacheError as error:
            send(Answer(command.call, fault=to_fault(error)))
        else:
            send(Answer(command.call, value=None if isinstance(command, Submit) else value))
