"""Sampling with Triton kernels, without waiting for the device between operations.

The contract, the order of operations and the noise are those of `sampler`; the kernels are in
`chatcache_kernels.triton.sampling`. Log-probabilities may differ from the CPU's by ulps. One copy brings a step's draws
to the device as tables of numbers (`chatcache_kernels.triton.sampling_ops`), and one copy brings the results back.

The draws of a step are grouped by what one kernel launch can do:

    single    one token each              from raw rows | from edited copies
    wide      several tokens each         from raw rows | from edited copies
    ranking   top alternatives            from raw rows, each row once

`DevicePromptScorer` scores prompt tokens with the same kernels, which read the logits in their own dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from chatcache_kernels.triton import sampling
from chatcache_kernels.triton import sampling_ops as fields
from chatcache_kernels.triton.launch import contiguous_last_dim
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.sampling.ops import (
    WORD_BITS,
    Index,
    draw_keys,
    edits_log_softmax,
    flatten_tables,
    select_draws,
    token_base,
)
from chatcache.model.sampling.sampler import NOT_FINITE, score_targets
from chatcache.model.streams import ArraySpecs, Download, Layout, to_device, upload
from chatcache.types.plan import (
    F32,
    I32,
    I64,
    NOTHING_LEFT,
    Draws,
    LogitEdit,
    LogitMask,
    Rows,
    Scores,
    StepResult,
    edit_table,
)

NUM_FIELDS = fields.NUM_FIELDS

Arrays = Mapping[str, NDArray[Any]]
MESSAGES = {sampling.NO_TOKEN_LEFT: NOTHING_LEFT, sampling.NOT_FINITE: NOT_FINITE}


def filter_limits(draws: Draws, vocab_size: int) -> tuple[I32, F32, F32]:
    """Return top_k, top_p and log(min_p) of each draw; 0, 1 and -inf where a filter is off."""
    warm = draws.temperature > 0
    if not warm.any():
        count = len(warm)
        return np.zeros(count, np.int32), np.ones(count, np.float32), np.full(count, -np.inf, np.float32)
    top_k = np.where(warm & (draws.top_k > 0) & (draws.top_k < vocab_size), draws.top_k, 0).astype(np.int32)
    top_p = np.where(warm, np.minimum(draws.top_p, 1.0), 1.0).astype(np.float32)
    with np.errstate(divide="ignore"):
        floor = np.log(np.where(warm, np.clip(draws.min_p, 0.0, 1.0), 0.0)).astype(np.float32)
    return top_k, top_p, floor


def fill_table(table: NDArray[Any], draws: Draws, rows: NDArray[np.integer[Any]], vocab_size: int) -> None:
    """Write draws into `table`, int32 [NUM_FIELDS, D].

    `rows` [D] are the logits rows of the draws. The caller adds masks, slots and targets.
    """
    for field in (fields.MASK, fields.SLOT, fields.TARGET):
        table[field.value] = -1
    table[fields.ROW.value] = table[fields.RAW_ROW.value] = rows
    table[fields.KEY_LOW.value], table[fields.KEY_HIGH.value] = draw_keys(draws.seed, draws.lane, draws.position)
    table[fields.TEMPERATURE.value] = draws.temperature.astype(np.float32).view(np.int32)
    top_k, top_p, floor = filter_limits(draws, vocab_size)
    table[fields.TOP_K.value] = top_k
    table[fields.TOP_P.value] = top_p.view(np.int32)
    table[fields.LOG_MIN_P.value] = floor.view(np.int32)
    table[fields.FILTERED.value] = (top_k > 0) | (top_p < 1) | (floor > -np.inf)


@dataclass(frozen=True, slots=True)
class SamplingLaunch:
    """Draws of one kernel launch.

    `indices` [N]: the step's draws (for a ranking, logits rows); `table`: int32 [NUM_FIELDS, N]; `size`: tokens per
    draw, 0 for single draws; `edited`: whether they read edited copies of the logits; `has_filters`, `has_limits`: as
    in `sampling.DrawBatch`.
    """

    indices: Index
    table: I32
    size: int
    edited: bool
    has_filters: bool
    has_limits: bool


@dataclass(frozen=True, slots=True)
class Edits:
    """Logit edits as single cells.

    Shapes: sources [E] int64, the raw row of each edited copy; normalised int64, the copies that are turned into a
    log-softmax before they are edited; rows, ids, scale, add [K].
    """

    sources: I64
    normalised: I64
    rows: I32
    ids: I32
    scale: F32
    add: F32

    def arrays(self) -> list[NDArray[Any]]:
        """Return the arrays in the order of the constructor's parameters."""
        return [self.sources, self.normalised, self.rows, self.ids, self.scale, self.add]


