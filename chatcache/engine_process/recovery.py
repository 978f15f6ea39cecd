"""Requests that outlive the engine which runs them: between the switchboard and one engine child after another.

Every command and every notice passes here. When a child dies, its requests are held until there is a new one, which
gets them with what was told of them; whoever reads their events notices a pause.

Any of them may be what killed it. So they come back as suspects, each alone with the new child until it is past the
place where the old one died; then it makes room for the next (`Abort`, whose end is not told; its pages stay cached).
When none is left, all go on together, with those that came meanwhile. A suspect that dies alone is the culprit.

    in the engine --- dies ---> held, suspect ---> on trial, alone ---> aside ---> held, cleared ---> in the engine
                                                       dies: `request_poisoned`

What a running request was told, as much of it as it takes for another engine to go on.

One request that outlives its engines.
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
    Command,
    Drop,
    ErrorData,
    Events,
    Reply,
    Scored,
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

_TOKEN_BYTES = 4


@dataclass(slots=True)
class _Candidate:
    tokens: bytearray = field(default_factory=bytearray)
    score: float = 0.0
    is_done: bool = False


class RequestJournal:
    """One request and what was told of it. Only candidates that go their own ways from the prompt can be resumed."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.last_seq = 0
        self.num_tokens = 0
        self.has_started = False
        self._num_cached = 0
        params = request.params
        is_plain = isinstance(params, SamplingParams) and not params.distinct and params.best_of in (None, params.n)
        self._candidates = [_Candidate() for _ in range(params.n or 1)] if is_plain else []

    @property
    def is_plain(self) -> bool:
        """Whether its candidates are sampled side by side, each token told as it is drawn."""
        return bool(self._candidates)

    @property
    def is_resumable(self) -> bool:
        """Whether another engine can go on with it: what a search has in mind is not told."""
        return self.is_plain or not self.last_seq

    @property
    def num_alive(self) -> int:
        """Candidates that have not ended; 1 of a search."""
        return sum(not each.is_done for each in self._candidates) if self.is_plain else 1

    def note(self, event: EngineEvent) -> None:
        """Take the next event. Raises: ValueError for a gap or a repeat."""
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
                self._candidates[event.index].is_done = True
        elif isinstance(event, Started):
            self.has_started, self._num_cached = True, event.num_cached_tokens

    def resumed(self) -> GenerateRequest:
        """The request for an engine that goes on with it. The engine it might have forked a page of is gone."""
        candidates = (
            SentCandidate(index, bytes(each.tokens), each.score, each.is_done)
            for index, each in enumerate(self._candidates)
        )
        resumed = ResumePoint(
            last_seq=self.last_seq,
            num_cached_tokens=self._num_cached if self.has_started else None,
            candidates=tuple(candidates) if self.last_seq else (),
        )
        return replace(self.request, fork_of=None, resume_point=resumed)

    # -- ends that no engine tells: there is none just now ----------------------------------------------------------

    def cancelled(self) -> Finished:
        """The end of a request that was aborted while no engine had it."""
        return Finished(
            request_id=self.request.request_id,
            seq=self.last_seq + 1,
            num_prompt_tokens=len(self.request.prompt),
            num_cached_tokens=self._num_cached,
            num_output_tokens=self.num_tokens,
            cancelled=True,
        )

    def failed(self, error: ChatcacheError) -> Failed:
        return Failed(self.request.request_id, self.last_seq + 1, error.message, error.code, error.param, error.status)

    def dropped(self, index: int) -> CandidateDone | None:
        """The end of a candidate that was dropped meanwhile; None if it has ended, or never was."""
        if not 0 <= index < len(self._candidates) or self._candidates[index].is_done:
            return None
        score = self._candidates[index].score
        return CandidateDone(self.request.request_id, self.last_seq + 1, index, FINISH_CANCELLED, None, score)


PAST_TOKENS = 3  # of each candidate: the step that was being computed, and one that may have been launched behind it


class RequestState(enum.Enum):
    ENGINE = enum.auto()
    HELD = enum.auto()
    TRIAL = enum.auto()
    ASIDE = enum.auto()


@dataclass(slots=True, eq=False)
class RecoverableRequest:
    """A request from its submit to its end. `call` waits for the engine's verdict until it `is_accepted`.

    `scores`: of its prompt, kept back until `Started` comes.
    """

    call: int
    told: RequestJournal
    place: RequestState = RequestState.HELD
    is_accepted: bool = False
    is_aborted: bool = False
    is_suspect: bool = False
    num_lone_deaths: int = 0
    num_tokens_past: int = 0
    scores: list[Scored] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.told.request.request_id

    def set_place(self) -> None:
        """Note how far it has to come, alone, to be innocent."""
        self.num_tokens_past = self.told.num_tokens + PAST_TOKENS * self.told.num_alive

    @property
    def is_past(self) -> bool:
        """Whether it has outlived, on trial, what it had come to when the engine died."""
        told = self.told
        return told.num_tokens >= self.num_tokens_past if told.is_plain else told.has_started


