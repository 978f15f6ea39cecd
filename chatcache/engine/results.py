"""What a runner answered, read with suspicion: a wrong shape ends the step's requests, a wrong cell its own."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from chatcache.decode.actions import Candidates
from chatcache.sched.plan import F32, I32, Draws, StepPlan, StepResult

Bools = NDArray[np.bool_]


def check_shapes(plan: StepPlan, result: StepResult) -> None:
    """Verify that the result's arrays have the shapes that `StepResult` promises.

    Raises: ValueError naming the first that has not; nothing in the result can then be told apart.
    """
    draws = plan.draws
    num_draws = len(draws.row)
    width, num_top = int(draws.width.max(initial=0)), int(draws.num_top.max(initial=0))
    _check_pair("tokens", result.tokens, result.logprobs, num_draws, width)
    _check_pair("top_tokens", result.top_tokens, result.top_logprobs, num_draws, num_top)
    if ((draws.width > 1) & (draws.temperature > 0)).any():
        for name, values in (("perturbed", result.perturbed), ("raw_logprobs", result.raw_logprobs)):
            if values is None or values.shape != result.tokens.shape:
                raise ValueError(
                    f"{name} has shape {None if values is None else values.shape}, not {result.tokens.shape}"
                )
    if any(not 0 <= draw < num_draws for draw, _ in result.faults):
        raise ValueError(f"a fault names a draw beyond the {num_draws} of the plan")
    if plan.scores is not None:
        count = len(plan.scores.targets)
        if result.scores is None or result.score_tokens is None or result.score_logprobs is None:
            raise ValueError("scores were asked for and are missing")
        if result.scores.shape != (count,):
            raise ValueError(f"scores have shape {result.scores.shape}, not {(count,)}")
        _check_pair("score_tokens", result.score_tokens, result.score_logprobs, count,
                    int(plan.scores.num_top.max(initial=0)))  # fmt: skip


def _check_pair(name: str, tokens: I32, logprobs: F32, num_rows: int, num_columns: int) -> None:
    shape = tokens.shape
    if len(shape) != 2 or shape[0] != num_rows or shape[1] < num_columns or logprobs.shape != shape:
        raise ValueError(
            f"{name} has shape {shape}, its log-probabilities {logprobs.shape}; not {num_rows, num_columns}"
        )
    if tokens.dtype.kind not in "iu":
        raise ValueError(f"{name} are {tokens.dtype}, not token ids")


def some_of(result: StepResult, which: I32) -> StepResult:
    """Return these draws of the result of a step that drew one token from each row."""
    places = {draw: place for place, draw in enumerate(which.tolist())}
    return replace(
        result,
        tokens=result.tokens[which],
        logprobs=result.logprobs[which],
        top_tokens=result.top_tokens[which],
        top_logprobs=result.top_logprobs[which],
        faults=tuple((places[draw], message) for draw, message in result.faults if draw in places),
    )


def bad_draws(draws: Draws, result: StepResult, vocab_size: int) -> list[tuple[int, str]]:
    """Find the draws whose cells no model of `vocab_size` tokens can have meant, each with what is wrong.

    Unused cells (id -1) are fine behind at least one that is used.
    """
    tokens, logprobs = result.tokens, result.logprobs
    if not len(tokens):
        return []
    wrong = _impossible(tokens, logprobs, vocab_size)
    wrong[:, 0] |= tokens[:, 0] < 0
    if tokens.shape[1] > 1:
        wrong &= np.arange(tokens.shape[1]) < draws.width[:, None]
    if result.top_tokens.shape[1]:
        wrong = np.hstack([wrong, _impossible(result.top_tokens, result.top_logprobs, vocab_size)])
    if not wrong.any():
        return []
    return [(draw, _complaint(draw, result, vocab_size)) for draw in np.flatnonzero(wrong.any(axis=1)).tolist()]


def _impossible(tokens: I32, logprobs: F32, vocab_size: int) -> Bools:
    return (tokens >= vocab_size) | (tokens < -1) | ((tokens >= 0) & np.isnan(logprobs))


def _complaint(draw: int, result: StepResult, vocab_size: int) -> str:
    ids = np.concatenate([result.tokens[draw], result.top_tokens[draw]])
    unknown = ids[(ids >= vocab_size) | (ids < -1)]
    if unknown.size:
        return f"the model answered with token id {int(unknown[0])}; its vocabulary ends at {vocab_size - 1}"
    return "the log-probabilities are not numbers" if result.tokens[draw, 0] >= 0 else "no token was drawn"


def candidates_of(draws: Draws, result: StepResult) -> list[Candidates]:
    """Turn the result's arrays into one `Candidates` per draw, without its unused cells (id -1)."""
    if result.tokens.shape[1] == 1 and result.top_tokens.shape[1] == 0:
        pairs = zip(result.tokens[:, 0].tolist(), result.logprobs[:, 0].tolist(), strict=True)
        return [Candidates((token,), (logprob,)) for token, logprob in pairs]
    tokens, logprobs = result.tokens.tolist(), result.logprobs.tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if result.top_tokens.shape[1]:
        tops = alternatives(result.top_tokens, result.top_logprobs)
    noisy, raw = _rows(result.perturbed, len(tokens)), _rows(result.raw_logprobs, len(tokens))
    candidates: list[Candidates] = []
    for draw, (ids, width) in enumerate(zip(tokens, draws.width.tolist(), strict=True)):
        used = min(width, ids.index(-1) if ids[-1] == -1 else len(ids))
        candidates.append(
            Candidates(
                tuple(ids[:used]),
                tuple(logprobs[draw][:used]),
                tops[draw],
                tuple(noisy[draw][:used]),
                tuple(raw[draw][:used]),
            )
        )
    return candidates


def _rows(values: F32 | None, num_draws: int) -> list[list[float]]:
    """Return the rows that are in use, the others as empty lists."""
    if values is None or not values.shape[1]:
        return [[]] * num_draws
    return [row if row[0] > -inf else [] for row in values.tolist()]


def alternatives(tokens: I32, logprobs: F32) -> list[tuple[tuple[int, float], ...]]:
    """Pair up ids and log-probabilities, row by row, without unused cells. Shapes: [N, L] both."""
    rows = zip(tokens.tolist(), logprobs.tolist(), strict=True)
    return [tuple(pair for pair in zip(*row, strict=True) if pair[0] >= 0) for row in rows]
