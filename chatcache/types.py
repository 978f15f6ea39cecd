"""The words every room shares: what a caller asks of the engine and what the engine says back.

All are frozen msgspec structs, so the same objects cross a function call, a pipe and (later) a Redis stream
unchanged. Names and defaults are vLLM's where it has them, OpenAI's where the wire decides.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import force_setattr

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_CANCELLED = "cancelled"

MAX_N = 64
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16


def _as_tuples(params: msgspec.Struct, *fields: str) -> None:
    """Let callers write `stop="x"`, `stop=["x"]` or `stop=None` where the field is a tuple."""
    for field in fields:
        value = getattr(params, field)
        if not isinstance(value, tuple):
            one = isinstance(value, str | int)
            force_setattr(params, field, () if value is None else (value,) if one else tuple(value))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, tag="sampling"):
    """How to draw `n` candidates for one prompt.

    `temperature == 0` is greedy. `top_k` of 0 or -1, `top_p` of 1 and `min_p` of 0 each turn that filter off.
    `max_tokens=None` means as many as context and KV pool allow. Draws depend on (seed, candidate index, position)
    only; `seed=None` lets the engine pick one.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _as_tuples(self, "stop", "stop_token_ids")


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, tag="beam"):
    """Beam search as `transformers.generate(num_beams=...)` defines it; returns the best `n` hypotheses.

    `early_stopping`: True stops at `beam_width` finished hypotheses, False when no live beam looks able to win at its
    present length, "never" when none can at any length. `n=None` returns all `beam_width`.
    """

    beam_width: int = 4
    n: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _as_tuples(self, "stop", "stop_token_ids")


Params = SamplingParams | BeamSearchParams


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. `namespace` comes from the authenticated tenant on the server, never from a client."""

    request_id: str
    prompt: tuple[int, ...]
    params: Params
    namespace: str = ""


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural log-probability of the chosen token under the model's raw logits, and the `top` alternatives."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the rest of the house may know of a loaded model. `digest` (hex) seeds page keys: same weights, same key."""

    name: str
    digest: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    weight_bytes: int = 0
    num_parameters: int = 0
    dtype: str = ""
    device: str = "cpu"
    attention: str = ""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The prompt's last token was computed. `num_cached_tokens` of the prompt came from existing pages."""

    request_id: str
    seq: int
    num_prompt_tokens: int
    num_cached_tokens: int


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """New tokens of candidate `index`, in order. `logprobs` is empty unless asked for, else one per token."""

    request_id: str
    seq: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class CandidateDone(msgspec.Struct, frozen=True, tag="done"):
    """Candidate `index` ended. `stop_reason` is the stop string or stop token id that matched, else None.

    The stop token / EOS id itself, where one ended the candidate, is part of its `Tokens` (so history stays
    token-exact); `text` hides it. `score` is the cumulative log-probability (sampling) or the length-penalised
    beam score.
    """

    request_id: str
    seq: int
    index: int
    finish_reason: str
    stop_reason: str | int | None = None
    score: float = 0.0


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


EngineEvent = Started | Tokens | CandidateDone | Finished | Failed
TERMINAL = (Finished, Failed)


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What `/readyz`, `/metrics`, `chatcache bench` and the page show of the engine. Counters since start."""

    ready: bool
    detail: str = ""
    model: str = ""
    max_model_len: int = 0
    page_size: int = 0
    num_pages: int = 0
    num_pages_in_use: int = 0
    num_pages_idle: int = 0
    kv_bytes: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_page_copies: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    load_fraction: float = 0.0
