"""Queue of the events that the engine emits, numbered 1, 2, 3, ... per request."""

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
        scores = () if request.num_prompt_top is None else (None, *request.prompt_scores)
        report = StartReport(request.num_copied_pages, request.miss) if request.explain else None
        self._events.append(Started(request.request_id, seq, request.num_prompt_tokens, cached, scores, report))

    def emit_output(self, request: LiveRequest, output: Output) -> None:
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
