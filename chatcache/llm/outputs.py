"""Outputs of a request, collected from its events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chatcache.conversations.replies.parser import TAIL_TOKENS, CandidateParser
from chatcache.conversations.tree import ToolCall
from chatcache.decoding.token_tree import NO_SCORE
from chatcache.errors import ChatcacheError, DeviceLostError, EngineError, InvalidRequestError
from chatcache.llm.prompts import EncodedPrompt
from chatcache.tokenizer.detokenizer import IncrementalDetokenizer
from chatcache.types.events import (
    TERMINAL,
    Beams,
    CandidateDone,
    Embedding,
    EngineEvent,
    Failed,
    Finished,
    LiveBeam,
    Started,
    TokenLogprob,
    Tokens,
)
from chatcache.types.request import BeamSearchParams, Params

if TYPE_CHECKING:
    from chatcache.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token.

    `rank` counts from 1; None for a token that is not among the requested alternatives.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobRow = dict[int, Logprob]
TokenText = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One candidate.

    `score` orders candidates: the cumulative log-probability, length-penalised for beams. `cumulative_logprob` is None
    for beams unless logprobs were requested. `logprobs` holds, per token, the chosen token and the alternatives by id.
    `text` is empty for a model without a tokenizer. With tools, `text` is the reply without its calls (`tool_calls`)
    and its `reasoning`. `finish_reason` is None for a candidate that has not ended.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[LogprobRow] | None
    finish_reason: str | None
    stop_reason: str | int | None
    score: float
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One beam in vLLM's form: `tokens` and `text` include the prompt.

    `cum_logprob`: the sum that the search ranks by, before the length penalty, as exact as the float32 score.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    logprobs: list[LogprobRow] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its candidates, best first for beams, `best_of` and `distinct`.

    `num_cached_tokens`: prompt tokens that were not recomputed. `prompt_logprobs`: per prompt token its own and the top
    log-probabilities by id, None for the first. `live_beams`: the live beams after each step, best first, if streamed.
    `sequences`: the found beams in vLLM's form, when a beam search has finished; None for other requests.
    `error`: why this request failed; `outputs` then holds the candidates, perhaps none, as far as they were generated.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    finished: bool = True
    prompt_logprobs: list[LogprobRow | None] | None = None
    live_beams: list[tuple[LiveBeam, ...]] | None = None
    sequences: list[BeamSearchSequence] | None = None
    error: ChatcacheError | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """An embedding of Euclidean length 1; empty for a prompt that failed."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """One prompt and its embedding. `num_cached_tokens`: prompt tokens that were not recomputed."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: ChatcacheError | None = None


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The cosine similarity of two texts; nan if one of them failed."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of texts and its score. `prompt_token_ids`, `num_cached_tokens`: of both texts."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: ChatcacheError | None = None

    @classmethod
    def of(cls, first: EmbeddingRequestOutput, second: EmbeddingRequestOutput) -> ScoringRequestOutput:
        """Return the score of two embedded texts."""
        pairs = zip(first.outputs.embedding, second.outputs.embedding, strict=False)
        error = first.error or second.error
        score = float("nan") if error is not None else max(-1.0, min(1.0, sum(a * b for a, b in pairs)))
        ids = first.prompt_token_ids + second.prompt_token_ids
        num_cached = first.num_cached_tokens + second.num_cached_tokens
        return cls(second.request_id, ScoringOutput(score), ids, num_cached, error=error)


class _Candidate:
    """One candidate as far as it was generated."""

    def __init__(
        self, index: int, prompt: EncodedPrompt, tokenizer: Tokenizer | None, token_text: TokenText | None
    ) -> None:
        self._index = index
        self._params = prompt.params
        self._token_text = token_text
        self._token_ids: list[int] = []
        self._logprobs: list[LogprobRow] | None = None if prompt.params.logprobs is None else []
        self._total = 0.0
        self._score = 0.0
        self._done: CandidateDone | None = None
        self._stream = _text_stream(prompt, tokenizer) if tokenizer is not None else None
        context = prompt.context
        self._parser = context.new_parser(prompt.token_ids) if context is not None else CandidateParser(None, 0, ())

    def push(self, event: Tokens) -> None:
        self._token_ids += event.token_ids
        self._score = event.score
        if self._logprobs is not None:
            rows = _logprob_rows(event.token_ids, event.logprobs, self._token_text)
            self._logprobs += [row for row in rows if row is not None]
            self._total += sum(scored.logprob for scored in event.logprobs)
        if self._stream is not None:
            self._parser.push(self._stream.push(event.token_ids))

    def finish(self, event: CandidateDone) -> None:
        self._done = event
        self._score = event.score
        if self._stream is not None:
            self._parser.push(self._stream.finish())
            self._parser.finish()

    def output(self) -> CompletionOutput:
        done, parts = self._done, self._parser.parts("")
        cumulative: float | None = self._score
        if isinstance(self._params, BeamSearchParams):
            cumulative = self._total if self._logprobs else None
        return CompletionOutput(
            index=self._index,
            text=self._parser.text,
            token_ids=list(self._token_ids),
            cumulative_logprob=cumulative,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=done.finish_reason if done else None,
            stop_reason=done.stop_reason if done else None,
            score=self._score,
            tool_calls=parts.tool_calls,
            reasoning=parts.reasoning,
        )


