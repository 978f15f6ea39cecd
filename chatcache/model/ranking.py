"""The largest of each row, equal values by ascending id: one order for every draw, whatever the device."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 16  # values that share one maximum in the search for large ones


def top_tokens(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` largest of each row and their ids, best first, equal values by ascending id.

    Shapes: values [N, V] float32 -> [N, size] each. One more is fetched than asked: if it equals the last, `topk`
    chose among equals as it liked, and those rows are looked at again. With bfloat16 logits that is most rows.
    """
    vocab_size = values.shape[-1]
    found, ids = _largest(values, min(size + 1, vocab_size))
    if found.shape[-1] > size:
        tied = (found[:, size] == found[:, size - 1]).nonzero().squeeze(-1)
        found, ids = found[:, :size], ids[:, :size]
        if tied.numel():
            ids[tied] = _first_of_equals(values[tied], found[tied, -1:], size)
            found = values.gather(-1, ids)
    ids, order = ids.sort(-1)
    found, again = found.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return found, ids.gather(-1, again)


def _largest(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return `topk`: of a large row, among the members of the `size` groups with the largest maxima, which hold them.

    Group c is c, c + C, c + 2 C, ...; what is left over at the end is looked at as well.
    """
    num_rows, vocab_size = values.shape
    num_groups = vocab_size // GROUP
    if values.device.type != "cpu" or num_groups < 4 * size:
        found, ids = values.topk(size)
        return found, ids
    whole = values[:, : num_groups * GROUP]
    best = whole.reshape(num_rows, GROUP, num_groups).amax(1).topk(size).indices
    members = torch.arange(0, num_groups * GROUP, num_groups)[:, None]
    rest = torch.arange(num_groups * GROUP, vocab_size).expand(num_rows, -1)
    candidates = torch.cat(((best[:, None] + members).flatten(1), rest), dim=1)
    found, places = values.gather(1, candidates).topk(size)
    return found, candidates.gather(1, places)


def _first_of_equals(values: Tensor, least: Tensor, size: int) -> Tensor:
    """Return the ids of the `size` largest, of equals the first ones, ascending.

    Shapes: values [N, V], least [N, 1], the smallest among them -> [N, size].
    """
    above = ~(values <= least)  # NaN counts as large, as in `topk`
    equal = values == least
    wanted = size - above.sum(-1, keepdim=True, dtype=torch.int32)
    chosen = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= wanted))
    return chosen.nonzero()[:, 1].view(-1, size)
