"""Operations of sampling: Gumbel noise, ranking, row reductions, filters, edits and masks.

The noise depends only on (seed, lane, position, token id), not on batch, worker, order or restart. Its definition (all
integers unsigned, wrapping; exact on every device, in numpy, torch and Triton alike):

    mix64(x): x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
    mix32(x): x ^= x >> 16; x *= 0x21F0AAAD;         x ^= x >> 15; x *= 0x735A2D97;         x ^= x >> 15

    key   = mix64(mix64(seed + 0x9E3779B97F4A7C15) ^ (lane << 32 | position))          once a draw, 64 bit
    base  = mix32(token_id + 0x9E3779B9)                                               once a vocabulary, 32 bit
    bits  = mix32((base ^ low32(key)) * (high32(key) | 1)) & 0x7FFFFFFF
    v     = min((bits + 0.5) * 2^-31, 1 - 2^-24)                                       float32, uniform in (0, 1)
    noise = -log(-log1p(-v))                                                           standard Gumbel

argmax(logit + noise) draws from softmax(logit). Small v gives large noise, and float32 is finest near 0, so tokens down
to a probability of about 1e-9 are drawn with the right frequency. The logarithms may differ by an ulp between devices.

Row reductions use the CPU's own kernels on CPUs, and torch elsewhere, where numba is not imported. No bit of a row's
result depends on the other rows, their number or the number of threads. torch divides rows among threads, but a single
row is summed in one part per thread, so its last bits would depend on the threads; `_pad_single_row` avoids that.

Equal logits are ranked by ascending token id on every device. Filters read scaled logits: divided by the temperature
and shifted so that the largest is 0.

Shapes: x [N, K] float32; values per row [N]. Symbols: S draws, V vocabulary.
Source: the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014); mix64 is the finaliser of SplitMix64 (Steele et al.
2014), mix32 the two-round multiply-xorshift hash with the least measured bias (Wellons, hash-prospector).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.streams import to_device
from chatcache.types.plan import F32, I32, I64, U64, Draws, EditTable, LogitEdit, LogitMask

_GOLDEN64 = np.uint64(0x9E3779B97F4A7C15)
_GOLDEN32 = 0x9E3779B9
_LARGEST = 1.0 - 2.0**-24

Index = NDArray[np.intp]
Flags = NDArray[np.bool_]
MIN_CANDIDATES = 256
WORD_BITS = 32


def draw_keys(seed: U64, lane: I32, position: I32) -> tuple[I32, I32]:
    """Return the low and the (odd) high key word of each draw. Shapes: all [D]."""
    place = lane.astype(np.uint32).astype(np.uint64) << np.uint64(32) | position.astype(np.uint32).astype(np.uint64)
    with np.errstate(over="ignore"):
        key = _mix64(_mix64(seed.astype(np.uint64) + _GOLDEN64) ^ place)
    low = (key & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (key >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    return low.view(np.int32), high.view(np.int32)


def token_base(vocab_size: int, device: torch.device) -> Tensor:
    """Return the hashed token ids, int32 [V], which all draws share."""
    ids = torch.arange(vocab_size, dtype=torch.int64, device=device) + _GOLDEN32
    return _mix32_(ids.to(torch.int32))


def gumbel(base: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32 [D, K].

    Shapes: base [V], or [D, K] for selected tokens; low, high [D] int32 from `draw_keys`.
    """
    if base.device.type == "cpu":
        from chatcache_kernels.cpu import sampling as cpu_sampling

        return cpu_sampling.gumbel(base, low, high)
    bits = torch.bitwise_xor(base, low[:, None]).mul_(high[:, None])
    uniform = _mix32_(bits).bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix64(x: U64) -> U64:
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def _mix32_(x: Tensor) -> Tensor:
    """Hash int32 in place.

    int32 multiplication wraps, and a mask turns the arithmetic shift into a logical one.
    """
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x21F0AAAD)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x735A2D97)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))


