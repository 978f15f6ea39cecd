"""What `LLM` returns, and how events become it. Field names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chatcache.errors import DeviceLost, EngineFault, InvalidRequest
from chatcache.types.events import (
    Beams,
    CandidateDone,
    EngineEvent,
    Failed,
    Finished,
    LiveBeam,
    Started,
    TokenLogprob,
    Tokens,
)
from chatcache.types.params import BeamSearchParams
from chatcache.types.request import GenerateRequest

if TYPE_CHECKING:
    from chatcache.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token; `rank` counts from 1, None where it lies beyond the alternatives asked for."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One candidate. `score` orders candidates: cumulative log-probability, length-penalised for beams.

    `cumulative_logprob` is None for beams unless logprobs were asked for. `logprobs` holds, per token, the chosen
    token and the alternatives by id. `text` is empty for a model without tokenizer.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None
    score: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its candidates, best first for beams, `best_of` and `distinct`.

    `num_cached_tokens` of the prompt were not recomputed. `prompt_logprobs`: per prompt token its own and the top
    tokens by id, None for the first. `live_beams`: the live beams after each step, best first, if they were streamed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    live_beams: list[tuple[LiveBeam, ...]] | None = None


@dataclass(slots=True)
class _Candidate:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    done: CandidateDone | None = None


class Collector:
    """Gathers one request's events into its output."""

    def __init__(self, request: GenerateRequest, prompt: str | None) -> None:
        self.request = request
        self._prompt = prompt
        self._candidates: dict[int, _Candidate] = {}
        self._num_cached = 0
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self._live_beams: list[tuple[LiveBeam, ...]] = []

    def take(self, event: EngineEvent) -> bool:
        """Note an event; True when it was the last.

        Raises: InvalidRequest for a request that turned out to be one, EngineFault for one that failed otherwise.
        """
        if isinstance(event, Started):
            self._num_cached = event.num_cached_tokens
            self._prompt_logprobs = event.prompt_logprobs
        elif isinstance(event, Beams):
            self._live_beams.append(event.beams)
        elif isinstance(event, Tokens):
            candidate = self._candidates.setdefault(event.index, _Candidate())
            candidate.token_ids += event.token_ids
            candidate.logprobs += event.logprobs
        elif isinstance(event, CandidateDone):
            self._candidates.setdefault(event.index, _Candidate()).done = event
        elif isinstance(event, Failed):
            fault = DeviceLost if event.code == DeviceLost.code else EngineFault
            kind = InvalidRequest if 400 <= event.status < 500 else fault
            raise kind(event.message, code=event.code, param=event.param)
        return isinstance(event, Finished)

    def output(self, tokenizer: Tokenizer | None) -> RequestOutput:
        params, prompt = self.request.params, self.request.prompt
        asked = params.prompt_logprobs is not None
        watched = isinstance(params, BeamSearchParams) and params.stream_beams
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.request.prompt),
            outputs=[self._completion(index, tokenizer) for index in sorted(self._candidates)],
            num_cached_tokens=self._num_cached,
            prompt_logprobs=_logprobs(prompt, self._prompt_logprobs, tokenizer) if asked else None,
            live_beams=self._live_beams if watched else None,
        )

    def _completion(self, index: int, tokenizer: Tokenizer | None) -> CompletionOutput:
        candidate = self._candidates[index]
        done = candidate.done
        score = done.score if done else 0.0
        cumulative: float | None = score
        if isinstance(self.request.params, BeamSearchParams):
            cumulative = sum(each.logprob for each in candidate.logprobs) if candidate.logprobs else None
        asked = self.request.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=self._text(candidate, tokenizer) if tokenizer else "",
            token_ids=candidate.token_ids,
            cumulative_logprob=cumulative,
            logprobs=_candidate_logprobs(candidate, tokenizer) if asked else None,
            finish_reason=done.finish_reason if done else None,
            stop_reason=done.stop_reason if done else None,
            score=score,
        )

    def _text(self, candidate: _Candidate, tokenizer: Tokenizer) -> str:
        from chatcache.text.stream import TextStream

        params = self.request.params
        stream = TextStream(
            tokenizer,
            params.stop,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            self.request.prompt[-8:],
            stop_token_ids=(*tokenizer.eos_token_ids, *params.stop_token_ids),
            min_tokens=params.min_tokens,
        )
        stream.push(candidate.token_ids)
        stream.finish()
        return stream.text


def _candidate_logprobs(candidate: _Candidate, tokenizer: Tokenizer | None) -> list[dict[int, Logprob]]:
    rows = _logprobs(candidate.token_ids, candidate.logprobs, tokenizer)
    return [row for row in rows if row is not None]


def _logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], tokenizer: Tokenizer | None
) -> list[dict[int, Logprob] | None]:
    def entry(token: int, logprob: float, rank: int | None) -> Logprob:
        text = tokenizer.decode([token], skip_special_tokens=False) if tokenizer else None
        return Logprob(logprob, rank, text)

    rows: list[dict[int, Logprob] | None] = []
    for token, scored in zip(token_ids, entries, strict=True):
        if scored is None:
            rows.append(None)
            continue
        row = {other: entry(other, logprob, rank) for rank, (other, logprob) in enumerate(scored.top, start=1)}
        rows.append({token: row.pop(token, entry(token, scored.logprob, None)), **row})
    return rows