def flatten_edits(draws: Draws, index: Index, vocab_size: int) -> tuple[Edits | None, Index]:
    """Return a step's edits if there are any, and the index of each draw's edited copy, [D], -1 for the raw row."""
    copy = np.full(len(index), -1, np.intp)
    if not draws.edits:
        return None, copy
    edited = sorted({edit.draw for edit in draws.edits})
    copy[edited] = np.arange(len(edited))
    draw, table = flatten_tables(draws.edits, vocab_size)
    ids, scale, add = (np.ascontiguousarray(table[name]) for name in ("ids", "scale", "add"))
    normalised = np.flatnonzero(edits_log_softmax(draws)[edited])
    return Edits(index[edited].astype(np.int64), normalised, copy[draw].astype(np.int32), ids, scale, add), copy


def edited_copies(
    raw: Tensor, sources: Tensor, normalised: Tensor, rows: Tensor, ids: Tensor, scale: Tensor, add: Tensor
) -> Tensor:
    """Return edited copies of logits, float32 [E, V]; the other parameters are `Edits` on the device."""
    copies = raw.index_select(0, sources).float()
    if len(normalised):
        copies[normalised] -= copies[normalised].logsumexp(-1, keepdim=True)
    sampling.apply_edits(copies, rows, ids, scale, add)
    return copies


