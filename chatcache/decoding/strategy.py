"""Build the decoding strategy of a request."""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.decoding.beam_search import BeamStrategy
from chatcache.decoding.grammar.compiler import GrammarFuture
from chatcache.decoding.grammar.state import Constraint
from chatcache.decoding.sampling import BestOfStrategy, SamplingStrategy
from chatcache.decoding.stopping import StopRules
from chatcache.decoding.unique import DistinctStrategy
from chatcache.types.actions import Strategy
from chatcache.types.request import BeamSearchParams, GenerateRequest
from chatcache.types.stats import ModelInfo


def make_strategy(
    request: GenerateRequest,
    facts: ModelInfo,
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
    rules = StopRules.of(params, facts, max_tokens=max_tokens, token_bytes=token_bytes)
    constraint = None if grammar_future is None else Constraint(grammar_future, rules)
    if isinstance(params, BeamSearchParams):
        return BeamStrategy(params, rules, vocab_size=facts.vocab_size, constraint=constraint)
    if params.distinct:
        return DistinctStrategy(
            params,
            rules,
            seed=seed % 2**64,
            prompt=request.prompt,
            vocab_size=facts.vocab_size,
            constraint=constraint,
        )
    lanes = SamplingStrategy(params, rules, seed=seed % 2**64, prompt=request.prompt, constraint=constraint)
    return lanes if lanes.max_branches == params.n else BestOfStrategy(lanes, params.n)
