"""Sampling of the fake runner in numpy, as `types.plan.Draws` defines it.

Shapes: V vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatcache.types.plan import F32, I32, U64, Draws, LogitEdit, LogitMask

_STEP, _FIRST, _SECOND = 0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB
_WORD = 2**64 - 1


def mix(values: U64) -> U64:
    """Scatter the bits of each value (finaliser of splitmix64, Steele et al. 2014)."""
    x = values + np.uint64(_STEP)  # arrays wrap around without a word
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def mix_one(value: int) -> int:
    """Scatter the bits of one value, truncated to 64 bits."""
    x = value + _STEP & _WORD
    x = (x ^ x >> 30) * _FIRST & _WORD
    x = (x ^ x >> 27) * _SECOND & _WORD
    return x ^ x >> 31


def log_softmax(logits: F32) -> F32:
    """Return log-probabilities [V], summed in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    result: F32 = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
    return result


def top_candidates(logprobs: F32, width: int) -> tuple[I32, F32]:
    """Return the `width` most likely ids and log-probabilities, ties to the lower id."""
    order = np.argsort(-logprobs, kind="stable")[:width]
    return order.astype(np.int32), logprobs[order]


def allowed_logits(raw: F32, edit: LogitEdit | None, mask: LogitMask | None) -> F32:
    """Return the logits [V] of a draw: edited, and -inf where the mask has no bit."""
    logits = raw.copy()
    if edit is not None:
        known = edit.table[(edit.table["ids"] >= 0) & (edit.table["ids"] < len(logits))]  # an EOS id may lie beyond
        ids, scale = known["ids"], known["scale"]
        logits[ids] = np.where(logits[ids] > 0, logits[ids] / scale, logits[ids] * scale) + known["add"]
    if mask is not None:
        bits = np.unpackbits(mask.words.astype("<u4").view(np.uint8), bitorder="little")[: len(logits)].astype(bool)
        logits[: len(bits)][~bits] = -np.inf
        logits[len(bits) :] = -np.inf
    return logits


def draw_greedily_or_not(logits: F32, draws: Draws, draw: int) -> int:
    """Sample one id, or take the most likely one at temperature 0.

    Order: temperature, top-k, top-p and min-p, then Gumbel noise keyed by (seed, lane, position).
    """
    if draws.temperature[draw] == 0.0:
        return int(np.argmax(logits))
    ids, _, _ = draw_without_replacement(logits, draws, draw, 1)
    return int(ids[0])


def draw_without_replacement(logits: F32, draws: Draws, draw: int, width: int) -> tuple[I32, F32, F32]:
    """Sample up to `width` distinct ids: (ids, log-probabilities, both with noise), best first.

    Log-probabilities are those of the distribution after temperature and filters, summing to one. Fewer ids are
    returned where fewer are possible. Source: the Gumbel top-k trick, Kool et al. 2019.
    """
    with np.errstate(over="ignore"):  # a temperature next to nothing leaves only the best
        scaled = (logits - logits.max()) / draws.temperature[draw]
    logprobs = log_softmax(scaled.astype(np.float32)).astype(np.float64)
    allowed = _filtered(logprobs, int(draws.top_k[draw]), float(draws.top_p[draw]), float(draws.min_p[draw]))
    logprobs = np.where(allowed, logprobs, -np.inf)
    logprobs -= np.log(np.exp(logprobs).sum())
    perturbed = logprobs + _gumbel(draws, draw, len(logits))
    order = np.array([np.argmax(perturbed)]) if width == 1 else np.argsort(-perturbed, kind="stable")[:width]
    order = order[logprobs[order] > -np.inf]
    return order.astype(np.int32), logprobs[order].astype(np.float32), perturbed[order].astype(np.float32)


def _gumbel(draws: Draws, draw: int, vocab_size: int) -> NDArray[np.float64]:
    key = mix_one(int(draws.seed[draw]) + mix_one(int(draws.lane[draw]) + mix_one(int(draws.position[draw]))))
    bits = mix(np.arange(vocab_size, dtype=np.uint64) + np.uint64(key)) >> np.uint64(11)
    return -np.log(-np.log((bits.astype(np.float64) + 0.5) / 2**53))


def _filtered(logprobs: NDArray[np.float64], top_k: int, top_p: float, min_p: float) -> NDArray[np.bool_]:
    allowed = np.ones(len(logprobs), bool)
    if not top_k and top_p >= 1.0 and min_p <= 0.0:
        return allowed
    order = np.argsort(-logprobs, kind="stable")
    if 0 < top_k < len(order):
        allowed[order[top_k:]] = False
    if top_p < 1.0:
        kept = np.where(allowed[order], np.exp(logprobs[order]), 0.0)
        before = np.cumsum(kept) - kept
        allowed[order[1:][before[1:] >= top_p * kept.sum()]] = False  # the best always stays
    if min_p > 0.0:
        allowed &= logprobs >= logprobs[order[0]] + np.log(min_p)
    return allowed