Notice = Reply | Scored | Events


class RequestRecovery:
    """`to_engine` hands a command to the present child, `to_board` a notice to the switchboard."""

    def __init__(self, to_engine: Callable[[Command], None], to_board: Callable[[Notice], None]) -> None:
        self._to_engine = to_engine
        self._to_board = to_board
        self._by_id: dict[str, RecoverableRequest] = {}
        self._by_call: dict[int, RecoverableRequest] = {}
        self._drops: dict[int, Drop] = {}
        self._alone: RecoverableRequest | None = None
        self._is_up = False
        self.num_told = 0  # tokens
        self.num_resumed = 0
        self.num_poisoned = 0

    @property
    def calls(self) -> set[int]:
        """Calls that will be answered, though the engine that was asked has died."""
        return {each.call for each in self._by_id.values() if not each.is_accepted}

    @property
    def num_in_engine(self) -> int:
        return sum(each.place is not RequestState.HELD for each in self._by_id.values())

    def with_held(self, health: EngineHealth) -> EngineHealth:
        """Count those that are held among those that wait."""
        held = [each for each in self._by_id.values() if each.place is RequestState.HELD]
        if not held:
            return health
        num_tokens = sum(len(each.told.request.prompt) for each in held)
        return replace(
            health,
            num_waiting=health.num_waiting + len(held),
            num_waiting_tokens=health.num_waiting_tokens + num_tokens,
        )

    # -- commands -------------------------------------------------------------------------------------------------

    def send(self, command: Command) -> None:
        """Pass a command on, or do as it says here if the engine has not got that request. Raises: as `to_engine`."""
        if isinstance(command, Submit):
            self._submit_new(command)
        elif isinstance(command, Abort | Drop):
            found = self._by_id.get(command.request_id)
            if found is not None and found.place in (RequestState.HELD, RequestState.ASIDE):
                self._end_held(found, command)
                return
            if found is not None and isinstance(command, Abort):
                found.is_aborted = True
            elif found is not None and isinstance(command, Drop):
                self._drops[command.call] = command
            self._to_engine(command)
        else:
            self._to_engine(command)

    def _submit_new(self, command: Submit) -> None:
        new = RecoverableRequest(command.call, RequestJournal(command.request))
        if new.id in self._by_id:  # it was withdrawn, and has not ended yet
            error = InvalidRequestError(f"request_id {new.id!r} is already active", param="request_id")
            self._to_board(Answer(command.call, fault=encode_error(error)))
            return
        if self._is_up and self._alone is None:
            self._to_engine(command)
            new.place = RequestState.ENGINE
        self._by_id[new.id] = self._by_call[new.call] = new

    def _end_held(self, held: RecoverableRequest, command: Abort | Drop) -> None:
        if isinstance(command, Abort):
            self._abort_held(held)
            return
        reply = Answer(command.call)
        if not held.told.is_plain:
            error = UnsupportedParameterError(
                "this candidate cannot be dropped alone: cancel the response", param="candidate"
            )
            reply = Answer(command.call, fault=encode_error(error))
        elif (done := held.told.dropped(command.index)) is not None:
            if held.told.num_alive == 1:
                self._abort_held(held)
            elif held.place is RequestState.HELD:
                self._tell(held, done)
            else:
                self._drops[command.call] = command  # when it is aside
                return
        self._to_board(reply)

    def _abort_held(self, held: RecoverableRequest) -> None:
        if held.place is RequestState.ASIDE:
            held.is_aborted = True
        elif held.is_accepted:
            self._tell(held, held.told.cancelled())
        else:
            self._forget(held)

    # -- notices --------------------------------------------------------------------------------------------------

    def receive(self, notice: Notice) -> None:
        """File what the engine said, and pass it on. Raises: ValueError for events out of order."""
        if isinstance(notice, Events):
            self._hear(notice)
        elif isinstance(notice, Scored):
            found = self._by_id.get(notice.request_id)
            if found is not None:
                found.scores.append(notice)
        else:
            self._drops.pop(notice.call, None)
            self._judge(notice)
        self._look()

    def _judge(self, reply: Reply) -> None:
        found = self._by_call.get(reply.call)
        fault = reply.fault if isinstance(reply, Answer) else None
        if found is None:
            self._to_board(reply)
        elif fault is None:
            if not found.is_accepted:
                found.is_accepted = True
                self._to_board(reply)
        else:
            self._end(found, fault)

    def _hear(self, notice: Events) -> None:
        heard: list[EngineEvent] = []
        for event in notice.events:
            found = self._by_id.get(event.request_id)
            if found is None or (isinstance(event, Failed) and event.code == DeviceLostError.code):
                continue  # nobody's; or of an engine that is about to end
            if (
                found.place is RequestState.ASIDE
                and isinstance(event, Finished)
                and event.cancelled
                and not found.is_aborted
            ):
                found.place = RequestState.HELD
                continue
            if isinstance(event, Started):
                for part in found.scores:
                    self._to_board(part)
                found.scores.clear()
            num_before = found.told.num_tokens
            found.told.note(event)
            self.num_told += found.told.num_tokens - num_before
            heard.append(event)
            if isinstance(event, TERMINAL):
                self._forget(found)
        if heard or notice.health is not None:
            self._to_board(Events(tuple(heard), notice.health))

    # -- deaths ---------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """A child is ready for the requests."""
        self._is_up = True
        self._look()

    def died(self, error: ChatcacheError, *, is_sure: bool) -> int:
        """Hold all requests; end those that nobody can go on with. Return how many were found to be poison.

        `is_sure`: it died of itself, and nobody may have killed it from outside; of the other kind it takes two deaths.
        """
        self._is_up, self._alone = False, None
        num_before = self.num_poisoned
        for each in [each for each in self._by_id.values() if each.place is not RequestState.HELD]:
            was, each.place = each.place, RequestState.HELD
            each.scores.clear()
            each.is_suspect = True
            each.num_lone_deaths += was is RequestState.TRIAL
            if each.is_aborted:
                self._abort_held(each)
            elif each.num_lone_deaths >= (1 if is_sure else 2):
                self.num_poisoned += 1
                self._end(
                    each, encode_error(RequestPoisonedError(f"this request ended the engine twice: {error.message}"))
                )
            elif not each.told.is_resumable:
                lost = f"{error.message}; what this search had in mind is lost: send it again"
                self._end(each, encode_error(OverloadedError(lost, code="engine_unavailable")))
        self._drop_pending()
        return self.num_poisoned - num_before

    def forget_all(self) -> None:
        """Nobody will go on with any of them."""
        self._by_id.clear()
        self._by_call.clear()
        self._drops.clear()
        self._is_up, self._alone = False, None

    def _look(self) -> None:
        """Have the next suspect run alone once the last one is done, or all run when there is none."""
        while self._is_up and (self._alone is None or self._is_over(self._alone)):
            self._alone = None
            self._drop_pending()
            suspect = next(self._suspects(), None)
            if suspect is None:
                for each in [each for each in self._by_id.values() if each.place is RequestState.HELD]:
                    self._give(each, RequestState.ENGINE)
                return
            suspect.set_place()
            self._alone = suspect
            self._give(suspect, RequestState.TRIAL)

    def _is_over(self, trial: RecoverableRequest) -> bool:
        """Say whether the suspect has left the engine, and ask it to once it is past its place."""
        if self._by_id.get(trial.id) is not trial or trial.place is RequestState.HELD:
            return True
        if trial.place is RequestState.TRIAL and trial.is_past:
            trial.is_suspect, trial.num_lone_deaths = False, 0
            if next(self._suspects(), None) is None:
                trial.place = RequestState.ENGINE
                return True
            trial.place = RequestState.ASIDE
            self._to_engine(Abort(trial.id))
        return False

    def _suspects(self) -> Iterator[RecoverableRequest]:
        return (each for each in self._by_id.values() if each.is_suspect and each.place is RequestState.HELD)

    def _give(self, held: RecoverableRequest, place: RequestState) -> None:
        """Give a request to the engine, with what was told of it."""
        held.place = place
        self.num_resumed += held.is_accepted
        fresh = not held.is_accepted and not held.is_suspect
        try:
            self._to_engine(Submit(held.call, held.told.request if fresh else held.told.resumed()))
        except ChatcacheError as error:  # it fits no frame
            self._end(held, encode_error(error))

    def _drop_pending(self) -> None:
        """Carry out drops that the engine did not get round to."""
        for call, drop in list(self._drops.items()):
            found = self._by_id.get(drop.request_id)
            if found is not None and found.place is not RequestState.HELD:
                continue
            del self._drops[call]
            if found is None:
                self._to_board(Answer(call))
            else:
                self._end_held(found, drop)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _end(self, found: RecoverableRequest, fault: ErrorData) -> None:
        """End a request in an error: by its verdict if that is still waited for."""
        if found.is_accepted:
            self._tell(found, found.told.failed(decode_error(fault)))
        else:
            self._forget(found)
            self._to_board(Answer(found.call, fault=fault))

    def _tell(self, found: RecoverableRequest, event: EngineEvent) -> None:
        """Tell an event that comes from no engine."""
        found.told.note(event)
        if isinstance(event, TERMINAL):
            self._forget(found)
        self._to_board(Events((event,)))

    def _forget(self, found: RecoverableRequest) -> None:
        self._by_id.pop(found.id, None)
        self._by_call.pop(found.call, None)
