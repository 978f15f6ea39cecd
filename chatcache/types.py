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
MAX_PRIORITY = 2**11 - 1
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_PROMPT_LOGPROBS = 700_000  # prompt tokens x (alternatives + 1) of one request: what one answer carries


def _as_tuples(params: msgspec.Struct, *fields: str) -> None:
    """Let callers write `stop="x"`, `stop=["x"]` or `stop=None` where the field is a tuple."""
    for field in fields:
        value = getattr(params, field)
        if not isinstance(value, tuple):
            one = isinstance(value, str | int)
            force_setattr(params, field, () if value is None else (value,) if one else tuple(value))


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must match; exactly one field is set. Names as in vLLM.

    `json`: a JSON schema as text. `json_object`: any JSON object. `regex`: the whole output. `choice`: one of these
    texts. `grammar`: a context-free grammar in Lark's notation, which may name `special_token_ids` as `<[id]>`.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    special_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _as_tuples(self, "choice", "special_token_ids")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, tag="sampling"):
    """How to draw `n` candidates for one prompt.

    `temperature == 0` is greedy. `top_k` of 0 or -1, `top_p` of 1 and `min_p` of 0 each turn that filter off.
    `max_tokens=None` means as many as context and KV pool allow. Draws depend on (seed, candidate index, position)
    only; `seed=None` lets the engine pick one.

    Where `best_of` is more than `n`, that many candidates are drawn and the `n` with the best mean token
    log-probability (raw) returned, best first, at the end. `distinct` draws without replacement: no two candidates are
    equal, each score is the exact log-probability of its candidate (stochastic beam search, Kool et al. 2019).
    `prompt_logprobs`: how many top alternatives to report for every prompt token but the first.
    """

    n: int = 1
    best_of: int | None = None
    distinct: bool = False
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
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        _as_tuples(self, "stop", "stop_token_ids")


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, tag="beam"):
    """Beam search as `transformers.generate(num_beams=...)` defines it; returns the best `n` hypotheses.

    `early_stopping`: True stops at `beam_width` finished hypotheses, False when no live beam looks able to win at its
    present length, "never" when none can at any length. `n=None` returns all `beam_width`.

    `num_beam_groups` groups of beam_width / num_beam_groups beams search one after another in each step; a later group
    loses `diversity_penalty` for every time an earlier one chose a token in that step (Vijayakumar et al. 2018).
    `stream_beams` reports the live beams after every step (`Beams` events).
    """

    beam_width: int = 4
    n: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    stream_beams: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        _as_tuples(self, "stop", "stop_token_ids")


Params = SamplingParams | BeamSearchParams


def num_branches(params: Params) -> int:
    """Return how many branches the request may have alive at once."""
    if isinstance(params, BeamSearchParams):
        return params.beam_width
    return params.n if params.best_of is None else params.best_of


class ForkPoint(msgspec.Struct, frozen=True):
    """Candidate `index` of a request that may still be running."""

    request_id: str
    index: int = 0


class ToldCandidate(msgspec.Struct, frozen=True):
    """Candidate `index` as far as it was told: its tokens (little-endian int32), the score of its last `Tokens`."""

    index: int
    tokens: bytes = b""
    score: float = 0.0
    is_done: bool = False


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that has died told of a request, for the next one to go on behind event `last_seq`.

    `num_cached_tokens` as of `Started`, None if that was not told. `candidates`: all of them, once anything was.
    """

    last_seq: int = 0
    num_cached_tokens: int | None = None
    candidates: tuple[ToldCandidate, ...] = ()


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. `namespace` comes from the authenticated tenant on the server, never from a client.

    `num_public_tokens`: leading tokens (an operator-declared system prompt) whose full pages every namespace shares.
    `conversation_id` groups requests for accounting only. `priority`: smaller is served sooner (under
    `scheduling_policy="priority"`). `fork_of`: a hint that the prompt begins like that candidate, of the same
    namespace; while it runs its pages are forked as they are, else the hint changes nothing. `explain`: tell in
    `Started` what the start found in the cache, and why not more. `resumed`: it was accepted before, by an engine that
    died.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: Params
    namespace: str = ""
    num_public_tokens: int = 0
    conversation_id: str = ""
    priority: int = 0
    fork_of: ForkPoint | None = None
    explain: bool = False
    resumed: Resumed | None = None


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """Natural log-probability of the chosen token under the model's raw logits, and the `top` alternatives."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the rest of the house may know of a loaded model. `digest` (hex) seeds page keys: same weights, same key.

    `weight_bytes` are held, `step_bytes` of them are read by every step. `quantization`: none | int8.
    """

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
    quantization: str = "none"
    step_bytes: int = 0

    @property
    def precision(self) -> str:
        """What it computes with, for people: the dtype, and how weights are kept if otherwise."""
        return self.dtype if self.quantization == "none" else f"{self.dtype}, {self.quantization} weights"


class Miss(msgspec.Struct, frozen=True):
    """Why the first token of a prompt that misses does: fields as in `Explanation`."""

    reason: str
    at_token: int
    detail: str
    page_size: int


class StartReport(msgspec.Struct, frozen=True):
    """What a request's start took: pages copied before it wrote into them, and what missed when it was admitted."""

    num_copied_pages: int
    miss: Miss | None


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


