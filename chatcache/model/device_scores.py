"""Score prompt tokens on a device without waiting for it: every part leaves its numbers there, and one copy brings all.

The contract is that of `scores`. The kernels read the logits as they are, so no float32 copy of a part is made.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from chatcache_kernels.triton import sampling
from chatcache_kernels.triton import sampling_rows as fields
from chatcache_kernels.triton.launch import dense_last
from torch import Tensor

from chatcache.model.device_jobs import tops_job
from chatcache.model.download import Download
from chatcache.model.scores import targets_of
from chatcache.model.transfer import Layout, to_device
from chatcache.sched.plan import Rows, Scores, StepResult


class DeviceScoreSheet:
    """The answer to a step's `Scores`, filled part by part. Symbols: T scored tokens, L the most alternatives."""

    def __init__(self, rows: Rows, scores: Scores, base: Tensor, no_words: Tensor) -> None:
        self._base = base
        self._no_words = no_words  # so that the kernels are those that draws have compiled
        self._targets, self._num_top = targets_of(rows, scores, len(base))
        count, self._size = len(self._targets), min(int(self._num_top.max(initial=0)), len(base))
        parts = {"logprobs": (np.float32, (count,)), "faults": (np.int32, (count,))}
        tops = {"top_tokens": (np.int32, (count, self._size)), "top_logprobs": (np.float32, (count, self._size))}
        self._down = Download(Layout({**parts, **tops}), base.device)
        self._out = self._down.tensors()
        self._filled = 0
        if not count:
            self._down.start()

    def fill(self, logits: Tensor) -> None:
        """Enqueue the scores of the next tokens. Shape [N, V], any float dtype."""
        raw, num_rows, device = dense_last(logits), len(logits), self._base.device
        if not num_rows:
            return
        cells = slice(self._filled, self._filled + num_rows)
        self._filled = cells.stop
        table = tops_job(np.arange(num_rows), self._size).table
        table[fields.TARGET.value] = self._targets[cells]
        draws = sampling.Draws(raw, raw, self._base, to_device(table, device), self._no_words, cuts=False)
        ids, nowhere = torch.empty(2, num_rows, dtype=torch.int32, device=device)
        sampling.draw(draws, nowhere, ids, self._out["logprobs"][cells], self._out["faults"][cells])
        if self._num_top[cells].any():
            perturbed, raw_logprobs = torch.empty(2, num_rows, self._size, device=device)
            tokens, logprobs = self._out["top_tokens"][cells], self._out["top_logprobs"][cells]
            sampling.rank(draws, sampling.Ranked(tokens, logprobs, perturbed, raw_logprobs, torch.empty_like(ids)))
        if self._filled == len(self._targets):
            self._down.start()

    def add_to(self, result: StepResult) -> StepResult:
        """Wait for the device and return the result with the scores."""
        found = self._down.wait()
        healthy = found["faults"] != sampling.NOT_FINITE
        scored = (self._targets >= 0) & healthy
        used = scored[:, None] & (np.arange(self._size) < self._num_top[:, None])
        return replace(
            result,
            scores=np.where(scored, found["logprobs"], np.float32(np.nan)),
            score_tokens=np.where(used, found["top_tokens"], np.int32(-1)),
            score_logprobs=np.where(used, found["top_logprobs"], np.float32(-np.inf)),
        )
