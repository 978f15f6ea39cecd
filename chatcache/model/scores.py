"""How likely each prompt token was: log-probabilities of given successors under the raw log-softmax, bit by bit.

A prompt chunk of 2,048 tokens over 150,000 words would be 1.2 GB of float32 logits. So the network hands out logits in
parts of at most `PART_BYTES` (in its own dtype), and each part is scored `CHUNK_BYTES` of float32 at a time. With the
temporaries of log-softmax and ranking a chunk takes about 2 x CHUNK_BYTES, 5 x where equal logits must be ranked:
at most 256 + 80 MiB whatever the prompt, the budget and the vocabulary (as long as one row fits a chunk).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.ranking import top_tokens
from chatcache.model.transfer import to_device
from chatcache.model.vocabulary import log_sum_exp
from chatcache.sched.plan import F32, I32, I64, Rows, Scores, StepResult

PART_BYTES = 256 << 20
CHUNK_BYTES = 16 << 20


def scored_tokens(rows: Rows, scores: Scores) -> I64:
    """Return where among the step's tokens the scored rows' tokens are, row by row. Shape [sum(num_tokens[row])]."""
    ends = np.cumsum(rows.num_tokens, dtype=np.int64)
    spans = [np.arange(ends[row] - rows.num_tokens[row], ends[row]) for row in scores.row]
    return np.concatenate(spans) if spans else np.zeros(0, np.int64)


def part_sizes(num_first: int, num_tokens: int, row_bytes: int) -> list[int]:
    """Cut `num_tokens` rows of logits into parts of at most `PART_BYTES`; the first holds `num_first` at least."""
    most = max(PART_BYTES // row_bytes, 1)
    first = min(max(num_first, most), num_tokens)
    sizes = [first, *[most] * ((num_tokens - first) // most), (num_tokens - first) % most]
    return [size for size in sizes if size] or [0]


def targets_of(rows: Rows, scores: Scores, vocab_size: int) -> tuple[I64, I32]:
    """Return the successor of each scored token, -1 where the logits know none, and how many alternatives to report."""
    targets = np.where(scores.targets < vocab_size, scores.targets, -1).astype(np.int64)
    return targets, np.repeat(scores.num_top, rows.num_tokens[scores.row])


class AnySheet(Protocol):
    """The answer to a step's `Scores`, filled part by part."""

    def fill(self, logits: Tensor) -> None:
        """Take the logits of the next tokens. Shape [N, V], any float dtype."""
        ...

    def add_to(self, result: StepResult) -> StepResult:
        """Return a step's result with the scores, once all are filled in."""
        ...


class ScoreSheet:
    """The answer to a step's `Scores`, filled part by part: `values`, `top_tokens`, `top_logprobs` of StepResult.

    A cell stays nan where there is no target, and where the logits are not finite.
    """

    def __init__(self, rows: Rows, scores: Scores, vocab_size: int) -> None:
        self._targets, self._num_top = targets_of(rows, scores, vocab_size)
        size = min(int(self._num_top.max(initial=0)), vocab_size)
        self._filled = 0
        self.values: F32 = np.full(len(self._targets), np.nan, np.float32)
        self.top_tokens: I32 = np.full((len(self._targets), size), -1, np.int32)
        self.top_logprobs: F32 = np.full((len(self._targets), size), -np.inf, np.float32)

    def add_to(self, result: StepResult) -> StepResult:
        """Return a step's result with the scores."""
        return replace(result, scores=self.values, score_tokens=self.top_tokens, score_logprobs=self.top_logprobs)

    def fill(self, logits: Tensor) -> None:
        """Take the logits of the next tokens. Shape [N, V], any float dtype."""
        rows = max(CHUNK_BYTES // (4 * logits.shape[-1]), 1)
        for chunk in torch.split(logits, rows):
            self._fill(chunk.float())

    def _fill(self, raw: Tensor) -> None:
        cells = slice(self._filled, self._filled + len(raw))
        self._filled = cells.stop
        lse = log_sum_exp(raw)
        targets = self._targets[cells]
        at = to_device(np.maximum(targets, 0), raw.device)[:, None]
        values = (raw.gather(-1, at).squeeze(-1) - lse).cpu().numpy()
        scored = (targets >= 0) & torch.isfinite(lse).cpu().numpy()
        self.values[cells] = np.where(scored, values, np.nan)
        num_top = self._num_top[cells]
        which = np.flatnonzero(scored & (num_top > 0))
        if which.size:
            self._rank(raw, lse, cells.start, which, num_top)

    def _rank(self, raw: Tensor, lse: Tensor, start: int, which: NDArray[np.intp], num_top: NDArray[Any]) -> None:
        rows = to_device(which, raw.device)
        size = self.top_tokens.shape[1]
        values, ids = top_tokens(raw[rows] if len(which) < len(raw) else raw, size)
        used = np.arange(size) < num_top[which, None]
        self.top_tokens[start + which] = np.where(used, ids.cpu().numpy(), -1)
        self.top_logprobs[start + which] = np.where(used, (values - lse[rows, None]).cpu().numpy(), -np.inf)


def fill_all(sheet: AnySheet, parts: Iterable[Tensor]) -> None:
    """Score part after part, holding one of them at a time."""
    for logits in parts:
        sheet.fill(logits)
        del logits
