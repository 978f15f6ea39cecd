"""What the sampling kernels leave, and the `StepResult` it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from chatcache_kernels.triton import sampling
from numpy.typing import NDArray

from chatcache.model.device_jobs import Job
from chatcache.model.filters import Index
from chatcache.model.plain import Parts
from chatcache.model.sampler import NOT_FINITE, NOTHING_LEFT
from chatcache.sched.plan import F32, I32, Draws, StepResult

Arrays = Mapping[str, NDArray[Any]]

MESSAGES = {sampling.NOTHING_LEFT: NOTHING_LEFT, sampling.NOT_FINITE: NOT_FINITE}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a step's draws were sorted into: `jobs` cover the draws, `tops` the rows whose alternatives are reported."""

    draws: Draws
    index: Index
    jobs: tuple[Job, ...]
    tops: Job | None
    vocab_size: int


def download_parts(jobs: Sequence[Job]) -> Parts:
    """Return the arrays that the jobs write, named by what they are and the job's place."""
    parts: Parts = {}
    for place, job in enumerate(jobs):
        count = len(job.which)
        shape = (count, job.size) if job.size else (count,)
        parts |= {f"tokens {place}": (np.int32, shape), f"logprobs {place}": (np.float32, shape)}
        parts[f"faults {place}"] = (np.int32, (count,))
        if job.size:
            parts |= {f"perturbed {place}": (np.float32, shape), f"raw_logprobs {place}": (np.float32, shape)}
    return parts


def result_of(asked: Asked, arrays: Arrays) -> StepResult:
    """Put the jobs' results where their draws are."""
    draws, num_draws = asked.draws, len(asked.index)
    width = np.minimum(draws.width, asked.vocab_size)
    warm = (draws.width > 1) & (draws.temperature > 0)
    tokens = np.full((num_draws, int(width.max(initial=1))), -1, np.int32)
    logprobs = np.full(tokens.shape, -np.inf, np.float32)
    perturbed = np.full((num_draws, tokens.shape[1] if warm.any() else 0), -np.inf, np.float32)
    raw_logprobs = perturbed.copy()
    fault = np.zeros(num_draws, np.int32)
    for place, job in enumerate(asked.jobs):
        which, columns = job.which, slice(max(job.size, 1))
        used = np.arange(max(job.size, 1)) < width[which, None]

        def read(name: str, rest: float, used: NDArray[np.bool_], place: int = place) -> NDArray[Any]:
            return np.where(used, arrays[f"{name} {place}"].reshape(used.shape), rest)

        tokens[which, columns] = read("tokens", -1, used)
        logprobs[which, columns] = read("logprobs", -np.inf, used)
        if job.size and warm[which].any():
            used = used & warm[which, None]
            perturbed[which, columns] = read("perturbed", -np.inf, used)
            raw_logprobs[which, columns] = read("raw_logprobs", -np.inf, used)
        fault[which] = arrays[f"faults {place}"]
    for values, rest in ((tokens, -1), (logprobs, -np.inf), (perturbed, -np.inf), (raw_logprobs, -np.inf)):
        values[fault > 0] = rest
    faults = tuple((int(draw), MESSAGES[int(fault[draw])]) for draw in np.flatnonzero(fault))
    return StepResult(tokens, logprobs, *_tops(asked, arrays), faults, perturbed, raw_logprobs)


def _tops(asked: Asked, arrays: Arrays) -> tuple[I32, F32]:
    """Return the top alternatives of each draw's raw row, [D, L] each."""
    num_top, job = asked.draws.num_top, asked.tops
    size = job.size if job is not None else 0
    tokens = np.full((len(num_top), size), -1, np.int32)
    logprobs = np.full((len(num_top), size), -np.inf, np.float32)
    if job is not None:
        place = len(asked.jobs)
        which = np.flatnonzero(num_top > 0)
        rows = np.searchsorted(job.which, asked.index[which])
        used = np.arange(size) < num_top[which, None]
        tokens[which] = np.where(used, arrays[f"tokens {place}"][rows], -1)
        logprobs[which] = np.where(used, arrays[f"logprobs {place}"][rows], -np.inf)
    return tokens, logprobs
