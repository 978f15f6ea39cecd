"""Turn logits into candidates on a device, with one copy to it and one from it, and without waiting in between.

The contract, the order of things and the noise are those of `sampler`; the kernels are in
`chatcache_kernels.triton.sampling`. Log-probabilities may differ from the CPU's by ulps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from chatcache_kernels.triton import sampling
from chatcache_kernels.triton.launch import dense_last
from torch import Tensor

from chatcache.model.device_jobs import Job, draw_jobs, flat_edits, mask_words, tops_job
from chatcache.model.device_results import Asked, download_parts, result_of
from chatcache.model.device_scores import DeviceScoreSheet
from chatcache.model.download import Download
from chatcache.model.edits import WORD_BITS
from chatcache.model.filters import Index
from chatcache.model.noise import token_base
from chatcache.model.transfer import Layout, to_device, upload
from chatcache.sched.plan import I32, Draws, LogitEdit, LogitMask, Rows, Scores, StepResult


@dataclass(frozen=True, slots=True)
class PendingDraws:
    """Draws that the device is at."""

    asked: Asked
    down: Download

    def result(self) -> StepResult:
        """Wait for the device and return the candidates."""
        return result_of(self.asked, self.down.wait())


class DeviceSampler:
    """Draws candidates by Triton kernels, the same as `Sampler`. Holds only the hashed vocabulary of `noise.py`."""

    def __init__(self, vocab_size: int, device: torch.device, launches: sampling.Launches | None = None) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._base = token_base(vocab_size, device)
        self._no_words = torch.zeros(1, -(-vocab_size // WORD_BITS), dtype=torch.int32, device=device)
        self._launches = launches or sampling.Launches()
        self._nowhere = torch.zeros(1, dtype=torch.int32, device=device)

    def warm_up(self, dtype: torch.dtype = torch.float32) -> None:
        """Draw in every way from logits of this type, so that kernels compile before anyone waits for them."""
        i32, f32 = np.zeros(4, np.int32), np.zeros(4, np.float32)
        top = np.array([1, 0, 0, 0], np.int32)
        temperature, top_p = np.array([0.0, 1.0, 0.0, 1.0], np.float32), np.array([1.0, 0.9, 1.0, 1.0], np.float32)
        edits = [LogitEdit(draw, i32[:1], f32[:1] + 1, f32[:1]) for draw in range(4)]
        masks = (LogitMask(0, np.full(-(-self.vocab_size // 32), 0xFFFFFFFF, np.uint32)),)
        logits = torch.zeros(1, self.vocab_size, dtype=dtype, device=self.device)
        for some in ((), tuple(edits)):
            for most in (2, sampling.MOST_SELECTED + 1):
                width = np.array([1, 1, most, most], np.int32)
                seed = i32.astype(np.uint64)
                draws = Draws(i32, width, seed, i32, i32, temperature, i32, top_p, f32, top, some, masks)
                self.sample(logits, np.zeros(4, np.intp), draws)
        self._warm_up_plain(logits)

    def _warm_up_plain(self, logits: Tensor) -> None:
        """Draw as `KernelDraws` does: a step that cannot be captured runs the same kernels."""
        table = to_device(tops_job(np.zeros(1, np.intp), 1).table, self.device)
        draws = sampling.Draws(logits, logits, self._base, table, None, True, self._launches)
        ids, faults = torch.empty(2, 1, dtype=torch.int32, device=self.device)
        sampling.draw(draws, self._nowhere, ids, torch.empty(1, device=self.device), faults)

    def sheet(self, rows: Rows, scores: Scores) -> DeviceScoreSheet:
        """Return where a step's `Scores` are filled in."""
        return DeviceScoreSheet(rows, scores, self._base, self._no_words)

    def sample(self, logits: Tensor, index: Index, draws: Draws) -> StepResult:
        """Return the candidates of every draw.

        Shapes: logits [U, V], any float dtype; index [D], the logits row of each draw.
        """
        return self.enqueue(logits, index, draws).result()

    def enqueue(
        self, logits: Tensor, index: Index, draws: Draws, slots: I32 | None = None, last: Tensor | None = None
    ) -> PendingDraws:
        """Begin to draw, behind what the current stream has been given.

        Shapes: as `sample`; slots [D] and last [slots], any integer type: where the token of each draw of width 1 is
        kept for the next step, -1 for nowhere.
        """
        raw = dense_last(logits)
        edits, copy = flat_edits(draws, index, self.vocab_size)
        words, mask = mask_words(draws, self.vocab_size)
        nowhere: I32 = np.full(len(index), -1, np.int32)
        jobs = draw_jobs(draws, index, copy, mask, nowhere if slots is None else slots, self.vocab_size)
        reported = index[draws.num_top > 0]
        tops = tops_job(reported, min(int(draws.num_top.max(initial=0)), self.vocab_size)) if len(reported) else None
        every = [*jobs, tops] if tops is not None else jobs
        asked = Asked(draws, index, tuple(jobs), tops, self.vocab_size)
        down = Download(Layout(download_parts(every)), self.device)
        sources, rows, ids, scale, add, bits, *tables = upload(
            (edits.sources, edits.rows, edits.ids, edits.scale, edits.add, words, *(job.table for job in every)),
            self.device,
        )
        changed = raw
        if len(edits.sources):
            changed = raw.index_select(0, sources).float()
            sampling.edit(changed, rows, ids, scale, add)
        self._launch(raw, changed, bits, every, tables, self._nowhere if last is None else last, down.tensors())
        down.start()
        return PendingDraws(asked, down)

    def _launch(
        self,
        raw: Tensor,
        changed: Tensor,
        words: Tensor,
        jobs: Sequence[Job],
        tables: Sequence[Tensor],
        last: Tensor,
        out: dict[str, Tensor],
    ) -> None:
        for place, (job, table) in enumerate(zip(jobs, tables, strict=True)):
            x = changed if job.edited else raw
            draws = sampling.Draws(x, raw, self._base, table, words, job.cuts, self._launches)
            tokens, logprobs, faults = (out[f"{name} {place}"] for name in ("tokens", "logprobs", "faults"))
            if job.size:
                perturbed, raw_logprobs = out[f"perturbed {place}"], out[f"raw_logprobs {place}"]
                sampling.rank(draws, sampling.Ranked(tokens, logprobs, perturbed, raw_logprobs, faults))
            else:
                sampling.draw(draws, last, tokens, logprobs, faults)