class PageHit(msgspec.Struct, frozen=True):
    """One page of an explained prompt. `state`: held (by a running branch) | idle | host | partial | missing."""

    index: int
    num_tokens: int
    state: str
    public: bool = False


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What of a prompt is already computed, and why not more.

    `reason`, one of: "" (everything but the last token hits) | never_computed | evicted | other_namespace | diverged.
    `at_token`: the first token that misses. `detail`: a sentence for people. `diverged_tokens`: what the nearest cached
    continuation holds instead, from `at_token` on (of the caller's own namespace only).
    """

    num_tokens: int
    num_cached_tokens: int
    page_size: int
    pages: tuple[PageHit, ...]
    reason: str = ""
    at_token: int = -1
    detail: str = ""
    diverged_tokens: tuple[int, ...] = ()


class PackedPrompt(msgspec.Struct, frozen=True):
    """Token ids as little-endian int32, to be looked up many at a time. `num_public_tokens` as of a request."""

    tokens: bytes
    num_public_tokens: int = 0


class PageAccounts(msgspec.Struct, frozen=True, kw_only=True):
    """Pages held now, a page that k requests share charged 1/k to each; all sums equal `num_pages_in_use`.

    `conversations` and `namespaces` add up their requests ("" for requests that name none).
    """

    num_pages_in_use: int
    page_bytes: int
    requests: dict[str, float]
    conversations: dict[str, float]
    namespaces: dict[str, float]


class PageMap(msgspec.Struct, frozen=True, kw_only=True):
    """Every page in one letter (see `kv.page_map`), `num_pages_per_cell` to a letter: the busiest page's of a cell."""

    page_size: int
    num_pages: int
    num_pages_per_cell: int
    cells: str


# Bounds of the histograms that the engine keeps, and the gateway's of the same kind.
DURATION_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Durations(msgspec.Struct, frozen=True, array_like=True):
    """A histogram: how many lie up to each of `DURATION_BOUNDS_S` and above the one before, and how many beyond."""

    counts: tuple[int, ...] = (0,) * (len(DURATION_BOUNDS_S) + 1)
    total_s: float = 0.0


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What `/readyz`, `/metrics`, `chatcache bench` and the page show of the engine. Counters since start."""

    ready: bool
    detail: str = ""
    model: str = ""
    max_model_len: int = 0
    scheduling_policy: str = ""
    page_size: int = 0
    num_pages: int = 0
    num_pages_in_use: int = 0
    num_pages_idle: int = 0
    kv_bytes: int = 0
    num_pages_shared: int = 0
    waste_fraction: float = 0.0
    num_host_pages: int = 0
    num_host_pages_in_use: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    max_num_waiting: int = 0
    max_waiting_tokens: int = 0
    num_steps: int = 0
    num_steps_ahead: int = 0
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_pages_swapped_out: int = 0
    num_pages_swapped_in: int = 0
    num_page_copies: int = 0
    num_self_checks: int = 0
    num_broken_invariants: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_evictions: int = 0
    num_candidate_forks: int = 0
    num_beam_forks: int = 0
    num_live_forks: int = 0
    num_restarts: int = 0
    queue: Durations = Durations()
    prefill: Durations = Durations()
    decode: Durations = Durations()
    load_fraction: float = 0.0
