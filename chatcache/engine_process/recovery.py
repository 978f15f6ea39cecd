"""Recovery of requests when the engine process ends: they are resumed by the next one.

All commands and notices pass through `RequestRecovery`, between the client and the current child. It records the
emitted tokens of each request, or the choices of a search. When a child ends, its requests are held until the next
child is ready, which resumes each from this record; the client only notices a pause.

Any of the requests may have caused the crash. Therefore each is a suspect and runs alone in the new child, on trial,
until it is past the point where the old child ended. Then it is suspended (`Abort`, whose end is not emitted; its pages
stay cached), and the next suspect runs. When no suspect is left, all requests run together. A suspect whose trial ends
in another crash is the cause, and fails with `request_poisoned`.

    RUNNING -- crash --> HELD, suspect --> TRIAL (alone) --> SUSPENDING --> HELD, not suspect --> RUNNING
                                             | crash
                                             +--> Failed (`request_poisoned`)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from struct import pack

from msgspec.structs import replace

from chatcache.engine_process.protocol import (
    Abort,
    Answer,
    CancelCandidate,
    Command,
    ErrorData,
    Events,
    PromptScores,
    Reply,
    Submit,
    decode_error,
    encode_error,
)
from chatcache.errors import (
    ChatcacheError,
    DeviceLostError,
    InvalidRequestError,
    OverloadedError,
    RequestPoisonedError,
    UnsupportedParameterError,
)
from chatcache.types.events import (
    FINISH_CANCELLED,
    TERMINAL,
    CandidateDone,
    EngineEvent,
    Failed,
    Finished,
    Started,
    Tokens,
)
from chatcache.types.request import GenerateRequest, ResumePoint, SamplingParams, SentCandidate
from chatcache.types.stats import EngineHealth

MAX_RECORD_BYTES = 8 * 1024 * 1024  # of a search; the records and the prompt must fit a frame
TRIAL_TOKENS = 3  # per candidate: the steps that may have been computed or launched when the child ended

Notice = Reply | PromptScores | Events


@dataclass(slots=True)
class _Candidate:
    """Emitted tokens of one candidate, as little-endian int32."""

    tokens: bytearray = field(default_factory=bytearray)
    score: float = 0.0
    is_done: bool = False
    has_result: bool = False


class RequestJournal:
    """What another engine needs to resume a request.

    These are the tokens of candidates that are sampled independently, or the recorded steps of a search (beams,
    best_of, distinct); an embedding is computed again. A search whose records exceed `MAX_RECORD_BYTES` cannot be
    resumed.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.last_seq = 0
        self.num_tokens = 0
        self.has_started = False
        self.num_search_steps = 0
        self._num_cached = 0
        self._steps: list[bytes] = []
        self._num_record_bytes = 0
        params = request.params
        is_plain = isinstance(params, SamplingParams) and not params.distinct and params.best_of in (None, params.n)
        is_plain = is_plain and request.pooling is None
        self._candidates = [_Candidate() for _ in range(params.n or 1)] if is_plain else []
        if request.resume_point is not None:
            self._restore(request.resume_point)

    def _restore(self, resumed: ResumePoint) -> None:
        """Record what other engines have emitted of the request."""
        self.last_seq, self.has_started = resumed.last_seq, resumed.num_cached_tokens is not None
        self._num_cached = resumed.num_cached_tokens or 0
        for sent in resumed.candidates:
            self._candidates[sent.index] = _Candidate(bytearray(sent.tokens), sent.score, sent.is_done, sent.has_result)
            self.num_tokens += len(sent.tokens) // 4
        for record in resumed.steps:
            self.record_search_step(record)

    @property
    def has_independent_candidates(self) -> bool:
        """Whether candidates are sampled independently, each token emitted when it is sampled."""
        return bool(self._candidates)

    @property
    def candidate_tokens(self) -> list[bytes]:
        """The emitted tokens of independent candidates, little-endian int32."""
        return [bytes(each.tokens) for each in self._candidates]

    @property
    def is_resumable(self) -> bool:
        """Whether another engine can resume the request."""
        return self.has_independent_candidates or not self.has_started or bool(self._steps)

    @property
    def progress(self) -> int:
        """Number of emitted tokens, or of steps of a search."""
        return self.num_tokens if self.has_independent_candidates else self.num_search_steps

    @property
    def num_unfinished(self) -> int:
        """Number of candidates that have not ended; 1 for a search."""
        return sum(not each.is_done for each in self._candidates) if self.has_independent_candidates else 1

    def record(self, event: EngineEvent) -> None:
        """Record the next event. Raises: ValueError for a gap or a repetition."""
        if event.seq != self.last_seq + 1:
            raise ValueError(f"{event.request_id}: event {event.seq} follows {self.last_seq}")
        self.last_seq = event.seq
        if isinstance(event, Tokens):
            self.num_tokens += len(event.token_ids)
            if self._candidates:
                candidate = self._candidates[event.index]
                candidate.tokens += pack(f"<{len(event.token_ids)}i", *event.token_ids)
                candidate.score = event.score
        elif isinstance(event, CandidateDone):
            if self._candidates:
                candidate = self._candidates[event.index]
                candidate.is_done, candidate.has_result = True, event.is_result
        elif isinstance(event, Started):
            self.has_started, self._num_cached = True, event.num_cached_tokens

    def record_search_step(self, record: bytes) -> None:
        """Record the next step of a search, before its events."""
        self.num_search_steps += 1
        self._num_record_bytes += len(record)
        if self._num_record_bytes <= MAX_RECORD_BYTES:
            self._steps.append(record)
        else:
            self._steps.clear()

    def resumed_request(self) -> GenerateRequest:
        """Return the request with a resume point, and without its fork source.

        The pages of the fork source ended with its engine. A search whose `Started` was not received starts again.
        """
        if not self.has_started:
            self._steps.clear()
            self._num_record_bytes = 0
        candidates = (
            SentCandidate(index, bytes(each.tokens), each.score, each.is_done, each.has_result)
            for index, each in enumerate(self._candidates)
        )
        resumed = ResumePoint(
            last_seq=self.last_seq,
            num_cached_tokens=self._num_cached if self.has_started else None,
            candidates=tuple(candidates) if self.last_seq else (),
            steps=tuple(self._steps),
        )
        return replace(self.request, fork_of=None, resume_point=resumed)

    # -- terminal events of held requests -----------------------------------------------------------------------------

    def cancelled_event(self) -> Finished:
        """Return the terminal event of a request that was aborted while no engine ran it."""
        return Finished(
            request_id=self.request.request_id,
            seq=self.last_seq + 1,
            num_prompt_tokens=len(self.request.prompt),
            num_cached_tokens=self._num_cached,
            num_output_tokens=self.num_tokens,
            cancelled=True,
        )

    def failed_event(self, error: ChatcacheError) -> Failed:
        """Return the terminal event of a request that failed while no engine ran it."""
        return Failed(self.request.request_id, self.last_seq + 1, error.message, error.code, error.param, error.status)

    def cancelled_candidate_event(self, index: int) -> CandidateDone | None:
        """Return the last event of a cancelled candidate; None if it has ended or does not exist."""
        if not 0 <= index < len(self._candidates) or self._candidates[index].is_done:
            return None
        score = self._candidates[index].score
        return CandidateDone(self.request.request_id, self.last_seq + 1, index, FINISH_CANCELLED, None, score)


