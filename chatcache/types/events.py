"""What a request is told, numbered 1, 2, 3, ...: exactly one terminal event ends it."""

from __future__ import annotations

import msgspec

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_CANCELLED = "cancelled"


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """Natural log-probability of the chosen token under the model's raw logits, and the `top` alternatives."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class CacheMiss(msgspec.Struct, frozen=True):
    """Why the first token of a prompt that misses does: fields as in `Explanation`."""

    reason: str
    at_token: int
    detail: str
    page_size: int


class StartReport(msgspec.Struct, frozen=True):
    """What a request's start took: pages copied before it wrote into them, and what missed when it was admitted."""

    num_copied_pages: int
    miss: CacheMiss | None


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The prompt's last token was computed. `num_cached_tokens` of the prompt came from existing pages.

    `prompt_logprobs`, if asked for: one entry per prompt token, None for the first (nothing predicts it). `report`: if
    asked for (`explain`).
    """

    request_id: str
    seq: int
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    report: StartReport | None = None


class Tokens(msgspec.Struct, frozen=True, tag="tokens", gc=False):
    """New tokens of candidate `index`, in order. `logprobs` is empty unless asked for, else one per token.

    `score`: of a sampled candidate, its cumulative log-probability so far, so that another engine can go on from here.
    """

    request_id: str
    seq: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    score: float = 0.0


class LiveBeam(msgspec.Struct, frozen=True):
    """A live beam's newest token: node `node` below `parent` (0 is the prompt). `score`: summed log-probability."""

    node: int
    parent: int
    token_id: int
    score: float


class Beams(msgspec.Struct, frozen=True, tag="beams"):
    """The live beams after one step, best first, if `stream_beams` was asked for. A client grows its tree by them."""

    request_id: str
    seq: int
    beams: tuple[LiveBeam, ...]


class CandidateDone(msgspec.Struct, frozen=True, tag="done"):
    """Candidate `index` ended. `stop_reason` is the stop string or stop token id that matched, else None.

    The stop token / EOS id itself, where one ended the candidate, is part of its `Tokens` (so history stays
    token-exact); `text` hides it. `score` is the cumulative log-probability (sampling) or the length-penalised
    beam score. `num_pages_freed`: by a candidate that was dropped (`finish_reason` "cancelled"), which may come before
    `Started`.
    """

    request_id: str
    seq: int
    index: int
    finish_reason: str
    stop_reason: str | int | None = None
    score: float = 0.0
    num_pages_freed: int = 0


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Terminal: all candidates ended, or the request was cancelled (`cancelled=True`, the receipt's figures filled).

    `num_output_tokens` counts the tokens of the returned candidates; `num_computed_tokens` those the engine computed
    for this request (beams that lost and recomputation included).
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
    """Terminal: the request ended in an error. Fields as in `ChatcacheError`."""

    request_id: str
    seq: int
    message: str
    code: str = "engine_error"
    param: str | None = None
    status: int = 500


EngineEvent = Started | Tokens | Beams | CandidateDone | Finished | Failed
TERMINAL = (Finished, Failed)