def top_tokens(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` largest values of each row and their ids, best first.

    Equal values are ranked by ascending id. With torch, one more value than needed is fetched: if it equals the last
    one, `topk` chose among equals arbitrarily, and the row is ranked again. With bfloat16 logits most rows are.
    Shapes: values [N, V] float32 -> [N, size] each.
    """
    if values.device.type == "cpu":
        from chatcache_kernels.cpu import sampling as cpu_sampling

        if size <= cpu_sampling.MAX_TOP:
            return cpu_sampling.top_tokens(values, size)
    found, ids = values.topk(min(size + 1, values.shape[-1]))
    if found.shape[-1] > size:
        tied = (found[:, size] == found[:, size - 1]).nonzero().squeeze(-1)
        found, ids = found[:, :size], ids[:, :size]
        if tied.numel():
            ids[tied] = _first_of_equals(values[tied], found[tied, -1:], size)
            found = values.gather(-1, ids)
    ids, order = ids.sort(-1)
    found, again = found.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return found, ids.gather(-1, again)


def _first_of_equals(values: Tensor, smallest: Tensor, size: int) -> Tensor:
    """Return the ids of the `size` largest values, ascending; of equal values the first ones.

    Shapes: values [N, V], smallest [N, 1], the smallest value to include -> [N, size].
    """
    above = ~(values <= smallest)  # NaN counts as large, as in `topk`
    equal = values == smallest
    wanted = size - above.sum(-1, keepdim=True, dtype=torch.int32)
    chosen = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= wanted))
    return chosen.nonzero()[:, 1].view(-1, size)


def row_sum(x: Tensor) -> Tensor:
    """Return the sum of each row."""
    return _pad_single_row(x).sum(-1)[: len(x)]


def log_sum_exp(x: Tensor) -> Tensor:
    """Return the logarithm of each row's sum of exponentials."""
    if x.device.type == "cpu":
        from chatcache_kernels.cpu import sampling as cpu_sampling

        return cpu_sampling.log_sum_exp(x)
    return _pad_single_row(x).logsumexp(-1)[: len(x)]


def argmax(x: Tensor) -> Tensor:
    """Return the index of each row's largest value, int64; the first of equals."""
    if x.device.type == "cpu":
        from chatcache_kernels.cpu import sampling as cpu_sampling

        return cpu_sampling.argmax(x)
    return x.argmax(-1)


def gumbel_argmax(x: Tensor, base: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the index of the largest x + `gumbel` of each row, int64.

    Shapes: base [K]; low, high [N] int32.
    """
    return (x + gumbel(base, low, high)).argmax(-1)


def draw_tokens(logits: Tensor, index: Index, draws: Draws, base: Tensor) -> tuple[I32, F32] | None:
    """Return the tokens and log-probabilities of the draws, if they are all simple and on a CPU; else None.

    Simple: of width 1, without edits, masks and alternatives, and without a large top_k. A token is -1 where the logits
    are not finite. Shapes: logits [U, V]; index [D]; base [V].
    """
    if logits.device.type != "cpu" or draws.edits or draws.masks:
        return None
    from chatcache_kernels.cpu import sampling as cpu_sampling

    return cpu_sampling.draw_tokens(logits, index, draws.arrays()[1:], base)


def apply_temperature(x: Tensor, temperature: Tensor) -> Tensor:
    """Return (x - largest of its row) / temperature. Shapes: temperature [N] float32."""
    if x.device.type == "cpu":
        from chatcache_kernels.cpu import sampling as cpu_sampling

        return cpu_sampling.apply_temperature(x, temperature)
    return (x - x.amax(-1, keepdim=True)) / temperature[:, None]


def mass_before(x: Tensor, chosen: Tensor, floor: Tensor) -> Tensor:
    """Return the share of each row's probability mass that ranks before `chosen`.

    Equal values rank by index; values of x below `floor` do not count. Shapes: chosen [N] int64, floor [N] float32.
    """
    value, positions = x.gather(-1, chosen[:, None]), torch.arange(x.shape[1], device=x.device)
    ahead = (x > value) | ((x == value) & (positions < chosen[:, None]))
    weight = x.exp().masked_fill_(x < floor[:, None], 0.0)
    return row_sum(weight * ahead) / row_sum(weight)


def _pad_single_row(x: Tensor) -> Tensor:
    """Repeat a single row, so that torch does not split its sum among threads."""
    return x.expand(2, -1) if len(x) == 1 and torch.get_num_threads() > 1 else x


class Filters:
    """min_p, top_k and top_p for one vocabulary on one device.

    The filters are exact, and most draws need no sorting of the vocabulary.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device

    def has_top_k(self, draws: Draws) -> Flags:
        """Return which draws have a top_k that can drop tokens."""
        flags: Flags = (draws.top_k > 0) & (draws.top_k < self.vocab_size)
        return flags

    def split_by_top_k(self, draws: Draws) -> list[Index]:
        """Return the draws that `draw_tokens` supports by their top_k, and the others; only groups with a draw."""
        if self.device.type != "cpu":
            return [np.arange(len(draws.row))]
        from chatcache_kernels.cpu import sampling as cpu_sampling

        is_large = self.has_top_k(draws) & (draws.top_k > cpu_sampling.MAX_TOP)
        return [which for which in (np.flatnonzero(~is_large), np.flatnonzero(is_large)) if which.size]

    def has_filter(self, draws: Draws) -> Flags:
        """Return which draws have any filter."""
        flags: Flags = self.has_top_k(draws) | (draws.top_p < 1) | (draws.min_p > 0)
        return flags

    def accepts(self, scaled: Tensor, chosen: Tensor, draws: Draws) -> Flags:
        """Return whether `chosen`, the best of all tokens, passes min_p and top_p.

        It is then also the best of the tokens that pass, and nothing needs to be sorted. Shapes: scaled [S, V], chosen
        [S].
        """
        floor, top_p = self._floor(draws), self._to_device(draws.top_p)
        before = mass_before(scaled, chosen, floor.squeeze(-1))
        kept = (scaled.gather(-1, chosen[:, None]) >= floor).squeeze(-1) & ((before < top_p) | (top_p >= 1))
        passed: Flags = kept.cpu().numpy()
        return passed

    def filtered_candidates(self, scaled: Tensor, draws: Draws, which: Index) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """Yield (draws, values, ids) of the tokens that pass the filters.

        Each of the draws `which` is in one of the yielded groups. Shapes: scaled [S, V]; values, ids [s, K], best
        first, dropped tokens at -inf. K is as small as exactness allows.
        """
        remaining = which
        size = max(MIN_CANDIDATES, int(draws.top_k[remaining[self.has_top_k(draws)[remaining]]].max(initial=0)))
        while remaining.size:
            size = min(size, self.vocab_size)
            values, ids, covered = self._cut(scaled[self._to_device(remaining)], select_draws(draws, remaining), size)
            if covered.all():
                yield remaining, values, ids
                return
            ready = self._to_device(np.flatnonzero(covered))
            yield remaining[covered], values[ready], ids[ready]
            remaining, size = remaining[~covered], self.vocab_size

    def _cut(self, scaled: Tensor, draws: Draws, size: int) -> tuple[Tensor, Tensor, Flags]:
        """Apply min_p, top_k and top_p to the `size` most likely tokens.

        Return (values, ids) [S, size], dropped tokens at -inf, and covered [S]: whether `size` was enough to be exact.
        """
        if (draws.min_p > 0).any():
            scaled = scaled.masked_fill(scaled < self._floor(draws), -torch.inf)
        limited = self.has_top_k(draws)
        values, ids = top_tokens(scaled, size)
        rank = torch.arange(size, device=self.device)
        limit = self._to_device(np.where(limited, draws.top_k, size))[:, None]
        values = values.masked_fill(rank >= limit, -torch.inf)
        covered = limited | (size == self.vocab_size) | torch.isneginf(values[:, -1]).cpu().numpy()
        if (draws.top_p < 1).any():
            weight = values.exp()
            cumulative = weight.cumsum(-1)  # sequential, so the sums do not depend on `size`
            total = torch.where(self._to_device(limited), cumulative[:, -1], row_sum(scaled.exp()))
            before = (cumulative - weight) / total[:, None]
            top_p = self._to_device(draws.top_p.astype(np.float32))[:, None]
            dropped = (before >= top_p) & (top_p < 1) & (rank > 0)
            covered |= dropped[:, -1].cpu().numpy()
            values = values.masked_fill(dropped, -torch.inf)
        return values, ids, covered

    def _floor(self, draws: Draws) -> Tensor:
        """Return the smallest scaled logit that passes min_p, [S, 1]; the largest logit is 0."""
        with np.errstate(divide="ignore"):
            return self._to_device(np.log(np.maximum(draws.min_p, 0.0)).astype(np.float32))[:, None]

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self.device)


def select_draws(draws: Draws, which: Index) -> Draws:
    """Return some of the draws, without edits and masks."""
    return draws if len(which) == len(draws.row) else draws.select(which)


def edits_log_softmax(draws: Draws) -> Flags:
    """Return which draws edit the log-softmax instead of the logits: those of beam search."""
    flags = np.zeros(len(draws.row), bool)
    flags[[edit.draw for edit in draws.edits]] = True
    flags &= (draws.width > 1) & (draws.temperature <= 0)
    return flags


def flatten_tables(edits: Sequence[LogitEdit], vocab_size: int) -> tuple[I64, EditTable]:
    """Return the rows of all edits whose ids are in the vocabulary, and the draw that each belongs to.

    The tokenizer's EOS id may be outside the model's vocabulary.
    """
    table = np.concatenate([edit.table for edit in edits])
    draw = np.repeat([edit.draw for edit in edits], [len(edit.table) for edit in edits])
    in_vocab = (table["ids"] >= 0) & (table["ids"] < vocab_size)
    return (draw, table) if in_vocab.all() else (draw[in_vocab], table[in_vocab])


def apply_edits(logits: Tensor, edits: Sequence[LogitEdit]) -> None:
    """Apply all logit edits in place. Shapes: logits [D, V] float32, one row per draw."""
    if not edits:
        return
    draw, table = flatten_tables(edits, logits.shape[-1])

    def to_logits_device(array: NDArray[Any]) -> Tensor:
        return to_device(np.ascontiguousarray(array), logits.device)

    at = to_logits_device(draw), to_logits_device(table["ids"].astype(np.int64))
    old, by = logits[at], to_logits_device(table["scale"])
    logits[at] = torch.where(old > 0, old / by, old * by) + to_logits_device(table["add"])


def apply_masks(logits: Tensor, masks: Sequence[LogitMask]) -> None:
    """Set tokens that the masks forbid to -inf, in place.

    Shapes: logits [D, V] float32, one row per draw.
    """
    if not masks:
        return
    words = np.zeros((len(masks), -(-logits.shape[-1] // WORD_BITS)), np.uint32)
    for row, mask in enumerate(masks):
        size = min(len(mask.words), words.shape[1])
        words[row, :size] = mask.words[:size]
    forbidden = _forbidden(words, logits.shape[-1], logits.device)
    draws = [mask.draw for mask in masks]
    if draws == list(range(len(logits))):
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        at = to_device(np.array(draws, np.int64), logits.device)
        logits[at] = logits[at].masked_fill_(forbidden, -torch.inf)


def _forbidden(words: NDArray[np.uint32], vocab_size: int, device: torch.device) -> Tensor:
    """Return the tokens whose bits are not set. Shapes: words [M, W] -> bool [M, V].

    Only the words are copied to the device.
    """
    bytes_ = (~words).astype("<u4").view(np.uint8)
    if device.type == "cpu":
        flags = np.unpackbits(bytes_, axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(flags.view(np.bool_))
    bits = to_device(bytes_, device)[:, :, None].bitwise_and(2 ** torch.arange(8, dtype=torch.uint8, device=device))
    return bits.view(len(words), -1)[:, :vocab_size] != 0
