"""Test bench of `RequestRecovery` between a simulated engine and a simulated client."""

from __future__ import annotations

import itertools

from chatcache.engine_process.protocol import (
    Abort,
    Answer,
    CancelCandidate,
    Command,
    Events,
    PromptScores,
    Reply,
    Submit,
)
from chatcache.engine_process.recovery import RequestRecovery
from chatcache.errors import EngineError
from chatcache.types.events import EngineEvent, Finished, SearchStep, Started, Tokens
from chatcache.types.request import GenerateRequest, ResumePoint, SamplingParams


class RecoveryBench:
    """`in_engine`: ids in the engine. `events`, `answers`: what the client received."""

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.in_engine: list[str] = []
        self.events: dict[str, list[EngineEvent]] = {}
        self.answers: list[Reply] = []
        self.search_steps: list[SearchStep] = []
        self._calls = itertools.count(1)
        self._seqs: dict[str, int] = {}
        self.recovery = RequestRecovery(self._to_engine, self._to_client)
        self.recovery.on_started()

    def _to_engine(self, command: Command) -> None:
        self.sent.append(command)
        if isinstance(command, Submit):
            self.in_engine.append(command.request.request_id)
            resumed = command.request.resume_point
            self._seqs[command.request.request_id] = resumed.last_seq if resumed is not None else 0

    def _to_client(self, notice: Reply | PromptScores | Events) -> None:
        if isinstance(notice, Events):
            self.search_steps += notice.search_steps
            for event in notice.events:
                self.events.setdefault(event.request_id, []).append(event)
        elif not isinstance(notice, PromptScores):
            self.answers.append(notice)

    def submit(self, name: str, *, n: int = 1, best_of: int | None = None) -> int:
        call = next(self._calls)
        params = SamplingParams(n=n, best_of=best_of, max_tokens=100)
        self.recovery.send(Submit(call, GenerateRequest(request_id=name, prompt=(1, 2, 3), params=params)))
        return call

    def start(self, name: str, *, n: int = 1) -> None:
        """Submit, accept, and emit the first token of each candidate."""
        self.recovery.receive(Answer(self.submit(name, n=n)))
        self.emit(name, *[(index, 7) for index in range(n)], started=True)

    def start_search(self, name: str) -> None:
        """Submit and accept a search, and report its first step."""
        self.recovery.receive(Answer(self.submit(name, best_of=3)))
        self.search(name, b"1", started=True)

    def search(self, name: str, *records: bytes, started: bool = False) -> None:
        """Report steps of a search, which emit no token."""
        steps = tuple(SearchStep(name, record) for record in records)
        events = (Started(name, self._seq(name), 3, 0),) if started else ()
        self.recovery.receive(Events(events, search_steps=steps))
        assert tuple(self.search_steps[-len(steps) :]) == steps, "a gateway of workers needs them"

    def resume_point(self) -> ResumePoint:
        """Return the resume point of the last submit that the engine received."""
        last = [command for command in self.sent if isinstance(command, Submit)][-1]
        assert last.request.resume_point is not None
        return last.request.resume_point

    def emit(self, name: str, *tokens: tuple[int, int], started: bool = False) -> None:
        events: list[EngineEvent] = [Started(name, self._seq(name), 3, 0)] if started else []
        events += [Tokens(name, self._seq(name), index, (token,)) for index, token in tokens]
        self.recovery.receive(Events(tuple(events)))

    def finish(self, name: str, *, cancelled: bool = False) -> None:
        self.in_engine.remove(name)
        self.recovery.receive(Events((Finished(name, self._seq(name), 3, 0, 9, cancelled=cancelled),)))

    def abort(self, name: str) -> None:
        self.recovery.send(Abort(name))

    def drop(self, name: str, index: int) -> int:
        call = next(self._calls)
        self.recovery.send(CancelCandidate(call, name, index))
        return call

    def crash(self, *, is_sure: bool = True) -> int:
        self.in_engine.clear()
        return self.recovery.on_exit(EngineError("it died"), is_sure=is_sure)

    def _seq(self, name: str) -> int:
        self._seqs[name] += 1
        return self._seqs[name]