class Collector:
    """Collects the events of one request into its `RequestOutput`.

    `token_text` decodes one token for log-probabilities; None without a tokenizer.
    """

    def __init__(
        self, request_id: str, prompt: EncodedPrompt, tokenizer: Tokenizer | None, token_text: TokenText | None
    ) -> None:
        self.error: ChatcacheError | None = None
        self._request_id = request_id
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._token_text = token_text
        self._candidates: dict[int, _Candidate] = {}
        self._num_cached = 0
        self._prompt_logprobs: list[LogprobRow | None] | None = None
        self._live_beams: list[tuple[LiveBeam, ...]] = []
        self._finished = False

    def reject(self, error: ChatcacheError) -> None:
        """Record that the engine did not accept the request."""
        self.error, self._finished = error, True

    def take(self, event: EngineEvent) -> bool:
        """Record an event; return whether it was the last. A failure is stored in `error`."""
        match event:
            case Started():
                self._num_cached = event.num_cached_tokens
                if self._prompt.params.prompt_logprobs is not None:
                    rows = _logprob_rows(self._prompt.token_ids, event.prompt_logprobs, self._token_text)
                    self._prompt_logprobs = list(rows)
            case Beams():
                self._live_beams.append(event.beams)
            case Tokens():
                self._candidate(event.index).push(event)
            case CandidateDone():
                self._candidate(event.index).finish(event)
            case Failed():
                self.reject(error_of(event))
            case Finished():
                self._finished = True
        return self._finished

    def output(self) -> RequestOutput:
        """Return the output so far."""
        params = self._prompt.params
        with_beams = isinstance(params, BeamSearchParams) and params.stream_beams
        outputs = [candidate.output() for _, candidate in sorted(self._candidates.items())]
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt.text,
            prompt_token_ids=list(self._prompt.token_ids),
            outputs=outputs,
            num_cached_tokens=self._num_cached,
            finished=self._finished,
            prompt_logprobs=self._prompt_logprobs,
            live_beams=list(self._live_beams) if with_beams else None,
            sequences=self._sequences(outputs, params) if isinstance(params, BeamSearchParams) else None,
            error=self.error,
        )

    def _sequences(
        self, outputs: Sequence[CompletionOutput], params: BeamSearchParams
    ) -> list[BeamSearchSequence] | None:
        if not self._finished:
            return None
        prompt, ids = self._prompt.text, list(self._prompt.token_ids)
        if prompt is None:
            prompt = self._tokenizer.decode(ids) if self._tokenizer is not None else ""
        return [
            BeamSearchSequence(
                tokens=ids + each.token_ids,
                text=prompt + each.text,
                cum_logprob=each.score * len(each.token_ids) ** params.length_penalty,
                logprobs=each.logprobs,
                finish_reason=each.finish_reason,
                stop_reason=each.stop_reason,
            )
            for each in outputs
            if each.finish_reason is not None and each.score != NO_SCORE
        ]

    def _candidate(self, index: int) -> _Candidate:
        if index not in self._candidates:
            self._candidates[index] = _Candidate(index, self._prompt, self._tokenizer, self._token_text)
        return self._candidates[index]


class EmbeddingCollector:
    """Collects the events of one request with `pooling` into its `EmbeddingRequestOutput`."""

    def __init__(self, request_id: str, prompt: EncodedPrompt) -> None:
        self.error: ChatcacheError | None = None
        self._request_id = request_id
        self._prompt = prompt
        self._embedding: list[float] = []
        self._num_cached = 0

    def reject(self, error: ChatcacheError) -> None:
        """Record that the engine did not accept the request."""
        self.error = error

    def take(self, event: EngineEvent) -> bool:
        """Record an event; return whether it was the last. A failure is stored in `error`."""
        if isinstance(event, Embedding):
            self._embedding = np.frombuffer(event.values, "<f4").tolist()
        elif isinstance(event, Failed):
            self.reject(error_of(event))
        elif isinstance(event, Finished):
            self._num_cached = event.num_cached_tokens
        return isinstance(event, TERMINAL)

    def output(self) -> EmbeddingRequestOutput:
        """Return the embedding."""
        return EmbeddingRequestOutput(
            self._request_id,
            EmbeddingOutput(self._embedding),
            list(self._prompt.token_ids),
            self._num_cached,
            error=self.error,
        )


def error_of(event: Failed) -> ChatcacheError:
    """Return the error that ended a request.

    InvalidRequestError for one that was rejected after it was accepted (its grammar), EngineError otherwise.
    """
    fault = DeviceLostError if event.code == DeviceLostError.code else EngineError
    kind = InvalidRequestError if 400 <= event.status < 500 else fault
    return kind(event.message, code=event.code, param=event.param)


def _text_stream(prompt: EncodedPrompt, tokenizer: Tokenizer) -> IncrementalDetokenizer:
    params: Params = prompt.params
    return IncrementalDetokenizer(
        tokenizer,
        params.stop,
        params.include_stop_str_in_output,
        params.skip_special_tokens,
        prompt.token_ids[-TAIL_TOKENS:],
        stop_token_ids=(*tokenizer.eos_token_ids, *params.stop_token_ids),
        min_tokens=params.min_tokens,
        visible_ids=prompt.context.mark_ids if prompt.context is not None else (),
    )


def _logprob_rows(
    token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], token_text: TokenText | None
) -> Iterator[LogprobRow | None]:
    """Yield the row of each token: its own entry first, then the alternatives."""

    def entry(token: int, logprob: float, rank: int | None) -> Logprob:
        return Logprob(logprob, rank, token_text(token) if token_text is not None else None)

    for token, scored in zip(token_ids, entries, strict=True):
        if scored is None:
            yield None
            continue
        row = {other: entry(other, logprob, rank) for rank, (other, logprob) in enumerate(scored.top, start=1)}
        yield {token: row.pop(token, entry(token, scored.logprob, None)), **row}
