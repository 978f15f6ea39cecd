"""Events of live requests, numbered 1, 2, 3, ... per request, until the caller takes them."""

from __future__ import annotations

import logging

from chatcache.errors import ChatcacheError, EngineError
from chatcache.scheduler.request import LiveRequest
from chatcache.types.actions import BeamUpdate, Emit, Finish, Output
from chatcache.types.events import (
    FINISH_CANCELLED,
    Beams,
    CandidateDone,
    EngineEvent,
    Failed,
    Finished,
    Started,
    StartReport,
    Tokens,
)

log = logging.getLogger(__name__)

MAX_TOKENS_PER_EVENT = 4096  # what a search holds back may be long, and has to travel


class EventQueue:
    """Numbers and keeps events. `open` and a terminal event frame every accepted request."""

    def __init__(self) -> None:
        self._events: list[EngineEvent] = []
        self._last_seq: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._events)

    def open(self, request_id: str, last_seq: int = 0) -> None:
        """Number a request's events from behind `last_seq` on."""
        self._last_seq[request_id] = last_seq

    def take(self) -> list[EngineEvent]:
        events, self._events = self._events, []
        return events

    def started(self, request: LiveRequest) -> None:
        seq, cached = self._next(request), request.num_cached_tokens or 0
        scores = () if request.num_prompt_top is None else (None, *request.prompt_scores)
        report = StartReport(request.num_copied_pages, request.miss) if request.explain else None
        self._events.append(Started(request.request_id, seq, request.num_prompt_tokens, cached, scores, report))

    def output(self, request: LiveRequest, output: Output) -> None:
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

    def dropped(self, request: LiveRequest, index: int, score: float, num_pages_freed: int) -> None:
        """A candidate was ended on request, perhaps before anything was computed."""
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

    def finished(self, request: LiveRequest, *, cancelled: bool = False, num_pages_freed: int = 0) -> None:
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

    def failed(self, request: LiveRequest, error: BaseException) -> None:
        """Report an error. Only catalogued ones are quoted; anything else is a bug and keeps its text to itself."""
        known = error if isinstance(error, ChatcacheError) else EngineError("The request failed while it was computed.")
        self._events.append(
            Failed(request.request_id, self._close(request), known.message, known.code, known.param, known.status)
        )

    def _next(self, request: LiveRequest) -> int:
        self._last_seq[request.request_id] += 1
        return self._last_seq[request.request_id]

    def _close(self, request: LiveRequest) -> int:
        return self._last_seq.pop(request.request_id) + 1
