"""Events of a request, numbered 1, 2, 3, ... in `seq`, with one terminal event at the end.

Started --> Tokens, Beams, CandidateDone (any number) --> Finished or Failed
Embedding --> Finished or Failed, for a request with `pooling`
"""

from __future__ import annotations

import msgspec

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_CANCELLED = "cancelled"
STOP_DEAD_END = "constraint_dead_end"


def is_dead_end(finish_reason: str, stop_reason: str | int | None) -> bool:
    """Return whether a candidate was cut off because no token continues its text; a stop string may spell the same."""
    return finish_reason == FINISH_LENGTH and stop_reason == STOP_DEAD_END


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """The natural log-probability of a token under the raw logits, and the `top` alternatives."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class CacheMiss(msgspec.Struct, frozen=True):
    """Why the first uncached token of a prompt was not in the cache.

    The fields are those of `stats.Explanation`.
    """

    reason: str
    at_token: int
    detail: str
    page_size: int


class StartReport(msgspec.Struct, frozen=True):
    """Cache details of a request's start: pages copied on write, and its first cache miss."""

    num_copied_pages: int
    miss: CacheMiss | None


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The last token of the prompt was computed.

    `num_cached_tokens` of its tokens came from existing pages. `prompt_logprobs`, if requested, has one entry per
    prompt token from `prompt_logprobs_start` on; that of the first token is None, as no token predicts it. `report` is
    present if the request asked for it (`explain`).
    """

    request_id: str
    seq: int
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    report: StartReport | None = None


class Tokens(msgspec.Struct, frozen=True, tag="tokens", gc=False, omit_defaults=True):
    """New tokens of candidate `index`, in order.

    `logprobs` has one entry per token if requested, else none. `score`: the cumulative log-probability of a sampled
    candidate, from which another engine process can continue. `has_more`: the next event of the request was sent
    together with this one (only by engine workers).
    """

    request_id: str
    seq: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    score: float = 0.0
    has_more: bool = False


class LiveBeam(msgspec.Struct, frozen=True):
    """The newest token of a live beam, as a node of the token tree.

    `parent`: the node before it, 0 for the prompt. `score`: the sum of log-probabilities.
    """

    node: int
    parent: int
    token_id: int
    score: float


class Beams(msgspec.Struct, frozen=True, tag="beams"):
    """The live beams after one step, best first (`stream_beams`).

    A client builds the token tree from them. `has_more`: as in `Tokens`.
    """

    request_id: str
    seq: int
    beams: tuple[LiveBeam, ...]
    has_more: bool = False


class CandidateDone(msgspec.Struct, frozen=True, tag="done"):
    """Candidate `index` ended.

    `stop_reason` is the stop string or stop token id that matched, "constraint_dead_end" if no token continues the
    text within its grammar, else None. A stop token or EOS token that ended the candidate is included in its `Tokens`,
    so that the history is token-exact, and left out of its text. `score` is the cumulative log-probability (sampling)
    or the length-penalised beam score. `num_pages_freed`: pages freed by a dropped candidate (`finish_reason`
    "cancelled"), whose event may come before `Started`.
    """

    request_id: str
    seq: int
    index: int
    finish_reason: str
    stop_reason: str | int | None = None
    score: float = 0.0
    num_pages_freed: int = 0

    @property
    def is_result(self) -> bool:
        """Whether it was neither dropped nor cut off by a dead end of its grammar."""
        return self.finish_reason != FINISH_CANCELLED and not is_dead_end(self.finish_reason, self.stop_reason)


class Embedding(msgspec.Struct, frozen=True, tag="embedding", gc=False):
    """The embedding of the prompt: little-endian float32 of Euclidean length 1.

    A request that another engine process resumes may repeat it.
    """

    request_id: str
    seq: int
    values: bytes


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Terminal event: all candidates ended, or the request was cancelled.

    `num_output_tokens` counts the tokens of the returned candidates, and `num_computed_tokens` all tokens computed for
    this request, including discarded beams and recomputation. `num_pages_freed` is set for a cancelled request.
    """

    request_id: str
    seq: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_computed_tokens: int = 0
    cancelled: bool = False
    num_pages_freed: int = 0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Terminal event: the request ended with an error; the fields are those of `ChatcacheError`."""

    request_id: str
    seq: int
    message: str
    code: str = "engine_error"
    param: str | None = None
    status: int = 500


class SearchStep(msgspec.Struct, frozen=True, gc=False):
    """The choices of one step of a search (`Advance.record`), from which another engine process repeats the step.

    Not an event: it is sent to the supervising process only, before the events of the step.
    """

    request_id: str
    record: bytes


EngineEvent = Started | Tokens | Beams | CandidateDone | Embedding | Finished | Failed
TERMINAL = (Finished, Failed)
