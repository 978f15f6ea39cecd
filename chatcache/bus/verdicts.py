"""Submits that the engine has not made up its mind about: their grammar is still being compiled.

The caller hears of a bad grammar as of any other bad parameter, by the answer to its submit; so that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chatcache.bus.faults import Fault
from chatcache.bus.messages import Answer
from chatcache.types.events import EngineEvent, Failed


class Verdicts:
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
            kind = "InvalidRequest" if 400 <= failure.status < 500 else "EngineFault"
            self._send(Answer(call, fault=Fault(kind, failure.message, failure.code, failure.param)))
        return tuple(event for event in events if event.request_id not in refused)