def refused_drop(command: CancelCandidate) -> Answer:
    """Return the answer to dropping a candidate of a search."""
    message = "this candidate cannot be dropped alone: cancel the response"
    return Answer(command.call, error=encode_error(UnsupportedParameterError(message, param="candidate")))


class RequestState(enum.Enum):
    """State of a request during recovery, see the drawing in the module docstring.

    RUNNING: in the engine with others. HELD: not in the engine. TRIAL: alone in the engine. SUSPENDING: leaving the
    engine after its trial.
    """

    RUNNING = enum.auto()
    HELD = enum.auto()
    TRIAL = enum.auto()
    SUSPENDING = enum.auto()


@dataclass(slots=True, eq=False)
class RecoverableRequest:
    """A request from its submit to its terminal event.

    `call` waits for the engine's answer until the request `is_accepted`. `scores`: prompt log-probabilities, kept until
    the `Started` event arrives. `trial_goal`: the progress at which its trial ends.
    """

    call: int
    journal: RequestJournal
    state: RequestState = RequestState.HELD
    is_accepted: bool = False
    is_aborted: bool = False
    is_suspect: bool = False
    num_trial_deaths: int = 0
    trial_goal: int = 0
    scores: list[PromptScores] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.journal.request.request_id

    def set_trial_goal(self) -> None:
        """Set the progress at which the trial of this request ends."""
        self.trial_goal = self.journal.progress + TRIAL_TOKENS * self.journal.num_unfinished

    @property
    def has_reached_trial_goal(self) -> bool:
        """Whether the request has passed the point where the previous engine process ended."""
        return self.journal.progress >= self.trial_goal