def mask_words(draws: Draws, vocab_size: int) -> tuple[I32 | None, I32]:
    """Return the words of all masks, None without masks, and the mask of each draw.

    Shapes: words int32 [M, ceil(V / 32)]; mask [D], -1 for none.
    """
    mask: I32 = np.full(len(draws.row), -1, np.int32)
    if not draws.masks:
        return None, mask
    words = np.zeros((len(draws.masks), -(-vocab_size // WORD_BITS)), np.uint32)
    for row, each in enumerate(draws.masks):
        size = min(len(each.words), words.shape[1])
        words[row, :size] = each.words[:size]
        mask[each.draw] = row
    return words.view(np.int32), mask


def group_draws(
    draws: Draws, index: Index, copy: Index, mask: I32, slots: I32, vocab_size: int
) -> list[SamplingLaunch]:
    """Group a step's draws by launch.

    Shapes: index, copy, mask, slots [D]; mask and slots are -1 for none.
    """
    kinds = 2 * (copy >= 0) + (draws.width > 1)
    present = sorted(set(kinds.tolist()))
    groups = [np.arange(len(kinds))] if len(present) == 1 else [np.flatnonzero(kinds == kind) for kind in present]
    return [_make_launch(draws, which, index, copy, mask, slots, vocab_size) for which in groups]


def _make_launch(
    draws: Draws, which: Index, index: Index, copy: Index, mask: I32, slots: I32, vocab_size: int
) -> SamplingLaunch:
    some = select_draws(draws, which)
    table = np.zeros((NUM_FIELDS, len(which)), np.int32)
    edited, size = bool(copy[which[0]] >= 0), min(int(some.width.max()), vocab_size)
    fill_table(table, some, copy[which] if edited else index[which], vocab_size)
    table[fields.RAW_ROW.value] = index[which]
    table[fields.MASK.value] = mask[which]
    wide = bool(some.width[0] > 1)
    if wide:
        table[fields.FILTERED.value] |= some.temperature > 0
    else:
        table[fields.SLOT.value] = slots[which]
    has_filters = bool(table[fields.FILTERED.value].any())
    has_limits = bool(table[fields.TOP_K.value].any()) or bool((some.top_p < 1).any())
    return SamplingLaunch(which, table, size if wide else 0, edited, has_filters, has_limits)


def ranking_launch(rows: Index, size: int) -> SamplingLaunch:
    """Return the launch that ranks raw rows; its `indices` are the distinct rows, ascending."""
    which = np.unique(rows)
    table = np.zeros((NUM_FIELDS, len(which)), np.int32)
    table[fields.ROW.value] = table[fields.RAW_ROW.value] = which
    for field in (fields.MASK, fields.SLOT, fields.TARGET):
        table[field.value] = -1
    return SamplingLaunch(which, table, size, edited=False, has_filters=False, has_limits=False)


@dataclass(frozen=True, slots=True)
class StepDraws:
    """A step's draws and their launches.

    `launches` cover the draws; `ranking` covers the rows whose top alternatives are reported.
    """

    draws: Draws
    index: Index
    launches: tuple[SamplingLaunch, ...]
    ranking: SamplingLaunch | None
    vocab_size: int


def output_specs(launches: Sequence[SamplingLaunch]) -> ArraySpecs:
    """Return the dtype and shape of each output array, by name and launch number."""
    parts: ArraySpecs = {}
    for place, launch in enumerate(launches):
        count = len(launch.indices)
        shape = (count, launch.size) if launch.size else (count,)
        parts |= {f"tokens {place}": (np.int32, shape), f"logprobs {place}": (np.float32, shape)}
        parts[f"faults {place}"] = (np.int32, (count,))
        if launch.size:
            parts |= {f"perturbed {place}": (np.float32, shape), f"raw_logprobs {place}": (np.float32, shape)}
    return parts


def result_of(step_draws: StepDraws, arrays: Arrays) -> StepResult:
    """Build the result of a step from the arrays of its launches."""
    draws, num_draws = step_draws.draws, len(step_draws.index)
    if _is_simple(step_draws):
        return _result_of_launch(arrays, num_draws)
    width = np.minimum(draws.width, step_draws.vocab_size)
    warm = (draws.width > 1) & (draws.temperature > 0)
    tokens = np.full((num_draws, int(width.max(initial=1))), -1, np.int32)
    logprobs = np.full(tokens.shape, -np.inf, np.float32)
    perturbed = np.full((num_draws, tokens.shape[1] if warm.any() else 0), -np.inf, np.float32)
    edited = edits_log_softmax(draws)
    raw_logprobs = np.full((num_draws, tokens.shape[1] if edited.any() or warm.any() else 0), -np.inf, np.float32)
    fault = np.zeros(num_draws, np.int32)
    for place, launch in enumerate(step_draws.launches):
        which, columns = launch.indices, slice(max(launch.size, 1))
        used = np.arange(max(launch.size, 1)) < width[which, None]

        def read(name: str, rest: float, used: NDArray[np.bool_], place: int = place) -> NDArray[Any]:
            return np.where(used, arrays[f"{name} {place}"].reshape(used.shape), rest)

        tokens[which, columns] = read("tokens", -1, used)
        logprobs[which, columns] = read("logprobs", -np.inf, used)
        if launch.size and warm[which].any():
            perturbed[which, columns] = read("perturbed", -np.inf, used & warm[which, None])
        if launch.size and raw_logprobs.size:
            raw_logprobs[which, columns] = read("raw_logprobs", -np.inf, used & (warm | edited)[which, None])
        fault[which] = arrays[f"faults {place}"]
    for edit in draws.edits:
        if edited[edit.draw]:
            logprobs[edit.draw] = edited_logprobs(raw_logprobs[edit.draw], tokens[edit.draw], edit)
    for values, rest in ((tokens, -1), (logprobs, -np.inf), (perturbed, -np.inf), (raw_logprobs, -np.inf)):
        values[fault > 0] = rest
    faults = tuple((int(draw), MESSAGES[int(fault[draw])]) for draw in np.flatnonzero(fault))
    return StepResult(tokens, logprobs, *_top_alternatives(step_draws, arrays), faults, perturbed, raw_logprobs)


def _is_simple(step_draws: StepDraws) -> bool:
    """Return whether the outputs of the only launch are the result: draws of width 1, or beams of one width."""
    draws = step_draws.draws
    if len(step_draws.launches) != 1 or step_draws.ranking is not None:
        return False
    is_uniform = not draws.edits and (draws.width == draws.width[0]).all() and not (draws.temperature > 0).any()
    return not step_draws.launches[0].size or bool(is_uniform)


def _result_of_launch(arrays: Arrays, num_draws: int) -> StepResult:
    """Build the result of a step from the arrays of its only launch."""
    fault = arrays["faults 0"]
    tokens, logprobs = (arrays[name].reshape(num_draws, -1).copy() for name in ("tokens 0", "logprobs 0"))
    none = np.empty((num_draws, 0), np.float32)
    faults: tuple[tuple[int, str], ...] = ()
    if fault.any():
        tokens[fault > 0], logprobs[fault > 0] = -1, -np.inf
        faults = tuple((int(draw), MESSAGES[int(fault[draw])]) for draw in np.flatnonzero(fault))
    return StepResult(tokens, logprobs, none.astype(np.int32), none, faults, none, none)


def edited_logprobs(logprobs: F32, tokens: I32, edit: LogitEdit) -> F32:
    """Apply an edit to the log-probabilities of some tokens. Shapes: logprobs, tokens [W]."""
    order = np.argsort(edit.table["ids"])
    at = order[np.minimum(np.searchsorted(edit.table["ids"], tokens, sorter=order), len(order) - 1)]
    rows = edit.table[at]
    found, scale = rows["ids"] == tokens, rows["scale"]
    changed = np.where(logprobs > 0, logprobs / scale, logprobs * scale) + rows["add"]
    return np.where(found, changed, logprobs).astype(np.float32)


def _top_alternatives(step_draws: StepDraws, arrays: Arrays) -> tuple[I32, F32]:
    """Return the top alternatives of each draw's raw row, [D, L] each."""
    num_top, launch = step_draws.draws.num_top, step_draws.ranking
    size = launch.size if launch is not None else 0
    tokens = np.full((len(num_top), size), -1, np.int32)
    logprobs = np.full((len(num_top), size), -np.inf, np.float32)
    if launch is not None:
        place = len(step_draws.launches)
        which = np.flatnonzero(num_top > 0)
        rows = np.searchsorted(launch.indices, step_draws.index[which])
        used = np.arange(size) < num_top[which, None]
        tokens[which] = np.where(used, arrays[f"tokens {place}"][rows], -1)
        logprobs[which] = np.where(used, arrays[f"logprobs {place}"][rows], -np.inf)
    return tokens, logprobs


class DevicePromptScorer:
    """Scores the prompt tokens of a step, part by part. Satisfies `sampler.PromptScorer`.

    Symbols: T scored tokens, L the largest number of alternatives.
    """

    def __init__(self, rows: Rows, scores: Scores, base: Tensor, no_masks: Tensor) -> None:
        self._base = base
        self._no_masks = no_masks  # an argument for masks keeps the kernel variant that draws have compiled
        self._targets, self._num_top = score_targets(rows, scores, len(base))
        count, self._size = len(self._targets), min(int(self._num_top.max(initial=0)), len(base))
        parts = {"logprobs": (np.float32, (count,)), "faults": (np.int32, (count,))}
        ranking = {"top_tokens": (np.int32, (count, self._size)), "top_logprobs": (np.float32, (count, self._size))}
        self._down = Download(Layout({**parts, **ranking}), base.device)
        self._out = self._down.tensors()
        self._filled = 0
        if not count:
            self._down.start()

    def fill(self, logits: Tensor) -> None:
        """Score the next N of the step's prompt tokens; this is only enqueued on the device.

        `logits`: [N, V], any float dtype, of the positions before these tokens.
        """
        raw, num_rows, device = contiguous_last_dim(logits), len(logits), self._base.device
        if not num_rows:
            return
        cells = slice(self._filled, self._filled + num_rows)
        self._filled = cells.stop
        table = ranking_launch(np.arange(num_rows), self._size).table
        table[fields.TARGET.value] = self._targets[cells]
        draws = sampling.DrawBatch(
            raw, raw, self._base, to_device(table, device), self._no_masks, has_filters=False, has_limits=False
        )
        ids, no_slot = torch.empty(2, num_rows, dtype=torch.int32, device=device)
        sampling.draw(draws, no_slot, ids, self._out["logprobs"][cells], self._out["faults"][cells])
        if self._num_top[cells].any():
            perturbed, raw_logprobs = torch.empty(2, num_rows, self._size, device=device)
            tokens, logprobs = self._out["top_tokens"][cells], self._out["top_logprobs"][cells]
            sampling.rank_tokens(
                draws, sampling.RankedTokens(tokens, logprobs, perturbed, raw_logprobs, torch.empty_like(ids))
            )
        if self._filled == len(self._targets):
            self._down.start()

    def add_to(self, result: StepResult) -> StepResult:
        """Wait for the device and return the result with the scores added."""
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


@dataclass(frozen=True, slots=True)
class DeviceDraws:
    """Draws that the device may still be computing. Satisfies `sampler.PendingDraws`."""

    step_draws: StepDraws
    down: Download

    def result(self) -> StepResult:
        """Wait for the device and return the sampled tokens."""
        return result_of(self.step_draws, self.down.wait())


class DeviceSampler:
    """Draws tokens with Triton kernels, with the same results as `Sampler`.

    Its only state is the table of hashed token ids.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, launch_config: sampling.LaunchConfig | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._base = token_base(vocab_size, device)
        self._no_masks = torch.zeros(1, -(-vocab_size // WORD_BITS), dtype=torch.int32, device=device)
        self._launch_config = launch_config or sampling.LaunchConfig()
        self._no_slot = torch.zeros(1, dtype=torch.int32, device=device)

    def warm_up(self, dtype: torch.dtype = torch.float32) -> None:
        """Run every kind of draw on logits of this dtype, so that all kernels are compiled."""
        i32, f32 = np.zeros(4, np.int32), np.zeros(4, np.float32)
        top = np.array([1, 0, 0, 0], np.int32)
        temperature, top_p = np.array([0.0, 1.0, 0.0, 1.0], np.float32), np.array([1.0, 0.9, 1.0, 1.0], np.float32)
        edits = [LogitEdit(draw, edit_table([0], 1.0, 0.0)) for draw in range(4)]
        masks = (LogitMask(0, np.full(-(-self.vocab_size // 32), 0xFFFFFFFF, np.uint32)),)
        logits = torch.zeros(1, self.vocab_size, dtype=dtype, device=self.device)
        for some in ((), tuple(edits)):
            for most in (2, sampling.MAX_SELECTED + 1):
                width = np.array([1, 1, most, most], np.int32)
                seed = i32.astype(np.uint64)
                draws = Draws(i32, width, seed, i32, i32, temperature, i32, top_p, f32, top, some, masks)
                self.sample(logits, np.zeros(4, np.intp), draws)

    def prompt_scorer(self, rows: Rows, scores: Scores) -> DevicePromptScorer:
        """Return the scorer for a step's `Scores`."""
        return DevicePromptScorer(rows, scores, self._base, self._no_masks)

    def sample(self, logits: Tensor, index: Index, draws: Draws) -> StepResult:
        """Return the sampled tokens of every draw.

        Shapes: logits [U, V], any float dtype; index [D], the logits row of each draw.
        """
        return self.enqueue(logits, index, draws).result()

    def enqueue(
        self, logits: Tensor, index: Index, draws: Draws, slots: I32 | None = None, last: Tensor | None = None
    ) -> DeviceDraws:
        """Enqueue the draws on the current stream.

        Shapes: as `sample`; slots [D] and last [slots], any integer type: the slot that stores the token of each draw
        of width 1 for the next step, -1 for none.
        """
        raw = contiguous_last_dim(logits)
        edits, copy = flatten_edits(draws, index, self.vocab_size)
        words, mask = mask_words(draws, self.vocab_size)
        no_slot: I32 = np.full(len(index), -1, np.int32)
        launches = group_draws(draws, index, copy, mask, no_slot if slots is None else slots, self.vocab_size)
        ranking = None
        if num_top := min(int(draws.num_top.max(initial=0)), self.vocab_size):
            ranking = ranking_launch(index[draws.num_top > 0], num_top)
        all_launches = [*launches, ranking] if ranking is not None else launches
        step_draws = StepDraws(draws, index, tuple(launches), ranking, self.vocab_size)
        down = Download(Layout(output_specs(all_launches)), self.device)
        arrays = [launch.table for launch in all_launches]
        arrays += [] if words is None else [words]
        arrays += [] if edits is None else edits.arrays()
        inputs = iter(upload(arrays, self.device))
        tables = list(islice(inputs, len(all_launches)))
        bits = self._no_masks if words is None else next(inputs)
        changed = raw if edits is None else edited_copies(raw, *inputs)
        self._launch(raw, changed, bits, all_launches, tables, self._no_slot if last is None else last, down.tensors())
        down.start()
        return DeviceDraws(step_draws, down)

    def _launch(
        self,
        raw: Tensor,
        changed: Tensor,
        words: Tensor,
        launches: Sequence[SamplingLaunch],
        tables: Sequence[Tensor],
        last: Tensor,
        out: dict[str, Tensor],
    ) -> None:
        for place, (launch, table) in enumerate(zip(launches, tables, strict=True)):
            x = changed if launch.edited else raw
            limits = launch.has_filters, launch.has_limits
            draws = sampling.DrawBatch(x, raw, self._base, table, words, *limits, self._launch_config)
            tokens, logprobs, faults = (out[f"{name} {place}"] for name in ("tokens", "logprobs", "faults"))
            if launch.size:
                perturbed, raw_logprobs = out[f"perturbed {place}"], out[f"raw_logprobs {place}"]
                sampling.rank_tokens(draws, sampling.RankedTokens(tokens, logprobs, perturbed, raw_logprobs, faults))
            else:
                sampling.draw(draws, last, tokens, logprobs, faults)
