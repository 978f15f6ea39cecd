"""What a running request was told, as much of it as it takes for another engine to go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import pack

from msgspec.structs import replace

from chatcache.errors import ChatcacheError
from chatcache.types.events import FINISH_CANCELLED, CandidateDone, EngineEvent, Failed, Finished, Started, Tokens
from chatcache.types.params import SamplingParams
from chatcache.types.request import GenerateRequest, Resumed, ToldCandidate

_TOKEN_BYTES = 4


@dataclass(slots=True)
class _Candidate:
    tokens: bytearray = field(default_factory=bytearray)
    score: float = 0.0
    is_done: bool = False


class Told:
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
            ToldCandidate(index, bytes(each.tokens), each.score, each.is_done)
            for index, each in enumerate(self._candidates)
        )
        resumed = Resumed(
            last_seq=self.last_seq,
            num_cached_tokens=self._num_cached if self.has_started else None,
            candidates=tuple(candidates) if self.last_seq else (),
        )
        return replace(self.request, fork_of=None, resumed=resumed)

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