class RequestRecovery:
    """Tracks all requests across engine processes, and finds those that crash them.

    `to_engine` sends a command to the current child, `to_client` passes a notice to the client.
    """

    def __init__(self, to_engine: Callable[[Command], None], to_client: Callable[[Notice], None]) -> None:
        self._to_engine = to_engine
        self._to_client = to_client
        self._by_id: dict[str, RecoverableRequest] = {}
        self._by_call: dict[int, RecoverableRequest] = {}
        self._drops: dict[int, CancelCandidate] = {}
        self._trial: RecoverableRequest | None = None
        self._is_running = False
        self.num_tokens_sent = 0
        self.num_resumed = 0
        self.num_poisoned = 0

    @property
    def pending_calls(self) -> set[int]:
        """Calls of submits that will be answered even if the current child ends."""
        return {each.call for each in self._by_id.values() if not each.is_accepted}

    @property
    def num_in_engine(self) -> int:
        return sum(each.state is not RequestState.HELD for each in self._by_id.values())

    def with_held(self, health: EngineHealth) -> EngineHealth:
        """Add the held requests to the waiting ones of a health report."""
        held = [each for each in self._by_id.values() if each.state is RequestState.HELD]
        if not held:
            return health
        num_tokens = sum(len(each.journal.request.prompt) for each in held)
        return replace(
            health,
            num_waiting=health.num_waiting + len(held),
            num_waiting_tokens=health.num_waiting_tokens + num_tokens,
        )

    # -- commands -------------------------------------------------------------------------------------------------

    def send(self, command: Command) -> None:
        """Forward a command, or apply it here if the engine does not run its request.

        Raises: as `to_engine`.
        """
        if isinstance(command, Submit):
            self._submit_new(command)
        elif isinstance(command, Abort | CancelCandidate):
            found = self._by_id.get(command.request_id)
            if found is not None and found.state in (RequestState.HELD, RequestState.SUSPENDING):
                self._end_held(found, command)
                return
            if found is not None and isinstance(command, Abort):
                found.is_aborted = True
            elif found is not None and isinstance(command, CancelCandidate):
                self._drops[command.call] = command
            self._to_engine(command)
        else:
            self._to_engine(command)

    def _submit_new(self, command: Submit) -> None:
        new = RecoverableRequest(command.call, RequestJournal(command.request))
        if new.id in self._by_id:  # it was aborted and has not ended yet
            error = InvalidRequestError(f"request_id {new.id!r} is already active", param="request_id")
            self._to_client(Answer(command.call, error=encode_error(error)))
            return
        if self._is_running and self._trial is None:
            self._to_engine(command)
            new.state = RequestState.RUNNING
        self._by_id[new.id] = self._by_call[new.call] = new

    def _end_held(self, held: RecoverableRequest, command: Abort | CancelCandidate) -> None:
        if isinstance(command, Abort):
            self._abort_held(held)
            return
        reply = Answer(command.call)
        if not held.journal.has_independent_candidates:
            reply = refused_drop(command)
        elif (done := held.journal.cancelled_candidate_event(command.index)) is not None:
            if held.journal.num_unfinished == 1:
                self._abort_held(held)
            elif held.state is RequestState.HELD:
                self._emit(held, done)
            else:
                self._drops[command.call] = command  # applied when the request is held again
                return
        self._to_client(reply)

    def _abort_held(self, held: RecoverableRequest) -> None:
        if held.state is RequestState.SUSPENDING:
            held.is_aborted = True
        elif held.is_accepted:
            self._emit(held, held.journal.cancelled_event())
        else:
            self._forget(held)

    # -- notices --------------------------------------------------------------------------------------------------

    def receive(self, notice: Notice) -> None:
        """Record a notice and forward it to the client. Raises: ValueError for events out of order."""
        if isinstance(notice, Events):
            self._receive_events(notice)
        elif isinstance(notice, PromptScores):
            found = self._by_id.get(notice.request_id)
            if found is not None:
                found.scores.append(notice)
        else:
            self._drops.pop(notice.call, None)
            self._receive_reply(notice)
        self._dispatch_held()

    def _receive_reply(self, reply: Reply) -> None:
        found = self._by_call.get(reply.call)
        error = reply.error if isinstance(reply, Answer) else None
        if found is None:
            self._to_client(reply)
        elif error is None:
            if not found.is_accepted:
                found.is_accepted = True
                self._to_client(reply)
        else:
            self._end(found, error)

    def _receive_events(self, notice: Events) -> None:
        for step in notice.search_steps:
            if (search := self._by_id.get(step.request_id)) is not None:
                search.journal.record_search_step(step.record)
        events: list[EngineEvent] = []
        for event in notice.events:
            found = self._by_id.get(event.request_id)
            if found is None or (isinstance(event, Failed) and event.code == DeviceLostError.code):
                continue  # of an unknown request, or of an engine that is about to end
            if (
                found.state is RequestState.SUSPENDING
                and isinstance(event, Finished)
                and event.cancelled
                and not found.is_aborted
            ):
                found.state = RequestState.HELD
                continue
            if isinstance(event, Started):
                for part in found.scores:
                    self._to_client(part)
                found.scores.clear()
            num_before = found.journal.num_tokens
            found.journal.record(event)
            self.num_tokens_sent += found.journal.num_tokens - num_before
            events.append(event)
            if isinstance(event, TERMINAL):
                self._forget(found)
        if events or notice.health is not None or notice.search_steps:
            self._to_client(Events(tuple(events), notice.health, notice.search_steps))

    # -- exits and restarts ---------------------------------------------------------------------------------------

    def on_started(self) -> None:
        """Mark the new child as ready and dispatch held requests."""
        self._is_running = True
        self._dispatch_held()

    def on_exit(self, error: ChatcacheError, *, is_sure: bool) -> int:
        """Hold the requests of a child that ended; return how many failed as the cause.

        Requests that cannot be resumed fail, too. `is_sure`: the child was not killed from outside. Otherwise a request
        fails as the cause only after two deaths on trial.
        """
        self._is_running, self._trial = False, None
        num_before = self.num_poisoned
        for each in [each for each in self._by_id.values() if each.state is not RequestState.HELD]:
            was, each.state = each.state, RequestState.HELD
            each.scores.clear()
            each.is_suspect = True
            each.num_trial_deaths += was is RequestState.TRIAL
            if each.is_aborted:
                self._abort_held(each)
            elif each.num_trial_deaths >= (1 if is_sure else 2):
                self.num_poisoned += 1
                self._end(
                    each, encode_error(RequestPoisonedError(f"this request ended the engine twice: {error.message}"))
                )
            elif not each.journal.is_resumable:
                lost = f"{error.message}; the record of this search is too long to continue it: send the request again"
                self._end(each, encode_error(OverloadedError(lost, code="engine_unavailable")))
        self._drop_pending()
        return self.num_poisoned - num_before

    def clear(self) -> None:
        """Remove all requests, because no child will be started any more."""
        self._by_id.clear()
        self._by_call.clear()
        self._drops.clear()
        self._is_running, self._trial = False, None

    def _dispatch_held(self) -> None:
        """Start the trial of the next suspect, or dispatch all held requests if there is none."""
        while self._is_running and (self._trial is None or self._is_trial_over(self._trial)):
            self._trial = None
            self._drop_pending()
            suspect = next(self._suspects(), None)
            if suspect is None:
                for each in [each for each in self._by_id.values() if each.state is RequestState.HELD]:
                    self._dispatch(each, RequestState.RUNNING)
                return
            suspect.set_trial_goal()
            self._trial = suspect
            self._dispatch(suspect, RequestState.TRIAL)

    def _is_trial_over(self, trial: RecoverableRequest) -> bool:
        """Return whether the trial of a suspect is over.

        A request that is past the point where the last child crashed is innocent: it is suspended if other suspects
        wait for their trial.
        """
        if self._by_id.get(trial.id) is not trial or trial.state is RequestState.HELD:
            return True
        if trial.state is RequestState.TRIAL and trial.has_reached_trial_goal:
            trial.is_suspect, trial.num_trial_deaths = False, 0
            if next(self._suspects(), None) is None:
                trial.state = RequestState.RUNNING
                return True
            trial.state = RequestState.SUSPENDING
            self._to_engine(Abort(trial.id))
        return False

    def _suspects(self) -> Iterator[RecoverableRequest]:
        return (each for each in self._by_id.values() if each.is_suspect and each.state is RequestState.HELD)

    def _dispatch(self, held: RecoverableRequest, place: RequestState) -> None:
        """Submit a request to the engine, with its resume point."""
        held.state = place
        self.num_resumed += held.is_accepted
        is_new = not held.is_accepted and not held.is_suspect
        try:
            self._to_engine(Submit(held.call, held.journal.request if is_new else held.journal.resumed_request()))
        except ChatcacheError as error:  # it exceeds a frame
            self._end(held, encode_error(error))

    def _drop_pending(self) -> None:
        """Apply unconfirmed candidate cancellations of requests that no engine runs."""
        for call, drop in list(self._drops.items()):
            found = self._by_id.get(drop.request_id)
            if found is not None and found.state is not RequestState.HELD:
                continue
            del self._drops[call]
            if found is None:
                self._to_client(Answer(call))
            else:
                self._end_held(found, drop)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _end(self, found: RecoverableRequest, error: ErrorData) -> None:
        """Fail a request: answer its submit with the error, or emit `Failed` if it was accepted."""
        if found.is_accepted:
            self._emit(found, found.journal.failed_event(decode_error(error)))
        else:
            self._forget(found)
            self._to_client(Answer(found.call, error=error))

    def _emit(self, found: RecoverableRequest, event: EngineEvent) -> None:
        """Record an event that no engine sent, and send it to the client."""
        found.journal.record(event)
        if isinstance(event, TERMINAL):
            self._forget(found)
        self._to_client(Events((event,)))

    def _forget(self, found: RecoverableRequest) -> None:
        self._by_id.pop(found.id, None)
        self._by_call.pop(found.call, None)
