"""How to generate: what a request asks of its candidates. Names and defaults are vLLM's where it has them, OpenAI's
where the wire decides.

What to continue: one prompt, and who asks.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import force_setattr

MAX_N = 64
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


MAX_PRIORITY = 2**11 - 1


class ForkPoint(msgspec.Struct, frozen=True):
    """Candidate `index` of a request that may still be running."""

    request_id: str
    index: int = 0


class SentCandidate(msgspec.Struct, frozen=True):
    """Candidate `index` as far as it was told: its tokens (little-endian int32), the score of its last `Tokens`."""

    index: int
    tokens: bytes = b""
    score: float = 0.0
    is_done: bool = False


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that has died told of a request, for the next one to go on behind event `last_seq`.

    `num_cached_tokens` as of `Started`, None if that was not told. `candidates`: all of them, once anything was.
    """

    last_seq: int = 0
    num_cached_tokens: int | None = None
    candidates: tuple[SentCandidate, ...] = ()


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
    resume_point: ResumePoint | None = None
