"""Validate the decoding parameters of a request and build its strategy."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from chatcache.decoding.beam_search import BeamStrategy
from chatcache.decoding.grammar.compiler import GrammarFuture, check_structured_outputs
from chatcache.decoding.grammar.state import Constraint
from chatcache.decoding.sampling import BestOfStrategy, SamplingStrategy
from chatcache.decoding.stopping import StopRules
from chatcache.decoding.unique import DistinctStrategy
from chatcache.errors import InvalidRequestError
from chatcache.types.actions import Strategy
from chatcache.types.request import (
    ALL_LOGPROBS,
    MAX_BRANCHES,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    BeamSearchParams,
    GenerateRequest,
    Params,
    SamplingParams,
    ThinkingMarks,
    format_value,
)
from chatcache.types.stats import ModelInfo


def make_strategy(
    request: GenerateRequest,
    model_info: ModelInfo,
    *,
    seed: int,
    max_tokens: int,
    token_bytes: Sequence[bytes] | None,
    grammar_future: GrammarFuture | None = None,
) -> Strategy:
    """Build the strategy of a request whose parameters `validate_params` has accepted.

    `seed` and `max_tokens` are resolved values (`params` may hold None); a negative seed is taken modulo 2**64.
    `token_bytes[id]`: bytes that a token adds to the text, needed for stop strings only. `grammar_future`: grammar of
    the output; draws may be requested once it is ready.

    Raises: InvalidRequestError for stop strings without `token_bytes`.
    """
    params = request.params
    if params.logprobs == ALL_LOGPROBS:
        params = replace(params, logprobs=model_info.vocab_size)
    if isinstance(params, SamplingParams) and params.top_k >= model_info.vocab_size:
        params = replace(params, top_k=0)
    rules = StopRules.of(params, model_info, max_tokens=max_tokens, token_bytes=token_bytes, prompt=request.prompt)
    constraint = None if grammar_future is None else Constraint(grammar_future, rules)
    if isinstance(params, BeamSearchParams):
        return BeamStrategy(
            params, rules, prompt=request.prompt, vocab_size=model_info.vocab_size, constraint=constraint
        )
    if params.distinct:
        return DistinctStrategy(
            params,
            rules,
            seed=seed % 2**64,
            prompt=request.prompt,
            vocab_size=model_info.vocab_size,
            constraint=constraint,
        )
    lanes = SamplingStrategy(params, rules, seed=seed % 2**64, prompt=request.prompt, constraint=constraint)
    return lanes if lanes.max_branches == params.n else BestOfStrategy(lanes, params.n)


MAX_TOKENS = 2**31 - 1
MAX_TOP_K = 2**31 - 1  # more than the vocabulary keeps every token
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 1e-3  # a smaller divisor overflows the logit
MAX_REPETITION_PENALTY = 10.0
MAX_LENGTH_PENALTY = 10.0
MAX_DIVERSITY_PENALTY = 100.0
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 256


def validate_params(params: Params, vocab_size: int) -> None:
    """Check the types and bounds of sampling or beam search parameters.

    Raises: InvalidRequestError with the field in `param` and the field and its limit in the message.
    """
    if isinstance(params, BeamSearchParams):
        _validate_beams(params)
    elif isinstance(params, SamplingParams):
        _validate_sampling(params)
    else:
        raise InvalidRequestError(f"params must be SamplingParams or BeamSearchParams, got {type(params).__name__}")
    _validate_shared(params, vocab_size)


def _validate_sampling(params: SamplingParams) -> None:
    check_integer("n", params.n, 1, MAX_BRANCHES)
    if params.best_of is not None:
        check_integer("best_of", params.best_of, params.n, MAX_BRANCHES, what=f"(with n {params.n})")
    _check_number("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    _check_number("top_p", params.top_p, 0.0, 1.0, open_low=True)
    check_integer("top_k", params.top_k, -1, MAX_TOP_K)
    _check_number("min_p", params.min_p, 0.0, 1.0)
    if params.seed is not None:
        check_seed(params.seed)
    _validate_distinct(params)


def _validate_distinct(params: SamplingParams) -> None:
    check_bool("distinct", params.distinct)
    if params.distinct and params.temperature == 0.0:
        raise InvalidRequestError("distinct needs a temperature greater than 0, got 0", param="distinct")
    if params.distinct and params.best_of is not None:
        raise InvalidRequestError(
            "distinct and best_of exclude each other: distinct candidates come ranked as they were drawn, "
            "to choose among them by likelihood would no longer be a sample without replacement",
            param="best_of",
        )


def _validate_beams(params: BeamSearchParams) -> None:
    check_integer("beam_width", params.beam_width, 1, MAX_BRANCHES)
    _validate_groups(params)
    check_bool("stream_beams", params.stream_beams)
    if params.n is not None:
        check_integer("n", params.n, 1, params.beam_width)
    _check_number("length_penalty", params.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        raise InvalidRequestError(
            f'early_stopping must be true, false or "never", got {format_value(params.early_stopping)}',
            param="early_stopping",
        )


def _validate_groups(params: BeamSearchParams) -> None:
    check_integer("num_beam_groups", params.num_beam_groups, 1, params.beam_width)
    if params.beam_width % params.num_beam_groups:
        raise InvalidRequestError(
            f"num_beam_groups must divide beam_width ({params.beam_width}), got {params.num_beam_groups}",
            param="num_beam_groups",
        )
    _check_number("diversity_penalty", params.diversity_penalty, 0.0, MAX_DIVERSITY_PENALTY)
    if params.diversity_penalty > 0.0 and params.num_beam_groups == 1:
        raise InvalidRequestError(
            "diversity_penalty needs num_beam_groups of at least 2: it acts between groups", param="diversity_penalty"
        )


def _validate_shared(params: Params, vocab_size: int) -> None:
    if params.max_tokens is not None:
        check_integer("max_tokens", params.max_tokens, 1, MAX_TOKENS)
    check_integer("min_tokens", params.min_tokens, 0, MAX_TOKENS if params.max_tokens is None else params.max_tokens)
    for name, least in (("logprobs", ALL_LOGPROBS), ("prompt_logprobs", 0)):
        value = getattr(params, name)
        if value is not None:
            check_integer(name, value, least, MAX_TOP_LOGPROBS)
    _validate_logit_changes(params, vocab_size)
    _validate_thinking(params, vocab_size)
    if params.structured_outputs is not None:
        check_structured_outputs(params.structured_outputs)
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
        check_bool(name, getattr(params, name))
    _check_length("stop", params.stop, "strings", MAX_STOP_STRINGS)
    for text in params.stop:
        _check_stop_string(text)
    _check_length("stop_token_ids", params.stop_token_ids, "ids", MAX_STOP_TOKEN_IDS)
    for token in params.stop_token_ids:
        check_integer("stop_token_ids", token, 0, vocab_size - 1, what="entry")


def _validate_thinking(params: Params, vocab_size: int) -> None:
    name, marks = "thinking_token_budget", params.thinking_marks
    if not isinstance(marks, ThinkingMarks | None):
        raise InvalidRequestError("thinking_marks must be a ThinkingMarks", param="thinking_marks")
    if params.thinking_token_budget is None:
        return
    check_integer(name, params.thinking_token_budget, 0, MAX_TOKENS)
    if marks is None:
        raise InvalidRequestError(f"{name} needs a model whose reasoning has known markers", param=name)
    if not (marks.opening and marks.closing and marks.closing_ids):
        raise InvalidRequestError("thinking_marks must have markers", param="thinking_marks")
    for token in marks.closing_ids:
        check_integer("thinking_marks", token, 0, vocab_size - 1, what="entry")
    check_integer("thinking_marks", marks.num_prefix_tokens, 0, MAX_TOKENS, what="num_prefix_tokens")


def _validate_logit_changes(params: Params, vocab_size: int) -> None:
    _check_number("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    _check_number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check_number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    if params.logit_bias is not None:
        if not isinstance(params.logit_bias, dict):
            raise InvalidRequestError("logit_bias must be a map from token id to bias", param="logit_bias")
        _check_length("logit_bias", params.logit_bias, "entries", MAX_LOGIT_BIAS_ENTRIES)
        for token, bias in params.logit_bias.items():
            check_integer("logit_bias", token, 0, vocab_size - 1, what="token id")
            _check_number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, what=f"of token {token}")
    check_integer("no_repeat_ngram_size", params.no_repeat_ngram_size, 0, MAX_TOKENS)
    if params.bad_words:
        raise InvalidRequestError("bad_words need a model with a tokenizer; pass bad_words_ids", param="bad_words")
    _check_length("bad_words_ids", params.bad_words_ids, "sequences", MAX_BAD_WORDS)
    for sequence in params.bad_words_ids:
        if not 1 <= len(sequence) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"bad_words_ids must have 1 to {MAX_BAD_WORD_TOKENS} token ids each, got {len(sequence)}",
                param="bad_words_ids",
            )
        for token in sequence:
            check_integer("bad_words_ids", token, 0, vocab_size - 1, what="token id")
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must have at least 1 id", param="allowed_token_ids")
        for token in params.allowed_token_ids:
            check_integer("allowed_token_ids", token, 0, vocab_size - 1, what="entry")


def check_bool(name: str, value: object) -> None:
    """Raise InvalidRequestError unless the value is a bool."""
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false, got {format_value(value)}", param=name)


def check_seed(value: object) -> None:
    """Raise InvalidRequestError unless the value is an integer of 64 bits, with or without a sign."""
    check_integer("seed", value, -(2**63), 2**64 - 1)


def check_integer(name: str, value: object, low: int, high: int, *, what: str = "") -> None:
    """Raise InvalidRequestError unless the value is an integer between `low` and `high`."""
    label = f"{name} {what}".strip()
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{label} must be an integer, got {value!r:.100}", param=name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{label} must be between {low} and {high}, got {format_value(value)}", param=name)


def _check_number(name: str, value: object, low: float, high: float, *, open_low: bool = False, what: str = "") -> None:
    label = f"{name} {what}".strip()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{label} must be a number, got {value!r:.100}", param=name)
    if not (low <= value <= high) or (open_low and value == low) or not math.isfinite(value):
        bounds = f"greater than {low:g} and at most {high:g}" if open_low else f"between {low:g} and {high:g}"
        raise InvalidRequestError(f"{label} must be {bounds}, got {format_value(value)}", param=name)


def _check_length(name: str, value: Collection[object], noun: str, limit: int) -> None:
    if len(value) > limit:
        raise InvalidRequestError(f"{name} must have at most {limit} {noun}, got {len(value)}", param=name)


def _check_stop_string(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError(f"stop must be a list of strings, got {type(text).__name__}", param="stop")
    if not 1 <= len(text) <= MAX_STOP_CHARS:
        raise InvalidRequestError(
            f"stop strings must have 1 to {MAX_STOP_CHARS} characters, got {len(text)}", param="stop"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "stop strings must be valid Unicode (a lone surrogate was found)", param="stop"
        ) from None
