"""Wire fields -> the engine's parameters. What a mode cannot honour is refused by name, never dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from chatcache.errors import InvalidRequest, UnsupportedParameter
from chatcache.gateway.wire import CompletionBase, ConversationRef, SamplingFields
from chatcache.types.params import BeamSearchParams, Params, SamplingParams, StructuredOutputs

Number = TypeVar("Number", int, float)

# What a sampling field must be, if given, for beam search to mean what the client asked.
_NEUTRAL_FOR_BEAMS: Mapping[str, tuple[object, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "distinct": (False,),
    "best_of": (1,),
}
# And what a beam field must be, if given, for sampling to mean it.
_NEUTRAL_FOR_SAMPLING: Mapping[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "early_stopping": (False,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
}


class Asked(NamedTuple):
    """What every route spells in its own way."""

    max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    stream_beams: bool = False


def to_params(fields: SamplingFields, asked: Asked, vocab_size: int) -> Params:
    """Build the engine's parameters. Raises: InvalidRequest, UnsupportedParameter."""
    max_tokens = asked.max_tokens
    if fields.min_tokens is not None and max_tokens is not None and fields.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens must be at most max_tokens ({max_tokens})", param="min_tokens")
    check_tokens(fields.stop_token_ids or (), vocab_size, "stop_token_ids")
    if fields.beam_width is not None or fields.use_beam_search:
        return _beams(fields, asked)
    for name, neutral in _NEUTRAL_FOR_SAMPLING.items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            raise UnsupportedParameter(f"{name} is for beam search (beam_width)", param=name)
    if asked.stream_beams:
        raise UnsupportedParameter("stream_beams is for beam search (beam_width)", param="stream_beams")
    if fields.best_of is not None and fields.best_of < _or(fields.n, 1):
        raise InvalidRequest(f"best_of must be at least n ({_or(fields.n, 1)})", param="best_of")
    return SamplingParams(
        n=_or(fields.n, 1),
        best_of=fields.best_of,
        distinct=bool(fields.distinct),
        temperature=_or(fields.temperature, 1.0),
        top_p=_or(fields.top_p, 1.0),
        top_k=_or(fields.top_k, 0),
        min_p=_or(fields.min_p, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        logit_bias=_logit_bias(fields.logit_bias, vocab_size),
        seed=fields.seed,
        **_common(fields, asked),
    )


def _common(fields: SamplingFields, asked: Asked) -> dict[str, Any]:
    """What sampling and beam search have in common."""
    return {
        "max_tokens": asked.max_tokens,
        "min_tokens": _or(fields.min_tokens, 0),
        "stop": _stops(fields),
        "stop_token_ids": tuple(fields.stop_token_ids or ()),
        "include_stop_str_in_output": bool(fields.include_stop_str_in_output),
        "ignore_eos": bool(fields.ignore_eos),
        "skip_special_tokens": fields.skip_special_tokens is not False,
        "logprobs": asked.logprobs,
        "prompt_logprobs": asked.prompt_logprobs,
        "structured_outputs": asked.structured_outputs,
    }


def _beams(fields: SamplingFields, asked: Asked) -> BeamSearchParams:
    for name, neutral in _NEUTRAL_FOR_BEAMS.items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            raise UnsupportedParameter(f"{name} has no meaning in beam search; leave it out", param=name)
    if fields.beam_width is not None:
        width, num_returned = fields.beam_width, _or(fields.n, 1)
    else:
        width = num_returned = _or(fields.n, 1)
    if num_returned > width:
        raise InvalidRequest(f"n must be at most beam_width ({width})", param="n")
    return BeamSearchParams(
        beam_width=width,
        n=num_returned,
        length_penalty=_or(fields.length_penalty, 1.0),
        early_stopping=fields.early_stopping if fields.early_stopping is not None else False,
        num_beam_groups=_or(fields.num_beam_groups, 1),
        diversity_penalty=_or(fields.diversity_penalty, 0.0),
        stream_beams=asked.stream_beams,
        **_common(fields, asked),
    )


def check_stream(base: CompletionBase, sampling: SamplingFields) -> None:
    """Refuse to stream what is only known at the end. Raises: UnsupportedParameter."""
    if not base.stream:
        return
    if sampling.best_of is not None and sampling.best_of > _or(sampling.n, 1):
        raise UnsupportedParameter("best_of cannot be streamed: which are best is known at the end", param="best_of")
    if base.prompt_logprobs is not None:
        raise UnsupportedParameter("prompt_logprobs cannot be streamed", param="prompt_logprobs")


@contextlib.contextmanager
def known_as(**names: str | None) -> Iterator[None]:
    """Rename the engine's fields in refusals to what the client called them (None: as they are)."""
    try:
        yield
    except InvalidRequest as error:
        error.param = names.get(error.param or "") or error.param
        raise


def conversation_id(conversation: str | ConversationRef | None) -> str | None:
    """The id of a `conversation` field, however it was written."""
    return conversation.id if isinstance(conversation, ConversationRef) else conversation


def check_tokens(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises: InvalidRequest unless all are ids of the model. Fast: there may be a million."""
    if tokens:
        check_token(min(tokens), vocab_size, param)
        check_token(max(tokens), vocab_size, param)


def check_token(token: int, vocab_size: int, param: str) -> None:
    """Raises: InvalidRequest unless `token` is an id of the model."""
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"{param}: token ids must be between 0 and {vocab_size - 1}, got {token}", param=param)


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
        check_token(int(key), vocab_size, "logit_bias")
        found[int(key)] = value
    return found


def _stops(fields: SamplingFields) -> tuple[str, ...]:
    if fields.stop is None:
        return ()
    return (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)


def _or(value: Number | None, default: Number) -> Number:
    return value if value is not None else default
