"""Generation requests and their parameters.

Names and defaults are those of vLLM where it has them, and those of the OpenAI API where the protocol requires it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from chatcache.errors import InvalidRequestError

MAX_N = 64  # candidates of one request to a server
MAX_BRANCHES = 1024  # candidates or beams of one request to an engine
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
ALL_LOGPROBS = -1  # `logprobs` of the whole vocabulary
MAX_PROMPT_LOGPROBS = 700_000  # prompt tokens x (alternatives + 1): the most that one response carries
MAX_OUTPUT_LOGPROBS = 300_000  # max_tokens x candidates x (alternatives + 1): likewise


def _as_tuples(params: msgspec.Struct, *fields: str) -> None:
    """Convert fields to tuples, so that `stop="x"`, `stop=["x"]` and `stop=None` are accepted.

    Raises: InvalidRequestError for a value that is not iterable, and for bytes and mappings.
    """
    for field in fields:
        value = getattr(params, field)
        if not isinstance(value, tuple):
            one = isinstance(value, str | int)
            force_setattr(params, field, () if value is None else (value,) if one else _as_tuple(field, value))


def _as_tuple(field: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise InvalidRequestError(f"{field} must be a list, got {format_value(value)}", param=field)
    return tuple(value)


def format_value(value: object) -> str:
    """Format an invalid value in bounded space (an integer may have 10^4 digits)."""
    is_huge = isinstance(value, int) and value.bit_length() > 128
    return "a far larger number" if is_huge else f"{value!r:.100}"


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """The constraint that the output must match; exactly one field is set. Names as in vLLM.

    `json`: a JSON schema as text; a dict is converted. `json_object`: any JSON object. `regex`: matches the whole
    output. `choice`: one of these texts. `grammar`: a context-free grammar in Lark's notation, which can refer to
    `special_token_ids` as `<[id]>`.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    special_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _as_tuples(self, "choice", "special_token_ids")
        if isinstance(self.json, dict | bool):
            try:
                force_setattr(self, "json", json.dumps(self.json))
            except (TypeError, ValueError, RecursionError) as error:
                message = f"structured_outputs.json is not JSON: {error!s:.200}"
                raise InvalidRequestError(message, param="structured_outputs") from None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> StructuredOutputs:
        """Build the constraint from a dict of its fields. Raises: InvalidRequestError for an unknown field."""
        names = [name for name in cls.__struct_fields__ if name != "special_token_ids"]
        if unknown := [name for name in fields if name not in names]:
            message = f"structured_outputs has no field {unknown[0]!r:.40}; its fields are {', '.join(names)}"
            raise InvalidRequestError(message, param="structured_outputs")
        return cls(**fields)


class ThinkingMarks(msgspec.Struct, frozen=True, kw_only=True):
    """How a model marks its reasoning, for the enforcement of a thinking budget.

    `opening`, `closing`: texts around the reasoning block. `closing_ids`: the tokens that end it, which may include
    white space around the closing text. `is_open`: the prompt opens the block. `num_prefix_tokens`: how many tokens at
    the end of the prompt belong to the reply already.
    """

    opening: str
    closing: str
    closing_ids: tuple[int, ...]
    is_open: bool = False
    num_prefix_tokens: int = 0


class DecodingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that sampling and beam search have in common.

    `max_tokens=None` allows as many tokens as the context and the KV pool permit. Penalties, biases and bans change the
    logits of a draw; in beam search they change the log-softmax, which is not normalised again, as in `transformers`.

    `no_repeat_ngram_size`: no n-gram of this size occurs twice in prompt and output; 0 allows it. `bad_words`: texts
    that must not occur in the output, tokenised with and without a leading space; the engine reads `bad_words_ids`,
    their token ids. `allowed_token_ids`: only these tokens can be generated. `logprobs`: how many top alternatives to
    report for each token; -1 for the whole vocabulary. `prompt_logprobs`: the same for each prompt token except the
    first. `thinking_token_budget`: how many tokens the reasoning may have before it is ended; the engine reads
    `thinking_marks` in addition.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    no_repeat_ngram_size: int = 0
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
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
    thinking_token_budget: int | None = None
    thinking_marks: ThinkingMarks | None = None

    def __post_init__(self) -> None:
        _as_tuples(self, "stop", "stop_token_ids", "bad_words")
        if isinstance(self.structured_outputs, dict):
            force_setattr(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        words = _as_tuple("bad_words_ids", self.bad_words_ids)
        force_setattr(self, "bad_words_ids", tuple(_as_tuple("bad_words_ids", ids) for ids in words))
        if self.allowed_token_ids is not None:
            _as_tuples(self, "allowed_token_ids")


class SamplingParams(DecodingParams, frozen=True, kw_only=True, tag="sampling"):
    """How to sample `n` candidates for one prompt.

    `temperature == 0` is greedy. `top_k` of 0 or -1, `top_p` of 1 and `min_p` of 0 each disable that filter. Sampled
    tokens depend on (seed, candidate index, position) only; with `seed=None` see `seed_of`.

    If `best_of` is more than `n`, that many candidates are sampled, and the `n` with the best mean raw log-probability
    per token are returned at the end, best first. `distinct` samples without replacement: no two candidates are equal,
    and each score is the exact log-probability of its candidate (stochastic beam search, Kool et al. 2019).
    """

    n: int = 1
    best_of: int | None = None
    distinct: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None


class BeamSearchParams(DecodingParams, frozen=True, kw_only=True, tag="beam"):
    """Beam search as defined by `transformers.generate(num_beams=...)`.

    Returns the best `n` hypotheses. `early_stopping`: True stops at `beam_width` finished hypotheses, False when no
    live beam can win at its present length, "never" when none can win at any length. `n=None` returns all `beam_width`
    hypotheses.

    The beams are divided into `num_beam_groups` groups, which are searched one after another in each step. A token's
    score is reduced by `diversity_penalty` for every time that an earlier group chose it in the same step
    (diverse beam search, Vijayakumar et al. 2018).
    `stream_beams` reports the live beams after every step (`Beams` events).
    """

    beam_width: int = 4
    n: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    stream_beams: bool = False


Params = SamplingParams | BeamSearchParams


def num_branches(params: Params) -> int:
    """Return how many branches a request with these parameters can have at once."""
    if isinstance(params, BeamSearchParams):
        return params.beam_width
    return params.n if params.best_of is None else params.best_of


def num_gang_branches(params: Params) -> int:
    """Return how many branches need their pages together: all beams or distinct candidates, else one."""
    is_gang = isinstance(params, BeamSearchParams) or params.distinct
    return num_branches(params) if is_gang else 1


MAX_PRIORITY = 2**11 - 1


class ForkPoint(msgspec.Struct, frozen=True):
    """A candidate of another request, whose pages may be shared.

    `index`: its number. The request may still be running.
    """

    request_id: str
    index: int = 0


class SentCandidate(msgspec.Struct, frozen=True):
    """The tokens of a candidate that were sent to the client before the engine process failed.

    `tokens`: little-endian int32. `score`: the last one sent. `has_result`: it is done, and `CandidateDone.is_result`.
    """

    index: int
    tokens: bytes = b""
    score: float = 0.0
    is_done: bool = False
    has_result: bool = False


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a failed engine process sent for a request, so that the next process continues it.

    `last_seq`: number of the last event. `num_cached_tokens`: as in `Started`, None if that event was not sent.
    `candidates`: all candidates of plain sampling, or none if no token was sent. `steps`: the records of all steps of a
    search (beams, best_of, distinct) so far.
    """

    last_seq: int = 0
    num_cached_tokens: int | None = None
    candidates: tuple[SentCandidate, ...] = ()
    steps: tuple[bytes, ...] = ()


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to embed a prompt. Names as in vLLM.

    `dimensions`: keep only so many leading dimensions of the embedding, which is then normalised again.
    """

    dimensions: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue, and how.

    `pooling`: embed the prompt instead, by the model's kind of pooling; `params` then have no effect.

    `namespace`: the cache namespace of the authenticated tenant, set by the server and never by a client.
    `cache_salt`: set by the client; within the namespace only requests with the same salt share private pages.
    `num_public_tokens`: leading tokens (a shared system prompt) whose full pages all namespaces share.
    `conversation_id`: groups requests in statistics only. `priority`: smaller is served sooner, with
    `scheduling_policy="priority"`. `fork_of`: a hint that the prompt has the same first tokens as that candidate, of
    the same namespace; if its request is running, its pages are forked, otherwise the hint has no effect.
    `explain`: report in `Started` what the request found in the cache, and why not more. `resume_point`: set if a
    failed engine process had accepted the request before. `prompt_logprobs_start`: the first prompt token whose
    log-probability is reported; those before it may come from the cache.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: Params = SamplingParams()
    pooling: PoolingParams | None = None
    namespace: str = ""
    cache_salt: str = ""
    num_public_tokens: int = 0
    conversation_id: str = ""
    priority: int = 0
    fork_of: ForkPoint | None = None
    explain: bool = False
    resume_point: ResumePoint | None = None
    prompt_logprobs_start: int = 0


def seed_of(request: GenerateRequest, base: int) -> int:
    """Return the request's seed; without one, a hash of `base` and the request id."""
    seed: int | None = getattr(request.params, "seed", None)
    if seed is not None:
        return seed
    name = f"{base} {request.request_id}".encode("utf-8", "replace")
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
